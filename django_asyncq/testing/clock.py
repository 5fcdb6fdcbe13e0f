"""Move the clock by which tasks are due, in one process and for the time of a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from ..storage import database_clock


def steady_seconds() -> float:
    """Return monotonic seconds that a test can move, for the times of runs."""
    return time.monotonic() + database_clock.offset().total_seconds()


class Clock:
    """The clock of the package, as `travel` gives it."""

    def now(self) -> datetime:
        """Return the time that it shows, in the form of `timezone.now()`."""
        return database_clock.now()

    def move(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> datetime:
        """Move it on; return the time that it shows then. Negative values move it back."""
        by = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        database_clock.set_offset(database_clock.offset() + by)
        return self.now()


@contextmanager
def travel(*, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> Iterator[Clock]:
    """Move the clock of the package in the block; `with travel(hours=3) as clock: clock.move(minutes=5)`.

    It decides which tasks, retries and occurrences are due, when a `def` has passed its timeout, and what times rows
    get. `timezone.now()` is not moved. Nested blocks add up; leaving one restores the clock.
    """
    before = database_clock.offset()
    try:
        clock = Clock()
        clock.move(days=days, hours=hours, minutes=minutes, seconds=seconds)
        yield clock
    finally:
        database_clock.set_offset(before)
