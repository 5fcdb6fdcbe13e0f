"""Two versions of the package run at the same time on one database and one Redis, as during a deployment.

The old one is the latest tag. Until there is one, it is the last commit, and the new one is the same with a column and
a migration more.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from django_asyncq.models import TaskRecord, TaskState

from . import tasks
from .workers import ROOT, environment, history, wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.faults,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive of the sources has no history"),
]
MODEL = "django_asyncq/models/tasks.py"
FIELD = "    created_by_newer = models.CharField(max_length=20, blank=True, default='', db_default='new')\n"
MIGRATION = """from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_asyncq", "0001_initial")]
    operations = [
        migrations.AddField(
            "taskrecord",
            "created_by_newer",
            models.CharField(blank=True, max_length=20, default="", db_default="new"),
        )
    ]
"""
ROUNDS, PER_ROUND = 30, 10


def git(*arguments: str) -> str:
    """Run git in this repository; return what it prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def latest_tag() -> str:
    """Return the latest tag, "" if there is none."""
    return (git("tag", "--sort=-v:refname").splitlines() or [""])[0]


def tree_of(revision: str, folder: Path) -> Path:
    """Write the files of a revision into a folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def with_a_column_more(folder: Path) -> Path:
    """Copy the last commit, and give its row a column that the old version does not know."""
    tree = tree_of("HEAD", folder)
    model = tree / MODEL
    text = model.read_text()
    place = text.index("    class Meta:", text.index("class TaskRecord("))
    model.write_text(text[:place] + FIELD + "\n" + text[place:])
    (tree / "django_asyncq/migrations/0002_a_column_more.py").write_text(MIGRATION)
    return tree


def manage(tree: Path, *arguments: str) -> None:
    """Run a command of Django with the code of a tree."""
    command = [sys.executable, "-m", "django", *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environment(PYTHONPATH=str(tree)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def workers_of(tree: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Worker processes with the code of a tree; they are stopped in order at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "runworkers", "--processes", "2", "--worker-id", log.stem],
            cwd=tree,
            env=environment(PYTHONPATH=str(tree)),
            stdout=output,
            stderr=output,
            text=True,
        )
    try:
        wait_until(lambda: log.read_text().count(" started: ") == 2, f"workers of {log.stem}")
        yield process
    finally:
        process.terminate()
        assert process.wait(40) == 0, log.read_text()


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The old and the new version; the database has the old one's tables, at the end too."""
    tag = latest_tag()
    old = tree_of(tag or "HEAD", tmp_path / "old")
    new = tree_of("HEAD", tmp_path / "new") if tag else with_a_column_more(tmp_path / "new")
    last_of_old = sorted(each.stem for each in (old / "django_asyncq/migrations").glob("0*.py"))[-1]
    manage(new, "migrate", "django_asyncq", last_of_old)
    yield old, new
    manage(new, "migrate", "django_asyncq", last_of_old)
    if tag:
        manage(new, "migrate", "django_asyncq")
    shutil.rmtree(new)


def test_old_and_new_workers_share_the_work_while_the_schema_changes(
    trees: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the guide, under load: migrate, add new workers, stop the old ones. Each task runs once."""
    old, new = trees
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    ids: list[str] = []

    def load() -> None:
        for _ in range(ROUNDS):
            ids.extend(tasks.stamp.enqueue().id for _ in range(PER_ROUND))
            time.sleep(0.02)

    with ExitStack() as stack:
        old_workers = stack.enter_context(ExitStack())
        old_workers.enter_context(workers_of(old, tmp_path / "old.log"))
        load()
        manage(new, "migrate", "django_asyncq")
        load()
        stack.enter_context(workers_of(new, tmp_path / "new.log"))
        load()
        # Both work until here; the old ones drain while tasks come.
        old_workers.close()
        load()
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == len(ids), "all tasks")
    counts = Counter(line["id"] for line in history(path) if line["event"] == "stamp")
    assert counts == dict.fromkeys(ids, 1)
    hosts = {each[0].split(":")[0] for each in TaskRecord.objects.values_list("worker_ids", flat=True)}
    assert hosts == {"old", "new"}
    for name in ("old", "new"):
        text = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in text and "ERROR" not in text, text
