"""The examples and the commands of the docs run, here unless a project elsewhere follows their page."""

from __future__ import annotations

import configparser
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from django.db import connection, transaction
from django.template import Context, Template
from django.urls import include, path

from django_asyncq.interop.inbox import read_document
from django_asyncq.testing import EmbeddedRedis

from .. import docs_commands, tasks
from ..docs_go import ASYNQ, INBOX
from ..docs_runner import FOLLOWED, ROOT, pages
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


# --- commands


@pytest.mark.timeout(4 * SECONDS)
def test_every_command_of_the_docs_runs() -> None:
    """In a project with workers, unless a table says what runs it; so a new kind of command fails here."""
    command = [sys.executable, "-m", "tests.docs_commands"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=3 * SECONDS)
    finally:
        # Its workers end with it, also when it takes too long.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-2_000:]
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"page"')]
    wanted = docs_commands.run_here()
    assert [(each["page"], each["command"]) for each in found] == [(each.page, each.text) for each in wanted]
    # In blocks, in prose, and in a crontab, a Procfile and a unit of systemd.
    assert {each.is_typed for each in wanted} == {True, False}
    written = {each.text for each in docs_commands.commands()}
    assert written >= {
        "python manage.py asyncq alerts check --send",
        "python manage.py runworkers --multi-instance",
        "python manage.py runworkers --processes 4 --concurrency 8",
    }
    failed = [f"{each['page']}: {each['command']}: {each['error']}" for each in found if each["error"]]
    assert not failed, "\n".join(failed)


def files_called(name: str) -> list[Path]:
    """Return the tests of this name, the scripts of `.ci`, and what has this path."""
    places = (ROOT / name, ROOT / ".ci" / name, *(ROOT / "tests").rglob(name))
    return [path for path in places if path.is_file()]


def test_commands_that_are_run_elsewhere_are() -> None:
    """Each row of the tables is used, and the scripts are those of `.ci/run`, or tests that name the page."""
    every = list(docs_commands.commands())
    assert {each.page for each in every} >= docs_commands.FOLLOWED.keys()
    ci = (ROOT / ".ci" / "run").read_text()
    for page, script in docs_commands.FOLLOWED.items():
        name = page.rpartition("/")[2]
        # The script of the containers is given the folder, since it reads their Compose file too.
        given = f"python {script} docs "
        is_given = f"/{name}.md " in ci.partition(f"python {script}")[2].partition("\n")[0] or given in ci
        assert is_given or f'"{name}.md"' in (ROOT / script).read_text(), page
    others = [each for each in every if not each.is_typed or each.page not in docs_commands.FOLLOWED]
    for start, where in docs_commands.ELSEWHERE.items():
        assert any(each.text.startswith(start) for each in others), start
        for name in re.findall(r"`([^`]+)`", where):
            (file,) = files_called(name)
            assert start.split()[-1] in file.read_text() or start.startswith("pip install"), where


