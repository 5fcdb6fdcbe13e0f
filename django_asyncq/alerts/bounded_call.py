"""Call what may never return, such as a mail server that says nothing, and wait for it for a bounded time only.

No time-out of a socket can do that: a server that sends one byte every few seconds keeps each of its limits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import connections

from ..guard import Attempted, attempt, own_thread


class NotFinished(Exception):
    """A call has not returned in time. The thread that made it is left behind, and dies with the process."""


class BoundedCall:
    """Makes one call at a time, each in a thread of its own. While one that was left behind goes on, there is no next.

    name: of the threads. seconds: how long to wait. Used by one thread; `stop` may be called by any.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._may_go_on = threading.Event()
        self._is_stopping = False

    def run(self, call: Callable[[], object]) -> BaseException | None:
        """Call, and wait; return a NotFinished, or the error that the call has raised, if any."""
        if self._thread is not None and self._thread.is_alive():
            return NotFinished("the attempt before has still not finished")
        done: list[Attempted] = []
        self._may_go_on.clear()
        if self._is_stopping:
            return NotFinished("this process stops")
        self._thread = threading.Thread(target=self._call, args=(call, done), name=self._name, daemon=True)
        self._thread.start()
        self._may_go_on.wait(self._seconds)
        if done:
            return done[0].error
        return NotFinished("this process stops" if self._is_stopping else f"no answer within {self._seconds:g} s")

    def stop(self) -> None:
        """Wait no longer, now and later."""
        self._is_stopping = True
        self._may_go_on.set()

    def _call(self, call: Callable[[], object], done: list[Attempted]) -> None:
        own_thread()
        try:
            done.append(attempt(call))
        finally:
            # A mail backend of the project may use the database.
            attempt(connections.close_all)
            self._may_go_on.set()
