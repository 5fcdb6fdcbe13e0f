"""Numbers of queues and gates from both stores, for `manage.py asyncq stats`. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Max, Min, Q
from django.db.models.functions import Coalesce

from .. import gates
from ..broker import Broker
from ..broker.inspection import Inspection
from ..models import Gate, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of


class QueueStats(NamedTuple):
    """One queue. The first five numbers count rows, `failed` without RETRYING; the next five count entries in Redis.

    oldest_waiting_seconds: how long the oldest QUEUED row has been due; None when none is due.
    """

    queue: str
    queued: int
    running: int
    succeeded: int
    failed: int
    retrying: int
    pending: int
    active: int
    scheduled: int
    retry: int
    archived: int
    oldest_waiting_seconds: float | None


class GateStats(NamedTuple):
    """One gate. limit: None when unknown, because no row and no unfinished task sets it; 0 or less means no limit.

    occupancy: slots in Redis. live: QUEUED and RUNNING rows. waiting: RETRYING rows for which the gate was full.
    """

    gate: str
    limit: int | None
    occupancy: int
    live: int
    waiting: int


def queue_stats(broker: Broker) -> list[QueueStats]:
    """Return the numbers of every queue that either store knows. Raises: BrokerUnavailable, django.db.Error."""
    now = database_clock.now()
    rows: dict[str, Mapping[str, object]] = {
        row["queue_name"]: row for row in rows_of(TaskRecord).order_by().values("queue_name").annotate(**_counts(now))
    }
    inspection = Inspection(broker.role)
    queues = sorted({*rows, *broker.queues()})
    return [_of_queue(queue, rows.get(queue, {}), inspection.sizes(queue), now) for queue in queues]


def _counts(now: datetime) -> dict[str, Count | Min]:
    due = Q(state=TaskState.QUEUED) & (Q(run_after=None) | Q(run_after__lte=now))
    return {
        "queued": Count("id", filter=Q(state=TaskState.QUEUED)),
        "running": Count("id", filter=Q(state=TaskState.RUNNING)),
        "succeeded": Count("id", filter=Q(state=TaskState.SUCCEEDED)),
        "failed": Count("id", filter=Q(state=TaskState.FAILED, retry_at=None)),
        "retrying": Count("id", filter=Q(state=TaskState.FAILED, retry_at__isnull=False)),
        "oldest": Min(Coalesce("run_after", "enqueued_at"), filter=due),
    }


def _of_queue(queue: str, row: Mapping[str, object], sizes: dict[str, int], now: datetime) -> QueueStats:
    rows = {name: int(str(row.get(name, 0))) for name in ("queued", "running", "succeeded", "failed", "retrying")}
    oldest = row.get("oldest")
    waiting = max((now - oldest).total_seconds(), 0.0) if isinstance(oldest, datetime) else None
    return QueueStats(queue=queue, **rows, **sizes, oldest_waiting_seconds=waiting)


def gate_stats() -> list[GateStats]:
    """Return the numbers of every gate with a row or an unfinished task. Raises: BrokerUnavailable, django.db.Error.

    And of every gate at which tasks wait, as far as Redis knows.
    """
    limits: dict[str, int | None] = dict(rows_of(Gate).values_list("name", "limit"))
    live = rows_of(TaskRecord).at_gate().filter(state__in=gates.LIVE_STATES).order_by()
    by_gate = live.values_list("gate").annotate(Count("id"), Max("queue_limit"))
    found = {name: (count, queue_limit) for name, count, queue_limit in by_gate}
    stats = []
    for name in sorted({*limits, *found, *gates.waiting_gates()}):
        count, queue_limit = found.get(name, (0, None))
        waiting = rows_of(TaskRecord).waiting_at_gate(name).count()
        stats.append(GateStats(name, limits.get(name, queue_limit), len(gates.slots(name)), count, waiting))
    return stats
