"""When a worker process asks its queues again, and when it begins to wait for pushes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ...broker.clients import pause_after

SHORTEST_PAUSE_SECONDS = 0.0025
# A little longer than producers batch (PUSH_BATCH_SECONDS): while batches keep coming, the next comes within it.
PAUSE_AFTER_BATCH_SECONDS = 0.012
LONGEST_PAUSE_SECONDS = 0.02
# This many tasks are worth a longer pause for more; a producer batches at the same rate (`lifecycle.push_batcher`).
STREAM_PER_SECOND = 400
BATCH = 4
LONGEST_BACKOFF_SECONDS = 5.0


class Pacing:
    """Decides when to ask the queues: at once after a push, else from time to time, and later after a failure.

    After it has emptied the queues, a worker pauses before it asks again, so tasks that come one by one are taken in
    batches: a batch costs little more than a single task. While pauses bring STREAM_PER_SECOND they grow, and nobody
    need wake the process. A pause that brings fewer is followed by a short one. Used by the main thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never fall."""
        self.failures = 0
        self.wait_failures = 0
        self._clock = clock
        self._may_have_work = True
        self._look_at = clock()
        self._not_before = clock()
        self._pause_seconds = 0.0
        # Whether work came during the latest pause, and whether this fetch is the first after such a pause.
        self._came_in_pause = False
        self._is_stream = False
        self._wait_at = clock()
        self._wait_again_at = clock()

    # --- asking the queues

    def note_push(self) -> None:
        """Note that a queue may have work."""
        self._came_in_pause = self._clock() < self._not_before
        self._may_have_work = True

    def is_due(self) -> bool:
        """Whether to ask now."""
        now = self._clock()
        return now >= self._not_before and (self._may_have_work or now >= self._look_at)

    def pause_left(self) -> float:
        """Return for how many seconds it is too early to ask, even if there is work."""
        return max(self._not_before - self._clock(), 0.0)

    def sleep_seconds(self, shortest: float) -> float:
        """Return how long nothing is to be asked: to the end of the pause if work waits for it, or to the next look."""
        now = self._clock()
        if self._may_have_work and self._not_before > now:
            return self._not_before - now
        return max(self._look_at - now, shortest)

    def begin(self) -> None:
        """Note that the queues are asked now: a push from here on counts for the next time."""
        self._is_stream, self._came_in_pause = self._came_in_pause, False
        self._may_have_work = False

    def finish(self, got: int, *, is_more_left: bool, look_seconds: float) -> bool:
        """Note how many tasks came; return whether to wait for the next push.

        look_seconds: when to look again without a push.
        """
        now = self._clock()
        if self.failures:
            # The outage is over: a wait that failed during it begins again at once.
            self.failures, self._wait_again_at = 0, now
        self._look_at = now + look_seconds
        if is_more_left:
            self._may_have_work = True
            return False
        self._is_stream = self._is_stream and got >= STREAM_PER_SECOND * self._pause_seconds
        self._pause_seconds = self._next_pause(got)
        self._not_before = now + self._pause_seconds
        if self._is_stream:
            self._may_have_work = self._came_in_pause = True
        return not self._is_stream

    def _next_pause(self, got: int) -> float:
        if self._is_stream:
            return max(SHORTEST_PAUSE_SECONDS, min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS))
        # After a longer pause, this many tasks are no sign of a producer that batches.
        if got >= BATCH and self._pause_seconds < PAUSE_AFTER_BATCH_SECONDS:
            return PAUSE_AFTER_BATCH_SECONDS
        return SHORTEST_PAUSE_SECONDS if got else 0.0

    def fail(self) -> None:
        """Note that the queues could not be asked: ask again at once, then after growing, spread-out pauses."""
        self._may_have_work = True
        self.failures += 1
        pause = 0.0 if self.failures == 1 else min(LONGEST_BACKOFF_SECONDS, 0.2 * 2**self.failures)
        self._not_before = self._clock() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    # --- waiting for pushes

    def wait_later(self, seconds: float) -> None:
        """Begin to wait for pushes only after some seconds."""
        self._wait_at = self._clock() + seconds

    def until_wait(self) -> float:
        """Return in how many seconds to begin to wait for pushes; 0 for now."""
        return max(self._wait_at - self._clock(), self._wait_again_at - self._clock(), 0.0)

    def wait_failed(self) -> bool:
        """Note that a wait failed: begin again after growing, spread-out pauses. Return whether it is the second time.

        Waits of several queues that fail at once count as one.
        """
        now = self._clock()
        if now < self._wait_again_at:
            return False
        self.wait_failures += 1
        self._wait_again_at = now + pause_after(self.wait_failures)
        return self.wait_failures == 2

    def wait_succeeded(self) -> bool:
        """Note that a wait brought an answer; return whether several had failed before."""
        had_failed, self.wait_failures = self.wait_failures >= 2, 0
        return had_failed
