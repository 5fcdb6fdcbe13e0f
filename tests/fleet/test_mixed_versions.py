"""Two versions of the package run at the same time on one database and one Redis, as during a deployment.

The old one is the latest tag whose package is another than that of the last commit. Until there is one, it is the last
commit, and the new one is the same with a column and a migration more.

Producers, workers and migrations are processes with the code of one of the two. This process has the code of the last
commit, so it only reads columns that both have.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from django_asyncq import gates
from django_asyncq.models import Occurrence, TaskRecord, TaskState

from ..workers import PATIENCE_SECONDS, ROOT, environment, history, wait_until

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
    dependencies = [("django_asyncq", "{last}")]
    operations = [
        migrations.AddField(
            "taskrecord",
            "created_by_newer",
            models.CharField(blank=True, max_length=20, default="", db_default="new"),
        )
    ]
"""
GATE, GATE_LIMIT = "mixed", 3
# As many as a producer enqueues in each phase at least.
ROUNDS = 5
# How many attempts each kind of task needs; those of a batch have no line of their own in the history.
ATTEMPTS = {"plain": 1, "delayed": 1, "unique": 1, "retried": 2, "gated": 2}
KINDS = (*ATTEMPTS, "batched")
RUNS = ("stamp", "begin", "fail_until")


# --- The two versions


def git(*arguments: str) -> str:
    """Run git in this repository; return what it prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def old_tag() -> str:
    """Return the latest tag before the last commit whose package is another, "" if there is none."""
    package = git("ls-tree", "HEAD", "django_asyncq")
    tags = git("-c", "versionsort.suffix=rc", "tag", "--merged", "HEAD", "--sort=-v:refname").splitlines()
    return next((tag for tag in tags if git("ls-tree", tag, "django_asyncq") not in ("", package)), "")


def tree_of(revision: str, folder: Path) -> Path:
    """Write the files of a revision into a folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def last_migration(tree: Path) -> str:
    """Return the name of a version's last migration."""
    return max(path.stem for path in (tree / "django_asyncq/migrations").glob("0*.py"))


def with_a_column_more(tree: Path) -> Path:
    """Give the row of a version a column that the last commit does not know."""
    model = tree / MODEL
    text = model.read_text()
    place = text.index("    class Meta:", text.index("class TaskRecord("))
    model.write_text(text[:place] + FIELD + "\n" + text[place:])
    last = last_migration(tree)
    name = f"{int(last[:4]) + 1:04}_a_column_more"
    (tree / f"django_asyncq/migrations/{name}.py").write_text(MIGRATION.format(last=last))
    return tree


