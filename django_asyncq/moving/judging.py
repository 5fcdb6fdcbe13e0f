"""Say what becomes of the schedules of another queue here: the same, the same but …, or not, because ….

Each is compared with what this package would fire: in the days after the cutover, in the nights in which the clocks
change, and over its next occurrences. It reads this project's tasks and schedules, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Any

from django.core.exceptions import ValidationError

from ..core import payload
from ..core.calls import check_call
from ..core.guard import attempt, class_name
from ..core.masking import masker_of_call
from ..core.registry import find, why_missing
from ..core.schedules import LONGEST_NAME, declared_schedules
from ..core.timing import Timing
from ..core.typed import carry_of
from ..exceptions import InvalidOption
from ..models import Schedule
from ..scheduling.scheduler import usable_schedules
from ..storage.routing import rows_of
from .clocks import changes, zone_called
from .old import CannotImport, OldSchedule, Rule
from .writing import line_of

# A day of the week comes in it, and a schedule that fires each minute is not compared for long.
FIRST_DAYS = timedelta(days=8)
# Those of a year, and of the next one's beginning.
DAYS_OF_CHANGES = 400
AROUND_CHANGE = timedelta(hours=4)
OCCURRENCES_COMPARED = 60
# Of an occurrence at each minute in the first days.
MOST_IN_A_WINDOW = 12_000
# How many moments a sentence names.
MOMENTS_NAMED = 3
# The longest list of occurrences that is counted to find where a schedule ends.
MOST_COUNTED = 10_000
COMPARED = ("task", "cron", "interval_seconds", "zone", "ends_at", "enabled", "missed")


class Kind(StrEnum):
    """What becomes of a schedule: it fires as before; with a difference; or it cannot be written."""

    SAME = "same"
    BUT = "same, but"
    NOT = "not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of one schedule.

    reasons: what is otherwise, or why it cannot be written. row: what `writing` inserts; None for NOT. first: its first
    occurrence here. line: what stands in code for the same, with secrets masked. is_there: a schedule of this name
    exists; differs: in what, each as "field: there, here".
    """

    old: OldSchedule
    kind: Kind
    reasons: tuple[str, ...] = ()
    task: str = ""
    row: Schedule | None = None
    first: datetime | None = None
    line: str = ""
    is_there: bool = False
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the person who imports has asked for.

    cutover: the first occurrence here is strictly later. now: by the database's clock. tasks: the name of a task there
    → its name here. disabled: write all of them disabled.
    """

    cutover: datetime
    now: datetime
    tasks: Mapping[str, str]
    disabled: bool = False


def judge(schedules: Sequence[OldSchedule], wish: Wish) -> list[Verdict]:
    """Return the verdict on each schedule, in the same order. The task modules have been loaded."""
    existing = {row.name: row for row in usable_schedules(rows_of(Schedule))}
    declared = dict(declared_schedules())
    names: set[str] = set()
    verdicts = []
    for old in schedules:
        # Whatever a row holds, the others are judged.
        found = attempt(_judge_one, old, wish, existing.get(old.name), declared.keys() | names)
        reason = "" if found.error is None else payload.text_of(found.error) or class_name(found.error)
        verdicts.append(found.value or Verdict(old=old, kind=Kind.NOT, reasons=(reason,)))
        names.add(old.name)
    return verdicts


def _judge_one(old: OldSchedule, wish: Wish, existing: Schedule | None, taken: set[str]) -> Verdict:
    """Return the verdict on one schedule. Raises: CannotImport, InvalidOption."""
    name = wish.tasks.get(old.task, old.task)
    row, reasons, first = None, old.differences, None
    refusals = []
    try:
        row, first, more = _row_of(old, wish, name)
        reasons += more
    except (CannotImport, InvalidOption) as error:
        refusals.append(str(error))
    line = "" if row is None else _line_of(row)
    refusals += _refusals(old, name, row, taken)
    if row is None or refusals:
        return Verdict(old=old, kind=Kind.NOT, reasons=tuple(refusals), task=name, first=first, line=line)
    differs = () if existing is None else tuple(_differences(existing, row))
    kind = Kind.BUT if reasons else Kind.SAME
    return Verdict(
        old=old,
        kind=kind,
        reasons=reasons,
        task=row.task,
        row=row,
        first=first,
        line=line,
        is_there=existing is not None,
        differs=differs,
    )


def _row_of(old: OldSchedule, wish: Wish, name: str) -> tuple[Schedule, datetime, tuple[str, ...]]:
    """Return the row to write, its first occurrence, and what is otherwise. Raises: CannotImport, InvalidOption."""
    if old.rule is None:
        raise CannotImport(old.refusal)
    rule, cutover = old.rule, wish.cutover
    begin = cutover if old.starts_at is None else max(cutover, old.starts_at - timedelta.resolution)
    starts_at = next(rule.old(begin), None)
    ends_at = old.ends_at
    if old.count is not None:
        ends_at = _end_of(rule, old.count, begin)
    if starts_at is None or (ends_at is not None and starts_at > ends_at):
        raise CannotImport(f"it has no occurrence after the cutover ({in_words(cutover)})")
    task = find(name)
    given = payload.of_call(old.args, old.kwargs, carry=None if task is None else carry_of(task))
    row = Schedule(
        name=old.name,
        task=name if task is None else task.module_path,
        args=given.args,
        kwargs=given.kwargs,
        version=1 if task is None else task.version,
        cron=rule.cron,
        interval_seconds=rule.interval_seconds,
        zone=rule.zone,
        starts_at=starts_at,
        ends_at=starts_at if old.is_once else ends_at,
        enabled=old.enabled and not wish.disabled,
        missed=old.missed,
        created_at=wish.now,
    )
    timing = row.timing
    row.plan_next(cutover)
    if row.next_occurrence_at is None:
        raise CannotImport(f"it has no occurrence after the cutover ({in_words(cutover)})")
    more = tuple(_timing_differences(rule, timing, begin, row.ends_at))
    return row, row.next_occurrence_at, more + _switch_differences(old, wish)


def _end_of(rule: Rule, count: int, begin: datetime) -> datetime:
    """Return the last of `count` occurrences after a moment. Raises: CannotImport when they are too many to count."""
    if count > MOST_COUNTED:
        raise CannotImport(f"it ends after {count:,} more occurrences; here a schedule ends at a time (ends_at)")
    last = list(islice(rule.old(begin), count))[-1:]
    return last[0] if last else begin


def _switch_differences(old: OldSchedule, wish: Wish) -> tuple[str, ...]:
    if old.is_once:
        return ("it fires once; its row stays, with its one occurrence",)
    if old.count is not None:
        return (f"it ends after {old.count:,} more occurrence{'s'[: old.count != 1]}, as ends_at says",)
    return () if old.enabled else ("it is disabled there, and written disabled",)


def _refusals(old: OldSchedule, name: str, row: Schedule | None, taken: set[str]) -> Iterator[str]:
    """Yield why a schedule cannot be written, besides its timing."""
    if not old.name or len(old.name) > LONGEST_NAME or not old.name.isprintable():
        yield f"its name is no printable text of 1 to {LONGEST_NAME} characters"
    elif old.name in taken:
        yield f"the code, or a schedule before it, has the name {old.name!r}: rename it there"
    if not old.task:
        yield "it names no task"
        return
    task = find(name)
    if task is None:
        hint = "" if name != old.task else f"; for another name here give --map {name}=…"
        yield f"the task {name} is not declared: {why_missing(name)}{hint}"
        return
    if not task.schedulable:
        yield f"the task {name} is not schedulable: declare it with @task(schedulable=True), or write its line in code"
    if not hasattr(task.get_backend(), "enqueue_many"):
        yield f"the task {name} uses the backend {task.backend!r}, which has no rows"
    if row is not None:
        try:
            check_call(task, row.args, row.kwargs)
            row.full_clean(validate_unique=False, validate_constraints=False)
        except InvalidOption as error:
            yield str(error)
        except ValidationError as error:
            yield "; ".join(f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())


# --- Compare what the old queue would fire with what ours would.


def _timing_differences(rule: Rule, timing: Timing, begin: datetime, ends_at: datetime | None) -> Iterator[str]:
    """Yield where the two differ. Raises: CannotImport when they do at other times than when the clocks change."""
    if not rule.cron and rule.zone == "UTC":
        changing = []
    else:
        changing = list(changes(zone_called(rule.zone), begin, DAYS_OF_CHANGES))
    end = ends_at or datetime.max.replace(tzinfo=UTC)
    plain = [(begin, begin + FIRST_DAYS)] if rule.cron else []
    there = list(islice(rule.old(begin), OCCURRENCES_COMPARED))
    if there:
        plain.append((begin, there[-1]))
    near = [(change - AROUND_CHANGE, change + AROUND_CHANGE) for change in changing]
    for since, until in plain:
        only_there, only_here = _apart(rule, timing, max(begin, since), min(until, end))
        strays = [
            moment for moment in (*only_there, *only_here) if not any(first <= moment <= last for first, last in near)
        ]
        if strays and not changing:
            raise CannotImport(f"it would fire {_places(only_there, only_here)}")
        if strays:
            yield f"from {min(strays):%Y-%m-%d} on it fires {_places(only_there, only_here)}"
            return
    for since, until in near:
        only_there, only_here = _apart(rule, timing, max(begin, since), min(until, end))
        if only_there or only_here:
            yield f"when the clocks change ({rule.zone}) it fires {_places(only_there, only_here)}"


def _apart(rule: Rule, timing: Timing, since: datetime, until: datetime) -> tuple[list[datetime], list[datetime]]:
    """Return what only the old queue fires with since < moment <= until, and what only ours does."""
    both = []
    for moments in (rule.old(since), timing.occurrences(since)):
        found = set()
        for moment in islice(moments, MOST_IN_A_WINDOW):
            if moment > until:
                break
            found.add(moment)
        both.append(found)
    there, here = both
    return sorted(there - here), sorted(here - there)


def _places(only_there: Sequence[datetime], only_here: Sequence[datetime]) -> str:
    """Return what only one of the two fires, as words after "it fires"."""
    both = (("there", only_there), ("here", only_here))
    return " and ".join(f"only {place} {_moments(moments)}" for place, moments in both if moments)


def _moments(moments: Sequence[datetime]) -> str:
    more = f" and {len(moments) - MOMENTS_NAMED} more" if len(moments) > MOMENTS_NAMED else ""
    return "at " + ", ".join(in_words(each) for each in moments[:MOMENTS_NAMED]) + more


def in_words(moment: datetime) -> str:
    """Return a time in UTC for a sentence."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC").replace(":00 UTC", " UTC")


