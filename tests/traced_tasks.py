"""Tasks whose attempts and children belong to one trace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
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


@task(takes_context=True)
def dies_once(context: TaskContext) -> None:
    """Take its process along in its first run."""
    if len(context.task_result.worker_ids) == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)


@task(sensitive="iban", gate="account:{iban}", queue_limit=1)
def books(iban: str) -> None:
    """Wait at a gate whose name has its secret."""


@task(unique=True)
def only_once() -> None:
    """Be unique."""
