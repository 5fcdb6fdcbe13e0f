"""Fire schedules: each occurrence becomes one task, exactly once.

An occurrence is a row, unique by schedule and time, written in the transaction of its task. So any number of processes
may run this at once, be killed anywhere, and have clocks that disagree. Only the leader runs it, to save work. Times
come from the database's clock. Schedules declared in code have rows too, which `sync` updates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError
from django.db.models import QuerySet

from .. import compat, conf, failpoints
from ..definitions import payload
from ..definitions.database_now import DatabaseNow
from ..definitions.exception_text import text_of
from ..definitions.schedules import Declaration
from ..exceptions import BrokerUnavailable, EnqueueRefused, GateUnavailable, InvalidOption, RunAborted
from ..guard import class_name, get_logger, is_a, passes
from ..models import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskRecord, TaskState
from ..registry import every_task, registered
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.isolation import ROW_ERRORS, each_alone, page_of, set_aside, table_of
from ..storage.routing import rows_of, transaction_of, writing_database
from ..tasks import Task, check_call

logger = get_logger("django_asyncq.scheduling.scheduler")

SCHEDULES_PER_PAGE = 100
# Where one schedule cannot be read, all are listed by id.
MOST_SCHEDULES = 10_000
# An occurrence this late may be fired by the successor of a dead leader; one that is later counts as missed.
ON_TIME_SECONDS = 60
# How many of the latest occurrences are checked for an unfinished task. An older unfinished task cannot exist.
OCCURRENCES_CHECKED = 100
# How soon a schedule is tried again whose gate could not be asked.
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


class DueOccurrences(NamedTuple):
    """The occurrences of a schedule to fire now. last_missed: the latest of those not to fire, or None."""

    to_fire: list[datetime]
    last_missed: datetime | None


class Scheduler:
    """Fire the schedules that are due.

    fenced: opens a transaction that commits only while this process may write; default: a plain transaction.
    clock: returns aware time; default: the database's clock.
    """

    def __init__(self, fenced: Fenced | None = None, clock: Clock | None = None) -> None:
        self._fenced = fenced or partial(transaction_of, Schedule)
        self._clock = clock

    def fire_due(self) -> FireResult:
        """Fire every occurrence that is due.

        Raises: django.db.Error, BrokerUnavailable, LockLost; what was fired before the error stays fired.
        """
        fired: list[Fired] = []
        while True:
            rows = _soonest()
            if not rows:
                return FireResult(fired, None)
            now = rows[0].now if self._clock is None else self._clock()
            due = [row for row in rows if row.next_occurrence_at <= now]
            if not due:
                return FireResult(fired, (rows[0].next_occurrence_at - now).total_seconds())
            must_retry = False
            for row in due:
                try:
                    fired += self._fire_alone(row, now)
                except GateUnavailable as error:
                    must_retry = True
                    logger.warning("schedule %s: its occurrence is postponed: %s", row.name, error)
            if must_retry:
                return FireResult(fired, RETRY_SECONDS)

    # --- one schedule

    def _fire_alone(self, row: Schedule, now: datetime) -> list[Fired]:
        """Fire what is due of one schedule; set the schedule aside if the values of its row make that impossible."""
        return each_alone(
            table_of(Schedule), [row.pk], lambda _: self._fire(row, now), database=writing_database(Schedule)
        )

    def _fire(self, seen: Schedule, now: datetime) -> list[Fired]:
        """Fire what is due of one schedule, in one transaction; nothing when it was changed since it was read."""
        with self._fenced():
            row = rows_of(Schedule).firing().select_for_update().filter(pk=seen.pk).first()
            if row is None or row.next_occurrence_at != seen.next_occurrence_at:
                return []
            try:
                due = due_occurrences(row, now)
                next_occurrence_at = row.timing.after(now)
            except InvalidOption as error:
                self._write(row, row.next_occurrence_at or now, OccurrenceOutcome.REFUSED, str(error))
                rows_of(Schedule).filter(pk=row.pk).update(next_occurrence_at=None)
                logger.error("schedule %s is not valid and will not fire again: %s", row.name, error)
                return []
            if due.last_missed is not None:
                note = f"this occurrence and those before it, back to {_in_words(row.next_occurrence_at)}"
                self._write(row, due.last_missed, OccurrenceOutcome.MISSED, note)
                logger.warning("schedule %s: missed occurrences are skipped: %s", row.name, note)
            fired = [found for occurs_at in due.to_fire if (found := self._fire_occurrence(row, occurs_at)) is not None]
            rows_of(Schedule).filter(pk=row.pk).update(next_occurrence_at=next_occurrence_at)
        failpoints.reach("fire.committed")
        return fired

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
            occurrence.outcome, occurrence.note = OccurrenceOutcome.REFUSED, text_of(error)
            text = "schedule %s: its occurrence of %s was refused: %s"
            logger.error(text, row.name, _in_words(occurs_at), error, extra={"task": row.task})
        except BaseException as error:
            if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
                raise
            # The project's code: a gate's callable, or a receiver that vetoes. It must not stop other schedules.
            if passes(error):
                raise
            note = f"{class_name(error)}: {text_of(error)}"
            occurrence.outcome, occurrence.note = OccurrenceOutcome.REFUSED, note
            text = "schedule %s: its occurrence of %s could not be queued"
            logger.exception(text, row.name, _in_words(occurs_at), extra={"task": row.task})
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
        fire.
        """
        written = 0
        with self._fenced():
            rows = {row.name: row for row in usable_schedules(rows_of(Schedule).select_for_update())}
            declared = dict(declared_schedules())
            now = database_clock.now()
            for name, (task, declaration) in declared.items():
                row = rows.get(name) or Schedule(name=name, is_declared=True, created_at=now)
                if not row.is_declared:
                    logger.error("schedule %s in code has the name of one made in the admin and does not fire", name)
                    continue
                written += _update_row(row, task, declaration, now)
            removed = [
                row for row in rows.values() if row.is_declared and not row.retired_at and row.name not in declared
            ]
            for row in removed:
                logger.warning("schedule %s was removed from the code and does not fire any more", row.name)
            written += rows_of(Schedule).filter(pk__in=[row.pk for row in removed]).update(retired_at=now)
        return written


