"""Tidies the database connections of a thread after a task, as Django does after a request."""

from __future__ import annotations

from django.db import connections


def tidy_connections() -> bool:
    """Undo what a task may have left in its thread: an open transaction, a connection that is unusable or too old.

    A pooled connection goes back to its pool, since Django allows none to be kept. What the task has activated, a
    language or a time zone, vanishes with its context. Returns whether a connection was open.
    """
    was_connected = False
    for connection in connections.all(initialized_only=True):
        was_connected = was_connected or connection.connection is not None
        if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
            # An open transaction belongs to a task that has finished; nothing of it may reach the next one.
            # Django does not close a connection within an atomic block; a new one resets the flag anyway.
            connection.in_atomic_block = False
            connection.close()
        connection.close_if_unusable_or_obsolete()
    return was_connected


def close_connections() -> bool:
    """Close the connections of a thread that belongs to one run; return whether one was open."""
    was_connected = any(connection.connection is not None for connection in connections.all(initialized_only=True))
    connections.close_all()
    return was_connected
