"""Read the schedules of Celery's beat: django-celery-beat's tables, and the dictionary in the settings or of the app.

Neither package is imported. An entry of the dictionary holds objects of Celery, whose public attributes are read.
Source: django-celery-beat 2.9, `schedulers.ModelEntry`; Celery 5.7, `celery.schedules`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from ..core.guard import attempt
from . import tables
from .clocks import FIELDS, Crontab, each_wall_once, values_of, zone_called
from .old import (
    ANY_ANCHOR,
    CannotImport,
    Found,
    NothingToImport,
    OldSchedule,
    Rule,
    every,
    json_of,
    once,
    read_safely,
    shown,
)

TASKS = "django_celery_beat_periodictask"
KINDS = {
    "crontab": ("minute", "hour", "day_of_month", "month_of_year", "day_of_week", "timezone"),
    "interval": ("every", "period"),
    "clocked": ("clocked_time",),
    "solar": ("event",),
}
COLUMNS = (
    *("id", "name", "task", "args", "kwargs", "queue", "exchange", "routing_key", "headers", "priority"),
    *("expires", "expire_seconds", "one_off", "start_time", "enabled", "last_run_at", "total_run_count"),
    *("date_changed", *(f"{kind}_id" for kind in KINDS)),
)
PERIOD_SECONDS = {"days": 86_400.0, "hours": 3_600.0, "minutes": 60.0, "seconds": 1.0, "microseconds": 1e-6}
OF_CELERY = "celery."
CRONTAB = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
# What a message had as an option is an option of the task here.
OPTIONS = {
    "queue": "its queue {}: here the task's queue_name decides",
    "exchange": "its exchange {} has no equivalent",
    "routing_key": "its routing key {} has no equivalent: here the task's queue_name decides",
    "priority": "its priority {}: here the task's priority decides, from -100 to 100, higher first",
    "expires": "its messages expire after {}: declare the task with expires=…",
}
OVERDUE = timedelta(hours=1)


def read(database: str, cutover: datetime) -> Found:
    """Return the schedules of the tables and of the dictionary; one that both have is that of the tables.

    cutover: see `judging.Wish`. Raises: NothingToImport when there is neither; django.db.Error.
    """
    there = tables.existing(database, [TASKS])
    entries = _dictionary()
    if not there and entries is None:
        raise NothingToImport(
            f"The database {database!r} has no table {TASKS}, and neither the settings nor an app of Celery has a "
            f"beat_schedule. Name the database that has the table with --database ALIAS, or set CELERY_BEAT_SCHEDULE."
        )
    found = list(_of_tables(database, cutover)) if there else []
    names = {each.name for each in found}
    found += [each for each in _of_dictionary(entries or {}) if each.name not in names]
    places = [f"the table {TASKS} of the database {database!r}"] if there else []
    places += ["the dictionary of the settings or of the app"] if entries is not None else []
    return Found(" and ".join(places), found)


# --- the tables


def _of_tables(database: str, cutover: datetime) -> Iterator[OldSchedule]:
    names = {f"django_celery_beat_{kind}schedule": kind for kind in KINDS}
    timings: dict[str, dict[Any, tables.Row]] = {kind: {} for kind in KINDS}
    for table in tables.existing(database, list(names)):
        kind = names[table]
        timings[kind] = {row["id"]: row for row in tables.read(database, table, ("id", *KINDS[kind]))}
    for row in tables.read(database, TASKS, COLUMNS):
        plain = OldSchedule(
            key=str(row["id"]), name=tables.label(row, "name"), task=tables.label(row, "task"), enabled=_on(row)
        )
        yield read_safely(_of_row, plain, row, timings, database, cutover)


def _on(row: tables.Row) -> bool:
    return bool(row["enabled"]) or row["enabled"] is None


def _of_row(
    plain: OldSchedule,
    row: tables.Row,
    timings: Mapping[str, Mapping[Any, tables.Row]],
    database: str,
    cutover: datetime,
) -> OldSchedule:
    """Return the schedule of a row. Raises: CannotImport."""
    if plain.task.startswith(OF_CELERY):
        raise CannotImport("its task is Celery's own housekeeping, which nothing here needs")
    chosen = [kind for kind in KINDS if row[f"{kind}_id"] is not None]
    if len(chosen) != 1:
        raise CannotImport(f"it has {'no' if not chosen else 'more than one'} kind of timing")
    kind = chosen[0]
    timing = timings[kind].get(row[f"{kind}_id"])
    if timing is None:
        raise CannotImport(f"the row of its {kind} is missing")
    starts_at, expires = (tables.moment(row, name, database) for name in ("start_time", "expires"))
    last_run_at, differences = tables.moment(row, "last_run_at", database), list[str]()
    is_once = bool(row["one_off"]) or kind == "clocked"
    if is_once and (row["total_run_count"] or not plain.enabled):
        raise CannotImport("it fires once, and has fired or is disabled, as beat leaves one that has fired")
    if kind == "interval":
        seconds, written = _interval(timing)
        changed = tables.moment(row, "date_changed", database)
        rule, more = _phase(seconds, last_run_at, starts_at, changed, cutover)
        differences += more
    elif kind == "crontab":
        rule, written = _crontab({name: timing[name] for name in CRONTAB}, tables.text(timing, "timezone") or _zone())
        if not getattr(settings, "DJANGO_CELERY_BEAT_TZ_AWARE", True):
            differences.append("DJANGO_CELERY_BEAT_TZ_AWARE is off, so beat has not used its time zone")
        if starts_at is not None and starts_at > cutover:
            differences.append("beat also fires it at its start time itself; here it fires at the times of its crontab")
    elif kind == "clocked":
        rule, written = _clocked(tables.moment(timing, "clocked_time", database), cutover)
    else:
        raise CannotImport(f"it follows the sun ({timing['event']}); schedules here follow the clock")
    differences += _options({**row, "expires": row["expire_seconds"]})
    if tables.text(row, "headers").strip() not in ("", "{}"):
        differences.append("its headers are not passed on: give the task headers=…")
    return replace(
        plain,
        written=written,
        args=json_of(row["args"], list, "args"),
        kwargs=json_of(row["kwargs"], dict, "kwargs"),
        rule=rule,
        starts_at=starts_at,
        # beat fires nothing at the moment itself.
        ends_at=None if expires is None else expires - timedelta.resolution,
        is_once=is_once,
        differences=tuple(differences),
    )


def _interval(timing: tables.Row) -> tuple[float, str]:
    """Return an interval in seconds and in words. Raises: CannotImport."""
    count, period = tables.number(timing, "every"), tables.text(timing, "period")
    if period not in PERIOD_SECONDS or count is None:
        raise CannotImport(f"its interval {shown(count)} {shown(period)} is not valid")
    return count * PERIOD_SECONDS[period], f"every {count} {period}"


def _phase(
    seconds: float, last: datetime | None, starts_at: datetime | None, changed: datetime | None, cutover: datetime
) -> tuple[Rule, list[str]]:
    """Return the rule of an interval, and what is to be said of its phase. Raises: CannotImport.

    beat counts from the last run. One that has not run since its start time fires then; one that has never run, an
    interval after its change.
    """
    if starts_at is not None and (last is None or last < starts_at):
        text = "it has not run since its start time, and counts from it"
        return every(seconds, starts_at, first=starts_at), [] if starts_at > cutover else [text]
    counted = last or changed
    if counted is None:
        return every(seconds, ANY_ANCHOR), ["nothing says when it ran last: it fires at multiples of the interval"]
    rule = every(seconds, counted)
    due = next(rule.old(counted))
    if due < cutover - OVERDUE:
        return rule, [f"it is overdue there since {due:%Y-%m-%d %H:%M} UTC: what was missed is not made up for"]
    return rule, []


def _crontab(fields: Mapping[str, Any], zone: str) -> tuple[Rule, str]:
    """Return the rule of a crontab, and its fields as they are written. Raises: CannotImport.

    fields: texts, or sets of values that Celery has read already.
    """
    values = [
        frozenset(written) if isinstance(written, set | frozenset) else values_of(field, written)
        for field, written in zip(FIELDS, (fields[name] for name in CRONTAB), strict=True)
    ]
    crontab = Crontab.of(values, [fields[name] for name in CRONTAB])
    rule = Rule(each_wall_once(crontab.walls, zone_called(zone)), cron=crontab.expression(), zone=zone)
    texts = [str(each) if isinstance(each, str | int) else "" for each in fields.values()]
    return rule, f"{' '.join(texts) if all(texts) else rule.cron} ({zone})"


def _clocked(at: datetime | None, cutover: datetime) -> tuple[Rule, str]:
    """Return the rule of a fixed time. Raises: CannotImport for one that is not after the cutover."""
    if at is None:
        raise CannotImport("its clocked time is missing")
    if at <= cutover:
        raise CannotImport(f"its time is past at the cutover ({at:%Y-%m-%d %H:%M} UTC)")
    return once(at), f"at {at.isoformat()}"


def _options(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the options of a message mean here."""
    for name, text in OPTIONS.items():
        value = given.get(name)
        if value not in (None, ""):
            yield text.format(f"{value} s" if name == "expires" and isinstance(value, int | float) else shown(value))


