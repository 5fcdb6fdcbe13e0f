"""Fire schedules: each occurrence becomes one task, exactly once.

An occurrence is a row, unique by schedule and time, written in the transaction of its task. So any number of processes
may run this at once, be killed anywhere, and have clocks that disagree. Only the leader runs it, to save work. Times
come from the database's clock. Schedules declared in code have rows too, which `sync` updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError, connections
from django.db.models import QuerySet

from .. import conf
from ..core import compat, payload
from ..core.guard import class_name, get_logger, is_a, passes
from ..core.payload import text_of
from ..core.schedules import Declaration, declared_schedules
from ..core.typed import carry_of
from ..exceptions import (
    BrokerUnavailable,
    DuplicateTask,
    EnqueueRefused,
    GateUnavailable,
    InvalidOption,
    LockLost,
    RunAborted,
)
from ..models import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskRecord
from ..storage import database_clock, identity
from ..storage.errors import ErrorKind, kind_of
from ..storage.isolation import ROW_ERRORS, each_alone, page_of, set_aside, table_of
from ..storage.routing import rows_of, transaction_of, writing_database
from ..tasks import Task
from .occurrences import enqueue, enqueue_together, has_receivers, may_share, with_unfinished_task

# --- Which occurrences of a schedule are due, and which of them were missed.

# An occurrence this late may be fired by the successor of a dead leader; one that is later counts as missed. A leader
# that pauses no longer than this between two rounds has been at work all the time.
ON_TIME_SECONDS = 60


class Round(NamedTuple):
    """When the leader looked what is due, and when it had fired all of that."""

    began_at: datetime
    ended_at: datetime


class DueOccurrences(NamedTuple):
    """The occurrences of a schedule to fire now. last_missed: the latest of those not to fire, or None."""

    to_fire: list[datetime]
    last_missed: datetime | None


def earliest_in_time(now: datetime, last: Round | None) -> datetime:
    """Return since when an occurrence is in time. now: the beginning of this round. last: the one before."""
    longest = timedelta(seconds=max(ON_TIME_SECONDS, 2 * conf.current().lock_ttl_seconds))
    if last is None or now - last.ended_at > longest:
        return now - longest
    # The leader was at work, so it is no fault of an occurrence that it came due in a long round.
    return min(now - longest, last.began_at)


def due_occurrences(row: Schedule, now: datetime, in_time_since: datetime) -> DueOccurrences:
    """Decide which occurrences of a schedule to fire now. Raises: InvalidOption.

    The latest fires if it is in time. The schedule's `missed` policy decides about the others, and about a late one.
    """
    first = row.next_occurrence_at
    if first is None:
        return DueOccurrences([], None)
    wanted = row.missed_cap if row.missed == Missed.ALL else 1
    found = row.timing.latest(first - timedelta(microseconds=1), now, wanted + 1)
    to_fire = found[-wanted:]
    if row.missed == Missed.SKIP and to_fire and to_fire[-1] < in_time_since:
        to_fire = []
    missed = found[: len(found) - len(to_fire)]
    return DueOccurrences(to_fire, missed[-1] if missed else None)


# --- Occurrences that get no task: what is written with them, and what is logged.

logger = get_logger("django_asyncq.scheduling.scheduler")


class Refusal(NamedTuple):
    """The outcome and the note of an occurrence. log: logs why; to be called when that is written."""

    outcome: OccurrenceOutcome
    note: str
    log: Callable[[], None]


def refused(row: Schedule, occurs_at: datetime, error: BaseException) -> Refusal:
    """Return what is written of an occurrence whose enqueue was refused.

    A task that is unique has it so that an earlier one has not finished: that is no error.
    """
    is_duplicate = is_a(error, DuplicateTask)
    level, word = (logging.INFO, "skipped") if is_duplicate else (logging.ERROR, "refused")
    text = "schedule %s: its occurrence of %s was %s: %s"
    log = partial(logger.log, level, text, row.name, in_words(occurs_at), word, error, extra={"task": row.task})
    return Refusal(OccurrenceOutcome.SKIPPED if is_duplicate else OccurrenceOutcome.REFUSED, text_of(error), log)


def spoiled(row: Schedule, occurs_at: datetime, error: BaseException) -> Refusal:
    """Return what is written of an occurrence whose enqueue ran code of the project that raised an error."""
    text = "schedule %s: its occurrence of %s could not be queued"
    log = partial(logger.error, text, row.name, in_words(occurs_at), exc_info=error, extra={"task": row.task})
    return Refusal(OccurrenceOutcome.REFUSED, f"{class_name(error)}: {text_of(error)}", log)


def in_words(moment: datetime | None) -> str:
    """Return a time in UTC for notes and log lines, "" for none."""
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- Fire schedules in one transaction: their occurrences, the tasks of these, and when each schedule is due next.
#
# One schedule alone is the same with a list of one. Whatever fails in a list rolls all of it back, so that the
# caller can fire its schedules one by one.

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
        _plan_next(plans)
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
    "version",
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


def _changes(row: Schedule, task: Task[Any, Any], declaration: Declaration) -> dict[str, Any]:
    """Return the values that the code declares and the row lacks."""
    given = payload.of_call(declaration.args, dict(declaration.kwargs), carry=carry_of(task))
    values = {name: getattr(declaration, name) for name in DECLARED_FIELDS if hasattr(declaration, name)}
    values |= {"task": task.module_path, "args": given.args, "kwargs": given.kwargs, "version": task.version}
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


# --- Enable and disable schedules.


@dataclass
class Switched:
    """The result of enabling or disabling schedules.

    never_firing: enabled schedules with no occurrence left. broken: schedules that cannot be enabled, and why.
    """

    changed: list[Schedule] = field(default_factory=list)
    unchanged: list[Schedule] = field(default_factory=list)
    never_firing: list[Schedule] = field(default_factory=list)
    broken: list[tuple[Schedule, InvalidOption]] = field(default_factory=list)


def switch(pks: Iterable[UUID], *, enabled: bool) -> Switched:
    """Enable or disable schedules. An enabled one continues with its next occurrence; earlier ones are not missed."""
    switched = Switched()
    for pk in pks:
        with transaction_of(Schedule):
            row = rows_of(Schedule).select_for_update().filter(pk=pk).first()
            if row is None:
                continue
            if row.enabled == enabled:
                switched.unchanged.append(row)
                continue
            row.enabled = enabled
            try:
                if enabled:
                    row.plan_next(database_clock.now())
            except InvalidOption as error:
                switched.broken.append((row, error))
                continue
            row.save(update_fields=["enabled", "next_occurrence_at"])
            switched.changed.append(row)
            if enabled and row.next_occurrence_at is None:
                switched.never_firing.append(row)
    return switched


def resume_all() -> bool:
    """End the pause of all schedules, such as that of a copied database; return whether there was one.

    Each continues with its next occurrence; earlier ones are not missed.
    """
    with transaction_of(Schedule):
        now = database_clock.now()
        for row in usable_schedules(rows_of(Schedule).planned()):
            # One that is not valid fires once more, which says why.
            with suppress(InvalidOption):
                row.plan_next(now)
                rows_of(Schedule).filter(pk=row.pk).update(next_occurrence_at=row.next_occurrence_at)
        return identity.resume_schedules()
