"""A run is asked to stop: by a cancel, a soft timeout, a deadline. In one process, without workers."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Lease
from django_asyncq.context import RowlessContext, TaskContext
from django_asyncq.exceptions import RetryRequested, SoftTimeout, TaskCancelled, TaskTimeout
from django_asyncq.fleet.processes import Child, Processes
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.results import StoredTask, judge_failure, result_of
from django_asyncq.worker.call import acall, await_here, await_in_loop, call
from django_asyncq.worker.job import Job, JobPhase, Jobs, Outcome, StopFlag, StopReason
from django_asyncq.worker.options import CANCEL
from django_asyncq.worker.outcomes import apply
from django_asyncq.worker.slot_table import Running, SlotTable
from django_asyncq.worker.stopping import RunStopper

from .. import stop_tasks, tasks
from ..workers import run_workers

PATIENCE_SECONDS = 10.0


def job_of(function: Callable[..., Any] = lambda: None, **columns: Any) -> Job:
    """A job that has begun, in the first slot. columns: of its row."""
    declared = StoredTask(func=function, priority=0, backend="default", queue_name="default", run_after=None)
    record = TaskRecord(id=uuid4(), name="tests.worker.test_stopping.body", max_attempts=3, **columns)
    job = Job(lifecycle.Run(record, Lease(str(record.id), 1)), declared, time.monotonic(), slot=0)
    job.note_begin(timezone.now())
    lifecycle.begin(job.run, "w", timezone.now())
    return job


def after(seconds: float, job: Job) -> Job:
    """The same job, so many seconds after its begin."""
    assert job.begun_at is not None
    job.begun_at -= seconds
    job.overdue_at -= seconds
    return job


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in its own thread, as in a worker process."""
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever)
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join()
    found.close()


def awaited(loop: asyncio.AbstractEventLoop, job: Job) -> Any:
    """Run a job in the loop, and return its value or raise its error."""
    return asyncio.run_coroutine_threadsafe(acall(job, [], {}), loop).result(PATIENCE_SECONDS)


# --- what the function is told


@pytest.mark.parametrize(
    ("columns", "seconds", "asked", "reason"),
    [
        ({}, 1e6, (), None),
        ({"timeout_seconds": 10}, 9, (), None),
        ({"timeout_seconds": 10}, 11, (), StopReason.TIMEOUT),
        ({"timeout_seconds": 10, "soft_timeout_seconds": 5}, 6, (), StopReason.SOFT_TIMEOUT),
        ({"timeout_seconds": 10, "soft_timeout_seconds": 5}, 11, (), StopReason.TIMEOUT),
        ({"timeout_seconds": 10}, 11, (StopReason.CANCELLED,), StopReason.CANCELLED),
        ({}, 0, (StopReason.SHUTDOWN,), StopReason.SHUTDOWN),
        ({}, 0, (StopReason.SHUTDOWN, StopReason.CANCELLED), StopReason.CANCELLED),
    ],
)
def test_why_a_run_shall_stop(columns: Any, seconds: float, asked: Any, reason: StopReason | None) -> None:
    """The weightiest reason counts, and `should_stop` knows all of them."""
    job = after(seconds, job_of(**columns))
    for each in asked:
        assert job.ask_to_stop(each)
        assert not job.ask_to_stop(each), "it is new once"
    assert job.stop_reason() is reason
    assert StopFlag(job).is_set() is (reason is not None)


def test_check_raises_what_stops_the_run() -> None:
    """TaskCancelled and TaskTimeout each time, SoftTimeout once, nothing at a shutdown."""
    job = job_of(timeout_seconds=10, soft_timeout_seconds=5)
    context = TaskContext(task_result=result_of(job.run.record), record=job.run.record, stop=StopFlag(job))
    context.check()
    job.ask_to_stop(StopReason.SHUTDOWN)
    context.check()
    assert context.should_stop
    after(6, job)
    with pytest.raises(SoftTimeout, match="soft timeout of 5 s"):
        context.check()
    context.check()
    after(6, job)
    for _ in range(2):
        with pytest.raises(TaskTimeout, match="its timeout of 10 s") as caught:
            context.check()
        assert type(caught.value) is TaskTimeout
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(TaskCancelled):
        context.check()


