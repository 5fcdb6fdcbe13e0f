"""Move tasks that have become due: delayed tasks to pending, retries through `lifecycle` to QUEUED.

Any number of processes may do this at once: forwarding is one script, and a retry locks its row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from .. import gates, lifecycle
from ..broker import Broker
from ..broker.access import queues_with
from ..core.guard import get_logger
from ..models import TaskRecord
from ..storage.errors import Parts, in_turn
from ..storage.isolation import each_alone, set_aside
from ..storage.routing import writing_database

LARGEST_BATCH = 100
SOURCES: tuple[Literal["scheduled", "retry"], ...] = ("scheduled", "retry")
RETRY = "retry of tasks"


class Forwarded(NamedTuple):
    """How many tasks were moved. next_seconds: until the next task is due, by Redis's clock; None without one."""

    forwarded: int
    retried: int
    next_seconds: float | None


def forward_due(broker: Broker, queues: Iterable[str]) -> Forwarded:
    """Move every task that is due in these queues.

    Raises: BrokerUnavailable, django.db.Error; tasks moved before the error stay moved. What fails in one queue is
    raised after the others are done.
    """
    found: list[Forwarded] = []
    waiting = queues_with(broker, list(queues), "scheduled", "due", "retry")
    sources = [(queue, source) for queue in waiting for source in SOURCES]
    in_turn(sources, lambda each: found.append(_forward(broker, *each)))
    waiting_seconds = [each.next_seconds for each in found if each.next_seconds is not None]
    return Forwarded(
        sum(each.forwarded for each in found),
        sum(each.retried for each in found),
        min(waiting_seconds, default=None),
    )


def _forward(broker: Broker, queue: str, source: Literal["scheduled", "retry"]) -> Forwarded:
    """Move every task that is due in one set of one queue."""
    forwarded = retried = 0
    seen: set[str] = set()
    while True:
        answer = broker.forward(queue, source, LARGEST_BATCH)
        forwarded += answer.moved
        if answer.own:
            retried += _retry_due(broker, queue, answer.own)
        # One that could not be moved is listed again. Only other tasks are a reason to go on.
        has_news = answer.moved or not seen.issuperset(answer.own)
        seen.update(answer.own)
        if answer.moved + len(answer.own) < LARGEST_BATCH or not has_news:
            return Forwarded(forwarded, retried, answer.next_seconds)


def _retry_due(broker: Broker, queue: str, ids: Sequence[str]) -> int:
    """Retry due tasks; return how many. One that the database refuses leaves Redis until the next sweep."""

    def retry(part: Sequence[str]) -> list[int]:
        return [lifecycle.retry_due(broker, queue, part)]

    retried = sum(each_alone(RETRY, ids, retry, database=writing_database(TaskRecord)))
    if refused := [id for id in ids if set_aside.holds(RETRY, id)]:
        broker.remove(queue, refused)
    return retried


# --- Let the tasks that wait at gates in as soon as there is a free slot: each released one is announced.
#
# The task that is next is then retried. It acquires its slot as every task does, so the limit stays strict however
# many processes do this. A message that is lost, a slot that expires and a limit that is raised are found by the
# next look at all gates, LOOK_SECONDS later.

logger = get_logger("django_asyncq.fleet.forwarder")

LOOK_SECONDS = 1.0
# While each look lets everybody in whom it has found: well within the time for which the order is kept.
SETTLE_SECONDS = 3.0
# Gates that may refuse tasks in one look at another gate; the next look goes on.
MOST_FULL = 20


class WaiterService:
    """Look at the gates that were announced, and now and then at all gates at which tasks wait."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._parts = Parts(logger)
        self._look_at = 0.0
        # By the look that is under way.
        self._admitted: set[str] = set()
        self._moved: dict[str, str] = {}
        # When the order of those that wait was last kept, by gate, in monotonic seconds.
        self._settled: dict[str, float] = {}

    def tick(self, announced: Iterable[str], now: float) -> float:
        """Look where it is due; return the seconds until the next look at all gates. now: monotonic seconds.

        announced: gates with a released slot. Raises: BrokerUnavailable, django.db.Error; the next look finds the same.
        """
        names = set(announced)
        if now >= self._look_at:
            names |= gates.waiting_gates()
            self._look_at = now + LOOK_SECONDS
        for name in sorted(names):
            self._parts.attempt(f"retry of tasks at the gate {name}", partial(self.admit, name), None)
        return self._look_at - now

    def admit(self, gate: str) -> None:
        """Retry the tasks for which a gate has a free slot, those that have waited longest first.

        Those that another of their gates refuses go to its line, and `_admit_behind` tries the tasks behind them.
        Raises: BrokerUnavailable, django.db.Error; the order of the waiters is then not kept for longer.
        """
        previous = list[str]()
        while (found := gates.look(gate, LARGEST_BATCH)).ids and (ids := found.ids) != previous:
            previous = ids
            left, gone = self._try(gate, ids)
            if self._moved:
                self._admit_behind(gate, set(ids), gone)
                return
            now = time.monotonic()
            if gone or left or now - self._settled.get(gate, -math.inf) >= SETTLE_SECONDS:
                self._settled[gate] = now
                gates.settle(gate, gone)
            if left:
                return
            # Behind waiters that are forgotten there may be others for the same slots.
            if not gone and len(ids) < min(found.waiting, LARGEST_BATCH):
                return
        if not found.waiting:
            self._settled.pop(gate, None)
            gates.forget_gate(gate)

    def _admit_behind(self, gate: str, tried: set[str], gone: list[str]) -> None:
        """Retry those behind tasks that another gate has refused, so that no slot stays free while one may run.

        tried: the ids of this look, each of which is tried once. gone: those of them that wait no longer.
        A task that needs a gate that has just refused another one stays where it is: in a long line most tasks may need
        it, and each look would move them all. So the first ones in line do not keep the others out, until the gate is
        full again.
        """
        full = set[str]()
        for _ in range(MOST_FULL):
            full |= set(self._moved.values())
            gates.settle(gate, gone, is_kept=False)
            # Where no slot is free, this keeps the order again.
            free = len(gates.look(gate, LARGEST_BATCH).ids)
            ids = gates.next_without(gate, full, tried, free) if free else []
            if not ids:
                return
            tried |= set(ids)
            left, gone = self._try(gate, ids)
            if left:
                gates.settle(gate, gone)
                return

    def _try(self, gate: str, ids: Sequence[str]) -> tuple[set[str], list[str]]:
        """Retry tasks; return the ids that stay in the line of a gate, and those that no longer wait."""
        self._admitted, self._moved = set(), {}
        left = set(each_alone(RETRY, ids, self._retry, database=writing_database(TaskRecord)))
        # By its row it stood elsewhere, after a crash.
        left |= {id for id, other in self._moved.items() if other == gate}
        self._moved = {id: other for id, other in self._moved.items() if other != gate}
        # Also those of which there is no row: nothing else would ever let them go.
        return left, [id for id in ids if id not in left and id not in self._admitted and id not in self._moved]

    def _retry(self, ids: Sequence[str]) -> list[str]:
        asked = lifecycle.retry_waiting(self.broker, ids)
        self._admitted |= asked.admitted
        self._moved |= asked.moved
        return asked.left
