"""Which queues a worker waits for, and since when: those it found empty, after a rest, again after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ...broker.clients import pause_after
from ...broker.handoff import Handoff, Heard
from ...exceptions import BrokerUnavailable

logger = logging.getLogger("django_asyncq.worker")


class Waiting:
    """The main thread's; it sleeps on the sockets of `standby` and then calls `hear`."""

    def __init__(self, standby: Handoff, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never fall."""
        self.standby = standby
        self._clock = clock
        self.failures = 0
        # To be waited for as soon as both times have come.
        self._queues: set[str] = set()
        self._rest_until = 0.0
        self._again_at = 0.0

    def add(self, queues: Iterable[str], *, rest_seconds: float) -> None:
        """Wait for pushes to queues that were found empty (and not paused), so many seconds from now."""
        self._queues.update(queues)
        self._rest_until = self._clock() + rest_seconds

    def pause_seconds(self) -> float | None:
        """Return how long to sleep before `begin`, or None when there is nothing to begin."""
        return max(self._due_at - self._clock(), 0.0) if self._queues else None

    def begin(self, may_stand_by: Callable[[], bool]) -> str | None:
        """Begin the waits that are due, and stand by; return the queue with which that failed, if any.

        may_stand_by: whether a task may be handed to this process; asked when it matters.
        """
        if self._clock() < self._due_at or not (self._queues or self.standby.could_stand_by):
            return None
        queue = None
        try:
            self.standby.stand_by(may_be_handed=may_stand_by())
            for queue in self._queues.copy():
                self.standby.wait_for(queue)
                self._queues.discard(queue)
        except BrokerUnavailable as error:
            self._failed(error)
            return queue
        return None

    def hear(self, queue: str) -> Heard | None:
        """Return what ended a wait, None when it goes on. Raises: BrokerUnavailable."""
        try:
            heard = self.standby.hear(queue)
        except BrokerUnavailable as error:
            self._failed(error)
            raise
        if self.failures >= 2:
            logger.info("worker %s waits for pushes again", self.standby.worker_id)
        self.failures = 0
        return heard

    @property
    def _due_at(self) -> float:
        return max(self._rest_until, self._again_at)

    def _failed(self, error: BrokerUnavailable) -> None:
        """Put off what is to be begun; say so once, at the second failure in a row. All waits end at once: one."""
        if self._clock() < self._again_at:
            return
        self.failures += 1
        self._again_at = self._clock() + pause_after(self.failures)
        if self.failures == 2:
            logger.warning("worker %s cannot wait for pushes, it looks for them: %s", self.standby.worker_id, error)
