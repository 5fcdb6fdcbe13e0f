"""Statements that are sent ahead: what fails is told before anything can be committed, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_asyncq import inserting
from django_asyncq.ahead import Unread
from django_asyncq.models import TaskRecord

from . import tasks
from .redis_state import pending

# Not the proxy: what belongs to the thread.
connection = connections["default"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "postgresql" or find_spec("psycopg") is None, reason="sent on PostgreSQL through psycopg 3"
    ),
]


def insert(**given: Any) -> TaskRecord:
    """Insert a row as `enqueue` does."""
    record = TaskRecord(name="x", **given)
    inserting.insert([record], connection)
    return record


@contextmanager
def begun() -> Iterator[None]:
    """A transaction in which something has been asked: the first statement is waited for."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        yield


def is_unread() -> bool:
    """Whether something was sent whose reply nobody has read."""
    return isinstance(connection.connection.lock, Unread)


@pytest.fixture
def there() -> TaskRecord:
    """A row whose id can be inserted no more."""
    return TaskRecord.objects.create(name="there")


@pytest.fixture
def locked() -> Iterator[Any]:
    """Another connection that lets nobody write the table, until it is closed."""
    other = connection.copy()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        cursor.execute("LOCK TABLE django_asyncq_taskrecord IN SHARE MODE")
    yield other
    other.close()


def test_goes_on_while_the_database_works(locked: Any) -> None:
    """The call is over before the row is written; the commit waits for it."""
    with begun():
        result = tasks.add.enqueue(1)
        assert is_unread()
        locked.close()
    assert not is_unread()
    assert [str(id) for id in TaskRecord.objects.values_list("id", flat=True)] == [result.id] == pending()


def test_many_in_a_transaction_are_written_and_pushed_in_order() -> None:
    """Each reads the reply of the one before; one statement for many is sent likewise."""
    with transaction.atomic():
        ids = [tasks.add.enqueue(number).id for number in range(20)]
        ids += [result.id for result in tasks.add.enqueue_many([(number,) for number in range(3)])]
        assert is_unread()
        assert TaskRecord.objects.count() == 23
        assert not is_unread()
        ids.append(tasks.add.enqueue(99).id)
    assert pending() == ids
    assert TaskRecord.objects.count() == 24


def test_the_commit_tells_of_an_error(there: TaskRecord) -> None:
    """Nothing is committed, nothing is pushed, and the connection is as good as before."""
    with pytest.raises(IntegrityError, match="duplicate"), transaction.atomic():
        tasks.add.enqueue(1)
        insert(id=there.id)
    assert not is_unread()
    assert TaskRecord.objects.get() == there
    assert pending() == []
    assert tasks.add.enqueue(2).id in pending()


def test_the_next_of_many_tells_of_an_error(there: TaskRecord) -> None:
    """It is not sent itself."""
    with begun():
        insert(id=there.id)
        with pytest.raises(IntegrityError, match="duplicate"):
            tasks.add.enqueue(1)
        assert not is_unread()
        with pytest.raises(transaction.TransactionManagementError):
            tasks.add.enqueue(1)
        transaction.set_rollback(True)
    assert TaskRecord.objects.get() == there


def test_an_error_that_is_caught_commits_nothing(there: TaskRecord) -> None:
    """PostgreSQL would answer COMMIT with ROLLBACK and no error: Django must know."""
    with transaction.atomic():
        tasks.add.enqueue(1)
        insert(id=there.id)
        with suppress(IntegrityError):
            TaskRecord.objects.count()
        with pytest.raises(transaction.TransactionManagementError):
            TaskRecord.objects.count()
    assert TaskRecord.objects.get() == there
    assert pending() == []


def test_a_lock_that_is_not_had_in_time_is_told(locked: Any) -> None:
    """As any error of the server that comes late."""
    with pytest.raises(OperationalError, match="lock timeout"), transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '20ms'")
        tasks.add.enqueue(1)
        assert is_unread()
    assert not is_unread()


def copy_out(driver: Any) -> None:
    with driver.cursor().copy("COPY (SELECT id FROM django_asyncq_taskrecord) TO STDOUT") as rows:
        assert len(list(rows.rows())) == 1


def in_pipeline(driver: Any) -> None:
    with driver.pipeline():
        driver.execute("SELECT 1")
        assert driver.execute("SELECT count(*) FROM django_asyncq_taskrecord").fetchone() == (1,)


def savepoint(driver: Any) -> None:
    with transaction.atomic():
        assert TaskRecord.objects.count() == 1


def own_transaction(driver: Any) -> None:
    with driver.transaction():
        assert driver.execute("SELECT count(*) FROM django_asyncq_taskrecord").fetchone() == (1,)


