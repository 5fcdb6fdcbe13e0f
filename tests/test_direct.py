"""A statement past the cursors: it does, says and refuses what theirs do, and whoever listens there hears of it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from uuid import UUID

import django.db.backends.utils
import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.test.utils import CaptureQueriesContext

from django_asyncq import direct, inserting
from django_asyncq.models import TaskRecord
from django_asyncq.names import uuid7
from django_asyncq.statements import read_rows

# Not the proxy: what belongs to the thread.
connection = connections["default"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "postgresql" or find_spec("psycopg") is None, reason="PostgreSQL through psycopg 3 only"
    ),
]

IS_OLD = find_spec("psycopg") is not None and tuple(map(int, version("psycopg").split(".")[:2])) < (3, 3)
VALUES: list[Any] = [
    None,
    True,
    -1,
    2**40,
    0.1,
    "it's 100 % “ü”\n$1 \\ {}",
    UUID(int=7),
    datetime(2026, 11, 24, 1, 2, 3, 4, tzinfo=UTC),
]
TYPES = ["text", "bool", "int", "bigint", "float8", "text", "uuid", "timestamptz"]


Reconnect = Callable[..., None]


@pytest.fixture
def reconnect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reconnect]:
    """Connect anew, with these of Django's options, in place of those that CI gives."""

    def connect(**options: Any) -> None:
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
        connection.ensure_connection()

    yield connect
    connection.close()


@pytest.fixture(params=[False, True], ids=["unprepared", "prepared"])
def prepares(request: pytest.FixtureRequest, reconnect: Reconnect) -> bool:
    """Whether the project has its statements prepared, here at their first use."""
    reconnect(**({"server_side_binding": True, "prepare_threshold": 0} if request.param else {}))
    return bool(request.param)


def asked(sql: str, parameters: list[Any]) -> Any:
    """What a statement returns: by a cursor where one has to come first, then past it."""
    if direct.run(connection, sql, parameters) is None:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
    return direct.run(connection, sql, parameters)


def is_taken() -> bool:
    """Whether a lone statement goes past the cursors now."""
    return direct.run(connection, "SELECT %s::int", [1]) is not None


def insert(**given: Any) -> TaskRecord:
    """Insert a row as a lone `enqueue` does."""
    record = TaskRecord(name="x", **given)
    inserting.insert([record], connection)
    return record


def test_values_and_rows_are_those_of_a_cursor(prepares: bool) -> None:
    """Of every type that a task's row has."""
    sql = f"SELECT {', '.join(f'%s::{name}' for name in TYPES)} UNION ALL SELECT {', '.join(['NULL'] * len(TYPES))}"
    with connection.cursor() as cursor:
        cursor.execute(sql, VALUES)
        expected = cursor.fetchall()
    assert asked(sql, VALUES) == expected == [tuple(VALUES), (None,) * len(VALUES)]


def test_a_statement_without_rows_returns_none_of_them(prepares: bool) -> None:
    """Which is not the same as not to have run it."""
    assert asked("SELECT 1 WHERE %s::int > 1", [1]) == []
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE direct (n int)")
    assert asked("INSERT INTO direct VALUES (%s)", [5]) == []
    assert asked("SELECT n FROM direct WHERE n = %s", [5])[0] == (5,)


