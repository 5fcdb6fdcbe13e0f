"""Tasks that report progress and log lines. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async

from django_asyncq import task
from django_asyncq.context import TaskContext, current_task

logger = logging.getLogger("shop.orders")
logger.setLevel(logging.DEBUG)
apart = logging.getLogger("shop.apart")
apart.propagate = False


def wait_for(path: str) -> None:
    """Wait until a file is there; the test decides when. Empty: do not wait."""
    while path and not Path(path).exists():
        time.sleep(0.02)


@task(takes_context=True, max_attempts=2, backoff=0)
def reports(context: TaskContext, values: list[dict[str, Any]], go: str = "", *, fails: int = 0) -> Any:
    """Report each value, and wait for the file; the first `fails` attempts fail, and later ones then report nothing.

    Returns the progress that the row had in memory at the beginning.
    """
    before = context.record.progress
    if context.attempt == 1 or not fails:
        for value in values:
            context.progress(**value)
    wait_for(go)
    if context.attempt <= fails:
        raise OSError("not yet")
    return before


@task(takes_context=True, atomic=True)
def reports_in_transaction(context: TaskContext, done: int, go: str = "") -> None:
    """Report within the transaction of an atomic task, and wait."""
    context.progress(done, 10, "in the transaction")
    wait_for(go)


@task(takes_context=True)
async def areports(context: TaskContext, go: str = "") -> None:
    """Report from a coroutine, and wait."""
    context.progress(1, 2, "coroutine", step="one")
    while go and not Path(go).exists():
        await asyncio.sleep(0.02)


@task(takes_context=True)
def reports_often(context: TaskContext, count: int) -> float:
    """Report so often, and return the seconds that it took."""
    began = time.perf_counter()
    for number in range(count):
        context.progress(number, count, "row by row")
    return time.perf_counter() - began


@task(keep_logs=5, max_attempts=2, backoff=0)
def logs(lines: list[str], go: str = "", *, fails: int = 0) -> None:
    """Log each line, wait for the file, and fail so often."""
    for line in lines:
        logger.info(line)
    wait_for(go)
    current = current_task()
    assert current is not None
    if current.attempt <= fails:
        raise OSError("not yet")


@task(keep_logs=2000)
def logs_odd_lines(name: str) -> None:
    """Log lines as no program should."""
    ODD_LINES[name]()


@task(keep_logs=100)
async def alogs(names: list[str]) -> None:
    """Log from a coroutine, from what it awaits, and from threads that work for it."""

    async def one(name: str) -> None:
        logger.info("%s: coroutine", name)
        await asyncio.to_thread(logger.info, "%s: thread", name)
        await sync_to_async(logger.info)("%s: synchronous", name)

    for name in names:
        await one(name)


@task(keep_logs=5)
async def logs_and_sleeps(line: str) -> None:
    """Log a line, and go on for longer than any test."""
    logger.info(line)
    await asyncio.sleep(600)


@task(keep_logs=10, takes_context=True)
def logs_after_completion(context: TaskContext) -> None:
    """Log before, in and after the block that completes the task."""
    logger.info("before")
    with context.complete_on_commit():
        logger.info("in")
    logger.info("after")


@task
def logs_plainly(line: str) -> None:
    """Log a line that nobody keeps."""
    logger.warning(line)


@task(keep_logs=3)
def logs_and_leaves_a_thread(go: str) -> None:
    """Leave a thread behind that logs when the run has finished."""
    context = contextvars.copy_context()

    def later() -> None:
        wait_for(go)
        logger.info("late")
        Path(f"{go}.logged").touch()

    threading.Thread(target=context.run, args=[later], daemon=True).start()
    logger.info("in time")


class Unprintable:
    """An argument of a line whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _with_traceback() -> None:
    try:
        raise ValueError(f"last words, token=s3cret {'x' * 10_000}")
    except ValueError:
        logger.exception("it failed")


def _with_short_traceback() -> None:
    try:
        raise ValueError("last words")
    except ValueError:
        logger.exception("begin %s", "y" * 10_000)


def _many() -> None:
    for number in range(100_000):
        logger.info("line %d of many", number)


ODD_LINES: dict[str, Callable[[], object]] = {
    "megabyte": lambda: logger.info("password=hunter2 " + "é" * 1_000_000),
    "secrets": lambda: logger.info('{"api_key": "abc", "n": 1} postgres://me:hunter2@host/db token=%s', "t0ps3cret"),
    "secret at the cut": lambda: logger.info("x" * 2_030 + " postgres://me:hunter2hunter2@host/db " + "z" * 3_000),
    "NUL and half a character": lambda: logger.info("a\x00b \ud800 c"),
    "traceback": _with_traceback,
    "long message, short traceback": _with_short_traceback,
    "unprintable": lambda: (logger.info("%s", Unprintable()), logger.info("goes on")),
    "wrong arguments": lambda: (logger.info("%d", "text"), logger.info("goes on")),
    "odd level and name": lambda: logging.getLogger("n" * 500 + "\x00").log(10**6, "odd"),
    "apart": lambda: apart.warning("a logger that does not propagate"),
    "many": _many,
    "nothing": lambda: None,
}
