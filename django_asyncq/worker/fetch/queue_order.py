"""In which order a worker asks its queues."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from ...broker import Broker

REFRESH_SECONDS = 5.0
DEFAULT_QUEUE = "default"


class QueueOrder:
    """All queues are asked at every fetch; weight only shifts the chance of being first.

    weights: name → weight; empty means every queue there is, looked up again every REFRESH_SECONDS.
    strict: the highest weight first, always. Source: asynq, processor.queues.
    """

    def __init__(self, broker: Broker, weights: Mapping[str, int], *, strict: bool) -> None:
        self.broker = broker
        self.weights = dict(weights)
        self.strict = strict
        self.finds_queues = not weights
        self.refresh_seconds = REFRESH_SECONDS if self.finds_queues else float("inf")
        self._refresh_at = 0.0

    def look_again(self) -> None:
        """Look the queues up at the next fetch."""
        self._refresh_at = 0.0

    @property
    def names(self) -> list[str]:
        """The queues known now."""
        return sorted(self.weights)

    def next(self) -> list[str]:
        """Return the order of one fetch. Raises: BrokerUnavailable while it looks queues up."""
        if self.finds_queues and time.monotonic() >= self._refresh_at:
            self.weights = dict.fromkeys(sorted({DEFAULT_QUEUE, *self.broker.queues()}), 1)
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
        if len(self.weights) == 1:
            return list(self.weights)
        if self.strict:
            return sorted(self.weights, key=lambda name: -self.weights[name])
        # Each name as often as its weight, shuffled, first occurrences kept: drawn here by exponential clocks.
        return sorted(self.weights, key=lambda name: random.expovariate(self.weights[name]))
