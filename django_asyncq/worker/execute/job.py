"""One task on its way through a worker process, and its outcome."""

from __future__ import annotations

import enum
import inspect
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from ...exceptions import SoftTimeout, TaskCancelled, TaskTimeout
from ...lifecycle import Run
from ...models import TaskRecord
from ...run_log import RunLog
from ...tasks import Task

ISOLATED_MARGIN_SECONDS = 10.0


class JobPhase(enum.Enum):
    """How far a job has come. A job only goes forward, except that a completion may be rolled back and begin anew."""

    WAITING = "it waits for a slot, or is about to begin in one"
    RUNNING = "its function runs, and the reporter writes its row"
    COMPLETING = "its function runs, and its slot writes its row, in the task's own transaction; the reporter may not"
    COMPLETED = "its success is committed; what its function still returns or raises does not count"
    REPORTED = "its outcome has been given to the reporter"


class StopReason(enum.Enum):
    """Why a run shall stop. The first one that holds is the one that counts."""

    CANCELLED = "the task was cancelled"
    TIMEOUT = "its timeout or its deadline has passed"
    SOFT_TIMEOUT = "its soft timeout has passed, and it may still finish"
    SHUTDOWN = "its worker process is about to exit, and the task will run again elsewhere"


@dataclass(slots=True, eq=False)
class Job:
    """A claimed task with its code.

    taken_at, arrived_at, begun_at: monotonic seconds; taken_at: before Redis was asked or could hand it to this worker,
    so its lease is no older; arrived_at: when it came to this process. slot: its number in the slot table.
    seconds_to_deadline: from begun_at to the row's `deadline`, by the database's clock; None: it has none.
    is_cancelled, is_shutting_down: its function was asked to stop, see `ask_to_stop`. had_stop, had_soft_timeout: it
    has met the error of a cancel or a timeout, or SoftTimeout. interrupt: set while something can interrupt the
    function; callable from every thread.
    Independent of the phase: is_marked: the reporter was asked to write RUNNING. marked: done once it
    has; set where the slot waits for that. uncertain: its run as it would be
    after a commit that gave no answer, so that nobody knows yet whether it succeeded. cut: the error with which its
    transaction ended when the connection was cut. unconnected: the error with which no connection could be
    made, so that its transaction did not begin. was_connected: whether its function had a connection at any time.
    clock: returns monotonic seconds; that of a test can be moved.
    log: the lines that its run has logged, if the task keeps any.
    progress_noted, progress_recorded: the progress that was last written to Redis, and to the row;
    progress_recorded_at: when to the row, in monotonic seconds.
    """

    run: Run
    task: Task[Any, Any]
    taken_at: float
    arrived_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    seconds_to_deadline: float | None = None
    slot: int = -1
    phase: JobPhase = JobPhase.WAITING
    is_marked: bool = False
    marked: Future[None] | None = None
    uncertain: Run | None = None
    cut: BaseException | None = None
    unconnected: BaseException | None = None
    was_connected: bool = False
    is_cancelled: bool = False
    is_shutting_down: bool = False
    had_soft_timeout: bool = False
    had_stop: bool = False
    interrupt: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic
    log: RunLog | None = None
    progress_noted: Any = None
    progress_recorded: Any = None
    progress_recorded_at: float = -math.inf

    @property
    def timeout_seconds(self) -> float | None:
        """How long the run may take: its timeout, or less if its deadline comes first. Negative: it came before."""
        timeout, deadline = self.run.record.timeout_seconds, self.seconds_to_deadline
        return timeout if deadline is None or (timeout is not None and timeout < deadline) else deadline

    @property
    def seconds_left(self) -> float | None:
        """How long the run may still take."""
        if self.timeout_seconds is None or self.begun_at is None:
            return self.timeout_seconds
        return self.begun_at + self.timeout_seconds - self.clock()

    @property
    def soft_seconds_left(self) -> float | None:
        """How long the run takes until its soft timeout; None: it has none, or has met it."""
        soft = self.run.record.soft_timeout_seconds
        if soft is None or self.begun_at is None or self.had_soft_timeout:
            return None
        return self.begun_at + soft - self.clock()

    @property
    def is_async(self) -> bool:
        """Whether its function is a coroutine function."""
        return _is_coroutine_function(self.task.func)

    @property
    def runs_in_loop(self) -> bool:
        """Whether it runs in the event loop. An isolated one occupies a thread, which looks after its process."""
        return self.is_async and not self.task.isolated

    @property
    def margin_seconds(self) -> float:
        """How much longer its worker process may live than its grace: an isolated one is killed by its own slot."""
        return ISOLATED_MARGIN_SECONDS if self.task.isolated else 0.0

    def note_begin(self, now: datetime) -> None:
        """Note that it begins. now: by the database's clock."""
        self.begun_at = self.clock()
        if self.run.record.deadline is not None:
            self.seconds_to_deadline = (self.run.record.deadline - now).total_seconds()

    # --- stopping

    def timed_out(self) -> TaskTimeout:
        """Return the error of a run that has passed its timeout or its deadline."""
        return TaskTimeout(timeout_text(self.run.record, by_deadline=self.timeout_seconds == self.seconds_to_deadline))

    def soft_timed_out(self) -> SoftTimeout:
        """Return the error with which a function learns of its soft timeout."""
        return SoftTimeout(f"the task took longer than its soft timeout of {self.run.record.soft_timeout_seconds:g} s")

    def cancelled(self) -> TaskCancelled:
        """Return the error of a run that was cancelled."""
        return TaskCancelled("the task was cancelled while it ran")

    def stopped(self) -> TaskCancelled | TaskTimeout:
        """Return the error of a run that was reported before its function finished."""
        return self.cancelled() if self.is_cancelled else self.timed_out()

    def ask_to_stop(self, reason: StopReason) -> bool:
        """Have `context` say that the run shall stop; interrupt a cancelled one. Return whether that was new.

        Every thread may call it, at any time: before the run, while it begins, and after it.
        reason: CANCELLED or SHUTDOWN; the times are judged by the clock.
        """
        if reason is StopReason.SHUTDOWN:
            was, self.is_shutting_down = self.is_shutting_down, True
            return not was
        was, self.is_cancelled = self.is_cancelled, True
        # After the flag: whoever sets `interrupt` looks at the flag next, so one of both sees the other.
        if not was and (interrupt := self.interrupt) is not None:
            interrupt()
        return not was

    def stop_reason(self) -> StopReason | None:
        """Return why the run shall stop now; None: it may go on."""
        if self.is_cancelled:
            return StopReason.CANCELLED
        if self.is_overdue(self.clock()):
            return StopReason.TIMEOUT
        soft = self.run.record.soft_timeout_seconds
        if soft is not None and self.has_run_for(soft, self.clock()):
            return StopReason.SOFT_TIMEOUT
        return StopReason.SHUTDOWN if self.is_shutting_down else None

    def check(self) -> None:
        """Raise if the run shall stop: TaskCancelled; TaskTimeout; SoftTimeout, once."""
        reason = self.stop_reason()
        if reason in (StopReason.CANCELLED, StopReason.TIMEOUT):
            self.had_stop = True
            raise self.stopped()
        if reason is StopReason.SOFT_TIMEOUT and not self.had_soft_timeout:
            self.had_soft_timeout = True
            raise self.soft_timed_out()

    def has_run_for(self, seconds: float, now: float) -> bool:
        """Whether it began that long ago. now: monotonic seconds."""
        return self.begun_at is not None and now - self.begun_at >= seconds

    def needs_mark(self, seconds: float, now: float) -> bool:
        """Whether it has run for that long and the reporter has not been asked to write so. now: monotonic seconds."""
        return not self.is_marked and self.run.begun and self.has_run_for(seconds, now)

    def is_overdue(self, now: float) -> bool:
        """Whether the run has passed its timeout. now: monotonic seconds."""
        return (
            self.timeout_seconds is not None
            and self.begun_at is not None
            and now - self.begun_at > self.timeout_seconds
        )


