"""A task has succeeded when its whole body has run: what it returns is awaited, or the task fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import lifecycle, task
from django_asyncq.broker import Lease
from django_asyncq.core import compat
from django_asyncq.exceptions import InvalidOption, TaskNotRunnable, TaskTimeout
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.results import StoredTask
from django_asyncq.worker import call
from django_asyncq.worker.job import Job

from .. import tasks
from ..workers import history, run_workers

RAN: list[str] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    """What ran before."""
    RAN.clear()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in its own thread, as in a worker process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def job_of(function: Callable[..., Any], timeout: float | None = None, *, atomic: bool = False) -> Job:
    """A job that has begun."""
    declared = StoredTask(
        func=function, priority=0, backend="default", queue_name="default", run_after=None, atomic=atomic
    )
    record = TaskRecord(name="tests.worker.test_calling.shape", timeout_seconds=timeout)
    job = Job(lifecycle.Run(record, Lease(str(record.id), 1)), declared, time.monotonic())
    job.note_begin(timezone.now())
    return job


# --- the shapes


async def body() -> str:
    """Run, later."""
    await asyncio.sleep(0)
    RAN.append("body")
    return "value"


def plain_body() -> str:
    """Run at once."""
    RAN.append("body")
    return "value"


def yields() -> Iterator[int]:
    """Run only when somebody asks for the first number."""
    RAN.append("body")
    yield 1


async def yields_async() -> AsyncIterator[int]:
    """The same for async code."""
    RAN.append("body")
    yield 1


class CallableTask:
    """An object that is called."""

    async def __call__(self) -> str:
        """Run, later."""
        return await body()


class Awaitable:
    """An object that is awaited, and is no coroutine."""

    def __await__(self) -> Any:
        """Run, later."""
        return body().__await__()


async def returns_coroutine() -> Any:
    """Return what would have to be awaited once more."""
    return body()


async def returns_task() -> Any:
    """Return an asyncio task that has not finished."""
    return asyncio.ensure_future(asyncio.sleep(60))


async def returns_generator() -> Any:
    """Return a generator."""
    return yields()


def in_a_pool() -> concurrent.futures.Future[str]:
    """Return the future of a thread pool."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(plain_body)
    pool.shutdown(wait=False)
    return future


def returns_future_of_another_loop() -> Any:
    """Return a future that this process's event loop cannot await."""
    other = asyncio.new_event_loop()
    other.close()
    return other.create_future()


RUNS = {
    "plain function": plain_body,
    "decorator over async": tasks.passes_on(body),
    "two decorators over async": tasks.passes_on(tasks.passes_on(body)),
    "partial of async": functools.partial(body),
    "function that returns a partial's coroutine": lambda: functools.partial(body)(),
    "callable object": CallableTask(),
    "function that returns an awaitable object": Awaitable,
    "future of a thread pool": in_a_pool,
}
FAILS = {
    "generator function": (yields, "the generator yields,.*loop over it"),
    "decorator over a generator": (tasks.passes_on(yields), "loop over it"),
    "partial of a generator": (functools.partial(yields), "loop over it"),
    "generator expression": (lambda: (number for number in [1]), "loop over it"),
    "async generator function": (yields_async, "the async generator yields_async,.*loop over it"),
    "decorator over an async generator": (tasks.passes_on(yields_async), "loop over it"),
    "coroutine that returns a coroutine": (tasks.passes_on(returns_coroutine), "the coroutine body, .*await it"),
    "coroutine that returns a task": (tasks.passes_on(returns_task), "await it"),
    "coroutine that returns a generator": (tasks.passes_on(returns_generator), "loop over it"),
}
NEEDS_AWAITING = [name for name in RUNS if name != "plain function"]


@pytest.mark.parametrize("shape", RUNS)
def test_body_has_run_when_the_call_returns(shape: str, loop: asyncio.AbstractEventLoop) -> None:
    """Whatever shape the function has, its value is that of its body."""
    assert call.call(job_of(RUNS[shape]), [], {}, partial(call.await_in_loop, loop=loop)) == "value"
    assert RAN == ["body"]


@pytest.mark.parametrize("shape", FAILS)
def test_body_that_nobody_runs_fails_the_task(shape: str, loop: asyncio.AbstractEventLoop) -> None:
    """The error names what was returned, and the remedy; nothing runs later."""
    function, message = FAILS[shape]
    with pytest.raises(TaskNotRunnable, match=message):
        call.call(job_of(function), [], {}, partial(call.await_in_loop, loop=loop))
    assert RAN == []


