"""Threads return a pooled connection after each piece of work, and a task that gets none runs later."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.registry import registered
from django_asyncq.models import Gate, TaskRecord, TaskState
from django_asyncq.storage.routing import is_pooled, return_connections
from django_asyncq.worker.complete import Completion
from django_asyncq.worker.job import Job, JobPhase
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.wakeup import Wakeup

from .. import tasks
from ..workers import environment, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL has a pool here")
with_pool = pytest.mark.skipif(
    connection.vendor != "postgresql" or find_spec("psycopg_pool") is None,
    reason="only PostgreSQL with psycopg_pool has a pool here",
)
POOL_IS_EMPTY = "couldn't get a connection"


def pool(**options: Any) -> str:
    """Options of a pool for the processes that a test starts; it opens one connection at first."""
    return json.dumps({"min_size": 1, **options})


@pytest.fixture(autouse=True)
def counter() -> None:
    """The row that tasks count in."""
    Gate.objects.create(name="counter", limit=0)


def rows_of(results: list[Any]) -> list[TaskRecord]:
    """The rows of results."""
    return list(TaskRecord.objects.filter(id__in=[result.id for result in results]))


# --- threads return their connections


@with_pool
def test_tasks_have_all_connections_of_the_pool() -> None:
    """Tasks that hold a connection for half a second, in a pool of two: none fails, as it would if others kept them."""
    results = [tasks.counts_and_naps.enqueue(0.5) for _ in range(12)]
    run_workers("--concurrency", "8", "--processes", "1", ASYNCQ_TEST_POOL=pool(max_size=2, timeout=10))
    rows = rows_of(results)
    assert {(row.state, row.attempt) for row in rows} == {(TaskState.SUCCEEDED, 1)}


@with_pool
def test_no_thread_keeps_a_connection_between_pieces_of_work(tmp_path: Path) -> None:
    """With a pool of one, a thread of a worker or a supervisor that kept it would stop all others."""
    kinds: list[Any] = [
        lambda: tasks.counts_and_naps.enqueue(0.0),
        lambda: tasks.counts_and_naps_async.enqueue(0.0),
        lambda: tasks.add_async.enqueue(1),
        lambda: tasks.counts_once.enqueue(),
        lambda: tasks.completes.enqueue(),
        lambda: tasks.fail_until.enqueue(9),
        lambda: tasks.nap.enqueue(0.2),
        lambda: tasks.gated.enqueue("pooled"),
    ]
    options = ["--concurrency", "2", "--processes", "1"]
    with workers(tmp_path, *options, ASYNCQ_TEST_POOL=pool(max_size=1, timeout=2)) as running:
        for enqueue in kinds * 2:
            # One after the other, so that the process is idle in between.
            result = enqueue()
            wait_until(lambda id=result.id: TaskRecord.objects.get(id=id).finished_at, "end of the task")
        assert running.stop() == 0
    assert TaskRecord.objects.filter(state=TaskState.FAILED).count() == 2  # as they are written
    assert POOL_IS_EMPTY not in running.output()


@on_postgresql
def test_connection_without_a_pool_stays_open() -> None:
    """A new one for each piece of work would cost more than the work."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    driver = connection.connection
    return_connections()
    assert connection.connection is driver
    assert driver is not None


@pytest.mark.parametrize(
    ("options", "pooled"),
    [({"pool": True}, True), ({"pool": {"max_size": 9}}, True), ({"pool": False}, False), ({}, False)],
)
def test_pool_is_found_in_the_options(options: dict[str, Any], pooled: bool) -> None:
    """As Django reads them."""
    assert is_pooled({"OPTIONS": options}) is pooled
    assert not is_pooled({})


@contextmanager
def pooled(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    """Give the connections of this process a pool; yield its settings."""
    connections.close_all()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "pool", {"min_size": 1, **options})
    try:
        yield connection.pool
    finally:
        connections.close_all()
        connection.close_pool()
        monkeypatch.undo()


