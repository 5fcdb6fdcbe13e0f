"""Django's cursor for one statement: the driver's is kept, and nobody can tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import wraps
from threading import Thread
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, close_old_connections, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import SimpleTestCase
from django.test.testcases import DatabaseOperationForbidden
from django.test.utils import CaptureQueriesContext

from django_asyncq import inserting
from django_asyncq.cursors import cursor_for
from django_asyncq.models import TaskRecord
from django_asyncq.names import uuid7
from django_asyncq.statements import read_rows

# Not the proxy: what belongs to the thread.
connection = connections["default"]
pytestmark = pytest.mark.django_db(transaction=True)

only_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="kept for PostgreSQL only")


def insert() -> None:
    """Insert a row."""
    inserting.insert([TaskRecord(name="x")], connection)


def read() -> None:
    """Look for a row."""
    assert read_rows([str(uuid7())], "default") == []


both = pytest.mark.parametrize("ask", [insert, read])


@only_postgresql
def test_one_row_has_the_cursor_of_the_one_before() -> None:
    """A statement of several has one of its own, closed behind it with all that it holds."""
    with cursor_for(connection, 1) as first:
        first.execute("SELECT 1")
    with cursor_for(connection, 2) as several:
        several.execute("SELECT 2")
        assert several.cursor is not first.cursor
    with cursor_for(connection, 1) as second:
        assert second.fetchall() == [(1,)]
    assert second.cursor is first.cursor
    assert several.cursor.closed


@pytest.mark.skipif(connection.vendor == "postgresql", reason="there it is kept")
def test_elsewhere_each_statement_has_its_own() -> None:
    """What is not read to its end would lock SQLite's file."""
    with cursor_for(connection, 1) as first, cursor_for(connection, 1) as second:
        assert first.cursor is not second.cursor


@pytest.mark.parametrize("rows", [1, 2])
def test_statements_of_any_size_are_run(rows: int) -> None:
    """On every database."""
    for number in range(3):
        with cursor_for(connection, rows) as cursor:
            cursor.execute("SELECT %s + 1", [number])
            assert cursor.fetchone() == (number + 1,)


@only_postgresql
def test_a_cursor_goes_with_its_connection() -> None:
    """A worker keeps its connection, and a cursor with it, until the database goes away; then neither is kept."""
    used = []
    for _ in range(3):
        connection.close()
        for ask in (insert, read, insert):
            ask()
        used.append(weakref.ref(connection.connection))
    gc.collect()
    assert [reference() is None for reference in used] == [True, True, False]


@both
@only_postgresql
def test_a_connection_that_broke_is_replaced(ask: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With CONN_HEALTH_CHECKS, at the first statement after a request or a task, as Django's own cursor does."""
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    connection.close()
    ask()
    close_old_connections()
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
            assert cursor.fetchone() == (True,)
    finally:
        other.close()
    try:
        ask()
    finally:
        connection.close()


@pytest.mark.parametrize("asked_before", [False, True])
@both
@only_postgresql
def test_errors_are_djangos(ask: Callable[[], None], asked_before: bool) -> None:
    """Also that of making a cursor: a worker, or whoever enqueues, goes by them."""
    connection.close()
    connection.ensure_connection()
    if asked_before:
        ask()
    connection.connection.close()
    try:
        with pytest.raises(OperationalError):
            ask()
    finally:
        connection.close()


@both
def test_listeners_hear_of_each_statement(ask: Callable[[], None]) -> None:
    """An `execute_wrapper`, and whoever looks at `connection.queries`; also after statements nobody listened to."""
    heard: list[str] = []

    def listen(execute: Any, sql: str, *more: Any) -> Any:
        heard.append(sql)
        return execute(sql, *more)

    ask()
    with CaptureQueriesContext(connection) as captured, connection.execute_wrapper(listen):
        ask()
        ask()
    ask()
    assert len(heard) == len(captured) == 2


@pytest.mark.parametrize("method", ["cursor", "_cursor", "create_cursor"])
@both
@only_postgresql
def test_a_backend_of_the_projects_own_makes_its_cursors(ask: Callable[[], None], method: str) -> None:
    """As that of django-tenants, which first sets the schema of whoever is served now."""
    made: list[str] = []

    def make(self: Any, *given: Any, **more: Any) -> Any:
        made.append(self.alias)
        return getattr(super(own, self), method)(*given, **more)

    own = type("DatabaseWrapper", (type(connection),), {method: make})
    ask()
    connection.__class__, before = own, connection.__class__
    try:
        ask()
        ask()
    finally:
        connection.__class__ = before
    assert len(made) == 2


@pytest.mark.parametrize("method", ["cursor", "_cursor"])
@both
@only_postgresql
def test_a_tool_around_every_connections_cursors_hears_of_each(
    ask: Callable[[], None], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has taken on the name of what it stands around."""
    made: list[str] = []
    inner = getattr(BaseDatabaseWrapper, method)

    @wraps(inner)
    def make(self: Any, *given: Any, **more: Any) -> Any:
        made.append(self.alias)
        return inner(self, *given, **more)

    ask()
    monkeypatch.setattr(BaseDatabaseWrapper, method, make)
    ask()
    ask()
    assert len(made) == 2


@both
def test_a_test_that_may_not_use_the_database_does_not(ask: Callable[[], None]) -> None:
    """Though a connection is open, and a cursor kept, from the test before."""

    class WithoutDatabase(SimpleTestCase):
        pass

    ask()
    WithoutDatabase.setUpClass()
    try:
        with pytest.raises(DatabaseOperationForbidden):
            ask()
    finally:
        WithoutDatabase.doClassCleanups()
    ask()


@only_postgresql
def test_a_test_without_a_database_leaves_no_trace() -> None:
    """Django puts the connection's own method back as an attribute."""
    method = connection.cursor
    try:
        connection.cursor = method  # type: ignore[method-assign]
        with cursor_for(connection, 1) as first, cursor_for(connection, 1) as second:
            assert first.cursor is second.cursor
    finally:
        del connection.cursor


@both
def test_nothing_is_asked_in_a_transaction_that_has_failed(ask: Callable[[], None]) -> None:
    """Django says so before the database does."""
    ask()
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            ask()


def test_another_thread_may_not_use_the_connection() -> None:
    """Django's connections belong to their thread, and so do their cursors."""
    insert()
    told: list[DatabaseError] = []

    def use() -> None:
        try:
            cursor_for(connection, 1)
        except DatabaseError as error:
            told.append(error)

    thread = Thread(target=use)
    thread.start()
    thread.join(10)
    assert len(told) == 1
