"""Fire schedules in one transaction: their occurrences, the tasks of these, and when each schedule is due next.

One schedule alone is the same with a list of one. Whatever fails in a list rolls all of it back, so that the caller can
fire its schedules one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError, connections
from django.db.models import QuerySet

from .. import compat, failpoints
from ..exceptions import BrokerUnavailable, EnqueueRefused, GateUnavailable, InvalidOption, RunAborted
from ..guard import get_logger, is_a, passes
from ..models import Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskRecord
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import rows_of, transaction_of
from .due import due_occurrences
from .enqueueing import enqueue, enqueue_together, has_receivers, with_unfinished_task
from .refusals import in_words, refused, spoiled

logger = get_logger("django_asyncq.scheduling.firing")

# How many occurrences one transaction writes at most, unless they are those of one schedule.
MOST_OCCURRENCES = 1000

Fenced = Callable[[], AbstractContextManager[Any]]
# Logs a line. A transaction that is rolled back logs none, since its schedules are fired again.
Line = Callable[[], None]


class Fired(NamedTuple):
    """An occurrence that became a task. task_id: of the row."""

    schedule: Schedule
    occurs_at: datetime
    task_id: UUID


class RowLocked(Exception):
    """Another transaction has locked the row of a schedule, or writes an occurrence of it."""


class _Plan(NamedTuple):
    """What to write of one schedule, and what to log then.

    occurrences: the oldest first, none of them saved; those to fire are QUEUED.
    """

    row: Schedule
    occurrences: list[Occurrence]
    next_occurrence_at: datetime | None
    lines: list[Line]


def fire(seen: Sequence[Schedule], now: datetime, in_time_since: datetime, fenced: Fenced) -> dict[UUID, list[Fired]]:
    """Fire what is due of some schedules, in one transaction; return what was fired, by the ids of the schedules.

    seen: as they were read. fenced: opens the transaction. Those that are not in the result were left as they are:
    they were changed meanwhile, another transaction has locked them, or they would make this one too long.
    Raises: RowLocked when all of them are locked; nothing was written then, nor after any other error.
    """
    with fenced():
        found = {row.pk: row for row in locked(rows_of(Schedule).firing().filter(pk__in=[row.pk for row in seen]))}
        rows = [found[row.pk] for row in seen if _is_unchanged(found.get(row.pk), row)]
        plans = _within_limit([_planned(row, now, in_time_since) for row in rows])
        lines = [line for plan in plans for line in plan.lines]
        fired: dict[UUID, list[Fired]] = {plan.row.pk: [] for plan in plans}
        # An occurrence of each schedule, then the next one of each: whether it fires depends on the one before.
        for step in zip_longest(*(plan.occurrences for plan in plans)):
            for each in _write(list(filter(None, step)), lines):
                fired[each.schedule.pk].append(each)
        failpoints.reach("fire.occurrences_written")
        _plan_next(plans)
    failpoints.reach("fire.committed")
    for line in lines:
        line()
    return fired


def locked(rows: QuerySet[Schedule]) -> list[Schedule]:
    """Lock and return rows, in the order of their ids, without those that another transaction has locked.

    Raises: RowLocked, without waiting, when it has locked all of them. A database that cannot skip them waits.
    """
    skip_locked = connections[rows.db].features.has_select_for_update_skip_locked
    found = list(rows.order_by("pk").select_for_update(skip_locked=skip_locked))
    if not found and skip_locked and rows.exists():
        raise RowLocked("another transaction has locked its row")
    return found


def _is_unchanged(row: Schedule | None, seen: Schedule) -> bool:
    return row is not None and row.next_occurrence_at == seen.next_occurrence_at


def _planned(row: Schedule, now: datetime, in_time_since: datetime) -> _Plan:
    """Decide what to write of one schedule."""
    try:
        due = due_occurrences(row, now, in_time_since)
        next_occurrence_at = row.timing.after(now)
    except InvalidOption as error:
        line = partial(logger.error, "schedule %s is not valid and will not fire again: %s", row.name, error)
        refusal = _new(row, row.next_occurrence_at or now, OccurrenceOutcome.REFUSED, str(error))
        return _Plan(row, [refusal], None, [line])
    occurrences = [_new(row, occurs_at, OccurrenceOutcome.QUEUED) for occurs_at in due.to_fire]
    if due.last_missed is None:
        return _Plan(row, occurrences, next_occurrence_at, [])
    note = f"this occurrence and those before it, back to {in_words(row.next_occurrence_at)}"
    missed = _new(row, due.last_missed, OccurrenceOutcome.MISSED, note)
    line = partial(logger.warning, "schedule %s: missed occurrences are skipped: %s", row.name, note)
    return _Plan(row, [missed, *occurrences], next_occurrence_at, [line])


def _new(row: Schedule, occurs_at: datetime, outcome: OccurrenceOutcome, note: str = "") -> Occurrence:
    return Occurrence(schedule=row, occurs_at=occurs_at, outcome=outcome, note=note, created_at=database_clock.now())


def _within_limit(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans for one transaction: at most MOST_OCCURRENCES in all, or a single plan of any length."""
    if len(plans) == 1:
        return list(plans)
    kept, count = [], 0
    for plan in plans:
        if count + len(plan.occurrences) <= MOST_OCCURRENCES:
            count += len(plan.occurrences)
            kept.append(plan)
    return kept


