"""A project's own tests, which call `runworkers`; `test_inherited_settings` runs them with Django's test runner."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import TestCase, TransactionTestCase, override_settings

from django_asyncq.core import guard
from django_asyncq.models import StartupRun, TaskRecord, TaskState

from . import settings_tasks, tasks


def sees(result: Any) -> dict[str, Any]:
    """Return what a task has found in its process."""
    found = settings_tasks.sees_settings.get_result(result.id).return_value
    assert isinstance(found, dict)
    return found


class WorkersInTests(TransactionTestCase):
    """They run the tasks of the test's own database."""

    databases = "__all__"

    def test_own_task_is_run(self) -> None:
        """Its row is in the test's database, and that is where the worker writes."""
        self.assertFalse(TaskRecord.objects.exists())
        result = tasks.add.enqueue(1, 2)
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        call_command("runworkers", burst=True, processes=2)
        record = TaskRecord.objects.get()
        self.assertEqual((record.state, record.return_value), (TaskState.SUCCEEDED, 3))
        self.assertEqual(str(record.pk), result.id)
        self.assertEqual([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], handlers)
        self.assertTrue(guard.passes(KeyboardInterrupt()))

    def test_overridden_settings_reach_the_worker(self) -> None:
        """Those of ASYNCQ, CACHES and TASKS, and the backend of mail."""
        caches = {**settings.CACHES, "other": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
        with override_settings(ASYNCQ={**settings.ASYNCQ, "KEY_PREFIX": "overridden"}, CACHES=caches):
            result = settings_tasks.sees_settings.enqueue()
            call_command("runworkers", burst=True)
        self.assertEqual(
            sees(result),
            {
                "database": str(settings.DATABASES["default"]["NAME"]),
                "prefix": "overridden",
                "caches": ["default", "other"],
                "mail": "django.core.mail.backends.locmem.EmailBackend",
                "is_test_run": False,
            },
        )

    def test_value_that_cannot_be_sent_is_refused(self) -> None:
        """A lambda in a changed setting is named, and no process is started without it."""
        caches = {"default": {**settings.CACHES["default"], "KEY_FUNCTION": lambda *words: ":".join(map(str, words))}}
        tasks.add.enqueue(1)
        with override_settings(CACHES=caches), self.assertRaisesMessage(Exception, "the changed setting CACHES"):
            call_command("runworkers", burst=True)
        self.assertEqual(TaskRecord.objects.get().state, TaskState.QUEUED)

    def test_startup_task_uses_the_test_database(self) -> None:
        """It notes the name of its database."""
        call_command("runworkers", burst=True)
        self.assertEqual(StartupRun.objects.get().error, "")
        self.assertEqual(Path(os.environ["ASYNCQ_TEST_NAMES"]).read_text(), str(settings.DATABASES["default"]["NAME"]))

    def test_suspect_runs_in_quarantine_on_the_test_database(self) -> None:
        """After the death of its worker process, the task runs alone, and finds its row."""
        settings_tasks.dies_once.enqueue(os.environ["ASYNCQ_TEST_MARK"])
        call_command("runworkers", burst=True)
        record = TaskRecord.objects.get()
        self.assertEqual((record.state, record.return_value), (TaskState.SUCCEEDED, "second run"))


class WorkersInTransactions(TestCase):
    """A TestCase is one transaction."""

    databases = "__all__"

    def test_refused(self) -> None:
        """The message has the remedies."""
        tasks.add.enqueue(1)
        with self.assertRaisesMessage(CommandError, "use TransactionTestCase"):
            call_command("runworkers", burst=True)


class MemoryDatabase(TransactionTestCase):
    """A test database in memory belongs to one process."""

    databases = "__all__"

    def test_refused(self) -> None:
        """The message has the setting."""
        with self.assertRaisesMessage(CommandError, "['TEST'] = {'NAME': BASE_DIR / 'test.sqlite3'}"):
            call_command("runworkers", burst=True)
