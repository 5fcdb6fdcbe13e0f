"""The relay of the other tests, losing a share of all replies, by a seeded choice."""

from __future__ import annotations

import random

from tests.proxy import Proxy


class LossyProxy(Proxy):
    """Swallows each reply with `share` probability, and the connection with it; `lost` counts them."""

    def __init__(self, upstream: tuple[str, int], share: float, seed: int) -> None:
        self.share = share
        self.lost = 0
        self.replies = 0
        self._chance = random.Random(seed)
        super().__init__(upstream)

    def _swallows(self) -> bool:
        with self._lock:
            self.replies += 1
            is_lost = self._chance.random() < self.share
            self.lost += is_lost
            return is_lost
