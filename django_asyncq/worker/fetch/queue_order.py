"""In which order a worker asks its queues."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from ...broker import Broker
from ...definitions import wire_names

REFRESH_SECONDS = 5.0
DEFAULT_QUEUE = "default"


class QueueOrder:
    """Every fetch asks all queues; a weight only raises the chance of being asked first.

    weights: name → weight; if empty, the queues that rows of the alias have had, and those of its tasks with a wire
    name, looked up again each REFRESH_SECONDS. A queue that only other programs know is not among them.
    strict: the highest weight is always first. Source: asynq, processor.queues.
    """

    def __init__(self, broker: Broker, weights: Mapping[str, int], *, strict: bool) -> None:
        self.broker = broker
        self.weights = dict(weights)
        self.strict = strict
        self.finds_queues = not weights
        self.refresh_seconds = REFRESH_SECONDS if self.finds_queues else float("inf")
        self._refresh_at = 0.0

    def refresh(self) -> None:
        """Look the queues up at the next fetch."""
        self._refresh_at = 0.0

    @property
    def names(self) -> list[str]:
        """The queues known now."""
        return sorted(self.weights)

    def next(self) -> list[str]:
        """Return the order of one fetch. Raises: BrokerUnavailable while it looks queues up."""
        if self.finds_queues and time.monotonic() >= self._refresh_at:
            self.weights = dict.fromkeys(sorted(self._found()), 1)
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
        if len(self.weights) == 1:
            return list(self.weights)
        if self.strict:
            return sorted(self.weights, key=lambda name: -self.weights[name])
        # A weighted shuffle without replacement, by exponential clocks: each queue's is as fast as its weight.
        return sorted(self.weights, key=lambda name: random.expovariate(self.weights[name]))

    def _found(self) -> set[str]:
        """Return the queues of the alias. Raises: BrokerUnavailable.

        Those of tasks with a wire name are registered here: a message may be the first that comes to them. Any other
        queue is registered by the first `enqueue`, so no worker asks, or waits for, one that nobody uses.
        """
        for task in wire_names.tasks_of(self.broker.alias):
            self.broker.register_queue(task.queue_name)
        return self.broker.queues() or {DEFAULT_QUEUE}