@pytest.mark.parametrize(("timeout", "until_deadline", "expected"), [(None, 5, 5), (10, 5, 5), (3, 5, 3), (10, -1, -1)])
def test_deadline_shortens_the_timeout(timeout: float | None, until_deadline: float, expected: float) -> None:
    """What comes first counts, in the job, in the context and in the error."""
    deadline = timezone.now() + timedelta(seconds=until_deadline)
    job = job_of(timeout_seconds=timeout, deadline=deadline)
    assert job.timeout_seconds == pytest.approx(expected, abs=0.5)
    context = TaskContext(task_result=result_of(job.run.record), record=job.run.record)
    assert context.deadline is not None
    assert (context.deadline - timezone.now()).total_seconds() == pytest.approx(expected, abs=0.5)
    text = f"its deadline, {deadline.isoformat()}" if expected == until_deadline else "its timeout of 3 s"
    assert text in str(job.timed_out())
    assert after(6, job).is_overdue(time.monotonic()) is (expected < 6)


def test_context_without_limits() -> None:
    """It has no deadline, and `check` outside a worker does nothing."""
    record = job_of().run.record
    context = TaskContext(task_result=result_of(record), record=record)
    assert context.deadline is None
    context.check()
    rowless = RowlessContext(task_result=result_of(record))
    assert rowless.deadline is None
    rowless.check()


# --- coroutines


def test_cancelled_coroutine_fails_with_task_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    """At the `await` where it waits, after its `finally` has run; another task of the loop goes on."""
    begun, cleaned = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    async def neighbour() -> str:
        await asyncio.sleep(0.2)
        return "finished"

    job = job_of(waits)
    other = asyncio.run_coroutine_threadsafe(acall(job_of(neighbour), [], {}), loop)
    future = asyncio.run_coroutine_threadsafe(acall(job, [], {}), loop)
    assert begun.wait(PATIENCE_SECONDS)
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(TaskCancelled):
        future.result(PATIENCE_SECONDS)
    assert cleaned.is_set()
    assert other.result(PATIENCE_SECONDS) == "finished"
    assert job.interrupt is None


def test_awaitable_of_a_def_is_cancelled_too(loop: asyncio.AbstractEventLoop) -> None:
    """Its slot's thread waits for the loop."""
    begun = threading.Event()

    async def waits() -> None:
        begun.set()
        await asyncio.sleep(60)

    job = job_of(lambda: waits())
    threading.Thread(target=lambda: begun.wait(PATIENCE_SECONDS) and job.ask_to_stop(StopReason.CANCELLED)).start()
    with pytest.raises(TaskCancelled):
        call(job, [], {}, partial(await_in_loop, loop=loop))
    assert begun.is_set()


def test_coroutine_that_was_cancelled_before_it_begins_never_runs(loop: asyncio.AbstractEventLoop) -> None:
    """Nothing of its body, and nobody warns of a coroutine that was never awaited."""
    ran = []

    async def body() -> None:
        ran.append("body")

    job = job_of(body)
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(TaskCancelled):
        awaited(loop, job)
    assert not ran


def test_coroutine_that_finishes_all_the_same_has_its_value(loop: asyncio.AbstractEventLoop) -> None:
    """A request to stop promises nothing. One that comes after the finish cancels nothing."""
    begun = threading.Event()

    async def swallows() -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
        return "value"

    job = job_of(swallows)
    threading.Thread(target=lambda: begun.wait(PATIENCE_SECONDS) and job.ask_to_stop(StopReason.CANCELLED)).start()
    assert awaited(loop, job) == "value"
    late = job_of(lambda: asyncio.sleep(0, "late"))
    assert awaited(loop, late) == "late"
    assert late.ask_to_stop(StopReason.CANCELLED)


def test_coroutine_that_cancels_itself_was_not_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    """Its CancelledError is its own error."""

    async def body() -> None:
        raise asyncio.CancelledError("own")

    async def error_of(job: Job) -> BaseException | None:
        try:
            await acall(job, [], {})
        except asyncio.CancelledError as error:
            return error
        return None

    error = asyncio.run_coroutine_threadsafe(error_of(job_of(body)), loop).result(PATIENCE_SECONDS)
    assert error is not None
    assert error.args == ("own",)


def test_cancels_at_every_moment_are_safe(loop: asyncio.AbstractEventLoop) -> None:
    """A run that is cancelled while it begins, waits or finishes has its value or TaskCancelled; the loop lives."""

    async def body() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        return "value"

    found = set()
    for number in range(300):
        job = job_of(body)
        future = asyncio.run_coroutine_threadsafe(acall(job, [], {}), loop)
        for _ in range(number % 50):
            time.monotonic()
        job.ask_to_stop(StopReason.CANCELLED)
        try:
            found.add(future.result(PATIENCE_SECONDS))
        except TaskCancelled:
            found.add("cancelled")
    assert found <= {"value", "cancelled"}
    assert awaited(loop, job_of(body)) == "value"


