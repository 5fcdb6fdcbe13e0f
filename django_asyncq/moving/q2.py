"""Read the schedules of django-q2 from its table. Source: django-q2 1.11, `models.Schedule` and `scheduler`.

Arguments there are texts of Python literals, which are parsed and never evaluated.
"""

from __future__ import annotations

import ast
import calendar
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import dropwhile
from typing import Any

from django.conf import settings

from . import tables
from .clocks import changes, checked, each_time, from_croniter, wall_at, walls_of, zone_called
from .old import (
    MINUTE,
    SECOND,
    CannotImport,
    Found,
    NothingToImport,
    OldSchedule,
    Rule,
    every,
    once,
    read_safely,
    rounded_up,
    shown,
)

TABLE = "django_q_schedule"
COLUMNS = (
    *("id", "name", "func", "hook", "args", "kwargs", "schedule_type", "minutes", "repeats", "next_run", "cron"),
    *("cluster", "intended_date_kwarg"),
)
# Kinds that fire at a time of day: how many days, or how many months, until the next one.
DAYS = {"D": 1, "W": 7, "BW": 14}
MONTHS = {"M": 1, "BM": 2, "Q": 3, "Y": 12}
WORDS = {
    "O": "once",
    "D": "daily",
    "W": "weekly",
    "BW": "every two weeks",
    "M": "monthly",
    "BM": "every two months",
    "Q": "quarterly",
    "Y": "yearly",
}
# Each month has these days.
LAST_SAFE_DAY = 28
LAST_YEAR = 9_990
# How far clocks are looked at to know whether a zone changes them.
DAYS_OF_CHANGES = 800


def read(database: str) -> Found:
    """Return the schedules of the table. Raises: NothingToImport when it is not there; django.db.Error."""
    if not tables.existing(database, [TABLE]):
        raise NothingToImport(
            f"The database {database!r} has no table {TABLE}. Name the one that has it with --database ALIAS."
        )
    found, names = [], set[str]()
    for row in tables.read(database, TABLE, COLUMNS):
        name = tables.label(row, "name", "func")
        # Names there are neither required nor unique.
        name = f"{name} ({row['id']})" if name in names else name
        names.add(name)
        plain = OldSchedule(key=str(row["id"]), name=name, task=tables.label(row, "func"))
        found.append(read_safely(_of_row, plain, row, database))
    return Found(f"the table {TABLE} of the database {database!r}", found)


def _configured() -> Mapping[str, Any]:
    found = getattr(settings, "Q_CLUSTER", None)
    return found if isinstance(found, Mapping) else {}


def _of_row(plain: OldSchedule, row: tables.Row, database: str) -> OldSchedule:
    """Return the schedule of a row. Raises: CannotImport."""
    kind, repeats = tables.text(row, "schedule_type"), tables.number(row, "repeats")
    repeats = -1 if repeats is None else repeats
    next_run = tables.moment(row, "next_run", database)
    if repeats == 0:
        raise CannotImport("it has no repeats left")
    if next_run is None:
        raise CannotImport("it has no next_run")
    zone = str(_configured().get("time_zone") or settings.TIME_ZONE or "UTC")
    differences = []
    if kind == "C":
        rule, written = rule_of_cron(tables.text(row, "cron"), zone, next_run), f"{row['cron']} ({zone})"
    elif kind == "O":
        rule, written = once(next_run), f"once, {next_run.isoformat()}"
    elif kind in ("I", "H"):
        minutes = 60 if kind == "H" else tables.number(row, "minutes") or 1
        rule, written = every(60 * minutes, next_run, first=next_run), f"every {minutes} minutes"
    elif kind in WORDS:
        rule, written = rule_of_calendar(kind, next_run, zone), f"{WORDS[kind]}, next {next_run.isoformat()}"
        if rule.cron and next_run != rounded_up(next_run, MINUTE):
            differences.append("it fires at the next full minute, since a cron expression has no seconds")
    else:
        raise CannotImport(f"its kind {shown(kind)} is not known")
    kwargs = _kwargs(tables.text(row, "kwargs"))
    differences += _options(row, kwargs.pop("q_options", {}))
    return replace(
        plain,
        written=written,
        args=_args(tables.text(row, "args")),
        kwargs=kwargs,
        rule=rule,
        is_once=kind == "O",
        count=repeats if repeats > 0 and kind != "O" else None,
        # It computes the next occurrence of an expression from now; all others one by one.
        missed="all" if kind not in ("C", "O") and _configured().get("catch_up", True) else "once",
        differences=tuple(differences),
    )


def _options(row: tables.Row, options: Any) -> Iterator[str]:
    if row["cluster"]:
        yield f"its cluster {shown(row['cluster'])}: here the task's queue_name decides"
    if row["hook"]:
        yield f"its hook {shown(row['hook'])} is not called: enqueue it in the task, or use after=…"
    if row["intended_date_kwarg"]:
        yield (
            f"its time is not passed as {row['intended_date_kwarg']}: the row of the occurrence has it, and the "
            f"argument needs a default"
        )
    if options:
        names = ", ".join(sorted(map(str, options))) if isinstance(options, Mapping) else shown(options)
        yield f"its q_options ({names}) are not passed on: declare them on the task"


