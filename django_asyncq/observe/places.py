"""What Redis knows of tasks that wait: their places in line, and when those that wait for a rate are looked at.

The rows say in which line a task waits. One round trip for any number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

from .. import gates, rates
from ..broker.fair_keys import reading_place_in_line
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import uses_redis
from ..core.registry import find
from ..models import FailureReason, TaskRecord, TaskState
from ..storage.routing import rows_of
from ..worker.rates import name_of, waiter_of


def places_in_line(rows: Iterable[TaskRecord]) -> dict[UUID, int]:
    """Return the places of the tasks that wait in a line, from 1 on: at their gate, or else in their queue.

    In a queue, a task has a place if it has a fair key or a priority: Redis could find no other one without a walk.
    One round trip, however many there are. Raises: BrokerUnavailable.
    """
    waiting = [row for row in rows if _waits_at_gate(row) or _waits_in_queue(row)]
    found = read("producer", side_by_side(*map(_reading_place, waiting)))
    return {row.id: place for row, place in zip(waiting, found, strict=True) if place is not None}


def _reading_place(row: TaskRecord) -> Reader[int | None]:
    if _waits_at_gate(row):
        return gates.reading_place_in_line(row.gate, str(row.id), row.backend)
    return reading_place_in_line(row.backend, row.queue_name, row.redis_id)


def _waits_at_gate(row: TaskRecord) -> bool:
    return row.reason == FailureReason.GATE_FULL and not row.is_final


def _waits_in_queue(row: TaskRecord) -> bool:
    return row.state == TaskState.QUEUED and uses_redis(row.backend)


def waits_of(rows: Iterable[TaskRecord]) -> dict[UUID, tuple[str, datetime | None]]:
    """Return for which rate each of these QUEUED tasks waits, and about when it is looked at; nothing for the others.

    One statement for all whose arguments were left out, and one round trip. Raises: BrokerUnavailable.
    """
    rated = [row for row in rows if row.state == TaskState.QUEUED and _is_rated(row)]
    _load_calls(rated)
    names = [name_of(find(row.name), row) for row in rated]
    readers = [rates.reading_look_at(name, waiter_of(row)) for name, row in zip(names, rated, strict=True)]
    found = read("producer", side_by_side(*readers)) if readers else []
    return {
        row.id: (name, datetime.fromtimestamp(at, UTC) if 0 < at < 1e11 else None)
        for row, name, at in zip(rated, names, found, strict=True)
        if at is not None
    }


# What says of a row with which arguments it is called.
CALL = ("args", "kwargs", "version", "has_typed_arguments", "wire_id")


def _is_rated(row: TaskRecord) -> bool:
    task = find(row.name)
    return task is not None and task.rate is not None


def _load_calls(rows: Iterable[TaskRecord]) -> None:
    """Read the arguments of rows that a list has read without them: names of rates may depend on them."""
    lacking = {row.id: row for row in rows if {*CALL} & row.get_deferred_fields()}
    if lacking:
        found = rows_of(TaskRecord).filter(id__in=list(lacking)).values("id", *CALL)
        for columns in found:
            for name in CALL:
                setattr(lacking[columns["id"]], name, columns[name])
