"""Let the tasks that wait at gates in as soon as there is a free slot: each released one is announced.

The task that is next is then retried. It acquires its slot as every task does, so the limit stays strict however many
processes do this. A message that is lost, a slot that expires and a limit that is raised are found by the next look at
all gates, LOOK_SECONDS later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from .. import gates, lifecycle
from ..broker import Broker
from ..faults import Parts
from ..guard import get_logger
from ..models import TaskRecord
from ..storage.isolation import each_alone
from ..storage.routing import writing_database
from .forwarder import LARGEST_BATCH, RETRY

logger = get_logger("django_asyncq.maintenance.waiters")

LOOK_SECONDS = 1.0


class WaiterService:
    """Look at the gates that were announced, and now and then at all gates at which tasks wait."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._parts = Parts(logger)
        self._look_at = 0.0

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

        Raises: BrokerUnavailable, django.db.Error; the order of the waiters is then not kept for longer.
        """
        previous = list[str]()
        # Again, because behind waiters that are forgotten there may be others for the same slots.
        while (found := gates.look(gate, LARGEST_BATCH)).ids and (ids := found.ids) != previous:
            previous = ids
            left = set(each_alone(RETRY, ids, self._retry, database=writing_database(TaskRecord)))
            # Also those of which there is no row: nothing else would ever let them go.
            gates.settle(gate, [id for id in ids if id not in left])
            if left:
                return
        if not found.waiting:
            gates.forget_gate(gate)

    def _retry(self, ids: Sequence[str]) -> list[str]:
        return lifecycle.retry_waiting(self.broker, ids)
