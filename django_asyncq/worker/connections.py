"""Database connections in a worker behave as in a request: fresh enough before a task, tidied after it."""

from __future__ import annotations

from django.db import close_old_connections, connections
from django.utils import timezone, translation


def before_task() -> None:
    """Drop connections of this thread that are unusable or too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS)."""
    close_old_connections()


def after_task() -> None:
    """Undo what a task may have left in its thread: an open transaction, a language, a time zone."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
            # A transaction left open belongs to a task that has ended; nothing of it may reach the next one.
            # Django does not close a connection within an atomic block; a new one resets the flag anyway.
            connection.in_atomic_block = False
            connection.close()
    close_old_connections()
    translation.deactivate()
    timezone.deactivate()
