"""When other queues fire: their cron expressions as walls, and what they do when the clocks change.

A wall is a naive datetime: what a clock on the wall shows. The rules were measured with Celery 5.7, croniter 7, rq 3
and huey 3.5; older versions may do something else in the two nights of a year in which clocks change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import groupby
from typing import NamedTuple

from cronsim import CronSim

from ..core.time import LATEST_MOMENT
from ..core.timing import read_expression, read_zone
from ..exceptions import InvalidTiming
from .old import SECOND, CannotImport, Occurrences, shown

DAY = timedelta(days=1)
# A weekday on 29 February comes every 40 years at the latest.
MOST_DAYS_WITHOUT = 41 * 366

# Yields the walls later than one, ascending.
Walls = Callable[[datetime], Iterator[datetime]]


# --- Fields of which all must match: Celery's and huey's crontab.


class Field(NamedTuple):
    """A field of a crontab. least, most: its values; words: names for some of them, by their first three letters."""

    name: str
    least: int
    most: int
    words: Mapping[str, int] = {}


NAMES_OF_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTHS = {name: number for number, name in enumerate(NAMES_OF_MONTHS, 1)}
WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of week", 0, 6, WEEKDAYS),
)
PART = re.compile(r"(?:\*|(\w{1,20})(?:-(\w{1,20}))?)(?:/(\d{1,4}))?")
# The days of a month on which the first to fourth weekday of its name falls.
NTH_WEEK = {frozenset(range(7 * number + 1, 7 * number + 8)): number + 1 for number in range(4)}
# With fewer values a list says more than a step.
FEWEST_OF_A_STEP = 3


def values_of(field: Field, written: object) -> frozenset[int]:
    """Return the values that a field of a crontab names: a number, or a text such as `1,5-8,*/15` or `mon-fri`.

    A range may go over the end of the field, as `22-2`. Raises: CannotImport.
    """
    found: set[int] = set()
    for part in str(written).split(","):
        match = PART.fullmatch("".join(part.split()))
        if match is None or (match[1] and match[3] and not match[2]) or int(match[3] or 1) == 0:
            raise CannotImport(f"its {field.name} {shown(written)} is not valid")
        first = field.least if match[1] is None else _value(field, match[1], written)
        last = field.most if match[1] is None else first if match[2] is None else _value(field, match[2], written)
        size = field.most - field.least + 1
        count = (last - first) % size + 1
        found.update((first - field.least + step) % size + field.least for step in range(0, count, int(match[3] or 1)))
    return frozenset(found)


def _value(field: Field, text: str, written: object) -> int:
    value = int(text) if text.isdecimal() else field.words.get(text[:3].lower(), -1)
    if not field.least <= value <= field.most:
        raise CannotImport(f"its {field.name} {shown(written)} is not valid")
    return value


@dataclass(frozen=True, slots=True)
class Crontab:
    """Values for minutes, hours, days of the month, months and days of the week (0: Sunday), which must all match.

    stars: the names of the fields that were written with a step from a star, such as `*/30`.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    stars: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: Iterable[frozenset[int]], written: Sequence[object]) -> Crontab:
        """Return that of the values of the five fields. written: the fields as texts, where they are."""
        minutes, hours, days, months, weekdays = values
        fields = zip(FIELDS, written, strict=True)
        stars = frozenset(field.name for field, text in fields if str(text).startswith("*/"))
        return cls(minutes, hours, days, months, weekdays, stars)

    def walls(self, after: datetime) -> Iterator[datetime]:
        """Yield the walls later than one."""
        times = [(hour, minute) for hour in sorted(self.hours) for minute in sorted(self.minutes)]
        day, idle = after.replace(hour=0, minute=0, second=0, microsecond=0), 0
        end = LATEST_MOMENT.replace(tzinfo=None)
        while idle < MOST_DAYS_WITHOUT and day < end:
            idle += 1
            if day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays:
                idle = 0
                for hour, minute in times:
                    if (wall := day.replace(hour=hour, minute=minute)) > after:
                        yield wall
            day += DAY

    def expression(self) -> str:
        """Return our cron expression for the same days and times.

        Here a day of the month or a day of the week is enough, unless one of the two begins with `*`.
        Raises: CannotImport when no expression says it.
        """
        parts = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        texts = [_text_of(field, values, self.stars) for field, values in zip(FIELDS, parts, strict=True)]
        if not texts[2].startswith("*") and not texts[4].startswith("*"):
            number = NTH_WEEK.get(self.days)
            if number is None:
                raise CannotImport(
                    f"it fires only on days that match the day of the month ({texts[2]}) and the day of the week "
                    f"({texts[4]}), and here either is enough. Schedule one of the two, and look for the other in the "
                    f"task"
                )
            texts[2], texts[4] = "*", ",".join(f"{each}#{number}" for each in sorted(self.weekdays))
        return checked(" ".join(texts))


