"""Read a row as a result of Django's framework, and decide whether and when a failed attempt is retried.

It only reads rows and must not import models, because user modules import the backend before the models are ready.
"""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from django.core.exceptions import ImproperlyConfigured

from . import compat
from .aliases import backend_class
from .asyncq_result import AsyncqResult
from .definitions.backoff import ExponentialBackoff
from .definitions.moments import moment_after
from .definitions.progress import shown_progress
from .exceptions import (
    InvalidOption,
    InvalidResult,
    RetryRequested,
    TaskCancelled,
    TaskExpired,
    TaskNotRegistered,
    TaskNotRunnable,
)
from .guard import attempt, is_a
from .registry import find, find_remote
from .tasks import Task

if TYPE_CHECKING:
    from .models import TaskRecord

# A run that fails so is never retried by itself, whatever `retry_on` says.
NEVER_RETRIED = (TaskCancelled, TaskExpired, TaskNotRunnable)
# The options of the framework that `using` can change for one call, and that the row stores.
STORED_OPTIONS = ("priority", "queue_name", "backend", "run_after")


def sender_of(alias: str) -> type:
    """Return the sender of the framework's signals for the tasks of an alias, which is the class of its backend."""
    return backend_class(alias) or type(compat.task_backends[alias])


def result_of(
    record: TaskRecord, task: Any = None, *, progress: dict[str, Any] | None = None, is_new: bool | None = None
) -> AsyncqResult[Any, Any]:
    """Return the row as a result of Django's framework.

    task: as it was enqueued; default read from the row. progress: a newer one than the row has, if there is one.
    is_new: for a result of `enqueue`.
    """
    result: AsyncqResult[Any, Any] = AsyncqResult(
        task=task or _task_of(record),
        id=str(record.id),
        status=_status_of(record),
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        last_attempted_at=record.last_attempted_at,
        finished_at=record.finished_at,
        args=record.args,
        kwargs=record.kwargs,
        backend=record.backend,
        errors=[
            compat.TaskError(exception_class_path=error["exception"], traceback=error["traceback"])
            for error in record.errors
        ],
        worker_ids=list(record.worker_ids),
        progress=progress or shown_progress(record.progress),
        is_new=is_new,
    )
    compat.set_return_value(result, record.return_value)
    return result


def _status_of(record: TaskRecord) -> compat.TaskResultStatus:
    statuses = compat.TaskResultStatus
    # In the order of TaskState, which cannot be imported here.
    status = (statuses.READY, statuses.RUNNING, statuses.SUCCESSFUL, statuses.FAILED)[record.state]
    is_retrying = status is statuses.FAILED and record.retry_at is not None
    return statuses.READY if is_retrying else status


class StoredTask(Task[Any, Any]):
    """A task as a row describes it. It is not registered, and not validated against the present settings."""

    def __post_init__(self) -> None:
        """Validate nothing, so that changed settings cannot hide a result."""


def _task_of(record: TaskRecord) -> Any:
    """Return the task as it was enqueued."""
    known = find_remote(record.name, record.backend) if record.is_remote else find(record.name)
    declared = known or _removed(record.name)
    stored = {name: getattr(record, name) for name in STORED_OPTIONS}
    if all(getattr(declared, name) == value for name, value in stored.items()):
        return declared
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