# --- soft timeouts of coroutines


async def sleeps() -> None:
    """Wait in the body itself."""
    await asyncio.sleep(60)


async def in_a_task() -> None:
    """Wait for a task of its own."""
    await asyncio.create_task(asyncio.sleep(60))


async def in_a_gathering() -> None:
    """Wait for several."""
    await asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))


async def in_a_timeout() -> None:
    """Wait with a timeout of its own, which has not passed."""
    async with asyncio.timeout(50):
        await asyncio.sleep(60)


async def in_wait_for() -> None:
    """The same, older."""
    await asyncio.wait_for(asyncio.sleep(60), 50)


async def in_a_group() -> None:
    """Wait for the tasks of a group, at its end."""
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))


async def within_a_group() -> None:
    """Wait beside the tasks of a group."""
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    "waits", [sleeps, in_a_task, in_a_gathering, in_a_timeout, in_wait_for, in_a_group, within_a_group]
)
def test_soft_timeout_is_raised_where_the_coroutine_waits(loop: asyncio.AbstractEventLoop, waits: Any) -> None:
    """It catches it and finishes; what it awaited is cancelled; it meets it once."""

    async def body() -> list[Any]:
        before = len(asyncio.all_tasks())
        try:
            await waits()
        except (SoftTimeout, ExceptionGroup) as caught:
            # A TaskGroup adds the group, before Python 3.13.
            (error,) = caught.exceptions if isinstance(caught, ExceptionGroup) else [caught]
            await asyncio.sleep(0.05)
            task = asyncio.current_task()
            assert task is not None
            return [type(error).__name__, str(error), len(asyncio.all_tasks()) - before, task.cancelling()]
        return ["never"]

    job = job_of(body, soft_timeout_seconds=0.1)
    assert awaited(loop, job) == [
        "SoftTimeout",
        "the task took longer than its soft timeout of 0.1 s",
        0,
        0,
    ]
    job.check()


def test_soft_timeout_that_nobody_catches_fails_the_run(loop: asyncio.AbstractEventLoop) -> None:
    """With a plain SoftTimeout, which no handler takes for asyncio's cancellation, and the frames of the body."""

    async def body() -> None:
        await sleeps()

    with pytest.raises(SoftTimeout) as caught:
        awaited(loop, job_of(body, soft_timeout_seconds=0.05))
    assert type(caught.value) is SoftTimeout
    assert not isinstance(caught.value, asyncio.CancelledError)
    assert "sleeps" in [each.name for each in caught.traceback]


def test_timeout_after_the_soft_one_ends_the_coroutine(loop: asyncio.AbstractEventLoop) -> None:
    """A coroutine that goes on after its soft timeout is cancelled at its timeout. So is one that was cancelled."""

    async def goes_on() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except SoftTimeout:
                continue

    with pytest.raises(TaskTimeout) as caught:
        awaited(loop, job_of(goes_on, soft_timeout_seconds=0.05, timeout_seconds=0.2))
    assert type(caught.value) is TaskTimeout
    job = job_of(goes_on, soft_timeout_seconds=0.05)
    future = asyncio.run_coroutine_threadsafe(acall(job, [], {}), loop)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not job.had_soft_timeout and time.monotonic() < deadline:
        time.sleep(0.005)
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(TaskCancelled):
        future.result(PATIENCE_SECONDS)


def test_soft_timeout_passes_every_other_error_and_value(loop: asyncio.AbstractEventLoop) -> None:
    """What is awaited fails, is cancelled by others, or is no coroutine: as without a soft timeout."""

    class Plain:
        def __await__(self) -> Iterator[Any]:
            return iter(())

    async def body() -> list[Any]:
        found: list[Any] = [await Plain()]  # type: ignore[misc]
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            found.append("timeout")
        with pytest.raises(ZeroDivisionError):
            await asyncio.create_task(fails())
        return found

    async def fails() -> None:
        raise ZeroDivisionError

    assert awaited(loop, job_of(body, soft_timeout_seconds=60)) == [None, "timeout"]
    assert call(job_of(body, soft_timeout_seconds=60), [], {}, await_here) == [None, "timeout"]


# --- where it was


