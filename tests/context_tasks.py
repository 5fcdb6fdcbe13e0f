"""Tasks that look whether they see a context variable of another run. `tests.tasks` imports them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextvars import ContextVar
from typing import Any

from asgiref.sync import sync_to_async

from django_asyncq import Batch, BatchItem, task
from django_asyncq.context import TaskContext
from django_asyncq.core import compat
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import run_ended, run_started, task_failed, task_state_changed

# Who has set it, by kind: the body, or a receiver.
tenant: ContextVar[str] = ContextVar("tenant", default="")
heard: ContextVar[str] = ContextVar("heard", default="")

NAP_SECONDS = 0.02


def look(own: str, where: str, variable: ContextVar[str] = tenant) -> None:
    """Write what is seen into the history, and set the variable to one's own name."""
    seen = variable.get()
    variable.set(own)
    line = json.dumps({"event": "seen", "where": where, "own": own, "seen": seen}) + "\n"
    descriptor = os.open(os.environ["ASYNCQ_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@task(takes_context=True)
def looks(context: TaskContext) -> None:
    """Look in a thread."""
    look(context.task_result.id, "def")
    time.sleep(NAP_SECONDS)


@task(takes_context=True)
async def looks_in_the_loop(context: TaskContext) -> None:
    """Look in the event loop, then in the thread of `sync_to_async`, which sees what the coroutine has set."""
    look(context.task_result.id, "async def")
    await sync_to_async(look)(context.task_result.id, "sync_to_async")
    await asyncio.sleep(NAP_SECONDS)


@task(takes_context=True)
def looks_in_what_it_returns(context: TaskContext) -> Any:
    """Return a coroutine, as a decorator of an `async def` may do."""
    return looks_in_the_loop.func(context)


@task(takes_context=True, isolated=True)
def looks_isolated(context: TaskContext) -> None:
    """Look in a process of its own."""
    look(context.task_result.id, "isolated")


def one_call(number: int) -> None:
    """Take what one call takes."""


@task(batch=Batch(size=3, within=0.05, call=one_call))
def looks_in_a_batch(items: list[BatchItem]) -> None:
    """Look once for all calls."""
    look(items[0].id, "batch")


@task(takes_context=True, timeout=0.1, max_attempts=1)
async def looks_for_too_long(context: TaskContext) -> None:
    """Look, and exceed the timeout."""
    look(context.task_result.id, "timeout")
    await asyncio.sleep(30)


@task(takes_context=True, soft_timeout=0.05, max_attempts=1)
async def looks_until_asked(context: TaskContext) -> None:
    """Look, and meet the soft timeout."""
    look(context.task_result.id, "soft timeout")
    await asyncio.sleep(30)


@task(takes_context=True)
async def looks_until_cancelled(context: TaskContext) -> None:
    """Look, and be cancelled."""
    look(context.task_result.id, "cancelled")
    await asyncio.sleep(30)


@task
def cancels(id: str) -> None:
    """Cancel a task once it runs."""
    while TaskRecord.objects.get(id=id).state == TaskState.QUEUED:
        time.sleep(NAP_SECONDS)
    looks_until_cancelled.get_result(id).cancel()


def _on_start(record: TaskRecord, **kwargs: Any) -> None:
    look(str(record.id), "run_started", heard)


def _on_end(record: TaskRecord, **kwargs: Any) -> None:
    look(str(record.id), "run_ended", heard)


def _on_result(task_result: Any, **kwargs: Any) -> None:
    look(task_result.id, "task_finished", heard)


def _on_failure(record: TaskRecord, **kwargs: Any) -> None:
    look(str(record.id), "task_failed", heard)


def _on_change(records: list[TaskRecord], **kwargs: Any) -> None:
    look(",".join(sorted(str(record.id) for record in records)), "task_state_changed", heard)


if os.environ.get("ASYNCQ_TEST_CONTEXTS"):
    run_started.connect(_on_start)
    run_ended.connect(_on_end)
    compat.task_finished.connect(_on_result)
    task_failed.connect(_on_failure)
    task_state_changed.connect(_on_change)
