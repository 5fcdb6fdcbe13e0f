"""The tasks of the chaos suite, and a witness that writes every reply of a fenced script into the history.

Each process of the suite imports this module, which also applies the mutant.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connection

from django_asyncq import task
from django_asyncq.broker import scripts
from django_asyncq.context import TaskContext
from django_asyncq.leadership import fencing
from tests.tasks import Glitch, note

from . import arming, mutants

# Scripts that acknowledge runs: the number of arguments before the items, and in each item.
ENDINGS = {"done": (3, 2), "retry": (5, 4), "archive": (5, 3)}

# The number of the last call of a key of `newest`.
NEWEST = 12


def begin(context: TaskContext, got: dict[str, Any], **more: Any) -> None:
    """Write into the history that a body begins, and the arguments that it got, by the names of its parameters."""
    note("begin", id=context.task_result.id, got=got, **more)


@task(takes_context=True)
def work(context: TaskContext, ms: float = 0.0, payload: str = "") -> None:
    """Sleep; write begin and end into the history."""
    begin(context, {"ms": ms, "payload": payload})
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, gate="{gate}", queue_limit=5, expected_seconds=1)
def gated(context: TaskContext, gate: str, ms: float = 0.0) -> None:
    """Do the same at a gate."""
    begin(context, {"gate": gate, "ms": ms})
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, gate="{gate}", queue_limit=5, expected_seconds=1, max_attempts=3, backoff=0)
def gated_flaky(context: TaskContext, gate: str, ms: float = 0.0) -> None:
    """Do the same, and fail in the first attempt: at a busy gate the second one waits for a slot."""
    begin(context, {"gate": gate, "ms": ms}, attempt=context.attempt)
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)
    if context.attempt == 1:
        raise Glitch("the first attempt")


@task(takes_context=True, rate="40/s", rate_per="chaos", burst=4)
def rated(context: TaskContext, ms: float = 0.0) -> None:
    """Do the same at a rate."""
    begin(context, {"ms": ms})
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, rate="40/s", rate_per="chaos", burst=4)
async def rated_async(context: TaskContext, ms: float = 0.0) -> None:
    """Do the same in the event loop, at the same rate."""
    begin(context, {"ms": ms})
    await asyncio.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, atomic=True)
def work_at_once(context: TaskContext, ms: float = 0.0) -> None:
    """Do the same in the transaction that completes the run."""
    begin(context, {"ms": ms})
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, atomic=True)
def has_an_effect(context: TaskContext, ms: float) -> None:
    """Write a row in the transaction that completes the run; note its connection (PostgreSQL)."""
    with connection.cursor() as cursor:
        id = context.task_result.id
        cursor.execute("INSERT INTO chaos_effects (task) VALUES (%s) RETURNING pg_backend_pid()", [id])
        begin(context, {"ms": ms}, backend=cursor.fetchone()[0])
    time.sleep(ms / 1000)
    note("end", id=id)


@task(takes_context=True)
async def work_async(context: TaskContext, ms: float = 0.0) -> None:
    """Do the same in the event loop."""
    begin(context, {"ms": ms})
    await asyncio.sleep(ms / 1000)
    note("end", id=context.task_result.id)


@task(takes_context=True, max_attempts=4, backoff=0)
def flaky(context: TaskContext, succeeds_at: int) -> None:
    """Fail until the given attempt; each attempt may run once."""
    begin(context, {"succeeds_at": succeeds_at}, attempt=context.attempt)
    note("end", id=context.task_result.id)
    if context.attempt < succeeds_at:
        raise Glitch(f"attempt {context.attempt}")


@contextmanager
def at_gate(context: TaskContext, kind: str, ms: float) -> Iterator[None]:
    """Note that a body is at its gate."""
    id, gate, pid = context.task_result.id, context.record.gate, os.getpid()
    begin(context, {"ms": ms}, kind=kind, pid=pid, attempt=context.attempt)
    note("in", id=id, gate=gate, pid=pid)
    try:
        yield
    finally:
        note("out", id=id, gate=gate, pid=pid)
        note("end", id=id, pid=pid)


@task(takes_context=True)
def stops(context: TaskContext, ms: float) -> None:
    """Run for a while, and stop when it is asked to."""
    with at_gate(context, "def", ms):
        until = time.monotonic() + ms / 1000
        while time.monotonic() < until:
            context.check()
            time.sleep(0.01)


@task(takes_context=True)
async def stops_async(context: TaskContext, ms: float) -> None:
    """Do the same in the event loop, which stops it."""
    with at_gate(context, "async def", ms):
        await asyncio.sleep(ms / 1000)


@task(takes_context=True, isolated=True)
def stops_isolated(context: TaskContext, ms: float) -> None:
    """Do the same in a process of its own, which is stopped by a signal."""
    with at_gate(context, "isolated", ms):
        time.sleep(ms / 1000)


@task(takes_context=True, max_attempts=9, backoff=60)
def fails_for_long(context: TaskContext, ms: float) -> None:
    """Fail, and wait for a long time for the next attempt."""
    with at_gate(context, "failing", ms):
        raise Glitch("again")


@task(takes_context=True)
def poison(context: TaskContext, ms: float = 0.0) -> None:
    """Take the worker process along after a while, and say so before."""
    begin(context, {"ms": ms})
    time.sleep(ms / 1000)
    note("fault", kind="poison", pids=[os.getpid()])
    os.kill(os.getpid(), signal.SIGKILL)


@task(takes_context=True, max_attempts=2)
def storms(context: TaskContext) -> None:
    """Fail at the first attempt, and be retried with the package's own backoff."""
    begin(context, {}, attempt=context.attempt)
    note("end", id=context.task_result.id)
    if context.attempt == 1:
        raise Glitch("all at once")