def test_lone_rows_go_this_way(prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The INSERT of a lone `enqueue`, and the SELECT of a lone claim; where they are prepared, from the second on."""
    answers: list[Any] = []
    run = direct.run
    monkeypatch.setattr(direct, "run", lambda *given: answers.append(run(*given)) or answers[-1])
    for _ in range(3):
        record = insert(args=[1, "ü"], kwargs={"a": None}, timeout_seconds=2.5)
        [found] = read_rows([str(record.id)], "default")
        assert found == TaskRecord.objects.get(id=record.id)
        assert (found.args, found.kwargs, found.timeout_seconds) == ([1, "ü"], {"a": None}, 2.5)
    assert [answer is not None for answer in answers] == [not prepares] * 2 + [True] * 4


def test_statements_are_prepared_by_psycopg_alone(prepares: bool) -> None:
    """When the project says so; none is there under a name that psycopg does not know."""
    for _ in range(5):
        insert()
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements WHERE statement LIKE 'INSERT%'")
        names = [name.encode() for (name,) in cursor.fetchall()]
    assert len(names) == int(prepares)
    assert set(names) <= set(connection.connection._prepared._names.values())


@pytest.mark.parametrize(("binding", "threshold"), [(False, 2), (True, None), (True, 2)])
def test_it_is_prepared_as_late_as_the_project_says(binding: bool, threshold: int | None, reconnect: Reconnect) -> None:
    """Until then a cursor counts; one that puts the values into the text prepares nothing."""
    reconnect(server_side_binding=binding, prepare_threshold=threshold)
    answers = []
    for _ in range(5):
        answers.append(is_taken())
        if not answers[-1]:
            with connection.cursor() as cursor:
                cursor.execute("SELECT %s::int", [1])
    assert answers == ([False] * 3 + [True] * 2 if binding and threshold else [True] * 5)


@pytest.mark.parametrize(
    "forget",
    [
        pytest.param(name, marks=pytest.mark.skipif(is_old, reason="psycopg asks for what is gone before 3.3"))
        for name, is_old in [("ROLLBACK", False), ("DEALLOCATE ALL", IS_OLD), ("DISCARD ALL", IS_OLD)]
    ],
)
def test_what_psycopg_has_forgotten_is_not_asked_for(forget: str, prepares: bool) -> None:
    """After a rollback it forgets all names: the statement is prepared anew, and the server hears of no old one."""
    insert()
    insert()
    if forget == "ROLLBACK":
        with transaction.atomic():
            insert()
            transaction.set_rollback(True)
    else:
        with connection.cursor() as cursor:
            cursor.execute(forget)
    for _ in range(3):
        insert()
    assert TaskRecord.objects.count() == 5
    assert is_taken() is not prepares


def test_where_psycopg_keeps_its_names_elsewhere_cursors_do_it(prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of its interface."""
    assert asked("SELECT %s::int", [1]) == [(1,)]
    with monkeypatch.context() as changed:
        changed.setattr(connection.connection, "_prepared", object())
        assert is_taken() is not prepares
    assert is_taken()


@contextmanager
def logged() -> Iterator[None]:
    """`connection.queries` is kept, as with DEBUG."""
    with CaptureQueriesContext(connection):
        yield


@contextmanager
def patched(owner: Any, name: str) -> Iterator[None]:
    """A tool has put itself around a method, under its name."""
    own = vars(owner).get(name)
    method = getattr(owner, name)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    traced.__module__, traced.__qualname__ = method.__module__, method.__qualname__
    setattr(owner, name, traced)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def without_autocommit() -> Iterator[None]:
    """What is asked begins a transaction that only a commit ends."""
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@contextmanager
def begun() -> Iterator[None]:
    """A transaction of which Django does not know."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        yield
        cursor.execute("ROLLBACK")


@contextmanager
def with_a_cursor_class() -> Iterator[None]:
    """The project, or a tool, has set a class for the driver's cursors."""
    import psycopg

    class Own(psycopg.Cursor[Any]):
        pass

    connection.connection.cursor_factory, before = Own, connection.connection.cursor_factory
    forget()
    try:
        yield
    finally:
        connection.connection.cursor_factory = before
        forget()


def forget() -> None:
    """Have the connection's cursor made anew."""
    from django_asyncq import cursors

    cursors._kept.pop(connection, None)
    direct._known.pop(connection, None)


def psycopg_cursor() -> Any:
    """The class of psycopg's cursors."""
    import psycopg

    return psycopg.Cursor


REASONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "in a transaction": transaction.atomic,
    "without autocommit": without_autocommit,
    "in a transaction of the project's own": begun,
    "in a pipeline": lambda: connection.connection.pipeline(),
    "under a wrapper": lambda: connection.execute_wrapper(lambda execute, *given: execute(*given)),
    "queries are logged": logged,
    "Django's cursor is traced": lambda: patched(django.db.backends.utils.CursorWrapper, "execute"),
    "psycopg's cursor is traced": lambda: patched(psycopg_cursor(), "execute"),
    "cursors are replaced": lambda: patched(connection, "cursor"),
    "the driver's cursors are replaced": lambda: patched(connection, "create_cursor"),
    "cursors are of another class": with_a_cursor_class,
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_cursor_does_it(reason: str, reconnect: Reconnect) -> None:
    """And both ways do it again when the reason is gone."""
    reconnect()
    assert is_taken()
    with REASONS[reason]():
        assert not is_taken()
        assert insert().id
    assert is_taken()


def test_the_project_can_switch_it_off(reconnect: Reconnect, settings: Any) -> None:
    """Whatever a driver or a pooler of its own makes of it."""
    reconnect()
    assert is_taken()
    settings.ASYNCQ = {**settings.ASYNCQ, "DIRECT_STATEMENTS": False}
    assert not is_taken()


def test_a_cursor_does_it_for_other_drivers(reconnect: Reconnect, monkeypatch: pytest.MonkeyPatch) -> None:
    """For psycopg 2, and for one that is built otherwise than those known."""
    reconnect()
    assert is_taken()
    monkeypatch.setattr(direct, "HAS_WAY", False)
    assert not is_taken()


@pytest.fixture
def known(prepares: bool) -> bool:
    """As `prepares`; the statement of a lone INSERT goes past the cursors."""
    insert()
    return prepares


def test_a_row_that_is_there_is_refused(known: bool) -> None:
    """As Django says it, with all that PostgreSQL says; the connection is as good as before."""
    record = insert()
    with pytest.raises(IntegrityError, match="already exists") as caught:
        insert(id=record.id)
    assert caught.value.__cause__.sqlstate == "23505"  # type: ignore[union-attr]
    assert caught.value.__cause__.diag.constraint_name.endswith("pkey")  # type: ignore[union-attr]
    insert()
    assert TaskRecord.objects.count() == 3


def test_what_the_database_does_not_take_is_refused(known: bool) -> None:
    """A value too long, and a statement that is none."""
    with pytest.raises(DataError, match="too long"):
        insert(queue_name="q" * 1000)
    if not known:
        with pytest.raises(ProgrammingError, match="syntax error"):
            direct.run(connection, "SELEKT %s", [1])
    assert insert().id


def end_backend(pid: int) -> None:
    """End a connection from the server's side, and wait until it has ended."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            assert cursor.fetchone() == (True,)
    finally:
        other.close()


def test_a_server_that_went_away_is_told(known: bool) -> None:
    """As an error after which Django looks at the connection; a new one has the way again."""
    end_backend(connection.connection.info.backend_pid)
    with pytest.raises(OperationalError):
        insert()
    connection.close_if_unusable_or_obsolete()
    assert connection.connection is None
    insert()
    insert()
    assert is_taken() is not known


@contextmanager
def locked() -> Iterator[None]:
    """Nobody may write the table."""
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {TaskRecord._meta.db_table} IN SHARE MODE")
        yield
    finally:
        other.close()


def is_waiting(pid: int) -> bool:
    """Whether a server process waits for a lock."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", [pid])
        return bool(cursor.fetchone()[0])


