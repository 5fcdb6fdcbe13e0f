"""Compute when a schedule fires: cron expressions and intervals, time zones, daylight-saving changes. Reads no rows.

All moments that go in are aware; moments that come out are in UTC. `CronExpression` reads the expressions, and
`cronsim` walks the calendar, in wall times without a zone. Wall time is converted to UTC here, by two rules (those of
Debian's cron):

- An expression with fixed times, in which neither minute nor hour begins with `*`, fires once for every wall time it
  names. A time that the clocks skip fires at the moment of the change; of a time that occurs twice, the first counts.
- Any other expression follows the wall clock: it fires whenever the clock shows a time it names. So it does not fire at
  a time that is skipped, and fires twice at a time that occurs twice.

cronsim's own steps through a change of the clocks are not used: they go from full hour to full hour, so they are wrong
where the clocks move by half an hour or at a quarter to. Measured with 2.8: `35 * * * *` loses 02:35 in
Australia/Lord_Howe on 2026-10-04, and `*/15 3 * * *` returns to 03:00 for ever in Pacific/Chatham on 2026-04-05.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from ..exceptions import InvalidOption, InvalidTiming
from .time import LATEST_MOMENT, checked_moment, in_utc

# --- Read a cron expression, refuse one that would not do what it says, and say in words when it fires.
#
# `cronsim` parses it. What it accepts although nobody can mean it is refused here: a step that never takes a second
# value, and days that do not exist.

# The limit of the field of `Schedule`.
MAX_EXPRESSION_LENGTH = 200

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class CronField(NamedTuple):
    """A field of an expression. size: how many different values it has. attribute: its values in `CronSim`."""

    name: str
    allowed: str
    size: int
    attribute: str


CRON_FIELDS = [
    CronField("minute", "0 to 59", 60, "minutes"),
    CronField("hour", "0 to 23", 24, "hours"),
    CronField("day of month", "1 to 31, L (the last day), LW (the last weekday)", 31, "days"),
    CronField("month", "1 to 12, JAN to DEC", 12, "months"),
    CronField(
        "day of week",
        "0 to 7 (0 and 7: Sunday), SUN to SAT, 5L (the last Friday), 1#2 (the second Monday)",
        7,
        "weekdays",
    ),
]
FOREIGN_TO_CRON = re.compile(r"[^A-Za-z0-9*,/#@ -]")
ANY_DAY = datetime(2000, 1, 1)


def _wrong_cron(expression: str, trouble: str) -> InvalidTiming:
    return InvalidTiming(f"cron expression {expression!r}: {trouble}", field="cron")


@lru_cache(maxsize=1024)
def read_expression(expression: str) -> str:
    """Return the expression as five fields. Raises: InvalidTiming, naming the field and what is allowed there."""
    if not isinstance(expression, str) or len(expression) > MAX_EXPRESSION_LENGTH:
        allowed = f"at most {MAX_EXPRESSION_LENGTH} characters of text"
        raise InvalidTiming(f"the cron expression is wrong: give {allowed}, such as '30 2 * * *'", field="cron")
    if foreign := FOREIGN_TO_CRON.search(expression):
        allowed = "letters, digits, spaces and * , - / # (for ? write *)"
        raise _wrong_cron(expression, f"{foreign[0]!r} has no meaning; allowed are {allowed}")
    fields = expression.split()
    if fields and fields[0].startswith("@"):
        if len(fields) > 1 or fields[0].lower() not in ALIASES:
            known = ", ".join(ALIASES)
            trouble = f"unknown name; the known names are {known}"
            raise _wrong_cron(expression, f"{trouble}. For 'every …' give an interval instead")
        return ALIASES[fields[0].lower()]
    if len(fields) != len(CRON_FIELDS):
        names = ", ".join(field.name for field in CRON_FIELDS)
        trouble = f"{len(fields)} fields instead of five; give {names}, such as '30 2 * * *'"
        raise _wrong_cron(expression, f"{trouble}. Cron has no field for seconds: give an interval instead")
    for number, field in enumerate(CRON_FIELDS):
        try:
            _values(number, fields[number])
        except CronSimError as error:
            forms = "* for every one, lists (1,2), ranges (1-5, not 5-1), steps (*/5)"
            trouble = f"{field.name} {fields[number]!r} is wrong; allowed are {field.allowed}; {forms}"
            raise _wrong_cron(expression, trouble) from error
        for term in fields[number].split(","):
            if trouble := _step_trouble(number, term):
                raise _wrong_cron(expression, f"{field.name} {fields[number]!r} is wrong: {trouble}")
    _check_fires(" ".join(fields))
    return " ".join(fields)


def _values(number: int, field: str) -> set[int]:
    """Return the values that a field names. Raises: CronSimError."""
    alone = ["*"] * number + [field] + ["*"] * (len(CRON_FIELDS) - 1 - number)
    found: set[int] = getattr(CronSim(" ".join(alone), ANY_DAY), CRON_FIELDS[number].attribute)
    return found


def _step_trouble(number: int, term: str) -> str:
    """Say why the step in a part of a field would not do what it says; "" when it would.

    A step as long as the field, such as `*/60` or `0-59/60`, does: it takes the same value every time.
    """
    base, _, step_text = term.partition("/")
    name, _, size, _ = CRON_FIELDS[number]
    step = int(step_text or 1)
    if base.upper() in ("L", "LW"):
        return f"a step has no meaning after {base}; remove it" if step_text else ""
    if step > size:
        length = "7 days" if name == "day of week" else f"{size} values"
        return f"the step {step} is longer than the field, which has {length}; {_step_remedy(number)}"
    if not step_text or base == "*" or ("-" not in base and step in (1, size)):
        return ""
    # Without an end, the range goes to the end of the field. cronsim reads 5-5/1 as 5/1, too.
    covered = len(_values(number, base if "-" in base else f"{base}/1"))
    if covered <= step and covered < size:
        return f"the step {step} takes only the first value of its range; {_step_remedy(number)}"
    return ""


def _step_remedy(number: int) -> str:
    """Say what to give instead. Only minutes and hours have intervals."""
    return "give a shorter one, or no step" + ("" if number > 1 else ", or an interval instead of a cron expression")


def _check_fires(expression: str) -> None:
    """Refuse an expression without an occurrence in 50 years.

    The longest time between two occurrences is 40 years, for a weekday on 29 February.
    """
    cause: CronSimError | None = None
    try:
        fires = next(CronSim(expression, ANY_DAY), None) is not None
    except CronSimError as error:
        fires, cause = False, error
    if not fires:
        trouble = "never fires: no date has such a day of month, month and day of week"
        raise _wrong_cron(expression, f"{trouble}; give days that exist (L is the last of a month)") from cause


def follows_wall_clock(expression: str) -> bool:
    """Return whether an expression fires whenever the clock shows its times. expression: as five fields."""
    minute, hour, *_ = expression.split()
    return minute.startswith("*") or hour.startswith("*")


def has_either_day(expression: str) -> bool:
    """Return whether an expression fires on days that match one of the two fields for days, as in Debian's cron.

    It does when both are given and neither begins with `*`; otherwise both must match. expression: as five fields.
    """
    _, _, day, _, weekday = expression.split()
    return not day.startswith("*") and not weekday.startswith("*")


def in_words(expression: str) -> str:
    """Describe in English when an expression fires. expression: as five fields."""
    minute, hour, day, month, weekday = expression.split()
    if not has_either_day(expression):
        return _explained(expression)
    if len(_values(2, day)) == 31 or {each % 7 for each in _weekday_numbers(weekday)} == set(range(7)):
        # One of the two matches every day.
        return _explained(f"{minute} {hour} * {month} *")
    # cronsim says "on the 13th day of month and on Friday", which is understood as a Friday the 13th.
    on_weekday = _explained(f"0 0 * * {weekday}").removeprefix("At 00:00 ")
    return _explained(expression).replace(f" and {on_weekday}", f" or {on_weekday}")


def _weekday_numbers(weekday: str) -> list[int]:
    """Return the days of the week that a field names in every week: not `5L`, not `1#2`."""
    return [each for each in _values(4, weekday) if isinstance(each, int)]


def _explained(expression: str) -> str:
    return CronSim(expression, ANY_DAY).explain()


SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
# Changes of the clocks lie 7 days apart or more, in every zone from 1970 to 2087 (tzdata 2025b).
CHANGE_PROBE = timedelta(days=3)
# No wall clock is more than a day from UTC, so between these two the calendar has every wall time.
EARLIEST, LATEST = datetime(1, 1, 3, tzinfo=UTC), LATEST_MOMENT

# The limits of the fields of `Schedule`.
MAX_ZONE_LENGTH = 64
MAX_INTERVAL_SECONDS = 2**31 - 1

ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*", re.ASCII)
# `right` counts leap seconds; `localtime` and `posixrules` are a different zone on every host.
NO_ZONE = re.compile(r"(right|posix)/.*|localtime|posixrules")


class Timing(ABC):
    """The times at which a schedule fires. starts_at, ends_at: the first and last possible moment; None: no limit."""

    __slots__ = ()
    starts_at: datetime | None
    ends_at: datetime | None

    @abstractmethod
    def occurrences(self, moment: datetime) -> Iterator[datetime]:
        """Yield the occurrences later than `moment`, ascending, in UTC, up to the end of the calendar in the year 9999.

        Raises: InvalidOption when `moment` is naive.
        """

    @abstractmethod
    def least_step(self) -> timedelta:
        """Return the shortest possible time between two occurrences."""

    def after(self, moment: datetime) -> datetime | None:
        """Return the first occurrence later than `moment`, in UTC; None when there is none.

        Raises: InvalidOption when `moment` is naive.
        """
        return next(self.occurrences(moment), None)

    def latest(self, since: datetime, until: datetime, limit: int) -> list[datetime]:
        """Return the last occurrences with `since` < occurrence <= `until`, at most `limit`, ascending, in UTC.

        The result is the end of the list of all occurrences in that time. The search begins at moments further and
        further before `until`, and closer again where occurrences are dense, so a long time costs little.
        Raises: InvalidOption when a moment is naive.
        """
        since, end = _limits(since, self.starts_at, self.ends_at)
        until = min(in_utc(until), end)
        whole = until - since
        if limit < 1 or whole <= timedelta():
            return []
        limit = min(limit, whole // self.least_step() + 1)
        # A shorter span never has as many.
        span = min(self.least_step() * limit, whole)
        too_short, too_long = timedelta(), timedelta()
        while True:
            following = takewhile(lambda occurrence: occurrence <= until, self.occurrences(until - span))
            found = list(islice(following, 8 * limit))
            if len(found) == 8 * limit:
                too_long = span
            elif len(found) >= limit or span == whole:
                return found[-limit:]
            else:
                too_short = span
            span = (too_short + too_long) / 2 if too_long else min(span * 8, whole)


@dataclass(frozen=True, slots=True)
class Cron(Timing):
    """A cron expression in a time zone.

    expression: minute, hour, day of month, month and day of week, or a name such as `@daily`. zone: an IANA name.
    Raises: InvalidTiming when either is not valid, when the expression never fires, or when the bounds are wrong.
    """

    expression: str
    zone: str
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def __post_init__(self) -> None:
        read_expression(self.expression)
        read_zone(self.zone)
        _check_bounds(self.starts_at, self.ends_at)

    def occurrences(self, moment: datetime) -> Iterator[datetime]:
        """See `Timing`. An occurrence is a full minute; the module docstring explains changes of the clocks."""
        begin, end = _limits(moment, self.starts_at, self.ends_at)
        expression = read_expression(self.expression)
        walk = _wall_clock_occurrences if follows_wall_clock(expression) else _fixed_time_occurrences
        try:
            yield from takewhile(
                lambda occurrence: occurrence <= end,
                walk(expression, read_zone(self.zone), begin.replace(microsecond=0)),
            )
        except OverflowError:
            return

    def least_step(self) -> timedelta:
        """See `Timing`."""
        return MINUTE


@dataclass(frozen=True, slots=True)
class Interval(Timing):
    """An occurrence every `seconds` seconds, counted from `anchor`; changes of the clocks have no effect.

    The first is at `anchor` if `starts_at` is given, otherwise one interval later.
    Raises: InvalidTiming when `seconds` is not a whole number in range, or a moment is not valid.
    """

    seconds: int
    anchor: datetime
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def __post_init__(self) -> None:
        if type(self.seconds) is not int or not 1 <= self.seconds <= MAX_INTERVAL_SECONDS:
            allowed = f"whole seconds from 1 to {MAX_INTERVAL_SECONDS}"
            raise InvalidTiming(f"the interval is wrong: give {allowed}", field="interval_seconds")
        _check_aware("anchor", self.anchor, "starts_at")
        _check_bounds(self.starts_at, self.ends_at)

    def occurrences(self, moment: datetime) -> Iterator[datetime]:
        """See `Timing`."""
        begin, end = _limits(moment, self.starts_at, self.ends_at)
        step, anchor = self.least_step(), in_utc(self.anchor)
        number = max((begin - anchor) // step + 1, 1 if self.starts_at is None else 0)
        try:
            while (occurrence := anchor + number * step) <= end:
                yield occurrence
                number += 1
        except OverflowError:
            return

    def least_step(self) -> timedelta:
        """See `Timing`."""
        return timedelta(seconds=self.seconds)


class DstKind(enum.Enum):
    """What a change of the clocks means for an occurrence."""

    # Fixed times: the wall times do not exist on that day; the occurrence replaces them, right after the gap.
    GAP = "gap"
    # Wall clock: wall times since the occurrence before were skipped and had no occurrence.
    SKIPPED = "skipped"
    # Fixed times: the wall time occurs twice; the only occurrence is at the first.
    ONCE = "once"
    # Wall clock: the wall time occurs twice, with an occurrence each; this is the first or the second.
    FIRST = "first"
    SECOND = "second"


class DstNote(NamedTuple):
    """A note about an occurrence near a change of the clocks.

    walls: the naive wall times it is about: for GAP and SKIPPED those that do not exist, ascending; otherwise that of
    the occurrence.
    """

    kind: DstKind
    walls: tuple[datetime, ...]


class Upcoming(NamedTuple):
    """An occurrence in the future.

    occurrence: in UTC. local: the same moment in the schedule's zone. note: None unless the clocks change.
    """

    occurrence: datetime
    local: datetime
    note: DstNote | None


def preview(timing: Timing, now: datetime, count: int = 10, *, zone: str = "UTC") -> list[Upcoming]:
    """Return the first `count` occurrences after `now`, to show to people.

    zone: in which to show the occurrences of an interval; a cron expression has its own. Intervals have no notes,
    because they do not follow a clock. Raises: InvalidTiming when `zone` is unknown, InvalidOption when `now` is naive.
    """
    shown_zone = read_zone(timing.zone if isinstance(timing, Cron) else zone)
    before = in_utc(now)
    upcoming = []
    for occurrence in islice(timing.occurrences(now), count):
        note = _note(timing, shown_zone, before, occurrence) if isinstance(timing, Cron) else None
        upcoming.append(Upcoming(occurrence, occurrence.astimezone(shown_zone), note))
        before = occurrence
    return upcoming


def describe(timing: Timing) -> str:
    """Describe in English when the timing fires, without zone and limits."""
    if isinstance(timing, Cron):
        return in_words(read_expression(timing.expression))
    rest, words = timing.least_step() // SECOND, []
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        number, rest = divmod(rest, size)
        if number:
            words.append(f"{number} {name}" + ("s" if number > 1 else ""))
    if len(words) == 1:
        words[0] = words[0].removeprefix("1 ")
    return "Every " + " ".join(words)


def fires_on_either_day(timing: Timing) -> bool:
    """Return whether it fires on days that match the day of month or the day of week, not only on those of both."""
    return isinstance(timing, Cron) and has_either_day(read_expression(timing.expression))


def _limits(moment: datetime, starts_at: datetime | None, ends_at: datetime | None) -> tuple[datetime, datetime]:
    """Return the moment after which occurrences may come, and the last moment at which one may."""
    begin, end = max(in_utc(moment), EARLIEST), LATEST
    if starts_at is not None:
        begin = max(begin, max(in_utc(starts_at), EARLIEST) - timedelta.resolution)
    if ends_at is not None:
        end = min(in_utc(ends_at), LATEST)
    return begin, end


def _check_aware(name: str, moment: datetime, field: str) -> None:
    try:
        is_naive = checked_moment(name, moment).utcoffset() is None
    except InvalidOption as error:
        raise InvalidTiming(str(error), field=field) from error
    if is_naive:
        raise InvalidTiming(f"{name} is wrong: give a datetime with a time zone", field=field)


def _check_bounds(starts_at: datetime | None, ends_at: datetime | None) -> None:
    for name, moment in (("starts_at", starts_at), ("ends_at", ends_at)):
        if moment is not None:
            _check_aware(name, moment, name)
    # In UTC, because Python compares wall times when both moments have the same zone.
    if starts_at is not None and ends_at is not None and in_utc(ends_at) < in_utc(starts_at):
        raise InvalidTiming(f"ends_at {ends_at} is before starts_at {starts_at}: give a later one", field="ends_at")


@lru_cache(maxsize=1024)
def read_zone(name: str) -> tzinfo:
    """Return the zone of an IANA name. Raises: InvalidTiming."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ZONE_LENGTH:
        allowed = f"a name of 1 to {MAX_ZONE_LENGTH} characters"
        raise InvalidTiming(f"the time zone is wrong: give {allowed}, such as Europe/Berlin", field="zone")
    if name == "UTC":
        return UTC  # also on a host without zone data
    try:
        if not ZONE_NAME.fullmatch(name) or NO_ZONE.fullmatch(name):
            raise ValueError(name)
        return ZoneInfo(name)
    # OSError: a folder among the zones has this name; ValueError: another kind of file has it.
    except (KeyError, ValueError, OSError) as error:
        raise InvalidTiming(
            f"time zone {name!r} is not known here: give a name of the IANA list, such as Europe/Berlin; "
            f"if the host has no zone data at all, install the package tzdata",
            field="zone",
        ) from error