@with_pool
def test_connection_within_a_transaction_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it would undo the transaction."""
    from django.db import transaction

    with pooled(monkeypatch, max_size=1):
        with transaction.atomic():
            Gate.objects.filter(name="counter").update(limit=1)
            return_connections()
            assert Gate.objects.get(name="counter").limit == 1
        return_connections()
        assert connection.connection is None
    assert Gate.objects.get(name="counter").limit == 1


@with_pool
def test_slot_that_waits_for_the_reporter_may_hold_the_last_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reporter waits for a connection before it takes the lock that the slot waits for."""
    reporter = Reporter(Broker("worker"), "w", Wakeup(), threading.Event())
    job = job_of(TaskRecord.objects.create(name="tests.tasks.completes"))
    job.phase = JobPhase.RUNNING
    other = job_of(TaskRecord.objects.create(name="tests.tasks.nap"))
    other.phase = JobPhase.RUNNING
    with pooled(monkeypatch, max_size=1, timeout=20):
        Gate.objects.count()  # this thread, a slot, has the only connection
        reporter.mark([other])
        reporter.start()
        wait_until(lambda: connection.pool.get_stats().get("requests_waiting"), "a reporter that waits")
        began = time.monotonic()
        with Completion(job, reporter.leave_row, reporter.report).block():
            Gate.objects.update(limit=7)
        connections.close_all()
        assert reporter.close(10)
        assert time.monotonic() - began < 5
    states = {str(row.id): row.state for row in TaskRecord.objects.all()}
    assert states[str(other.run.record.id)] == TaskState.RUNNING
    assert states[str(job.run.record.id)] == TaskState.SUCCEEDED


@with_pool
def test_reporter_whose_marking_fails_lets_the_slot_with_the_last_connection_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The statement fails, and a slot takes the connection: the reporter waits for one without the lock."""
    reporter = Reporter(Broker("worker"), "w", Wakeup(), threading.Event())
    job = job_of(TaskRecord.objects.create(name="tests.tasks.completes"))
    other = job_of(TaskRecord.objects.create(name="tests.tasks.nap"))
    job.phase = other.phase = JobPhase.RUNNING
    mark, given, taken = lifecycle.mark_running, threading.Event(), threading.Event()

    def fails_once(runs: Any, **options: Any) -> Any:
        if given.is_set():
            return mark(runs, **options)
        connection.close()
        given.set()
        taken.wait(10)
        raise OperationalError("the connection was lost")

    def complete() -> None:
        try:
            given.wait(10)
            Gate.objects.count()
            taken.set()
            with Completion(job, reporter.leave_row, reporter.report).block():
                Gate.objects.update(limit=7)
        finally:
            connections.close_all()

    monkeypatch.setattr(lifecycle, "mark_running", fails_once)
    slot = threading.Thread(target=complete, daemon=True)
    with pooled(monkeypatch, max_size=1, timeout=1):
        connections.close_all()
        reporter.mark([other])
        reporter.start()
        slot.start()
        slot.join(15)
        assert not slot.is_alive()
        assert reporter.close(10)
        states = {str(row.id): row.state for row in TaskRecord.objects.all()}
        connections.close_all()
    assert states[str(other.run.record.id)] == TaskState.RUNNING
    assert states[str(job.run.record.id)] == TaskState.SUCCEEDED


# --- a run that gets no connection


FULL = "FATAL: sorry, too many clients already"


@pytest.mark.parametrize("name", ["writes_before_full", "writes_before_full_async", "writes_before_full_in_thread"])
def test_run_that_has_written_is_not_repeated_unasked(name: str, tmp_path: Path) -> None:
    """Also when it has closed its connections itself before it got no other one."""
    result = getattr(tasks, name).enqueue(FULL)
    with workers(tmp_path, "--concurrency", "2") as running:
        wait_until(lambda: TaskRecord.objects.get(id=result.id).finished_at, "end of the task", seconds=20)
        assert running.stop() == 0
    (row,) = rows_of([result])
    assert (row.state, row.attempt, row.crash_count) == (TaskState.FAILED, 1, 0)
    assert Gate.objects.get(name="counter").limit == 1


def test_block_that_finds_the_server_full_before_it_begins_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a connection was there before, which is dead."""
    Gate.objects.count()
    job = job_of(TaskRecord.objects.create(name="tests.tasks.completes"))

    def fail(runs: Any, **options: Any) -> Any:
        connection.close()
        raise OperationalError(FULL)

    monkeypatch.setattr(lifecycle, "mark_running", fail)
    block = Completion(job, lambda job: None, lambda outcome: None).block
    with pytest.raises(OperationalError), block():
        pytest.fail("it has begun")
    assert job.cut is None and job.unconnected is not None


