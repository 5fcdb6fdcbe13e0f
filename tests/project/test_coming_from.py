"""The guides "Coming from …": our part is a project whose tests pass; the other queue's part is Python.

A block that the other queue needs says so in its first line, after the file: "with Celery", or "with both" for the time
when both run. The other queues are not installed in CI. With ASYNCQ_TEST_PEERS, the Python of an environment that has
them, their blocks are imported as a project, and the versions that the pages name are compared with what is there:
`ASYNCQ_TEST_PEERS=…/bin/python python runtests.py -n 0 -m long tests/project/test_coming_from.py`.
`pip install` what the heads of the pages name, with Django 6 or later for django-tasks-db (choose with `-k`).
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import redis
from django.utils.module_loading import import_string

from django_asyncq.backend import AsyncqBackend
from django_asyncq.models import TaskRecord
from django_asyncq.testing import EmbeddedRedis

from .test_docs import ROOT, all_blocks_of
from .test_testing_guide import PLACE, Project

FOLDER = ROOT / "docs" / "guides" / "coming-from"
PAGES = sorted(FOLDER.glob("*.md"))
# Our part of Celery's page, and that of all others, which is the same.
OURS = [FOLDER / "celery.md", FOLDER.parent / "moving-over.md"]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
# The command that shows both queues during a move, and how each old queue is counted.
BOTH = FOLDER.parent / "both-queues.md"
# The file of a block, and whose it is: None is ours.
FIRST_LINE = re.compile(r"(# [\w/]+\.py(?:, at the end)?)(?:, with ([\w -]+))?(, on Django [\d.]+)?\n")
# What the head of a page says, such as "Checked on 2026-11-27 against celery 5.7.0 and flower 2.2.0."
CHECKED = re.compile(r"^Checked on (\d{4}-\d\d-\d\d) against (.*?)\.\n", re.MULTILINE | re.DOTALL)
NAMED_VERSION = re.compile(r"([a-z][\w-]*) (\d+(?:\.\d+)+)")


class Block(NamedTuple):
    """A block of Python: its text without the owner, and the owner: "" is this package."""

    text: str
    owner: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of Python of a page, in order."""
    for language, code in all_blocks_of(page):
        if language == "python":
            first = FIRST_LINE.match(f"{code}\n")
            assert first, f"no first line says where this belongs:\n{code}"
            yield Block(FIRST_LINE.sub(r"\1\3\n", f"{code}\n", count=1), first[2] or "")


