"""How many tasks a process may take, and when its main thread must be woken to take more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..execute.executors import Executor
from ..execute.job import Job

# So much work is kept in line: short against the time after which what waits is handed back, long against a fetch.
AHEAD_SECONDS = 0.05
# No-op tasks: half of them are one fetch of 200, and a few milliseconds of work.
MOST_AHEAD = 400
NEVER = -1


class Capacity:
    """Free slots, and a line ahead of them: the shorter the tasks, the longer."""

    def __init__(self, slots: Sequence[Executor], concurrency: int, ring: Callable[[], None], *, most: int = 0) -> None:
        """ring: wakes the main thread, from any other. most: tasks of this process's life; 0 for no end."""
        self.slots = slots
        self.most = most
        self.finished = 0
        self.concurrency = concurrency
        self.ring = ring
        self.pace_seconds: float | None = None
        # The main thread sleeps until no more tasks than this are here.
        self._enough = NEVER
        self._counter = threading.Lock()

    # --- called by the main thread

    @property
    def running(self) -> list[Job]:
        """What is in a slot."""
        return [job for slots in self.slots for job in slots.busy.copy()]

    @property
    def jobs(self) -> list[Job]:
        """What is in line for a slot or in one. In this order, which is a job's: none is missed on its way."""
        return [job for slots in self.slots for job in slots.waiting.copy()] + self.running

    @property
    def occupied(self) -> int:
        """How many tasks are here, in a slot or in line for one."""
        count = 0
        for slots in self.slots:
            # In this order, as in `jobs`: one on its way is counted twice rather than not at all.
            count += len(slots.waiting) + len(slots.busy)
        return count

    def left(self) -> int:
        """Return how many tasks to take now; where that is 0, `ring` is called when it is more."""
        ahead = self._ahead()
        # In this order: a slot that becomes free in between is counted, or rings.
        self._enough = self.concurrency + ahead - max(1, ahead // 2)
        occupied = self.occupied
        if occupied > self._enough:
            return 0
        self._enough = NEVER
        left = self.concurrency + ahead - occupied
        return min(left, self.most - self.finished - occupied) if self.most else left

    @property
    def is_used_up(self) -> bool:
        """Whether this process has had as many tasks as it may."""
        return bool(self.most) and self.finished >= self.most

    def wait_until_empty(self) -> None:
        """Have `ring` called when the last task has ended."""
        self._enough = 0

    def _ahead(self) -> int:
        """Return how many tasks the slots begin within AHEAD_SECONDS, at the pace of the latest; of slow ones none."""
        if self.pace_seconds is None:
            return 0
        running, now = self.running, time.monotonic()
        if len([job for job in running if job.has_run_for(AHEAD_SECONDS, now)]) >= self.concurrency:
            return 0  # the short ones would wait for the long ones, while other processes may be idle
        return int(min(MOST_AHEAD, AHEAD_SECONDS * self.concurrency / max(self.pace_seconds, 1e-6)))

    # --- called by the slots

    def ended(self, seconds: float) -> None:
        """Count a run that took so long."""
        with self._counter:
            self.finished += 1
        # Without the lock: a measurement that gets lost between two threads does no harm.
        pace = self.pace_seconds
        self.pace_seconds = seconds if pace is None else 0.9 * pace + 0.1 * seconds

    def slot_is_free(self) -> bool:
        """Wake the main thread when it waits for this; return whether no task is left here."""
        occupied = self.occupied
        if self._enough != NEVER and occupied <= self._enough:
            self.ring()
        return not occupied
