"""Context managers of ASYNCQ["AROUND"] for tests, and tasks within them. `tests.tasks` imports it, for workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from django.db import connection

from django_asyncq import task
from django_asyncq.context import TaskContext, current_task

# What the managers of a run have seen, which its body returns.
seen: ContextVar[list[Any] | None] = ContextVar("seen", default=None)


def place() -> list[Any]:
    """Say where the caller runs: in which thread, and whether in a coroutine and in a transaction."""
    try:
        is_coroutine = asyncio.current_task() is not None
    except RuntimeError:
        is_coroutine = False
    return [threading.get_ident(), is_coroutine, not is_coroutine and connection.in_atomic_block]


@contextmanager
def outer(context: TaskContext) -> Iterator[None]:
    """Begin the list; note the task."""
    current = current_task()
    token = seen.set(
        ["outer", context.record.name, current is not None and current.task == context.record.name, place()]
    )
    yield
    seen.reset(token)


@contextmanager
def inner(context: TaskContext) -> Iterator[None]:
    """Add to the list."""
    (seen.get() or []).append(f"inner {context.headers.get('tenant')}")
    yield


@asynccontextmanager
async def asynchronous(context: TaskContext) -> AsyncIterator[None]:
    """Await, and add to the list."""
    await asyncio.sleep(0)
    (seen.get() or []).append("asynchronous")
    yield


def swallows(context: TaskContext) -> AbstractContextManager[None]:
    """Swallow what the body raises."""
    return suppress(ValueError)


def fails(context: TaskContext) -> Any:
    """Raise."""
    raise LookupError("no such tenant")


def returns_none(context: TaskContext) -> None:
    """Return nothing that could be entered."""


@task
def body(fails: bool = False) -> list[Any]:
    """Return what was seen, and where this is."""
    if fails:
        raise ValueError("no")
    return [*(seen.get() or []), place()]


@task
async def abody(seconds: float = 0.0) -> list[Any]:
    """Return it from the event loop."""
    await asyncio.sleep(seconds)
    return [*(seen.get() or []), place()]


@task(atomic=True)
def atomic_body() -> list[Any]:
    """Return it from a transaction."""
    return [*(seen.get() or []), place()]


@task(isolated=True)
async def isolated_abody() -> list[Any]:
    """Return it from the event loop of a process of its own."""
    return [*(seen.get() or []), place()]
