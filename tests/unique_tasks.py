"""Unique tasks of the tests, one for each way to say what two calls have in common, and until when."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async

from django_asyncq import task
from django_asyncq.context import TaskContext


@task(unique="{user_id}")
def report(user_id: Any, day: str = "today", *, fmt: str = "pdf") -> str:
    """Unique for each user, whatever else it is called with."""
    return f"{user_id} {day} {fmt}"


@task(unique=True)
def import_file(path: Any, size: int = 100, *, marker: object = None, **more: Any) -> Any:
    """Unique by all its arguments."""
    return path


@task(unique=True, takes_context=True)
def with_context(context: TaskContext, path: str) -> str:
    """The context is no argument of the call."""
    return path


def _loud(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(volume: int, *args: Any) -> Any:
        return function(*args)

    return wrapper


@task(unique=True)
@_loud
def decorated(path: str) -> str:
    """Its decorator takes one argument more."""
    return path


@task(unique=lambda user, **more: user["id"])
def of_callable(user: dict[str, Any], **more: Any) -> None:
    """Unique by what a function says."""


@task(unique="{user_id}", unique_until="start", max_attempts=2, backoff=0)
def until_start(user_id: int, fails: int = 0) -> None:
    """Another may be enqueued as soon as this one has begun."""
    if fails:
        raise ValueError(user_id)


@task(unique="{user_id}", unique_until=timedelta(minutes=10))
def throttled(user_id: int) -> None:
    """At most one every ten minutes."""


@task(unique="{user_id}", on_duplicate="return")
def shared(user_id: int) -> int:
    """A second call gets the task that is there."""
    return user_id


@task(unique="{user_id}", on_duplicate="replace")
def newest(user_id: int, what: str = "") -> str:
    """A second call gives its arguments to the one that waits."""
    return what


@task(unique="{user_id}", max_attempts=2, backoff=60)
def fails(user_id: int) -> None:
    """Fails at once, and is retried a minute later."""
    raise ValueError(user_id)


@task(unique="{user_id}", gate="clicks", queue_limit=20)
def clicked(user_id: int) -> None:
    """Unique, and through a gate of 20."""


def seen(context: TaskContext) -> list[Any]:
    """What a body finds in its own row."""
    from django_asyncq.models import TaskRecord

    row = TaskRecord.objects.get(id=context.task_result.id)
    return [row.state, row.unique_slot is None]


@task(unique="{user_id}", unique_until="start", takes_context=True)
def chained(context: TaskContext, user_id: int, left: int) -> list[Any]:
    """Enqueue the next call with its own key."""
    if left:
        chained.enqueue(user_id, left - 1)
    return seen(context)


@task(unique="{user_id}", unique_until="start", takes_context=True)
async def chained_async(context: TaskContext, user_id: int, left: int) -> list[Any]:
    """Enqueue the next call with its own key."""
    if left:
        await chained_async.aenqueue(user_id, left - 1)
    found: list[Any] = await sync_to_async(seen)(context)
    return found


@task(unique="{user_id}", unique_until="start", takes_context=True, atomic=True)
def chained_atomic(context: TaskContext, user_id: int, left: int) -> list[Any]:
    """Enqueue the next call with its own key."""
    if left:
        chained_atomic.enqueue(user_id, left - 1)
    return seen(context)


@task(unique="{user_id}", takes_context=True)
def looks(context: TaskContext, user_id: int) -> list[Any]:
    """Look at its own row."""
    return seen(context)


@task(unique="{key}")
def echo(key: int, number: int) -> list[int]:
    """Return the arguments, so that its row shows what the body got."""
    time.sleep(0.01)
    return [key, number]
