"""One task on its way through a worker process, and its outcome."""

from __future__ import annotations

import enum
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from ...exceptions import TaskTimeout
from ...lifecycle import Run
from ...tasks import Task


class JobPhase(enum.Enum):
    """How far a job has come. A job only goes forward, except that a completion may be rolled back and begin anew."""

    WAITING = "it waits for a slot, or is about to begin in one"
    RUNNING = "its function runs, and the reporter writes its row"
    COMPLETING = "its function runs, and its slot writes its row, in the task's own transaction; the reporter may not"
    COMPLETED = "its success is committed; what its function still returns or raises does not count"
    REPORTED = "its outcome has been given to the reporter"


@dataclass(slots=True, eq=False)
class Job:
    """A claimed task with its code.

    taken_at, arrived_at, begun_at: monotonic seconds; taken_at: before Redis was asked or could hand it to this worker,
    so its lease is no older; arrived_at: when it came to this process. stop: the flag that its function may look at, if
    it takes a context. slot: its number in the slot table.
    Independent of the phase: is_marked: the reporter was asked to write RUNNING. uncertain: its run as it would be
    after a commit that gave no answer, so that nobody knows yet whether it succeeded. cut: the error with which its
    transaction ended when the connection was cut. unconnected: the error with which no connection could be
    made, so that its transaction did not begin. was_connected: whether its function had a connection at any time.
    clock: returns monotonic seconds; that of a test can be moved.
    """

    run: Run
    task: Task[Any, Any]
    taken_at: float
    arrived_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    stop: threading.Event | None = None
    slot: int = -1
    phase: JobPhase = JobPhase.WAITING
    is_marked: bool = False
    uncertain: Run | None = None
    cut: BaseException | None = None
    unconnected: BaseException | None = None
    was_connected: bool = False
    clock: Callable[[], float] = time.monotonic

    @property
    def timeout_seconds(self) -> float | None:
        """How long the run may take, as it was decided when the task was enqueued."""
        return self.run.record.timeout_seconds

    @property
    def is_async(self) -> bool:
        """Whether its function is a coroutine function."""
        return _is_coroutine_function(self.task.func)

    def timed_out(self) -> TaskTimeout:
        """Return the error of a run that has passed its timeout."""
        return TaskTimeout(f"the task took longer than its timeout of {self.timeout_seconds or 0:g} s")

    def ask_to_stop(self) -> None:
        """Set the flag that its function may look at."""
        if self.stop is not None:
            self.stop.set()

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


@cache
def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run finished: with a value, or with an exception."""

    job: Job
    finished_at: datetime
    value: Any = None
    exception: BaseException | None = None


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
