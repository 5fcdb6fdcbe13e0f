"""The numbers that a monitor reads, of both stores.

No query here reads finished rows, except those of the latest occurrence of each schedule, by their ids. Names are
bounded: a project has some queues and tasks, but may have a gate for each of its customers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import Case, Count, Min, OuterRef, Q, Subquery, Value, When

from ..broker.run_counts import RunCounts, read_runs
from ..gates import slots_taken
from ..models import FailureReason, Gate, Occurrence, OccurrenceOutcome, Schedule, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of
from .inspector import Inspector, QueueInfo, WorkerInfo
from .soundness import clock_difference_seconds, read_silence, vanished_supervisors
from .values import UnknownInfo

MOST_TASKS = 1_000
MOST_GATES = 200
MOST_RATES = 200
MOST_SCHEDULES = 200
OTHER = "other"


class GateNumbers(NamedTuple):
    """A gate that has a row and a limit. slots: that are taken. waiting: tasks that are retried when a slot is free."""

    name: str
    limit: int
    slots: int
    waiting: int


class RateNumbers(NamedTuple):
    """A rate that has a row, or for which tasks wait. refused: how often one had to wait."""

    name: str
    waiting: int
    refused: int


@dataclass(frozen=True)
class Numbers:
    """What is known now.

    unknown: tasks that wait for code that has them. tasks: (name, state) → rows that are not final; names beyond 1,000
    are "other". runs: of each alias and queue, by the names of tasks, since Redis lost its memory. gates: the first 200
    by name, the others as one. overdue_seconds: of the schedule that should have fired first. failed_schedules: names
    of those whose latest run failed, bounded like gates. silence_seconds: since a supervisor last reported; None when
    none is known.
    """

    queues: list[QueueInfo] = field(default_factory=list)
    unknown: list[UnknownInfo] = field(default_factory=list)
    tasks: dict[tuple[str, str], int] = field(default_factory=dict)
    runs: dict[tuple[str, str], dict[str, RunCounts]] = field(default_factory=dict)
    workers: list[WorkerInfo] = field(default_factory=list)
    gates: list[GateNumbers] = field(default_factory=list)
    rates: list[RateNumbers] = field(default_factory=list)
    schedules: int = 0
    overdue_schedules: int = 0
    overdue_seconds: float = 0.0
    failed_schedules: list[str] = field(default_factory=list)
    supervisors: int = 0
    vanished_supervisors: int = 0
    silence_seconds: float | None = None
    clock_difference_seconds: float = 0.0


def read_numbers() -> Numbers:
    """Ask both stores. Raises: BrokerUnavailable, django.db.Error."""
    inspector = Inspector()
    supervisors, silence = read_silence()
    schedules, overdue, seconds = _schedules()
    queues = inspector.queues.all()
    return Numbers(
        queues=queues,
        unknown=inspector.tasks.unknown(),
        tasks=_tasks(),
        runs=read_runs("worker", [(each.backend, each.queue) for each in queues]),
        workers=inspector.workers.all(),
        gates=_gates(),
        rates=_rates(inspector),
        schedules=schedules,
        overdue_schedules=overdue,
        overdue_seconds=seconds,
        failed_schedules=_failed_schedules(),
        supervisors=supervisors,
        vanished_supervisors=len(vanished_supervisors()),
        silence_seconds=silence,
        clock_difference_seconds=clock_difference_seconds(),
    )


def _tasks() -> dict[tuple[str, str], int]:
    rows = rows_of(TaskRecord).order_by()
    live = rows.filter(state__in=(TaskState.QUEUED, TaskState.RUNNING)).values_list("name", "state")
    counts = {(name, TaskState(state).name.lower()): count for name, state, count in live.annotate(count=Count("id"))}
    retrying = rows.filter(state=TaskState.FAILED, retry_at__isnull=False).values_list("name")
    counts |= {(name, "retrying"): count for name, count in retrying.annotate(count=Count("id"))}
    totals: Counter[str] = Counter()
    for (name, _), count in counts.items():
        totals[name] += count
    named = {name for name, _ in totals.most_common(MOST_TASKS)}
    found: Counter[tuple[str, str]] = Counter()
    for (name, state), count in counts.items():
        found[name if name in named else OTHER, state] += count
    return dict(found)


def _gates() -> list[GateNumbers]:
    limits = dict(rows_of(Gate).filter(limit__gt=0).order_by("name").values_list("name", "limit"))
    waiting = dict(rows_of(TaskRecord).waiting_at_gate().order_by().values_list("gate").annotate(Count("id")))
    found = [
        GateNumbers(name, limit, slots_taken(name), waiting.pop(name, 0))
        for name, limit in list(limits.items())[:MOST_GATES]
    ]
    others = list(limits)[MOST_GATES:]
    if others:
        # Of each one Redis would have to be asked.
        found.append(GateNumbers(OTHER, sum(limits[name] for name in others), 0, sum(waiting.values())))
    return found


def _rates(inspector: Inspector) -> list[RateNumbers]:
    """Return the first MOST_RATES; there may be one for each customer."""
    return [RateNumbers(each.rate, each.waiting, each.refused) for each in inspector.rates.limited(MOST_RATES)]


def _schedules() -> tuple[int, int, float]:
    """Return how many schedules are on, how many are due, and how late the latest of those is."""
    now = database_clock.now()
    on = rows_of(Schedule).filter(enabled=True, retired_at=None)
    due = Q(next_occurrence_at__lt=now)
    found = on.aggregate(all=Count("pk"), overdue=Count("pk", filter=due), first=Min("next_occurrence_at", filter=due))
    first = found["first"]
    return found["all"], found["overdue"], 0.0 if first is None else (now - first).total_seconds()


def _failed_schedules() -> list[str]:
    """Return the schedules that fire whose latest occurrence was refused, or has a task that failed finally.

    One whose task has not finished leaves it to those before. That of a task whose row was pruned is no failure.
    """
    is_over = Q(task__finished_at__isnull=False) | Q(task__state__isnull=True)
    has_failed = Q(task__state=TaskState.FAILED) & ~Q(
        task__reason__in=(FailureReason.CANCELLED, FailureReason.DISCARDED)
    )
    outcomes = (OccurrenceOutcome.QUEUED, OccurrenceOutcome.REFUSED)
    latest = rows_of(Occurrence).filter(is_over, schedule=OuterRef("pk"), outcome__in=outcomes).order_by("-occurs_at")
    failed = Case(When(Q(outcome=OccurrenceOutcome.REFUSED) | has_failed, then=Value(1)), default=Value(0))
    rows = rows_of(Schedule).firing().annotate(failed=Subquery(latest.values(found=failed)[:1])).filter(failed=1)
    names = list(rows.order_by("name").values_list("name", flat=True)[: MOST_SCHEDULES + 1])
    return [*names[:MOST_SCHEDULES], OTHER] if len(names) > MOST_SCHEDULES else names
