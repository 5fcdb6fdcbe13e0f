"""Tidies the database connections of a thread after a task, as Django does after a request."""

from __future__ import annotations

from django.db import connections


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
