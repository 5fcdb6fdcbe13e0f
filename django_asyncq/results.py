"""What a row says to those who know the task: its result, and whether and when it is tried again.

Used while user modules are imported, so models are imported when first needed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta
from functools import cache, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from django.core.exceptions import ImproperlyConfigured

from . import compat
from .definitions.backoff import ExponentialBackoff
from .exceptions import InvalidOption, RetryRequested, TaskNotRegistered, TaskNotRunnable
from .registry import find
from .tasks import Task

if TYPE_CHECKING:
    from .models import TaskRecord

# What `using` may choose for each call and the row keeps.
CHOSEN = ("priority", "queue_name", "backend", "run_after")
chosen_of = attrgetter(*CHOSEN)


@cache
def sender_of(alias: str) -> type:
    """Return the sender of the framework's signals for the tasks of an alias: the class of its backend."""
    return type(compat.task_backends[alias])


def result_of(record: TaskRecord) -> compat.TaskResult[Any, Any]:
    """Return the row as a result of Django's framework."""
    result: compat.TaskResult[Any, Any] = compat.TaskResult(
        task=_task_of(record),
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
    )
    compat.set_return_value(result, record.return_value)
    return result


def _status_of(record: TaskRecord) -> compat.TaskResultStatus:
    # In the order of TaskState.
    statuses = compat.TaskResultStatus
    of_states = (statuses.READY, statuses.RUNNING, statuses.SUCCESSFUL, statuses.FAILED)
    status = of_states[record.state]
    return statuses.READY if status is statuses.FAILED and record.retry_at is not None else status


class StoredTask(Task[Any, Any]):
    """A task as a row describes it: neither registered nor validated against the settings of today."""

    def __post_init__(self) -> None:
        """Validate nothing: what the settings say now must not hide a result."""


def _task_of(record: TaskRecord) -> Any:
    """Return the task as it was enqueued."""
    declared = find(record.name) or _gone(record.name)
    if chosen_of(declared) == chosen_of(record):
        return declared
    chosen = {name: getattr(record, name) for name in CHOSEN}
    try:
        return replace(declared, **chosen)
    except (InvalidOption, compat.InvalidTask, ImproperlyConfigured):
        return StoredTask(**{**_values_of(declared), **chosen})


def _values_of(task: Task[Any, Any]) -> dict[str, Any]:
    return {field.name: getattr(task, field.name) for field in fields(task)}


@lru_cache(maxsize=256)
def _gone(name: str) -> Any:
    """Return a task in the place of one that the code no longer has, under the same name."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise TaskNotRegistered(f"task {name!r} is gone from the code")

    missing.__module__, _, missing.__name__ = name.rpartition(".")
    missing.__qualname__ = missing.__name__
    return StoredTask(
        func=missing,
        priority=0,
        backend=compat.DEFAULT_TASK_BACKEND_ALIAS,
        queue_name=compat.DEFAULT_TASK_QUEUE_NAME,
        run_after=None,
    )


def next_try(task: Task[Any, Any], record: TaskRecord, exception: BaseException, now: datetime) -> datetime | None:
    """Decide whether and when a failed run is tried again; None means never.

    `give_up_on` wins over `retry_on`; `context.retry(counted=False)` goes on past the last attempt.
    """
    if isinstance(exception, TaskNotRunnable):
        return None
    asked = exception if isinstance(exception, RetryRequested) else None
    if asked is None and (isinstance(exception, task.give_up_on) or not isinstance(exception, task.retry_on)):
        return None
    if record.attempt >= record.max_attempts and (asked is None or asked.counted):
        return None
    if asked is not None and asked.delay_seconds is not None:
        return now + timedelta(seconds=asked.delay_seconds)
    backoff = task.backoff if task.backoff is not None else ExponentialBackoff()
    delay = backoff(exception, result_of(record)) if callable(backoff) else backoff
    if delay is None:
        return None
    return now + (delay if isinstance(delay, timedelta) else timedelta(seconds=delay))
