"""Count how many tasks a process may fetch, and wake its main thread when it may fetch more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from .job import Job, Jobs
from .memory import memory_mb
from .queue_slots import QueueSlots
from .wakeup import Reason, Wakeup

# How much work is prefetched: less than the time after which waiting jobs are requeued, much beside a fetch.
PREFETCH_SECONDS = 0.05
# A shorter time says too little of how fast the slots are.
PACE_SECONDS = 0.005
# For no-op tasks: half of them are one fetch of 200, and a few milliseconds of work.
MOST_PREFETCHED = 400


class Capacity:
    """The free slots, and the prefetch behind them: the shorter the tasks are, the more.

    max_tasks, max_memory_mb: after which the process is replaced; 0 for no limit.
    queue_slots: how many slots some queues may take; None without such queues.
    quiet: set while no outcome can follow soon, since no task is here and none is being fetched; the reporter waits on
    it. expects_more: whether tasks are being fetched, or known to be in the queues; set by the main thread.
    """

    def __init__(
        self,
        jobs: Jobs,
        concurrency: int,
        wakeup: Wakeup,
        *,
        max_tasks: int = 0,
        max_memory_mb: int = 0,
        queue_slots: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs = jobs
        self.concurrency = concurrency
        self.wakeup = wakeup
        self.max_tasks = max_tasks
        self.max_memory_mb = max_memory_mb
        self.queue_slots = QueueSlots(queue_slots, jobs, wakeup) if queue_slots else None
        self.finished = 0
        self.task_seconds: float | None = None
        self.quiet = threading.Event()
        self.expects_more = False
        # The main thread fetches more once this few jobs are here.
        self._refill_at = 0
        # Tasks a second that the slots finish together. What one run takes does not tell it: slots wait for each
        # other, and for a machine that is busy.
        self._pace = 0.0
        self._paced_at, self._paced = clock(), 0
        # Whether a slot has had nothing to do since then, so that they could have finished more.
        self._was_short = True
        self._clock = clock
        self._counter = threading.Lock()

    # --- called by the main thread

    def to_fetch(self) -> int:
        """Return how many tasks to fetch now; after 0, CAPACITY_FREED notifies when it is more."""
        self._note_pace()
        prefetch = self._prefetch()
        self._refill_at = self.concurrency + prefetch - max(1, prefetch // 2)
        # Before the look: a slot that is freed in between is counted, or notifies.
        self.wakeup.expect(Reason.CAPACITY_FREED)
        here = self.jobs.count
        if here > self._refill_at:
            return 0
        self.wakeup.ignore(Reason.CAPACITY_FREED)
        free = self.concurrency + prefetch - here
        return min(free, self.max_tasks - self.finished - here) if self.max_tasks else free

    @property
    def is_used_up(self) -> bool:
        """Whether this process has run as many tasks, or used as much memory, as it may."""
        if self.max_tasks and self.finished >= self.max_tasks:
            return True
        # Only after a task: a limit below what Django itself takes must not keep every task from running.
        return bool(self.max_memory_mb and self.finished) and memory_mb() > self.max_memory_mb

    def expect_outcomes(self) -> None:
        """Note that outcomes will follow: tasks are being fetched, or have come."""
        self.expects_more = True
        self.quiet.clear()

    def check_quiet(self) -> None:
        """Set `quiet` if no outcome can follow soon. The slots call it too."""
        if not (self.jobs.count or self.expects_more):
            self.quiet.set()

    def _note_pace(self) -> None:
        now, finished = self._clock(), self.finished
        seconds = now - self._paced_at
        if seconds < PACE_SECONDS:
            return
        pace = (finished - self._paced) / seconds
        self._pace = max(self._pace, pace) if self._was_short else (self._pace + pace) / 2
        self._paced_at, self._paced, self._was_short = now, finished, False

    def _prefetch(self) -> int:
        """Return how many tasks the slots begin within PREFETCH_SECONDS, as long as the latest ones; none if slow."""
        if self.task_seconds is None:
            return 0
        running, now = self.jobs.running, self._clock()
        if len([job for job in running if job.has_run_for(PREFETCH_SECONDS, now)]) >= self.concurrency:
            return 0  # short tasks would wait for the long ones, while other processes may be idle
        pace = min(self._pace, self.concurrency / max(self.task_seconds, 1e-6))
        return int(min(MOST_PREFETCHED, PREFETCH_SECONDS * pace))

    # --- called by the slots

    def leave_slot(self, job: Job) -> None:
        """Free the slot of a job; count its run, if it has begun here. Wake the main thread if it waits for that."""
        if job.run.begun and job.begun_at is not None:
            with self._counter:
                self.finished += 1
            # Without the lock: a measurement that is lost between two threads does no harm.
            seconds, average = self._clock() - job.begun_at, self.task_seconds
            self.task_seconds = seconds if average is None else 0.9 * average + 0.1 * seconds
        jobs = self.jobs
        jobs.busy.discard(job)
        if self.queue_slots is not None:
            self.queue_slots.leave(job)
        here = len(jobs.waiting) + len(jobs.busy)
        if here < self.concurrency:
            self._was_short = True
        if here <= self._refill_at:
            self.wakeup.notify(Reason.CAPACITY_FREED)
        if not here:
            self.wakeup.notify(Reason.IDLE)
            self.check_quiet()
        if (self.max_tasks or self.max_memory_mb) and self.is_used_up:
            self.wakeup.notify(Reason.USED_UP)