USES: dict[str, Callable[[Any], object]] = {
    "a statement": lambda driver: TaskRecord.objects.get(),
    "rows by and by": lambda driver: list(TaskRecord.objects.iterator(chunk_size=1)),
    "the driver's own cursor": lambda driver: driver.execute("SELECT 1").fetchone(),
    "COPY": copy_out,
    "a pipeline": in_pipeline,
    "one statement for many": lambda driver: driver.cursor().executemany("SELECT %s", [(1,), (2,)]),
    "a savepoint": savepoint,
    "a transaction of the driver's": own_transaction,
    "notifications": lambda driver: list(driver.notifies(timeout=0)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_is_done_next_reads_the_reply_first(use: Callable[[Any], object]) -> None:
    """And works as if nothing had been sent."""
    with begun():
        insert()
        assert is_unread()
        use(connection.connection)
        assert not is_unread()
    assert TaskRecord.objects.count() == 1


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_is_done_next_tells_of_an_error(use: Callable[[Any], object], there: TaskRecord) -> None:
    """The error is that of the INSERT, Django's or the driver's, as whoever asks is used to."""
    driver_error = type(connection.connection).Error
    with begun():
        insert(id=there.id)
        with pytest.raises((IntegrityError, driver_error), match="duplicate"):
            use(connection.connection)
        assert not is_unread()
        transaction.set_rollback(True)
    assert TaskRecord.objects.get() == there


def test_a_rollback_reads_the_reply_and_is_one(there: TaskRecord) -> None:
    """Of what was written, and of what could not be: the caller's own error stays the one that is raised."""
    for given in ({}, {"id": there.id}):
        with pytest.raises(ZeroDivisionError), begun():
            insert(**given)
            raise ZeroDivisionError
        assert connection.connection is None or not is_unread()
        assert TaskRecord.objects.get() == there


def test_a_connection_may_be_closed_before_the_reply_is_read() -> None:
    """Then nothing of the transaction is there, as ever."""
    with suppress(DatabaseError), begun():
        insert()
        assert is_unread()
        connection.close()
    assert TaskRecord.objects.count() == 0


def test_a_server_that_goes_away_is_told_at_the_commit(locked: Any) -> None:
    """Before it could answer: nothing is there, nothing is pushed, and the next transaction has a new connection."""
    with pytest.raises(OperationalError), begun():
        tasks.add.enqueue(1)
        assert is_unread()
        with locked.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
            assert cursor.fetchone() == (True,)
        locked.close()
    assert pending() == []
    with begun():
        result = tasks.add.enqueue(2)
    assert [str(id) for id in TaskRecord.objects.values_list("id", flat=True)] == [result.id] == pending()


@pytest.mark.parametrize(
    "why", ["no transaction", "the first statement", "a savepoint", "the setting", "a listener", "the log", "a tool"]
)
def test_waits_where_the_error_is_expected_at_once(
    why: str, there: TaskRecord, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another may want to go on without it, and for whoever looks at statements."""
    if why == "the setting":
        settings.ASYNCQ = {**settings.ASYNCQ, "SEND_AHEAD": False}
    if why == "a tool":

        class Traced(type(connection.create_cursor())):  # type: ignore[misc]
            """A cursor that is not Django's."""

        monkeypatch.setattr(connection, "create_cursor", lambda name=None: Traced(connection.connection))
    if why == "no transaction":
        with pytest.raises(IntegrityError):
            insert(id=there.id)
        return
    if why == "the first statement":
        with pytest.raises(IntegrityError), transaction.atomic():
            insert(id=there.id)
            pytest.fail("it was not waited for")
        return
    with begun():
        if why == "a savepoint":
            with pytest.raises(IntegrityError), transaction.atomic():
                insert(id=there.id)
                pytest.fail("it was not waited for")
            insert()
            return
        if why in ("the setting", "a tool"):
            with pytest.raises(IntegrityError):
                insert(id=there.id)
        elif why == "a listener":
            with pytest.raises(IntegrityError), connection.execute_wrapper(lambda run, *given: run(*given)):
                insert(id=there.id)
        else:
            with pytest.raises(IntegrityError), CaptureQueriesContext(connection):
                insert(id=there.id)
        transaction.set_rollback(True)


def test_a_transaction_that_django_does_not_manage_is_waited_for(there: TaskRecord) -> None:
    """Nobody could mark it as one that can only be rolled back."""
    transaction.set_autocommit(False)
    try:
        insert()
        with pytest.raises(IntegrityError):
            insert(id=there.id)
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert TaskRecord.objects.get() == there


def test_a_wait_that_is_not_psycopgs_is_left_alone(there: TaskRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else stands in its place: he hears of each statement, from its start to its end."""
    seen: list[Any] = []
    driver = connection.connection

    def watched(statement: Any, *more: Any, **also: Any) -> Any:
        seen.append(statement)
        return type(driver).wait(driver, statement, *more, **also)

    monkeypatch.setattr(driver, "wait", watched)
    with begun():
        with pytest.raises(IntegrityError):
            insert(id=there.id)
        transaction.set_rollback(True)
    assert seen


def test_a_pipeline_of_the_projects_own_is_left_alone(there: TaskRecord) -> None:
    """There psycopg sends ahead by itself, and tells of errors in its own way."""
    with begun(), connection.connection.pipeline():
        results = [tasks.add.enqueue(number) for number in range(3)]
        assert not is_unread()
    assert [result.id for result in results] == pending()
    assert TaskRecord.objects.count() == 4
    with pytest.raises(IntegrityError, match="duplicate"), begun():
        try:
            with connection.wrap_database_errors, connection.connection.pipeline():
                insert(id=there.id)
                tasks.add.enqueue(1)
        finally:
            assert not is_unread()
    assert TaskRecord.objects.count() == 4


def test_what_cannot_be_sent_leaves_the_connection_as_it_was() -> None:
    """A value that the driver refuses, before and after something was sent."""
    with begun():
        with pytest.raises(UnicodeEncodeError):
            insert(gate="\ud800")
        assert not is_unread()
        transaction.set_rollback(True)
    with pytest.raises(UnicodeEncodeError), begun():
        insert()
        insert(gate="\ud800")
    assert not is_unread()
    assert TaskRecord.objects.count() == 0