@pytest.fixture(scope="module")
def new_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A new project with an empty app and the test settings of "Getting started"."""
    project = Project(tmp_path_factory.mktemp("coming"), "redis://127.0.0.1:6379/0")
    (settings,) = (
        code
        for _, code in all_blocks_of(ROOT / "docs" / "guides" / "getting-started.md")
        if code.startswith("# mysite/test_settings.py")
    )
    project.write(settings)
    return project


def copy_of(project: Project, folder: Path) -> Project:
    """Return a copy of a project in another folder; it has no files of a page yet."""
    shutil.copytree(project.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    copy = object.__new__(Project)
    copy.__dict__.update(project.__dict__, folder=folder, files=set(), printed={})
    return copy


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.stem)
@pytest.mark.timeout(120)
def test_our_part_is_a_project_whose_tests_pass(page: Path, new_project: Project, tmp_path: Path) -> None:
    """Every file of ours is imported, and every test of the page passes."""
    project = copy_of(new_project, tmp_path)
    for block in blocks(page):
        if not block.owner:
            assert PLACE.match(block.text), block.text
            project.write(block.text)
    project.run("python manage.py test --settings mysite.test_settings")
    (printed,) = project.printed.values()
    in_classes, functions = project.names_of_tests()
    assert in_classes
    assert functions == []
    assert re.search(rf"Ran {len(in_classes)} tests? .*\nOK\n", printed, re.DOTALL), printed
    assert project.never_imported() == set()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of `.ci/run` that follows Celery's page."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("moved_from_celery")


def test_the_script_of_ci_finds_what_it_reads_from_the_page(script: ModuleType) -> None:
    """How beat is started, how the schedules are listed, the instant and the interval."""
    text = OURS[0].read_text()
    for pattern in (script.BEAT, script.LIST, script.INSTANT, script.INTERVAL):
        assert pattern.search(text), pattern.pattern
    owners = {found[2] for _, block in all_blocks_of(OURS[0]) if (found := script.WITH.match(f"{block}\n"))}
    assert owners == {"Celery", "both"}


OWNERS = {
    "celery": "Celery",
    "django-q2": "django-q2",
    "django-rq": "django-rq",
    "django-tasks-db": "django-tasks-db",
    "dramatiq": "dramatiq",
    "huey": "huey",
}


def place_both_queues(project: Project, owner: str) -> None:
    """Write the command that shows both queues, for the old queue of this owner."""
    (project.folder / "shop" / "management" / "commands").mkdir(parents=True, exist_ok=True)
    chosen = [block for block in blocks(BOTH) if block.owner in ("", owner)]
    assert len(chosen) == 2
    for block in chosen:
        project.write(block.text)


def shown(printed: str) -> dict[str, list[int]]:
    """Return the numbers that `python manage.py both_queues` has printed last, by queue."""
    *_, last = re.findall(r"^ +waits +runs +later\n(old .*)\n(new .*)\n", printed, re.MULTILINE)
    return {line.split()[0]: [int(number) for number in line.split()[1:]] for line in last}


def test_both_queues_are_for_the_queues_of_all_pages() -> None:
    """Each page has a file there, which is Python and leaves our package alone."""
    assert {page.stem for page in PAGES} == OWNERS.keys()
    theirs = [block for block in blocks(BOTH) if block.owner]
    assert sorted(block.owner for block in theirs) == sorted(OWNERS.values())
    for block in theirs:
        assert "django_asyncq" not in block.text
        ast.parse(block.text)


@pytest.mark.timeout(120)
def test_both_queues_are_shown(new_project: Project, tmp_path: Path) -> None:
    """In a project with both: what Celery has left in its Redis, its lists for priorities included, and our rows."""
    with EmbeddedRedis() as server, redis.Redis.from_url(f"{server.url.rpartition('/')[0]}/0") as broker:
        project = copy_of(new_project, tmp_path)
        project.address = server.url.rpartition("/")[0]
        for block in blocks(OURS[1]):
            if not block.owner:
                project.write(block.text)
        settings = project.folder / "mysite" / "settings.py"
        settings.write_text(f"{settings.read_text()}\nCELERY_BROKER_URL = {project.address + '/0'!r}\n")
        place_both_queues(project, "Celery")
        project.run("python manage.py migrate -v 0")
        project.run('python manage.py shell -v 0 -c "from shop.orders import pay; pay(7); pay(8); pay(9)"')
        broker.lpush("celery", "a", "b")
        broker.lpush("celery\x06\x166", "c")
        for number, eta in enumerate((None, "2020-01-01T00:00:00+00:00", "9000-01-01T00:00:00+00:00")):
            broker.hset("unacked", str(number), json.dumps([{"headers": {"eta": eta}}, "", "celery"]))
        project.run("python manage.py both_queues")
        assert shown(project.printed["python manage.py both_queues"]) == {"old": [3, 2, 1], "new": [3, 0, 3]}
        # With the old queue empty, the command that waits for that returns.
        broker.delete("celery", "celery\x06\x166", "unacked")
        waiting = "python manage.py both_queues --until-old-is-empty"
        project.run(waiting)
        assert shown(project.printed[waiting]) == {"old": [0, 0, 0], "new": [3, 0, 3]}
        # Both files were imported, so the page's are those that ran.
        assert not {"old_queue.py", "both_queues.py"} & project.never_imported()


@EACH_PAGE
def test_the_other_queues_part_is_python(page: Path) -> None:
    """It can be read by Python, and imports nothing of this package except the project's own tasks."""
    theirs = [block.text for block in blocks(page) if block.owner]
    assert theirs
    # A page without a part of ours leads to the one that has it.
    assert page in OURS or ("moving-over.md" in page.read_text() and len(theirs) == len(list(blocks(page))))
    for text in theirs:
        for node in ast.walk(ast.parse(text)):
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_asyncq"))


def sides(page: Path) -> tuple[str, str]:
    """Return the code before and after the change with which a page begins."""
    (language, change), *_rest = all_blocks_of(page)
    assert language == "diff"
    lines = change.splitlines()
    before, after = ["\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-"]
    return before, after


