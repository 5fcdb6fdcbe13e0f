"""How threads are woken through Redis: an idle worker by a push, others by pub/sub."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..core.aliases import DEFAULT_ALIAS
from ..core.guard import LongLivedThread, get_logger
from ..exceptions import BrokerUnavailable
from . import clients, entries, redis_py, scripts
from .access import Access
from .clients import broker_errors, close_copy, shut_down, socket_of
from .entries import id_bytes
from .keys import (
    cancel_channel,
    due_channel,
    free_slot_channel,
    names_channel,
    odd_channel,
    over_channel,
    pauses_channel,
)
from .scripts import is_wrong_type

# --- A wait for pushes: an idle worker blocks in Redis until a token comes for one of its queues.
#
#     a push ──▶ pending, and a token ──▶ the worker that has waited longest ──▶ dequeues like any other
#
# Tokens lie in a list of each queue (`lua/waking.lua`). They only wake. A worker that cannot take a task passes its
# token on. The leader gives one each second to a queue that has tasks and no token: those of other programs come
# without, and a worker may die with one. While nobody leads, each worker looks every five seconds.

# A wait that lasts longer than it should by this much has lost its connection without notice.
PATIENCE_SECONDS = 5.0


class PushWait:
    """Wait for a push to any of some queues, again and again, on one connection. Used by one thread."""

    def __init__(self, access: Access, queues: Sequence[str]) -> None:
        """queues: in a cluster only one, because a command reaches one slot."""
        self.queues = list(queues)
        # Monotonic seconds at which the wait in progress began; None when there is none.
        self.since: float | None = None
        self._queue_of = {access.keys(queue).wake: queue for queue in queues}
        # The keys of the wait in progress.
        self._asked: list[str] = []
        self._pool: Any = None
        self._connection: Any = None

    @property
    def socket(self) -> Any:
        """What to sleep on; None when nothing waits."""
        return None if self.since is None else socket_of(self._connection)

    def begin(self, without: Collection[str] = ()) -> list[str]:
        """Begin to wait, unless this is waiting for all of the queues that it is to wait for.

        without: queues not to be woken for; when it is for no other, nothing waits.
        Returns: the queues of a wait that was ended for this one: a token that came at that moment is lost.
        Raises: BrokerUnavailable; nothing waits then.
        """
        wanted = list(self._queue_of)
        if without:
            wanted = [key for key in wanted if self._queue_of[key] not in without]
        left: list[str] = []
        if self.since is not None and time.monotonic() - self.since < clients.BLOCK_SECONDS + PATIENCE_SECONDS:
            if len(wanted) <= len(self._asked) and set(wanted) <= set(self._asked):
                return left
            left = [self._queue_of[key] for key in self._asked]
            self.close()
        if not wanted and self.since is None:
            return left
        try:
            if self.since is not None:
                raise TimeoutError("no reply")
            self._connect()
            since = time.monotonic()
            self._connection.send_command("BLPOP", *wanted, clients.BLOCK_SECONDS)
        except Exception as error:
            raise self._give_up(error) from error
        self.since, self._asked = since, wanted
        return left

    def read(self) -> str | None:
        """Read what ended the wait: the queue that may have tasks, "" when its time was over; None if it goes on.

        Raises: BrokerUnavailable; the wait is over then, and a token that came is lost.
        """
        try:
            # TLS has things to read that are no reply.
            if type(socket_of(self._connection)) is not socket.socket and not self._connection.can_read():
                return None
            found = self._connection.read_response()
        except Exception as error:
            raise self._give_up(error) from error
        self.since = None
        return "" if found is None else self._queue_of[entries.text(found[0])]

    def close(self) -> None:
        """Wait no longer: disconnect, and return the connection to its pool."""
        self.since = None
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.disconnect()
            self._pool.release(connection)

    def _connect(self) -> None:
        """Have a connection that is open, or one that opens when something is sent."""
        if self._connection is not None:
            is_closed = True
            with suppress(redis_py.RedisError):
                is_closed = self._connection.can_read()  # no reply is due: what can be read is the end of the stream
            if not is_closed and socket_of(self._connection) is not None:
                return
            self.close()
        self._pool = clients.pool_for(clients.client("blocking"), next(iter(self._queue_of)))
        self._connection = self._pool.get_connection()

    def _give_up(self, error: Exception) -> Exception:
        """Close the connection, which may hold more replies; return the error to raise."""
        self.close()
        if isinstance(error, redis_py.ResponseError) and is_wrong_type(error):
            with suppress(BrokerUnavailable):
                for key in self._queue_of:
                    scripts.run("check_type", clients.client("worker"), [key], ["list"])
        if not isinstance(error, redis_py.RedisError | OSError):
            return error
        try:
            with broker_errors(clients.client("blocking")):
                raise error
        except BrokerUnavailable as unavailable:
            return unavailable
        except (redis_py.RedisError, OSError):
            return BrokerUnavailable(f"cannot wait for pushes in Redis: {str(error)[:200]}")


# --- Wake sleeping threads by pub/sub: on new queue names, pauses, and tasks that are due sooner.
#
# One thread listens, and only wakes: a thread that finds no work sleeps again. It also receives the ids of
# cancelled tasks. Pushes are not published; workers wait for those above.

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


class WorkerListener(Listener):
    """Listen for a worker: to new queue names of its alias, to pauses, and to cancelled tasks.

    on_cancel: called with the id of each cancelled task of the alias, from the thread that listens; it must return
    soon. Any program may have sent the id.
    """

    def __init__(
        self,
        event: Settable | None = None,
        *,
        alias: str = DEFAULT_ALIAS,
        on_cancel: Callable[[Collection[str]], object] | None = None,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        self._on_cancel = on_cancel
        self._cancel_channel = cancel_channel(alias)
        self._names_channel = names_channel(alias)
        self._pauses_channel = pauses_channel()
        self._has_new_names = self._has_new_pauses = False
        channels = [self._names_channel, self._cancel_channel, self._pauses_channel]
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
                self._on_cancel([entries.text(data)])
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
                self._gates.append(entries.text(data))
                self._free_slot.set()
            return
        if channel == odd_channel().encode():
            self.log_set_aside(entries.text(data), time.monotonic())
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


# --- Learn at once that a task is over: mark it as waited for, and listen to the scripts that remove or archive it.
#
# Knows ids only. What waits reads the row, before it sleeps and when it is woken.

IDS_PER_CALL = 200


def mark_waited(alias: str, queue: str, ids: Sequence[str]) -> set[str]:
    """Mark tasks as waited for, with a producer's timeouts; return those that Redis has, which are announced then.

    The others are to be marked again: they are not pushed yet, over, or lost from Redis. Raises: BrokerUnavailable.
    """
    access = Access("producer", alias)
    keys = access.keys(queue)
    found: set[str] = set()
    for start in range(0, len(ids), IDS_PER_CALL):
        part = ids[start : start + IDS_PER_CALL]
        reply = scripts.run("mark_waited", access.client, [keys.pending], [keys.task_prefix, *map(id_bytes, part)])
        found.update(id for id, word in zip(part, entries.texts(reply), strict=True) if word == "waited")
    return found


class OverListener(Listener):
    """Call `over` with the id of each task that is over and was waited for.

    event: is set when it begins to listen. is_needed: asked each second; when it says no, the thread returns.
    """

    def __init__(
        self,
        over: Callable[[str], object],
        event: Settable,
        *,
        is_needed: Callable[[], bool],
        on_death: Callable[[str], object],
    ) -> None:
        super().__init__([over_channel()], event, on_death=on_death)
        self._over = over
        self._is_needed = is_needed

    @property
    def is_current(self) -> bool:
        """Whether it listens, or tries to, to the channel that the settings name."""
        return self.channels == [over_channel()] and not self.has_died and not self._stopped.is_set()

    def leave_to_parent(self) -> None:
        """Close this process's copy of the connection; for a forked child, where the thread does not run."""
        close_copy(self._connection)

    def _client(self) -> clients.Client:
        # `reset_clients` would close a shared one under the thread that reads it, and redis-py then raises anything.
        return clients.private_client("blocking")

    def _goes_on(self) -> bool:
        return super()._goes_on() and self._is_needed()

    def _received(self, channel: bytes, data: Any) -> None:
        self._over(entries.text(data))
