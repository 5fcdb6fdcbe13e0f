"""One task on its way through a worker process, and its outcome."""

from __future__ import annotations

import enum
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Generic, TypeVar

from ..context import TaskContext
from ..exceptions import SoftTimeout, TaskCancelled, TaskTimeout
from ..lifecycle import Run
from ..models import TaskRecord
from ..results import AsyncqResult
from ..tasks import Task


class JobPhase(enum.Enum):
    """How far a job has come. A job only goes forward, except that a completion may be rolled back and begin anew."""

    WAITING = "it waits for a slot, or is about to begin in one"
    RUNNING = "its function runs, and the reporter writes its row"
    COMPLETING = "its function runs, and its slot writes its row, in the task's own transaction; the reporter may not"
    COMPLETED = "its success is committed; what its function still returns or raises does not count"
    REPORTED = "its outcome has been given to the reporter"
    ISOLATED = "it is isolated, and another process has it; its slot waits for that"


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
    overdue_at: monotonic seconds at which its timeout or its deadline has passed; infinite before it begins, and
    without either. shown: the result that was announced at its start, where that was in this process.
    is_cancelled, is_shutting_down: its function was asked to stop, see `ask_to_stop`. had_stop, had_soft_timeout: it
    has met the error of a cancel or a timeout, or SoftTimeout. late, softly_late: the errors of a `def` that has passed
    its timeout, its soft timeout, with the stack at which it was then (`stopping`). interrupt: set while something can
    interrupt the function; callable from every thread.
    Independent of the phase: is_marked: the reporter was asked to write RUNNING. marked: done once it
    has; set where the slot waits for that. uncertain: its run as it would be
    after a commit that gave no answer, so that nobody knows yet whether it succeeded. cut: the error with which its
    transaction ended when the connection was cut. unconnected: the error with which no connection could be
    made, so that its transaction did not begin. was_connected: whether its function had a connection at any time.
    clock: returns monotonic seconds; that of a test can be moved.
    context: what its function, or what is around it, may ask; None if neither does. unfit: ids of the calls of a batch
    that its function does not get, and the errors with which they fail; None for none.
    progress_noted, progress_recorded: the progress that was last written to Redis, and to the row;
    progress_recorded_at: when to the row, in monotonic seconds.
    is_in_completion: its function is in the transaction that completes it.
    rate: the name of the rate of which it takes a start before it begins; "" for none. has_typed_arguments: among its
    arguments may be references to rows, which are loaded where its function is called.
    """

    run: Run
    task: Task[Any, Any]
    taken_at: float
    arrived_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    seconds_to_deadline: float | None = None
    overdue_at: float = math.inf
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
    late: TaskTimeout | None = None
    softly_late: SoftTimeout | None = None
    interrupt: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic
    shown: AsyncqResult[Any, Any] | None = None
    context: TaskContext | None = None
    unfit: Mapping[str, BaseException] | None = None
    progress_noted: Any = None
    progress_recorded: Any = None
    progress_recorded_at: float = -math.inf
    is_in_completion: bool = False
    rate: str = ""
    has_typed_arguments: bool = False

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

    def note_begin(self, now: datetime) -> None:
        """Note that it begins. now: by the database's clock."""
        self.begun_at = self.clock()
        record = self.run.record
        if record.deadline is not None:
            self.seconds_to_deadline = (record.deadline - now).total_seconds()
        if record.deadline is not None or record.timeout_seconds is not None:
            self.overdue_at = self.begun_at + (self.timeout_seconds or 0.0)

    # --- stopping

    def timed_out(self) -> TaskTimeout:
        """Return the error of a run that has passed its timeout or its deadline; its cause shows where that was."""
        by_deadline = self.timeout_seconds == self.seconds_to_deadline
        error = TaskTimeout(timeout_text(self.run.record, by_deadline=by_deadline))
        error.__cause__ = self.late
        return error

    def soft_timed_out(self) -> SoftTimeout:
        """Return the error with which a function learns of its soft timeout; its cause shows where that was."""
        seconds = self.run.record.soft_timeout_seconds
        error = SoftTimeout(f"the task took longer than its soft timeout of {seconds:g} s")
        error.__cause__ = self.softly_late
        return error

    def cancelled(self, *, had_begun: bool = True) -> TaskCancelled:
        """Return the error of a run that was cancelled. had_begun: whether its function was called."""
        error = TaskCancelled(f"the task was cancelled {'while it ran' if had_begun else 'before it began'}")
        error.had_begun = had_begun
        return error

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
        return now > self.overdue_at


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
def is_coroutine_function(function: Any) -> bool:
    """Whether a task's function is an `async def`."""
    return inspect.iscoroutinefunction(function)