@pytest.fixture
def docker_image(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of `.ci/run` that reads the page on containers."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("docker_image")


def test_every_line_of_the_page_on_containers_is_known_to_its_script(docker_image: ModuleType) -> None:
    """With or without Docker."""
    lines = docker_image.lines_of(ROOT / "docs" / "guides" / "containers.md")
    written = [each.text for each in docs_commands.commands() if each.page == "containers" and each.is_typed]
    assert lines == written and len(lines) >= 4
    in_containers = [docker_image.command_in_container(line, {"workers", "web"}) for line in lines]
    assert [words[:4] for words in in_containers if words] == [["python", "manage.py", "asyncq", "health"]]


@pytest.mark.parametrize(
    "line",
    [
        "docker compose frobnicate --nonsense",
        "docker compose up --nonsense",
        "docker compose up --wait --scale workerz=3",
        "docker compose up --wait --scale",
        "docker compose up --wait; rm -r /",
        "docker compose exec workerz python manage.py asyncq health",
        "docker compose exec workers sh",
        "docker compose",
        "docker run shop",
        "printf 'SECRET_KEY=%s' \"$(rm -r /)\" > .env",
        "systemctl restart workers",
    ],
)
def test_the_script_of_the_containers_refuses_a_line_that_it_does_not_know(line: str, docker_image: ModuleType) -> None:
    """Before it runs anything."""
    with pytest.raises(SystemExit, match="line of the page"):
        docker_image.command_in_container(line, {"workers", "web"})


@pytest.mark.parametrize(
    "written", ["SECRET_KEY=a\nPOSTGRES_PASSWORD=\n", "SECRET_KEY=a\n", "SECRET_KEY=a\nPOSTGRES_PASWORD=b\n"]
)
def test_secrets_that_compose_would_miss_are_refused(written: str, docker_image: ModuleType, tmp_path: Path) -> None:
    """In the file that the page's first command writes."""
    shutil.copy(ROOT / "docs" / "deployment" / "compose.yml", tmp_path)
    (tmp_path / ".env").write_text("SECRET_KEY=a\nPOSTGRES_PASSWORD=b\n")
    assert docker_image.secrets_of(tmp_path) == {"SECRET_KEY": "a", "POSTGRES_PASSWORD": "b"}
    (tmp_path / ".env").write_text(written)
    with pytest.raises(SystemExit, match=r"requires .* in \.env"):
        docker_image.secrets_of(tmp_path)


# What reads the blocks of each language. Text is what a program prints, or a file of another program.
LANGUAGES = {
    "sh": "docs_commands.py",
    "python": "docs_runner.py",
    "diff": "test_coming_from.py",
    "dockerfile": "docker_image.py",
    "go": "test_docs_run.py",
    "html": "test_docs_run.py",
    "ini": "test_docs_run.py",
    "js": "test_docs_run.py",
    "json": "test_docs_run.py",
    "php": "test_docs_run.py",
    "sql": "test_docs_run.py",
    "toml": "test_docs_run.py",
    "yaml": "test_docs_run.py",
    "text": "docs_commands.py",
    "{toctree}": "test_site.py",
}


def test_a_block_of_each_language_is_read_by_something() -> None:
    """So a block of another language, or of none, fails here until something runs it."""
    written = {
        language for page in docs_commands.PAGES for _, language, _ in docs_commands.BLOCK.findall(page.read_text())
    }
    assert written == LANGUAGES.keys()
    for language, name in LANGUAGES.items():
        (file,) = files_called(name)
        assert language.startswith("{") or re.search(rf'["`]{language}\b', file.read_text()), language


@pytest.mark.parametrize("text", ["systemctl restart workers", "X=1 rm -r /", "pythonx manage.py check"])
def test_a_command_of_another_kind_is_not_run(text: str) -> None:
    """It is an error, before anything is started."""
    project = docs_commands.Project.__new__(docs_commands.Project)
    assert "not run here" in project.run(text)


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
    package = tmp_path / "node_modules" / "redis"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"name": "redis", "type": "module", "main": "index.js"}')
    (package / "index.js").write_text(
        "export const createClient = ({url}) => ({connect: async () => ({lPush: async (...all) => "
        "console.log(JSON.stringify([url, ...all]))})});"
    )
    pushed = {}
    for _, block in blocks("js"):
        (tmp_path / "push.mjs").write_text(block)
        command = ["node", "push.mjs"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        address, key, pushed_document = json.loads(done.stdout)
        assert address.startswith("redis://")
        pushed[key] = pushed_document.encode()
    check_document(pushed.pop("asynq:{mails}:inbox"))
    assert {key: json.loads(value) for key, value in pushed.items()} == {"orders": {"order": 7}}


@pytest.mark.skipif(shutil.which("php") is None, reason="php was not found")
def test_the_php_of_the_inbox_pushes_a_document_that_is_a_task(tmp_path: Path) -> None:
    """With PHP's own client, to a Redis."""
    if "redis" not in subprocess.run(["php", "-m"], capture_output=True, text=True, check=True).stdout.split():
        pytest.skip("php has no extension redis")
    with EmbeddedRedis() as server:
        address = urlsplit(server.url)
        connect = f'$redis = new Redis(); $redis->connect("{address.hostname}", {address.port});'
        for _, block in blocks("php"):
            (tmp_path / "push.php").write_text(f"<?php {connect}\n{block}")
            subprocess.run(["php", "push.php"], cwd=tmp_path, timeout=60, check=True)
        client = redis.Redis.from_url(server.url)
        document: Any = client.rpop("asynq:{mails}:inbox")
        value: Any = client.rpop("orders")
    check_document(document)
    assert json.loads(value) == {"order": 7}


def test_the_go_of_the_docs_pushes_what_it_says(tmp_path: Path) -> None:
    """With clients in the place of asynq's and of go-redis that print their calls; both have the real signatures."""
    of_pages = dict(blocks("go"))
    inbox = of_pages.pop("inbox.md")
    calls = run_go(tmp_path / "asynq", ASYNQ, "\n".join(of_pages.values()))
    add_event, deliver = json.loads(calls)
    assert deliver == ["email:deliver", '{"to": "a@example.org"}', "queue mails"]
    assert add_event == ["event:add", "payload", "queue events", "group shop-7"]
    key, document = json.loads(run_go(tmp_path / "inbox", INBOX, inbox))
    assert key == "asynq:{mails}:inbox"
    check_document(document.encode())


def check_document(document: bytes) -> None:
    """Check the document that all languages push to the inbox."""
    read = read_document(document, largest_bytes=1_000)
    assert (read.task, read.kwargs) == ("shop.tasks.send_mail", {"user_id": 7})


def run_go(folder: Path, program: dict[str, str], block: str) -> str:
    """Run a Go program with a block in it; return what it prints."""
    if shutil.which("go") is None:
        pytest.skip("go was not found")
    for name, text in program.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("BLOCK", block))
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOCACHE": str(folder / "cache")}
    done = subprocess.run(
        ["go", "run", "."], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