# --- Compare with what is there already.


def _differences(there: Schedule, row: Schedule) -> Iterator[str]:
    """Yield in what an existing schedule differs from the one that would be written; its cutover may be another."""
    if there.is_declared:
        yield "it is declared in code"
    for name in COMPARED:
        found, wanted = getattr(there, name), getattr(row, name)
        if found != wanted:
            texts = ["-" if value in (None, "") else str(value) for value in (found, wanted)]
            yield f"{name}: {texts[0]} in the database, {texts[1]} there"
    given = [{"args": each.args, "kwargs": each.kwargs} for each in (there, row)]
    if not payload.is_same(*given):
        texts = [" and ".join(map(str, _masked(each))) for each in (there, row)]
        yield f"arguments: {texts[0]} in the database, {texts[1]} there"
    if row.interval_seconds and there.interval_seconds == row.interval_seconds and _phase(there) != _phase(row):
        yield "the interval counts from another moment"


def _phase(row: Schedule) -> float:
    return (row.starts_at or row.created_at).replace(microsecond=0).timestamp() % (row.interval_seconds or 1)


def _line_of(row: Schedule) -> str:
    """Return the line of code for a row, with the secrets of its arguments masked."""
    return line_of(row, *_masked(row))


def _masked(row: Schedule) -> tuple[Any, Any]:
    """Return the arguments of a row with their secrets masked."""
    masker = masker_of_call(row.task, row.args, row.kwargs)
    return masker.positional(row.args), masker.keyword(row.kwargs)
