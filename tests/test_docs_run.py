"""The examples of the docs run: those of the guides that are followed as a project elsewhere, and here all others.

Those in Go and PHP are only read by people: no compiler of theirs is at hand.
"""

from __future__ import annotations

import configparser
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from django.db import connection, transaction
from django.template import Context, Template
from django.urls import include, path

from django_asyncq.definitions.inbox_documents import read_document

from . import tasks
from .docs_runner import FOLLOWED, ROOT, pages
from .test_docs import blocks_of

# Many pages take a second; the process starts a Valkey of its own.
SECONDS = 100


def outcomes() -> Iterator[tuple[str, str]]:
    """Yield each page, and the traceback of its first example that failed; "" for none."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs_runner"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    for line in done.stdout.splitlines():
        if line.startswith('{"page"'):
            found = json.loads(line)
            yield found["page"], found["error"]


def test_every_python_example_of_the_docs_runs() -> None:
    """Page by page, each example knowing those before it."""
    found = dict(outcomes())
    assert found.keys() == pages().keys()
    failed = {page: error for page, error in found.items() if error}
    assert not failed, "\n".join(failed.values())


def test_pages_that_are_not_run_here_are_followed_elsewhere() -> None:
    """By name, in the tests that type them as a project."""
    source = "".join(
        (Path(__file__).parent / name).read_text() for name in ("test_testing_guide.py", "test_coming_from.py")
    )
    for page in FOLLOWED:
        assert f'"{page}.md"' in source
    assert "coming-from" in source


# --- other languages

ROW = pytest.mark.django_db(transaction=True)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the page and the text of each block of a language."""
    return [(page.name, block) for page in sorted((ROOT / "docs").rglob("*.md")) for block in blocks_of(page, language)]


@pytest.mark.parametrize(
    ("language", "read"),
    [
        ("json", json.loads),
        ("yaml", yaml.safe_load),
        ("toml", tomllib.loads),
        ("ini", lambda text: configparser.ConfigParser(interpolation=None).read_string(text)),
    ],
)
def test_documents_in_the_docs_can_be_read(language: str, read: Callable[[str], object]) -> None:
    """By a program that expects this language."""
    found = blocks(language)
    assert found
    for page, block in found:
        try:
            read(block)
        except Exception as error:
            raise AssertionError(f"{page}: {error}") from error


@pytest.mark.skipif(shutil.which("node") is None, reason="node was not found")
def test_the_javascript_of_the_inbox_pushes_a_document_that_is_a_task(tmp_path: Path) -> None:
    """With a client in the place of npm's `redis` that prints what it is to push."""
    ((_, block),) = blocks("js")
    package = tmp_path / "node_modules" / "redis"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"name": "redis", "type": "module", "main": "index.js"}')
    (package / "index.js").write_text(
        "export const createClient = ({url}) => ({connect: async () => ({lPush: async (...all) => "
        "console.log(JSON.stringify([url, ...all]))})});"
    )
    (tmp_path / "push.mjs").write_text(block)
    done = subprocess.run(["node", "push.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    address, key, document = json.loads(done.stdout)
    assert address.startswith("redis://") and key == "asynq:{mails}:inbox"
    read = read_document(document.encode(), largest_bytes=1_000, max_depth=5)
    assert (read.task, read.kwargs) == ("shop.tasks.send_mail", {"user_id": 7})


@ROW
def test_templates_in_the_docs_are_rendered(settings: Any) -> None:
    """With the result of a task."""
    settings.ROOT_URLCONF = ModuleType("urls")
    settings.ROOT_URLCONF.urlpatterns = [
        path("tasks/", include("django_asyncq.urls")),
        path("invoices/<uuid:id>/", lambda request, id: None, name="invoice-status"),
    ]
    result = tasks.add.enqueue(1, 2)
    result.refresh()
    found = [Template(block).render(Context({"result": result})) for _, block in blocks("html")]
    assert len(found) == 2
    assert 'data-url="/tasks/' in found[0] and f'hx-get="/invoices/{result.id}/"' in found[1]


@ROW
@pytest.mark.skipif(connection.vendor != "postgresql", reason="they are for PostgreSQL")
def test_sql_in_the_docs_runs() -> None:
    """And changes nothing here, since it is rolled back."""
    found = blocks("sql")
    assert len(found) == 2
    for _, block in found:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("CREATE ROLE shop_worker")
            cursor.execute(block)
            transaction.set_rollback(True)
