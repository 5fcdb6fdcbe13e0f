"""How a quarantine process gets its tasks: suspects only, one after the other, until none is left."""

from __future__ import annotations

import time

from ... import lifecycle
from ...broker import Dequeued, Lease
from ...faults import STORE_ERRORS
from .fetcher import Fetcher


class SuspectFetcher(Fetcher):
    """Fetches a suspect while this process holds no task. Nothing is prefetched, and nothing is handed to it.

    The first is the one that the supervisor has claimed for this process, see `WorkerOptions.suspect`.
    """

    _has_begun = False

    @property
    def could_be_ready(self) -> bool:
        """False: it takes no handoff."""
        return False

    def begin_waits(self) -> None:
        """Wait for no pushes: the process ends when no suspect is left."""

    def _fetch(self) -> bool:
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
        first = self.options.suspect
        if first is not None and not self._has_begun:
            lease = Dequeued([Lease(first.id, first.fence)], paused=False, is_drained=False)
            claimed = lifecycle.receive(self.broker, first.queue, self.worker_id, lease, self.options.backend)
            self._has_begun = True
            self._start(claimed.runs, first.claimed_at)
            return True
        for queue in self.order.next():
            asked_at = time.monotonic()
            claimed = lifecycle.claim_suspect(self.broker, queue, self.worker_id, self.options.backend)
            if not claimed.is_drained:
                self._start(claimed.runs, asked_at)
                return True
        return False
