"""What a test expects is not printed: the failures of tasks under the test kit are in their results."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from django_asyncq.core import compat
from django_asyncq.models import TaskState
from django_asyncq.signals import task_state_changed
from django_asyncq.testing import lose_redis, run_tasks

from .. import kit_tasks as tasks
from .test_run_tasks import IMMEDIATE, STORE

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "settings.py": """
SECRET_KEY = "a" * 50
APPS = []
INSTALLED_APPS = [*APPS, "django_asyncq", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend"}}
USE_TZ = True
""",
    "shop/__init__.py": "",
    "shop/tasks.py": """
from django_asyncq import Batch, task


class Refused(Exception):
    pass


def charge(order_id=0):
    raise Refused(f"no money for {order_id}")


once = task(gate="shop", queue_limit=1)(charge)


@task
def fine():
    pass


@task(max_attempts=3, backoff=1)
def retried():
    charge()


@task
async def in_a_coroutine():
    charge()


@task(batch=Batch(size=2, within=1))
def together(items):
    charge()


@task(expires=60, atomic=True)
def expiring():
    charge()
""",
    "shop/tests.py": """
from datetime import timedelta

from django.test import TestCase, override_settings
from django_asyncq.testing import fail_at, lose_lease, lose_redis, run_tasks, travel

from shop import tasks

IMMEDIATE = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "OPTIONS": {"mode": "immediate"}}}


class FailureTests(TestCase):
    def assert_failed(self, *results, error="shop.tasks.Refused", last="Refused: no money"):
        for result in results:
            result.refresh()
            self.assertEqual(str(result.status), "FAILED")
            self.assertEqual(result.errors[-1].exception_class_path, error)
            self.assertIn(last, result.errors[-1].traceback)

    def test_bodies(self):
        results = [tasks.once.enqueue(7), tasks.retried.enqueue(), tasks.in_a_coroutine.enqueue()]
        run_tasks(until=timedelta(minutes=1))
        self.assert_failed(*results, last="Traceback (most recent call last)")

    def test_raised(self):
        tasks.once.enqueue(7)
        with self.assertRaises(tasks.Refused):
            run_tasks(raise_failures=True)

    def test_batches(self):
        results = tasks.together.enqueue_many([(1,), (2,)])
        run_tasks(until=timedelta(minutes=1))
        self.assert_failed(*results)

    def test_waits(self):
        result = tasks.retried.enqueue()
        with self.assertRaises(Exception):
            result.wait(timeout=30)
        self.assert_failed(result)

    def test_times(self):
        result = tasks.expiring.enqueue()
        with travel(hours=1):
            run_tasks()
        self.assert_failed(result, error="django_asyncq.exceptions.TaskExpired", last="")

    def test_immediate(self):
        with override_settings(TASKS=IMMEDIATE):
            self.assert_failed(tasks.expiring.enqueue())

    def test_faults(self):
        tasks.fine.enqueue()
        with fail_at("run.function_returned"):
            run_tasks()
        result = tasks.once.enqueue(7)
        with lose_lease(result):
            run_tasks()
        with lose_redis():
            tasks.retried.enqueue()
            run_tasks()
        run_tasks()
        self.assert_failed(result)

    def test_asked(self):
        tasks.once.enqueue(7)
        with self.assertLogs("django_asyncq.runs", "DEBUG") as caught:
            run_tasks()
        (line,) = [line for line in caught.output if "failed" in line]
        self.assertIn("DEBUG:django_asyncq.runs:task ", line)
        self.assertIn("Traceback (most recent call last)", line)
""",
}


def test_a_suite_with_expected_failures_prints_none(tmp_path: Path) -> None:
    """Neither with Django's test runner, nor under pytest with all that it has captured of tests that pass."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if compat.HAS_DJANGO_TASKS else text.replace("APPS = []", 'APPS = ["django_tasks"]'))
    ours = ("ASYNCQ_", "DATABASE_URL", "DJANGO_", "PYTEST_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "DJANGO_SETTINGS_MODULE": "settings"}
    printed = {}
    for runner in ("django test shop", "pytest -rA -p no:cacheprovider shop/tests.py"):
        done = subprocess.run(
            [sys.executable, "-m", *runner.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        printed[runner] = done.stdout + done.stderr
        assert done.returncode == 0, printed[runner]
        assert "Traceback" not in printed[runner] and "Refused" not in printed[runner]
        assert "ERROR" not in printed[runner] and "WARNING" not in printed[runner]
    by_django, by_pytest = printed.values()
    tests = FILES["shop/tests.py"].count("def test_")
    assert by_django.count("\n") <= 9 and f"\n{'.' * tests}\n" in by_django, by_django
    assert f"{tests} passed" in by_pytest


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("mode", [STORE, IMMEDIATE], ids=["store", "immediate"])
def test_what_no_result_shows_is_logged_as_ever(mode: Any, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Such as the error of a receiver that hears of the failure. The line about the failure is there on request."""
    settings.TASKS = mode
    caplog.set_level(logging.DEBUG, "django_asyncq")

    def receive(new: TaskState, **kwargs: Any) -> None:
        if new == TaskState.FAILED:
            raise RuntimeError("of a receiver")

    task_state_changed.connect(receive)
    try:
        tasks.add.enqueue("a", 1)  # type: ignore[arg-type]
        run_tasks()
    finally:
        task_state_changed.disconnect(receive)
    levels = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert [level for level, text in levels if "failed; it is not retried: TypeError" in text] == ["DEBUG"]
    assert [level for level, text in levels if text.startswith("task_state_changed: receiver ")] == ["ERROR"]


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_the_test_has_taken_away_is_no_news(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What fails because of it is logged at DEBUG."""
    settings.TASKS = STORE
    caplog.set_level(logging.DEBUG, "django_asyncq")
    with lose_redis():
        tasks.add.enqueue(1)
    assert {line.levelname for line in caplog.records if "lose_redis() is in force" in line.getMessage()} == {"DEBUG"}
