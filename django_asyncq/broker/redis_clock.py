"""The time by Redis's clock, which decides leases, slots, locks, and when a task that is due is pushed.

A script reads `TIME` itself. This is for what a script cannot do: the name of a key of today, comparisons in Python.
It is measured with one small script and carried on by this host's monotonic clock.
"""

from __future__ import annotations

from datetime import UTC, datetime

from ..core.aliases import client_factory_of
from ..core.time import MEASURED_SECONDS, MeasuredClock, steady_seconds
from . import clients, entries
from .keys import QueueKeys, alive_key, hour_of, prefix
from .reading import Command, Reader, read

# By key prefix, since in tests each has a server of its own, and by what makes the clients of the alias.
_clocks: dict[tuple[str, object], MeasuredClock] = {}


def seconds(role: clients.Role = "worker", alias: str = "") -> float:
    """Return Redis's time in Unix seconds; measure it if that was over a minute ago. Raises: BrokerUnavailable.

    alias: as of `clients.client`.
    """
    clock = _clock(alias)
    shown = clock.seconds() if clock.age_seconds <= MEASURED_SECONDS else None
    return measure(role, alias) if shown is None else shown


def measure(role: clients.Role = "worker", alias: str = "") -> float:
    """Ask Redis for its time; return it in Unix seconds. Raises: BrokerUnavailable."""
    return read(role, _measuring(alias))


def reading_seconds(alias: str = "") -> Reader[float]:
    """Read what `seconds` returns."""
    clock = _clock(alias)
    if clock.age_seconds > MEASURED_SECONDS:
        return (yield from _measuring(alias))
    return clock.seconds() or 0.0


def _measuring(alias: str) -> Reader[float]:
    asked_at = steady_seconds()
    ((seconds, microseconds),) = yield [Command("time", [alive_key()], alias=alias)]
    clock = _clock(alias)
    clock.note(asked_at, steady_seconds(), entries.count(seconds) + entries.count(microseconds) / 1e6)
    return clock.seconds() or 0.0


def _clock(alias: str) -> MeasuredClock:
    return _clocks.setdefault((prefix(), client_factory_of(alias)), MeasuredClock())


# --- Which counters of finished tasks a script raises: those of the minute, of the UTC day, and the totals.

# A whole number of hours: `lua/counters.lua` finds the minute in it.
COUNTER_SECONDS = 90 * 86_400
LARGEST_COUNTER = 2**63 - 1


def now(alias: str = "") -> int:
    """Return the time by the clock of Redis, in Unix seconds; one script call gets one time."""
    return int(seconds("worker", alias))


def counters(keys: QueueKeys, now: int) -> list[str]:
    """Return the counters of the day, then the totals (processed, failed), then the hash of the hour's minutes."""
    moment = datetime.fromtimestamp(now, UTC)
    day = moment.date().isoformat()
    return [keys.processed_on(day), keys.failed_on(day), keys.processed, keys.failed, keys.minutes(hour_of(moment))]


def successes(keys: QueueKeys, now: int) -> list[str]:
    """Return those of `counters` that a task raises which has succeeded, in the same order."""
    day, _, total, _, minutes = counters(keys, now)
    return [day, total, minutes]


def limits(now: int) -> list[int]:
    """Return when the counters of the day expire, and the largest value of the total."""
    return [now + COUNTER_SECONDS, LARGEST_COUNTER]
