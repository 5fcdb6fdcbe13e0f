"""What goes wrong in the first hour with the package is named, with what to do about it, before anything runs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.management import call_command
from django.core.management.base import CommandError

from django_asyncq.checks import check_sqlite
from django_asyncq.core import compat, registry
from django_asyncq.storage.routing import SQLITE_OPTIONS
from django_asyncq.testing.redis_server import free_port

BACKEND = "django_asyncq.backend.AsyncqBackend"
IMMEDIATE = f"{'django.tasks' if compat.HAS_DJANGO_TASKS else 'django_tasks'}.backends.immediate.ImmediateBackend"
ROOT = Path(__file__).parent.parent.parent

SETTINGS = """
SECRET_KEY = "first hour"
USE_TZ = True
INSTALLED_APPS = {apps!r}
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "OPTIONS": {options!r}}}}}
TASKS = {{"default": {{"BACKEND": {backend!r}}}}}
ASYNCQ = {{"REDIS": "redis://:s3cret@127.0.0.1:{port}/3"}}
"""
# Makes one package impossible to import, as if it were not installed.
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "django_tasks":
            raise ModuleNotFoundError("No module named 'django_tasks'", name=name)
sys.meta_path.insert(0, Hidden())
"""


class Project:
    """A new project in a folder of its own, whose Redis is not running."""

    def __init__(self, folder: Path, *, is_installed: bool = True, has_backport: bool = True) -> None:
        self.folder = folder
        self.port = free_port()
        apps = ["django.contrib.contenttypes", "django.contrib.auth", *["django_asyncq"] * is_installed, "shop"]
        if not compat.HAS_DJANGO_TASKS and has_backport:
            apps.insert(0, "django_tasks")
        text = SETTINGS.format(apps=apps, options=SQLITE_OPTIONS, backend=BACKEND, port=self.port)
        (folder / "project_settings.py").write_text(("" if has_backport else HIDE) + text)
        (folder / "shop").mkdir()
        (folder / "shop" / "__init__.py").touch()
        (folder / "shop" / "tasks.py").write_text("from django_asyncq import task\n@task\ndef send(): ...\n")

    def python(self, *arguments: str) -> tuple[int, str]:
        """Run Python in the project; return the exit code and what it wrote."""
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": f"{ROOT}:."}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def manage(self, *arguments: str) -> tuple[int, str]:
        """Run a command of manage.py."""
        return self.python("-m", "django", *arguments)

    def execute(self, statement: str) -> None:
        """Change the database."""
        connection = sqlite3.connect(self.folder / "db.sqlite3")
        connection.execute(statement)
        connection.close()


COMMANDS = [
    ["runworkers"],
    ["runworkers", "--burst"],
    ["asyncq", "stats"],
    ["asyncq", "health"],
    ["asyncq", "rebuild"],
    ["asyncq", "prune", "--older-than", "1", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_without_tables_says_to_migrate(command: list[str], tmp_path: Path) -> None:
    """A table that is missing is no outage: the command exits with 1, also while Redis does not run."""
    code, said = Project(tmp_path).manage(*command)
    assert code == 1
    assert "CommandError: " in said and "the database is not set up for this code: no such table" in said
    assert "run `manage.py migrate`" in said and "unreachable" not in said


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("DROP TABLE django_asyncq_startuprun", "no such table: django_asyncq_startuprun"),
        ("ALTER TABLE django_asyncq_taskrecord RENAME COLUMN reason TO was_reason", "reason"),
    ],
)
def test_tables_of_another_state_of_the_code_are_named(statement: str, names: str, tmp_path: Path) -> None:
    """One missing table or column is enough."""
    project = Project(tmp_path)
    assert project.manage("migrate", "-v0") == (0, "")
    project.execute(statement)
    for command in (["runworkers", "--burst"], ["asyncq", "stats"]):
        code, said = project.manage(*command)
        assert code == 1 and names in said and "run `manage.py migrate`" in said


def test_unreachable_redis_is_named_once_without_its_password(tmp_path: Path) -> None:
    """Host, port and database."""
    project = Project(tmp_path)
    project.manage("migrate", "-v0")
    code, said = project.manage("asyncq", "stats")
    assert code == 1 and "s3cret" not in said
    assert said.startswith(f"CommandError: Redis at 127.0.0.1:{project.port}/3 is unreachable (ConnectionError: ")
    assert said.count("unreachable") == 1


@pytest.mark.parametrize("use", ["from shop.tasks import send", "from shop.tasks import send; send.enqueue()"])
def test_app_that_is_not_installed_is_named_with_the_line_to_write(use: str, tmp_path: Path) -> None:
    """Instead of a model that has no application."""
    code, said = Project(tmp_path, is_installed=False).python("-c", f"import django; django.setup(); {use}")
    assert code == 1
    assert "ImproperlyConfigured: TASKS names a backend of django_asyncq, which is not in INSTALLED_APPS: add " in said
    assert '"django_asyncq"' in said.splitlines()[-1] and ('"django_tasks" and' in said) is not compat.HAS_DJANGO_TASKS


