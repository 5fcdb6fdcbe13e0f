"""Numbers of queues and gates from both stores, for `manage.py asyncq stats` and the overview. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Q

from .. import gates
from ..broker.inspection import History, QueueContents
from ..broker.reading import Reader, side_by_side
from ..broker.run_counts import RunCounts, reading_runs
from ..core.aliases import is_redis_used
from ..core.several_gates import GateLimit, read_others
from ..models import Gate, TaskRecord, TaskState
from ..models.tasks import HOLDS_SLOT
from ..storage import database_clock
from ..storage.routing import rows_of
from .backlog import LiveRows, QueueKey, backlog_of, contents_of, live_rows
from .values import MinuteInfo


class QueueStats(NamedTuple):
    """One queue. Five numbers count rows, `failed` without RETRYING; the five after them count entries in Redis.

    alias: of the queue's tasks in TASKS; two aliases may have a queue of the same name. waiting,
    oldest_waiting_seconds: as of `QueueInfo`.
    """

    alias: str
    queue: str
    waiting: int
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


def queue_stats() -> list[QueueStats]:
    """Return the numbers of every queue that either store knows, by alias and name.

    Raises: BrokerUnavailable, django.db.Error.
    """
    now = database_clock.now()
    counted = rows_of(TaskRecord).order_by().values("backend", "queue_name").annotate(**_finished())
    rows: dict[QueueKey, Mapping[str, object]] = {(row["backend"], row["queue_name"]): row for row in counted}
    live = live_rows(now)
    contents = contents_of({*rows, *live})
    return [
        _of_queue(*each, rows.get(each, {}), live.get(each, LiveRows()), contents[each], now)
        for each in sorted(contents)
    ]


def _finished() -> dict[str, Count]:
    return {
        "succeeded": Count("id", filter=Q(state=TaskState.SUCCEEDED)),
        "failed": Count("id", filter=Q(state=TaskState.FAILED, retry_at=None)),
        "retrying": Count("id", filter=Q(state=TaskState.FAILED, retry_at__isnull=False)),
    }


def _of_queue(
    alias: str, queue: str, row: Mapping[str, object], live: LiveRows, contents: QueueContents, now: datetime
) -> QueueStats:
    backlog = backlog_of(live, contents, now)
    return QueueStats(
        alias,
        queue,
        backlog.waiting,
        live.queued,
        live.running,
        **{name: int(str(row.get(name, 0))) for name in ("succeeded", "failed", "retrying")},
        **{name: getattr(contents, name) for name in ("pending", "active", "scheduled", "retry", "archived")},
        oldest_waiting_seconds=backlog.oldest_seconds,
    )


def gate_stats() -> list[GateStats]:
    """Return the numbers of every gate with a row or an unfinished task. Raises: BrokerUnavailable, django.db.Error.

    And of every gate at which tasks wait, as far as Redis knows. Without Redis a live row stands for its slot.
    """
    has_redis = is_redis_used()
    limits: dict[str, int | None] = dict(rows_of(Gate).values_list("name", "limit"))
    live = rows_of(TaskRecord).at_gate().filter(state__in=gates.LIVE_STATES).order_by()
    by_gates = live.values_list("gate", "queue_limit", "other_gates").annotate(held=Count("id", filter=HOLDS_SLOT))
    found: dict[str, tuple[int, int | None]] = {}
    for name, own_limit, others, held in by_gates:
        for each in (GateLimit(name, own_limit), *read_others(others)):
            count, limit = found.get(each.name, (0, None))
            known = [one for one in (limit, each.limit) if one is not None]
            found[each.name] = count + held, max(known, default=None)
    stats = []
    for name in sorted({*limits, *found, *(gates.waiting_gates() if has_redis else ())}):
        count, queue_limit = found.get(name, (0, None))
        waiting = rows_of(TaskRecord).waiting_at_gate(name).count()
        occupancy = len(gates.slots(name)) if has_redis else count
        stats.append(GateStats(name, limits.get(name, queue_limit), occupancy, count, waiting))
    return stats


def reading_processed(
    queues: Iterable[tuple[str, str]], since: datetime, until: datetime, minutes: int
) -> Reader[list[list[MinuteInfo]]]:
    """Read what queues did in equal parts of an hour, each queue apart, the oldest part first.

    queues: aliases and names. since, until: aware; the parts in which they lie are whole. minutes: of a part; they
    divide 60.
    """
    readers = (History("producer", alias).reading_parts(queue, since, until, minutes) for alias, queue in queues)
    return [[MinuteInfo(*part) for part in parts] for parts in (yield from side_by_side(*readers))]


def reading_runs_by_task(queues: Iterable[tuple[str, str]], hours: int) -> Reader[dict[str, RunCounts]]:
    """Read how the runs of each task ended in this hour and so many before it, those with the most runs first.

    queues: aliases and names; their counts are added up.
    """
    found: dict[str, RunCounts] = {}
    for of_queue in (yield from reading_runs(queues, hours=hours)).values():
        for name, counts in of_queue.items():
            found.setdefault(name, RunCounts()).add(counts)
    return dict(sorted(found.items(), key=lambda item: (-item[1].total, item[0])))