@pytest.mark.parametrize("function", [returns_coroutine, returns_task, returns_generator])
def test_async_task_that_returns_what_nobody_runs_fails(function: Any) -> None:
    """Also an `async def` over a plain function that returns a coroutine."""
    with pytest.raises(TaskNotRunnable, match="which nobody runs"):
        asyncio.run(call.acall(job_of(function), [], {}))
    assert RAN == []


def test_future_of_another_loop_fails_the_task(loop: asyncio.AbstractEventLoop) -> None:
    """It could never be awaited here."""
    with pytest.raises(RuntimeError, match="different loop"):
        call.call(job_of(returns_future_of_another_loop), [], {}, partial(call.await_in_loop, loop=loop))


@pytest.mark.parametrize("shape", NEEDS_AWAITING)
def test_atomic_task_cannot_be_awaited(shape: str) -> None:
    """Its transaction belongs to the thread; the error names the remedy."""
    with pytest.raises(TaskNotRunnable, match="async_to_sync"):
        call.call(job_of(RUNS[shape], atomic=True), [], {}, call.refuse_awaitable)


@pytest.mark.parametrize("function", [yields, yields_async])
def test_atomic_generator_fails(function: Any) -> None:
    """As without a transaction."""
    with pytest.raises(TaskNotRunnable, match="loop over it"):
        call.call(job_of(function, atomic=True), [], {}, call.refuse_awaitable)
    assert call.call(job_of(plain_body, atomic=True), [], {}, call.refuse_awaitable) == "value"


def test_awaited_part_has_the_rest_of_the_timeout(loop: asyncio.AbstractEventLoop) -> None:
    """What the function used up before is gone, and the coroutine is cancelled."""
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    job = job_of(tasks.passes_on(waits), timeout=3600)
    assert job.begun_at is not None
    job.begun_at -= 3600
    job.overdue_at -= 3600
    with pytest.raises(TaskTimeout):
        call.call(job, [], {}, partial(call.await_in_loop, loop=loop))
    assert cancelled.is_set()


@pytest.mark.parametrize("error", [ValueError, TimeoutError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_error_of_the_awaited_part_is_the_tasks(error: type[BaseException], loop: asyncio.AbstractEventLoop) -> None:
    """It comes out of the call, and the event loop goes on."""

    async def fails() -> None:
        raise error("from the coroutine")

    with pytest.raises(error, match="from the coroutine"):
        call.call(job_of(tasks.passes_on(fails), timeout=60), [], {}, partial(call.await_in_loop, loop=loop))
    assert call.call(job_of(tasks.passes_on(body)), [], {}, partial(call.await_in_loop, loop=loop)) == "value"


@pytest.mark.parametrize("function", [yields, yields_async])
def test_function_with_yield_cannot_be_declared(function: Any) -> None:
    """The declaration is refused, with the reason."""
    with pytest.raises(InvalidOption, match=r"`yield`.*collect the values"):
        task(function)


@pytest.mark.parametrize("function", [functools.partial(plain_body), CallableTask()])
def test_what_is_no_function_cannot_be_declared(function: Any) -> None:
    """The framework refuses it."""
    with pytest.raises((compat.InvalidTask, AttributeError)):
        task(function)


# --- in a worker


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@pytest.mark.django_db(transaction=True)
def test_worker_awaits_what_decorated_tasks_return(history_path: Path) -> None:
    """More of them than slots, with the database in a thread of their own; errors and timeouts as for any task."""
    good = [tasks.decorated_async.enqueue(0.05) for _ in range(6)]
    exits, overruns = tasks.decorated_exits.enqueue(), tasks.decorated_overruns.enqueue()
    atomic, generator = tasks.decorated_atomic.enqueue(), tasks.decorated_generator.enqueue()
    run_workers("--concurrency", "2")
    rows = {str(row.id): row for row in TaskRecord.objects.all()}
    assert {rows[result.id].return_value for result in good} == {10}
    assert [line["event"] for line in history(history_path)] == ["decorated_async"] * 6
    errors = {}
    for result in (exits, overruns, atomic, generator):
        row = rows[result.id]
        assert (row.state, row.attempt, len(row.errors)) == (TaskState.FAILED, 1, 1)
        errors[result.id] = row.errors[0]["exception"].rpartition(".")[2]
    assert errors == {
        exits.id: "SystemExit",
        overruns.id: "TaskTimeout",
        atomic.id: "TaskNotRunnable",
        generator.id: "TaskNotRunnable",
    }
