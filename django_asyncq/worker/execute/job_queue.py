"""The queue from which slots take jobs, and how a waiting slot is woken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class JobQueue(Generic[T]):
    """First in, first out. Jobs that arrive together wake one thread, which wakes the next if it leaves any.

    The next thread starts when it gets the interpreter. While tasks are short, the first thread has emptied the queue
    by then, and the threads do not compete for the interpreter. `queue.SimpleQueue` did the same up to Python 3.12;
    since 3.13 each item wakes a thread.

    bell: unlocked while a waiting thread is to look into the queue.
    """

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        self.bell = threading.Lock()
        self.bell.acquire()
        # Whether a thread has been woken that has not looked yet; no other is woken until it does.
        self._is_waking = False

    def extend(self, jobs: Iterable[T]) -> None:
        """Add jobs at the end."""
        self._jobs.extend(jobs)
        self._wake_one()

    def take_now(self) -> T | None:
        """Return the first job, or None if there is none."""
        try:
            job = self._jobs.popleft()
        except IndexError:
            return None
        self._wake_one()
        return job

    def take(self) -> T:
        """Return the first job; wait until there is one."""
        while (job := self.take_now()) is None:
            self.bell.acquire()
            # Before the look: jobs that are added from here on wake a thread again.
            self._is_waking = False
        return job

    def _wake_one(self) -> None:
        if self._jobs and not self._is_waking:
            self._is_waking = True
            try:  # noqa: SIM105 - `suppress` costs a function call for each job
                self.bell.release()
            except RuntimeError:
                pass  # it is unlocked: a thread is about to look
