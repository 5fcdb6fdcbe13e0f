"""Database connections in a worker behave as in a request: fresh enough before a task, tidied after it."""

from __future__ import annotations

from django.db import close_old_connections, connections


def before_task() -> None:
    """Drop connections of this thread that have become unusable or too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS)."""
    close_old_connections()


def after_task() -> None:
    """Undo what a task may have left in its thread: an open transaction, a connection that is unusable or too old.

    What it has activated, a language or a time zone, is gone with its context.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
            # A transaction left open belongs to a task that has ended; nothing of it may reach the next one.
            # Django does not close a connection within an atomic block; a new one resets the flag anyway.
            connection.in_atomic_block = False
            connection.close()
        connection.close_if_unusable_or_obsolete()
