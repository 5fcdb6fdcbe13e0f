"""How a quarantine process gets its tasks: suspects only, one after the other, until none is left."""

from __future__ import annotations

import time

from ... import lifecycle
from ...faults import STORE_ERRORS
from ..wakeup import Reason
from .fetcher import Fetcher


class SuspectFetcher(Fetcher):
    """Fetches a suspect while this process holds no task. Nothing is prefetched, and nothing is handed to it.

    The first is the one that the supervisor has claimed for this process, see `QuarantineOptions`.
    """

    _has_begun = False

    @property
    def could_be_ready(self) -> bool:
        """False: it takes no handoff."""
        return False

    def begin_waits(self) -> None:
        """Wait for no pushes: the process exits when no suspect is left."""

    def pause(self) -> None:
        """Finish after the current task: the remaining suspects are for another host."""
        self.is_finished = True

    def _fetch(self) -> bool:
        # Before the look: what the reporter writes in between is seen, or notified.
        self.wakeup.expect(Reason.REPORTED)
        is_idle = not (self.capacity.jobs.count or self.reporter.unwritten)
        if self.is_finished or not is_idle or not self.pacing.is_due():
            return False
        self.pacing.begin()
        self.capacity.expect_outcomes()
        try:
            self.is_finished = not self._fetch_one()
        except STORE_ERRORS as error:
            self._fetch_failed(error)
            return self.pacing.is_due()
        self.faults.clear()
        self.pacing.finish(1, is_more_left=True, look_seconds=0.0)
        return False

    def _fetch_one(self) -> bool:
        """Claim a suspect and start it; return whether there was one."""
        for queue in self._queues():
            asked_at = time.monotonic()
            claimed = lifecycle.claim_suspect(self.broker, queue, self.worker_id, self.options.backend)
            if not claimed.is_drained:
                self._has_begun = True
                self._start(claimed.runs, asked_at)
                return True
        return False

    def _queues(self) -> list[str]:
        """Return the order of one fetch: until the first task has come, that of the task is asked first."""
        names, quarantine = self.order.next(), self.options.quarantine
        return names if quarantine is None or self._has_begun else [quarantine.queue, *names]
