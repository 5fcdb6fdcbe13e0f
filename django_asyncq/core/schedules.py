"""Declare schedules of tasks, and start-up tasks.

Holds values and one table. It must not run anything and knows no database and no Redis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from django.conf import settings

from ..exceptions import InvalidOption
from .foreign_words import refuse_unknown
from .guard import get_logger
from .needs import NEEDS_OF_SCHEDULE, lacking
from .registry import Origin, every_task, origin_of, why_ambiguous
from .time import Duration, is_duration, seconds_of
from .timing import Cron, Interval

if TYPE_CHECKING:
    from ..tasks import Task

logger = get_logger("django_asyncq.scheduling.scheduler")

F = TypeVar("F", bound=Callable[[], Any])

LONGEST_NAME = 200
# The holder of the lock renews it after a third of this time, and must survive one slow reply.
SHORTEST_TTL_SECONDS = 3
OVERLAPS = ("allow", "skip")
MISSED = ("skip", "once", "all")
# Stands for the anchor of an interval where only the other values are checked.
ANY_ANCHOR = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A schedule declared in code. `cron()` and `every()` make it and say what the fields mean."""

    cron: str = ""
    interval_seconds: int | None = None
    timezone: str | None = None
    name: str = ""
    args: tuple[Any, ...] = field(default=(), hash=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    overlap: str = "allow"
    missed: str = "skip"
    missed_cap: int = 10
    jitter_seconds: int = 0

    def __post_init__(self) -> None:
        for option, value, known in (("overlap", self.overlap, OVERLAPS), ("missed", self.missed, MISSED)):
            if value not in known:
                raise InvalidOption(f"schedule: {option}={value!r} is not valid: use one of {', '.join(known)}")
        for option, count, least in (("missed_cap", self.missed_cap, 1), ("jitter_seconds", self.jitter_seconds, 0)):
            if type(count) is not int or count < least:
                raise InvalidOption(
                    f"schedule: {option}={count!r} is not valid: give a whole number of at least {least}"
                )
        for option, remedy in lacking(self, NEEDS_OF_SCHEDULE):
            raise InvalidOption(f"schedule: {option}={getattr(self, option)!r} is not valid: {remedy}")
        if len(self.name) > LONGEST_NAME:
            raise InvalidOption(f"schedule: name={self.name!r} is not valid: use at most {LONGEST_NAME} characters")
        for option, moment in (("starts_at", self.starts_at), ("ends_at", self.ends_at)):
            if moment is not None and moment.tzinfo is None:
                raise InvalidOption(f"schedule: {option}={moment!r} is not valid: it needs a time zone")
        if self.cron:
            Cron(self.cron, self.zone, self.starts_at, self.ends_at)
        else:
            Interval(self.interval_seconds or 0, self.starts_at or ANY_ANCHOR, self.starts_at, self.ends_at)

    @property
    def zone(self) -> str:
        """The name of the time zone: the given one, else the project's."""
        return self.timezone or settings.TIME_ZONE or "UTC"


class ScheduleOptions(TypedDict, total=False):
    """The options that `cron()` and `every()` share, for type checkers and editors; `cron` says what each means."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    starts_at: datetime | None
    ends_at: datetime | None
    overlap: Literal["allow", "skip"]
    missed: Literal["skip", "once", "all"]
    missed_cap: int
    jitter_seconds: int | timedelta


def cron(expression: str, *, timezone: str | None = None, **options: Unpack[ScheduleOptions]) -> Declaration:
    """Enqueue a task at the times of a cron expression: `@task(schedule=cron("*/5 * * * *"))`.

    expression: minute, hour, day of month, month, day of week. timezone: its name, default the project's.
    name: of the schedule, default the task's. args, kwargs: arguments of each call, default none.
    starts_at, ends_at: the earliest and the latest time of an occurrence; aware datetimes, default none.
    overlap: "allow" (default), or "skip" an occurrence while the task of an earlier one has not finished.
    missed: what happens to occurrences that came due while no scheduler was running. "skip" (default) drops them,
        "once" enqueues one task for all of them, "all" enqueues the last `missed_cap` of them (default 10).
    jitter_seconds: delay each task by a random time of up to this many whole seconds, or a timedelta (default 0).
    Raises: InvalidOption.
    """
    if not isinstance(expression, str) or not expression:
        raise InvalidOption(f"cron({expression!r}) is not valid: give five fields, such as '*/5 * * * *'")
    return Declaration(cron=expression, timezone=timezone, **_checked("cron", options))


def every(
    interval: Duration = 0,
    /,
    *,
    seconds: int = 0,
    minutes: int = 0,
    hours: int = 0,
    days: int = 0,
    **options: Unpack[ScheduleOptions],
) -> Declaration:
    """Enqueue a task at an interval of whole seconds: `@task(schedule=every(seconds=30))`.

    interval: seconds or a timedelta, such as `every(timedelta(minutes=5))`; or name the units. They are added up.
    The interval counts from `starts_at`, else from when the scheduler first saw the schedule. Changes to and from
    summer time do not affect it.
    options: as for `cron`, without the time zone: name, args, kwargs, starts_at, ends_at, overlap, missed, missed_cap,
        jitter_seconds.
    Raises: InvalidOption.
    """
    whole = seconds_of(interval)
    if type(whole) is not int or whole < 0:
        raise InvalidOption(f"every({interval!r}) is not valid: give whole seconds or a timedelta of whole seconds")
    given = {"seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
    for unit, count in given.items():
        if type(count) is not int or count < 0:
            raise InvalidOption(f"every({unit}={count!r}) is not valid: give a whole number of at least 0")
    total = whole + seconds + 60 * minutes + 3600 * hours + 86_400 * days
    if total < 1:
        raise InvalidOption("every() is not valid: give seconds, minutes, hours or days; together at least 1 s")
    return Declaration(interval_seconds=total, **_checked("every", options))


def _checked(function: str, options: ScheduleOptions) -> dict[str, Any]:
    """Return the options as fields of a `Declaration`. Raises: TypeError for an option that does not exist."""
    refuse_unknown(f"{function}()", options, ScheduleOptions.__annotations__)
    return {
        **options,
        "args": tuple(options.get("args", ())),
        "kwargs": dict(options.get("kwargs") or {}),
        "jitter_seconds": seconds_of(options.get("jitter_seconds", 0)),
    }


# The names of schedules that were logged as declared twice, each with the task whose schedule is ignored.
_declared_twice: set[tuple[str, str]] = set()


def declared_schedules() -> Iterator[tuple[str, tuple[Task[Any, Any], Declaration]]]:
    """Yield the schedules of all registered tasks by name; if two have the same name, the first."""
    seen: set[str] = set()
    for task in every_task():
        found = task.schedule if isinstance(task.schedule, tuple) else (task.schedule,)
        for declaration in found:
            if declaration is None:
                continue
            name = declaration.name or task.module_path
            if name in seen:
                if (name, task.module_path) not in _declared_twice:
                    _declared_twice.add((name, task.module_path))
                    logger.error("schedule %s is declared twice; that of %s is ignored", name, task.module_path)
                continue
            seen.add(name)
            yield name, (task, declaration)


@dataclass(frozen=True, slots=True)
class StartupTask:
    """A function that one process of the fleet runs when the fleet starts; made by `startup_task`."""

    name: str
    function: Callable[[], Any]
    ttl_seconds: float
    every_start: bool
    origin: Origin | None


_startup_tasks: dict[str, StartupTask] = {}


def startup_task(name: str, *, ttl: Duration = 60, every_start: bool = False) -> Callable[[F], F]:
    """Run a function once per start of the fleet, in the process that holds the lock of this name.

    ttl: seconds or a timedelta. A process that starts while the function runs, or within this time after it finished,
    belongs to the same start. The lock also outlives a holder that died by this time.
    every_start: each `runworkers` that starts runs the function, one process at a time.
    The function, `def` or `async def`, takes no arguments. A failure is logged and recorded, and stops nothing.
    Raises: InvalidOption, also when another function has the name.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise InvalidOption(f"startup_task({name!r}) is not valid: use a name of 1 to {LONGEST_NAME} characters")
    ttl_seconds = seconds_of(ttl)
    if not is_duration(ttl) or ttl_seconds < SHORTEST_TTL_SECONDS:
        raise InvalidOption(
            f"startup_task({name!r}, ttl={ttl!r}) is not valid: give seconds or a timedelta, "
            f"at least {SHORTEST_TTL_SECONDS} s"
        )

    def declare(function: F) -> F:
        known = _startup_tasks.get(name)
        origin = origin_of(function) if inspect.isfunction(function) else None
        if known is not None and _is_another(known, function, origin):
            raise InvalidOption(
                f"startup_task({name!r}) of {_path(function)} is not valid: {_path(known.function)} has this name"
            )
        _startup_tasks[name] = StartupTask(name, function, float(ttl_seconds), every_start, origin)
        return function

    return declare


def startup_tasks() -> list[StartupTask]:
    """Return the start-up tasks in the order of their declaration."""
    return list(_startup_tasks.values())


def _is_another(known: StartupTask, function: Callable[..., Any], origin: Origin | None) -> bool:
    """Return whether a function is not the known one, which may be declared again and loaded again."""
    if _path(known.function) != _path(function):
        return True
    return known.origin is not None and origin is not None and why_ambiguous(known.origin, origin) is not None


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
