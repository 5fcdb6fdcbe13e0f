"""Checked by mypy, not run: what the types of tasks promise. An ignore that is not needed fails the check."""

from __future__ import annotations

from typing import assert_type

from django_asyncq import TaskContext, task
from django_asyncq.tasks import Arguments, Task


@task
def plain(number: int, *, text: str = "") -> float:
    """A task with typed arguments."""
    return number + len(text)


@task(takes_context=True, gate="{number}", queue_limit=3, max_attempts=2, timeout=1.5)
def with_context(context: TaskContext, number: int) -> str:
    """The context is not among the arguments of a call."""
    return str(number + context.attempt)


def calls() -> None:
    """Right and wrong calls."""
    assert_type(plain.arguments(1, text="x"), Arguments)
    plain.enqueue(1, text="x")
    plain.enqueue("1")  # type: ignore[arg-type]
    plain.enqueue(1, test="x")  # type: ignore[call-arg]
    with_context.enqueue(1)
    with_context.enqueue(TaskContext, 1)  # type: ignore[call-arg,arg-type]
    changed: Task[[int], str] = with_context.using(priority=3, gate="other")
    changed.enqueue("1")  # type: ignore[arg-type]
    with_context.using(prio=3)  # type: ignore[call-arg]