def manage(tree: Path, *arguments: str) -> None:
    """Run a command of Django with the code of a tree."""
    command = [sys.executable, "-m", "django", *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environment(PYTHONPATH=str(tree)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The old and the new version; the database has the old one's tables, and at the end those of this process."""
    tag = old_tag()
    old = tree_of(tag or "HEAD", tmp_path / "old")
    new = tree_of("HEAD", tmp_path / "new")
    ours = last_migration(new)
    if tag:
        manage(new, "migrate", "django_asyncq", last_migration(old))
    else:
        with_a_column_more(new)
    yield old, new
    manage(new, "migrate", "django_asyncq", ours)
    shutil.rmtree(old)
    shutil.rmtree(new)


# --- Their processes


def run(tree: Path, log: Path, *command: str, **streams: Any) -> subprocess.Popen[str]:
    """Start a Python process with the code of a tree."""
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=tree,
            env=environment(PYTHONPATH=str(tree)),
            text=True,
            **{"stdout": output, "stderr": output, **streams},
        )


@contextmanager
def stopped_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop a process that a failure of the test has left running."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()


@contextmanager
def workers_of(tree: Path, log: Path) -> Iterator[None]:
    """A worker process with the code of a tree; it is stopped in order at the end, and has logged no error."""
    process = run(tree, log, "-m", "django", "runworkers", "--processes", "1", "--worker-id", log.stem)
    with stopped_at_the_end(process):
        wait_until(lambda: " started: " in log.read_text(), f"worker of {log.stem}")
        yield
        process.terminate()
        code = process.wait(PATIENCE_SECONDS)
    text = log.read_text()
    assert code == 0 and "Traceback" not in text and "ERROR" not in text, text


class Producer:
    """A process that enqueues until it is stopped. made: its file of what it has enqueued."""

    def __init__(self, process: subprocess.Popen[str], made: Path, log: Path) -> None:
        self.process, self.made, self.log = process, made, log

    def rounds(self) -> list[dict[str, list[str]]]:
        """Return the ids of each round by kind. A round that is being written is not there yet."""
        assert self.process.poll() in (None, 0), self.log.read_text()
        return [json.loads(line) for line in self.made.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def ids(self, *kinds: str, since: int = 0) -> list[str]:
        """Return the ids of all tasks of these kinds, from a round on."""
        return [id for each in self.rounds()[since:] for kind in kinds for id in each[kind] if id]

    def wait_for_load(self) -> None:
        """Wait until some more rounds are enqueued, and until what was due of them has succeeded."""
        first = len(self.rounds())
        wait_until(lambda: len(self.rounds()) >= first + ROUNDS, f"load from {self.log.stem}")
        wait_until_succeeded(self.ids(*(kind for kind in KINDS if kind != "delayed"), since=first))

    def stop(self) -> None:
        """Stop it after its round; it has logged nothing."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(PATIENCE_SECONDS)
        assert (code, self.log.read_text()) == (0, "")


@contextmanager
def producer_of(tree: Path, log: Path) -> Iterator[Producer]:
    """A producer with the code of a tree."""
    made = log.with_suffix(".jsonl")
    # Without -P, modules beside the file would stand before those of the same name elsewhere.
    command = ("-P", str(ROOT / "tests/mixed_producer.py"), tree.name, GATE, str(GATE_LIMIT))
    with made.open("w") as output:
        process = run(tree, log, *command, stdin=subprocess.PIPE, stdout=output)
    with stopped_at_the_end(process):
        yield Producer(process, made, log)


# --- What must hold


def wait_until_succeeded(ids: list[str]) -> None:
    """Wait until all tasks have succeeded; fail at once when one has failed."""

    def have_succeeded() -> bool:
        rows = TaskRecord.objects.filter(id__in=ids, finished_at__isnull=False)
        failed = list(rows.filter(state=TaskState.FAILED).values("name", "errors", "worker_ids"))
        assert not failed, failed
        return rows.count() == len(ids)

    wait_until(have_succeeded, "success of all tasks")


def check_runs(lines: list[dict[str, Any]], producers: list[Producer]) -> None:
    """Each attempt of each task ran once, and each call of the batches."""
    expected = Counter(
        (id, attempt)
        for producer in producers
        for kind, attempts in ATTEMPTS.items()
        for id in producer.ids(kind)
        for attempt in range(1, attempts + 1)
    )
    scheduled = {str(id) for id in Occurrence.objects.values_list("task_id", flat=True)}
    ran = [(line["id"], line.get("attempt", 1)) for line in lines if line.get("event") in RUNS]
    assert Counter(run for run in ran if run[0] not in scheduled) == expected
    calls = Counter((call["account"], call["number"]) for line in lines for call in line.get("kwargs", []))
    assert calls == Counter(
        (producer.log.stem.removesuffix("_web"), number)
        for producer in producers
        for number in range(len(producer.ids("batched")))
    )


def check_schedule(lines: list[dict[str, Any]]) -> None:
    """Each second had its occurrence, and the task of each ran once if it has succeeded, else not at all."""
    found = list(Occurrence.objects.order_by("occurs_at").values_list("occurs_at", "outcome", "task_id"))
    assert {outcome for _, outcome, _ in found} == {"queued"}
    steps = {later[0] - earlier[0] for earlier, later in pairwise(found)}
    assert steps == {timedelta(seconds=1)}
    succeeded = TaskRecord.objects.filter(state=TaskState.SUCCEEDED).values_list("id", flat=True)
    done = set(succeeded) & {id for _, _, id in found}
    ran = Counter(line["id"] for line in lines if line.get("event") == "stamp")
    assert {str(id): ran[str(id)] for _, _, id in found} == {str(id): int(id in done) for _, _, id in found}


def most_at_once(lines: list[dict[str, Any]], ids: list[str]) -> int:
    """Return how many of these tasks were admitted at a time at most, as far as the history shows.

    A task is admitted from "in", or from the beginning of a run, until the end of the run. An "in" after that says
    nothing: the producer was slower than the worker.
    """
    wanted, begun, since, changes = set(ids), set(), {}, []
    for line in sorted(lines, key=lambda line: line.get("at", 0)):
        id, event = line.get("id"), line.get("event")
        if id not in wanted:
            continue
        if event == "begin" or (event == "in" and id not in begun):
            since.setdefault(id, line["at"])
        if event == "begin":
            begun.add(id)
        elif event == "end":
            changes += [(since.pop(id), 1), (line["at"], -1)]
    at_once = most = 0
    for _, change in sorted(changes):
        at_once += change
        most = max(most, at_once)
    return most


def hosts(ids: list[str]) -> set[str]:
    """Return the versions of the workers that ran these tasks."""
    rows = TaskRecord.objects.filter(id__in=ids).values_list("worker_ids", flat=True)
    return {worker.split(":")[0] for workers in rows for worker in workers}


def test_old_and_new_processes_share_the_work_while_the_schema_changes(
    trees: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the guide, under load: migrate, workers, web processes. Each task runs once, and limits hold."""
    old, new = trees
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    with ExitStack() as stack:
        old_workers = stack.enter_context(ExitStack())
        old_workers.enter_context(workers_of(old, tmp_path / "old.log"))
        old_web = stack.enter_context(producer_of(old, tmp_path / "old_web.log"))
        old_web.wait_for_load()
        # The producers go on during each of the next steps.
        manage(new, "migrate", "django_asyncq")
        old_web.wait_for_load()
        new_workers = stack.enter_context(ExitStack())
        new_workers.enter_context(workers_of(new, tmp_path / "new.log"))
        old_web.wait_for_load()
        old_workers.close()
        old_web.wait_for_load()
        new_web = stack.enter_context(producer_of(new, tmp_path / "new_web.log"))
        new_web.wait_for_load()
        old_web.stop()
        new_web.wait_for_load()
        new_web.stop()
        producers = [old_web, new_web]
        wait_until_succeeded([id for producer in producers for id in producer.ids(*KINDS)])
        wait_until(lambda: not gates.slots(GATE), "end of the last slot of the gate")
        new_workers.close()
    lines = history(path)
    check_runs(lines, producers)
    check_schedule(lines)
    for kind, limit in (("gated", GATE_LIMIT), ("unique", 1)):
        refusals = [id for producer in producers for each in producer.rounds() for id in each[kind] if not id]
        assert refusals, f"no call of {kind} was refused, so the limit has not been tried"
        assert 0 < most_at_once(lines, [id for producer in producers for id in producer.ids(kind)]) <= limit, kind
    for kind in KINDS:
        assert hosts(old_web.ids(kind)) == {"old", "new"}, kind
        assert hosts(new_web.ids(kind)) == {"new"}, kind
