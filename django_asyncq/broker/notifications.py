"""How who waits is told on channels: of pushes by priority, of new queues, of what is due sooner.

One thread listens; it only wakes: who comes for nothing waits again. Pushes to `pending` are not told so (`handoff`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from redis.exceptions import RedisError

from ..exceptions import BrokerUnavailable
from . import clients
from .keys import keys_of, names_channel
from .redis_internals import shut_down

logger = logging.getLogger("django_asyncq.broker")

LISTEN_SECONDS = 1.0
STOP_SECONDS = 2.0


class Settable(Protocol):
    """What the watch sets when there may be work: a `threading.Event`, or anything with its `set`."""

    def set(self) -> None:
        """Wake whoever waits."""


class Listener:
    """Sets `event` when a channel is told something.

    event: what to set; without one, a `threading.Event` of its own.
    """

    def __init__(self, channels: Iterable[str], event: Settable | None = None) -> None:
        self.channels = sorted(channels)
        self.event = threading.Event() if event is None else event
        self._stopped = threading.Event()
        self._failures = 0
        # What is being read from now, to be cut off at the end.
        self._connection: Any = None
        self._thread = threading.Thread(target=self._keep, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what blocks is cut off, and where it cannot be, ends by itself in seconds."""
        self._stopped.set()
        for _ in range(int(STOP_SECONDS / 0.05)):
            # Again and again, for it may just have been about to connect.
            shut_down(self._connection)
            if not self._thread.is_alive():
                return
            self._thread.join(0.05)

    # --- the thread

    def _keep(self) -> None:
        """Listen until stopped, after an error again, with growing, spread-out pauses."""
        while not self._stopped.is_set():
            try:
                self._listen()
            except (BrokerUnavailable, RedisError, OSError) as error:
                if not self._stopped.is_set():
                    self._failures += 1
                    if self._failures == 2:
                        logger.warning("cannot listen to %s: %s", ", ".join(self.channels), error)
                    self._stopped.wait(clients.pause_after(self._failures))

    def _succeeded(self) -> None:
        if self._failures >= 2:
            logger.info("listening to %s again", ", ".join(self.channels))
        self._failures = 0

    def _heard(self, channel: bytes) -> None:
        """Take note of what a channel tells beyond that there may be work."""

    def _listen(self) -> None:
        with clients.broker_errors():
            subscription = clients.client("blocking").pubsub(ignore_subscribe_messages=True)
            try:
                subscription.subscribe(*self.channels)
                self._connection = subscription.connection
                self._succeeded()
                # What was pushed before the subscription stood has not been told.
                self.event.set()
                while not self._stopped.is_set():
                    if message := subscription.get_message(timeout=LISTEN_SECONDS):
                        self._heard(message["channel"])
                        self.event.set()
            finally:
                self._connection = None
                subscription.close()


class QueueListener(Listener):
    """The watch of a worker: the channels on which pushes by priority to its queues are told, and new names."""

    def __init__(self, queues: Iterable[str], event: Settable | None = None) -> None:
        self.queues = sorted(queues)
        self._names_channel = names_channel()
        self._has_new_names = False
        super().__init__([self._names_channel, *(keys_of(name).wake for name in self.queues)], event)

    def take_new_names(self) -> bool:
        """Return whether a queue was named since this was last asked."""
        found, self._has_new_names = self._has_new_names, False
        return found

    def _heard(self, channel: bytes) -> None:
        self._has_new_names |= channel == self._names_channel.encode()