@pytest.mark.skipif(compat.HAS_DJANGO_TASKS, reason="this Django has the tasks framework")
@pytest.mark.parametrize("command", [["check"], ["runworkers"], ["migrate"]], ids=" ".join)
def test_django_without_the_backport_names_the_extra(command: list[str], tmp_path: Path) -> None:
    """On Python 3.12 and later the backport is not installed with the package."""
    code, said = Project(tmp_path, has_backport=False).manage(*command)
    assert code == 1
    last = said.strip().splitlines()[-1]
    assert "ImproperlyConfigured: Django 5.2" in last and 'pip install "django_asyncq[backport]"' in last
    assert 'put "django_tasks" before "django_asyncq" in INSTALLED_APPS' in last


def test_queue_that_the_alias_does_not_have_is_refused(settings: Any) -> None:
    """The message has the names there are."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["mail", "default"]}}
    with pytest.raises(CommandError, match=r"names 'mial', and .*\['QUEUES'\] has only 'default', 'mail'\. Correct"):
        call_command("runworkers", queues={"mail": 1, "mial": 2}, skip_checks=True)


OWN, OTHER = {"BACKEND": BACKEND}, {"BACKEND": IMMEDIATE}


@pytest.mark.parametrize(
    ("aliases", "asked", "says"),
    [
        ({"default": OTHER}, "default", "has the backend ImmediateBackend, .* No alias there .* Write TASKS = "),
        ({"default": OTHER, "slow": OWN}, "default", "has the backend ImmediateBackend, .*: --backend slow\\."),
        ({"default": OWN, "slow": OWN}, "fast", "no alias 'fast'.*: --backend default, --backend slow\\."),
        ({}, "default", "no alias 'default'\\. No alias there .* Write TASKS = "),
        ({"default": {"BACKEND": "nowhere.Backend"}}, "default", "TASKS\\['default'\\] cannot be used: .*nowhere"),
    ],
)
def test_alias_that_runworkers_cannot_run_is_refused(aliases: Any, asked: str, says: str, settings: Any) -> None:
    """The message has the aliases that it can run, or the setting to write."""
    settings.TASKS = aliases
    with pytest.raises(CommandError, match=says):
        call_command("runworkers", backend=asked, skip_checks=True)


# --- a task that no worker has registered


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.benchmarks.servers.send", "tests.benchmarks.servers is not imported by any tasks.py of an installed"),
        ("tests.tasks.no_such_task", "tests.tasks is imported here and declares no task no_such_task; deploy"),
        ("tests.nowhere.send", "the app tests has no module tests.nowhere here; deploy"),
        ("shop.jobs.send", "shop.jobs is not imported here, and no app in INSTALLED_APPS has it; add its app"),
        ("send", "the name is not a path such as"),
        ("tests.../../etc/passwd.send", "the name is not a path such as"),
        ("", "the name is not a path such as"),
        (f"tests.{'ä' * 190}.send", "here; deploy"),
    ],
)
def test_unregistered_name_says_what_to_do_and_imports_nothing(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name comes from a row, so only what is loaded, installed and on the disk is looked at."""
    registry.load_task_modules()
    monkeypatch.delitem(sys.modules, "tests.benchmarks.servers", raising=False)
    before = set(sys.modules)
    assert says in registry.why_missing(name)
    assert set(sys.modules) == before


def test_task_of_a_module_that_is_not_loaded_yet_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell, which has not loaded the tasks of the apps."""
    monkeypatch.delitem(sys.modules, "tests.tasks", raising=False)
    assert "tests.tasks is not loaded in this process" in registry.why_missing("tests.tasks.add")


# --- SQLite


def use_sqlite(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> list[Any]:
    """Return the messages of the check for a database that nothing connects to."""
    from django.db import connections

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}
    wrapper = connections.create_connection("default")
    monkeypatch.setattr(wrapper, "settings_dict", {**wrapper.settings_dict, **database})
    monkeypatch.setattr("django_asyncq.storage.routing.connections", {"default": wrapper})
    return list(check_sqlite())


sqlite_only = pytest.mark.skipif(
    not django_settings.DATABASES["default"]["ENGINE"].endswith("sqlite3"), reason="makes a connection of this database"
)


@sqlite_only
@pytest.mark.parametrize("options", [{}, {"transaction_mode": "DEFERRED"}, {"transaction_mode": None}])
def test_sqlite_without_immediate_transactions_is_reported(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is the whole setting, and the same as in the guides."""
    (found,) = use_sqlite(monkeypatch, "shop.sqlite3", options)
    assert found.id == "asyncq.W054" and str(SQLITE_OPTIONS) in found.hint
    for page in ("README.md", "docs/guides/getting-started.md"):
        text = (ROOT / page).read_text()
        assert all(f'"{name}": ' in text for name in SQLITE_OPTIONS)
        assert text.index('"transaction_mode": "IMMEDIATE"') < text.index("from django_asyncq import task")


@sqlite_only
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shop.sqlite3", SQLITE_OPTIONS),
        ("shop.sqlite3", {"transaction_mode": "exclusive"}),
        (":memory:", {}),
        ("file:memorydb_default?mode=memory&cache=shared", {}),
    ],
)
def test_sqlite_that_waits_for_its_lock_gives_no_message(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a database in memory, which one process has for itself."""
    assert use_sqlite(monkeypatch, name, options) == []
