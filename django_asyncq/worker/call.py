"""Call a task's function so that its whole body has run when the call returns.

A `def` may return an awaitable, for instance when a decorator wraps an `async def`; calling it runs nothing of the
body. A slot's thread hands such an awaitable to the event loop and waits for it. Generators are never run, so a task
that returns one has failed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from types import NoneType
from typing import Any, NoReturn

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from .. import lifecycle
from ..core.typed import readable_call
from ..exceptions import SoftTimeout, TaskNotRunnable
from ..models import TaskRecord
from ..storage import database_clock
from . import forks
from .instances import called_with_instances
from .job import Job

# --- What this package uses of asgiref beyond its documented API, in one place. Nothing else here touches it.


def has_thread(context: ThreadSensitiveContext) -> bool:
    """Whether a context has a thread, so database connections to close; can go when asgiref has a public way to ask.

    Asking a context that has none would start a thread for each coroutine.
    """
    return context in SyncToAsync.context_to_thread_executor


# --- Interrupt a function that awaits: when its task is cancelled, and when its soft timeout has passed.
#
# A cancelled task's coroutine is cancelled, as asyncio does it. A soft timeout is raised at the `await` at which
# the function waits, so that the function can catch it and finish. There it also counts as asyncio's
# CancelledError: then what the function awaits, such as a TaskGroup or `asyncio.timeout`, cleans up as it does when
# it is cancelled.


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
            loop.call_soon_threadsafe(cancel, context=contextvars.Context())

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

        seconds = max(self._job.soft_seconds_left or 0.0, 0.0)
        timer = loop.call_later(seconds, interrupt, context=contextvars.Context())
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


# What most tasks return; it needs no closer look.
FINISHED = frozenset({NoneType, bool, int, float, str, list, dict, tuple})


Awaiting = Callable[[Job, Any], tuple[Any, BaseException | None]]


def arguments_of_row(job: Job, record: TaskRecord) -> tuple[list[Any], dict[str, Any], str | None]:
    """Return the arguments of one call, from its message if another program has written that.

    The last is the type that such a program has written. Arguments of an older version are upgraded.
    Raises: TaskNotRunnable, UpgradeFailed.
    """
    if type(record.args) is not list or type(record.kwargs) is not dict:
        raise TaskNotRunnable("the row's arguments are not a list and an object")
    if record.wire_id is not None and (found := lifecycle.wire_call_of(record, job.task)) is not None:
        return list(found.args), dict(found.kwargs), found.type
    if record.version < job.task.version and job.task.upgrade is not None:
        lifecycle.upgrade(record, job.task)
    if record.has_typed_arguments:
        job.has_typed_arguments = True
        return *readable_call(record.args, record.kwargs), None
    return list(record.args), dict(record.kwargs), None


def call(job: Job, args: list[Any], kwargs: dict[str, Any], await_value: Awaiting) -> Any:
    """Call the function of a `def` task; await what it returns, where that is to be awaited.

    await_value: does that; returns the value or the error.
    Raises: TaskExpired; TaskNotRunnable when a part of the body did not run; what the function raises.
    """
    # Here, because it has waited since it was claimed: for its slot, its connection, its mark, its transaction.
    if job.run.record.expires_at is not None or job.run.members:
        refuse_late(job, args)
    try:
        value = called_with_instances(job, args, kwargs) if job.has_typed_arguments else job.task.func(*args, **kwargs)
    finally:
        if forks.is_forked:
            forks.exit_forked()
    if type(value) in FINISHED:
        return value
    if not _is_awaitable(value):
        return _finished(value)
    value, exception = await_value(job, value)
    if exception is not None:
        raise exception
    return value


# --- Who awaits what the function of a `def` task has returned.


def await_in_loop(job: Job, value: Any, loop: asyncio.AbstractEventLoop) -> tuple[Any, BaseException | None]:
    """Await it in the event loop of a worker process."""
    return asyncio.run_coroutine_threadsafe(_await_in_loop(job, value), loop).result()


def await_here(job: Job, value: Any) -> tuple[Any, BaseException | None]:
    """Await it in a thread without an event loop beside it, as a test has it.

    Synchronous code that is awaited, such as the ORM's, runs in the calling thread, with its database connections.
    """
    found: tuple[Any, BaseException | None] = async_to_sync(_await_here)(job, value)
    return found


def await_in_own_loop(job: Job, value: Any) -> tuple[Any, BaseException | None]:
    """Await it in an event loop of its own, in the main thread of a process that runs one task."""
    return asyncio.run(_await_in_loop(job, value))


def refuse_awaitable(job: Job, value: Any) -> NoReturn:
    """Refuse it in a task that is atomic: its transaction belongs to this thread. Raises: TaskNotRunnable."""
    _discard(value)
    raise TaskNotRunnable(
        f"an atomic task returned {_described(value)}, which cannot be awaited in its transaction; nothing was "
        f"committed: call async code with asgiref's async_to_sync, or await it before complete_on_commit()"
    )


async def acall(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Await the function of an `async def` task.

    Raises: TaskTimeout, TaskCancelled, TaskExpired, TaskNotRunnable when a part of the body did not run; what the
    function raises.
    """
    if job.run.record.expires_at is not None or job.run.members:
        refuse_late(job, args)
    called = called_with_instances(job, args, kwargs) if job.has_typed_arguments else job.task.func(*args, **kwargs)
    return await await_body(job, called)


