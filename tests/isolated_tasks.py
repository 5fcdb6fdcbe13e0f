"""Isolated tasks. `tests.tasks` imports them, so that workers know them.

What a task does is a function of BODIES, whose name is its first argument.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import transaction

from django_asyncq import task
from django_asyncq.context import TaskContext, current_task
from django_asyncq.exceptions import SoftTimeout, TaskTimeout
from django_asyncq.models import TaskRecord

from .process_tasks import write

# By their names.
BODIES: dict[str, Callable[..., Any]] = {}

logger = logging.getLogger("tests.isolated")


class Unpicklable(Exception):
    """An error with a lock and a lambda."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = (threading.Lock(), lambda: None)


class Passing(Exception):
    """A failure that may pass."""


def fewer(exception: BaseException, result: Any) -> float | None:
    """A backoff that looks at the exception itself."""
    return 0.0 if exception.args == ("again",) else None


@task(isolated=True, takes_context=True, max_attempts=1)
def plain(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body once."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=3, retry_on=Passing, backoff=fewer)
def retried(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body up to three times."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=2, backoff=0, timeout=0.6)
def limited(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body for a limited time."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=1, soft_timeout=0.5, timeout=20)
def softly(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body that is interrupted before its timeout."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=5, backoff=0)
def stubborn(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body again after whatever it raises."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=1, atomic=True)
def atomic(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body in the transaction that completes it."""
    return BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=1, soft_timeout=0.5, timeout=20)
async def coroutine(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body."""
    return await BODIES[body](context, *args)


@task(isolated=True, takes_context=True, max_attempts=5, backoff=0)
async def coroutine_for_long(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body, again after whatever it raises."""
    return await BODIES[body](context, *args)


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a body."""
    BODIES[function.__name__] = function
    return function


@body
def says_where(context: TaskContext) -> list[Any]:
    """Return the process, its parent, its group, whether it is the main thread, the attempt, and the current task."""
    is_main = threading.current_thread() is threading.main_thread()
    current = current_task()
    assert current is not None
    return [os.getpid(), os.getppid(), os.getpgrp(), is_main, context.attempt, current.task_id]


@body
def returns(context: TaskContext, size: int) -> str:
    """Return a text of this size."""
    return "x" * size


@body
def returns_set(context: TaskContext) -> Any:
    """Return what JSON cannot hold."""
    return {1, 2}


@body
def logs_and_dies(context: TaskContext) -> None:
    """Log a line, and exit without an outcome."""
    logger.warning("the last line")
    os._exit(3)


@body
def shows_its_row(context: TaskContext) -> list[Any]:
    """Return the state and the unique slot that the row has meanwhile."""
    record = TaskRecord.objects.get(pk=context.record.pk)
    return [record.state, record.unique_slot]


@body
def raises_unpicklable(context: TaskContext) -> None:
    """Raise what pickle cannot hold."""
    raise Unpicklable("odd")


@body
def memory(context: TaskContext) -> list[int]:
    """Return what the process took to start.

    The milliseconds of CPU, and its resident memory in MB: all of it, and what it shares with no other process.
    """
    cpu = round(time.process_time() * 1000)
    status = Path("/proc/self/smaps_rollup").read_text()
    found = dict(re.findall(r"^(Rss|Private_Clean|Private_Dirty): *(\d+) kB", status, re.MULTILINE))
    return [cpu, int(found["Rss"]) // 1024, (int(found["Private_Clean"]) + int(found["Private_Dirty"])) // 1024]


@body
def exits(context: TaskContext, code: Any) -> None:
    """Call sys.exit."""
    sys.exit(code)


@body
def dies(context: TaskContext, how: str, path: str = "") -> str:
    """Take the process down; with a path the first time only."""
    if path and Path(path).exists():
        return "second run"
    if path:
        Path(path).touch()
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    ctypes.string_at(0)
    return "alive"


@body
def raises(context: TaskContext, path: str, *texts: str) -> int:
    """Raise an error for each text, one in each attempt; then return the attempt."""
    if context.attempt <= len(texts):
        raise Passing(texts[context.attempt - 1])
    return context.attempt


@body
def sleeps(context: TaskContext, seconds: float, path: str = "") -> str:
    """Sleep in one call, after it has said so in a file."""
    if path:
        write(path, os.getpid())
    time.sleep(seconds)
    return "slept"


@body
def cleans_up(context: TaskContext, path: str) -> None:
    """Sleep; write the class of the error that ends the sleep."""
    try:
        time.sleep(60)
    except BaseException as error:
        write(path, type(error).__name__)
        raise


@body
def catches_soft_timeout(context: TaskContext) -> str:
    """Return in time what there is by then."""
    try:
        time.sleep(60)
    except SoftTimeout:
        return "partial"
    return "slept"


@body
def checks_and_cleans_up(context: TaskContext, path: str) -> None:
    """Be stopped by `check`, and take some time to clean up."""
    try:
        while True:
            context.check()
    except TaskTimeout:
        time.sleep(0.3)
        write(f"{path}{context.attempt}", "clean")
        raise


@body
def ignores_everything(context: TaskContext, path: str) -> None:
    """Go on whatever comes."""
    for number in (signal.SIGTERM, signal.SIGURG):
        signal.signal(number, signal.SIG_IGN)
    write(path, os.getpid())
    while True:
        time.sleep(60)


@body
def removes_the_handler(context: TaskContext) -> None:
    """Remove the handler of SIGTERM, as some programs do."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)


@body
def closes_descriptors(context: TaskContext) -> str:
    """Close all files, as a program does that makes itself a daemon."""
    os.closerange(3, 256)
    return "done"


@body
def replaces_descriptors(context: TaskContext, path: str) -> str:
    """Put a file in place of all others, the pipe among them; it stays open as long as the listener may look at it."""
    handle = os.open(path, os.O_RDWR)
    for number in range(3, 256):
        if number != handle:
            os.dup2(handle, number)
    time.sleep(1)
    return "done"


@body
def forks(context: TaskContext, path: str) -> str:
    """Fork a child that returns from the task as its parent does, and one that lives on."""
    if os.fork() == 0:
        return "child"
    if (pid := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    write(path, pid)
    return "parent"


@body
def leaves_threads(context: TaskContext) -> str:
    """Leave a thread behind that does not end."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return "done"


@body
def logs(context: TaskContext) -> None:
    """Write to the log, and to standard output."""
    logger.warning("a line of the body")
    print("printed by the body")


@body
def completes(context: TaskContext, name: str, then: str) -> str:
    """Write in the transaction that completes the task; then do something else."""
    with context.complete_on_commit() as ending:
        Group.objects.create(name=name)
        ending.result = name
        transaction.on_commit(lambda: Group.objects.create(name=f"{name}: hook") and None)
        if then == "raises within":
            raise Passing("within")
        if then == "dies within":
            os._exit(1)
    if then == "dies after":
        os._exit(1)
    if then == "raises after":
        raise Passing("after")
    return "ignored"


@body
def makes_group(context: TaskContext, name: str, then: str = "") -> str:
    """Write to the database."""
    Group.objects.create(name=name)
    if then == "raises":
        raise Passing("after the write")
    if then == "sleeps":
        time.sleep(60)
    return name


@body
def reports_progress(context: TaskContext, path: str) -> None:
    """Report progress twice, and wait in between until the test has seen it."""
    context.progress(1, 2, "half")
    while not Path(path).exists():
        time.sleep(0.05)
    context.progress(2, 2, "all")


@body
def checks(context: TaskContext, path: str) -> None:
    """Look whether it must stop, without a call that a signal could end; say so first."""
    write(path, os.getpid())
    while True:
        context.check()


@body
async def waits(context: TaskContext, path: str) -> None:
    """Await for long, after it has said so in a file."""
    write(path, os.getpid())
    await asyncio.sleep(60)


@body
def runs_program(context: TaskContext, path: str) -> None:
    """Run a program for a long time."""
    program = subprocess.Popen(["sleep", "98"])
    write(path, program.pid)
    program.wait()


@body
async def awaits(context: TaskContext, then: str = "") -> Any:
    """Await, and use the database in a thread."""
    await asyncio.sleep(0)
    count = await sync_to_async(Group.objects.count)()
    is_main = threading.current_thread() is threading.main_thread()
    if then == "sleeps":
        await asyncio.sleep(60)
    return [count, is_main]


# Only the processes of isolated tasks are slow to start, or fail to.
if multiprocessing.current_process().name.startswith("asyncq-isolated"):
    time.sleep(float(os.environ.get("ASYNCQ_TEST_SLOW_START", "0")))
    if Path(os.environ.get("ASYNCQ_TEST_BROKEN_START", "/nowhere")).exists():
        raise ImportError("the process of an isolated task must not start in this test")
