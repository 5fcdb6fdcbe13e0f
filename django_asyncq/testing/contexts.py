"""A context for calling the function of a task alone, without a row, a queue or a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from .. import lifecycle
from ..broker import Lease
from ..context import Ending, TaskContext
from ..core.names import uuid7
from ..core.payload import checkpoint_value
from ..exceptions import InvalidOption
from ..models import TaskRecord
from ..results import StoredTask, result_of
from ..storage import database_clock
from ..storage.routing import transaction_of
from ..tasks import Task
from ..worker.job import Job, StopFlag, StopReason

# --- Move the clock by which tasks are due, in one process and for the time of a test.

NOTHING = timedelta()


def steady_seconds() -> float:
    """Return monotonic seconds that a test can move, for the times of runs."""
    return time.monotonic() + database_clock.offset().total_seconds()


class Clock:
    """The clock of the package, as `travel` gives it."""

    def now(self) -> datetime:
        """Return the time that it shows, in the form of `timezone.now()`."""
        return database_clock.now()

    def move(
        self, by: timedelta = NOTHING, /, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> datetime:
        """Move it on; return the time that it shows then. Negative values move it back. Raises: InvalidOption."""
        if not isinstance(by, timedelta):
            raise InvalidOption(f"no time to move by: {by!r}; give a timedelta, or days=, hours=, minutes=, seconds=")
        by += timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        database_clock.set_offset(database_clock.offset() + by)
        return self.now()


@contextmanager
def travel(
    by: timedelta = NOTHING, /, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
) -> Iterator[Clock]:
    """Move the clock of the package in the block; `with travel(hours=3) as clock: clock.move(minutes=5)`.

    It decides which tasks, retries and occurrences are due, when a `def` has passed its timeout, and what times rows
    get. `timezone.now()` is not moved. Nested blocks add up; leaving one restores the clock. Raises: InvalidOption.
    """
    before = database_clock.offset()
    try:
        clock = Clock()
        clock.move(by, days=days, hours=hours, minutes=minutes, seconds=seconds)
        yield clock
    finally:
        database_clock.set_offset(before)


def make_context(
    task: Task[Any, Any] | None = None,
    *,
    attempt: int = 1,
    max_attempts: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    should_stop: bool = False,
    cancelled: bool = False,
    checkpointed: Any = None,
) -> TaskContext:
    """Make the context with which to call a body alone: `my_task.func(make_context(attempt=3), 7)`.

    task: whose result `context.task_result` is; None: that of a task without a function. Its `timeout`, `soft_timeout`
    and `deadline` count from this call, and `travel` moves their clock. attempt: from 1.
    max_attempts: of the row; None means `attempt`, so that it is the last.
    checkpointed: the checkpoint of an earlier run.
    should_stop: as in a worker that is shutting down. cancelled: as in a run that was cancelled: `check()` raises.
    `retry()` raises what it raises in a worker. `complete_on_commit()` is a plain transaction. Only that needs the
    database. Raises: InvalidOption.
    """
    if type(attempt) is not int or attempt < 1:
        raise InvalidOption(f"make_context(attempt={attempt!r}): attempts count from 1")
    most = attempt if max_attempts is None else max_attempts
    if type(most) is not int or most < attempt:
        raise InvalidOption(f"make_context(max_attempts={max_attempts!r}): give at least attempt={attempt}")
    task = task or StoredTask(func=without_function, priority=0, backend="default", queue_name="default")
    now = database_clock.of_host()
    record = TaskRecord(
        id=uuid7(),
        name=task.module_path,
        backend=task.backend,
        queue_name=task.queue_name,
        priority=task.priority,
        args=list(args),
        kwargs=dict(kwargs or {}),
        attempt=attempt - 1,
        max_attempts=most,
        worker_ids=["make_context"] * (attempt - 1),
        enqueued_at=now,
        timeout_seconds=task.timeout,
        soft_timeout_seconds=task.soft_timeout,
        checkpoint=checkpoint_value(checkpointed),
        deadline=now + task.deadline if isinstance(task.deadline, timedelta) else task.deadline,
    )
    job = Job(lifecycle.Run(record, Lease(str(record.id), attempt)), task, time.monotonic(), clock=steady_seconds)
    job.note_begin(now)
    lifecycle.begin(job.run, "make_context", now)
    for is_asked, reason in ((should_stop, StopReason.SHUTDOWN), (cancelled, StopReason.CANCELLED)):
        if is_asked:
            job.ask_to_stop(reason)
    result = result_of(record, task)
    return TaskContext(task_result=result, record=record, stop=StopFlag(job), completion=_plain_block())


def without_function() -> None:
    """Stand for the function of a context that was made for no task."""


def _plain_block() -> Callable[[Any], Any]:
    """Return a `complete_on_commit` that commits nothing but the block, and may be used until one has succeeded."""
    is_used = False

    @contextmanager
    def block(result: Any) -> Iterator[Ending]:
        nonlocal is_used
        if is_used:
            raise InvalidOption("complete_on_commit() was used in this run before, or is being used")
        is_used = True
        try:
            with transaction_of(TaskRecord):
                yield Ending(result)
        except BaseException:
            is_used = False
            raise

    return block