def refuse_late(job: Job, args: list[Any]) -> None:
    """Refuse a call that may begin no more, by the best clock that this process has. Raises: TaskExpired.

    Of a batch, the members that may begin no more are skipped; the reconciler closes them. args: what its function is
    called with, if that is known already: the list of the calls is the last.
    """
    now = database_clock.estimate()
    if lifecycle.is_expired(job.run.record, now):
        raise lifecycle.expired()
    late = {str(each.record.id) for each in job.run.members if lifecycle.is_expired(each.record, now)}
    if not late:
        return
    job.run.members = [each for each in job.run.members if str(each.record.id) not in late]
    if not job.run.members:
        raise lifecycle.expired()
    if args:
        args[-1][:] = [item for item in args[-1] if item.id not in late]


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
        return await await_body(job, awaitable), None
    except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
        return None, error


async def await_body(job: Job, awaitable: Any) -> Any:
    """Await, and interrupt as the job says; the value must not be something that is still to be run."""
    is_awaited = False
    try:
        async with asyncio.timeout(job.seconds_left) as scope:
            with interruptible(job):
                is_awaited = True
                try:
                    value = await (awaitable if job.soft_seconds_left is None else WithSoftTimeout(job, awaitable))
                finally:
                    if forks.is_forked:
                        forks.exit_forked()
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


# --- Tidies the database connections of a thread after a task, as Django does after a request.

# The run that a thread works for; asgiref and asyncio take it along to other threads.
_job: ContextVar[Job | None] = ContextVar("job", default=None)


def begin_connections(job: Job) -> None:
    """Have `job.was_connected` say whether its run has, or ever had, a connection: it may have closed it itself."""
    _job.set(job)
    job.was_connected = bool([each for each in _of_thread.connections if each.connection is not None])


class _OfThread(threading.local):
    """The connections of a thread, read when it opens one: to ask Django costs a run ten calls for each."""

    def __init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Read them anew."""
        self.connections = connections.all(initialized_only=True)


_of_thread = _OfThread()


def _note_connection(**kwargs: Any) -> None:
    _of_thread.read()
    if (job := _job.get()) is not None:
        job.was_connected = True


connection_created.connect(_note_connection, dispatch_uid="django_asyncq.worker.connections")


def tidy_connections() -> None:
    """Undo what a task may have left in its thread: an open transaction, a connection that is unusable or too old.

    A pooled connection goes back to its pool, since Django allows none to be kept. What the task has activated, a
    language or a time zone, vanishes with its context.
    """
    for connection in _of_thread.connections:
        close_if_open_transaction(connection)
        connection.close_if_unusable_or_obsolete()


def close_if_open_transaction(connection: BaseDatabaseWrapper) -> None:
    """Close a connection with an open transaction: it is of a task that has finished; nothing may reach the next."""
    if connection.connection is not None and (connection.in_atomic_block or not connection.get_autocommit()):
        # Django does not close a connection within an atomic block; a new one resets the flag anyway.
        connection.in_atomic_block = False
        connection.close()
