"""Read a row as a result of Django's framework, and decide whether and when a failed attempt is retried.

It only reads rows and must not import models, because user modules import the backend before the models are ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from .core import compat
from .core.aliases import backend_class
from .core.calls import blocking
from .core.foreign_words import OF_RESULT, no_attribute
from .core.guard import attempt, class_name, is_a
from .core.payload import copied, shown_progress, text_of
from .core.policies import ExponentialBackoff
from .core.registry import find, find_remote
from .core.time import Duration, is_duration, moment_after, seconds_of
from .core.typed import readable
from .exceptions import (
    AsyncqError,
    Discard,
    InvalidOption,
    InvalidResult,
    RetryRequested,
    TaskCancelled,
    TaskExpired,
    TaskNotRegistered,
    TaskNotRunnable,
    TransactionEnded,
)
from .tasks import Task

if TYPE_CHECKING:
    from .models import TaskRecord


# --- `AsyncqResult`: what `enqueue` returns.
#
# User code imports it before the app registry is ready, so it must not import models; each method imports what it
# needs.

# How long a wait lasts that gives no timeout: as long as a person waits for a page.
WAIT_SECONDS = 30.0
# How often `acancel` looks whether a task has stopped.
STOP_LOOK_SECONDS = 0.1

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:

    class _FrameworkResult(compat.TaskResult[P, R]):
        pass

else:

    class _FrameworkResult(compat.TaskResult, Generic[P, R]):
        __slots__ = ()


class LogLine(NamedTuple):
    """A line that a task has logged. attempt: from 1. level: a number, such as `logging.INFO`. logger: its name."""

    attempt: int
    logged_at: datetime
    level: int
    logger: str
    text: str

    @property
    def level_name(self) -> str:
        """The name of the level, such as "INFO"."""
        return logging.getLevelName(self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncqResult(_FrameworkResult[P, R]):  # type: ignore[misc]
    """A task as its row was when it was read: a result of Django's framework, and what this backend adds.

    progress: what the task reported last with `context.progress`, as {"done", "total", "message", "data"}; None if
    nothing. A retry begins with None.
    is_new: of what `enqueue` returned: whether the call has made this task; False when an existing one stands for it,
    as with `on_duplicate="return"`. None of a result that was read.
    """

    progress: dict[str, Any] | None = None
    is_new: bool | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Leave the arguments as they are: those of a row are plain JSON values, and `result_of` copies them."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise the AttributeError, which says what to write in place of `get` and the like."""
            raise no_attribute(self, name, OF_RESULT)

    def refresh(self) -> None:
        """Read the row again; the progress of a running task from Redis, where it is newer."""
        self._take(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        """Read the row again, as `refresh` does."""
        self._take(await self.task.get_backend().aget_result(self.id))

    def logs(self) -> list[LogLine]:
        """Return the lines that the runs of this task have logged, oldest first: those that `keep_logs` keeps.

        A run's lines are there when it has finished; those of a run whose process died, when it is recovered.
        """
        lines: list[LogLine] = compat.task_backends[self.backend].logs(self)  # type: ignore[attr-defined]
        return lines

    async def alogs(self) -> list[LogLine]:
        """Return the lines, as `logs` does."""
        return await sync_to_async(self.logs)()

    @blocking("result.await_")
    def wait(self, timeout: Duration | None = None, *, allow_in_task: bool = False) -> R:
        """Sleep until the task has succeeded; return its value, and have this result show its row.

        timeout: seconds or a timedelta, 0 to look once; default 30 s. allow_in_task: also wait
        within a task, which keeps its slot meanwhile.
        Raises: TaskFailed when no attempt follows; WaitTimeout, and the task goes on; TaskResultDoesNotExist when the
        row was deleted; InvalidOption for a wait that could never return, as in the transaction that enqueued.
        """
        (value,) = _backend_of(self).wait([self], timeout, allow_in_task=allow_in_task)
        return cast("R", value)

    async def await_(self, timeout: Duration | None = None, *, allow_in_task: bool = False) -> R:
        """Do the same as `wait` without holding a thread; may be cancelled at any time."""
        (value,) = await _backend_of(self).wait_async([self], timeout, allow_in_task=allow_in_task)
        return cast("R", value)

    def _take(self, newer: Any) -> None:
        for name in (*compat.TASK_REFRESH_ATTRS, "progress"):
            object.__setattr__(self, name, getattr(newer, name))

    def cancel(self, reason: str = "", *, wait: Duration | None = None) -> Literal["cancelled", "asked", "over"]:
        """Cancel the task, in the caller's transaction; after a rollback it never happened. reason: for its error.

        wait: seconds or a timedelta for which to wait until a task that was asked to stop has finished; then
        "cancelled" or "over" say how, and "asked" that it still runs.
        Returns: "cancelled": no worker had it, it fails as cancelled, and no run of it begins any more; "asked": a
        worker may have it and is asked to stop, but it may still succeed; "over": it had finished.
        Raises: the framework's TaskResultDoesNotExist; InvalidOption for a wait in a transaction.
        """
        backend: Any = compat.task_backends[self.backend]
        word: Literal["cancelled", "asked", "over"] = backend.cancel(self, reason, wait=wait)
        return word

    async def acancel(self, reason: str = "", *, wait: Duration | None = None) -> Literal["cancelled", "asked", "over"]:
        """Do what `cancel` does, in the thread that holds the caller's database connection; wait without it."""
        backend: Any = compat.task_backends[self.backend]
        # With 0, it refuses what cannot be waited for.
        word = await sync_to_async(self.cancel, thread_sensitive=True)(reason, wait=None if wait is None else 0)
        deadline = time.monotonic() + (0.0 if wait is None else float(seconds_of(wait)))
        while word == "asked" and time.monotonic() < deadline:
            await asyncio.sleep(STOP_LOOK_SECONDS)
            word = await sync_to_async(backend.how_stopped, thread_sensitive=True)(self)
        return word


@blocking("await_all")
def wait_all(
    results: Sequence[AsyncqResult[Any, R]], timeout: Duration | None = None, *, allow_in_task: bool = False
) -> list[R]:
    """Sleep until all tasks have succeeded; return their values in the order of the results, and refresh these.

    timeout: as of `AsyncqResult.wait`, for all together. Results of several aliases are waited for alias by alias.
    Raises: as `AsyncqResult.wait`, for the first task that is found to have failed; the others go on.
    """
    values: dict[str, Any] = {}
    for group, left in _by_alias(results, timeout):
        found = _backend_of(group[0]).wait(group, left, allow_in_task=allow_in_task)
        values.update(zip((result.id for result in group), found, strict=True))
    return [values[result.id] for result in results]


async def await_all(
    results: Sequence[AsyncqResult[Any, R]], timeout: Duration | None = None, *, allow_in_task: bool = False
) -> list[R]:
    """Do the same as `wait_all` without holding a thread."""
    values: dict[str, Any] = {}
    for group, left in _by_alias(results, timeout):
        found = await _backend_of(group[0]).wait_async(group, left, allow_in_task=allow_in_task)
        values.update(zip((result.id for result in group), found, strict=True))
    return [values[result.id] for result in results]


def _by_alias(
    results: Sequence[AsyncqResult[Any, Any]], timeout: Duration | None
) -> Iterator[tuple[list[AsyncqResult[Any, Any]], Duration | None]]:
    """Yield the results of each alias, and how long they may be waited for. Raises: InvalidOption."""
    groups: dict[str, list[AsyncqResult[Any, Any]]] = {}
    for result in results:
        _backend_of(result)
        groups.setdefault(result.backend, []).append(result)
    deadline = None
    for group in groups.values():
        if len(groups) == 1 or not (timeout is None or is_duration(timeout, or_zero=True)):
            yield group, timeout  # the backend refuses what is no duration
            continue
        if deadline is None:
            seconds = WAIT_SECONDS if timeout is None else float(seconds_of(timeout))
            deadline = time.monotonic() + seconds
        yield group, max(deadline - time.monotonic(), 0.0)


def _backend_of(result: Any) -> Any:
    """Return the backend of a result. Raises: InvalidOption for one of a backend that is not of this package."""
    if not isinstance(result, AsyncqResult):
        raise InvalidOption(
            f"wait for {result!r}: it is no AsyncqResult, so its backend is not of django_asyncq. Remedy: for Django's "
            f"immediate backend read `result.return_value`; enqueue has run the task"
        )
    return compat.task_backends[result.backend]


# A run that fails so is never retried by itself, whatever `retry_on` says.
NEVER_RETRIED = (Discard, TaskCancelled, TaskExpired, TaskNotRunnable, TransactionEnded)
# The framework's word for each state; a task that is retried is READY again.
STATUSES = (
    compat.TaskResultStatus.READY,
    compat.TaskResultStatus.RUNNING,
    compat.TaskResultStatus.SUCCESSFUL,
    compat.TaskResultStatus.FAILED,
)
# The options of the framework that `using` can change for one call, and that the row stores.
STORED_OPTIONS = ("priority", "queue_name", "backend", "run_after")


def sender_of(alias: str) -> type:
    """Return the sender of the framework's signals for the tasks of an alias, which is the class of its backend."""
    return backend_class(alias) or type(compat.task_backends[alias])


def result_of(
    record: TaskRecord,
    task: Any = None,
    *,
    declared: Any = None,
    progress: dict[str, Any] | None = None,
    is_new: bool | None = None,
) -> AsyncqResult[Any, Any]:
    """Return the row as a result of Django's framework.

    task: as it was enqueued; default read from the row. declared: as the code has it; default looked up. progress: a
    newer one than the row has, if there is one.
    is_new: for a result of `enqueue`.
    """
    # In the order of TaskState, which cannot be imported here.
    status = STATUSES[record.state]
    if record.retry_at is not None and status is compat.TaskResultStatus.FAILED:
        status = compat.TaskResultStatus.READY
    result: AsyncqResult[Any, Any] = AsyncqResult(
        task=task or _task_of(record, declared),
        id=str(record.id),
        status=status,
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        last_attempted_at=record.last_attempted_at,
        finished_at=record.finished_at,
        args=readable(record.args) if record.has_typed_arguments else copied(record.args),
        kwargs=readable(record.kwargs) if record.has_typed_arguments else copied(record.kwargs),
        backend=record.backend,
        errors=[
            compat.TaskError(exception_class_path=error["exception"], traceback=error["traceback"])
            for error in record.errors
        ],
        worker_ids=list(record.worker_ids),
        progress=progress or (None if record.progress is None else shown_progress(record.progress)),
        is_new=is_new,
    )
    if record.return_value is not None:
        compat.set_return_value(result, record.return_value)
    return result


class StoredTask(Task[Any, Any]):
    """A task as a row describes it. It is not registered, and not validated against the present settings."""

    def __post_init__(self) -> None:
        """Validate nothing, so that changed settings cannot hide a result."""


def _task_of(record: TaskRecord, declared: Any) -> Any:
    """Return the task as it was enqueued."""
    if declared is None:
        known = find_remote(record.name, record.backend) if record.is_remote else find(record.name)
        declared = known or _removed(record.name)
    if (
        declared.priority == record.priority
        and declared.queue_name == record.queue_name
        and declared.backend == record.backend
        and declared.run_after == record.run_after
    ):
        return declared
    stored = {name: getattr(record, name) for name in STORED_OPTIONS}
    try:
        return replace(declared, **stored)
    except (InvalidOption, compat.InvalidTask, ImproperlyConfigured):
        values = {field.name: getattr(declared, field.name) for field in fields(declared)}
        return StoredTask(**{**values, **stored})


@lru_cache(maxsize=256)
def _removed(name: str) -> Any:
    """Return a task that stands for one removed from the code, under the same name."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise TaskNotRegistered(f"task {name!r} was removed from the code")

    missing.__module__, _, missing.__name__ = name.rpartition(".")
    missing.__qualname__ = missing.__name__
    return StoredTask(
        func=missing,
        priority=0,
        backend=compat.DEFAULT_TASK_BACKEND_ALIAS,
        queue_name=compat.DEFAULT_TASK_QUEUE_NAME,
        run_after=None,
    )


def as_discard(task: Task[Any, Any], exception: BaseException) -> BaseException:
    """Return the Discard that an exception of the body means, because of `on_missing`; else the exception itself."""
    if not task.on_missing or is_a(exception, AsyncqError):
        return exception
    # A class of the project's may decide what its subclasses are; `judge_failure` answers what that raises.
    if not attempt(issubclass, type(exception), task.on_missing).value:
        return exception
    discard = Discard(f"{class_name(exception)}: {text_of(exception)}".removesuffix(": "))
    discard.__cause__ = exception
    return discard.with_traceback(exception.__traceback__)


class Judgement(NamedTuple):
    """What becomes of a failed attempt.

    exception: for the row. retry_at: None if it is final. counted: whether it uses up an attempt. is_fault: whether the
    exception is that of the project's code that should have decided.
    """

    exception: BaseException
    retry_at: datetime | None
    counted: bool = True
    is_fault: bool = False


def judge_failure(
    task: Task[Any, Any], record: TaskRecord, exception: BaseException, now: datetime, *, is_cancelled: bool = False
) -> Judgement:
    """Decide whether and when a failed attempt is retried. is_cancelled: the run was asked to stop for good.

    It calls the project's code: the backoff, and what tells the classes of exceptions apart. Whatever that raises, the
    task has failed for good, and its row says why.
    """
    if is_a(exception, InvalidResult):
        # The framework's own class, and never a retry: the function has done its work.
        return Judgement(TypeError(str(exception)).with_traceback(exception.__traceback__), None)
    if is_cancelled:
        if _asked(exception) is None:
            return Judgement(exception, None)
        cancelled = TaskCancelled("the task was cancelled, and asked to be retried")
        cancelled.__cause__ = exception
        return Judgement(cancelled.with_traceback(exception.__traceback__), None)
    retry_at, error = attempt(next_attempt_at, task, record, exception, now)
    if error is not None:
        attempt(setattr, error, "__context__", exception)  # its class may refuse any attribute
        return Judgement(error, None, is_fault=True)
    asked = _asked(exception)
    return Judgement(exception, retry_at, counted=asked is None or asked.counted)


def _asked(exception: BaseException) -> RetryRequested | None:
    return exception if is_a(exception, RetryRequested) else None


def next_attempt_at(
    task: Task[Any, Any], record: TaskRecord, exception: BaseException, now: datetime
) -> datetime | None:
    """Return when a failed attempt is retried; None means never.

    Raises: what the project's code raises; `judge_failure` does not.

    `give_up_on` wins over `retry_on`. `context.retry(counted=False)` is retried even after the last attempt.
    Raises: InvalidOption when the time to wait is none, and what the task's `backoff` raises.
    """
    if is_a(exception, NEVER_RETRIED):
        return None
    kind, asked = type(exception), _asked(exception)
    if asked is None and (issubclass(kind, task.give_up_on) or not issubclass(kind, task.retry_on)):
        return None
    if record.attempt >= record.max_attempts and (asked is None or asked.counted):
        return None
    if asked is not None and asked.delay_seconds is not None:
        return moment_after("the time to wait of retry()", now, asked.delay_seconds)
    backoff = task.backoff if task.backoff is not None else ExponentialBackoff()
    delay = backoff(exception, result_of(record)) if callable(backoff) else backoff
    if delay is None:
        return None
    return moment_after("the result of backoff", now, delay)
