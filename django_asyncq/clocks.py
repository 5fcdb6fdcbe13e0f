"""The clock of a store, known without asking it each time: measured now and then, and carried on by monotonic time.

The hosts of a fleet may disagree about the time, so their wall clocks decide nothing that a row or Redis holds. Whether
a clock is one of the database or of Redis, and how it is asked, is not known here.
Source: Cristian, Probabilistic clock synchronization (the middle of the round trip).
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

# How old a measurement may be before the store is asked again. A quartz drifts by less than 10 ms in that time.
MEASURED_SECONDS = 60.0


def steady_seconds() -> float:
    """Return monotonic seconds that also pass while the machine is suspended, where the system has such a clock."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


class Measurement(NamedTuple):
    """One measurement. base: what the clock showed at steady second 0, in Unix seconds. at: in steady seconds."""

    base: float
    at: float


class MeasuredClock:
    """A clock that was measured. Safe to use from any thread: a measurement is replaced as a whole."""

    def __init__(self) -> None:
        self._measurement: Measurement | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it was ever measured."""
        return self._measurement is not None

    @property
    def age_seconds(self) -> float:
        """How long ago it was measured; infinite for never."""
        found = self._measurement
        return math.inf if found is None else steady_seconds() - found.at

    def note(self, asked_at: float, answered_at: float, shown: float) -> None:
        """Note a measurement. asked_at, answered_at: steady seconds around the question; shown: Unix seconds.

        The store read its clock somewhere within the round trip. An earlier measurement that agrees with that is kept,
        so that the time of this process does not jump back and forth by fractions of a round trip.
        """
        base, error = shown - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2
        found = self._measurement
        if found is not None and abs(found.base - base) <= error:
            base = found.base
        self._measurement = Measurement(base, answered_at)

    def seconds(self) -> float | None:
        """Return what the clock shows now, in Unix seconds; None when it was never measured."""
        found = self._measurement
        return None if found is None else found.base + steady_seconds()
