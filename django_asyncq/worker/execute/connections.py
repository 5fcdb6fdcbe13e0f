"""Database connections in a worker behave as in a request: fresh before a task, tidy after it."""

from __future__ import annotations

from django.db import close_old_connections, connections


def refresh_connections() -> None:
    """Close this thread's connections that are unusable or too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS)."""
    close_old_connections()


def tidy_connections() -> None:
    """Undo what a task may have left in its thread: an open transaction, a connection that is unusable or too old.

    What the task has activated, a language or a time zone, vanishes with its context.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
            # An open transaction belongs to a task that has finished; nothing of it may reach the next one.
            # Django does not close a connection within an atomic block; a new one resets the flag anyway.
            connection.in_atomic_block = False
            connection.close()
        connection.close_if_unusable_or_obsolete()
