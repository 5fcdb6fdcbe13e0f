"""What a loop does about each kind of error, and that nobody else judges errors of the database."""

from __future__ import annotations

import logging
import re
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import DataError, OperationalError, connection
from django.db import Error as DatabaseError
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.core.guard import get_logger
from django_asyncq.exceptions import BrokerUnavailable, DatabaseNotSetUp, LockLost
from django_asyncq.fleet.leader import Loop
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage.errors import (
    LONGEST_AGAIN_SECONDS,
    MOST_AGAIN,
    NOT_SET_UP_LOOKS,
    PAUSE_SECONDS,
    Faults,
    Outages,
)
from django_asyncq.storage.isolation import set_aside
from django_asyncq.worker.fetch import Pacing
from django_asyncq.worker.job import Job, Outcome

from .. import tasks
from ..clock import Clock
from ..redis_state import unknown
from ..runs import worker_process
from ..shape import OF_DJANGO
from ..storage.test_row_errors import refusing
from ..workers import start_workers, wait_until, workers

PACKAGE = Path(__file__).parent.parent.parent / "django_asyncq"
TABLE = "django_asyncq_taskrecord"
LOGGER = "django_asyncq.tests"


@pytest.fixture
def faults() -> Faults:
    """The errors of a loop called x."""
    return Faults(get_logger(LOGGER), "loop %s waits", "x", over="loop %s goes on", failed="loop %s failed")


def of_driver(error: Exception, **attributes: object) -> OperationalError:
    """Return an error as Django raises it for one of a driver."""
    for name, value in attributes.items():
        setattr(error, name, value)
    found = OperationalError(str(error))
    found.__cause__ = error
    return found


def locked() -> OperationalError:
    """A database that another writer has locked."""
    return of_driver(sqlite3.OperationalError("database is locked"), sqlite_errorcode=sqlite3.SQLITE_BUSY)


def no_table() -> OperationalError:
    """A table that does not exist."""
    return of_driver(sqlite3.OperationalError("no such table: x"), sqlite_errorcode=sqlite3.SQLITE_ERROR)


