"""Tasks that go on where they stopped. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import transaction

from django_asyncq import Batch, BatchItem, task
from django_asyncq.context import TaskContext

from .observed_tasks import wait_for


def note(path: str, number: int) -> None:
    """Append the number of a step to a file, which outlasts the process."""
    with Path(path).open("a") as file:
        file.write(f"{number}\n")


def run_steps(
    context: TaskContext, path: str, steps: int, every: int, pause_at: int = 0, go: str = "", *, fails: int = 0
) -> Any:
    """Do the steps that are left, with a checkpoint after so many; wait for the file before one of them.

    The first `fails` attempts fail there instead. Returns where the run went on.
    """
    begun_at = context.checkpointed or 0
    for number in range(begun_at + 1, steps + 1):
        if number == pause_at:
            if context.attempt <= fails:
                raise OSError("not yet")
            wait_for(go)
        note(path, number)
        if number % every == 0:
            context.checkpoint(number)
    return begun_at


@task(takes_context=True, max_attempts=2, backoff=0)
def imports(context: TaskContext, *args: Any, **kwargs: Any) -> Any:
    """Run the steps in a thread."""
    return run_steps(context, *args, **kwargs)


@task(takes_context=True, max_attempts=2, backoff=0, isolated=True)
def imports_isolated(context: TaskContext, *args: Any, **kwargs: Any) -> Any:
    """Run the steps in a process."""
    return run_steps(context, *args, **kwargs)


@task(takes_context=True, max_attempts=2, backoff=0)
async def aimports(context: TaskContext, path: str, steps: int, every: int, pause_at: int = 0, go: str = "") -> Any:
    """Run the steps in a coroutine."""
    begun_at = context.checkpointed or 0
    for number in range(begun_at + 1, steps + 1):
        if number == pause_at:
            await sync_to_async(wait_for)(go)
        note(path, number)
        if number % every == 0:
            await context.acheckpoint(number)
    return begun_at


@task(takes_context=True, max_attempts=2, backoff=0)
def imports_in_transactions(context: TaskContext, steps: int, pause_at: int = 0, go: str = "") -> Any:
    """Commit each step, a row, together with its checkpoint; wait for the file within one of these transactions."""
    begun_at = context.checkpointed or 0
    for number in range(begun_at + 1, steps + 1):
        with transaction.atomic():
            Group.objects.create(name=f"step {number}")
            context.checkpoint(number)
            if number == pause_at:
                wait_for(go)
    return begun_at


@task(takes_context=True, max_attempts=3, backoff=0)
def keeps(context: TaskContext, how: str) -> Any:
    """Keep a checkpoint in one of several ways. Returns what the run began with."""
    begun_with = context.checkpointed
    if begun_with is None:
        context.checkpoint({"step": 1})
    if how == "fails":
        raise OSError("no")
    if how == "fails once" and context.attempt == 1:
        raise OSError("not yet")
    if how == "rolled back" and context.attempt == 1:
        with transaction.atomic():
            context.checkpoint({"step": 2})
            raise OSError("rolled back")
    if how == "rolled back with its completion" and context.attempt == 1:
        with context.complete_on_commit():
            context.checkpoint({"step": 2})
            raise OSError("rolled back")
    if how == "goes on after a completion that was rolled back" and context.attempt == 1:
        try:
            with context.complete_on_commit():
                raise OSError("rolled back")
        except OSError:
            context.checkpoint({"step": 3})
        raise OSError("not yet")
    if how == "completed":
        with context.complete_on_commit(begun_with):
            context.checkpoint({"step": 2})
        context.checkpoint({"step": 3})
    if how == "forgotten" and context.attempt == 1:
        context.checkpoint(None)
        raise OSError("not yet")
    if how == "falsy" and context.attempt == 1:
        context.checkpoint(0)
        raise OSError("not yet")
    return begun_with


@task(takes_context=True, max_attempts=2, backoff=0, atomic=True)
def keeps_in_transaction(context: TaskContext) -> Any:
    """Keep a checkpoint in the transaction of an atomic task, whose first attempt fails."""
    begun_with = context.checkpointed
    context.checkpoint("within")
    if context.attempt == 1:
        raise OSError("not yet")
    return begun_with


@task(takes_context=True)
async def keeps_in_the_event_loop(context: TaskContext) -> None:
    """Call in a coroutine what is for threads."""
    context.checkpoint(1)


@task(takes_context=True, batch=Batch(size=2, within=60))
def keeps_in_batch(context: TaskContext, calls: list[BatchItem]) -> dict[str, Any]:
    """Keep a checkpoint of a batch."""
    begun_with = context.checkpointed
    context.checkpoint(len(calls))
    return {call.id: begun_with for call in calls}
