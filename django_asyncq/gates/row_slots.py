"""The slots of a gate counted from the rows, for aliases without Redis: those of the test kit.

A task that is QUEUED or RUNNING holds a slot, so nothing is acquired, confirmed or released, and a rollback frees
what its rows held. The rules are those of `gate_acquire.lua`. Nothing is locked: a test enqueues from one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .. import conf
from ..exceptions import GateUnavailable, UnknownGate
from ..models import Gate, TaskRecord
from ..storage.routing import rows_of
from .audit import LIVE_STATES
from .pauses import is_paused

_is_reachable = True


@contextmanager
def unreachable() -> Iterator[None]:
    """Answer in the block as gates in an unreachable Redis do."""
    global _is_reachable
    before, _is_reachable = _is_reachable, False
    try:
        yield
    finally:
        _is_reachable = before


def are_reachable() -> bool:
    """Return whether the slots can be counted: not within `unreachable`."""
    return _is_reachable


class Count(NamedTuple):
    """What the rows say about a gate. refused: ids of the asking tasks that get no slot; the others as in Admission.

    paused: whether the gate is paused, so that all are refused.
    """

    refused: list[str]
    limit: int
    occupancy: int
    expected_seconds: float
    waiting: int
    paused: bool = False


def count(gate: str, records: Sequence[TaskRecord]) -> Count:
    """Count the slots of a gate, and decide which of the asking tasks get one. Raises: UnknownGate, GateUnavailable.

    records: not QUEUED or RUNNING, with one `queue_limit`. Those that wait at the gate get the free slots first.
    """
    if not _is_reachable:
        raise GateUnavailable(gate)
    row = rows_of(Gate).filter(name=gate).first()
    limit = row.limit if row else records[0].queue_limit
    paused = is_paused(gate)
    if limit is None and not paused:
        raise UnknownGate(gate)
    limit = limit or 0
    own_seconds = records[0].expected_seconds or conf.current().expected_seconds
    expected_seconds = row.expected_seconds if row else own_seconds
    if limit <= 0 and not paused:
        return Count([], limit, 0, expected_seconds, 0)
    occupancy = slots_taken(gate)
    waiters = list(rows_of(TaskRecord).waiting_at_gate(gate).order_by("id").values_list("id", flat=True))
    places = {id: place for place, id in enumerate(waiters)}
    for record in records:
        places.setdefault(record.id, len(places))
    refused = [str(record.id) for record in records if paused or places[record.id] >= limit - occupancy]
    return Count(refused, limit, occupancy, expected_seconds, len(waiters), paused)


def slots_taken(gate: str) -> int:
    """Return how many tasks of a gate are QUEUED or RUNNING."""
    return rows_of(TaskRecord).at_gate(gate).filter(state__in=LIVE_STATES).count()
