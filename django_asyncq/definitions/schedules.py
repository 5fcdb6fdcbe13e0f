"""What code declares besides tasks: their schedules, and start-up tasks. Values and a table; nothing runs here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from django.conf import settings

from ..exceptions import InvalidOption
from .timing import Cron, Interval

F = TypeVar("F", bound=Callable[[], Any])

LONGEST_NAME = 200
# A holder renews at a third of it, and must survive one slow answer.
SHORTEST_TTL_SECONDS = 3
OVERLAPS = ("allow", "skip")
MISSED = ("skip", "once", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A schedule in code; made by `cron()` and `every()`, which say what the fields mean."""

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
                raise InvalidOption(f"schedule: {option}={count!r} is not valid: a whole number of at least {least}")
        if len(self.name) > LONGEST_NAME:
            raise InvalidOption(f"schedule: name={self.name!r} is not valid: at most {LONGEST_NAME} characters")
        for option, moment in (("starts_at", self.starts_at), ("ends_at", self.ends_at)):
            if moment is not None and moment.tzinfo is None:
                raise InvalidOption(f"schedule: {option}={moment!r} is not valid: it needs a time zone")
        if self.cron:
            Cron(self.cron, self.zone, self.starts_at, self.ends_at)
        else:
            Interval(self.interval_seconds or 0, self.starts_at or datetime.now(UTC), self.starts_at, self.ends_at)

    @property
    def zone(self) -> str:
        """The time zone's name: the one given, else the project's."""
        return self.timezone or settings.TIME_ZONE or "UTC"


def cron(
    expression: str,
    *,
    timezone: str | None = None,
    name: str = "",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    overlap: Literal["allow", "skip"] = "allow",
    missed: Literal["skip", "once", "all"] = "skip",
    missed_cap: int = 10,
    jitter_seconds: int = 0,
) -> Declaration:
    """Queue a task at the times of a cron expression: `@task(schedule=cron("*/5 * * * *"))`.

    expression: minute, hour, day of month, month, day of week. timezone: its name, default the project's.
    name: of the schedule, default the task's. args, kwargs: what the task is called with.
    overlap: "skip" leaves an occurrence out while a task of an earlier one is not over.
    missed: what becomes of occurrences that nobody was there to fire: "skip", "once", or "all", the last `missed_cap`.
    jitter_seconds: each task starts so many seconds later at most, spread evenly.
    Raises: InvalidOption.
    """
    if not isinstance(expression, str) or not expression:
        raise InvalidOption(f"cron({expression!r}) is not valid: give five fields, such as '*/5 * * * *'")
    return Declaration(
        cron=expression,
        timezone=timezone,
        name=name,
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        starts_at=starts_at,
        ends_at=ends_at,
        overlap=overlap,
        missed=missed,
        missed_cap=missed_cap,
        jitter_seconds=jitter_seconds,
    )


def every(
    *,
    seconds: int = 0,
    minutes: int = 0,
    hours: int = 0,
    days: int = 0,
    name: str = "",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    overlap: Literal["allow", "skip"] = "allow",
    missed: Literal["skip", "once", "all"] = "skip",
    missed_cap: int = 10,
    jitter_seconds: int = 0,
) -> Declaration:
    """Queue a task at an interval of whole seconds: `@task(schedule=every(seconds=30))`. The rest is as for `cron`.

    Counted from `starts_at`, else from when the schedule was first seen; changes of the clocks play no part.
    Raises: InvalidOption.
    """
    given = {"seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
    for unit, count in given.items():
        if type(count) is not int or count < 0:
            raise InvalidOption(f"every({unit}={count!r}) is not valid: a whole number of at least 0")
    total = seconds + 60 * minutes + 3600 * hours + 86_400 * days
    if total < 1:
        raise InvalidOption("every() is not valid: give seconds, minutes, hours or days; together at least 1 s")
    return Declaration(
        interval_seconds=total,
        name=name,
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        starts_at=starts_at,
        ends_at=ends_at,
        overlap=overlap,
        missed=missed,
        missed_cap=missed_cap,
        jitter_seconds=jitter_seconds,
    )


@dataclass(frozen=True, slots=True)
class StartupTask:
    """A function that one process of the fleet runs when it starts; made by `startup_task`."""

    name: str
    function: Callable[[], Any]
    ttl_seconds: float
    every_start: bool


_startup_tasks: dict[str, StartupTask] = {}


def startup_task(name: str, *, ttl: float = 60, every_start: bool = False) -> Callable[[F], F]:
    """Have a function run once per start of the fleet, by the process that holds the lock of this name.

    ttl: seconds; processes that start so long after its last end, or while it runs, count as the same start. The
    lock outlives a holder that died by as much. every_start: each `runworkers` that starts runs it, one at a time.
    The function, `def` or `async def`, takes no arguments. That it fails is logged and recorded, and stops nothing.
    Raises: InvalidOption, also for a name that another function has.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise InvalidOption(f"startup_task({name!r}) is not valid: a name of 1 to {LONGEST_NAME} characters")
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not SHORTEST_TTL_SECONDS <= ttl < math.inf:
        raise InvalidOption(
            f"startup_task({name!r}, ttl={ttl!r}) is not valid: seconds, at least {SHORTEST_TTL_SECONDS}"
        )

    def declare(function: F) -> F:
        known = _startup_tasks.get(name)
        if known is not None and _path(known.function) != _path(function):
            raise InvalidOption(
                f"startup_task({name!r}) of {_path(function)} is not valid: {_path(known.function)} has that name"
            )
        _startup_tasks[name] = StartupTask(name, function, float(ttl), every_start)
        return function

    return declare


def startup_tasks() -> list[StartupTask]:
    """Return the start-up tasks in the order of their declaration."""
    return list(_startup_tasks.values())


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
