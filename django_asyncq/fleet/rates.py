"""Place what waits for a rate anew: when its row was changed, and when those that were next have gone.

Workers place each task when it is claimed, so without this they would keep the times of the old numbers. The leader
does it, once a second.
"""

from __future__ import annotations

import time
from functools import partial

from .. import rates
from ..broker import redis_clock
from ..broker.reading import read
from ..core.guard import get_logger
from ..storage.errors import Parts
from ..worker.rates import declared_rate

logger = get_logger("django_asyncq.fleet")

LOOK_SECONDS = 1.0
CHECK_SECONDS = 60.0
# At once. The names of others come in turn.
MOST_LOOKED_AT = 200


class RateLook:
    """Looks at the rates for which tasks wait."""

    def __init__(self) -> None:
        self._parts = Parts(logger)
        self._check_at = 0.0
        self._next_name = ""

    def tick(self) -> float:
        """Place anew what has to be; return the seconds until the next look.

        Raises: BrokerUnavailable, django.db.Error.
        """
        if time.monotonic() >= self._check_at:
            rates.check_rows()
            self._check_at = time.monotonic() + CHECK_SECONDS
        for name in sorted(rates.changed_names() | self._idle()):
            self._parts.attempt(f"the tasks that wait for the rate {name}", partial(self._place, name), None)
        return LOOK_SECONDS

    def _place(self, name: str) -> None:
        found = rates.place_anew(name, declared_rate(name))
        if found.placed:
            text = "rate %s: %d that wait for it are placed anew"
            logger.info(text, name, found.placed)

    def _idle(self) -> set[str]:
        """Return the rates that allow a start while those that wait come later; forget those for which none waits."""
        names = rates.waiting_names()
        part = [name for name in names if name > self._next_name][:MOST_LOOKED_AT] or names[:MOST_LOOKED_AT]
        self._next_name = part[-1] if len(names) > MOST_LOOKED_AT else ""
        states, idle = read("producer", rates.reading_states(part)), set()
        now_us = int(redis_clock.seconds("producer") * 1_000_000)
        for name, state in states.items():
            rate = state.rate or declared_rate(name)
            if not state.waiting:
                rates.forget_waiting(name)
            elif rate is not None and rates.is_idle(state, rate, now_us):
                idle.add(name)
        return idle
