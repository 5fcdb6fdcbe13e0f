"""One wait for some tasks: mark them as waited for, read their rows, sleep until one is announced or a while is over.

The order loses no wake: the subscription is confirmed, then the tasks are marked, then their rows are read, then it
sleeps. What was finished before the mark is read; what finishes after it is announced. All rows are read at least every
five seconds in any case, because Redis may forget the mark or be unreachable. The row alone decides.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from asgiref.sync import sync_to_async

from .. import compat, lifecycle
from ..broker.prefix_owner import has_supervisor
from ..exceptions import BrokerUnavailable, WaitTimeout
from ..models import TaskRecord
from ..prefixes import prefix_of
from ..storage.routing import rows_of
from . import waiters
from .outcomes import results_by_id, take_outcomes, values_of
from .refusals import refuse_deadlocks

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
        for part in waiters.parts_of(list(ids)):
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
            loop.call_soon_threadsafe(event.set)

    return wake


async def sleep_until(event: asyncio.Event, seconds: float) -> None:
    """Sleep until an event is set, or some time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
