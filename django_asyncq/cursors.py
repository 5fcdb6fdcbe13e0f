"""Django's cursor for one statement. On PostgreSQL the driver's is kept for those of one row.

Making one takes a lone `enqueue` or claim longer than all else that Django does around the statement. A cursor holds
what it last sent and got, so a statement of many rows has one of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import django.utils.asyncio
from django.db.backends.base.base import BaseDatabaseWrapper

from .wrapping import are_unwrapped

# Where Django's methods are defined that make cursors, and what it puts around some of them.
HOMES = ("django.db.backends.base.base", "django.db.backends.postgresql.base")
ASYNC_UNSAFE = vars(django.utils.asyncio)

# Django's connection → a cursor of the driver's connection that it had then.
_kept: WeakKeyDictionary[BaseDatabaseWrapper, Any] = WeakKeyDictionary()


def cursor_for(connection: BaseDatabaseWrapper, rows: int) -> AbstractContextManager[Any]:
    """Return what gives a cursor for a statement that writes or reads so many rows.

    It does what `connection.cursor()` does, and whoever listens there hears of each statement. Raises: what it raises.
    """
    if rows > 1 or connection.vendor != "postgresql" or is_replaced(connection):
        return connection.cursor()
    cursor = kept_cursor(connection)
    return nullcontext(
        connection.make_debug_cursor(cursor) if connection.queries_logged else connection.make_cursor(cursor)
    )


def kept_cursor(connection: BaseDatabaseWrapper) -> Any:
    """Return the driver's cursor that is kept for this connection, which may be made for it."""
    open_connection(connection)
    cursor = _kept.get(connection)
    if cursor is None or cursor.connection is not connection.connection:
        with connection.wrap_database_errors:
            cursor = _kept[connection] = connection.create_cursor()
    return cursor


def open_connection(connection: BaseDatabaseWrapper) -> None:
    """Do what `connection.cursor()` does before it makes one: see whether it may be used, and connect if need be."""
    if connection.health_check_enabled:  # type: ignore[attr-defined]
        connection.close_if_health_check_failed()
    connection.ensure_connection()
    connection.validate_thread_sharing()


def is_replaced(connection: BaseDatabaseWrapper) -> bool:
    """Whether this connection's cursors are not made as Django makes them.

    By a tracing tool, by a test that may not use a database, by a backend that first chooses a schema, and so on.
    """
    makers: Any = connection
    functions = []
    for method in (makers.cursor, makers._cursor, makers.create_cursor):
        function: Any = getattr(method, "__func__", None)
        is_guarded = getattr(function, "__globals__", None) is ASYNC_UNSAFE
        functions.append(function.__wrapped__ if is_guarded else function)
    return not are_unwrapped(functions, HOMES)
