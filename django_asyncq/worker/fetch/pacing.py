"""When a worker process asks its queues again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

SHORTEST_REST_SECONDS = 0.0025
# A little longer than producers gather (PUSH_BATCH_SECONDS): where groups keep coming, the next comes within it.
REST_AFTER_GROUP_SECONDS = 0.012
LONGEST_REST_SECONDS = 0.02
# So many are worth a longer wait for more; as many make producers gather (`lifecycle.gathering`).
STREAM_PER_SECOND = 400
GROUP = 4
LONGEST_PAUSE_SECONDS = 5.0


class Pacing:
    """At once when told that there may be work; else from time to time, and later after a failure.

    Who has emptied the queues rests before it asks again, so that tasks which come one by one are taken in groups: a
    group costs little more than a lone task. While rests bring STREAM_PER_SECOND they grow, and nobody need wake the
    process. After one that brought fewer it rests as after a lone task.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never fall."""
        self.failures = 0
        self._clock = clock
        self._may_have_work = True
        self._look_at = clock()
        self._not_before = clock()
        self._rest_seconds = 0.0
        self._is_asking = False
        # Whether work came in the rest before, and whether this turn is the first after such a rest.
        self._came_in_rest = False
        self._is_busy = False

    def told(self) -> None:
        """Take note that a queue may have work. Called from any thread."""
        self._came_in_rest = self._clock() < self._not_before
        self._may_have_work = True

    def is_due(self) -> bool:
        """Whether to ask now."""
        now = self._clock()
        return now >= self._not_before and (self._may_have_work or now >= self._look_at)

    def rest_seconds(self) -> float:
        """Return how long it is too early to ask, whatever may be there."""
        return max(self._not_before - self._clock(), 0.0)

    def may_bring(self) -> bool:
        """Whether the queues are being asked, or are to be asked now. Called from any thread."""
        return self._is_asking or self.is_due()

    def pause_seconds(self, shortest: float) -> float:
        """Return how long nothing is to be asked: until a rest is over, where work waits for that, or the next look."""
        now = self._clock()
        if self._may_have_work and self._not_before > now:
            return self._not_before - now
        return max(self._look_at - now, shortest)

    def begin(self) -> None:
        """Take note that the queues are asked now: what is told from here on counts for the next time."""
        self._is_busy, self._came_in_rest = self._came_in_rest, False
        self._may_have_work, self._is_asking = False, True

    def end(self, got: int, *, is_more_left: bool, look_seconds: float) -> bool:
        """Take note of how many tasks came; return whether to be told of the next push.

        look_seconds: when to look without having been told.
        """
        now = self._clock()
        self.failures = 0
        self._look_at = now + look_seconds
        self._is_asking = False
        if is_more_left:
            self._may_have_work = True
            return False
        self._is_busy = self._is_busy and got >= STREAM_PER_SECOND * self._rest_seconds
        self._rest_seconds = self._next_rest(got)
        self._not_before = now + self._rest_seconds
        if self._is_busy:
            self._may_have_work = self._came_in_rest = True
        return not self._is_busy

    def _next_rest(self, got: int) -> float:
        if self._is_busy:
            return max(SHORTEST_REST_SECONDS, min(2 * self._rest_seconds, LONGEST_REST_SECONDS))
        # After a longer rest so many are no sign of a producer that gathers.
        if got >= GROUP and self._rest_seconds < REST_AFTER_GROUP_SECONDS:
            return REST_AFTER_GROUP_SECONDS
        return SHORTEST_REST_SECONDS if got else 0.0

    def fail(self) -> None:
        """Take note that the queues could not be asked: again at once, then after growing, spread-out pauses."""
        self._may_have_work, self._is_asking = True, False
        self.failures += 1
        pause = 0.0 if self.failures == 1 else min(LONGEST_PAUSE_SECONDS, 0.2 * 2**self.failures)
        self._not_before = self._clock() + pause * random.uniform(0.5, 1.0)  # noqa: S311
