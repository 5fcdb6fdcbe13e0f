"""Ticks of schedules become tasks, each once.

An occurrence is a row, unique by schedule and time, written in the transaction of its task. So any number of processes may
run this at once, be killed anywhere, and have clocks that disagree; that one at a time does is only economy. Times
come from the database's clock. What is declared in code has rows too: `sync` brings them up to date.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from .. import compat, conf, failpoints
from ..definitions import payload
from ..definitions.schedules import Declaration
from ..exceptions import BrokerUnavailable, EnqueueRefused, GateUnavailable, InvalidOption, RunAborted
from ..models import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskState
from ..registry import every_task, registered
from ..tasks import Task, check_call

logger = logging.getLogger("django_asyncq.scheduling.scheduler")

SCHEDULES_PER_LOOK = 100
# An occurrence so late may still have been fired by a successor of a dead leader; later it counts as missed.
ON_TIME_SECONDS = 60
# Ticks whose tasks are looked at for overlap; one that is left out because of an older one than these cannot be.
LATEST_OCCURRENCES = 100
# A schedule whose gate cannot be asked now is looked at again so soon.
AGAIN_SECONDS = 1.0
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


class DatabaseNow(Now):
    """The database's time, in UTC also on a MySQL whose session has another zone."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


class Fired(NamedTuple):
    """An occurrence that became a task. task_id: of the row."""

    schedule: Schedule
    occurs_at: datetime
    task_id: UUID


class Look(NamedTuple):
    """What one look did. next_seconds: until the nearest occurrence to come; None when there is none."""

    fired: list[Fired]
    next_seconds: float | None


class Due(NamedTuple):
    """What a schedule owes. left_out: the latest of those that are not to be fired, or None."""

    occurrences: list[datetime]
    left_out: datetime | None


class Scheduler:
    """Fires what is due.

    fenced: a context manager, in which a transaction is open and proves that this process may write; default a plain
    transaction. clock: aware time, default the database's.
    """

    def __init__(self, fenced: Fenced = transaction.atomic, clock: Clock | None = None) -> None:
        self._fenced = fenced
        self._clock = clock

    def look(self) -> Look:
        """Fire all that is due. Raises: django.db.Error, BrokerUnavailable, LockLost; what was fired stays so."""
        fired: list[Fired] = []
        while True:
            rows: list[Any] = list(
                Schedule.objects.firing()
                .annotate(now=DatabaseNow())
                .order_by("next_occurrence_at")[:SCHEDULES_PER_LOOK]
            )
            if not rows:
                return Look(fired, None)
            now = rows[0].now if self._clock is None else self._clock()
            due = [row for row in rows if row.next_occurrence_at <= now]
            if not due:
                return Look(fired, (rows[0].next_occurrence_at - now).total_seconds())
            is_put_off = False
            for row in due:
                try:
                    fired += self._fire(row, now)
                except GateUnavailable as error:
                    is_put_off = True
                    logger.warning("schedule %s: its occurrence waits: %s", row.name, error)
            if is_put_off:
                return Look(fired, AGAIN_SECONDS)

    # --- one schedule

    def _fire(self, seen: Schedule, now: datetime) -> list[Fired]:
        """Fire what one schedule owes, in one transaction; nothing when it was changed since it was read."""
        with self._fenced():
            row = Schedule.objects.firing().select_for_update().filter(pk=seen.pk).first()
            if row is None or row.next_occurrence_at != seen.next_occurrence_at:
                return []
            try:
                due = what_is_due(row, now)
                next_occurrence_at = row.timing.after(now)
            except InvalidOption as error:
                self._write(row, row.next_occurrence_at or now, OccurrenceOutcome.REFUSED, str(error))
                Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=None)
                logger.error("schedule %s does not fire any more: %s", row.name, error)
                return []
            if due.left_out is not None:
                note = f"this occurrence and those before it, back to {_text(row.next_occurrence_at)}"
                self._write(row, due.left_out, OccurrenceOutcome.MISSED, note)
                logger.warning("schedule %s: missed occurrences are left out: %s", row.name, note)
            fired = [found for occurs_at in due.occurrences if (found := self._occurrence(row, occurs_at)) is not None]
            Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=next_occurrence_at)
        failpoints.reach("fire.committed")
        return fired

    def _occurrence(self, row: Schedule, occurs_at: datetime) -> Fired | None:
        """Write one occurrence and its task; None when it is written already, is left out, or is refused."""
        if row.overlap == Overlap.SKIP and is_busy(row):
            self._write(row, occurs_at, OccurrenceOutcome.SKIPPED)
            return None
        occurrence = self._write(row, occurs_at, OccurrenceOutcome.QUEUED)
        if occurrence is None:
            return None
        failpoints.reach("fire.occurrence_written")
        try:
            # A transaction within: a query of the project's code that fails must not spoil the occurrence's.
            with transaction.atomic():
                occurrence.task_id = enqueue(row, occurs_at)
        except (GateUnavailable, BrokerUnavailable, OperationalError, InterfaceError):
            raise
        except (EnqueueRefused, InvalidOption, RunAborted, compat.InvalidTask) as error:
            occurrence.outcome, occurrence.note = OccurrenceOutcome.REFUSED, str(error)
            logger.error("schedule %s: its occurrence of %s is refused: %s", row.name, _text(occurs_at), error)
        except Exception as error:
            # Code of the project: a gate's callable, a receiver that vetoes. It must not stop the other schedules.
            occurrence.outcome, occurrence.note = OccurrenceOutcome.REFUSED, f"{type(error).__qualname__}: {error}"
            logger.exception("schedule %s: its occurrence of %s cannot be queued", row.name, _text(occurs_at))
        occurrence.save(update_fields=["task", "outcome", "note"])
        return Fired(row, occurs_at, occurrence.task_id) if occurrence.task_id else None

    @staticmethod
    def _write(row: Schedule, occurs_at: datetime, outcome: OccurrenceOutcome, note: str = "") -> Occurrence | None:
        """Insert an occurrence; None when there is one of this time."""
        try:
            with transaction.atomic():
                return Occurrence.objects.create(schedule=row, occurs_at=occurs_at, outcome=outcome, note=note)
        except IntegrityError:
            return None

    # --- what code declares

    def sync(self) -> int:
        """Bring the rows of declared schedules up to date; return how many were written.

        Whether they are enabled is the operator's. One that is gone from the code is kept and fires no more.
        """
        written = 0
        with self._fenced():
            rows = {row.name: row for row in Schedule.objects.select_for_update()}
            declared = dict(declared_schedules())
            now = timezone.now()
            for name, (task, declaration) in declared.items():
                row = rows.get(name) or Schedule(name=name, is_declared=True)
                if not row.is_declared:
                    logger.error("schedule %s in code has the name of one made in the admin: it does not fire", name)
                    continue
                written += _bring_up_to_date(row, task, declaration, now)
            gone = [row for row in rows.values() if row.is_declared and not row.retired_at and row.name not in declared]
            for row in gone:
                logger.warning("schedule %s is gone from the code: it fires no more", row.name)
            written += Schedule.objects.filter(pk__in=[row.pk for row in gone]).update(retired_at=now)
        return written


