"""Call a task's function so that its whole body has run when the call returns.

A `def` may return an awaitable, for instance when a decorator wraps an `async def`; calling it runs nothing of the
body. A slot's thread hands such an awaitable to the event loop and waits for it. Generators are never run, so a task
that returns one has failed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import NoneType
from typing import Any

from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections

from ...exceptions import SoftTimeout, TaskNotRunnable
from ..forks import exit_if_forked
from .asgiref_internals import has_thread
from .interrupting import InterruptedBySoftTimeout, WithSoftTimeout, interruptible
from .job import Job

# What most tasks return; it needs no closer look.
FINISHED = frozenset({NoneType, bool, int, float, str, list, dict, tuple})


def call(job: Job, args: list[Any], kwargs: dict[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Call the function of a `def` task; await in the event loop what it returns, with the rest of its timeout.

    Raises: TaskNotRunnable when a part of the body did not run; what the function raises.
    """
    value = _called(job, args, kwargs)
    if type(value) in FINISHED:
        return value
    if not _is_awaitable(value):
        return _finished(value)
    value, exception = asyncio.run_coroutine_threadsafe(_await_in_loop(job, value), loop).result()
    if exception is not None:
        raise exception
    return value


def call_here(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function of a `def` or `async def` task in a thread without an event loop beside it, as a test has it.

    Synchronous code that is awaited, such as the ORM's, runs in the calling thread, with its database connections.
    Raises: as `call`.
    """
    value = _called(job, args, kwargs)
    if type(value) in FINISHED:
        return value
    if not _is_awaitable(value):
        return _finished(value)
    value, exception = async_to_sync(_await_here)(job, value)
    if exception is not None:
        raise exception
    return value


def call_in_main_thread(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function of an isolated task, `def` or `async def`, in an event loop of its own where it needs one.

    Raises: as `call`.
    """
    value = _called(job, args, kwargs)
    if type(value) in FINISHED:
        return value
    if not _is_awaitable(value):
        return _finished(value)
    value, exception = asyncio.run(_await_in_loop(job, value))
    if exception is not None:
        raise exception
    return value


def call_in_transaction(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function of a task that is atomic. Its transaction belongs to this thread, so nothing can be awaited.

    Raises: TaskNotRunnable when a part of the body did not run; what the function raises.
    """
    value = _called(job, args, kwargs)
    if type(value) not in FINISHED and _is_awaitable(value):
        _discard(value)
        raise TaskNotRunnable(
            f"an atomic task returned {_described(value)}, which cannot be awaited in its transaction; nothing was "
            f"committed: call async code with asgiref's async_to_sync, or await it before complete_on_commit()"
        )
    return _finished(value)


async def acall(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Await the function of an `async def` task.

    Raises: TaskTimeout, TaskCancelled, TaskNotRunnable when a part of the body did not run; what the function raises.
    """
    return await _await(job, job.task.func(*args, **kwargs))


def _called(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return job.task.func(*args, **kwargs)
    finally:
        exit_if_forked()


@asynccontextmanager
async def own_thread() -> AsyncIterator[None]:
    """Give the coroutines of one run a thread for `sync_to_async`; close the thread's database connections."""
    async with ThreadSensitiveContext() as context:
        try:
            yield
        finally:
            # Only a run that used the database synchronously has a thread, with connections, of its own.
            if has_thread(context):
                await sync_to_async(connections.close_all)()


async def _await_in_loop(job: Job, awaitable: Any) -> tuple[Any, BaseException | None]:
    """Await what a `def` task returned, with a thread of its own for `sync_to_async`."""
    async with own_thread():
        return await _await_here(job, awaitable)


async def _await_here(job: Job, awaitable: Any) -> tuple[Any, BaseException | None]:
    """Await what a function returned; return its value or its error, so that not even SystemExit ends the loop."""
    try:
        if isinstance(awaitable, concurrent.futures.Future):
            awaitable = asyncio.wrap_future(awaitable)
        return await _await(job, awaitable), None
    except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
        return None, error


async def _await(job: Job, awaitable: Any) -> Any:
    """Await, and interrupt as the job says; the value must not be something that is still to be run."""
    is_awaited = False
    try:
        async with asyncio.timeout(job.seconds_left) as scope:
            with interruptible(job):
                is_awaited = True
                try:
                    value = await (awaitable if job.soft_seconds_left is None else WithSoftTimeout(job, awaitable))
                finally:
                    exit_if_forked()
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise job.stopped() from error
    except InterruptedBySoftTimeout as error:
        # An error of asyncio's own kind would be taken for a cancellation by whoever handles it.
        raise SoftTimeout(*error.args).with_traceback(error.__traceback__) from error.__cause__
    except asyncio.CancelledError as error:
        if not job.is_cancelled:
            raise
        raise job.cancelled() from error
    finally:
        if not is_awaited:
            _discard(awaitable)
    return value if type(value) in FINISHED else _finished(value)


def _finished(value: Any) -> Any:
    """Return a value that is not still to be run. Raises: TaskNotRunnable."""
    is_generator = inspect.isgenerator(value) or inspect.isasyncgen(value)
    if not is_generator and not _is_awaitable(value):
        return value
    _discard(value)
    remedy = "loop over it in the task" if is_generator else "await it in the task"
    raise TaskNotRunnable(f"the function returned {_described(value)}, which nobody runs: {remedy}")


def _is_awaitable(value: Any) -> bool:
    return isinstance(value, concurrent.futures.Future) or inspect.isawaitable(value)


def _described(value: Any) -> str:
    kind = type(value)
    if name := getattr(value, "__qualname__", ""):  # of a coroutine or generator: that of its function
        return f"the {kind.__name__.replace('_', ' ')} {name}"
    return f"a {kind.__module__}.{kind.__qualname__}"


def _discard(value: Any) -> None:
    """Close a coroutine or generator that never ran, or cancel a future, so that nothing of it runs later."""
    for name in ("cancel", "close"):
        if callable(stop := getattr(value, name, None)):
            stop()
            return
