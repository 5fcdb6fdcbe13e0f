"""When schedules fire, compared with a clock that is read minute by minute through every change of a dozen zones.

The expected occurrences come from the zone data of the host, so new laws change both sides. The few times written by
hand are skipped where the host has other rules, or none; then install the package tzdata.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from django_asyncq.core import timing
from django_asyncq.core.time import EARLIEST_MOMENT, LATEST_MOMENT
from django_asyncq.core.timing import Cron, DstKind, Interval, Timing, describe, preview
from django_asyncq.exceptions import InvalidOption, InvalidTiming
from django_asyncq.interop.asynq_display import spec

SECOND, MINUTE, HOUR, DAY = (timedelta(**{unit: 1}) for unit in ("seconds", "minutes", "hours", "days"))
NOW = datetime(2026, 11, 21, 15, tzinfo=UTC)

ZONES = {
    "Africa/Cairo": "forward at midnight",
    "Africa/Casablanca": "back for Ramadan",
    "America/Havana": "at midnight and at 1:00",
    "America/New_York": "at 2:00",
    "America/Sao_Paulo": "none",
    "America/St_Johns": "half an hour from UTC",
    "Antarctica/Troll": "by two hours",
    "Asia/Beirut": "at midnight, both ways",
    "Asia/Tehran": "none",
    "Australia/Lord_Howe": "by half an hour",
    "Europe/Berlin": "at 2:00 and 3:00",
    "Europe/Dublin": "winter is the exception",
    "Pacific/Chatham": "at a quarter to",
}


def load(name: str) -> ZoneInfo:
    """Return a zone, or skip the test where the host does not know it."""
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        pytest.skip(f"the host has no zone {name}: install the package tzdata")


def utc(text: str) -> datetime:
    """Return a moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def shown(zone: ZoneInfo, moment: datetime) -> datetime:
    """Return what a clock on the wall shows."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


@cache
def changes(name: str) -> list[datetime]:
    """Find every moment of 2026 and 2027 at which the clocks change; one ordinary moment where they never do."""
    zone, found = load(name), []
    hour = utc("2026-01-01")
    while hour < utc("2028-01-01"):
        if hour.astimezone(zone).utcoffset() != (hour + HOUR).astimezone(zone).utcoffset():
            minutes = (hour + number * MINUTE for number in range(1, 61))
            before = hour.astimezone(zone).utcoffset()
            found.append(next(minute for minute in minutes if minute.astimezone(zone).utcoffset() != before))
        hour += HOUR
    return found or [utc("2026-03-29T01:00")]


def numbers(field: str, first: int, last: int) -> set[int]:
    """Read one field of a cron expression: `*`, numbers, lists, ranges and steps."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        begin, _, end = (f"{first}-{last}" if span == "*" else span).partition("-")
        found.update(range(int(begin), int(end or begin) + 1, int(step or 1)))
    return found


class Clock:
    """A clock that is read minute by minute for four days around a change: cron as the tests define it."""

    def __init__(self, zone: ZoneInfo, change: datetime) -> None:
        self.begin, self.end = change - 2 * DAY, change + 2 * DAY
        self.minutes = [self.begin + number * MINUTE for number in range(4 * 24 * 60 + 1)]
        self.walls = [shown(zone, minute) for minute in self.minutes]

    def occurrences(self, expression: str) -> list[datetime]:
        """Return every occurrence after `begin` and up to `end` of an expression without days."""
        minute, hour, *days = expression.split()
        assert days == ["*", "*", "*"]
        due = {(h, m) for h in numbers(hour, 0, 23) for m in numbers(minute, 0, 59)}
        if minute.startswith("*") or hour.startswith("*"):
            seen = zip(self.minutes[1:], self.walls[1:], strict=True)
            return [moment for moment, wall in seen if (wall.hour, wall.minute) in due]
        found, furthest = [], self.walls[0]
        for moment, wall in zip(self.minutes, self.walls, strict=True):
            fires = False
            while furthest < wall:
                furthest += MINUTE
                fires = fires or (furthest.hour, furthest.minute) in due
            if fires:
                found.append(moment)
        return found


@cache
def clocks(name: str) -> list[tuple[datetime, Clock]]:
    """Return a clock for every change of the zone."""
    return [(change, Clock(load(name), change)) for change in changes(name)]


