"""A transaction of the project that keeps a row locked, such as a request that cancels a task, holds up no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.registry import registered
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage.routing import transaction_of, writing_database
from django_asyncq.worker.job import Job, JobPhase, Outcome
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.wakeup import Wakeup

from .. import tasks
from ..workers import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock for all rows"),
]

COUNT = 500


@contextmanager
def cancelling(*ids: Any, committed: bool = True) -> Iterator[None]:
    """Cancel tasks in a transaction of another connection, which stays open in the block. committed: at its end."""
    is_open, may_commit = threading.Event(), threading.Event()

    def request() -> None:
        with transaction_of(TaskRecord):
            TaskRecord.objects.filter(id__in=ids).cancel(by="a slow request")
            is_open.set()
            may_commit.wait(60)
            transaction.set_rollback(not committed, using=writing_database(TaskRecord))
        connections.close_all()

    thread = threading.Thread(target=request)
    thread.start()
    assert is_open.wait(30)
    try:
        yield
    finally:
        may_commit.set()
        thread.join(30)


@contextmanager
def reporting() -> Iterator[Reporter]:
    """A reporter whose thread is started, and closed at the end."""
    reporter = Reporter(Broker("worker"), "w", Wakeup(), threading.Event())
    reporter.start()
    yield reporter
    assert reporter.close(20)
    assert reporter.unwritten == 0


def running(count: int, *, marked: bool = True) -> list[lifecycle.Run]:
    """Return the runs of new tasks, which their rows show as RUNNING if they are marked."""
    tasks.add.enqueue_many([(number,) for number in range(count)])
    runs: list[lifecycle.Run] = []
    while found := lifecycle.claim(Broker(), "default", "w", 200, "default").runs:
        runs += found
    for run in runs:
        lifecycle.begin(run, "w", timezone.now())
    if marked:
        assert lifecycle.mark_running(runs) == []
    return runs


def job_of(run: lifecycle.Run) -> Job:
    """Return the job of a run that has begun."""
    job = Job(run, registered(run.record.name), time.monotonic())
    job.phase = JobPhase.RUNNING
    return job


def report(reporter: Reporter, runs: list[lifecycle.Run]) -> None:
    """Have the success of runs reported."""
    for run in runs:
        reporter.report(Outcome(job_of(run), timezone.now(), 1))


def succeeded() -> int:
    """How many tasks have succeeded."""
    return TaskRecord.objects.succeeded().count()


def test_an_open_cancel_delays_no_other_outcome() -> None:
    """499 outcomes are written while it is open; that of the locked row when the transaction is over."""
    runs = running(COUNT)
    with reporting() as reporter:
        with cancelling(runs[250].record.id):
            report(reporter, runs)
            wait_until(lambda: succeeded() == COUNT - 1, "all other outcomes")
            more = running(3)
            report(reporter, more)
            wait_until(lambda: succeeded() == COUNT + 2, "later outcomes")
            wait_until(lambda: reporter.unwritten == 1, "the count of what is left")
        wait_until(lambda: succeeded() == COUNT + 3, "the last outcome")
    found = TaskRecord.objects.get(id=runs[250].record.id)
    assert found.cancelled_by == "a slow request"
    assert Broker().held("default", "w") == []


def test_an_open_cancel_of_a_task_that_begins_holds_up_nobody() -> None:
    """Its row cannot become RUNNING; others do, and their outcomes are written.

    A worker holds it, so the cancel only asks it to stop, and what it has done by then stands.
    """
    first, *others = runs = running(4, marked=False)
    with reporting() as reporter:
        with cancelling(first.record.id):
            reporter.mark([job_of(run) for run in runs])
            wait_until(lambda: TaskRecord.objects.running().count() == 3, "the marks of the others")
            report(reporter, [*others, first])
            wait_until(lambda: succeeded() == 3, "the outcomes of the others")
        wait_until(lambda: reporter.unwritten == 0, "its own outcome")
    found = TaskRecord.objects.get(id=first.record.id)
    assert (found.state, found.cancelled_by) == (TaskState.SUCCEEDED, "a slow request")


def test_worker_that_stops_waits_for_the_row_as_long_as_it_may() -> None:
    """What is still locked is then spilled to Redis, and recorded by another process."""
    (run,) = running(1)
    reporter = Reporter(Broker("worker"), "w", Wakeup(), threading.Event())
    reporter.start()
    with cancelling(run.record.id):
        report(reporter, [run])
        wait_until(lambda: reporter._locked.events, "the outcome to be put aside")
        assert not reporter.close(0.5)
        reporter.spill_outcomes()
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="stopped")
    assert succeeded() == 1
    assert TaskRecord.objects.get().cancelled_by == "a slow request"


def test_deleted_row_is_not_taken_for_a_locked_one() -> None:
    """Its run is lost, as without any lock."""
    gone, locked, free = running(3)
    TaskRecord.objects.filter(id=gone.record.id).delete()
    for run in (gone, locked, free):
        lifecycle.succeed(run, 1, timezone.now())
    with cancelling(locked.record.id):
        recorded = lifecycle.record_unlocked([gone, locked, free])
    assert recorded == ([gone], {locked})
    assert succeeded() == 1


def test_task_that_waits_for_its_mark_goes_on_waiting_while_its_row_is_locked() -> None:
    """A request that locks the row and is rolled back is no other run: the function is called then."""
    (run,) = running(1, marked=False)
    job = job_of(run)
    job.marked = Future()
    with reporting() as reporter:
        with cancelling(run.record.id, committed=False):
            reporter.mark([job])
            wait_until(lambda: reporter._locked.events, "the mark to be put aside")
            assert not job.marked.done()
        job.marked.result(10)
    assert TaskRecord.objects.get().state == TaskState.RUNNING
