"""Tasks that wait for each other."""

from __future__ import annotations

from typing import Any

from django_asyncq import Batch, BatchItem, Discard, task
from django_asyncq.context import TaskContext


@task
def load(number: int) -> int:
    """Return a number; a negative one is an error."""
    if number < 0:
        raise ValueError("no such number")
    return number


@task
def total(rows: list[int | None], factor: int = 1) -> int:
    """Return a sum, in which a value that is missing is 0."""
    return factor * sum(each or 0 for each in rows)


@task
def double(value: int | None) -> int:
    """Return twice a value; -1 where there is none."""
    return -1 if value is None else 2 * value


@task
def note(text: str = "") -> str:
    """Take nothing from others."""
    return text


@task
def discards() -> None:
    """Say that there is nothing to do."""
    raise Discard("it is gone")


@task
async def awaited(value: int) -> int:
    """Add one, in the event loop."""
    return value + 1


@task(takes_context=True)
def grows(context: TaskContext, count: int) -> int:
    """Enqueue some tasks while it runs, and one that waits for them."""
    parts = [load.enqueue(number) for number in range(count)]
    total.using(after={"rows": parts}).enqueue()
    return count


@task(atomic=True, takes_context=True)
def grows_atomically(context: TaskContext, *, fails: bool = False) -> str:
    """Enqueue a task behind itself, in the transaction of its success."""
    result: Any = context.task_result
    double.using(after={"value": load.enqueue(4)}).enqueue()
    note.using(after=[result]).enqueue("behind")
    if fails:
        raise ValueError("no")
    return "grown"


@task(gate="narrow", queue_limit=1)
def gated(number: int = 0) -> int:
    """Need a slot."""
    return number


@task(unique="{key}")
def keyed(key: str) -> str:
    """Be the only one of a key."""
    return key


@task(isolated=True)
def apart(value: int) -> int:
    """Add one, in a process of its own."""
    return value + 1


def one_row(row: int | None, key: str = "a") -> None:
    """What a call of `stored` takes."""


@task(batch=Batch(size=2, within=60, call=one_row))
def stored(items: list[BatchItem]) -> dict[str, Any]:
    """Take rows together; return for each what it got."""
    return {item.id: item.kwargs["row"] for item in items}


@task(batch=Batch(size=2, within=60, call=one_row))
def choosy(items: list[BatchItem]) -> dict[str, Any]:
    """Refuse the row 1."""
    return {item.id: ValueError("not this one") for item in items if item.kwargs["row"] == 1}
