"""Write numbers and times as a message has them: in English, for people and for filters of mail."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from django.utils import timezone

# The largest unit first; a unit with the next smaller one says enough.
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def span(seconds: float) -> str:
    """Return a duration such as "45 s", "14 min" or "3 h 5 min"; from ten minutes on without seconds."""
    left = max(round(seconds), 0)
    for (size, unit), (small, small_unit) in pairwise(UNITS):
        if left >= size:
            whole, rest = divmod(left, size)
            part = rest // small
            is_fine = part and (size > 60 or whole < 10)
            return f"{whole} {unit} {part} {small_unit}" if is_fine else f"{whole} {unit}"
    return f"{left} s"


def percent(ratio: float) -> str:
    """Return a ratio such as "41 %"; never "0 %" for more than nothing."""
    found = ratio * 100
    return f"{found:.0f} %" if found >= 1 or not found else f"{found:.2g} %"


def moment(at: datetime) -> str:
    """Return a time in UTC, such as "2026-11-27 12:03:10 UTC"."""
    return f"{utc(at):%Y-%m-%d %H:%M:%S} UTC"


def utc(at: datetime) -> datetime:
    """Return a time as an aware one in UTC. Without USE_TZ, times of rows are in the project's zone."""
    return (timezone.make_aware(at) if timezone.is_naive(at) else at).astimezone(UTC)