@EACH_PAGE
def test_page_begins_with_the_smallest_case(page: Path, transactional_db: None) -> None:
    """Its old side is Python; its new side enqueues a task, or is the settings."""
    before, after = sides(page)
    ast.parse(before)
    module = ModuleType(f"tests.smallest_{page.stem.replace('-', '_')}")
    exec(compile(after, str(page), "exec"), module.__dict__)  # our own page
    if page.stem == "django-tasks-db":
        assert import_string(module.__dict__["TASKS"]["default"]["BACKEND"]) is AsyncqBackend
    else:
        assert [row.args for row in TaskRecord.objects.filter(name=f"{module.__name__}.send_receipt")] == [[7]]


@EACH_PAGE
def test_page_says_what_it_was_checked_against(page: Path) -> None:
    """A date and at least one version stand at its head, and its length is that of a page."""
    lines = page.read_text().splitlines()
    assert len(lines) < (300 if page.stem == "celery" else 180)
    found = CHECKED.search("\n".join(lines[:8]) + "\n")
    assert found
    assert NAMED_VERSION.findall(found[2])


# --- with the other queues installed


def peers() -> str:
    """Return the Python that has the other queues; without one the test is skipped."""
    if not (python := os.environ.get("ASYNCQ_TEST_PEERS")):
        pytest.skip("ASYNCQ_TEST_PEERS names no Python that has the other queues")
    return python


def output_of(python: str, code: str, *, cwd: Path) -> str:
    """Run code with another Python in a project, and return what it prints. Raises: AssertionError with its error."""
    done = subprocess.run(
        [python, "-c", code],
        cwd=cwd,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "mysite.settings", "PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@EACH_PAGE
@pytest.mark.long
def test_the_other_queues_part_can_be_imported(page: Path, new_project: Project, tmp_path: Path) -> None:
    """The project with the other queue starts, and each of its modules can be imported."""
    python, project = peers(), copy_of(new_project, tmp_path)
    (project.folder / "mysite" / "test_settings.py").unlink()
    for block in blocks(page):
        if block.owner and block.owner != "both":
            project.write(block.text)
    modules = sorted(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in project.files)
    code = f"import django, importlib; django.setup(); [importlib.import_module(name) for name in {modules}]"
    output_of(python, code, cwd=project.folder)


@EACH_PAGE
@pytest.mark.long
def test_versions_are_those_that_are_installed(page: Path, tmp_path: Path) -> None:
    """The versions at its head are those that are installed."""
    python = peers()
    found = CHECKED.search(page.read_text())
    assert found
    versions = dict(NAMED_VERSION.findall(found[2]))
    code = f"from importlib.metadata import version; print({{name: version(name) for name in {list(versions)}}})"
    assert ast.literal_eval(output_of(python, code, cwd=tmp_path)) == versions


# What makes one call that waits and one that is due later, and what the old queue then shows without a worker of its
# own: Celery's and huey's look at the delay of a call when they take it.
CALLS = {
    **dict.fromkeys(OWNERS, ("from shop.orders import pay; pay(7)", [1, 0, 1])),
    "celery": ("from shop.tasks import send_receipt as s; s.delay(7); s.apply_async((7,), countdown=600)", [2, 0, 0]),
    "huey": ("from shop.orders import pay; pay(7)", [2, 0, 0]),
}


@EACH_PAGE
@pytest.mark.long
def test_what_the_old_queue_has_is_counted(page: Path, new_project: Project, tmp_path: Path) -> None:
    """By the file of `both-queues.md`, in the small project of the page."""
    python, project = peers(), copy_of(new_project, tmp_path)
    (project.folder / "mysite" / "test_settings.py").unlink()
    with EmbeddedRedis() as server:
        project.address = server.url.rpartition("/")[0]
        port = project.address.rpartition(":")[2]
        texts = [block.text for block in blocks(page) if block.owner == OWNERS[page.stem]]
        texts += [block.text for block in blocks(BOTH) if block.owner == OWNERS[page.stem]]
        for text in texts:
            project.write(text.replace('"port": 6379', f'"port": {port}'))
        setup = "import django; django.setup(); from django.core.management import call_command; "
        output_of(python, f"{setup}call_command('migrate', verbosity=0)", cwd=project.folder)
        calls, expected = CALLS[page.stem]
        counted = f"{setup}{calls}; from shop.old_queue import old_queue; print(list(old_queue()))"
        printed = output_of(python, counted, cwd=project.folder)
        assert ast.literal_eval(printed.splitlines()[-1]) == expected
