"""Numbers of queues and gates from both stores, for `manage.py asyncq stats` and the overview. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Max, Min, Q

from .. import gates
from ..aliases import is_redis_used, uses_redis
from ..broker import Broker
from ..broker.history import History
from ..broker.queue_reading import QueueContents, read_contents
from ..models import Gate, TaskRecord, TaskState
from ..prefixes import one_alias_per_prefix, prefix_of
from ..storage import database_clock
from ..storage.routing import rows_of
from .due import DUE_SINCE, is_due
from .values import MinuteInfo

# Of a queue whose tasks are in the database alone.
NOTHING = QueueContents(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, paused_since=None)


class QueueStats(NamedTuple):
    """One queue. The first five numbers count rows, `failed` without RETRYING; the next five count entries in Redis.

    alias: of the queue's tasks in TASKS; two aliases may have a queue of the same name.
    oldest_waiting_seconds: how long the oldest QUEUED row has been due; None when none is due.
    """

    alias: str
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
    """Return the numbers of every queue that either store knows, by alias and name; the broker's alias does not matter.

    Raises: BrokerUnavailable, django.db.Error.
    """
    now = database_clock.now()
    counted = rows_of(TaskRecord).order_by().values("backend", "queue_name").annotate(**_counts(now))
    rows: dict[tuple[str, str], Mapping[str, object]] = {(row["backend"], row["queue_name"]): row for row in counted}
    # A queue in Redis says which prefix it has; where two aliases have one prefix, the rows say whose queue it is.
    known = {(prefix_of(alias), queue) for alias, queue in rows}
    listed = {
        (alias, queue)
        for alias in one_alias_per_prefix()
        for queue in broker.of_alias(alias).queues()
        if (prefix_of(alias), queue) not in known
    }
    in_redis = {each for each in rows if uses_redis(each[0])}
    contents = dict.fromkeys(rows, NOTHING) | read_contents(broker.role, {*in_redis, *listed})
    return [_of_queue(*each, rows.get(each, {}), contents[each], now) for each in sorted(contents)]


def _counts(now: datetime) -> dict[str, Count | Min]:
    due = Q(state=TaskState.QUEUED, after_id=None) & is_due(now)
    return {
        "queued": Count("id", filter=Q(state=TaskState.QUEUED)),
        "running": Count("id", filter=Q(state=TaskState.RUNNING)),
        "succeeded": Count("id", filter=Q(state=TaskState.SUCCEEDED)),
        "failed": Count("id", filter=Q(state=TaskState.FAILED, retry_at=None)),
        "retrying": Count("id", filter=Q(state=TaskState.FAILED, retry_at__isnull=False)),
        "oldest": Min(DUE_SINCE, filter=due),
    }


def _of_queue(alias: str, queue: str, row: Mapping[str, object], contents: QueueContents, now: datetime) -> QueueStats:
    sizes = {name: getattr(contents, name) for name in ("pending", "active", "scheduled", "retry", "archived")}
    rows = {name: int(str(row.get(name, 0))) for name in ("queued", "running", "succeeded", "failed", "retrying")}
    oldest = row.get("oldest")
    waiting = max((now - oldest).total_seconds(), 0.0) if isinstance(oldest, datetime) else None
    return QueueStats(alias=alias, queue=queue, **rows, **sizes, oldest_waiting_seconds=waiting)


def gate_stats() -> list[GateStats]:
    """Return the numbers of every gate with a row or an unfinished task. Raises: BrokerUnavailable, django.db.Error.

    And of every gate at which tasks wait, as far as Redis knows. Without Redis a live row stands for its slot.
    """
    has_redis = is_redis_used()
    limits: dict[str, int | None] = dict(rows_of(Gate).values_list("name", "limit"))
    live = rows_of(TaskRecord).at_gate().filter(state__in=gates.LIVE_STATES).order_by()
    by_gate = live.values_list("gate").annotate(Count("id"), Max("queue_limit"))
    found = {name: (count, queue_limit) for name, count, queue_limit in by_gate}
    stats = []
    for name in sorted({*limits, *found, *(gates.waiting_gates() if has_redis else ())}):
        count, queue_limit = found.get(name, (0, None))
        waiting = rows_of(TaskRecord).waiting_at_gate(name).count()
        occupancy = len(gates.slots(name)) if has_redis else count
        stats.append(GateStats(name, limits.get(name, queue_limit), occupancy, count, waiting))
    return stats


def processed(queues: Iterable[tuple[str, str]], since: datetime, until: datetime, minutes: int) -> list[MinuteInfo]:
    """Return what queues did in equal parts of an hour, each queue apart, the oldest part first.

    queues: aliases and names. since, until: aware; the parts in which they lie are whole. minutes: of a part; they
    divide 60. Raises: BrokerUnavailable.
    """
    return [
        MinuteInfo(*part)
        for alias, queue in queues
        for part in History("worker", alias).parts(queue, since, until, minutes)
    ]
