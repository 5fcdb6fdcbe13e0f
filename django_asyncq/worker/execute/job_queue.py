"""The line in which jobs wait for a slot, and how a slot that rests is woken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class JobQueue(Generic[T]):
    """First come, first served. Jobs that come together wake one thread, which wakes the next if it leaves any.

    The next begins when it gets the interpreter: while tasks are short, the first has emptied the line by then, and
    they do not fight for it. `queue.SimpleQueue` did the same up to Python 3.12; since 3.13 each item wakes a thread.
    """

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        # Free while one who rests is to look.
        self._bell = threading.Lock()
        self._bell.acquire()
        # Whether one has been called who has not begun to look: until he has the interpreter, nobody else is woken.
        self._has_called = False

    def extend(self, jobs: Iterable[T]) -> None:
        """Add jobs behind the others."""
        self._jobs.extend(jobs)
        self._wake_one()

    def take_now(self) -> T | None:
        """Return the first job, or None when there is none."""
        try:
            job = self._jobs.popleft()
        except IndexError:
            return None
        self._wake_one()
        return job

    def take(self) -> T:
        """Return the first job; rests until there is one."""
        while (job := self.take_now()) is None:
            self._bell.acquire()
            # Before the look: what is added from here on calls again.
            self._has_called = False
        return job

    def _wake_one(self) -> None:
        if self._jobs and not self._has_called:
            self._has_called = True
            try:  # noqa: SIM105 - who waits for the job waits for each function that comes first
                self._bell.release()
            except RuntimeError:
                pass  # it is free: somebody is on his way to look
