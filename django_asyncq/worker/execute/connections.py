"""Tidies the database connections of a thread after a task, as Django does after a request."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from .job import Job

# The run that a thread works for; asgiref and asyncio take it along to other threads.
_job: ContextVar[Job | None] = ContextVar("job", default=None)


def begin_connections(job: Job) -> None:
    """Have `job.was_connected` say whether its run has, or ever had, a connection: it may have closed it itself."""
    _job.set(job)
    job.was_connected = any(each.connection is not None for each in connections.all(initialized_only=True))


def _note_connection(**kwargs: Any) -> None:
    if (job := _job.get()) is not None:
        job.was_connected = True


connection_created.connect(_note_connection, dispatch_uid="django_asyncq.worker.connections")


def tidy_connections() -> None:
    """Undo what a task may have left in its thread: an open transaction, a connection that is unusable or too old.

    A pooled connection goes back to its pool, since Django allows none to be kept. What the task has activated, a
    language or a time zone, vanishes with its context.
    """
    for connection in connections.all(initialized_only=True):
        close_if_open_transaction(connection)
        connection.close_if_unusable_or_obsolete()


def close_if_open_transaction(connection: BaseDatabaseWrapper) -> None:
    """Close a connection with an open transaction: it is of a task that has finished; nothing may reach the next."""
    if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
        # Django does not close a connection within an atomic block; a new one resets the flag anyway.
        connection.in_atomic_block = False
        connection.close()