class ProtocolViolation(Exception):
    """What psycopg raises for PgBouncer's FATAL error."""

    sqlstate = "08P01"


def test_block_whose_first_statement_finds_the_pooler_full_is_no_cut() -> None:
    """PgBouncer lets a transaction wait, then ends the connection; three of them must not fail the task."""
    job = job_of(TaskRecord.objects.create(name="tests.tasks.completes"))
    with pytest.raises(OperationalError), Completion(job, lambda job: None, lambda outcome: None).block():
        connection.connection.close()
        text = "query_wait_timeout\nserver closed the connection unexpectedly"
        raise OperationalError(text) from ProtocolViolation()
    assert job.cut is None and job.unconnected is not None
    connection.close()
    assert Gate.objects.get(name="counter").limit == 0


def job_of(record: TaskRecord) -> Job:
    """A job that has begun."""
    from django_asyncq.broker import Lease

    job = Job(lifecycle.Run(record, Lease(str(record.id), 1)), registered(record.name), time.monotonic())
    lifecycle.begin(job.run, "w", timezone.now())
    return job


ROLE = "asyncq_crowded"


@contextmanager
def crowded(limit: int) -> Iterator[str]:
    """Create a role that has so many connections; yield the URL with which processes use it."""
    with connection.cursor() as cursor:
        cursor.execute(f"DROP ROLE IF EXISTS {ROLE}")
        cursor.execute(f"CREATE ROLE {ROLE} LOGIN CONNECTION LIMIT {limit} IN ROLE pg_read_all_data, pg_write_all_data")
    scheme, _, rest = environment()["DATABASE_URL"].partition("://")
    try:
        yield f"{scheme}://{ROLE}@{rest.rpartition('@')[2]}"
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [ROLE])
            cursor.execute(f"DROP ROLE {ROLE}")


@on_postgresql
@pytest.mark.parametrize("name", ["counts_and_naps", "counts_once_and_naps"])
def test_full_server_uses_no_attempt(name: str, tmp_path: Path) -> None:
    """Twelve tasks with one attempt each want eight connections, and the role has fewer left."""
    results = [getattr(tasks, name).enqueue(0.7) for _ in range(12)]
    options = ["--concurrency", "8", "--processes", "1"]
    with crowded(9) as url, workers(tmp_path, *options, DATABASE_URL=url) as running:
        wait_until(lambda: all(row.finished_at for row in rows_of(results)), "end of all tasks", seconds=100)
        assert running.stop() == 0
    rows = rows_of(results)
    assert {(row.state, row.attempt, row.crash_count) for row in rows} == {(TaskState.SUCCEEDED, 1, 0)}
    assert [row.errors for row in rows] == [[]] * 12
    assert running.output().count("get no connection to the database") == 1
    if name == "counts_once_and_naps":
        assert Gate.objects.get(name="counter").limit == 12


@with_pool
def test_empty_pool_uses_no_attempt(tmp_path: Path) -> None:
    """Each task holds the only connection for longer than the others wait for it."""
    kinds = [tasks.counts_and_naps, tasks.counts_once_and_naps, tasks.counts_and_naps_async]
    results = [each.enqueue(1.5) for each in kinds]
    options = ["--concurrency", "4", "--processes", "1"]
    with workers(tmp_path, *options, ASYNCQ_TEST_POOL=pool(max_size=1, timeout=1)) as running:
        wait_until(lambda: all(row.finished_at for row in rows_of(results)), "end of all tasks", seconds=100)
        assert running.stop() == 0
    rows = rows_of(results)
    assert {(row.state, row.attempt, row.crash_count) for row in rows} == {(TaskState.SUCCEEDED, 1, 0)}
    assert running.output().count("get no connection to the database") == 1
    # Said at the start, of the options with which it was started.
    assert "a pool of 1 connections, and a worker process has 4 slots" in running.output()
