"""Tasks of the tests of the test kit. What a body does is a function that the test puts into BODIES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async

from django_asyncq import task
from django_asyncq.context import TaskContext

BODIES: dict[str, Callable[..., Any]] = {}


class Fatal(Exception):
    """Given up on."""


@task(takes_context=True, max_attempts=3, backoff=60, give_up_on=(Fatal,))
def run(context: TaskContext, name: str, *args: Any) -> Any:
    """Run a body."""
    return BODIES[name](context, *args)


@task(takes_context=True)
async def arun(context: TaskContext, name: str, *args: Any) -> Any:
    """Run a body that uses the ORM."""
    return await sync_to_async(BODIES[name])(context, *args)


@task(takes_context=True, atomic=True)
def run_atomic(context: TaskContext, name: str, *args: Any) -> Any:
    """Run a body in the transaction that completes it."""
    return BODIES[name](context, *args)


@task(takes_context=True, gate="kit", queue_limit=2)
def gated(context: TaskContext, name: str = "", *args: Any) -> Any:
    """Run a body behind an admission limit."""
    return BODIES[name](context, *args) if name else None


@task
def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


@task
def generator() -> Any:
    """Return what nobody runs."""
    return (number for number in [1])


@task
def returns(kind: str) -> Any:
    """Return what JSON or the database cannot hold."""
    return {"set": {1}, "nul": "a\x00b", "huge": 2**70}[kind]
