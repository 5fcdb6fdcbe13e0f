"""The context of a run: what the body of a task can ask about it and do with it. Knows no registry and no stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import router, transaction

from .core import compat
from .core.foreign_words import OF_CONTEXT, OF_RETRY, no_attribute, refusing_unknown
from .core.logs import CurrentTask, current_task
from .core.payload import checkpoint_value, copied, progress_value
from .core.time import AT_LEAST_ZERO, Duration, is_duration, seconds_of
from .exceptions import InvalidOption, RetryRequested

if TYPE_CHECKING:
    from .models import TaskRecord

__all__ = ["CurrentTask", "Ending", "RowlessContext", "TaskContext", "current_task"]


@dataclass(slots=True)
class Ending:
    """The value of the `complete_on_commit` block. result: the task's return value; the block may set it."""

    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[misc,type-arg]
    """The first argument of a task declared with `takes_context=True`.

    record: the row. stop: the worker's part of `should_stop` and `check`. completion, keep: its part of
    `complete_on_commit`, and of `checkpoint`. wire_type: the type of the message that another program has written, such
    as "email:welcome" for a task declared with `wire_name="email:*"`; None for a task enqueued here.
    """

    record: TaskRecord
    stop: Any = None
    completion: Callable[[Any], AbstractContextManager[Ending]] | None = None
    wire_type: str | None = None
    keep: Callable[[Any], object] | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise the AttributeError, which says what to write in place of `request` and the like."""
            raise no_attribute(self, name, OF_CONTEXT)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Runs that were requeued or whose worker was lost do not count."""
        return self.record.attempt

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the task, as its producer gave them; a copy."""
        return dict(self.record.headers or {}) if self.record is not None else {}

    @property
    def should_stop(self) -> bool:
        """Whether the run must stop soon: it was cancelled, a timeout has passed, or the worker is shutting down."""
        return self.stop is not None and self.stop.is_set()

    @property
    def deadline(self) -> datetime | None:
        """When the run must have finished, by its timeout and its deadline; None: it has neither.

        By the database's clock, in the form of `timezone.now()`.
        """
        begun_at, seconds, deadline = self.record.last_attempted_at, self.record.timeout_seconds, self.record.deadline
        if begun_at is None or seconds is None:
            return deadline
        by_timeout = begun_at + timedelta(seconds=seconds)
        return by_timeout if deadline is None else min(by_timeout, deadline)

    def check(self) -> None:
        """Raise if the run must not go on. Call it often in a long `def`: nothing else can stop a thread.

        Raises: TaskCancelled; TaskTimeout, when the timeout or the deadline has passed; SoftTimeout, once, when the
        soft timeout has passed: catch it to finish early. It does not raise while the worker is shutting down, because
        the task may finish then: `should_stop` says so.
        """
        if self.stop is not None:
            self.stop.check()

    @refusing_unknown("context.retry()", OF_RETRY)
    def retry(self, *, in_: Duration | None = None, counted: bool = True) -> NoReturn:
        """Stop this run and retry the task after `in_` (seconds or a timedelta; default: the task's backoff).

        counted: whether this run uses up an attempt. The task fails when it uses up the last one.
        Raises: RetryRequested; InvalidOption when `in_` is no time to wait; TypeError for an unknown option.
        """
        if in_ is not None and not is_duration(in_, or_zero=True):
            raise InvalidOption(f"retry(in_={in_!r}) is not valid: give {AT_LEAST_ZERO}")
        raise RetryRequested(delay_seconds=seconds_of(in_), counted=counted)

    def progress(self, done: float, total: float | None = None, message: str = "", **data: Any) -> None:
        """Report how far this run is; the result of the task shows the newest value as `result.progress`.

        done, total: numbers of anything, 0 or more, `done` no more than `total`. message, data: a text and JSON values
        for its readers; nothing is masked in them.
        It costs microseconds: the value is stored within a second by another thread, and with the outcome.
        Raises: InvalidOption, and the value before stays.
        """
        value = progress_value(done, total, message, data)
        if self.record is not None:
            self.record.progress = value

    @property
    def checkpointed(self) -> Any:
        """What `checkpoint` stored last, in this run or an earlier one, as a copy; None: nothing yet."""
        return None if self.record is None else copied(self.record.checkpoint)

    def checkpoint(self, value: Any) -> None:
        """Store how far the task has come, so that its next run goes on from there: it finds it as `checkpointed`.

        value: JSON of at most 4 KiB, such as the key of the last row; None forgets the one before.
        When the call returns, the value is in the database, in your transaction if one is open. It outlasts a shutdown,
        a lost worker, a retry and an emptied Redis; the success of the task clears it. Within the transaction that
        completes the task nothing is written: its commit clears it, and a rollback leaves the one before.
        In an `async def` write `await context.acheckpoint(value)`.
        Raises: InvalidOption, and nothing is written; LeaseLost, when the task is no longer that of this run;
        django.db.Error.
        """
        value = checkpoint_value(value)
        if self.keep is not None:
            self.keep(value)
        if self.record is not None:
            self.record.checkpoint = value

    async def acheckpoint(self, value: Any) -> None:
        """Do what `checkpoint` does, in an `async def`."""
        await sync_to_async(self.checkpoint)(value)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowlessContext(TaskContext):  # type: ignore[misc]
    """The context under a backend that stores no rows, such as Django's immediate backend.

    record: None. `should_stop` is False, `check` does nothing, `deadline` is None, `progress` and `checkpoint` only
    check their arguments, `retry` makes the task fail, and `complete_on_commit` is a plain transaction.
    """

    record: Any = None

    @classmethod
    def of(cls, context: compat.TaskContext[Any, Any]) -> RowlessContext:
        """Return a context that has all that a `TaskContext` has, for one of the framework's."""
        return cls(task_result=context.task_result, completion=_plain_transaction)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        attempts: int = self.task_result.attempts
        return attempts

    @property
    def deadline(self) -> None:
        """None: there is no timeout."""
        return None


@contextmanager
def _plain_transaction(result: Any) -> Iterator[Ending]:
    """Open a transaction of the database that would hold the task's row."""
    database = router.db_for_write(apps.get_model("django_asyncq", "TaskRecord"))
    with transaction.atomic(using=database):
        yield Ending(result)