def test_late_function_says_where_its_time_was_over(loop: asyncio.AbstractEventLoop) -> None:
    """The error that it meets later has the stack of that moment as its cause: of the soft timeout, of the timeout."""
    job = job_of(timeout_seconds=10, soft_timeout_seconds=5)
    job.slot, jobs, table = 0, Jobs(), SlotTable(2)
    stopper = RunStopper(jobs, table)
    steps, gates = ([threading.Event() for _ in range(2)] for _ in range(2))
    caught: list[BaseException] = []

    def spends_time(step: int) -> None:
        steps[step].set()
        gates[step].wait(PATIENCE_SECONDS)

    def body() -> None:
        for step in range(2):
            spends_time(step)
            try:
                job.check()
            except (SoftTimeout, TaskTimeout) as error:
                caught.append(error)

    job.task = StoredTask(func=body, priority=0, backend="default", queue_name="default", run_after=None)

    def work() -> None:
        table.enter(0, job.run.record.id, 0.0)
        call(job, [], {}, partial(await_in_loop, loop=loop))

    thread = threading.Thread(target=work)
    thread.start()
    for step in range(2):
        assert steps[step].wait(PATIENCE_SECONDS)
        stopper.note_late([job], time.monotonic())
        assert (job.softly_late is None, job.late is None) == (step == 0, True), "nothing before the time is over"
        stopper.note_late([after(6, job)], time.monotonic())
        gates[step].set()
    thread.join(PATIENCE_SECONDS)
    assert [type(error) for error in caught] == [SoftTimeout, TaskTimeout]
    for error in caught:
        assert type(error.__cause__) is type(error)
        frames = [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)]
        assert frames[:2] == ["body", "spends_time"] and "wait" in frames, "and nothing of this package"
    # The function has returned: there is nothing to say.
    job.late = None
    stopper.note_late([job], time.monotonic())
    assert job.late is None


@pytest.mark.django_db(transaction=True)
def test_run_that_returned_late_shows_where_it_was(tmp_path: Path) -> None:
    """In the row, in the line that is logged, and where its transaction refuses to commit."""
    late, atomic = stop_tasks.returns_late.using(max_attempts=1).enqueue(), tasks.counts_too_late.enqueue()
    log = tmp_path / "own.log"
    run_workers(ASYNCQ_TEST_LOG=str(log))
    for result, place in ((late, "in crunches"), (atomic, "in counts_too_late")):
        (error,) = TaskRecord.objects.get(id=result.id).errors
        assert error["exception"] == "django_asyncq.exceptions.TaskTimeout"
        assert place in error["traceback"] and "time.sleep(" in error["traceback"]
        lines = [each for each in map(json.loads, log.read_text().splitlines()) if each.get("task_id") == result.id]
        assert [place in each["traceback"] for each in lines if each["level"] == "ERROR"] == [True]


# --- the outcome


@pytest.mark.parametrize("error", [TaskCancelled("stopped"), ValueError("cleaning up failed"), ConnectionError()])
def test_failure_of_a_cancelled_run_is_final(error: Exception) -> None:
    """Whatever the error, it is kept, the reason says why, and no attempt is left to be used."""
    job = job_of()
    job.ask_to_stop(StopReason.CANCELLED)
    apply(Outcome(job, timezone.now(), None, error))
    record = job.run.record
    assert (record.state, record.retry_at, record.reason) == (TaskState.FAILED, None, FailureReason.CANCELLED)
    assert record.last_exception.endswith(type(error).__name__)
    assert record.attempt == 1


def test_cancelled_run_that_asks_to_be_retried_is_not() -> None:
    """`context.retry()` loses against the cancel, also where it would use no attempt."""
    job = job_of()
    context = TaskContext(task_result=result_of(job.run.record), record=job.run.record, stop=StopFlag(job))
    job.ask_to_stop(StopReason.CANCELLED)
    with pytest.raises(RetryRequested) as asked:
        context.retry(counted=False)
    apply(Outcome(job, timezone.now(), None, asked.value))
    record = job.run.record
    assert (record.state, record.reason, record.attempt) == (TaskState.FAILED, FailureReason.CANCELLED, 1)
    assert record.last_exception == "django_asyncq.exceptions.TaskCancelled"


def test_task_that_raises_task_cancelled_by_itself_is_final() -> None:
    """`retry_on` takes every exception, and still it is not retried."""
    job = job_of()
    judgement = judge_failure(job.task, job.run.record, TaskCancelled("by itself"), timezone.now())
    assert judgement.retry_at is None
    assert judge_failure(job.task, job.run.record, SoftTimeout("late"), timezone.now()).retry_at is not None


def test_value_of_a_cancelled_run_counts() -> None:
    """A run that finishes before it notices has succeeded."""
    job = job_of()
    job.ask_to_stop(StopReason.CANCELLED)
    apply(Outcome(job, timezone.now(), "value"))
    assert job.run.record.state == TaskState.SUCCEEDED