def expressions(name: str, change: datetime) -> list[str]:
    """Return expressions with fixed times before, in and after the gap or repeated time, and by the wall clock."""
    zone = load(name)
    wall, other = sorted([shown(zone, change), shown(zone, change - SECOND) + SECOND])
    moments = [wall - 90 * MINUTE, wall - MINUTE, wall, wall + MINUTE, wall + (other - wall) / 2]
    moments += [other - MINUTE, other, other + MINUTE, other + 90 * MINUTE]
    fixed = [f"{moment.minute} {moment.hour} * * *" for moment in moments]
    hours = ",".join(str((wall + number * HOUR).hour) for number in range(-1, 4))
    fixed += [f"0,10,30,50 {hours} * * *", f"0-59 {wall.hour} * * *", "0,59 0-23 * * *"]
    wild = [f"*/15 {(wall + number * HOUR).hour} * * *" for number in range(-1, 5)]
    wild += [f"{wall.minute} * * * *", f"{(other - MINUTE).minute} * * * *", "35 * * * *", "0 * * * *", "50 */2 * * *"]
    return [*fixed, *wild, "*/15 * * * *", "*/7 * * * *", "* * * * *"]


@pytest.mark.parametrize("name", ZONES)
def test_occurrences_are_those_of_a_clock_read_minute_by_minute(name: str) -> None:
    """For four days around every change no occurrence is lost, repeated, or at another time."""
    for change, clock in clocks(name):
        for expression in expressions(name, change):
            occurrences = Cron(expression, name, ends_at=clock.end).occurrences(clock.begin)
            assert list(occurrences) == clock.occurrences(expression), (expression, change)


@pytest.mark.parametrize("name", ZONES)
def test_after_is_right_from_every_minute_around_a_change(name: str) -> None:
    """The next occurrence is the same from every moment before it."""
    for change, clock in clocks(name):
        wall = shown(load(name), change - MINUTE)
        for expression in (f"30 {wall.hour} * * *", f"0,30 {(wall + HOUR).hour} * * *", "*/20 * * * *", "35 * * * *"):
            cron = Cron(expression, name)
            expected = clock.occurrences(expression)
            # This covers all seconds of the minute, because 37 and 60 have no common factor.
            moment = change - 3 * HOUR
            while moment <= change + 3 * HOUR:
                following = expected[bisect_right(expected, moment)]
                assert cron.after(moment) == following, (expression, moment)
                moment += 37 * SECOND


@pytest.mark.parametrize("name", ZONES)
def test_after_is_right_at_the_very_change(name: str) -> None:
    """A second or a microsecond before or after makes no difference."""
    for change, clock in clocks(name):
        for expression in expressions(name, change):
            occurrences = clock.occurrences(expression)
            for moment in (change - SECOND, change - timedelta.resolution, change, change + timedelta.resolution):
                following = next((occurrence for occurrence in occurrences if occurrence > moment), None)
                if following is not None:
                    assert Cron(expression, name).after(moment) == following, (expression, moment)


@pytest.mark.parametrize(
    ("name", "expression", "begin", "expected"),
    [
        # Forward at 02:00 CET, back at 03:00 CEST.
        ("Europe/Berlin", "30 1 * * *", "2026-03-28T12:00", ["03-29T00:30", "03-29T23:30"]),
        ("Europe/Berlin", "30 2 * * *", "2026-03-28T12:00", ["03-29T01:00", "03-30T00:30"]),
        ("Europe/Berlin", "0,15,30 2,3 * * *", "2026-03-28T12:00", ["03-29T01:00", "03-29T01:15", "03-29T01:30"]),
        ("Europe/Berlin", "*/30 2 * * *", "2026-03-28T12:00", ["03-30T00:00", "03-30T00:30"]),
        ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00", ["10-25T00:30", "10-26T01:30"]),
        ("Europe/Berlin", "*/30 2 * * *", "2026-10-24T12:00", ["10-25T00:00", "10-25T00:30", "10-25T01:00"]),
        ("Europe/Berlin", "0 * * * *", "2026-10-24T23:30", ["10-25T00:00", "10-25T01:00", "10-25T02:00"]),
        # Forward and back at 02:00.
        ("America/New_York", "30 2 * * *", "2026-03-07T12:00", ["03-08T07:00", "03-09T06:30"]),
        ("America/New_York", "30 1 * * *", "2026-10-31T12:00", ["11-01T05:30", "11-02T06:30"]),
        ("America/New_York", "*/30 1 * * *", "2026-10-31T12:00", ["11-01T05:00", "11-01T05:30", "11-01T06:00"]),
        # Half an hour: cronsim alone loses 02:35, 05:00 and 05:15.
        ("Australia/Lord_Howe", "10 2 * * *", "2026-10-03T12:00", ["10-03T15:30", "10-04T15:10"]),
        ("Australia/Lord_Howe", "35 * * * *", "2026-10-03T15:10", ["10-03T15:35", "10-03T16:35"]),
        ("Australia/Lord_Howe", "*/15 5 * * *", "2026-10-03T15:10", ["10-03T18:00", "10-03T18:15", "10-03T18:30"]),
        # Back at 03:45 to 02:45: cronsim alone never gets past it.
        ("Pacific/Chatham", "*/15 3 * * *", "2026-04-04T13:40", ["04-04T13:45", "04-04T14:15", "04-04T14:30"]),
        # Midnight that does not exist.
        ("Asia/Beirut", "0 0 * * *", "2026-03-28T12:00", ["03-28T22:00", "03-29T21:00"]),
        # The date of the first pass: the 24th, 23:30 comes twice.
        ("Asia/Beirut", "30 23 * * *", "2026-10-24T12:00", ["10-24T20:30", "10-25T21:30"]),
        # Two hours.
        ("Antarctica/Troll", "30 1,2 * * *", "2026-03-28T12:00", ["03-29T01:00", "03-29T23:30"]),
    ],
)
def test_well_known_changes(name: str, expression: str, begin: str, expected: list[str]) -> None:
    """The rules, applied by hand."""
    laws: dict[str, float] = {"Europe/Berlin": 1, "America/New_York": -5, "Australia/Lord_Howe": 11, "Asia/Beirut": 2}
    laws |= {"Antarctica/Troll": 0, "Pacific/Chatham": 12.75}
    zone = load(name)
    offsets = {utc(f"2026-{month}-01").astimezone(zone).utcoffset() for month in ("01", "07")}
    longer = 2 if name == "Antarctica/Troll" else -0.5 if name == "Australia/Lord_Howe" else 1
    if offsets != {laws[name] * HOUR, (laws[name] + longer) * HOUR}:
        pytest.skip(f"the host's zone data have other rules for {name}")
    occurrences = islice(Cron(expression, name).occurrences(utc(begin)), len(expected))
    assert list(occurrences) == [utc(f"2026-{occurrence}") for occurrence in expected]


