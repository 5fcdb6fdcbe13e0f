"""Slots per queue: how many of the slots of one worker process may run tasks of a queue, as `--queues reports:2` says.

A queue with such a limit is asked for no more tasks than may run here, so none of them waits in this process behind its
own limit, and every slot takes from the other queues what it can. While a queue is full it is asked for nothing, and
this process is not woken for it: it would only pass the token on. The slot of such a task wakes the main thread when
it is free.
"""

from __future__ import annotations

from collections.abc import Mapping

from .job import Job, Jobs
from .wakeup import Reason, Wakeup


class QueueSlots:
    """Counts the tasks of limited queues in this process. limits: queue → how many slots, at least one queue.

    full: queues that had more tasks at the last look than this process may take. Used by the main thread only, except
    `leave`.
    """

    def __init__(self, limits: Mapping[str, int], jobs: Jobs, wakeup: Wakeup) -> None:
        self.limits = limits
        self.jobs = jobs
        self.wakeup = wakeup
        self.full: set[str] = set()
        # Always: what leaves after a look is notified, what has left before is not counted.
        wakeup.expect(Reason.QUEUE_FREED)

    def most(self, queue: str, wanted: int) -> int:
        """Return how many tasks of a queue may be fetched now, of those wanted: 0 when it is full."""
        limit = self.limits.get(queue)
        if limit is None:
            return wanted
        # A job that enters a slot at this moment may be listed twice.
        here = {job for job in self.jobs.all if job.run.record.queue_name == queue}
        return max(min(wanted, limit - len(here)), 0)

    def is_full(self, queue: str) -> bool:
        """Look whether a queue that has tasks is full, and remember it."""
        if self.most(queue, 1):
            self.full.discard(queue)
            return False
        self.full.add(queue)
        return True

    def keep_full(self, waiting: set[str]) -> None:
        """Forget that queues were full which have no tasks any more."""
        self.full &= waiting

    def leave(self, job: Job) -> None:
        """Note that a job has left this process. Called by the slots too."""
        if job.run.record.queue_name in self.limits:
            self.wakeup.notify(Reason.QUEUE_FREED)
