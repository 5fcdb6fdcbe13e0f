"""A run whose database connection is cut before its commit runs again, without using an attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, connections, transaction
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.registry import registered
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.worker.complete import Completion, causes_of, is_cut
from django_asyncq.worker.job import Job, JobPhase, Outcome, OutcomeKind
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.wakeup import Wakeup

from .. import tasks
from ..workers import history, run_workers, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

on_a_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server that ends a connection")
on_postgresql = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="the test names functions, codes or texts of PostgreSQL"
)
on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="the test names numbers of MySQL and MariaDB")
WAYS = [pytest.param(how, marks=on_a_server) for how in ("statement", "swallowed", "wrapped", "idle", "at commit")]
# How a body ends its transaction itself, and what the error says of it.
CLOSED, ENDED = "closed its own database connection", "ended its own transaction"
OWN_ENDS = [
    *((how, CLOSED) for how in ("closed", "closed and used", "swallowed", "wrapped")),
    *((how, CLOSED) for how in ("driver closed", "driver closed and used")),
    *((how, ENDED) for how in ("ROLLBACK", "ROLLBACK and used", "COMMIT", "COMMIT and used", "driver rollback")),
    pytest.param("ABORT", ENDED, marks=on_postgresql),
    pytest.param("DDL", ENDED, marks=on_mysql),
]


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@pytest.fixture(autouse=True)
def counter() -> None:
    """The row that tasks count in."""
    Gate.objects.create(name="counter", limit=0)


def counted() -> int:
    """How often the effect is there."""
    return Gate.objects.get(name="counter").limit


def record_of(result: Any) -> TaskRecord:
    """The row of a result."""
    return TaskRecord.objects.get(id=result.id)


def runs_of(path: Path) -> int:
    """How often the body began."""
    return len([line for line in history(path) if line["event"] == "is_cut"])


# --- runs in a worker


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["is_cut", "is_cut_in_block"])
def test_cut_run_is_repeated_without_using_an_attempt(name: str, how: str, history_path: Path) -> None:
    """Two cuts, then the effect once. The error of each cut is kept, with the database's own."""
    result = getattr(tasks, name).using(max_attempts=1).enqueue(how, runs=[1, 2])
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.SUCCEEDED, 1, 2)
    assert (counted(), runs_of(history_path)) == (1, 3)
    assert {error["exception"] for error in record.errors} == {"django_asyncq.exceptions.WorkerLost"}
    assert all("connection was cut, and nothing was committed: " in error["message"] for error in record.errors)
    assert all(error["traceback"].startswith("Traceback") for error in record.errors)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["is_cut", "is_cut_in_block"])
def test_task_whose_every_run_is_cut_fails(name: str, how: str, history_path: Path, redis_client: Any) -> None:
    """After MAX_CRASHES cuts in a row; the error names the setting of the server that may do this."""
    result = getattr(tasks, name).using(max_attempts=9).enqueue(how, runs=list(range(1, 9)))
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.FAILED, 0, 3)
    assert (counted(), runs_of(history_path), len(record.errors)) == (0, 3, 3)
    assert "idle_in_transaction_session_timeout" in record.errors[-1]["message"]
    assert record.reason == FailureReason.WORKER_LOST


@on_postgresql
def test_error_of_the_idle_timeout_is_the_servers(history_path: Path) -> None:
    """It says what has ended the connection."""
    result = tasks.is_cut.enqueue("idle", runs=[1])
    log = run_workers().stderr
    assert "idle-in-transaction timeout" in record_of(result).errors[0]["message"]
    assert f"task {result.id} tests.tasks.is_cut: its database connection was cut" in log


@on_a_server
@pytest.mark.parametrize("name", ["is_cut", "is_cut_in_block"])
def test_commit_whose_answer_was_lost_with_the_connection_counts(name: str, history_path: Path) -> None:
    """The row was written in the same transaction, so it tells."""
    result = getattr(tasks, name).enqueue("answer lost", runs=[1])
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.SUCCEEDED, 1, 0)
    assert (counted(), runs_of(history_path), record.errors) == (1, 1, [])


@pytest.mark.parametrize(("how", "said"), OWN_ENDS)
@pytest.mark.parametrize("name", ["ends_its_transaction", "ends_its_block"])
def test_transaction_that_the_body_ends_itself_is_its_own_failure(
    name: str, how: str, said: str, history_path: Path
) -> None:
    """It fails at once, and the error says what the task did."""
    result = getattr(tasks, name).enqueue(how)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.FAILED, 1, 0)
    (error,) = record.errors
    assert error["exception"] == "django_asyncq.exceptions.TransactionEnded"
    assert said in error["message"]
    assert "idle_in_transaction" not in error["message"]
    assert (record.reason, len(history(history_path))) == (FailureReason.EXCEPTION, 1)


