"""One task on its way through a worker process, and how its run ended."""

from __future__ import annotations

import inspect
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from ...lifecycle import Run
from ...tasks import Task


@dataclass(slots=True, eq=False)
class Job:
    """A claimed task with its code.

    taken_at, came_at, begun_at: monotonic seconds; taken_at: before Redis was asked, or could hand it over; its lease
    is no older; came_at: when it was here. stop: the cooperative flag of its context, where it has one. slot: its entry
    on the board. is_marked: the reporter was asked to write that it runs. is_withheld: its slot writes its row, the
    reporter may not. is_completed: its success was committed by its slot. is_over: its end was reported. doubtful: its
    success, when the commit gave no answer.
    """

    run: Run
    task: Task[Any, Any]
    taken_at: float
    came_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    stop: threading.Event | None = None
    slot: int = -1
    is_marked: bool = False
    is_withheld: bool = False
    is_completed: bool = False
    is_over: bool = False
    doubtful: Run | None = None

    @property
    def timeout_seconds(self) -> float | None:
        """How long the run may take, as it was decided at enqueue."""
        return self.run.record.timeout_seconds

    @property
    def is_async(self) -> bool:
        """Whether its function is a coroutine function."""
        return _is_coroutine_function(self.task.func)

    def tell_to_stop(self) -> None:
        """Set the flag that its function may look at."""
        if self.stop is not None:
            self.stop.set()

    def has_run_for(self, seconds: float, now: float) -> bool:
        """Whether it began so long ago. now: monotonic seconds."""
        return self.begun_at is not None and now - self.begun_at >= seconds

    def is_to_be_marked(self, seconds: float, now: float) -> bool:
        """Whether it has run for so long and the row is still to say so. now: monotonic seconds."""
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
    """How a run ended: with a value, or with an exception."""

    job: Job
    ended_at: datetime
    value: Any = None
    exception: BaseException | None = None
