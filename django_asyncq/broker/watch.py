"""How who waits is woken without polling.

An idle worker: one thread per queue blocks in `BLMOVE pending pending RIGHT RIGHT`, which returns on any
producer's push, Go's too, and changes nothing. Pushes by priority go to another key; they are told on a
channel that one more thread listens to. A supervisor that sleeps until the next due time only listens. It
only wakes: who comes late, or for nothing, finds nothing and waits again.

A push ends the waiting of every idle process of the fleet. So that not all of them ask for one task, whoever came for
nothing the last time leaves the next push to the others for a moment, and only then looks whether it is still there.
Whoever has told of a push rests as long as its worker does.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from redis.exceptions import RedisError

from ..exceptions import BrokerUnavailable
from . import clients, shortcut
from .keys import keys_of, names_channel

logger = logging.getLogger("django_asyncq.broker")

LONGEST_PAUSE_SECONDS = 5.0
LISTEN_SECONDS = 1.0
STOP_SECONDS = 2.0
# Until another process has taken what was pushed, mostly: two thread switches and a script call.
DEFERENCE_SECONDS = 0.003
# No longer than a worker's shortest (`worker.turns`).
REST_SECONDS = 0.0025


class Settable(Protocol):
    """What the watch sets when there may be work: a `threading.Event`, or anything with its `set`."""

    def set(self) -> None:
        """Wake whoever waits."""


def cut(connection: Any) -> None:
    """Let whoever reads from a connection find its end. Closing it is theirs: redis-py stumbles when others do."""
    found = getattr(connection, "_sock", None)
    if found is not None:
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)


class Watch:
    """Sets `event` when one of the armed queues may have work, or a channel is told something.

    event: what to set; without one, a `threading.Event` of its own.
    """

    def __init__(self, queues: Iterable[str] = (), channels: Iterable[str] = (), event: Settable | None = None) -> None:
        self.queues = sorted(queues)
        self.channels = sorted(channels)
        self.event = threading.Event() if event is None else event
        self._armed = {queue: threading.Event() for queue in self.queues}
        # Whether it has told of a push since it was armed; whether others were quicker the last time.
        self._has_told = False
        self._defers = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        # What is being read from now, to be cut off at the end; the threads that cannot watch now.
        self._connections: set[Any] = set()
        self._failures: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(self._block, queue), name=f"watch-{queue}", daemon=True)
            for queue in self.queues
        ]
        if self.channels:
            # A name no queue can have: it is the key of its failures.
            self._threads.append(
                threading.Thread(target=self._keep, args=(self._listen, "{wake}"), name="watch", daemon=True)
            )

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def arm(self, queues: Iterable[str], *, took: bool = True) -> None:
        """Tell that these queues were found empty (and not paused): a push to them is to be told, once.

        took: whether something was taken until then.
        """
        if self._has_told:
            self._defers = not took
        self._has_told = False
        for queue in queues:
            if queue in self._armed:
                self._armed[queue].set()

    def stop(self) -> None:
        """End the threads; what blocks is cut off, and where it cannot be, ends by itself in seconds."""
        self._stopped.set()
        for armed in self._armed.values():
            armed.set()
        for _ in range(int(STOP_SECONDS / 0.05)):
            # Again and again, for a thread may just have been about to connect.
            with self._lock:
                for connection in self._connections:
                    cut(connection)
            alive = next((thread for thread in self._threads if thread.is_alive()), None)
            if alive is None:
                return
            alive.join(0.05)

    # --- the threads

    def _keep(self, watch: Callable[[str], None], name: str) -> None:
        """Repeat a watch until stopped, after an error with growing, spread-out pauses."""
        while not self._stopped.is_set():
            try:
                watch(name)
            except (BrokerUnavailable, RedisError, OSError) as error:
                if not self._stopped.is_set():
                    failures = self._failed(name, error)
                    longest = min(LONGEST_PAUSE_SECONDS, 0.1 * 2 ** min(failures, 10))
                    self._stopped.wait(random.uniform(0, longest))  # noqa: S311

    def _failed(self, name: str, error: Exception) -> int:
        """Count a failure; say that Redis is away at the second one in a row, once for all threads."""
        with self._lock:
            count = self._failures[name] = self._failures.get(name, 0) + 1
            first = count == 2 and all(others < 2 for key, others in self._failures.items() if key != name)
        if first:
            logger.warning("cannot watch %s: %s", ", ".join(self.queues or self.channels), error)
        return count

    def _succeeded(self, name: str) -> None:
        """Forget failures; say that Redis is back when no thread has any left."""
        if not self._failures:
            return
        with self._lock:
            was_told = any(count >= 2 for count in self._failures.values())
            self._failures.pop(name, None)
            last = was_told and not any(count >= 2 for count in self._failures.values())
        if last:
            logger.info("watching %s again", ", ".join(self.queues or self.channels))

    def _block(self, queue: str) -> None:
        """Whenever the queue is armed, wait until something is in it; on one connection, kept from push to push."""
        pending = keys_of(queue).pending
        with clients.broker_errors():
            pool = clients.pool_for(clients.client("blocking"), pending)
            connection = pool.get_connection()
            with self._lock:
                self._connections.add(connection)

            def ask(*words: Any) -> Any:
                connection.send_command(*words)
                return connection.read_response()

            def wait() -> Any:
                shortcut.renew(connection)
                return ask("BLMOVE", pending, pending, "RIGHT", "RIGHT", clients.BLOCK_SECONDS)

            try:
                self._block_on(queue, wait, lambda: ask("LLEN", pending))
            except BaseException:
                connection.disconnect()  # a reply may be left unread
                raise
            finally:
                with self._lock:
                    self._connections.discard(connection)
                pool.release(connection)

    def _block_on(self, queue: str, wait: Callable[[], Any], size: Callable[[], int]) -> None:
        armed = self._armed[queue]
        while True:
            armed.wait()
            if self._stopped.is_set():
                return
            found = wait()
            self._succeeded(queue)
            if found is not None and not (self._defers and self._is_gone(size)):
                # In this order: whoever arms in between is woken at once, and arms again.
                armed.clear()
                self._has_told = True
                self.event.set()
                # Who begins what has come needs the interpreter, and the worker does not ask again any sooner.
                time.sleep(REST_SECONDS)

    def _is_gone(self, size: Callable[[], int]) -> bool:
        """Whether, after a moment, others have taken what was pushed."""
        self._stopped.wait(DEFERENCE_SECONDS)
        return size() == 0

    def _heard(self, channel: bytes) -> None:
        """Take note of what a channel tells beyond that there may be work."""

    def _listen(self, name: str) -> None:
        """Listen to the channels."""
        with clients.broker_errors():
            subscription = clients.client("blocking").pubsub(ignore_subscribe_messages=True)
            try:
                subscription.subscribe(*self.channels)
                with self._lock:
                    self._connections.add(subscription.connection)
                self._succeeded(name)
                # What was pushed before the subscription stood has not been told.
                self.event.set()
                while not self._stopped.is_set():
                    if message := subscription.get_message(timeout=LISTEN_SECONDS):
                        self._heard(message["channel"])
                        self.event.set()
            finally:
                with self._lock:
                    self._connections.discard(subscription.connection)
                subscription.close()


class QueueWatch(Watch):
    """The watch of a worker: its queues, the channels on which pushes by priority to them are told, and new names."""

    def __init__(self, queues: Iterable[str], event: Settable | None = None) -> None:
        names = sorted(queues)
        self._names_channel = names_channel()
        self._has_new_names = False
        super().__init__(names, [self._names_channel, *(keys_of(name).wake for name in names)], event)

    def take_new_names(self) -> bool:
        """Return whether a queue was named since this was last asked."""
        found, self._has_new_names = self._has_new_names, False
        return found

    def _heard(self, channel: bytes) -> None:
        self._has_new_names |= channel == self._names_channel.encode()
