"""Tasks whose attempts and children belong to one trace."""

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry import trace

from django_asyncq import task
from django_asyncq.context import TaskContext


@task(queue_name="mail")
async def child(seconds: float = 0.0) -> str:
    """Run in the event loop; return the id of the span that it runs in."""
    await asyncio.sleep(seconds)
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


@task(takes_context=True, max_attempts=2, backoff=0)
def parent(context: TaskContext) -> None:
    """Fail once, then enqueue a child."""
    if context.attempt == 1:
        raise LookupError("not yet")
    child.enqueue()


@task(sensitive="iban")
def pays(iban: str, amount: int) -> None:
    """Fail with its secret in the text."""
    raise ValueError(f"no account {iban}, password=hunter22")


def source(task: Any) -> dict[str, str]:
    """Give a header that names the task."""
    return {"x-task": task.module_path}


def no_source(task: Any) -> Any:
    """Give what is no headers."""
    return {"x": 5}


def failing_source(task: Any) -> Any:
    """Fail."""
    raise OSError("the tracer is away")
