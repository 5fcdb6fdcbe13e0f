"""Compare the clocks of the two stores: rows say by the database's when a task is due, and Redis finds by its own
whether that time has come.
"""

from __future__ import annotations

from .. import conf
from ..clock_difference import clock_difference_seconds
from ..guard import get_logger

logger = get_logger("django_asyncq.maintenance.clock_check")

# Above the first they count as apart, below the second as together again, so that one that lies between says nothing.
APART_SECONDS = 1.0
TOGETHER_SECONDS = 0.5


class ClockCheck:
    """Compare once a beat; warn once when the clocks come apart, and say once when they agree again."""

    def __init__(self) -> None:
        self._due_at = 0.0
        self._is_apart = False

    def tick(self, now: float) -> None:
        """Compare, if that is due. now: monotonic seconds. Raises: BrokerUnavailable, django.db.Error."""
        if now < self._due_at:
            return
        self._due_at = now + conf.current().beat_seconds
        difference = clock_difference_seconds()
        if not self._is_apart and abs(difference) > APART_SECONDS:
            self._is_apart, word = True, "later" if difference > 0 else "earlier"
            logger.warning(
                "the clock of the database shows a time %.1f s %s than that of Redis: delayed tasks and retries start "
                "that much %s; synchronize the clocks of both servers",
                abs(difference),
                word,
                word,
            )
        elif self._is_apart and abs(difference) < TOGETHER_SECONDS:
            self._is_apart = False
            logger.info("the clocks of the database and of Redis agree again")
