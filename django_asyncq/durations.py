"""What a duration is, everywhere in this package: seconds as a number, or a `timedelta`. Knows no settings.

Options, settings and return values that say how long something takes accept both; the package keeps seconds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

Duration = float | timedelta
"""Seconds, or a timedelta."""

# The current time minus this is still a year that a datetime can hold.
LONGEST = timedelta(days=36_525)
MORE_THAN_ZERO = "seconds or a timedelta, more than 0 and at most 100 years"
AT_LEAST_ZERO = "seconds or a timedelta, from 0 to 100 years"


def seconds_of(value: Any) -> Any:
    """Return a timedelta as seconds, an int where they are whole; return any other value unchanged."""
    if not isinstance(value, timedelta):
        return value
    seconds = value.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds


def is_duration(value: object, *, or_zero: bool = False) -> bool:
    """Return whether a value is a duration of more than 0 and at most 100 years. or_zero: whether 0 is one too."""
    seconds = seconds_of(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    return 0 < seconds <= LONGEST.total_seconds() or (or_zero and seconds == 0)