@task(takes_context=True, unique="newest:{key}", on_duplicate="replace", max_attempts=4, backoff=0)
def newest(context: TaskContext, key: int, number: int, ms: float) -> None:
    """Run with the newest call's arguments; now and then the first attempt fails, and is retried."""
    begin(context, {"key": key, "number": number, "ms": ms}, attempt=context.attempt)
    time.sleep(ms / 1000)
    note("end", id=context.task_result.id)
    if context.attempt == 1 and number % 5 == 0:
        raise Glitch("the first attempt")


@task(takes_context=True, schedulable=True)
def ticked(context: TaskContext) -> None:
    """Run for a schedule."""
    begin(context, {})
    note("end", id=context.task_result.id)


_run = scripts.run
_fence = fencing.fence


def witnessed_run(name: str, client: Any, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
    """Run a script; note the fences that it issues, and the replies to those that come back."""
    asked = time.monotonic()
    reply = _run(name, client, keys, arguments)
    if name == "dequeue" and len(reply) > 1:
        pairs = [(_text(id), int(fence)) for id, fence in zip(reply[1::2], reply[2::2], strict=True)]
        note("taken", runs=pairs)
    elif name == "dequeue_suspect" and reply:
        note("taken", runs=[(_text(reply[0]), int(reply[1]))])
    elif name in ENDINGS and reply:
        head, width = ENDINGS[name]
        items = [arguments[start : start + 2] for start in range(head, len(arguments), width)]
        runs = [(_text(id), int(fence), _text(word)) for (id, fence), word in zip(items, reply, strict=True)]
        note("answered", script=name, runs=runs, asked=asked)
    return reply


def witnessed_fence(name: str, number: int) -> None:
    """Fence a write of the leader; note its term while the row of the term is locked."""
    _fence(name, number)
    note("fenced", lock=name, term=number)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if os.environ.get("ASYNCQ_CHAOS"):
    scripts.run = witnessed_run
    fencing.fence = witnessed_fence
    mutants.apply(os.environ.get("ASYNCQ_CHAOS_MUTANT", ""))
    if folder := os.environ.get(arming.VARIABLE):
        arming.watch(folder)