def _soonest() -> list[Any]:
    """Return the schedules whose next occurrence comes first, each with the time `now` of the database."""
    rows = rows_of(Schedule).firing().annotate(now=DatabaseNow()).order_by("next_occurrence_at")
    return usable_schedules(rows, SCHEDULES_PER_PAGE)


def usable_schedules(rows: QuerySet[Schedule], most: int = MOST_SCHEDULES) -> list[Schedule]:
    """Return the first of these schedules; set those aside that cannot be read. rows: not sliced."""
    if not set_aside:
        try:
            return [_checked(row) for row in rows[:most]]
        except ROW_ERRORS as error:
            if kind_of(error) is not ErrorKind.ROW:
                raise
    ids = [id for (id,) in page_of(rows_of(Schedule).order_by("pk"), size=MOST_SCHEDULES)]
    readable = each_alone(
        table_of(Schedule), ids, lambda part: [_checked(row).pk for row in rows.filter(pk__in=part)], database=rows.db
    )
    return list(rows.filter(pk__in=readable)[:most])


def _checked(row: Schedule) -> Schedule:
    """Return the row. Raises: TypeError when SQLite, which keeps any value in any column, has a wrong one."""
    for name in ("jitter_seconds", "missed_cap"):
        if not isinstance(getattr(row, name), int):
            raise TypeError(f"{name} is no number")
    for name in ("created_at", "next_occurrence_at"):
        # Django reads a text that is no date as None.
        if getattr(row, name) is None and (name == "created_at" or hasattr(row, "now")):
            raise TypeError(f"{name} is no date")
    return row


def due_occurrences(row: Schedule, now: datetime) -> DueOccurrences:
    """Decide which occurrences of a schedule to fire now. Raises: InvalidOption.

    The latest fires if it is on time. The schedule's `missed` policy decides about the others, and about a late one.
    """
    first = row.next_occurrence_at
    if first is None:
        return DueOccurrences([], None)
    wanted = row.missed_cap if row.missed == Missed.ALL else 1
    found = row.timing.latest(first - timedelta(microseconds=1), now, wanted + 1)
    to_fire = found[-wanted:]
    on_time = max(ON_TIME_SECONDS, 2 * conf.current().lock_ttl_seconds)
    if row.missed == Missed.SKIP and to_fire and (now - to_fire[-1]).total_seconds() > on_time:
        to_fire = []
    missed = found[: len(found) - len(to_fire)]
    return DueOccurrences(to_fire, missed[-1] if missed else None)


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
                logger.error("schedule %s is declared twice; that of %s is ignored", name, task.module_path)
                continue
            seen.add(name)
            yield name, (task, declaration)


def _update_row(row: Schedule, task: Task[Any, Any], declaration: Declaration, now: datetime) -> bool:
    given = payload.of_call(declaration.args, dict(declaration.kwargs))
    values = {name: getattr(declaration, name) for name in DECLARED_FIELDS if hasattr(declaration, name)}
    values |= {"task": task.module_path, "args": given.args, "kwargs": given.kwargs}
    # Python finds True, 1 and 1.0 equal, also within lists, but a task may not.
    changed = {name for name, value in values.items() if getattr(row, name) != value}
    changed |= {name for name in ("args", "kwargs") if not payload.is_same(getattr(row, name), values[name])}
    if not changed and row.retired_at is None and not row._state.adding:
        return False
    for name in changed:
        setattr(row, name, values[name])
    if row._state.adding or row.retired_at is not None or changed & set(Schedule.TIMING_FIELDS):
        row.retired_at = None
        row.plan_next(now)
    row.save()
    return True


def _jitter(row: Schedule, occurs_at: datetime) -> timedelta:
    """Return the delay of an occurrence, the same in every process."""
    digest = hashlib.sha256(f"{row.pk} {occurs_at.timestamp()}".encode()).digest()
    return timedelta(seconds=row.jitter_seconds) * (int.from_bytes(digest[:4]) / 2**32)


def _in_words(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
