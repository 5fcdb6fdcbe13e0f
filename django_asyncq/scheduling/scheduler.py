"""Fire schedules: each occurrence becomes one task, exactly once.

An occurrence is a row, unique by schedule and time, written in the transaction of its task. So any number of processes
may run this at once, be killed anywhere, and have clocks that disagree. Only the leader runs it, to save work. Times
come from the database's clock. Schedules declared in code have rows too, which `sync` updates.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError, connections
from django.db.models import QuerySet

from .. import compat, failpoints
from ..definitions import payload
from ..definitions.calls import check_call
from ..definitions.exception_text import text_of
from ..definitions.headers import with_schedule
from ..definitions.schedules import Declaration
from ..exceptions import BrokerUnavailable, EnqueueRefused, GateUnavailable, InvalidOption, LockLost, RunAborted
from ..guard import class_name, get_logger, is_a, passes
from ..models import Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskRecord, TaskState
from ..registry import every_task, registered
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.isolation import ROW_ERRORS, each_alone, page_of, set_aside, table_of
from ..storage.routing import rows_of, transaction_of, writing_database
from ..tasks import Task
from .due import Round, due_occurrences, earliest_in_time
from .refusals import in_words, refused

logger = get_logger("django_asyncq.scheduling.scheduler")

SCHEDULES_PER_PAGE = 100
# Where one schedule cannot be read, all are listed by id.
MOST_SCHEDULES = 10_000
# How many of the latest occurrences are checked for an unfinished task. An older unfinished task cannot exist.
OCCURRENCES_CHECKED = 100
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
Fenced = Callable[[], AbstractContextManager[Any]]


class Fired(NamedTuple):
    """An occurrence that became a task. task_id: of the row."""

    schedule: Schedule
    occurs_at: datetime
    task_id: UUID


class FireResult(NamedTuple):
    """What one round fired. next_seconds: until the next occurrence; None when there is none."""

    fired: list[Fired]
    next_seconds: float | None


class RowLocked(Exception):
    """Another transaction has locked the row of a schedule."""


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
            for row in due:
                found = self._attempt(row.name, partial(self._fire_alone, row, now, in_time_since))
                if found:
                    fired += found[0]
                else:
                    postponed.add(row.pk)
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
            if is_a(error, DatabaseError):
                if kind_of(error) is ErrorKind.NOT_SET_UP:
                    raise
                # Raises too, unless the database answers everybody else.
                rows_of(Schedule).exists()
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

    # --- one schedule

    def _fire_alone(self, row: Schedule, now: datetime, in_time_since: datetime) -> list[list[Fired]]:
        """Fire what is due of one schedule; return [what was fired], or [] when it must be looked at again.

        That is when it was changed since it was read, or when the values of its row set it aside. Raises: RowLocked.
        """
        return each_alone(
            table_of(Schedule),
            [row.pk],
            lambda _: self._fire(row, now, in_time_since),
            database=writing_database(Schedule),
        )

    def _fire(self, seen: Schedule, now: datetime, in_time_since: datetime) -> list[list[Fired]]:
        """Do what `_fire_alone` does, in one transaction."""
        with self._fenced():
            row = _locked(rows_of(Schedule).firing().filter(pk=seen.pk))
            if row is None or row.next_occurrence_at != seen.next_occurrence_at:
                return []
            try:
                due = due_occurrences(row, now, in_time_since)
                next_occurrence_at = row.timing.after(now)
            except InvalidOption as error:
                self._write(row, row.next_occurrence_at or now, OccurrenceOutcome.REFUSED, str(error))
                rows_of(Schedule).filter(pk=row.pk).update(next_occurrence_at=None)
                logger.error("schedule %s is not valid and will not fire again: %s", row.name, error)
                return [[]]
            if due.last_missed is not None:
                note = f"this occurrence and those before it, back to {in_words(row.next_occurrence_at)}"
                self._write(row, due.last_missed, OccurrenceOutcome.MISSED, note)
                logger.warning("schedule %s: missed occurrences are skipped: %s", row.name, note)
            fired = [found for occurs_at in due.to_fire if (found := self._fire_occurrence(row, occurs_at)) is not None]
            rows_of(Schedule).filter(pk=row.pk).update(next_occurrence_at=next_occurrence_at)
        failpoints.reach("fire.committed")
        return [fired]

    def _fire_occurrence(self, row: Schedule, occurs_at: datetime) -> Fired | None:
        """Write one occurrence and its task; None when it exists already, is skipped, or is refused."""
        if row.overlap == Overlap.SKIP and has_unfinished_task(row):
            self._write(row, occurs_at, OccurrenceOutcome.SKIPPED)
            return None
        occurrence = self._write(row, occurs_at, OccurrenceOutcome.QUEUED)
        if occurrence is None:
            return None
        failpoints.reach("fire.occurrence_written")
        try:
            # A nested transaction: a failed query of the project's code must not spoil that of the occurrence.
            with transaction_of(TaskRecord):
                occurrence.task_id = enqueue(row, occurs_at)
        except (GateUnavailable, BrokerUnavailable):
            raise
        except (EnqueueRefused, InvalidOption, RunAborted, compat.InvalidTask) as error:
            occurrence.outcome, occurrence.note = refused(row, occurs_at, error)
        except BaseException as error:
            if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
                raise
            # The project's code: a gate's callable, or a receiver that vetoes. It must not stop other schedules.
            if passes(error):
                raise
            note = f"{class_name(error)}: {text_of(error)}"
            occurrence.outcome, occurrence.note = OccurrenceOutcome.REFUSED, note
            text = "schedule %s: its occurrence of %s could not be queued"
            logger.exception(text, row.name, in_words(occurs_at), extra={"task": row.task})
        occurrence.save(update_fields=["task", "outcome", "note"])
        return Fired(row, occurs_at, occurrence.task_id) if occurrence.task_id else None

    @staticmethod
    def _write(row: Schedule, occurs_at: datetime, outcome: OccurrenceOutcome, note: str = "") -> Occurrence | None:
        """Insert an occurrence; None when the schedule has one at this time."""
        try:
            with transaction_of(Occurrence):
                return rows_of(Occurrence).create(
                    schedule=row, occurs_at=occurs_at, outcome=outcome, note=note, created_at=database_clock.now()
                )
        except IntegrityError:
            return None

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
            row = _locked(rows_of(Schedule).filter(name=name)) or Schedule(name=name, is_declared=True, created_at=now)
            _update_row(row, _changes(row, task, declaration), now)
        return 1

    def _retire(self, row: Schedule, now: datetime) -> int:
        """Note that a schedule was removed from the code; return how many rows were written. Raises: RowLocked."""
        with self._fenced():
            rows = rows_of(Schedule).filter(pk=row.pk)
            written = rows.update(retired_at=now) if _locked(rows) else 0
        logger.warning("schedule %s was removed from the code and does not fire any more", row.name)
        return written


def _locked(rows: QuerySet[Schedule]) -> Schedule | None:
    """Lock and return the one row, or None. Raises: RowLocked, without waiting, when another transaction has it."""
    skip_locked = connections[rows.db].features.has_select_for_update_skip_locked
    row = rows.select_for_update(skip_locked=skip_locked).first()
    if row is None and skip_locked and rows.exists():
        raise RowLocked("another transaction has locked its row")
    return row


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


def has_unfinished_task(row: Schedule) -> bool:
    """Return whether a task of a recent occurrence is QUEUED, RUNNING or RETRYING."""
    occurrences = rows_of(Occurrence).filter(schedule=row, task_id__isnull=False).order_by("-occurs_at")
    return any(
        state in (TaskState.QUEUED, TaskState.RUNNING) or (state == TaskState.FAILED and retry_at is not None)
        for state, retry_at in occurrences[:OCCURRENCES_CHECKED].values_list("task__state", "task__retry_at")
    )


def enqueue(row: Schedule, occurs_at: datetime | None = None) -> UUID:
    """Enqueue the schedule's task in the caller's transaction; return its id.

    occurs_at: the time of the occurrence; None means now, without jitter.
    Raises: TaskNotRegistered, InvalidOption (not schedulable, wrong arguments), EnqueueRefused, InvalidTask.
    """
    task = registered(row.task)
    if not row.is_declared and not task.schedulable:
        raise InvalidOption(f"task {row.task} may not be scheduled by people: declare it with schedulable=True")
    check_call(task, row.args, row.kwargs)
    if not hasattr(task.get_backend(), "enqueue_many"):
        raise InvalidOption(f"task {row.task} uses the backend {task.backend!r}, which has no rows")
    task = task.using(headers=with_schedule(task.headers, row.name))
    if row.jitter_seconds and occurs_at is not None:
        task = task.using(run_after=occurs_at + _jitter(row, occurs_at))
    return UUID(task.enqueue(*row.args, **row.kwargs).id)


def run_now(row: Schedule) -> Occurrence:
    """Enqueue the schedule's task at once because a person asked, whether or not another of its tasks is running.

    Raises: what `enqueue` raises; then nothing has been written.
    """
    with transaction_of(Occurrence):
        now = database_clock.now()
        occurrence = rows_of(Occurrence).create(schedule=row, occurs_at=now, by_person=True, created_at=now)
        occurrence.task_id = enqueue(row)
        occurrence.save(update_fields=["task"])
    return occurrence


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


def _jitter(row: Schedule, occurs_at: datetime) -> timedelta:
    """Return the delay of an occurrence, the same in every process."""
    digest = hashlib.sha256(f"{row.pk} {occurs_at.timestamp()}".encode()).digest()
    return timedelta(seconds=row.jitter_seconds) * (int.from_bytes(digest[:4]) / 2**32)
