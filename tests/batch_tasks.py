"""Tasks whose calls run together. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from django.contrib.auth.models import Group

from django_asyncq import Batch, BatchItem, task
from django_asyncq.context import TaskContext


class Glitch(Exception):
    """A failure that may pass."""


# What the next batches of `collect` return or raise, and what they got; for batches that run in the test's process.
ANSWERS: list[Any] = []
SEEN: list[list[BatchItem]] = []


def note(items: list[BatchItem]) -> None:
    """Write one line, whole, into the history."""
    if path := os.environ.get("ASYNCQ_TEST_HISTORY"):
        line = json.dumps({"pid": os.getpid(), "kwargs": [item.kwargs for item in items]}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def answer(items: list[BatchItem]) -> Any:
    """Do what the test has said."""
    SEEN.append(items)
    note(items)
    found = ANSWERS.pop(0) if ANSWERS else None
    if callable(found):
        found = found(items)
    if isinstance(found, BaseException):
        raise found
    return found


def one_call(number: int = 0, account: str = "") -> None:
    """Take what one call takes."""


@task(batch=Batch(size=3, within=60, call=one_call), max_attempts=2, backoff=60)
def collect(items: list[BatchItem]) -> Any:
    """Run calls together."""
    return answer(items)


@task(batch=Batch(size=100, within=0.2, quiet=0.05, per="{account}", call=one_call))
def per_account(items: list[BatchItem]) -> Any:
    """Run the calls of one account together."""
    return answer(items)


@task(batch=Batch(size=2, within=60), takes_context=True)
def with_context(context: TaskContext, items: list[BatchItem]) -> Any:
    """Return the attempt of the batch."""
    return {item.id: [context.attempt, item.attempt] for item in items}


@task(batch=Batch(size=2, within=60), atomic=True)
def atomic(items: list[BatchItem]) -> Any:
    """Write a group for each call, in the transaction that completes the batch."""
    for item in items:
        Group.objects.create(name=f"batch {item.kwargs['name']}")
    return answer(items)


@task(batch=Batch(size=2, within=60))
async def coroutine(items: list[BatchItem]) -> Any:
    """Return a value for each call."""
    return {item.id: item.kwargs["number"] * 2 for item in items}


@task(batch=Batch(size=2, within=60, call=one_call), gate="batched", queue_limit=2)
def gated(items: list[BatchItem]) -> Any:
    """Run behind an admission limit."""
    return answer(items)


@task(batch=Batch(size=2, within=60, call=one_call), unique="{number}")
def unique(items: list[BatchItem]) -> Any:
    """Run each number once at a time."""
    return answer(items)


@task(batch=Batch(size=25, within=0.3), max_attempts=2)
def poisoned(items: list[BatchItem]) -> None:
    """Kill the worker process if a call says so; else take a moment."""
    note(items)
    for item in items:
        if item.kwargs.get("poison"):
            os.kill(os.getpid(), signal.SIGKILL)
    if (path := os.environ.get("ASYNCQ_TEST_SLOW")) and Path(path).exists():
        time.sleep(0.3)


@task(batch=Batch(size=2, within=60))
def noted(items: list[BatchItem]) -> None:
    """Write each call into the history, as `tests.tasks` does."""
    from . import tasks

    for item in items:
        tasks.note("begin", id=item.id, attempt=item.attempt)
