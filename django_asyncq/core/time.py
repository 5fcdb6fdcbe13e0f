"""Durations everywhere in this package: seconds as a number, or a `timedelta`. Knows no settings.

Options, settings and return values that say how long something takes accept both; the package keeps seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.conf import settings
from django.utils import timezone

from ..exceptions import InvalidOption

Duration = float | timedelta
"""Seconds, or a timedelta."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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


# --- The clock of a store, known without asking it each time: measured now and then, and carried on by monotonic time.
#
# The hosts of a fleet may disagree about the time, so their wall clocks decide nothing that a row or Redis holds.
# Whether a clock is one of the database or of Redis, and how it is asked, is not known here. Source: Cristian,
# Probabilistic clock synchronization (the middle of the round trip).

# How old a measurement may be before the store is asked again. A quartz drifts by less than 10 ms in that time.
MEASURED_SECONDS = 60.0


# None on macOS and Windows.
BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


# Returns monotonic seconds that also pass while the machine is suspended, where the system has such a clock.
steady_seconds: Callable[[], float] = time.monotonic if BOOT_CLOCK is None else partial(time.clock_gettime, BOOT_CLOCK)


class Measurement(NamedTuple):
    """One measurement. base: what the clock showed at steady second 0, in Unix seconds. at: in steady seconds."""

    base: float
    at: float


class MeasuredClock:
    """A clock that was measured. Safe to use from any thread: a measurement is replaced as a whole.

    measurement: the last one; None before the first.
    """

    def __init__(self) -> None:
        self.measurement: Measurement | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it was ever measured."""
        return self.measurement is not None

    @property
    def age_seconds(self) -> float:
        """How long ago it was measured; infinite for never."""
        found = self.measurement
        return math.inf if found is None else steady_seconds() - found.at

    def note(self, asked_at: float, answered_at: float, shown: float) -> None:
        """Note a measurement. asked_at, answered_at: steady seconds around the question; shown: Unix seconds.

        The store read its clock somewhere within the round trip. An earlier measurement that agrees with that is kept,
        so that the time of this process does not jump back and forth by fractions of a round trip.
        """
        base, error = shown - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2
        found = self.measurement
        if found is not None and abs(found.base - base) <= error:
            base = found.base
        self.measurement = Measurement(base, answered_at)

    def seconds(self) -> float | None:
        """Return what the clock shows now, in Unix seconds; None when it was never measured."""
        found = self.measurement
        return None if found is None else found.base + steady_seconds()


# --- Which moments a task or a schedule may have: those that every database, driver and time zone can carry.
#
# PostgreSQL stores later ones than Python can read, MySQL has none before the year 1000, and SQLite compares texts.
# A row with a moment outside can be written and never read again, so it is refused before anything is written.

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


def moment_of(unix_seconds: float) -> datetime | None:
    """Return the time that another process has written; None where no datetime can hold it, for it may be anything."""
    try:
        return EPOCH + timedelta(seconds=unix_seconds) if unix_seconds > 0 else None
    except (ValueError, OverflowError):
        return None


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


# --- The times of one call: when it may begin, when it can no longer begin, when it must have finished, and its
# throttle.
#
# A duration counts from the row's moment, which only the database knows: the INSERT adds it to `enqueued_at`. Until
# then the row in memory holds what this process expects.


class Delay(NamedTuple):
    """A time that counts from the moment of the statement that writes it. latest: it is no later than that."""

    wait: timedelta
    latest: datetime | None = None

    def after(self, moment: datetime) -> datetime:
        """Return the time, when the statement's moment is known."""
        time = moment + self.wait
        return time if self.latest is None or time < self.latest else self.latest


class Times(NamedTuple):
    """The columns of one call that say when. delays: of those that count from the row's moment."""

    columns: Mapping[str, Any]
    delays: Mapping[str, Delay]


PLAIN = Times({}, {})


def has_times(task: Any) -> bool:
    """Whether a time of the rows of a task depends on when a call is made; those of the others are PLAIN."""
    return bool(task.unique) or [task.run_after, task.expires, task.deadline] != [None, None, None]


def times_of(task: Any, clock: Callable[[], datetime]) -> Times:
    """Return the times of a call of a task that `has_times`, and is enqueued now.

    `expires_at` is also the deadline, if that is earlier. clock: returns the database's time, as far as it is known
    here; asked only where a time is checked, or expected. The duration of `expires` counts from `run_after`, where that
    is later than now. Raises: InvalidOption for a limit that is over already, or before `run_after`.
    """
    columns: dict[str, Any] = {}
    delays: dict[str, Delay] = {}
    is_throttled = bool(task.unique) and not isinstance(task.unique_until, str)
    if task.unique and task.unique_until == "start":
        columns["unique_until_start"] = True
    if isinstance(task.run_after, datetime):
        columns["run_after"] = checked_moment("run_after", task.run_after)
    is_delayed = isinstance(task.run_after, timedelta)
    if not (is_throttled or is_delayed or task.expires is not None or task.deadline is not None):
        return Times(columns, delays)
    now = clock()
    begins_at = now
    if is_delayed:
        begins_at = moment_after("run_after", now, task.run_after)
        delays["run_after"] = Delay(begins_at - now)
    elif task.run_after is not None:
        begins_at = max(now, _like(now, task.run_after))
    if is_throttled:
        delays["unique_until"] = Delay(moment_after("unique_until", now, task.unique_until) - now)
    # Whether a duration of `expires` counts from the row, and not from a moment that the call has named.
    counts_from_row = is_delayed or begins_at == now
    limits: list[tuple[str, datetime, bool]] = []
    if isinstance(task.expires, datetime):
        limits.append(("expires", _like(now, checked_moment("expires", task.expires)), False))
    elif task.expires is not None:
        limits.append(("expires", moment_after("expires", begins_at, task.expires), counts_from_row))
    if isinstance(task.deadline, timedelta):
        limits.append(("deadline", moment_after("deadline", now, task.deadline), True))
    elif task.deadline is not None:
        limits.append(("deadline", _like(now, checked_moment("deadline", task.deadline)), False))
    for name, moment, is_counted in limits:
        if moment <= begins_at:
            past = "is over already" if moment <= now else "is not after its run_after, so it could never begin"
            raise InvalidOption(f"task {task.module_path}: {name}={moment.isoformat()} {past}: give a later time")
        if name == "deadline" and is_counted:
            delays["deadline"] = Delay(moment - now)
        elif name == "deadline":
            columns["deadline"] = moment
    counted = [moment - now for _, moment, is_counted in limits if is_counted]
    named = min((moment for _, moment, is_counted in limits if not is_counted), default=None)
    if counted:
        delays["expires_at"] = Delay(min(counted), named)
    elif named is not None:
        columns["expires_at"] = named
    columns |= {name: delay.after(now) for name, delay in delays.items()}
    return Times(columns, delays)


def _like(now: datetime, moment: datetime) -> datetime:
    """Return a moment with or without a time zone, as `now` has one or not."""
    if timezone.is_aware(now):
        return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    return timezone.make_naive(moment) if timezone.is_aware(moment) else moment