@pytest.mark.usefixtures("history_path")
def test_savepoint_that_the_body_loses_is_an_error_of_its_own() -> None:
    """Of the database, as Django raises it; it leaves the connection alive."""
    result = tasks.ends_its_transaction.using(max_attempts=1).enqueue("within a savepoint")
    run_workers()
    record = record_of(result)
    assert (record.state, record.crash_count) == (TaskState.FAILED, 0)
    assert "savepoint" in record.errors[0]["message"].lower()


@on_a_server
def test_cuts_are_counted_anew_after_a_run_that_finished(history_path: Path) -> None:
    """Cut twice, failed once, cut twice: four cuts, but never three in a row."""
    result = tasks.is_cut.enqueue("statement", runs=[1, 2, 4, 5], fails_in=3)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.SUCCEEDED, 2, 2)
    kinds = [error["exception"].rpartition(".")[2] for error in record.errors]
    assert kinds == ["WorkerLost", "WorkerLost", "Glitch", "WorkerLost", "WorkerLost"]
    assert counted() == 1


@on_a_server
def test_run_may_complete_after_a_block_that_was_cut() -> None:
    """The second block has a connection of its own, and is the outcome."""
    result = tasks.is_cut_and_completes.enqueue("statement")
    run_workers()
    record = record_of(result)
    assert (record.state, record.crash_count, record.errors) == (TaskState.SUCCEEDED, 0, [])
    assert counted() == 1


@on_a_server
def test_plain_task_that_is_cut_fails_with_its_own_error() -> None:
    """What it wrote before may be there, so nobody may repeat it unasked. The slot and the reporter go on."""
    failing, following = tasks.is_cut_outside.enqueue("statement"), tasks.add.enqueue(1)
    run_workers("--concurrency", "1")
    record = record_of(failing)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.FAILED, 1, 0)
    assert record.errors[0]["exception"] == "django.db.utils.OperationalError"
    assert record_of(following).state == TaskState.SUCCEEDED


# --- what a cut is


def raised(act: Callable[[], Any]) -> tuple[BaseException, Any]:
    """The error with which a transaction of one act ended, and the driver's connection that it had."""
    used = []
    with pytest.raises(DatabaseError) as caught, transaction.atomic():
        used.append(connection.connection)
        act()
    return caught.value, used[0]


def execute(sql: str) -> None:
    """Execute a statement."""
    with connection.cursor() as cursor:
        cursor.execute(sql)


def duplicate() -> None:
    """Violate a constraint."""
    Gate.objects.create(name="counter", limit=1)


def close_and_ask() -> None:
    """Close the connection, and use it."""
    connection.close()
    execute("SELECT 1")


def test_closed_connection_is_a_cut() -> None:
    """On every database, and whatever was raised from its error."""
    error, used = raised(close_and_ask)
    assert is_cut(error, connection, used)
    wrapped = ValueError()
    wrapped.__context__ = error
    assert is_cut(wrapped, connection, used)
    assert not is_cut(ValueError("before it noticed"), connection, used)


@pytest.mark.parametrize("act", [duplicate, lambda: execute("SELECT nothing_known")])
def test_error_on_a_live_connection_is_no_cut(act: Callable[[], Any]) -> None:
    """It is the function's own."""
    error, used = raised(act)
    assert not is_cut(error, connection, used)


@on_postgresql
@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT pg_terminate_backend(pg_backend_pid())", True),
        ("SET LOCAL statement_timeout = 20; SELECT pg_sleep(5)", False),
        ("SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(5)", False),
        ("DO $$ BEGIN RAISE SQLSTATE '57P05'; END $$", True),
        ("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$", False),
    ],
)
def test_codes_of_postgresql_that_are_cuts(sql: str, expected: bool) -> None:
    """A code that ends sessions counts even when a connection pool hides that the server's session is gone."""
    error, used = raised(lambda: execute(sql))
    assert is_cut(error, connection, used) is expected


@on_mysql
@pytest.mark.parametrize(
    ("number", "expected"), [(1053, True), (1927, True), (4031, True), (1205, False), (1213, False)]
)
def test_numbers_of_mysql_that_are_cuts(number: int, expected: bool) -> None:
    """A number that ends sessions counts even when a proxy hides that the server's session is gone."""
    raises = f"BEGIN NOT ATOMIC SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'x'; END"
    error, used = raised(lambda: execute(raises))
    assert is_cut(error, connection, used) is expected