# --- arguments


def _args(text: str) -> list[Any]:
    """Return the positional arguments of a text such as `1, 'a'`. Raises: CannotImport."""
    if not text:
        return []
    found = _literal(text, "args")
    return list(found) if isinstance(found, tuple) else [found]


def _kwargs(text: str) -> dict[str, Any]:
    """Return the keyword arguments of a text such as `x=1` or `{'x': 1}`. Raises: CannotImport."""
    if not text:
        return {}
    try:
        found = _literal(text, "kwargs")
    except CannotImport:
        try:
            call = ast.parse(f"f({text})", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CannotImport(f"its kwargs are no Python literals: {shown(text)}") from error
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise CannotImport(f"its kwargs are no Python literals: {shown(text)}") from None
        return {str(each.arg): _literal(each.value, "kwargs") for each in call.keywords}
    if not isinstance(found, dict):
        raise CannotImport(f"its kwargs are no dictionary: {shown(text)}")
    return found


def _literal(written: str | ast.expr, what: str) -> Any:
    try:
        return ast.literal_eval(written)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        text = written if isinstance(written, str) else ast.unparse(written)
        raise CannotImport(f"its {what} are no Python literals: {shown(text)}") from error


# --- timings


def rule_of_cron(written: str, zone: str, next_run: datetime) -> Rule:
    """Return the rule of an expression: it fires at `next_run`, then whenever croniter says. Raises: CannotImport."""
    expression = from_croniter(written)
    following = each_time(walls_of(expression), zone_called(zone), at_change=True)

    def occurrences(after: datetime) -> Iterator[datetime]:
        first = rounded_up(next_run, MINUTE)
        if next_run > after:
            yield first
        yield from dropwhile(lambda moment: moment <= first, following(max(after, next_run)))

    return Rule(occurrences, cron=expression, zone=zone)


def rule_of_calendar(kind: str, next_run: datetime, zone: str) -> Rule:
    """Return the rule of a kind that fires at a time of day. Raises: CannotImport.

    An interval where the clocks of the zone never change, since it keeps the seconds; else a cron expression, in the
    zone where it is kept, and for years in UTC.
    """
    known = zone_called(zone)
    steps = _steps(kind, next_run, known)
    has_changes = next(changes(known, next_run, DAYS_OF_CHANGES), None) is not None
    if kind in DAYS and (kind == "BW" or not has_changes):
        return Rule(_rounded(steps, SECOND), interval_seconds=86_400 * DAYS[kind], zone=zone)
    if kind == "Y":
        known, zone = UTC, "UTC"
    wall = wall_at(rounded_up(next_run, MINUTE), known)
    days = "* * *"
    if kind == "W":
        days = f"* * {wall.isoweekday() % 7}"
    elif kind in MONTHS:
        if max(wall.day, next_run.astimezone(UTC).day) > LAST_SAFE_DAY:
            raise CannotImport(
                f"it fires on day {wall.day} of a month, and django-q2 changes that day after a shorter month: write "
                f"a cron expression, such as 0 6 L * * for the last day"
            )
        listed = sorted((wall.month - 1 + number) % 12 + 1 for number in range(0, 12, MONTHS[kind]))
        days = f"{wall.day} {'*' if kind == 'M' else ','.join(map(str, listed))} *"
    expression = checked(f"{wall.minute} {wall.hour} {days}")
    return Rule(_rounded(steps, MINUTE), cron=expression, zone=zone)


def _rounded(steps: Callable[[], Iterator[datetime]], unit: timedelta) -> Callable[[datetime], Iterator[datetime]]:
    return lambda after: (rounded_up(moment, unit) for moment in steps() if moment > after)


def _steps(kind: str, next_run: datetime, zone: Any) -> Callable[[], Iterator[datetime]]:
    """Return what yields `next_run` and what django-q2 makes of it, one by one.

    It adds days in UTC, then puts the time of day in the zone right, except for years.
    """

    def moments() -> Iterator[datetime]:
        moment = next_run.astimezone(UTC)
        while moment.year < LAST_YEAR:
            yield moment
            add = timedelta(days=DAYS[kind]) if kind in DAYS else _months_later(moment, MONTHS[kind]) - moment
            later = moment + add
            if kind != "Y":
                later -= (wall_at(later, zone) - wall_at(moment, zone)) - add
            moment = later

    return moments


def _months_later(moment: datetime, months: int) -> datetime:
    month = moment.month - 1 + months
    year, month = moment.year + month // 12, month % 12 + 1
    return moment.replace(year=year, month=month, day=min(moment.day, calendar.monthrange(year, month)[1]))
