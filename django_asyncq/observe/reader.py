"""The thread and the database connection that read rows for all long polls of this process.

Django gives each request under ASGI a thread, which would keep a connection as long as the request waits: a hundred
open pages would use up what a database allows. This thread is there while anything polls.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from django.db import connections

P = ParamSpec("P")
R = TypeVar("R")


class Reader:
    """Calls functions one after the other. Safe to use from any thread and any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def used(self) -> Iterator[ThreadPoolExecutor]:
        """Have the thread while the block runs; the last one that leaves has its connections closed."""
        with self._lock:
            self._users += 1
            thread = self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="asyncq-status")
        try:
            yield thread
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._thread = None
                    thread.submit(contextvars.Context().run, connections.close_all)
                    thread.shutdown(wait=False)


_reader = Reader()


def of_process() -> Reader:
    """Return the reader of this process."""
    return _reader


async def call_in(thread: ThreadPoolExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a function returns in the reader's thread. What is cancelled before it has begun is not called."""

    def call() -> R:
        try:
            return function(*args, **kwargs)
        except BaseException:
            connections.close_all()  # perhaps it was lost
            raise

    return await asyncio.get_running_loop().run_in_executor(thread, contextvars.Context().run, call)


def release_connections() -> None:
    """Close the calling thread's connections, except within transactions; the next query connects anew."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _begin_anew() -> None:
    """Begin without the parent's thread, in the child of a fork."""
    global _reader
    _reader = Reader()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
