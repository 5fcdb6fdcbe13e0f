"""The parts of Django without documentation that this package uses. Nothing else in the package may touch them.

Each function says why it is needed and when it can be removed. Imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet


def last_commit_hook(connection: BaseDatabaseWrapper) -> Callable[[], Any] | None:
    """Return the hook that was registered last, if that was in the current transaction or savepoint.

    Uses `run_on_commit`, so that all tasks of a transaction are pushed with one script call. A savepoint that is rolled
    back discards its hooks, so a hook may be shared only within one savepoint.
    Remove when Django offers a way to look up or to merge the hooks of a transaction.
    """
    if not (connection.in_atomic_block and connection.run_on_commit):
        return None
    savepoints, hook, *_ = connection.run_on_commit[-1]
    return hook if savepoints == set(connection.savepoint_ids) else None


def may_have_committed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether hooks that are dropped now may belong to a transaction that is committed, or will be.

    Uses `errors_occurred`. When the reply to a COMMIT is lost, Django closes the connection, and drops the hooks as it
    does after a rollback. The server may be committing meanwhile. Only then there was an error that no successful
    rollback has followed, and no transaction or savepoint is open.
    Remove when Django calls a hook whose transaction was rolled back.
    """
    return connection.errors_occurred and not connection.in_atomic_block


def delete_rows(rows: QuerySet[Any], database: str) -> None:
    """Delete rows with one DELETE statement: no signals, no cascades.

    Uses `_raw_delete`: a receiver of `post_delete` is connected, so `delete()` would load every row with all columns.
    Remove when Django has a public DELETE of a queryset without signals.
    """
    rows._raw_delete(database)
