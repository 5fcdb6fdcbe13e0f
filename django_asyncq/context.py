"""What the body of a task can learn of its run, and do with it. Knows no registry and no stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from . import compat
from .exceptions import InvalidOption, RetryRequested
from .logs import CurrentTask, current_task

if TYPE_CHECKING:
    from .models import TaskRecord

__all__ = ["CurrentTask", "Ending", "TaskContext", "current_task"]


@dataclass(slots=True)
class Ending:
    """The value of the `complete_on_commit` block. result: the task's return value; the block may set it."""

    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[misc,type-arg]
    """The first argument of a task declared with `takes_context=True`.

    record: the row. stop: an event, set when the run must stop (see `should_stop`).
    completion: the worker's part of `complete_on_commit`.
    """

    record: TaskRecord
    stop: Any = None
    completion: Callable[[Any], AbstractContextManager[Ending]] | None = None

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Runs that were requeued or whose worker was lost do not count."""
        return self.record.attempt

    @property
    def should_stop(self) -> bool:
        """Whether the run must stop soon: its timeout has passed or the worker is shutting down."""
        return self.stop is not None and self.stop.is_set()

    def retry(self, *, in_: float | timedelta | None = None, counted: bool = True) -> NoReturn:
        """Stop this run and retry the task after `in_` (seconds; default: the task's backoff).

        counted: whether this run uses up an attempt. The task fails when it uses up the last one.
        Raises: RetryRequested, always; InvalidOption for a negative time.
        """
        seconds = in_.total_seconds() if isinstance(in_, timedelta) else in_
        if seconds is not None and not seconds >= 0:
            raise InvalidOption(f"retry(in_={in_!r}): give a time to wait of at least 0 seconds")
        raise RetryRequested(delay_seconds=seconds, counted=counted)

    def complete_on_commit(self, result: Any = None) -> AbstractContextManager[Ending]:
        """Open a transaction that commits the effects of the block together with the success of the task.

        result: the task's return value; the block may set the attribute `result` of its value instead.
        After the block the task has succeeded. The rest of the function runs, but its value and its errors are ignored.
        Raises: InvalidOption outside a worker, in a task that is atomic, and for a second use, unless the first block
        raised. Leaving the block raises LeaseLost or TaskTimeout, with its effects rolled back, when another run holds
        the task or its timeout has passed.
        """
        if self.completion is None:
            raise InvalidOption("complete_on_commit() works only in a worker")
        return self.completion(result)
