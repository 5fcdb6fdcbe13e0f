"""Waits that could never return, or would keep a worker's slot from the task that is waited for; refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf
from ..django_internals import waiting_commit_hooks
from ..durations import AT_LEAST_ZERO, Duration, is_duration, seconds_of
from ..exceptions import InvalidOption
from ..lifecycle.on_commit import CommitHook
from ..logs import current_task
from ..models import TaskRecord
from ..storage.routing import is_in_transaction, writing_database
from ..storage.snapshots import sees_commits


def checked_seconds(timeout: Duration | None) -> float:
    """Return a timeout in seconds; None means WAIT_SECONDS. Raises: InvalidOption."""
    if timeout is None:
        return conf.current().wait_seconds
    if not is_duration(timeout, or_zero=True):
        raise InvalidOption(f"wait(timeout={timeout!r}) is not valid: give {AT_LEAST_ZERO}")
    return float(seconds_of(timeout))


def refuse_deadlocks(results: Sequence[Any], *, allow_in_task: bool, in_test_kit: bool = False) -> None:
    """Refuse a wait in a task, in the transaction that enqueued, and in one that never sees the outcome.

    in_test_kit: the tasks run on the caller's connection; the transaction of a test case around it does not count.
    Raises: InvalidOption with the remedy.
    """
    task = current_task()
    if task is not None and not allow_in_task:
        raise InvalidOption(
            f"wait() within the task {task.task}: it keeps a slot that the other task may need. Remedy: have the other "
            f"task enqueue what follows; or give allow_in_task=True if workers of another queue run it"
        )
    connection = connections[writing_database(TaskRecord)]
    if not connection.in_atomic_block:
        return
    _refuse_uncommitted({result.id for result in results}, connection, in_test_kit=in_test_kit)
    if not in_test_kit and is_in_transaction(connection.alias) and not sees_commits(connection):
        raise InvalidOption(
            "wait() in a transaction that never sees what workers commit: its isolation level is above READ COMMITTED. "
            "Remedy: wait after the transaction; with ATOMIC_REQUESTS, decorate the view with "
            "django.db.transaction.non_atomic_requests"
        )


def _refuse_uncommitted(ids: set[str], connection: BaseDatabaseWrapper, *, in_test_kit: bool) -> None:
    """Refuse to wait for tasks that the open transaction has enqueued or retried: workers get them at its commit."""
    for hook in waiting_commit_hooks(connection, of_project_only=in_test_kit):
        if isinstance(hook, CommitHook) and not hook.is_called and not hook.deletes:
            for record in hook.records:
                if str(record.id) in ids:
                    raise InvalidOption(
                        f"wait() for task {record.id} in the transaction that enqueued it: workers get it after the "
                        f"commit. Remedy: wait after the `atomic` block; with ATOMIC_REQUESTS, decorate the view with "
                        f"django.db.transaction.non_atomic_requests; in a TestCase use "
                        f"django_asyncq.testing.TestBackend"
                    )