@on_mysql
def test_connection_that_was_killed_is_a_cut() -> None:
    """The server says 1927 to the statement that kills its own connection."""
    error, used = raised(tasks.cut_connection)
    assert error.args[0] in (1317, 1927, 2013)
    assert is_cut(error, connection, used)


class Hostile(Exception):
    """An error of which nothing can be asked."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @property
    def __cause__(self) -> Any:
        raise RuntimeError("no cause")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def test_hostile_error_is_no_cut() -> None:
    """Nothing of it is called."""
    assert not is_cut(Hostile(), connection, None)


def test_causes_of_an_error_come_to_an_end() -> None:
    """Also in a circle."""
    first, second = ValueError(), KeyError()
    first.__cause__, second.__context__ = second, first
    assert list(causes_of(first)) == [first, second]
    assert list(causes_of(None)) == []


# --- parts of the worker


def job_of(record: TaskRecord) -> Job:
    """A job of an atomic task that has begun."""
    job = Job(lifecycle.Run(record, Lease(str(record.id), 1)), registered("tests.tasks.counts_once"), time.monotonic())
    lifecycle.begin(job.run, "w", timezone.now())
    return job


@pytest.fixture
def reporter() -> Iterator[Reporter]:
    """A reporter that was not started."""
    yield Reporter(Broker("worker"), "w", Wakeup(), threading.Event())
    connections.close_all()


@on_postgresql
def test_connection_that_died_before_the_transaction_is_a_cut(reporter: Reporter) -> None:
    """A slot may keep its connection for long (CONN_MAX_AGE)."""
    job = job_of(TaskRecord.objects.create(name="tests.tasks.counts_once"))
    execute("SELECT 1")
    backend = connection.connection.info.backend_pid
    end_from_elsewhere(f"SELECT pg_terminate_backend({backend}, 5000)")
    with pytest.raises(OperationalError) as caught, Completion(job, reporter.leave_row, reporter.report).block():
        raise AssertionError("the body was reached")
    assert job.cut is caught.value
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_error_of_the_function_is_no_cut(reporter: Reporter) -> None:
    """Nor is one of the database that leaves the connection alive."""
    job = job_of(TaskRecord.objects.create(name="tests.tasks.counts_once"))
    with pytest.raises(IntegrityError), Completion(job, reporter.leave_row, reporter.report).block():
        duplicate()
    assert job.cut is None


def end_from_elsewhere(sql: str) -> None:
    """Execute a statement on another connection."""

    def act() -> None:
        execute(sql)
        connection.close()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@on_postgresql
def test_commit_that_is_still_going_on_is_waited_for(reporter: Reporter) -> None:
    """A commit without an answer may be waiting for a replica: the row is locked meanwhile, and tells afterwards."""
    job = job_of(TaskRecord.objects.create(name="tests.tasks.counts_once"))
    lifecycle.mark_running([job.run])
    with transaction.atomic():
        job.uncertain = lifecycle.complete(job.run, "result", timezone.now())
        job.phase, job.cut = JobPhase.REPORTED, OperationalError("cut")
        reporter.report(Outcome(job, timezone.now(), None, job.cut, OutcomeKind.CUT))
        reporter.events.put(None)
        thread = threading.Thread(target=reporter.run)
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        with connection.cursor() as cursor:
            wait_until(lambda: cursor.execute(waits) and cursor.fetchone()[0], "a write that waits for the row")
    thread.join()
    record = TaskRecord.objects.get()
    assert (record.state, record.return_value, record.crash_count) == (TaskState.SUCCEEDED, "result", 0)
    assert job.phase is JobPhase.COMPLETED


def test_cut_is_not_spilled(reporter: Reporter, redis_client: Any) -> None:
    """It is no outcome: when the process must stop, the supervisor requeues the task."""
    cut, failed = tasks.counts_once.enqueue(), tasks.counts_once.enqueue()
    claimed = lifecycle.claim(reporter.broker, "default", "w", 2, "default")
    jobs = {run.lease.id: Job(run, registered(run.record.name), time.monotonic()) for run in claimed.runs}
    for job in jobs.values():
        lifecycle.begin(job.run, "w", timezone.now())
        job.phase = JobPhase.REPORTED
    reporter.report(Outcome(jobs[cut.id], timezone.now(), None, OperationalError("cut"), OutcomeKind.CUT))
    reporter.report(Outcome(jobs[failed.id], timezone.now(), None, ValueError()))
    reporter.spill_outcomes()
    keys = QueueKeys("default")
    assert [redis_client.hexists(keys.task(id), "outcome") for id in (cut.id, failed.id)] == [False, True]