class StopFlag:
    """What the context of a function knows of the stop of its run."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def is_set(self) -> bool:
        """Whether the function must stop."""
        return self._job.stop_reason() is not None

    def check(self) -> None:
        """Raise if the run shall stop, as `TaskContext.check` does."""
        self._job.check()


def timeout_text(record: TaskRecord, *, by_deadline: bool) -> str:
    """Say what a run has passed. by_deadline: its deadline, not its timeout."""
    if by_deadline and record.deadline is not None:
        return f"the task ran on after its deadline, {record.deadline.isoformat()}"
    return f"the task took longer than its timeout of {record.timeout_seconds or 0:g} s"


@cache
def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run finished: with a value, or with an exception.

    changes: of an isolated run, what its process has made of it (see `lifecycle.changes_of`).
    """

    job: Job
    finished_at: datetime
    value: Any = None
    exception: BaseException | None = None
    changes: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cut(Outcome):
    """The run's database connection was cut, and nothing of it was committed, unless the row says so.

    exception: what the function or the commit raised.
    """


@dataclass(frozen=True, slots=True)
class Unconnected(Outcome):
    """The run got no connection to the database and did nothing in it: it is no attempt, and the task runs later.

    exception: what the database or the pool said.
    """


@dataclass(frozen=True, slots=True)
class LaterLines:
    """What a run has logged after it had completed itself: an event for the reporter, as an outcome is."""

    job: Job


@dataclass(frozen=True, slots=True)
class Crash(Cut):
    """The process of an isolated run died before it had reported its outcome. reason, stack: for the row's error."""

    reason: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class NotStarted(Outcome):
    """The process of an isolated run did not start, so its function was not called: the task runs later.

    exception: why.
    """
