"""Interrupt a function that awaits: when its task is cancelled, and when its soft timeout has passed.

A cancelled task's coroutine is cancelled, as asyncio does it. A soft timeout is raised at the `await` at which the
function waits, so that the function can catch it and finish. There it also counts as asyncio's CancelledError: then
what the function awaits, such as a TaskGroup or `asyncio.timeout`, cleans up as it does when it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...exceptions import SoftTimeout
from .job import Job


class InterruptedBySoftTimeout(SoftTimeout, asyncio.CancelledError):
    """How a soft timeout appears where a function awaits."""


# So it reads in the traceback of what the function makes of it.
InterruptedBySoftTimeout.__qualname__ = InterruptedBySoftTimeout.__name__ = SoftTimeout.__name__
InterruptedBySoftTimeout.__module__ = SoftTimeout.__module__


@contextmanager
def interruptible(job: Job) -> Iterator[None]:
    """Let `job.ask_to_stop` cancel what is awaited in the block. Raises: TaskCancelled, if that was asked before."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None  # noqa: S101 - a coroutine of ours runs in a task
    is_open = True

    def cancel() -> None:
        # In the loop, so not while the function runs. What comes after the block is not to be cancelled.
        if is_open:
            task.cancel()

    def interrupt() -> None:
        with suppress(RuntimeError):  # the loop of a test is closed
            loop.call_soon_threadsafe(cancel)

    job.interrupt = interrupt
    try:
        if job.is_cancelled:
            raise job.cancelled()
        yield
    finally:
        is_open = False
        job.interrupt = None


class WithSoftTimeout:
    """An awaitable with the soft timeout of a job: it awaits another one, and raises SoftTimeout in it, once."""

    def __init__(self, job: Job, awaitable: Any) -> None:
        self._job = job
        self._awaitable = awaitable
        self._is_due = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - as above
        inner = self._run().__await__()

        def interrupt() -> None:
            # `check` may have been first.
            if not self._job.had_soft_timeout:
                self._is_due = True
                task.cancel()

        timer = loop.call_later(max(self._job.soft_seconds_left or 0.0, 0.0), interrupt)
        try:
            return (yield from self._passed_on(inner, task))
        finally:
            timer.cancel()

    async def _run(self) -> Any:
        # A coroutine, whatever the awaitable is: only that surely has `send` and `throw`.
        return await self._awaitable

    def _passed_on(self, inner: Any, task: asyncio.Task[Any]) -> Generator[Any, Any, Any]:
        """Do what `yield from inner` does, except that a cancellation by the timer becomes a SoftTimeout."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                yielded = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as finished:
                return finished.value
            value = error = None
            try:
                value = yield yielded
            except asyncio.CancelledError as cancelled:
                error = self._error_of(cancelled, task)
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as other:  # noqa: BLE001 - it belongs to the awaited one
                error = other

    def _error_of(self, cancelled: asyncio.CancelledError, task: asyncio.Task[Any]) -> asyncio.CancelledError:
        job = self._job
        # A run that was cancelled, or has passed its timeout too, is not asked to finish: it is stopped.
        if not self._is_due or job.had_soft_timeout or job.is_cancelled or job.is_overdue(job.clock()):
            return cancelled
        job.had_soft_timeout = True
        task.uncancel()
        return InterruptedBySoftTimeout(*job.soft_timed_out().args)
