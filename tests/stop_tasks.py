"""Tasks that are asked to stop. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import asyncio
import json
import os
import time

from django.contrib.auth.models import Group

from django_asyncq import task
from django_asyncq.context import TaskContext
from django_asyncq.exceptions import SoftTimeout

SECONDS = 60


def wait_and_check(context: TaskContext) -> None:
    """Wait as a long loop does, for longer than any test."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        context.check()
        time.sleep(0.01)


@task(takes_context=True, max_attempts=3, backoff=0)
def checks(context: TaskContext, then: str = "") -> str:
    """Stop when asked: with the error that says so, with another one, with a value, or with a retry."""
    try:
        wait_and_check(context)
    except Exception:
        if then == "raises":
            raise ValueError("while it cleaned up") from None
        if then == "retries":
            context.retry(in_=0, counted=False)
        if then == "returns":
            return "all the same"
        raise
    return "never asked"


@task(timeout=0.3)
def returns_late() -> str:
    """Return long after the timeout, from where the time was spent."""

    def crunches() -> None:
        time.sleep(2)

    crunches()
    return "late"


@task(max_attempts=3, backoff=0)
async def awaits() -> None:
    """Wait in the event loop."""
    await asyncio.sleep(SECONDS)


@task(max_attempts=3, backoff=0)
async def swallows() -> None:
    """Ignore every cancellation."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            continue


@task(max_attempts=3, backoff=0)
def ignores() -> None:
    """Never look at what it is asked."""
    time.sleep(SECONDS)


@task(takes_context=True, atomic=True, max_attempts=3, backoff=0)
def atomic(context: TaskContext, name: str) -> None:
    """Write something, and wait."""
    Group.objects.create(name=name)
    wait_and_check(context)


@task(takes_context=True, max_attempts=1, soft_timeout=0.2, timeout=30)
def finishes_early(context: TaskContext) -> str:
    """Finish at the soft timeout."""
    try:
        wait_and_check(context)
    except SoftTimeout:
        context.check()
        return f"early: {context.should_stop}"
    return "late"


@task(max_attempts=1, soft_timeout=0.2, timeout=30)
async def finishes_early_async() -> str:
    """Finish at the soft timeout."""
    try:
        await asyncio.sleep(SECONDS)
    except SoftTimeout:
        await asyncio.sleep(0.01)
        return "early"
    return "late"


@task(takes_context=True)
async def notes_its_stop(context: TaskContext) -> None:
    """Append its id and the time to the history when it is cancelled."""
    try:
        await asyncio.sleep(SECONDS)
    finally:
        line = json.dumps({"id": context.task_result.id, "at": time.monotonic()}) + "\n"
        descriptor = os.open(os.environ["ASYNCQ_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
