"""The places of waiting tasks in their lines, as Redis has them; the rows say in which line a task waits."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from .. import gates
from ..broker.fair_keys import reading_place_in_line
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import uses_redis
from ..models import FailureReason, TaskRecord, TaskState


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