def _wall(zone: tzinfo, moment: datetime) -> datetime:
    """Return what the clock shows, without a zone."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def _offset(zone: tzinfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _first_change(zone: tzinfo, begin: datetime, end: datetime) -> datetime | None:
    """Return the first moment after `begin` and up to `end` at which the clocks change; None when they do not.

    begin, end: full seconds. Probes every third day between them, which takes 0.3 ms for 10 years.
    """
    offset = _offset(zone, begin)
    while begin < end:
        probe = min(begin + CHANGE_PROBE, end)
        if _offset(zone, probe) == offset:
            begin = probe
            continue
        while probe - begin > SECOND:
            middle = begin + (probe - begin) // SECOND // 2 * SECOND
            begin, probe = (middle, probe) if _offset(zone, middle) == offset else (begin, middle)
        return probe
    return None


def _wall_clock_occurrences(expression: str, zone: tzinfo, moment: datetime) -> Iterator[datetime]:
    """Yield every moment after `moment` at which the clock shows a time of the expression.

    Walks from one change of the clocks to the next; between two, wall time and UTC differ by a fixed offset.
    """
    change: datetime | None = moment + SECOND
    while change is not None:
        checked, change = change, None
        offset = _offset(zone, checked)
        for wall in CronSim(expression, _wall(zone, checked) - SECOND):
            occurrence = wall.replace(tzinfo=UTC) - offset
            if change := _first_change(zone, checked, occurrence):
                break
            yield occurrence
            checked = occurrence


def _fixed_time_occurrences(expression: str, zone: tzinfo, moment: datetime) -> Iterator[datetime]:
    """Yield the moments after `moment` for the wall times of the expression, each wall time once."""
    for wall in CronSim(expression, _wall(zone, moment)):
        occurrence = wall.replace(tzinfo=zone).astimezone(UTC)
        if _wall(zone, occurrence) != wall:
            # The clocks skip this time. With fold=1 the offset after the change applies: a moment before the change.
            before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
            occurrence = _first_change(zone, before, occurrence) or occurrence
        # One that is not later is in the first pass of a repeated hour, or in a gap that had its occurrence.
        if occurrence > moment:
            yield occurrence
            moment = occurrence


def _skipped_walls(expression: str, zone: tzinfo, moment: datetime) -> tuple[datetime, ...]:
    """Return the wall times of the expression that the clocks skip at `moment`."""
    last, first = _wall(zone, moment - SECOND), _wall(zone, moment)
    return tuple(takewhile(lambda wall: wall < first, CronSim(expression, last)))


def _note(timing: Cron, zone: tzinfo, before: datetime, occurrence: datetime) -> DstNote | None:
    """Return the note about an occurrence. before: the previous occurrence, or where the preview begins."""
    expression = read_expression(timing.expression)
    local = occurrence.astimezone(zone)
    is_repeated = local.replace(fold=1 - local.fold).utcoffset() != local.utcoffset()
    if not follows_wall_clock(expression):
        if walls := _skipped_walls(expression, zone, occurrence):
            return DstNote(DstKind.GAP, walls)
        return DstNote(DstKind.ONCE, (_wall(zone, occurrence),)) if is_repeated else None
    walls = ()
    change: datetime | None = _limits(before, timing.starts_at, None)[0].replace(microsecond=0)
    while change is not None and (change := _first_change(zone, change, occurrence)):
        walls += _skipped_walls(expression, zone, change)
    if walls:
        return DstNote(DstKind.SKIPPED, walls)
    return DstNote(DstKind.SECOND if local.fold else DstKind.FIRST, (_wall(zone, occurrence),)) if is_repeated else None