# --- the dictionary


def _dictionary() -> Mapping[Any, Any] | None:
    """Return the dictionary of the app of Celery that the project has imported, else of the settings; None for none."""
    app: Any = getattr(sys.modules.get("celery"), "current_app", None)
    found = None
    if app is not None:
        # As beat does: receivers of the project add schedules then.
        attempt(lambda: app.finalize())
        found = attempt(lambda: app.conf.beat_schedule).value
    for name in ("CELERY_BEAT_SCHEDULE", "CELERYBEAT_SCHEDULE"):
        found = found or getattr(settings, name, None)
    return found if isinstance(found, Mapping) else None


def _of_dictionary(entries: Mapping[Any, Any]) -> Iterator[OldSchedule]:
    for name, entry in entries.items():
        task = entry.get("task") if isinstance(entry, Mapping) else None
        plain = OldSchedule(key=str(name), name=str(name), task=task if isinstance(task, str) else "", is_code=True)
        yield read_safely(_of_entry, plain, entry)


def _of_entry(plain: OldSchedule, entry: Any) -> OldSchedule:
    """Return the schedule of an entry. Raises: CannotImport."""
    if not isinstance(entry, Mapping):
        raise CannotImport(f"its entry is no dictionary: {shown(entry)}")
    if plain.task.startswith(OF_CELERY):
        raise CannotImport("its task is Celery's own housekeeping, which nothing here needs")
    rule, written, differences = _of_object(entry.get("schedule"))
    args, kwargs = entry.get("args") or (), entry.get("kwargs") or {}
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise CannotImport(f"its args and kwargs are no list and dictionary: {shown(args)}, {shown(kwargs)}")
    options = entry.get("options") or {}
    differences += [*_options(options)] if isinstance(options, Mapping) else []
    if others := sorted(str(each) for each in set(options) - OPTIONS.keys()):
        differences.append(f"its options {', '.join(others)} are not passed on")
    if entry.get("relative"):
        differences.append("it is relative: beat rounds to the interval, here it counts from its first occurrence")
    return replace(plain, written=written, args=args, kwargs=kwargs, rule=rule, differences=tuple(differences))