def test_whoever_waits_can_be_interrupted(known: bool) -> None:
    """With Ctrl-C, while another holds the table: the INSERT is cancelled, and the connection is as good as before."""
    pid = connection.connection.info.backend_pid

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not is_waiting(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        connections.close_all()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with locked():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            insert()
    thread.join()
    assert TaskRecord.objects.count() == 1
    assert insert().id
    assert is_taken() is not known


def test_a_coroutine_may_not_wait_for_the_database(prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Django has it, unless the project says that it may."""

    async def enter() -> UUID:
        return insert().id

    insert()
    insert()
    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(enter())
    assert TaskRecord.objects.count() == 2
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    assert asyncio.run(enter())


def test_a_test_that_may_not_use_the_database_does_not(prepares: bool, django_db_blocker: Any) -> None:
    """pytest-django says so where Django connects, though a connection may be open from the test before."""
    insert()
    insert()
    with django_db_blocker.block(), pytest.raises(RuntimeError, match="Database access not allowed"):
        insert()
    assert TaskRecord.objects.count() == 2


def test_the_connection_of_another_thread_is_refused(reconnect: Reconnect) -> None:
    """As Django has it, unless the connection may be shared."""
    reconnect()
    assert is_taken()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            is_taken()
        except DatabaseError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert [str(error)[:40] for error in errors] == ["DatabaseWrapper objects created in a thr"]


def test_another_thread_waits_until_the_connection_is_free(reconnect: Reconnect) -> None:
    """Where a project lets threads share one."""
    reconnect()
    assert is_taken()
    connection.inc_thread_sharing()
    thread = threading.Thread(target=is_taken)
    try:
        with connection.connection.lock:
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        connection.dec_thread_sharing()


def test_a_new_connection_without_autocommit_is_not_taken_for_the_old(
    reconnect: Reconnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django tells of the old one until the new one is there."""
    reconnect()
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    assert is_taken()
    connection.close()
    assert not is_taken()
    assert not connection.get_autocommit()


def test_what_was_read_is_not_kept(reconnect: Reconnect) -> None:
    """A row may have arguments of any size, and the next may come tomorrow."""
    reconnect()
    [row] = read_rows([str(insert().id)], "default")
    assert row.name == "x"
    assert direct._known[connection].adapter.pgresult is None


def test_a_connection_that_is_looked_at_is_known_still(reconnect: Reconnect, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CONN_HEALTH_CHECKS, which is before the first statement after a request or a task."""
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    reconnect()
    insert()
    before = direct._known[connection]
    insert()
    assert direct._known[connection] is before


def test_a_connection_that_is_new_is_known_anew(prepares: bool) -> None:
    """Nothing of the old one is used."""
    insert()
    before = connection.connection
    connection.close()
    record = insert()
    assert connection.connection is not before
    assert direct._known[connection].driver is connection.connection
    assert [row.id for row in read_rows([str(record.id)], "default")] == [record.id]
    assert read_rows([str(uuid7())], "default") == []