# --- the slot table, and who reads it


def table_with(job: Job, deadline: float = 0.0) -> SlotTable:
    """A slot table that shows a job."""
    table = SlotTable(2)
    table.enter(0, job.run.record.id, deadline)
    return table


def test_cancelled_run_gets_a_deadline_in_the_slot_table() -> None:
    """So that the supervisor replaces the process; an earlier deadline stays, and the first cancel decides."""
    job, other = job_of(), job_of()
    jobs, table = Jobs(), table_with(job)
    jobs.busy.update({job, other})
    stopper = RunStopper(jobs, table)
    now = time.monotonic()
    stopper.cancel(["", "no id", str(uuid4()), str(job.run.record.id)])
    (running,) = table.running()
    assert running.is_cancelled
    assert running.deadline == pytest.approx(now + stopper.grace_seconds, abs=1)
    assert (job.is_cancelled, other.is_cancelled) == (True, False)
    stopper.grace_seconds = 1_000.0
    stopper.cancel([str(job.run.record.id)])
    assert table.running() == [running]
    early = job_of()
    jobs.busy.add(early)
    stopper.slot_table = table_with(early, now + 1)
    stopper.cancel([str(early.run.record.id)])
    assert stopper.slot_table.running()[0].deadline == now + 1


def test_cancel_does_not_touch_the_next_task_of_a_slot() -> None:
    """The slot has left the cancelled run, or runs another task by now."""
    job, following = job_of(), job_of()
    table = table_with(job)
    table.leave(0)
    table.cancel(0, job.run.record.id, 5.0)
    assert table.running() == []
    table.enter(0, following.run.record.id, 0.0)
    table.cancel(0, job.run.record.id, 5.0)
    assert [(each.deadline, each.is_cancelled) for each in table.running()] == [(0.0, False)]


def test_completed_run_is_not_cancelled() -> None:
    """Its success is committed; what its function still does may go on."""
    job = job_of()
    job.phase = JobPhase.COMPLETED
    jobs, table = Jobs(), table_with(job)
    jobs.busy.add(job)
    RunStopper(jobs, table).cancel([str(job.run.record.id)])
    assert not job.is_cancelled
    assert not table.running()[0].is_cancelled


def test_a_request_for_runs_of_the_row_as_it_was_spares_a_run_of_the_row_as_it_is() -> None:
    """It was sent when the task was replaced, and arrives when the process has begun the task anew."""
    begun, waiting, old, newer = job_of(fence=7), job_of(fence=7), job_of(fence=6), job_of(fence=8)
    waiting.run.begun, waiting.run.record.fence = False, 7  # claimed, and has no slot yet
    jobs = Jobs()
    jobs.busy.update({begun, waiting, old, newer})
    RunStopper(jobs, table_with(begun)).cancel([f"{job.run.record.id} 7" for job in (begun, waiting, old, newer)])
    assert [job.is_cancelled for job in (begun, waiting, old, newer)] == [False, False, True, False]


def test_slot_table_goes_to_another_process() -> None:
    """Its lock stays; a child that was forked has its own memory and lock."""
    table = SlotTable(1)
    other = SlotTable.__new__(SlotTable)
    other.__setstate__(table.__getstate__())
    other.enter(0, UUID(int=6), 2.0)
    assert table.running() == other.running() != []
    table.disconnect()
    table.enter(0, UUID(int=7), 3.0)
    (found,) = table.running()
    assert found == Running(str(UUID(int=7)), 3.0, threading.get_ident(), began_at=found.began_at)


# --- the way of a cancel through the supervisor


def test_ids_go_down_the_pipe_of_their_process_only() -> None:
    """A process that does not read keeps nobody waiting, nor does one that is dead."""
    processes = Processes.__new__(Processes)
    pipes = [multiprocessing.get_context("spawn").Pipe() for _ in range(2)]
    processes.children = [
        Child(None, SlotTable(1), ours, f"w-{number}", 0.0, None)  # type: ignore[arg-type]
        for number, (ours, _) in enumerate(pipes)
    ]
    ids = [str(uuid4()) for _ in range(3)]
    processes.cancel("w-1", ids)
    assert pipes[1][1].recv() == (CANCEL, *ids)
    assert not pipes[0][1].poll()
    began = time.monotonic()
    for _ in range(100):
        processes.cancel("w-0", ids * 1_000)
    assert time.monotonic() - began < PATIENCE_SECONDS
    pipes[1][1].close()
    processes.cancel("w-1", ids)
    for ours, theirs in pipes:
        ours.close()
        theirs.close()
