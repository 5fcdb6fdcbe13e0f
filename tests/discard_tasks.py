"""Tasks that discard themselves. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import os
import sys
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import Group

from django_asyncq import Batch, BatchItem, Discard, task
from django_asyncq.context import TaskContext

TEXT = "the order was deleted"


class Gone(Exception):
    """What the tasks look for is not there."""


def discard(how: str) -> None:
    """Discard the task, or fail."""
    if how == "discard":
        raise Discard(TEXT)
    if how == "missing":
        Group.objects.get(name="no such group")
    if how == "gone":
        raise Gone("gone")
    if how == "failure":
        raise LookupError("of its own")


MISSING = (Group.DoesNotExist, Gone)


@task(max_attempts=3, backoff=0, on_missing=MISSING)
def plain(how: str) -> None:
    """Discard itself in a thread."""
    Group.objects.create(name=uuid4().hex)
    discard(how)


@task(max_attempts=3, backoff=0, on_missing=MISSING)
async def in_the_loop(how: str) -> None:
    """Discard itself in the event loop."""
    await Group.objects.acreate(name=uuid4().hex)
    if how == "missing":
        await Group.objects.aget(name="no such group")
    discard(how)


@task(max_attempts=3, backoff=0, on_missing=MISSING, atomic=True)
def atomic(how: str) -> None:
    """Discard itself in its transaction."""
    Group.objects.create(name=uuid4().hex)
    discard(how)


@task(max_attempts=3, backoff=0, on_missing=MISSING, isolated=True)
def isolated(how: str) -> None:
    """Discard itself in a process of its own."""
    Group.objects.create(name=uuid4().hex)
    discard(how)


@task(max_attempts=3, backoff=0, on_missing=MISSING, takes_context=True)
def in_a_block(context: TaskContext, how: str) -> None:
    """Discard itself in the block that completes it."""
    with context.complete_on_commit():
        Group.objects.create(name=uuid4().hex)
        discard(how)


@task(batch=Batch(size=3, within=0.05), max_attempts=3, backoff=0, on_missing=Gone)
def batched(items: list[BatchItem]) -> Any:
    """Discard the calls that say so; all of them with the word "all"."""
    if any(item.args == ["all"] for item in items):
        raise Discard(TEXT)
    found: dict[str, Any] = {}
    for item in items:
        try:
            discard(item.args[0])
        except Exception as error:  # noqa: BLE001 - it is the outcome of this call
            found[item.id] = error
    return found


if os.environ.get("ASYNCQ_TEST_DISCARDS"):
    from django_asyncq.signals import task_failed

    def _say(record: Any, **kwargs: Any) -> None:
        sys.stderr.write(f"task_failed was sent for {record.id}\n")

    task_failed.connect(_say)