def _of_object(found: Any) -> tuple[Rule, str, list[str]]:
    """Return the rule of what an entry has as `schedule`: seconds, a timedelta or an object of Celery.

    An object is known by its attributes. Raises: CannotImport.
    """
    if isinstance(found, int | float | timedelta) and not isinstance(found, bool):
        found = found if isinstance(found, timedelta) else timedelta(seconds=found)
    elif isinstance(run_every := getattr(found, "run_every", None), timedelta):
        found = run_every
    if isinstance(found, timedelta):
        text = "only beat's own file says when it ran last: it fires at multiples of the interval"
        return every(found.total_seconds(), ANY_ANCHOR), f"every {found.total_seconds():g} s", [text]
    if all(isinstance(getattr(found, name, None), set | frozenset) for name in CRONTAB):
        zone = vars(found).get("tz") or _zone()
        rule, written = _crontab({name: getattr(found, name) for name in CRONTAB}, str(zone))
        return rule, written, []
    if hasattr(found, "event"):
        raise CannotImport(f"it follows the sun ({found.event}); schedules here follow the clock")
    raise CannotImport(f"its schedule is of a kind that is not known: {shown(found)}")


def _zone() -> str:
    """Return the zone in which the app reads crontabs: Celery's own setting, else UTC, else the project's."""
    written = getattr(settings, "CELERY_TIMEZONE", None)
    app = getattr(sys.modules.get("celery"), "current_app", None)
    if app is not None and not written:
        written = attempt(lambda: app.conf.timezone).value
    return str(written or ("UTC" if getattr(settings, "CELERY_ENABLE_UTC", True) else settings.TIME_ZONE))