def _write(occurrences: Sequence[Occurrence], lines: list[Line]) -> list[Fired]:
    """Write occurrences of different schedules with their tasks, without those that exist; return what was fired.

    Raises: RowLocked when another transaction has just written one of them.
    """
    schedules, times = {each.schedule_id for each in occurrences}, {each.occurs_at for each in occurrences}
    rows = rows_of(Occurrence).filter(schedule__in=schedules, occurs_at__in=times).order_by()
    existing = set(rows.values_list("schedule_id", "occurs_at"))
    # Those of a schedule that was set back.
    occurrences = [each for each in occurrences if (each.schedule_id, each.occurs_at) not in existing]
    to_fire = _without_overlap([each for each in occurrences if each.outcome == OccurrenceOutcome.QUEUED])
    if len(to_fire) > 1:
        enqueue_together(to_fire)
    for each in to_fire:
        if each.task_id is None:
            _enqueue_alone(each, lines)
    try:
        _insert(occurrences)
    except IntegrityError as error:
        raise RowLocked("another transaction has just written one of its occurrences") from error
    return [Fired(each.schedule, each.occurs_at, each.task_id) for each in to_fire if each.task_id is not None]


def _without_overlap(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return the occurrences to fire; mark the others as skipped."""
    unfinished = with_unfinished_task(
        [each.schedule_id for each in occurrences if each.schedule.overlap == Overlap.SKIP]
    )
    for each in occurrences:
        if each.schedule_id in unfinished:
            each.outcome = OccurrenceOutcome.SKIPPED
    return [each for each in occurrences if each.outcome == OccurrenceOutcome.QUEUED]


def _enqueue_alone(occurrence: Occurrence, lines: list[Line]) -> None:
    """Enqueue the task of one occurrence, or note why it is refused.

    Raises: what concerns the stores, and not this occurrence: django.db.Error, GateUnavailable, BrokerUnavailable.
    """
    row, occurs_at = occurrence.schedule, occurrence.occurs_at
    try:
        # A nested transaction: a failed query of the project's code must not spoil the others' transaction.
        with transaction_of(TaskRecord):
            occurrence.task_id = enqueue(row, occurs_at)
        return
    except (GateUnavailable, BrokerUnavailable):
        raise
    except (EnqueueRefused, InvalidOption, RunAborted, compat.InvalidTask) as error:
        refusal = refused(row, occurs_at, error)
    except BaseException as error:
        if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
            raise
        # The project's code: a gate's callable, or a receiver that vetoes. It must not stop other schedules.
        if passes(error):
            raise
        refusal = spoiled(row, occurs_at, error)
    occurrence.outcome, occurrence.note = refusal.outcome, refusal.note
    lines.append(refusal.log)


def _insert(occurrences: Sequence[Occurrence]) -> None:
    """Insert occurrences. Raises: IntegrityError when one exists."""
    rows = rows_of(Occurrence)
    if not has_receivers(Occurrence):
        rows.bulk_create(occurrences)
        return
    for each in occurrences:
        each.save(using=rows.db, force_insert=True)


def _plan_next(plans: Sequence[_Plan]) -> None:
    """Write when each schedule is due next; no signal is sent, since the scheduler need not be woken."""
    for plan in plans:
        plan.row.next_occurrence_at = plan.next_occurrence_at
    rows_of(Schedule).bulk_update([plan.row for plan in plans], ["next_occurrence_at"])
