"""Wakes the workers that wait at wake lists, in the leader: it waits for their queues in their place."""

from __future__ import annotations

import time

from ..broker import Broker
from ..broker.wake_lists import Waker
from ..prefixes import one_alias_per_prefix
from ..worker.wakeup import Reason, Wakeup


class WakerService:
    """Waits for the queues of all aliases. `tick` and `close` are called by one thread, `stop` by any."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._wakers: dict[str, Waker] = {}
        self._wakeup: Wakeup | None = None

    def tick(self) -> None:
        """Wait until workers are to be woken, or there is something else to do. Raises: BrokerUnavailable."""
        try:
            self._tick()
        except BaseException:
            self.close()
            raise

    def _tick(self) -> None:
        seconds, places = [], dict[int, tuple[Waker, str]]()
        for alias in one_alias_per_prefix():
            broker = self._broker.of_alias(alias)
            waker = self._wakers.setdefault(alias, Waker(broker))
            seconds.append(waker.begin(broker.queues, time.monotonic()))
            places |= {descriptor: (waker, queue) for descriptor, queue in waker.sockets.items()}
        if self._wakeup is None:
            self._wakeup = Wakeup(expected=[Reason.STOPPED])
        for descriptor in self._wakeup.wait(min(seconds, default=None), also=list(places)).ready:
            waker, queue = places[descriptor]
            waker.read(queue, time.monotonic())

    def stop(self) -> None:
        """End the wait of `tick`."""
        if self._wakeup is not None:
            self._wakeup.notify(Reason.STOPPED)

    def close(self) -> None:
        """Wait for nothing."""
        for waker in self._wakers.values():
            waker.close()
