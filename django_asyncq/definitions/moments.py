"""Which moments a task or a schedule may have: those that every database, driver and time zone can carry.

PostgreSQL stores later ones than Python can read, MySQL has none before the year 1000, and SQLite compares texts. A row
with a moment outside can be written and never read again, so it is refused before anything is written.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings

from ..exceptions import InvalidOption

# No wall clock is more than a day from UTC, so between these two every zone has a wall time in the years 1000 to 9999.
EARLIEST_MOMENT, LATEST_MOMENT = datetime(1000, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)
ALLOWED = "give one between 1000-01-03 and 9999-12-29 (UTC)"


def checked_moment(name: str, moment: Any) -> datetime:
    """Return a moment in UTC; a naive one, which projects without time zones use, unchanged.

    name: what the moment is, for the error. Raises: InvalidOption when it is no datetime, when its time zone cannot be
    used, or when it is outside the calendar that all databases have.
    """
    if not isinstance(moment, datetime):
        raise InvalidOption(f"{name} is a {type(moment).__qualname__}: give a datetime")
    try:
        offset = moment.utcoffset()
        # By hand: `astimezone` also calls the zone's own code, and refuses moments close to the ends.
        in_utc = moment.replace(tzinfo=UTC) - (offset or timedelta())
    except OverflowError as error:
        raise InvalidOption(f"{name} is outside the calendar: {ALLOWED}") from error
    except Exception as error:
        raise InvalidOption(f"{name} has a time zone that cannot be used: {error!r}") from error
    if not EARLIEST_MOMENT <= in_utc <= LATEST_MOMENT:
        raise InvalidOption(f"{name} is outside the calendar: {ALLOWED}")
    return in_utc if offset is not None else moment


def checked_aware(name: str, moment: datetime) -> datetime:
    """Do what `checked_moment` does, and refuse a naive moment where the project uses time zones."""
    if settings.USE_TZ and moment.utcoffset() is None:
        raise InvalidOption(f"{name} has no time zone: give an aware datetime, such as timezone.now() plus a timedelta")
    return checked_moment(name, moment)


def moment_after(name: str, now: datetime, delay: Any) -> datetime:
    """Return the moment that is `delay` after `now`; `now` for a negative delay.

    delay: seconds or a timedelta. Raises: InvalidOption when it is neither, not a number, or too long.
    """
    if isinstance(delay, bool) or not isinstance(delay, int | float | timedelta):
        raise InvalidOption(f"{name} is a {type(delay).__qualname__}: give seconds or a timedelta")
    try:
        wait = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        moment = now + max(wait, timedelta())
    except (OverflowError, ValueError) as error:
        raise InvalidOption(f"{name} of {delay!r} is no time to wait: {error}") from error
    return checked_moment(name, moment)


def in_utc(moment: datetime) -> datetime:
    """Convert an aware moment to UTC; one outside the calendar becomes its first or last moment.

    Raises: InvalidOption when it is naive.
    """
    if moment.utcoffset() is None:
        raise InvalidOption(f"the moment {moment} has no time zone: give an aware datetime, such as timezone.now()")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return (datetime.min if moment.year == 1 else datetime.max).replace(tzinfo=UTC)
