"""Fire schedules: each occurrence becomes one task, exactly once.

An occurrence is a row, unique by schedule and time, written in the transaction of its task. So any number of processes
may run this at once, be killed anywhere, and have clocks that disagree. Only the leader runs it, to save work. Times
come from the database's clock. Schedules declared in code have rows too, which `sync` updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db import Error as DatabaseError
from django.db.models import QuerySet

from ..definitions import payload
from ..definitions.exception_text import text_of
from ..definitions.schedules import Declaration
from ..exceptions import BrokerUnavailable, GateUnavailable, LockLost
from ..guard import class_name, get_logger, is_a
from ..models import Schedule
from ..registry import every_task
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.isolation import ROW_ERRORS, each_alone, page_of, set_aside, table_of
from ..storage.routing import rows_of, transaction_of, writing_database
from ..tasks import Task
from .due import Round, earliest_in_time
from .enqueueing import may_share
from .firing import Fenced, Fired, RowLocked, fire, locked

logger = get_logger("django_asyncq.scheduling.scheduler")

SCHEDULES_PER_PAGE = 100
# Where one schedule cannot be read, all are listed by id.
MOST_SCHEDULES = 10_000
# How many schedules are fired in one transaction; after an error how many of those, until each is fired alone. So one
# that fails costs the others little, and where all of them fail, that costs little more than firing each alone.
SIZES = (100, 10, 1)
# How soon a schedule is tried again that could not be fired.
RETRY_SECONDS = 1.0
DECLARED_FIELDS = (
    "task",
    "args",
    "kwargs",
    "cron",
    "interval_seconds",
    "zone",
    "starts_at",
    "ends_at",
    "overlap",
    "missed",
    "missed_cap",
    "jitter_seconds",
)

# The names of schedules that were logged as declared twice, each with the task whose schedule is ignored.
_declared_twice: set[tuple[str, str]] = set()

Found = TypeVar("Found")
Clock = Callable[[], datetime]
# A schedule with what was fired; None when it is postponed.
Attempted = tuple[Schedule, list[Fired] | None]


class FireResult(NamedTuple):
    """What one round fired. next_seconds: until the next occurrence; None when there is none."""

    fired: list[Fired]
    next_seconds: float | None


class Scheduler:
    """Fire the schedules that are due.

    fenced: opens a transaction that commits only while this process may write; default: a plain transaction.
    clock: returns aware time; default: the database's clock.
    """

    def __init__(self, fenced: Fenced | None = None, clock: Clock | None = None) -> None:
        self._fenced = fenced or partial(transaction_of, Schedule)
        self._clock = clock or database_clock.now
        # The names of schedules whose error was logged, and that have not succeeded since.
        self._failing: set[str] = set()
        # The names of declared schedules for which the log says that a schedule made in the admin has them. While some
        # other schedule cannot be written, `sync` is repeated every second.
        self._taken: set[str] = set()
        # Whether the last `sync` has written every declared schedule.
        self.is_synced = False
        self._last_round: Round | None = None

    def fire_due(self) -> FireResult:
        """Fire every occurrence that is due. A schedule that fails stops no other; it is tried again in a second.

        What is due is decided when the round begins. Nothing is missed because the others took long.
        Raises: django.db.Error when the database answers nobody, LockLost; what was fired before the error stays fired.
        """
        fired: list[Fired] = []
        # Each is tried once in a round, so a round comes to its end.
        postponed: set[UUID] = set()
        now = self._clock()
        in_time_since = earliest_in_time(now, self._last_round)
        while True:
            rows = _soonest(postponed)
            due = [row for row in rows if row.next_occurrence_at <= now]
            for row, found in self._fire_page(due, now, in_time_since):
                if found is None:
                    postponed.add(row.pk)
                else:
                    fired += found
            if not due:
                break
        self._last_round = Round(now, self._clock())
        waits = [RETRY_SECONDS] if postponed else []
        waits += [(row.next_occurrence_at - self._last_round.ended_at).total_seconds() for row in rows[:1]]
        return FireResult(fired, min(waits, default=None))

    def _attempt(self, name: str, act: Callable[[], Found]) -> Found | None:
        """Do something for one schedule; after an error of its own, log that once and return None.

        Raises: what concerns every schedule: django.db.Error, LockLost.
        """
        try:
            found = act()
        except LockLost:
            raise
        except Exception as error:
            _raise_if_of_all(error)
            if name not in self._failing:
                self._failing.add(name)
                is_expected = is_a(error, (DatabaseError, GateUnavailable, BrokerUnavailable, RowLocked))
                logger.log(
                    logging.WARNING if is_expected else logging.ERROR,
                    "schedule %s is postponed, and tried again every second: %s",
                    name,
                    text_of(error) or class_name(error),
                    exc_info=None if is_expected else error,
                )
            return None
        self._failing.discard(name)
        return found

    # --- some schedules together, or one

    def _fire_page(self, due: Sequence[Schedule], now: datetime, in_time_since: datetime) -> Iterator[Attempted]:
        """Fire schedules, together where that is possible; yield each with what was fired.

        A schedule whose error was logged last is fired alone: it would only spoil the transaction of the others.
        """
        together = [row for row in due if row.name not in self._failing and may_share(row)]
        ids = {row.pk for row in together}
        yield from self._fire_parts(together, SIZES, now, in_time_since)
        yield from self._fire_parts([row for row in due if row.pk not in ids], SIZES[-1:], now, in_time_since)

    def _fire_parts(
        self, rows: Sequence[Schedule], sizes: Sequence[int], now: datetime, in_time_since: datetime
    ) -> Iterator[Attempted]:
        """Fire parts of as many schedules as the first of `sizes` says; a part that fails is divided by the next ones.

        The last of `sizes` is 1.
        """
        for start in range(0, len(rows), sizes[0]):
            part = rows[start : start + sizes[0]]
            fired = self._fire_together(part, now, in_time_since) if len(part) > 1 else {}
            if fired is None:
                smaller = [size for size in sizes if size < len(part)]
                yield from self._fire_parts(part, smaller, now, in_time_since)
                continue
            for row in part:
                found = fired.get(row.pk)
                yield row, self._fire_alone(row, now, in_time_since) if found is None else found

    def _fire_together(
        self, rows: Sequence[Schedule], now: datetime, in_time_since: datetime
    ) -> dict[UUID, list[Fired]] | None:
        """Fire schedules in one transaction, as `fire` does; None when that fails, so that nothing was written.

        Raises: what concerns every schedule, as `_attempt` does.
        """
        try:
            return fire(rows, now, in_time_since, self._fenced)
        except LockLost:
            raise
        except Exception as error:  # noqa: BLE001 - the schedule that it concerns meets it again, and then it is logged
            _raise_if_of_all(error)
            return None

    def _fire_alone(self, row: Schedule, now: datetime, in_time_since: datetime) -> list[Fired] | None:
        """Fire what is due of one schedule; None when it must be looked at again.

        That is after an error of its own, when it was changed since it was read, and when the values of its row set it
        aside.
        """

        def act(ids: Sequence[UUID]) -> list[list[Fired]]:
            return list(fire([row], now, in_time_since, self._fenced).values())

        attempt = partial(each_alone, table_of(Schedule), [row.pk], act, database=writing_database(Schedule))
        found = self._attempt(row.name, attempt)
        return found[0] if found else None

    # --- what code declares

    def sync(self) -> int:
        """Update the rows of schedules declared in code; return how many were written.

        Whether a schedule is enabled is left to the operator. One that was removed from the code is kept but does not
        fire. Each is written in a transaction of its own, so one that fails stops no other; `is_synced` is False then.
        """
        rows = {row.name: row for row in usable_schedules(rows_of(Schedule))}
        declared = dict(declared_schedules())
        now = database_clock.now()
        written = [
            self._attempt(name, partial(self._sync_one, rows.get(name), name, task, declaration, now))
            for name, (task, declaration) in declared.items()
        ]
        removed = [row for row in rows.values() if row.is_declared and not row.retired_at and row.name not in declared]
        written += [self._attempt(row.name, partial(self._retire, row, now)) for row in removed]
        self.is_synced = None not in written
        return sum(filter(None, written))

    def _sync_one(
        self, seen: Schedule | None, name: str, task: Task[Any, Any], declaration: Declaration, now: datetime
    ) -> int:
        """Write one declared schedule if its row differs; return how many rows were written. Raises: RowLocked."""
        if seen is not None and not seen.is_declared:
            if name not in self._taken:
                self._taken.add(name)
                logger.error("schedule %s in code has the name of one made in the admin and does not fire", name)
            return 0
        self._taken.discard(name)
        if seen is not None and seen.retired_at is None and not _changes(seen, task, declaration):
            return 0
        with self._fenced():
            found = locked(rows_of(Schedule).filter(name=name))
            row = found[0] if found else Schedule(name=name, is_declared=True, created_at=now)
            _update_row(row, _changes(row, task, declaration), now)
        return 1

    def _retire(self, row: Schedule, now: datetime) -> int:
        """Note that a schedule was removed from the code; return how many rows were written. Raises: RowLocked."""
        with self._fenced():
            rows = rows_of(Schedule).filter(pk=row.pk)
            written = rows.update(retired_at=now) if locked(rows) else 0
        logger.warning("schedule %s was removed from the code and does not fire any more", row.name)
        return written


def _raise_if_of_all(error: Exception) -> None:
    """Raise when an error concerns every schedule: the database is not set up, or answers nobody."""
    if is_a(error, DatabaseError):
        if kind_of(error) is ErrorKind.NOT_SET_UP:
            raise error
        # Raises too, unless the database answers everybody else.
        rows_of(Schedule).exists()


def _soonest(postponed: Collection[UUID]) -> list[Any]:
    """Return the schedules whose next occurrence comes first. postponed: ids of those to skip."""
    rows = rows_of(Schedule).firing().order_by("next_occurrence_at")
    if postponed:
        rows = rows.exclude(pk__in=postponed)
    return usable_schedules(rows, SCHEDULES_PER_PAGE, are_planned=True)


def usable_schedules(
    rows: QuerySet[Schedule], most: int = MOST_SCHEDULES, *, are_planned: bool = False
) -> list[Schedule]:
    """Return the first of these schedules; set those aside that cannot be read.

    rows: not sliced. are_planned: whether each must have a next occurrence.
    """
    check = partial(_checked, is_planned=are_planned)
    if not set_aside:
        try:
            return [check(row) for row in rows[:most]]
        except ROW_ERRORS as error:
            if kind_of(error) is not ErrorKind.ROW:
                raise
    ids = [id for (id,) in page_of(rows_of(Schedule).order_by("pk"), size=MOST_SCHEDULES)]
    readable = each_alone(
        table_of(Schedule), ids, lambda part: [check(row).pk for row in rows.filter(pk__in=part)], database=rows.db
    )
    return list(rows.filter(pk__in=readable)[:most])


def _checked(row: Schedule, *, is_planned: bool) -> Schedule:
    """Return the row. Raises: TypeError when SQLite, which keeps any value in any column, has a wrong one."""
    for name in ("jitter_seconds", "missed_cap"):
        if not isinstance(getattr(row, name), int):
            raise TypeError(f"{name} is no number")
    for name in ("created_at", "next_occurrence_at"):
        # Django reads a text that is no date as None.
        if getattr(row, name) is None and (name == "created_at" or is_planned):
            raise TypeError(f"{name} is no date")
    return row


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


def _changes(row: Schedule, task: Task[Any, Any], declaration: Declaration) -> dict[str, Any]:
    """Return the values that the code declares and the row lacks."""
    given = payload.of_call(declaration.args, dict(declaration.kwargs))
    values = {name: getattr(declaration, name) for name in DECLARED_FIELDS if hasattr(declaration, name)}
    values |= {"task": task.module_path, "args": given.args, "kwargs": given.kwargs}
    # Python finds True, 1 and 1.0 equal, also within lists, but a task may not.
    changed = {name for name, value in values.items() if getattr(row, name) != value}
    changed |= {name for name in ("args", "kwargs") if not payload.is_same(getattr(row, name), values[name])}
    return {name: values[name] for name in changed}


def _update_row(row: Schedule, changes: dict[str, Any], now: datetime) -> None:
    for name, value in changes.items():
        setattr(row, name, value)
    if row._state.adding or row.retired_at is not None or changes.keys() & set(Schedule.TIMING_FIELDS):
        row.retired_at = None
        row.plan_next(now)
    row.save()
