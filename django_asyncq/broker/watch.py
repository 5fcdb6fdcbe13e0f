"""How an idle worker is woken without polling.

One thread per queue blocks in `BLMOVE pending pending RIGHT RIGHT`, which returns on any producer's push, Go's too, and
changes nothing. Pushes by priority go to another key; they are told on a channel that one more thread listens to.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from ..exceptions import BrokerUnavailable
from . import clients
from .keys import QueueKeys

logger = logging.getLogger("django_asyncq.broker")

LONGEST_PAUSE_SECONDS = 5.0


class Settable(Protocol):
    """What the watch sets when there may be work: a `threading.Event`, or anything with its `set`."""

    def set(self) -> None:
        """Wake whoever waits."""


class QueueWatch:
    """Sets `event` when one of the armed queues may have work."""

    def __init__(self, queues: Iterable[str], event: Settable) -> None:
        self.queues = sorted(queues)
        self.event = event
        self._armed = {queue: threading.Event() for queue in self.queues}
        self._stopped = threading.Event()
        self._connections: set[Any] = set()
        self._lock = threading.Lock()
        targets: list[tuple[Any, tuple[str, ...]]] = [(self._block, (queue,)) for queue in self.queues]
        targets.append((self._listen, ()))
        self._threads = [threading.Thread(target=self._keep, args=target, daemon=True) for target in targets]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def arm(self, queues: Iterable[str]) -> None:
        """Tell that these queues were found empty (and not paused): a push to them is to be told."""
        for queue in queues:
            if queue in self._armed:
                self._armed[queue].set()

    def stop(self) -> None:
        """End the threads; what blocks is cut off."""
        self._stopped.set()
        for armed in self._armed.values():
            armed.set()
        with self._lock:
            for connection in self._connections:
                # Ends the read in the other thread; the connection itself is closed there.
                connection.disconnect()

    def _keep(self, watch: Any, arguments: tuple[str, ...]) -> None:
        """Repeat a watch until stopped; an outage is logged once, its end too."""
        failures = 0
        while not self._stopped.is_set():
            try:
                watch(*arguments)
                if failures > 1:
                    logger.info("watching %s again", ", ".join(self.queues))
                failures = 0
            except (BrokerUnavailable, OSError, ValueError, AttributeError) as error:
                if self._stopped.is_set():
                    return
                failures += 1
                if failures == 2:
                    logger.warning("cannot watch %s: %s", ", ".join(self.queues), error)
                self._stopped.wait(random.uniform(0, min(LONGEST_PAUSE_SECONDS, 0.1 * 2**failures)))  # noqa: S311

    def _block(self, queue: str) -> None:
        armed = self._armed[queue]
        armed.wait()
        pending = QueueKeys(queue).pending
        pool = clients.client("blocking").connection_pool
        with clients.broker_errors():
            connection = pool.get_connection()
            with self._lock:
                self._connections.add(connection)
            try:
                while not self._stopped.is_set():
                    connection.send_command("BLMOVE", pending, pending, "RIGHT", "RIGHT", clients.BLOCK_SECONDS)
                    if connection.read_response() is not None:
                        armed.clear()
                        self.event.set()
                        return
            finally:
                with self._lock:
                    self._connections.discard(connection)
                pool.release(connection)

    def _listen(self) -> None:
        with clients.broker_errors():
            subscription = clients.client("blocking").pubsub(ignore_subscribe_messages=True)
            try:
                subscription.subscribe(*(QueueKeys(queue).wake for queue in self.queues))
                # What was pushed before the subscription stood has not been told.
                self.event.set()
                while not self._stopped.is_set():
                    if subscription.get_message(timeout=1.0) is not None:
                        self.event.set()
            finally:
                subscription.close()