class OutcomeKind(enum.Enum):
    """How a run finished.

    ENDED: with the value or the exception of its function. The others are repeated, since it is not to blame. CUT: its
    database connection was cut, and nothing of it was committed, unless the row says so. UNCONNECTED: it got no
    connection and did nothing in the database: it is no attempt, and the task runs later.
    """

    ENDED = "ended"
    CUT = "cut"
    UNCONNECTED = "unconnected"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run finished. exception: what the function, the commit, the database or the pool raised."""

    job: Job
    finished_at: datetime
    value: Any = None
    exception: BaseException | None = None
    kind: OutcomeKind = OutcomeKind.ENDED


# --- All jobs of a worker process: those that wait for a slot, and those in one.


class Jobs:
    """The jobs of one process, shared by its threads without a lock.

    Removing a job from `waiting` decides who has it: a slot, or the main thread, which requeues it. A dictionary lets
    exactly one of them succeed. A slot adds a job to `busy` first, so a job on its way is counted twice, never missed.
    """

    def __init__(self) -> None:
        self.waiting: dict[Job, None] = {}
        # Those that may start in an instant: until when, in monotonic seconds. They take no capacity. See `rates`.
        self.held: dict[Job, float] = {}
        self.busy: set[Job] = set()

    # --- called by the main thread

    def add(self, jobs: Iterable[Job]) -> None:
        """Let jobs wait for a slot."""
        self.waiting.update(dict.fromkeys(jobs))

    def take_waiting(self, arrived_before: float) -> list[Job]:
        """Remove and return the jobs that wait since a monotonic time or longer."""
        taken = []
        for job in self.waiting.copy():
            if job.arrived_at > arrived_before:
                break  # they are in the order of their arrival
            if self.waiting.pop(job, job) is None:
                taken.append(job)
        return taken

    def hold(self, job: Job, until: float) -> None:
        """Keep a job from the slots. until: monotonic seconds."""
        self.held[job] = until

    def take_held(self, now: float = math.inf) -> list[Job]:
        """Remove and return the held jobs whose time has come; by default all of them."""
        found = [job for job, until in self.held.items() if until <= now]
        for job in found:
            del self.held[job]
        return found

    @property
    def running(self) -> list[Job]:
        """The jobs in a slot."""
        return list(self.busy.copy())

    @property
    def all(self) -> list[Job]:
        """All jobs, those that wait first: one that enters a slot meanwhile may be listed twice."""
        return [*self.held.copy(), *self.waiting.copy(), *self.running]

    # --- called by the slots

    @property
    def count(self) -> int:
        """How many jobs are here."""
        return len(self.waiting) + len(self.busy)

    def enter_slot(self, job: Job) -> bool:
        """Take a job into a slot; return False if the main thread has taken it back."""
        self.busy.add(job)
        if self.waiting.pop(job, job) is None:
            return True
        self.busy.discard(job)
        return False


# --- The queue from which slots take jobs, and how a waiting slot is woken.

T = TypeVar("T")


class JobQueue(Generic[T]):
    """First in, first out. Jobs that arrive together wake one thread, which wakes the next if it leaves any.

    The next thread starts when it gets the interpreter. While tasks are short, the first thread has emptied the queue
    by then, and the threads do not compete for the interpreter. `queue.SimpleQueue` did the same up to Python 3.12;
    since 3.13 each item wakes a thread.

    bell: unlocked while a waiting thread is to look into the queue.
    """

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        self.bell = threading.Lock()
        self.bell.acquire()
        # Whether a thread has been woken that has not looked yet; no other is woken until it does.
        self._is_waking = False

    def extend(self, jobs: Iterable[T]) -> None:
        """Add jobs at the end."""
        self._jobs.extend(jobs)
        self._wake_one()

    def take_now(self) -> T | None:
        """Return the first job, or None if there is none."""
        try:
            job = self._jobs.popleft()
        except IndexError:
            return None
        if self._jobs and not self._is_waking:
            self._wake_one()
        return job

    def take(self) -> T:
        """Return the first job; wait until there is one."""
        while (job := self.take_within(threading.TIMEOUT_MAX)) is None:
            pass
        return job

    def take_within(self, seconds: float) -> T | None:
        """Return the first job; wait until there is one, or until nobody was woken for these seconds: None then."""
        while (job := self.take_now()) is None:
            if not self.bell.acquire(timeout=seconds):
                return None
            # Before the look: jobs that are added from here on wake a thread again.
            self._is_waking = False
        return job

    def _wake_one(self) -> None:
        if self._jobs and not self._is_waking:
            self._is_waking = True
            try:  # noqa: SIM105 - `suppress` costs a function call for each job
                self.bell.release()
            except RuntimeError:
                pass  # it is unlocked: a thread is about to look