def _text_of(field: Field, values: frozenset[int], stars: frozenset[str]) -> str:
    """Return values as a field of our expressions, in the shortest usual form."""
    ordered = sorted(values)
    if len(ordered) == field.most - field.least + 1:
        return "*"
    fewest = 2 if field.name in stars else FEWEST_OF_A_STEP
    if len(ordered) >= fewest and ordered[0] == field.least:
        step = ordered[1] - ordered[0]
        if step > 1 and ordered == list(range(field.least, field.most + 1, step)):
            return f"*/{step}"
    runs = [[each for _, each in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def checked(expression: str) -> str:
    """Return an expression that is valid here. Raises: CannotImport."""
    try:
        return read_expression(expression)
    except InvalidTiming as error:
        raise CannotImport(str(error)) from error


def from_croniter(written: str) -> str:
    """Return an expression of croniter as one of ours. Raises: CannotImport.

    For croniter only a bare `*` leaves the decision to the other field for days; here one that begins with it does.
    """
    fields = [each.replace("?", "*") for each in written.split()]
    if len(fields) == len(FIELDS) and "*" not in (fields[2], fields[4]):
        for place, whole in ((2, "1-31"), (4, "0-6")):
            parts = fields[place].split(",")
            fields[place] = ",".join(part.replace("*", whole, 1) if part.startswith("*") else part for part in parts)
    return checked(" ".join(fields))


def zone_called(name: str) -> tzinfo:
    """Return a time zone. Raises: CannotImport."""
    try:
        return read_zone(name)
    except InvalidTiming as error:
        raise CannotImport(str(error)) from error


def walls_of(expression: str) -> Walls:
    """Return the walls of one of our expressions."""
    return lambda after: iter(CronSim(expression, after))


# --- From walls to moments, when the clocks change.


def each_wall_once(walls: Walls, zone: tzinfo) -> Occurrences:
    """Return when Celery, rq and rq-scheduler fire: each wall once, a repeated one the first time.

    A wall that the clocks skip is fired as late as if they had not been changed: 02:30 at 03:30. What the clock then
    shows is the last wall that was fired.
    """

    def occurrences(after: datetime) -> Iterator[datetime]:
        last = wall_at(after - DAY, zone)
        for wall in walls(last):
            if wall <= last:
                continue
            moment = wall.replace(tzinfo=zone).astimezone(UTC)
            last = wall_at(moment, zone)
            if moment > after:
                yield moment

    return occurrences


def each_time(walls: Walls, zone: tzinfo, *, at_change: bool) -> Occurrences:
    """Return when croniter and huey fire: whenever the clock shows a wall, so twice where it comes twice.

    at_change: whether walls that the clocks skip are fired at the moment of the change.
    """

    def occurrences(after: datetime) -> Iterator[datetime]:
        begin = wall_at(after - DAY, zone)
        for _, of_day in groupby(walls(begin), datetime.date):
            moments = {moment for wall in of_day for moment in _moments(wall, zone, at_change=at_change)}
            yield from (moment for moment in sorted(moments) if moment > after)

    return occurrences


def _moments(wall: datetime, zone: tzinfo, *, at_change: bool) -> Iterator[datetime]:
    first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if wall_at(first, zone) == wall:
        yield from (first, second) if first != second else (first,)
    elif at_change:
        yield _change_between(second, first, zone)


def wall_at(moment: datetime, zone: tzinfo) -> datetime:
    """Return what the clock shows at a moment."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def changes(zone: tzinfo, since: datetime, days: int) -> Iterator[datetime]:
    """Yield the moments at which the clocks change, from a moment on for some days."""
    for number in range(days):
        begin = since.astimezone(UTC) + number * DAY
        if begin.astimezone(zone).utcoffset() != (begin + DAY).astimezone(zone).utcoffset():
            yield _change_between(begin, begin + DAY, zone)


def _change_between(begin: datetime, end: datetime, zone: tzinfo) -> datetime:
    """Return the first second with the offset of `end`; that of `begin` is another one."""
    offset = begin.astimezone(zone).utcoffset()
    begin = begin.replace(microsecond=0)
    while end - begin > SECOND:
        middle = begin + (end - begin) // SECOND // 2 * SECOND
        begin, end = (middle, end) if middle.astimezone(zone).utcoffset() == offset else (begin, middle)
    return end
