"""Which counters of finished tasks a script raises: those of the minute, of the UTC day, and the totals."""

from __future__ import annotations

from datetime import UTC, datetime

from . import redis_clock
from .keys import QueueKeys

# A whole number of hours: `lua/counters.lua` finds the minute in it.
COUNTER_SECONDS = 90 * 86_400
LARGEST_COUNTER = 2**63 - 1


def now() -> int:
    """Return the time by the clock of Redis, in Unix seconds; one script call gets one time."""
    return int(redis_clock.seconds())


def counters(keys: QueueKeys, now: int) -> list[str]:
    """Return the counters of the day, then the totals (processed, failed), then the hash of the hour's minutes."""
    moment = datetime.fromtimestamp(now, UTC)
    day = moment.date().isoformat()
    minutes = keys.minutes(f"{moment:%Y-%m-%dT%H}")
    return [keys.processed_on(day), keys.failed_on(day), keys.processed, keys.failed, minutes]


def successes(keys: QueueKeys, now: int) -> list[str]:
    """Return those of `counters` that a task raises which has succeeded, in the same order."""
    day, _, total, _, minutes = counters(keys, now)
    return [day, total, minutes]


def limits(now: int) -> list[int]:
    """Return when the counters of the day expire, and the largest value of the total."""
    return [now + COUNTER_SECONDS, LARGEST_COUNTER]