minutes = st.sampled_from(["*", "*/15", "0", "35", "0,30", "7-50/9"])
hours = st.sampled_from(["*", "*/3", "2", "1-4", "0,23"])
zone_names = st.sampled_from(["UTC", *ZONES])
moments = st.datetimes(datetime(2025, 12, 1), datetime(2028, 2, 1), timezones=st.just(UTC))
crons = st.builds("{} {} * * *".format, minutes, hours)
shifts = st.timedeltas(-2 * DAY, 2 * DAY)


@given(crons | st.just("0 0 * * MON"), zone_names, moments, shifts, st.integers(0, 20), st.none() | shifts)
@settings(deadline=None)
def test_latest_is_the_end_of_the_list_of_all(
    expression: str, name: str, since: datetime, span: timedelta, limit: int, start_shift: timedelta | None
) -> None:
    """The search from the end gives the same as a walk from the beginning."""
    load(name)
    starts_at = None if start_shift is None else since + start_shift
    cron, until, moment, occurrences = Cron(expression, name, starts_at), since + span, since, []
    while (occurrence := cron.after(moment)) is not None and occurrence <= until:
        assert occurrence > moment
        assert occurrence.tzinfo is UTC
        occurrences.append(moment := occurrence)
    assert cron.latest(since, until, limit) == (occurrences[-limit:] if limit else [])


@given(st.integers(30, 100_000), moments, shifts, st.none() | shifts, st.none() | shifts, shifts, st.integers(1, 20))
@settings(deadline=None)
def test_latest_of_an_interval_is_the_end_of_the_list_of_all(
    seconds: int,
    since: datetime,
    anchor_shift: timedelta,
    start_shift: timedelta | None,
    end_shift: timedelta | None,
    span: timedelta,
    limit: int,
) -> None:
    """The occurrences of an interval are whole steps from the anchor, within the limits."""
    if start_shift is not None and end_shift is not None:
        start_shift, end_shift = min(start_shift, end_shift), max(start_shift, end_shift)
    step, anchor, until = seconds * SECOND, since + anchor_shift, since + span
    starts_at = None if start_shift is None else since + start_shift
    ends_at = None if end_shift is None else since + end_shift
    occurrences, number = [], 1 if starts_at is None else 0
    while (occurrence := anchor + number * step) <= until:
        if (
            since < occurrence
            and (starts_at is None or starts_at <= occurrence)
            and (ends_at is None or occurrence <= ends_at)
        ):
            occurrences.append(occurrence)
        number += 1
    assert Interval(seconds, anchor, starts_at, ends_at).latest(since, until, limit) == occurrences[-limit:]


