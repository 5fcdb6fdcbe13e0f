"""Tasks with typed arguments, one for each way in which a function is called. `tests.tasks` imports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import Group
from django.db import connection

from django_asyncq import Batch, BatchItem, task
from django_asyncq.context import TaskContext

GONE = (Group.DoesNotExist,)


def described(value: Any) -> Any:
    """Return what says of a value what it is: its class and its text, of a group its name."""
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return f"Group {value.name}" if isinstance(value, Group) else f"{type(value).__name__} {value}"


@task(typed_arguments=True, on_missing=GONE)
def plain(*args: Any, **kwargs: Any) -> Any:
    """Say what it got, in a thread."""
    return described([list(args), kwargs])


@task(typed_arguments=True, on_missing=GONE)
async def in_the_loop(*args: Any, **kwargs: Any) -> Any:
    """Say what it got, in the event loop."""
    return described([list(args), kwargs])


@task(typed_arguments=True, on_missing=GONE, atomic=True)
def atomic(*args: Any, **kwargs: Any) -> Any:
    """Say what it got, in its transaction."""
    assert connection.in_atomic_block
    return described([list(args), kwargs])


@task(typed_arguments=True, on_missing=GONE, isolated=True)
def isolated(*args: Any, **kwargs: Any) -> Any:
    """Say what it got, in a process of its own."""
    return described([list(args), kwargs])


@task(typed_arguments=True, on_missing=GONE, isolated=True)
async def isolated_coroutine(*args: Any, **kwargs: Any) -> Any:
    """Say what it got, in an event loop of its own process."""
    return described([list(args), kwargs])


@task(typed_arguments=True, takes_context=True)
def with_context(context: TaskContext, *args: Any, **kwargs: Any) -> Any:
    """Say what it got, and what the result shows."""
    return [described([list(args), kwargs]), repr(context.task_result.args)]


@task(typed_arguments=True)
def strict(*args: Any, **kwargs: Any) -> Any:
    """Fail for a row that is gone."""
    return described([list(args), kwargs])


@task(typed_arguments=True, batch=Batch(size=10, within=0.05), on_missing=GONE)
def batched(items: list[BatchItem]) -> Mapping[str, Any]:
    """Say what each call got."""
    return {item.id: described([item.args, item.kwargs]) for item in items}


@task
def untyped(*args: Any) -> Any:
    """Take what JSON has."""
    return described(list(args))
