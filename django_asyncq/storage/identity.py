"""The identity of the database that holds the tasks: a UUID, by which a Redis prefix knows to whom it belongs.

It is a row, so a backup and a copy of the database have it too. `migrate` inserts it, and so does a supervisor that
finds none: after a `flush`, for instance. A process that has read it inserts the same one again. A producer never
inserts it: within the caller's transaction that could be rolled back. Nor does a worker: its supervisor may know it.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import QuerySet

from ..models import DatabaseIdentity, TaskRecord
from . import database_clock
from .routing import rows_of, transaction_of, writing_database

ROW_ID = 1

# By alias and name of the database, because a test has another database under the same alias.
_remembered: dict[tuple[str, str], UUID] = {}


def known() -> UUID | None:
    """Return what this process has read last; None when it has read nothing. Sends no statement."""
    return _remembered.get(_key())


def read() -> UUID | None:
    """Return the identity; None when there is none. Raises: django.db.Error."""
    found: UUID | None = row().values_list("value", flat=True).first()
    if found is not None:
        _remembered[_key()] = found
    return found


def ensure() -> UUID:
    """Return the identity; insert one when there is none. Raises: django.db.Error."""
    found = read()
    if found is None:
        # Of two processes at the same time, one inserts and both read its row.
        row().bulk_create([DatabaseIdentity(id=ROW_ID, value=known() or uuid.uuid4())], ignore_conflicts=True)
        found = _remembered[_key()] = row().values_list("value", flat=True).get()
    return found


def own() -> UUID | None:
    """Return the identity as this process knows it, which asks the database until it has one.

    Raises: django.db.Error.
    """
    return known() or read()


def give_identity(*, using: str, **kwargs: Any) -> None:
    """Give a migrated database its identity; restore that of a flushed one, if this process knows it.

    The receiver of Django's `post_migrate`. A flush by another process leaves that to a supervisor, which may be
    running and knows it.
    """
    # `flush` sends the signal without a plan.
    if using == writing_database(TaskRecord) and ("plan" in kwargs or known() is not None) and has_table():
        ensure()


def renew() -> UUID:
    """Give the database, a copy, a new identity under which all schedules are paused; return it.

    Raises: django.db.Error.
    """
    with transaction_of(TaskRecord):
        row().delete()
        _remembered.pop(_key(), None)
        new = ensure()
        pause_schedules()
        return new


def pause_schedules() -> None:
    """Let no schedule fire in this database until they are resumed. Raises: django.db.Error."""
    row().filter(schedules_paused_at=None).update(schedules_paused_at=database_clock.now())


def resume_schedules() -> bool:
    """End the pause of all schedules; return whether there was one. Raises: django.db.Error."""
    return bool(row().filter(schedules_paused_at__isnull=False).update(schedules_paused_at=None))


def schedules_paused_at() -> datetime | None:
    """Return since when all schedules are paused; None when they are not. Raises: django.db.Error."""
    found: datetime | None = row().values_list("schedules_paused_at", flat=True).first()
    return found


def has_table() -> bool:
    """Return whether the database has the table; `migrate` may have removed it. Raises: django.db.Error."""
    tables: list[str] = connections[writing_database(TaskRecord)].introspection.table_names()
    return DatabaseIdentity._meta.db_table in tables


def row() -> QuerySet[Any]:
    """Return the one row, beside the tasks, whatever the routers say of this model."""
    return rows_of(DatabaseIdentity).using(writing_database(TaskRecord)).filter(id=ROW_ID)


def _key() -> tuple[str, str]:
    alias = writing_database(TaskRecord)
    return alias, str(connections[alias].settings_dict["NAME"])
