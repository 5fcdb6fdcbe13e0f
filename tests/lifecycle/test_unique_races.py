"""Unique tasks when several act at once: transactions, producers, and the run of the task itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone

from django_asyncq import DuplicateTask, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.exceptions import LeaseLost, TaskCancelled
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage.errors import ErrorKind, kind_of
from django_asyncq.testing import failpoints
from django_asyncq.worker.job import Job, JobPhase, StopReason
from django_asyncq.worker.marks import wait_until_marked
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.wakeup import Wakeup

from .. import tasks, unique_tasks
from ..runs import taken_by
from ..workers import environment, run_workers

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_SECONDS = 40.0


class Caller(threading.Thread):
    """Calls a function in a thread with connections of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call
        self.result: Future[Any] = Future()
        self.start()

    def run(self) -> None:
        """Call, and close the connections."""
        try:
            self.result.set_result(self.call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            self.result.set_exception(error)
        finally:
            connections.close_all()

    def value(self) -> Any:
        """What the call returned or raised."""
        try:
            return self.result.result(PATIENCE_SECONDS)
        finally:
            self.join(PATIENCE_SECONDS)


@pytest.fixture
def has_looked() -> Iterator[threading.Event]:
    """Set once a thread beside the test's has looked for a holder, found none, and is about to insert."""
    found = threading.Event()

    def note(name: str) -> None:
        if name == "enqueue.slot_acquired" and threading.current_thread() is not threading.main_thread():
            found.set()

    before = failpoints.arm(note)
    yield found
    failpoints.arm(before)


# --- two transactions


@pytest.mark.parametrize("on_duplicate", ["reject", "return"])
def test_the_second_of_two_transactions_waits_for_the_first_to_commit(
    has_looked: threading.Event, on_duplicate: Any
) -> None:
    """It looked before the first had committed, and the INSERT decides."""
    with transaction.atomic():
        first = unique_tasks.clicked.enqueue(1)
        second = Caller(lambda: unique_tasks.clicked.using(on_duplicate=on_duplicate).enqueue(1))
        assert has_looked.wait(PATIENCE_SECONDS)
        assert TaskRecord.objects.count() == 1
    if on_duplicate == "return":
        assert second.value().id == first.id
    else:
        with pytest.raises(DuplicateTask, match=first.id):
            second.value()
    assert TaskRecord.objects.count() == 1


def test_the_second_is_accepted_when_the_first_rolls_back(has_looked: threading.Event) -> None:
    """Nobody else ever held the slot."""
    with suppress(ZeroDivisionError), transaction.atomic():
        unique_tasks.clicked.enqueue(1)
        second = Caller(lambda: unique_tasks.clicked.enqueue(1))
        assert has_looked.wait(PATIENCE_SECONDS)
        raise ZeroDivisionError
    found = second.value()
    assert str(TaskRecord.objects.get().id) == found.id


@pytest.mark.skipif(connection.vendor != "mysql", reason="only its INSERT locks the neighbour in an index")
def test_a_producer_does_not_hold_up_the_report_of_a_neighbour() -> None:
    """The INSERT of a slot that was used before locks the next one in the index too, until the producer commits."""
    before = connection.copy()
    with before.cursor() as cursor:
        # While a snapshot is open, nothing that was deleted leaves the index.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        cursor.execute("SELECT COUNT(*) FROM django_asyncq_taskrecord")
    words = []
    try:
        for number in range(8):
            task = tasks.add.using(unique=f"{number}", on_duplicate="follow")
            task.enqueue(1, 1)
            lifecycle.cancel([UUID(task.enqueue(2, 2).id)])
            run = taken_by("w")
            lifecycle.succeed(run, 1, timezone.now())
            plain = tasks.add.enqueue(3, 3)
            neighbour = taken_by("w")
            lifecycle.succeed(neighbour, 1, timezone.now())
            with transaction.atomic():
                task.enqueue(4, 4)
                lost, locked = Caller(lambda runs=(run, neighbour): lifecycle.record_unlocked(runs)).value()
                assert lost == []
                assert neighbour not in locked
                words.append("locked" if run in locked else "written")
            if locked:
                assert lifecycle.record_unlocked([run]) == ([], set())
            assert TaskRecord.objects.get(id=plain.id).state == TaskState.SUCCEEDED
            TaskRecord.objects.all().delete()
    finally:
        before.close()
    # Which slots are neighbours depends on their digests.
    assert set(words) == {"locked", "written"}


def test_lists_of_the_same_keys_in_opposite_order_do_not_deadlock() -> None:
    """Each row is inserted once; nobody is the victim of a deadlock."""
    keys = list(range(60))

    def enqueue(keys: list[int]) -> int:
        with transaction.atomic():
            results = unique_tasks.report.enqueue_many([(key,) for key in keys], partial=True)
        return sum(result is not None for result in results)

    callers = [Caller(lambda keys=keys: enqueue(keys)) for keys in (keys, keys[::-1], keys[30:] + keys[:30])]  # type: ignore[misc]
    assert sum(caller.value() for caller in callers) == 60
    assert TaskRecord.objects.count() == 60


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one isolation level")
def test_a_snapshot_that_does_not_show_the_holder() -> None:
    """PostgreSQL's serialization error goes to the caller; MySQL reads the holder with a lock."""
    alias = TaskRecord.objects.db
    if connection.vendor == "mysql":
        # For the next transaction.
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with transaction.atomic(using=alias):
        if connection.vendor == "postgresql":
            with connections[alias].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not TaskRecord.objects.exists()
        first = Caller(lambda: unique_tasks.report.enqueue(1)).value()
        if connection.vendor == "postgresql":
            with pytest.raises(OperationalError, match="serialize") as caught, transaction.atomic(using=alias):
                unique_tasks.report.enqueue(1)
            assert kind_of(caught.value) is ErrorKind.AGAIN
        else:
            assert not TaskRecord.objects.exists()
            with pytest.raises(DuplicateTask, match=first.id):
                unique_tasks.report.enqueue(1)


def test_the_task_finishes_between_the_look_and_the_insert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round finds a free slot, so the call is accepted."""
    from django_asyncq.lifecycle import unique

    first = unique_tasks.report.enqueue(1)
    run = taken_by("w")
    real = unique.insert

    def insert_late(records: Any, connection: Any) -> Any:
        inserted = real(records, connection)
        if run.record.state == TaskState.RUNNING:
            assert inserted == []
            lifecycle.succeed(run, None, timezone.now())
            lifecycle.record_runs([run])
        return inserted

    monkeypatch.setattr(unique, "insert", insert_late)
    monkeypatch.setattr(unique, "live_holders", lambda slots, **options: {})
    assert unique_tasks.report.enqueue(1).id != first.id


# --- many producers


def produce(folder: Path, count: int, seconds: float) -> list[dict[str, Any]]:
    """Let producers enqueue with one key and finish each task at once; return the history in order."""
    producers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unique_producer", str(seconds)],
            env=environment(ASYNCQ_TEST_HISTORY=str(folder / f"{number}.jsonl")),
            cwd=Path(__file__).parent.parent.parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for producer in producers:
        _, errors = producer.communicate(timeout=seconds + 100)
        assert producer.returncode == 0, errors
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["at"])


def check_history(lines: list[dict[str, Any]], producers: int) -> None:
    """Never two rows that hold the key; each producer was accepted; nothing holds it afterwards."""
    assert len({line["pid"] for line in lines}) == producers
    for entered, left in zip(lines[::2], lines[1::2], strict=True):
        assert (entered["event"], left["event"], entered["id"]) == ("in", "out", left["id"])
    assert not TaskRecord.objects.exclude(unique_slot=None).exists()


def test_four_producers_never_hold_one_key_twice(tmp_path: Path) -> None:
    """Two seconds."""
    check_history(produce(tmp_path, 4, 2), 4)


@pytest.mark.long
def test_sixteen_producers_never_hold_one_key_twice(tmp_path: Path) -> None:
    """Ten seconds."""
    check_history(produce(tmp_path, 16, 10), 16)


# --- the run of the task


def test_a_body_finds_its_row_running_and_may_enqueue_its_own_key_when_it_is_unique_until_it_starts() -> None:
    """`def`, `async def`, atomic: the row says RUNNING before the body is called."""
    plain = unique_tasks.looks.enqueue(1)
    chains = [unique_tasks.chained, unique_tasks.chained_async, unique_tasks.chained_atomic]
    for number, chain in enumerate(chains):
        chain.enqueue(number, 2)
    run_workers()
    found = {str(id): value for id, value in TaskRecord.objects.values_list("id", "return_value")}
    assert found.pop(plain.id) == [TaskState.RUNNING, False]
    assert list(found.values()) == [[TaskState.RUNNING, True]] * 9
    assert set(TaskRecord.objects.values_list("state", flat=True)) == {TaskState.SUCCEEDED}
    assert not TaskRecord.objects.exclude(unique_slot=None).exists()


@pytest.fixture
def reporter() -> Reporter:
    """A reporter that was not started: it writes a batch when the test says so."""
    return Reporter(Broker("worker"), "w", Wakeup(), threading.Event())


def begun_job() -> Job:
    """A unique task that a worker has claimed and begun; its row says QUEUED."""
    unique_tasks.report.using(timeout=5).enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    job = Job(run, unique_tasks.report, 0.0, phase=JobPhase.RUNNING)
    job.note_begin(timezone.now())
    lifecycle.begin(run, "w", timezone.now())
    return job


def wait(reporter: Reporter, job: Job) -> None:
    """Have a job marked as a slot does; the reporter then writes a batch."""

    def mark(jobs: Iterable[Job]) -> None:
        reporter.mark(jobs)
        assert job.marked is not None
        assert not job.marked.done()
        reporter._report(reporter.take_batch())

    wait_until_marked(job, mark)


def test_a_slot_waits_until_the_reporter_has_written_running(reporter: Reporter) -> None:
    """And is not asked to be marked again."""
    job = begun_job()
    wait(reporter, job)
    assert TaskRecord.objects.get().state == TaskState.RUNNING
    assert not job.needs_mark(0, float("inf"))


def test_a_run_whose_row_was_changed_meanwhile_does_not_call_its_function(reporter: Reporter) -> None:
    """A replaced or cancelled row has a higher fence."""
    job = begun_job()
    TaskRecord.objects.update(fence=7)
    with pytest.raises(LeaseLost):
        wait(reporter, job)


def test_a_run_that_is_being_requeued_does_not_call_its_function(reporter: Reporter) -> None:
    """The slot goes on, and its outcome is ignored."""
    job = begun_job()
    reporter.abandon([job])
    with pytest.raises(LeaseLost):
        wait(reporter, job)
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_a_run_that_was_cancelled_while_it_waited_does_not_call_its_function(reporter: Reporter) -> None:
    """Nothing could interrupt the wait."""
    job = begun_job()
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(TaskCancelled):
        wait(reporter, job)


def test_a_timeout_while_the_database_is_unreachable_is_no_attempt() -> None:
    """The function was not called, so the run is postponed."""
    job = begun_job()
    assert job.begun_at is not None
    job.begun_at -= 10
    with pytest.raises(OperationalError, match="RUNNING") as caught:
        wait_until_marked(job, lambda jobs: None)
    assert job.unconnected is caught.value