def test_latest_of_a_long_time_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five occurrences at the end of a year of minutes need few steps."""
    steps = []

    class Counting(CronSim):
        def __next__(self) -> datetime:
            steps.append(1)
            return super().__next__()

    monkeypatch.setattr(timing, "CronSim", Counting)
    load("Europe/Berlin")
    latest = Cron("* * * * *", "Europe/Berlin").latest(NOW - 365 * DAY, NOW, 5)
    assert latest == [NOW - number * MINUTE for number in (4, 3, 2, 1, 0)]
    assert len(steps) < 20
    steps.clear()
    assert len(Cron("30 2 * * *", "Europe/Berlin").latest(NOW - 365 * DAY, NOW, 5)) == 5
    assert len(steps) < 100
    steps.clear()
    # Every minute of January, seen from November.
    assert Cron("* * * 1 *", "UTC").latest(NOW - 365 * DAY, NOW, 2) == [
        utc("2026-01-31T23:58"),
        utc("2026-01-31T23:59"),
    ]
    assert len(steps) < 500
    ended = Interval(1, NOW - 365 * DAY, ends_at=NOW - 99 * DAY)
    assert ended.latest(NOW - 100 * DAY, NOW, 10**30)[-1:] == ended.latest(NOW - 365 * DAY, NOW, 1) == [NOW - 99 * DAY]


def test_both_limits_are_included() -> None:
    """An occurrence exactly at a limit counts."""
    cron = Cron("*/10 * * * *", "UTC", NOW + 10 * MINUTE, NOW + 30 * MINUTE)
    assert list(cron.occurrences(NOW - DAY)) == [NOW + number * MINUTE for number in (10, 20, 30)]
    assert cron.after(NOW + 29 * MINUTE) == NOW + 30 * MINUTE
    assert cron.after(NOW + 30 * MINUTE) is None
    assert cron.latest(NOW - DAY, NOW + DAY, 2) == [NOW + 20 * MINUTE, NOW + 30 * MINUTE]
    late = Cron("*/10 * * * *", "UTC", NOW + 10 * MINUTE + timedelta.resolution)
    assert late.after(NOW) == NOW + 20 * MINUTE


def test_takes_moments_of_any_zone() -> None:
    """Moments may be given in any zone. Occurrences are in UTC."""
    moment = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    for one in (Cron("0 * * * *", "UTC"), Interval(3600, moment)):
        assert (following := one.after(moment)) == NOW + HOUR
        assert following is not None
        assert following.tzinfo is UTC


def test_an_interval_starts_at_starts_at_or_one_step_after_its_anchor() -> None:
    """With starts_at the anchor itself is an occurrence. Without it the first is one step later."""
    assert Interval(60, NOW).after(NOW - DAY) == NOW + MINUTE
    assert Interval(60, NOW, starts_at=NOW).after(NOW - DAY) == NOW
    assert Interval(60, NOW, starts_at=NOW).after(NOW) == NOW + MINUTE
    assert Interval(60, NOW, starts_at=NOW + SECOND).after(NOW - DAY) == NOW + MINUTE
    assert Interval(60, NOW, ends_at=NOW + 2 * MINUTE).after(NOW + MINUTE) == NOW + 2 * MINUTE
    assert Interval(60, NOW, ends_at=NOW + 2 * MINUTE).after(NOW + 2 * MINUTE) is None


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("61 * * * *", "minute '61' is wrong; allowed are 0 to 59"),
        ("5-1 * * * *", "minute '5-1' is wrong"),
        ("*/0 * * * *", "minute '\\*/0' is wrong"),
        ("0 24 * * *", "hour '24' is wrong; allowed are 0 to 23"),
        ("0 0 0 * *", "day of month '0' is wrong; allowed are 1 to 31"),
        ("0 0 1 13 *", "month '13' is wrong; allowed are 1 to 12"),
        ("0 0 * * 8", "day of week '8' is wrong; allowed are 0 to 7"),
        ("0 0 * * MON#6", "day of week 'MON#6' is wrong"),
        ("* * * *", "4 fields instead of five"),
        ("* * * * * *", "6 fields instead of five.*give an interval instead"),
        ("", "0 fields instead of five"),
        ("@reboot", "unknown name; the known names are @yearly"),
        ("@every 5m", "give an interval"),
        ("? * * * *", "'\\?' has no meaning; allowed are"),
        ("*\n* * * *", "has no meaning"),
        ("٣ * * * *", "has no meaning"),
        ("* " * 101, "at most 200 characters"),
        (
            "*/90 * * * *",
            "minute '\\*/90' is wrong: the step 90 is longer than the field, which has 60 values",
        ),
        ("*/61 * * * *", "the step 61 is longer than the field"),
        ("0,*/70 * * * *", "the step 70 is longer than the field"),
        ("5/90 * * * *", "the step 90 is longer than the field"),
        ("0 */25 * * *", "hour '\\*/25' is wrong: the step 25 is longer than the field, which has 24 values.*interval"),
        ("0 0 */32 * *", "day of month '\\*/32' is wrong: .*31 values; give a shorter one, or no step$"),
        ("0 0 1 */13 *", "month '\\*/13' is wrong: .*12 values"),
        ("0 0 * * */8", "day of week '\\*/8' is wrong: .*7 days"),
        (f"*/{'9' * 150} * * * *", "longer than the field"),
        ("10-20/30 * * * *", "the step 30 takes only the first value of its range"),
        ("10-20/11 * * * *", "the step 11 takes only the first value of its range"),
        ("5-5/1 * * * *", "the step 1 takes only the first value of its range"),
        ("10-20/60 * * * *", "the step 60 takes only the first value of its range"),
        ("50/30 * * * *", "the step 30 takes only the first value of its range"),
        ("0 0 1 JAN-MAR/3 *", "the step 3 takes only the first value of its range"),
        ("0 0 * * MON-FRI/5", "the step 5 takes only the first value of its range"),
        ("0 0 * * 6/2", "the step 2 takes only the first value of its range"),
        ("0 0 L/5 * *", "a step has no meaning after L"),
        ("0 0 lw/2 * *", "a step has no meaning after lw"),
        ("0 0 31 2 *", "never fires.*give days that exist"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4,6,9,11 *", "never fires"),
        ("0 0 30,31 2 */2", "never fires"),
        # The first or the twenty-first of a month, and the last Monday of it.
        ("* * */20 * 1L", "never fires"),
        (None, "characters of text"),
    ],
)
def test_refuses_expressions_and_names_the_remedy(expression: Any, says: str) -> None:
    """The message names the field that is wrong and what is allowed there."""
    with pytest.raises(InvalidTiming, match=says) as caught:
        Cron(expression, "UTC")
    assert caught.value.field == "cron"


@pytest.mark.parametrize(
    "name",
    [
        "", "Nowhere", "Europe", "europe/nowhere", "../../etc/passwd", "/etc/passwd", "Europe/../UTC", "Europe/Berlin/",
        "right/UTC", "posix/UTC", "localtime", "posixrules", "leapseconds", "tzdata.zi", "a\x00b", "\ud800", "x" * 65,
        "UTC\n", None,
    ],
)  # fmt: skip
def test_refuses_zones_and_names_the_remedy(name: Any) -> None:
    """Whatever zoneinfo raises, the error is InvalidTiming."""
    with pytest.raises(InvalidTiming, match="give a name") as caught:
        Cron("* * * * *", name)
    assert caught.value.field == "zone"


@pytest.mark.parametrize("seconds", [0, -1, 2**31, pytest.param(10**5000, id="5001 digits"), 1.5, True, None, "60"])
def test_refuses_intervals(seconds: Any) -> None:
    """Only whole seconds that a row can hold."""
    with pytest.raises(InvalidTiming, match="whole seconds from 1 to 2147483647") as caught:
        Interval(seconds, NOW)
    assert caught.value.field == "interval_seconds"


def test_refuses_naive_moments_and_an_end_before_the_start() -> None:
    """The zone of a naive moment is never guessed."""
    naive = datetime(2026, 1, 1)
    for values, field in (((naive, None), "starts_at"), ((None, naive), "ends_at"), ((NOW, NOW - SECOND), "ends_at")):
        for make in (lambda a, b: Cron("* * * * *", "UTC", a, b), lambda a, b: Interval(1, NOW, a, b)):
            with pytest.raises(InvalidTiming, match="give a") as caught:
                make(*values)
            assert caught.value.field == field
    with pytest.raises(InvalidTiming, match="anchor"):
        Interval(1, naive)
    berlin = load("Europe/Berlin")
    twice = datetime(2026, 10, 25, 2, 45, tzinfo=berlin), datetime(2026, 10, 25, 2, 15, tzinfo=berlin, fold=1)
    assert Cron("* * * * *", "UTC", *twice).after(NOW - 365 * DAY) == utc("2026-10-25T00:45")
    every: list[Timing] = [Cron("* * * * *", "UTC"), Interval(1, NOW)]
    for one in every:
        with pytest.raises(InvalidOption, match="no time zone"):
            one.after(naive)
        with pytest.raises(InvalidOption, match="no time zone"):
            one.latest(naive, NOW, 1)


@pytest.mark.parametrize(
    ("alias", "expression"),
    [
        ("@hourly", "0 * * * *"),
        ("@Daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
    ],
)
def test_aliases_stand_for_expressions(alias: str, expression: str) -> None:
    """An alias fires when its expression does."""
    named, written = Cron(alias, "UTC"), Cron(expression, "UTC")
    assert list(islice(named.occurrences(NOW), 5)) == list(islice(written.occurrences(NOW), 5))
    assert describe(named) == describe(written)


@pytest.mark.parametrize(
    ("expression", "first", "second"),
    [
        ("*/60 * * * *", "2026-11-20T17:00", "2026-11-20T18:00"),
        ("0-59/60 * * * *", "2026-11-20T17:00", "2026-11-20T18:00"),
        ("5/60 * * * *", "2026-11-20T16:05", "2026-11-20T17:05"),
        ("0 */24 * * *", "2026-11-21T00:00", "2026-11-22T00:00"),
        ("0 0 1 */12 *", "2027-01-01T00:00", "2028-01-01T00:00"),
        ("0 0 * * */7", "2026-11-22T00:00", "2026-11-29T00:00"),
        ("10-20/10 * * * *", "2026-11-20T16:10", "2026-11-20T16:20"),
    ],
)
def test_a_step_up_to_its_field_does_what_it_says(expression: str, first: str, second: str) -> None:
    """The longest takes the same value each time."""
    noted = islice(Cron(expression, "UTC").occurrences(utc("2026-11-20T16:00")), 2)
    assert list(noted) == [utc(first), utc(second)]


steps = st.builds(
    "{}/{}".format,
    st.sampled_from(["*", "0", "7", "59", "0-10", "50-59", "3-3"]),
    st.integers(1, 130),
)


@given(steps)
def test_an_accepted_step_takes_a_second_value_or_is_as_long_as_its_field(step: str) -> None:
    """The kind: no step is accepted and then without effect."""
    try:
        cron = Cron(f"{step} * * * *", "UTC")
    except InvalidTiming as error:
        assert "step" in str(error)
        assert len(numbers(step if "-" in step or "*" in step else step.replace("/", "-59/"), 0, 59)) == 1
        return
    length = int(step.partition("/")[2])
    found = list(islice(cron.occurrences(NOW), 3))
    assert {moment.minute for moment in found} != {found[0].minute} or length in (1, 60)


@pytest.mark.parametrize(
    ("expression", "words", "is_either"),
    [
        ("0 0 13 * 5", "At 00:00 on the 13th day of month or on Friday", True),
        ("0 0 1,15 * 5,6", "At 00:00 on the first and the 15th day of month or on Friday and Saturday", True),
        ("0 0 L 2 SUN", "At 00:00 on the last day of the month or on Sunday in February", True),
        ("0 0 13 * 1#2", "At 00:00 on the 13th day of month or on the second Monday of the month", True),
        ("0 0 1-31 * 5", "At 00:00 every day", True),
        ("0 0 13 * 1-7", "At 00:00 every day", True),
        ("0 0 13 3 0-6", "At 00:00 every day in March", True),
        ("0 0 */2 * 5", "At 00:00 on every second day of month if it's on Friday", False),
        ("0 0 13 * */2", "At 00:00 on the 13th day of month if it's on every second day of week", False),
        ("0 0 13 * *", "At 00:00 on the 13th day of every month", False),
    ],
)
def test_two_fields_for_days_are_described_as_what_they_do(expression: str, words: str, is_either: bool) -> None:
    """One of the two is enough, unless one begins with a star; the occurrences agree with the words."""
    cron = Cron(expression, "UTC")
    assert (describe(cron), timing.fires_on_either_day(cron)) == (words, is_either)
    _, _, day, month, weekday = expression.split()
    days = {one.date() for one in islice(cron.occurrences(NOW), 200)}
    last = max(days)
    of_day = {one.date() for one in Cron(f"0 0 {day} {month} *", "UTC").latest(NOW, utc(f"{last}T12:00"), 10_000)}
    of_week = {one.date() for one in Cron(f"0 0 * {month} {weekday}", "UTC").latest(NOW, utc(f"{last}T12:00"), 10_000)}
    assert days == (of_day | of_week if is_either else of_day & of_week)


def test_an_interval_has_no_days() -> None:
    """So it has no two fields for them."""
    assert not timing.fires_on_either_day(Interval(60, NOW))


def test_rare_expressions_fire() -> None:
    """A day of the month or of the week; 29 February on a Monday, even across the year 2100."""
    assert Cron("0 0 31 2 MON", "UTC").after(NOW) == utc("2027-02-01")
    rare = Cron("0 0 * 2 MON#5", "UTC")
    assert list(islice(rare.occurrences(NOW), 3)) == [utc("2044-02-29"), utc("2072-02-29"), utc("2112-02-29")]


def test_utc_needs_no_zone_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without zone data still has UTC. The error for another zone says what to install."""

    def without(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(timing, "ZoneInfo", without)
    timing.read_zone.cache_clear()
    assert Cron("0 16 * * *", "UTC").after(NOW) == NOW + HOUR
    with pytest.raises(InvalidTiming, match="install the package tzdata"):
        Cron("0 16 * * *", "Europe/Berlin")


alphabet = st.text("0123456789*,/-#LWMONJA@ ?é\t", max_size=40)
fields = st.text("0123456789*,/-#LWSUNMONJAN", min_size=1, max_size=9) | st.sampled_from(
    ["*", "0", "L", "LW", "5L", "1#2", "*/2", "1-5", "31", "30", "29", "2", "SUN-SAT", "L/2", "JAN-MAR/2", "9" * 30]
)
offsets = st.integers(-14 * 60, 14 * 60).map(lambda number: timezone(number * MINUTE))
any_moment = st.datetimes(timezones=st.just(UTC) | offsets)


@given(st.text() | alphabet | st.lists(fields, min_size=5, max_size=5).map(" ".join), any_moment)
@settings(max_examples=500, deadline=2000)
def test_every_text_is_an_expression_or_refused(text: str, moment: datetime) -> None:
    """No other error, at once or at the occurrences, for a moment however early or late."""
    load("Europe/Berlin")
    try:
        cron = Cron(text, "Europe/Berlin")
    except InvalidTiming as error:
        assert error.field == "cron"
        return
    occurrence = cron.after(moment)
    assert occurrence is None or occurrence > moment
    assert describe(cron)
    assert "  " not in spec(cron)
    preview(cron, moment, 2)


@given(st.text() | st.text("abcABC/._-+0\x00"), st.text("Europe/.", max_size=8))
@settings(deadline=2000)
def test_every_text_is_a_zone_or_refused(text: str, part: str) -> None:
    """No other error than InvalidTiming."""
    for name in (text, f"Europe/{part}", f"{part}/Berlin"):
        try:
            Cron("* * * * *", name)
        except InvalidTiming as error:
            assert error.field == "zone"


@given(st.integers() | st.integers(1, 2**31 - 1), any_moment, any_moment, st.booleans())
def test_every_interval_fires_or_is_refused(seconds: int, anchor: datetime, moment: datetime, starts: bool) -> None:
    """Beyond the calendar there is no occurrence, and no error."""
    try:
        interval = Interval(seconds, anchor, anchor if starts else None)
    except InvalidTiming as error:
        inside = EARLIEST_MOMENT <= anchor <= LATEST_MOMENT
        assert error.field == "starts_at" if 1 <= seconds < 2**31 and not inside else not 1 <= seconds < 2**31
        return
    occurrence = interval.after(moment)
    assert occurrence is None or (occurrence > moment and occurrence >= anchor)
    assert len(interval.latest(moment, datetime.max.replace(tzinfo=UTC), 3)) <= 3
    preview(interval, moment, 2)


def test_there_is_no_occurrence_after_the_calendar() -> None:
    """The last days of the year 9999 have none, and nothing overflows."""
    end = datetime.max.replace(tzinfo=UTC)
    for one in (Cron("* * * * *", "UTC"), Cron("0 0 1 1 *", "UTC"), Interval(1, NOW)):
        assert one.after(end) is None
        assert one.after(end - 5 * HOUR) is None
    assert Cron("0 0 1 1 *", "UTC").after(datetime.min.replace(tzinfo=UTC)) == utc("0002-01-01")
    load("Pacific/Kiritimati")
    # So that the last occurrences can be shown in every zone.
    assert len(preview(Interval(3600, NOW), utc("9999-12-28T12:00"), 50, zone="Pacific/Kiritimati")) == 12


@pytest.mark.parametrize(
    ("one", "words", "written"),
    [
        (Cron("30 2 * * *", "UTC"), "At 02:30 every day", "30 2 * * *"),
        (Cron(" */5  * * * * ", "UTC"), "Every fifth minute of every hour", "*/5 * * * *"),
        (Cron("@daily", "UTC"), "At 00:00 every day", "@daily"),
        (Interval(1, NOW), "Every second", "@every 1s"),
        (Interval(30, NOW), "Every 30 seconds", "@every 30s"),
        (Interval(60, NOW), "Every minute", "@every 1m0s"),
        (Interval(90, NOW), "Every 1 minute 30 seconds", "@every 1m30s"),
        (Interval(300, NOW), "Every 5 minutes", "@every 5m0s"),
        (Interval(3600, NOW), "Every hour", "@every 1h0m0s"),
        (Interval(86401, NOW), "Every 1 day 1 second", "@every 24h0m1s"),
        (Interval(7 * 86400, NOW), "Every 7 days", "@every 168h0m0s"),
    ],
)
def test_timings_are_described_in_english_and_in_asynqs_notation(one: Timing, words: str, written: str) -> None:
    """`describe` is for people, `spec` for asynq's tools."""
    assert (describe(one), spec(one)) == (words, written)


def test_asynqs_notation_of_a_zone() -> None:
    """The zone goes before the expression."""
    load("Europe/Berlin")
    assert spec(Cron("30 2 * * *", "Europe/Berlin")) == "CRON_TZ=Europe/Berlin 30 2 * * *"


def notes(expression: str, name: str, now: str, count: int) -> list[tuple[str, str, list[str]] | None]:
    """Return the local time, the kind and the walls of every note of a preview."""
    load(name)
    found: list[Any] = []
    for occurrence, local, note in preview(Cron(expression, name), utc(now), count):
        assert local.astimezone(UTC) == occurrence
        walls = [f"{wall:%d %H:%M}" for wall in note.walls] if note else []
        found.append(note and (f"{local:%d %H:%M}", note.kind.value, walls))
    return found


def test_preview_notes_a_gap() -> None:
    """Fixed times in the gap fire right after it. Each skipped wall time is named once."""
    berlin = "Europe/Berlin", "2026-03-28T00:00"
    gap = ("29 03:00", "gap", ["29 02:00", "29 02:30"])
    assert notes("30 2 * * *", *berlin, 3) == [None, ("29 03:00", "gap", ["29 02:30"]), None]
    assert notes("0,30 2,3 * * *", *berlin, 7) == [None, None, None, None, gap, None, None]
    skipped = ("29 03:00", "skipped", ["29 02:00", "29 02:30"])
    assert notes("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:00", 3) == [None, skipped, None]
    # The next occurrence may be long after: on that day the schedule does not fire at all.
    assert notes("*/30 2 * * *", *berlin, 4) == [None, None, ("30 02:00", *skipped[1:]), None]
    assert notes("0 1,2,3 * * *", "Europe/Berlin", "2026-03-29T12:00", 5) == [None] * 5


def test_preview_notes_repeated_times() -> None:
    """Fixed times fire in the first pass only, wall-clock expressions in both."""
    berlin = "Europe/Berlin", "2026-10-24T23:45"
    assert notes("30 2,3 * * *", *berlin, 2) == [("25 02:30", "once", ["25 02:30"]), None]
    both = [("25 02:00", ["25 02:00"]), ("25 02:30", ["25 02:30"])]
    passes = [(local, kind, walls) for kind in ("first", "second") for local, walls in both]
    assert notes("*/30 * * * *", *berlin, 5) == [*passes, None]


def test_preview_notes_a_change_by_half_an_hour() -> None:
    """Lord Howe goes forward from 02:00 to 02:30, and back from 02:00 to 01:30."""
    howe = "Australia/Lord_Howe"
    assert notes("10 2 * * *", howe, "2026-10-03T15:00", 2) == [("04 02:30", "gap", ["04 02:10"]), None]
    skipped = ("04 02:30", "skipped", ["04 02:00", "04 02:15"])
    assert notes("*/15 * * * *", howe, "2026-10-03T15:15", 2) == [skipped, None]
    assert notes("45 1 * * *", howe, "2026-04-04T12:00", 2) == [("05 01:45", "once", ["05 01:45"]), None]
    passes = [("05 01:45", "first", ["05 01:45"]), ("05 01:45", "second", ["05 01:45"])]
    assert notes("45 * * * *", howe, "2026-04-04T14:30", 3) == [*passes, None]


def test_preview_within_limits_and_of_intervals() -> None:
    """Only existing occurrences, in the schedule's zone. Intervals have no notes and are shown in a given zone."""
    load("Europe/Berlin")
    shown_in = preview(Interval(1800, utc("2026-10-25")), utc("2026-10-25"), 3, zone="Europe/Berlin")
    assert [f"{local:%H:%M}" for _, local, _ in shown_in] == ["02:30", "02:00", "02:30"]
    assert [note for *_, note in shown_in] == [None] * 3
    assert preview(Interval(60, NOW), NOW)[-1].local.tzinfo is UTC
    assert len(preview(Interval(60, NOW), NOW)) == 10
    # Wall times that were skipped before the schedule started are not noted.
    begun = preview(Cron("*/30 2 * * *", "Europe/Berlin", utc("2026-03-29T12:00")), utc("2026-03-01"), 1)
    assert begun[0].note is None
    ended = Cron("*/30 2 * * *", "Europe/Berlin", ends_at=utc("2026-03-29T12:00"))
    assert [upcoming.note for upcoming in preview(ended, utc("2026-03-28T12:00"))] == []
    with pytest.raises(InvalidTiming, match="give a name"):
        preview(Interval(60, NOW), NOW, zone="Nowhere")
    assert {kind.value for kind in DstKind} == {"gap", "skipped", "once", "first", "second"}
