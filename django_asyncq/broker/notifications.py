"""Wake sleeping threads by pub/sub: on pushes to `priority`, new queue names, and tasks that are due sooner.

One thread listens, and only wakes: a thread that finds no work sleeps again. It also receives the ids of cancelled
tasks. Pushes to `pending` are not published; for those see `handoff`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from ..exceptions import BrokerUnavailable
from ..guard import get_logger
from ..prefixes import DEFAULT_ALIAS
from ..threads import LongLivedThread
from . import clients, redis_py, replies
from .keys import cancel_channel, due_channel, free_slot_channel, keys_of, names_channel, odd_channel, pauses_channel
from .redis_internals import shut_down

logger = get_logger("django_asyncq.broker")

LISTEN_SECONDS = 1.0
STOP_SECONDS = 2.0
LOG_AGAIN_SECONDS = 3600.0
# Keys that were logged; beyond that, some may be logged twice in an hour.
MOST_REMEMBERED = 1000
ODD_TIME = re.compile(r"odd:[0-9.]+:")


class Settable(Protocol):
    """What a listener sets when there may be work: a `threading.Event`, or any object with the same `set`."""

    def set(self) -> None:
        """Wake the thread that waits."""


class Listener:
    """Set `event` when a message arrives on one of the channels, from a thread of its own.

    event: default a new `threading.Event`. on_death: see `LongLivedThread`.
    """

    def __init__(
        self,
        channels: Iterable[str],
        event: Settable | None = None,
        *,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        self.channels = sorted(channels)
        self.event = threading.Event() if event is None else event
        self._stopped = threading.Event()
        self._failures = 0
        # The connection that the thread reads from, for `stop` to shut down.
        self._connection: Any = None
        self._is_listening = False
        self._thread = LongLivedThread("listener", self._run, on_death=on_death)

    @property
    def has_died(self) -> bool:
        """Whether an error has ended the thread."""
        return self._thread.has_died

    @property
    def is_listening(self) -> bool:
        """Whether the server has confirmed all channels, so no message is missed until the connection fails."""
        return self._is_listening

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; shut down the connection it blocks on. Without one it stops by itself within seconds."""
        self._stopped.set()
        for _ in range(int(STOP_SECONDS / 0.05)):
            # Repeatedly, because the thread may be about to connect.
            shut_down(self._connection)
            if not self._thread.is_alive():
                return
            self._thread.join(0.05)

    # --- the thread

    def _run(self) -> None:
        """Listen until stopped; after an error, listen again after a random, growing pause."""
        while self._goes_on():
            try:
                self._listen()
            except (BrokerUnavailable, redis_py.RedisError, OSError) as error:
                if self._goes_on():
                    self._failures += 1
                    if self._failures == 2:
                        logger.warning("cannot listen to %s: %s", ", ".join(self.channels), error)
                    self._stopped.wait(clients.pause_after(self._failures))

    def _goes_on(self) -> bool:
        """Whether to listen on."""
        return not self._stopped.is_set()

    def _client(self) -> clients.Client:
        return clients.client("blocking")

    def _succeeded(self) -> None:
        if self._failures >= 2:
            logger.info("listening to %s again", ", ".join(self.channels))
        self._failures = 0

    def _received(self, channel: bytes, data: Any) -> None:
        """Handle a message. data: whatever was sent."""
        self.event.set()

    def _listen(self) -> None:
        client = self._client()
        with clients.broker_errors(client):
            subscription = client.pubsub()
            try:
                subscription.subscribe(*self.channels)
                self._connection = subscription.connection
                while self._goes_on():
                    message = subscription.get_message(timeout=LISTEN_SECONDS)
                    if message is not None and message["type"] == "message":
                        self._received(message["channel"], message["data"])
                    elif message is not None and message["data"] == len(self.channels):
                        # The server has confirmed the last channel. It has sent us no message before that.
                        self._is_listening = True
                        self._succeeded()
                        self.event.set()
            finally:
                self._is_listening = False
                self._connection = None
                subscription.close()


class QueueListener(Listener):
    """Listen for a worker: to the pushes by priority to its queues, to new queue names of their alias, and to pauses.

    on_cancel: called with the id of each cancelled task of the alias, from the thread that listens; it must return
    soon. Any program may have sent the id.
    """

    def __init__(
        self,
        queues: Iterable[str],
        event: Settable | None = None,
        *,
        alias: str = DEFAULT_ALIAS,
        on_cancel: Callable[[Collection[str]], object] | None = None,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        self.queues = sorted(queues)
        self._on_cancel = on_cancel
        self._cancel_channel = cancel_channel(alias)
        self._names_channel = names_channel(alias)
        self._pauses_channel = pauses_channel()
        self._has_new_names = self._has_new_pauses = False
        shared = [self._names_channel, self._cancel_channel, self._pauses_channel]
        channels = [*shared, *(keys_of(name, alias).wake for name in self.queues)]
        super().__init__(channels, event, on_death=on_death)

    def take_new_names(self) -> bool:
        """Return whether a new queue was registered since the last call."""
        found, self._has_new_names = self._has_new_names, False
        return found

    def take_new_pauses(self) -> bool:
        """Return whether a pause has begun or ended since the last call."""
        found, self._has_new_pauses = self._has_new_pauses, False
        return found

    def _received(self, channel: bytes, data: Any) -> None:
        if channel == self._cancel_channel.encode():
            if self._on_cancel is not None:
                self._on_cancel([replies.text(data)])
            return
        self._has_new_names |= channel == self._names_channel.encode()
        self._has_new_pauses |= channel == self._pauses_channel.encode()
        super()._received(channel, data)


class SupervisorListener(Listener):
    """Listen for a supervisor: to tasks due before all others, to free slots of gates, and to keys set aside.

    The latter are logged, each once an hour: whatever writes the key may write it again and again.
    free_slot: is set instead of the event when a slot is released of a gate at which tasks wait.
    """

    def __init__(self, event: Settable | None = None, *, free_slot: Settable | None = None) -> None:
        self._logged_at: dict[str, float] = {}
        self._free_slot = free_slot
        self._gates: deque[str] = deque(maxlen=MOST_REMEMBERED)
        super().__init__([due_channel(), odd_channel(), free_slot_channel()], event)

    def take_gates(self) -> set[str]:
        """Return the gates at which a slot was released since the last call: the latest MOST_REMEMBERED of them."""
        found: set[str] = set()
        while self._gates:
            found.add(self._gates.popleft())
        return found

    def _received(self, channel: bytes, data: Any) -> None:
        if channel == free_slot_channel().encode():
            if self._free_slot is not None:
                self._gates.append(replies.text(data))
                self._free_slot.set()
            return
        if channel == odd_channel().encode():
            self.log_set_aside(replies.text(data), time.monotonic())
        super()._received(channel, data)

    def log_set_aside(self, name: str, now: float) -> None:
        """Log the new name of a key that was set aside. now: monotonic seconds."""
        key = ODD_TIME.sub("odd:", name)
        if now - self._logged_at.get(key, -math.inf) < LOG_AGAIN_SECONDS:
            return
        if len(self._logged_at) >= MOST_REMEMBERED:
            self._logged_at.clear()
        self._logged_at[key] = now
        logger.warning("a key in Redis had a wrong type or an odd value; it was set aside as %a for seven days", name)