def what_is_due(row: Schedule, now: datetime) -> Due:
    """Decide which occurrences of a schedule are to be fired now. Raises: InvalidOption.

    The latest is, if it is on time; of the others, and of a late one, decides `missed`.
    """
    first = row.next_occurrence_at
    if first is None:
        return Due([], None)
    wanted = row.missed_cap if row.missed == Missed.ALL else 1
    found = row.timing.latest(first - timedelta(microseconds=1), now, wanted + 1)
    kept = found[-wanted:]
    on_time = max(ON_TIME_SECONDS, 2 * conf.current().lock_ttl_seconds)
    if row.missed == Missed.SKIP and kept and (now - kept[-1]).total_seconds() > on_time:
        kept = []
    left_out = found[: len(found) - len(kept)]
    return Due(kept, left_out[-1] if left_out else None)


def is_busy(row: Schedule) -> bool:
    """Whether a task of a recent occurrence is queued, running, or waits for a retry."""
    occurrences = Occurrence.objects.filter(schedule=row, task_id__isnull=False).order_by("-occurs_at")[
        :LATEST_OCCURRENCES
    ]
    return any(
        state in (TaskState.QUEUED, TaskState.RUNNING) or (state == TaskState.FAILED and retry_at is not None)
        for state, retry_at in occurrences.values_list("task__state", "task__retry_at")
    )


def enqueue(row: Schedule, occurs_at: datetime | None = None) -> UUID:
    """Queue the schedule's task, in the caller's transaction; return its id. occurs_at: None means now, without jitter.

    Raises: TaskNotRegistered, InvalidOption (not schedulable, wrong arguments), EnqueueRefused, InvalidTask.
    """
    task = registered(row.task)
    if not row.is_declared and not task.schedulable:
        raise InvalidOption(f"task {row.task} may not be scheduled by people: declare it with schedulable=True")
    check_call(task, row.args, row.kwargs)
    if not hasattr(task.get_backend(), "enqueue_many"):
        raise InvalidOption(f"task {row.task} is of the backend {task.backend!r}, which has no rows")
    if row.jitter_seconds and occurs_at is not None:
        task = task.using(run_after=occurs_at + _jitter(row, occurs_at))
    return UUID(task.enqueue(*row.args, **row.kwargs).id)


def run_now(row: Schedule) -> Occurrence:
    """Queue the schedule's task at once, because a person asked, whatever else of it is running.

    Raises: what `enqueue` raises; nothing has been written then.
    """
    with transaction.atomic():
        occurrence = Occurrence.objects.create(schedule=row, occurs_at=timezone.now(), by_person=True)
        occurrence.task_id = enqueue(row)
        occurrence.save(update_fields=["task"])
    return occurrence


def declared_schedules() -> Iterator[tuple[str, tuple[Task[Any, Any], Declaration]]]:
    """Yield the schedules of all registered tasks by name; of two with one name the first task's."""
    seen: set[str] = set()
    for task in every_task():
        found = task.schedule if isinstance(task.schedule, tuple) else (task.schedule,)
        for declaration in found:
            if declaration is None:
                continue
            name = declaration.name or task.module_path
            if name in seen:
                logger.error("schedule %s is declared twice; that of %s is left out", name, task.module_path)
                continue
            seen.add(name)
            yield name, (task, declaration)


def _bring_up_to_date(row: Schedule, task: Task[Any, Any], declaration: Declaration, now: datetime) -> bool:
    given = payload.of_call(declaration.args, dict(declaration.kwargs))
    values = {name: getattr(declaration, name) for name in DECLARED_FIELDS if hasattr(declaration, name)}
    values |= {"task": task.module_path, "args": given.args, "kwargs": given.kwargs}
    changed = {name for name, value in values.items() if getattr(row, name) != value}
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
    """Return the delay of an occurrence: any process finds the same."""
    digest = hashlib.sha256(f"{row.pk} {occurs_at.timestamp()}".encode()).digest()
    return timedelta(seconds=row.jitter_seconds) * (int.from_bytes(digest[:4]) / 2**32)


def _text(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
