"""Database connections in a worker behave as in a request: fresh enough before a task, tidied after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.utils import timezone, translation

T = TypeVar("T")


def before_task() -> None:
    """Drop connections of this thread that are unusable or too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS)."""
    close_old_connections()


def after_task() -> None:
    """Undo what a task may have left in its thread: an open transaction, a language, a time zone."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block or not connection.get_autocommit():
            # A transaction left open belongs to a task that has ended; nothing of it may reach the next one.
            connection.close()
            connection.in_atomic_block = False
    close_old_connections()
    translation.deactivate()
    timezone.deactivate()


def with_fresh_connection(action: Callable[..., T], *arguments: Any) -> T:
    """Run the worker's own bookkeeping; once more on a new connection when the old one had died.

    Raises: what `action` raises the second time.
    """
    try:
        return action(*arguments)
    except (OperationalError, InterfaceError):
        connections.close_all()
        return action(*arguments)
