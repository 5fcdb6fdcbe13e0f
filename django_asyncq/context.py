"""What a task that asks for it gets as its first argument. Knows no registry and no stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from . import compat
from .exceptions import InvalidOption, RetryRequested

if TYPE_CHECKING:
    from .models import TaskRecord


@dataclass(slots=True)
class Ending:
    """What the block of `complete_on_commit` gets. result: the task's return value; it may be set until the end."""

    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[misc,type-arg]
    """What a task declared with `takes_context=True` gets as its first argument.

    record: the row. stop: set when the run shall end (timeout passed, or the worker is shutting down).
    completion: the worker's part of `complete_on_commit`.
    """

    record: TaskRecord
    stop: Any = None
    completion: Callable[[Any], AbstractContextManager[Ending]] | None = None

    @property
    def attempt(self) -> int:
        """Which try this is, from 1. Runs that were handed back or whose worker was lost do not count."""
        return self.record.attempt

    @property
    def should_stop(self) -> bool:
        """Whether the run shall end soon: its timeout has passed or the worker is shutting down."""
        return self.stop is not None and self.stop.is_set()

    def retry(self, *, in_: float | timedelta | None = None, counted: bool = True) -> NoReturn:
        """End this run and have the task tried again, after `in_` (seconds; default: the task's backoff).

        counted: whether this run uses up an attempt; one that does and was the last fails the task.
        """
        seconds = in_.total_seconds() if isinstance(in_, timedelta) else in_
        if seconds is not None and not seconds >= 0:
            raise InvalidOption(f"retry(in_={in_!r}): a time to wait of at least 0")
        raise RetryRequested(delay_seconds=seconds, counted=counted)

    def complete_on_commit(self, result: Any = None) -> AbstractContextManager[Ending]:
        """Open the transaction that ends the task: what is written in the block and its success are one commit.

        result: the task's return value; the block may set `result` of what it gets instead.
        After the block the task is over: what still comes is run, but neither its value nor its error counts.
        Raises: InvalidOption outside a worker, in a task that is atomic, and for a second use, unless the block before
        raised. The block's end raises LeaseLost or TaskTimeout, its effects rolled back, when the run may not end so.
        """
        if self.completion is None:
            raise InvalidOption("complete_on_commit() ends a run in a worker; here is none")
        return self.completion(result)
