"""One wait for some tasks: mark them as waited for, read their rows, sleep until one is announced or a while is over.

The order loses no wake: the subscription is confirmed, then the tasks are marked, then their rows are read, then it
sleeps. What was finished before the mark is read; what finishes after it is announced. All rows are read at least every
five seconds in any case, because Redis may forget the mark or be unreachable. The row alone decides.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import lifecycle
from ..broker.ownership import has_supervisor
from ..core import compat
from ..core.aliases import prefix_of
from ..core.logs import current_task
from ..core.time import AT_LEAST_ZERO, Duration, is_duration, seconds_of
from ..exceptions import BrokerUnavailable, InvalidOption, TaskFailed, WaitTimeout
from ..lifecycle.base import waiting_hooks
from ..models import FailureReason, TaskRecord, TaskState
from ..results import WAIT_SECONDS, result_of
from ..storage.routing import is_in_transaction, rows_of, sees_commits, writing_database
from . import waiters

# --- A finished row as what `wait` returns or raises, and in the results that were waited for.

LONGEST_TEXT = 500


def results_by_id(results: Iterable[Any]) -> dict[UUID, list[Any]]:
    """Return the results of each task; one may be waited for through several."""
    found: dict[UUID, list[Any]] = defaultdict(list)
    for result in results:
        found[UUID(result.id)].append(result)
    return found


def take_outcomes(results: Mapping[UUID, Iterable[Any]], finished: Iterable[TaskRecord]) -> None:
    """Refresh the results whose rows are finished. Raises: TaskFailed for the first of these rows that has failed."""
    failed = None
    for record in finished:
        for result in results.get(record.id, ()):
            _refresh(result, record)
        if record.state == TaskState.FAILED:
            failed = failed or record
    if failed is not None:
        raise _failure(failed)


def values_of(results: Sequence[Any], finished: Mapping[UUID, TaskRecord]) -> list[Any]:
    """Return the return values of tasks that have succeeded, in the order of their results."""
    return [finished[UUID(result.id)].return_value for result in results]


def _refresh(result: Any, record: TaskRecord) -> None:
    """Have a result show its row, as its method `refresh` does with one more query."""
    fresh = result_of(record, result.task)
    for field in fields(fresh):
        # The class is frozen, for the project's code.
        object.__setattr__(result, field.name, getattr(fresh, field.name))


def _failure(record: TaskRecord) -> TaskFailed:
    text = str(FailureReason(record.reason).label) if record.reason else "its row says no reason"
    if record.reason == FailureReason.CANCELLED and record.cancelled_by:
        text = f"{text}: {record.cancelled_by}"
    elif record.errors:
        # Not the last line of the traceback: of a process that died this is a line of its stacks, else perhaps a note.
        message = " ".join(str(record.errors[-1].get("message", "")).split())
        error = f"{record.last_exception.removeprefix('builtins.')}: {message}".removesuffix(": ")
        text = f"{text}: {error[:LONGEST_TEXT]}"
    return TaskFailed(str(record.id), reason=record.reason, exception=record.last_exception, text=text)


# --- Waits that could never return, or would keep a worker's slot from the task that is waited for; refused at once.


def checked_seconds(timeout: Duration | None) -> float:
    """Return a timeout in seconds; None means WAIT_SECONDS. Raises: InvalidOption."""
    if timeout is None:
        return WAIT_SECONDS
    if not is_duration(timeout, or_zero=True):
        raise InvalidOption(f"wait(timeout={timeout!r}) is not valid: give {AT_LEAST_ZERO}")
    return float(seconds_of(timeout))


def refuse_deadlocks(results: Sequence[Any], *, allow_in_task: bool, in_test_kit: bool = False) -> None:
    """Refuse a wait in a task, in the transaction that enqueued, and in one that never sees the outcome.

    in_test_kit: the tasks run on the caller's connection; the transaction of a test case around it does not count.
    Raises: InvalidOption with the remedy.
    """
    task = current_task()
    if task is not None and not allow_in_task:
        raise InvalidOption(
            f"wait() within the task {task.task}: it keeps a slot that the other task may need. Remedy: have the other "
            f"task enqueue what follows; or give allow_in_task=True if workers of another queue run it"
        )
    connection = connections[writing_database(TaskRecord)]
    if not connection.in_atomic_block:
        return
    _refuse_uncommitted({result.id for result in results}, connection, in_test_kit=in_test_kit)
    if not in_test_kit and is_in_transaction(connection.alias) and not sees_commits(connection):
        raise InvalidOption(
            "wait() in a transaction that never sees what workers commit: its isolation level is above READ COMMITTED. "
            "Remedy: wait after the transaction; with ATOMIC_REQUESTS, decorate the view with "
            "django.db.transaction.non_atomic_requests"
        )


def _refuse_uncommitted(ids: set[str], connection: BaseDatabaseWrapper, *, in_test_kit: bool) -> None:
    """Refuse to wait for tasks that the open transaction has enqueued or retried: workers get them at its commit."""
    for hook in waiting_hooks(connection, of_project_only=in_test_kit):
        if not hook.deletes:
            for record in hook.records:
                if str(record.id) in ids:
                    raise InvalidOption(
                        f"wait() for task {record.id} in the transaction that enqueued it: workers get it after the "
                        f"commit. Remedy: wait after the `atomic` block; with ATOMIC_REQUESTS, decorate the view with "
                        f"django.db.transaction.non_atomic_requests; in a TestCase use "
                        f"django_asyncq.testing.TestBackend"
                    )


# The random part of a sleep, of its length.
RANDOM_PART = 0.25


class Waiting:
    """The state of one wait, for `with`. results: of tasks that go through Redis. wake: as of `Waiter`.

    finished: the rows of the tasks that are final, as `begin` and `look` have read them.
    """

    def __init__(self, results: Iterable[Any], wake: Callable[[], object]) -> None:
        self.finished: dict[UUID, TaskRecord] = {}
        self._newly_finished: list[TaskRecord] = []
        self._queues = {result.id: (result.backend, result.task.queue_name) for result in results}
        self._unfinished = set(self._queues)
        self._waiter = waiters.Waiter(self._queues, wake)
        # What this waiter looks at for all.
        self._claimed: set[str] = set()

    def __enter__(self) -> Self:
        waiters.of_process().join(self._waiter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waiters.of_process().leave(self._waiter)
        # A look that was claimed and is not done is left to the others.
        waiters.of_process().look_soon(self._claimed)

    @property
    def is_over(self) -> bool:
        """Whether all rows are final."""
        return not self._unfinished

    def newly_finished(self) -> list[TaskRecord]:
        """Return the rows that were found to be final since the last call."""
        found, self._newly_finished = self._newly_finished, []
        return found

    def begin(self) -> None:
        """Mark the tasks, then read their rows. Raises: as `look`."""
        # Redis does not know a task that this process has yet to push.
        lifecycle.flush_pushes()
        waiters.of_process().mark(self._queues)
        self._read(set(waiters.over_among(list(self._queues))))

    def must_look(self) -> bool:
        """Return whether `look` would find something to do; costs nothing."""
        self._claimed |= waiters.of_process().claim_look()
        return bool(self._claimed) or self._waiter.has_ids()

    def look(self) -> None:
        """Read the rows of tasks that may be over; first those of all waiters, where that is due.

        Raises: TaskResultDoesNotExist for a row that was deleted; django.db.Error.
        """
        claimed, self._claimed = self._claimed, set()
        if claimed:
            waiters.of_process().look(claimed)
        over = self._waiter.taken_ids() & self._unfinished
        self._read(over)
        # Its entry was removed, but its row goes on, such as that of a run that was voided.
        if still := over & self._unfinished:
            waiters.of_process().look_soon(still)

    def pause_seconds(self) -> float:
        """Return how long to sleep until `must_look` is to be asked, unless something wakes it."""
        pause = max(waiters.of_process().next_look_at() - time.monotonic(), 0.0)
        return pause * random.uniform(1, 1 + RANDOM_PART)  # noqa: S311

    def timed_out(self, seconds: float) -> WaitTimeout:
        """Return the error of a wait whose time is over."""
        id = min(self._unfinished)
        alias, _ = self._queues[id]
        try:
            has_worker = has_supervisor(prefix_of(alias))
        except BrokerUnavailable:
            has_worker = True  # not known
        return WaitTimeout(id, seconds, has_worker=has_worker)

    def _read(self, ids: set[str]) -> None:
        if not ids:
            return
        missing = set(ids)
        for part in compat.batched(ids, waiters.ROWS_PER_QUERY):
            for record in rows_of(TaskRecord).filter(id__in=part):
                missing.discard(str(record.id))
                if record.is_final:
                    self.finished[record.id] = record
                    self._newly_finished.append(record)
                    self._unfinished.discard(str(record.id))
        if missing:
            raise compat.TaskResultDoesNotExist(min(missing))


def wait(results: Sequence[Any], seconds: float, *, allow_in_task: bool) -> list[Any]:
    """Sleep until the tasks have succeeded; return their values.

    Raises: TaskFailed as soon as one has failed, WaitTimeout, TaskResultDoesNotExist, InvalidOption as
    `refuse_deadlocks`.
    """
    refuse_deadlocks(results, allow_in_task=allow_in_task)
    deadline = time.monotonic() + seconds
    by_id = results_by_id(results)
    event = threading.Event()
    with Waiting(results, event.set) as waiting:
        waiting.begin()
        while True:
            take_outcomes(by_id, waiting.newly_finished())
            if waiting.is_over:
                return values_of(results, waiting.finished)
            left = deadline - time.monotonic()
            if left <= 0:
                raise waiting.timed_out(seconds)
            event.wait(min(waiting.pause_seconds(), left))
            event.clear()
            if waiting.must_look():
                waiting.look()


async def wait_async(results: Sequence[Any], seconds: float, *, allow_in_task: bool) -> list[Any]:
    """Do the same without holding a thread; the rows are read in the thread that has the caller's connections."""
    await sync_to_async(refuse_deadlocks)(results, allow_in_task=allow_in_task)
    deadline = time.monotonic() + seconds
    by_id = results_by_id(results)
    event = asyncio.Event()
    with Waiting(results, waker_of(event)) as waiting:
        await sync_to_async(waiting.begin)()
        while True:
            take_outcomes(by_id, waiting.newly_finished())
            if waiting.is_over:
                return values_of(results, waiting.finished)
            left = deadline - time.monotonic()
            if left <= 0:
                raise await sync_to_async(waiting.timed_out)(seconds)
            await sleep_until(event, min(waiting.pause_seconds(), left))
            event.clear()
            if waiting.must_look():
                await sync_to_async(waiting.look)()


def waker_of(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            loop.call_soon_threadsafe(event.set, context=contextvars.Context())

    return wake


async def sleep_until(event: asyncio.Event, seconds: float) -> None:
    """Sleep until an event is set, or some time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
