"""Worker processes that a test starts work on the databases and with the settings of the test, not on the real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from django_asyncq.models import TaskRecord
from django_asyncq.testing import crash_at, run_command

from ..workers import ROOT, environment

CASE = "tests.runner_case"


@pytest.fixture
def development(tmp_path: Path, transactional_db: None) -> Iterator[dict[str, str]]:
    """The environment of a project with a database for development, which has a task waiting in it."""
    url, name = environment()["DATABASE_URL"], f"asyncq_{uuid4().hex[:8]}"
    is_file = connection.vendor == "sqlite"
    if not is_file:
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
    variables = environment(
        DATABASE_URL=f"sqlite:///{tmp_path}/{name}.sqlite3" if is_file else f"{url.rpartition('/')[0]}/{name}",
        ASYNCQ_TEST_NAMES=str(tmp_path / "names"),
        ASYNCQ_TEST_MARK=str(tmp_path / "mark"),
    )
    variables.pop("ASYNCQ_TEST_OWN_DATABASE", None)
    run(variables, "-m", "django", "migrate", "-v", "0")
    run(variables, "-c", f"{SET_UP}; from tests import tasks; tasks.add.enqueue(20, 22)")
    yield variables
    if not is_file:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


SET_UP = "import django; django.setup()"
READ = f"{SET_UP}; from django_asyncq.models import TaskRecord; print(*TaskRecord.objects.values_list('args', 'state'))"


def run(variables: dict[str, str], *arguments: str) -> str:
    """Run Python; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif("os.environ.get('ASYNCQ_TEST_ROUTER', '').count('own')", reason="one database is enough")
def test_workers_of_a_test_leave_the_development_database_alone(development: dict[str, Any]) -> None:
    """Workers, start-up tasks and quarantine processes use the test's; what is in the other one is still waiting."""
    before = run(development, "-c", READ)
    tests = ["WorkersInTests", "WorkersInTransactions"]
    run(development, "-m", "django", "test", "--noinput", *[f"{CASE}.{name}" for name in tests])
    assert run(development, "-c", READ) == before
    assert "[20, 22]" in before


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="a database in memory")
def test_database_in_memory_is_refused(tmp_path: Path) -> None:
    """It is that of Django's own tests with SQLite; `environment` needs no database."""
    settings = tmp_path / "memory_settings.py"
    settings.write_text("from tests.settings import *\nDATABASES['default'].pop('TEST')\n")
    variables = environment(DJANGO_SETTINGS_MODULE="memory_settings", PYTHONPATH=f"{ROOT}:{tmp_path}")
    run(variables, "-m", "django", "test", "--noinput", f"{CASE}.MemoryDatabase")


COUNT = "from django_asyncq.models import TaskRecord; print(TaskRecord.objects.count())"


@pytest.mark.django_db(transaction=True)
def test_command_runs_on_the_databases_of_the_test() -> None:
    """It sees the rows of the test; its output and its code are returned."""
    TaskRecord.objects.create(name="tests.tasks.add", args=[1])
    done = run_command("shell", "-v", "0", "-c", COUNT)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr
    assert run_command("asyncq", "prune").returncode == 2


@pytest.mark.django_db(transaction=True)
def test_command_dies_at_a_failpoint(tmp_path: Path) -> None:
    """The row that it has committed is in the test's database."""
    text = "from tests.tasks import add; add.enqueue(1)"
    done = run_command("shell", "-c", text, env=crash_at("enqueue.committed", mark=tmp_path / "died"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert TaskRecord.objects.queued().count() == 1


@pytest.mark.django_db
def test_command_is_refused_in_a_transaction() -> None:
    """It would not see what the test has written."""
    with pytest.raises(ImproperlyConfigured, match="see only what is committed"):
        run_command("check")


IN_A_DAEMONIC_PROCESS = f"""
{SET_UP}
import multiprocessing
from django.core.management import call_command
process = multiprocessing.get_context("fork").Process(target=call_command, args=["runworkers", "--burst"], daemon=True)
process.start()
process.join()
print(process.exitcode)
"""


def test_daemonic_process_is_refused() -> None:
    """Such are those of `manage.py test --parallel`; Python allows them no processes of their own."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_DAEMONIC_PROCESS],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["1"], done.stdout + done.stderr
    assert "without --parallel" in done.stderr
    assert "run_tasks()" in done.stderr