@pytest.mark.parametrize("error", [BrokerUnavailable("Redis is away"), OperationalError("the server is away")])
def test_an_outage_is_logged_once_and_may_be_logged_again_after_it(
    faults: Faults, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """With a pause each time, and one line with how long it took when it is over."""
    caplog.set_level(logging.INFO, LOGGER)
    for _ in range(2):
        assert [faults.note(error) for _ in range(3)] == [PAUSE_SECONDS] * 3
        assert faults.is_failing
        faults.clear()
        faults.clear()
    assert caplog.messages[::2] == [f"loop x waits: {error}"] * 2
    assert all(re.fullmatch(r"loop x goes on, after 0\.\d s", message) for message in caplog.messages[1::2])
    assert len(caplog.messages) == 4
    assert faults.not_set_up is None


def test_one_loop_says_for_all_that_a_store_is_unreachable(caplog: pytest.LogCaptureFixture) -> None:
    """And another one when that loop reaches it again and they do not; the other store is another outage."""
    caplog.set_level(logging.INFO, LOGGER)
    outages = Outages()
    first, second, third = (
        Faults(get_logger(LOGGER), f"loop {name} waits", over=f"loop {name} goes on", outages=outages) for name in "abc"
    )
    for _ in range(2):
        for loop in (first, second):
            loop.note(BrokerUnavailable("down"))
        third.note(of_driver(sqlite3.OperationalError("disk I/O error"), sqlite_errorcode=sqlite3.SQLITE_IOERR))
    assert [record.message.split(":")[0] for record in caplog.records] == ["loop a waits", "loop c waits"]
    first.clear()
    second.clear()
    assert [record.message.split(",")[0] for record in caplog.records[2:]] == ["loop a goes on"]
    second.note(BrokerUnavailable("down"))
    assert caplog.records[-1].message.startswith("loop b waits")


def test_a_lock_is_met_again_at_once_a_few_times(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """Without a line; then it counts as an outage."""
    pauses = [faults.note(locked()) for _ in range(MOST_AGAIN + 2)]
    assert all(pause <= LONGEST_AGAIN_SECONDS for pause in pauses[:MOST_AGAIN])
    assert pauses[MOST_AGAIN:] == [PAUSE_SECONDS] * 2
    assert caplog.messages == ["loop x waits: database is locked"]
    faults.clear()
    assert faults.note(locked()) <= LONGEST_AGAIN_SECONDS


def test_a_missing_table_is_said_once_with_the_remedy_and_ends_the_process(
    faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """After several looks in a row, for a migration may be running at this moment."""
    for look in range(1, NOT_SET_UP_LOOKS + 1):
        assert faults.not_set_up is None
        faults.note(no_table())
        if look == 1:
            faults.note(OperationalError("the server is away"))
            faults.note(no_table())
            assert faults.not_set_up is None
    faults.note(no_table())
    error = faults.not_set_up
    assert isinstance(error, DatabaseNotSetUp)
    assert "manage.py migrate" in error.remedy
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "no such table: x; run `manage.py migrate`" in lines[0].getMessage()
    faults.clear()
    assert faults.not_set_up is None


@pytest.mark.parametrize("error", [DataError("timestamp too large"), KeyError("x"), RuntimeError("bug")])
def test_any_other_error_is_logged_once_with_its_traceback(
    faults: Faults, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Each text once."""
    for _ in range(3):
        assert faults.note(error) == PAUSE_SECONDS
        faults.note(ValueError("another"))
    assert [message.split(":")[0] for message in caplog.messages] == ["loop x failed"] * 2
    assert all(record.exc_info for record in caplog.records)


def test_parts_of_a_round_fail_alone(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged once until it has succeeded; what concerns all parts is raised."""

    def fail(error: Exception) -> int:
        raise error

    for _ in range(3):
        assert faults.attempt("part a", lambda: fail(TypeError("odd")), 7) == 7
        assert faults.attempt("part b", lambda: fail(DataError("odd")), 8) == 8
        assert faults.attempt("part c", lambda: 9, 0) == 9
    assert [message.split(" failed")[0] for message in caplog.messages] == ["part a", "part b"]
    faults.attempt("part a", lambda: 1, 0)
    faults.attempt("part a", lambda: fail(TypeError("odd")), 0)
    assert len(caplog.messages) == 3
    for error in (BrokerUnavailable("away"), LockLost("x", 1), OperationalError("away"), locked(), no_table()):
        with pytest.raises(type(error)):
            faults.attempt("part d", lambda error=error: fail(error), 0)  # type: ignore[misc]


def test_a_loop_ends_its_process_when_nothing_can_work() -> None:
    """And goes on after every other error."""
    errors: list[Exception] = [OperationalError("away"), KeyError("x"), *[no_table() for _ in range(NOT_SET_UP_LOOKS)]]

    def step() -> float:
        raise errors.pop(0)

    loop = Loop("repairs", step)
    while errors:
        assert loop.not_set_up is None
        assert loop.tick() is not None
    assert loop.not_set_up is not None


def test_waits_begin_at_once_when_an_outage_is_over() -> None:
    """A wait that failed during it had been postponed by seconds."""
    clock = Clock()
    pacing = Pacing(clock)
    for _ in range(6):
        pacing.fail()
        pacing.wait_failed()
        clock.now += pacing.until_wait()
    pacing.wait_failed()
    assert pacing.until_wait() > 0
    pacing.begin()
    assert pacing.finish(0, is_more_left=False, look_seconds=5.0)
    assert pacing.until_wait() == 0


# --- the processes


@pytest.mark.django_db(transaction=True)
def test_the_reporter_survives_a_row_that_refuses_every_write() -> None:
    """The outcomes beside it are recorded; the row is set aside, and its entry leaves Redis."""
    set_aside.clear()
    with worker_process() as process:
        for _ in range(3):
            tasks.add.enqueue(1)
        runs = lifecycle.claim(process.broker, "default", process.worker_id, 3, "default").runs
        for run in runs:
            lifecycle.begin(run, process.worker_id, timezone.now())
        process.reporter.start()
        with refusing("UPDATE", runs[1].record):
            for run in runs:
                process.reporter.report(Outcome(Job(run, tasks.add, 0.0), timezone.now(), 1))
            assert process.reporter.close(30)
    states = dict(TaskRecord.objects.values_list("id", "state"))
    assert [states[run.record.id] for run in runs] == [TaskState.SUCCEEDED, TaskState.QUEUED, TaskState.SUCCEEDED]
    assert unknown([runs[1].record.id]) == [str(runs[1].record.id)]
    assert [row.id for row in set_aside.rows()] == [str(runs[1].record.id)]
    set_aside.clear()


@pytest.mark.django_db(transaction=True)
def test_runworkers_refuses_a_database_without_its_tables() -> None:
    """At once, with the remedy, and with an exit code that is not 0."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
    try:
        done = start_workers()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")
    assert done.returncode == 1
    assert done.stderr.count("manage.py migrate") == 1


@pytest.mark.django_db(transaction=True)
def test_workers_end_when_a_table_disappears(tmp_path: Path) -> None:
    """The supervisor too, with the remedy. What the worker held is not lost."""
    with workers(tmp_path, "--processes", "1") as running:
        first = tasks.add.enqueue(1)
        wait_for(first.id)
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
        try:
            assert running.process.wait(40) == 1
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")
        assert "manage.py migrate" in running.output()
        assert "Traceback" not in running.output()


@pytest.mark.django_db(transaction=True)
def test_workers_wait_for_a_migration_that_is_still_to_come(tmp_path: Path) -> None:
    """They say so once, and begin as soon as their tables have every column; a stop ends the wait."""
    first = tasks.add.enqueue(1)

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {TABLE} RENAME COLUMN {old} TO {new}")

    recorder = MigrationRecorder(connection)
    recorder.record_unapplied("django_asyncq", "0001_initial")
    rename("version", "version_later")
    try:
        with workers(tmp_path, "--processes", "1") as running:
            wait_until(lambda: "waiting for manage.py migrate" in running.output(), "the line")
            assert running.stop() == 0
        with workers(tmp_path, "--processes", "1") as running:
            wait_until(lambda: running.output().count("waiting for manage.py migrate") == 2, "the second line")
            assert running.process.poll() is None
            rename("version_later", "version")
            wait_for(first.id)
        assert "Traceback" not in running.output()
    finally:
        recorder.record_applied("django_asyncq", "0001_initial")
        with suppress(DatabaseError):
            rename("version_later", "version")


def wait_for(id: Any) -> None:
    """Wait until a task has succeeded."""
    wait_until(lambda: TaskRecord.objects.get(id=id).state == TaskState.SUCCEEDED, "outcome")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no privileges")
def test_workers_end_when_a_privilege_is_missing(tmp_path: Path) -> None:
    """The worker process says it to its supervisor, whose own statements still succeed."""
    user = "asyncq_without_update"
    with connection.cursor() as cursor:
        cursor.execute(f"DROP ROLE IF EXISTS {user}")
        cursor.execute(f"CREATE ROLE {user} LOGIN")
        cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {user}")
        cursor.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {user}")
        cursor.execute(f"REVOKE UPDATE ON {TABLE} FROM {user}")
    settings = connection.settings_dict
    url = f"postgres://{user}@{settings['HOST']}:{settings['PORT']}/{settings['NAME']}"
    try:
        tasks.add.enqueue(1)
        with workers(tmp_path, "--processes", "1", DATABASE_URL=url) as running:
            assert running.process.wait(40) == 1
            assert "SELECT, INSERT, UPDATE and DELETE" in running.output()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {user}")
            cursor.execute(f"DROP ROLE {user}")


def test_errors_are_errors_of_django() -> None:
    """The names that the check above looks for are all there are."""
    from django import db

    of_django = {name for name in dir(db) if isinstance(getattr(db, name), type)}
    of_django = {name for name in of_django if issubclass(getattr(db, name), DatabaseError)}
    assert of_django <= OF_DJANGO
