"""Handoff: an idle worker waits in Redis, and is given a task at the moment it is pushed. Knows nothing of rows.

The plain variant (HANDOFF is False, or Redis is a cluster)
    An idle worker keeps one connection for each of its queues, and blocks on it in `BLMOVE pending pending RIGHT
    RIGHT`. That command changes nothing: the id returns to where it was, and the next blocked worker wakes too. So a
    push wakes every idle worker. Each then dequeues as a busy worker does, and all except one find nothing.

Handoff
    The worker sends two commands at once on that connection:

    1. `BLMOVE pending handed:<worker> RIGHT LEFT` blocks. A push wakes only the worker that has waited longest.
    2. `dequeue.lua` runs right behind it. It first returns the moved id to `pending`. If the worker is ready, it then
       dequeues one task for it, so the task is leased before the worker has even woken. If the worker is not ready,
       the returned id wakes the next worker, and this one learns that there may be work.

    What Redis knows of a worker is the hash `handoff:<worker>`: the field "" while it is ready, and a field for each
    queue of which it has not read a task yet.

        ┌───────────┐  reports that it is ready   ┌───────────┐
        │ NOT READY │ ──────────────────────────▶ │   READY   │
        │ no field  │ ◀────────────────────────── │ field ""  │
        └───────────┘   dequeues tasks itself     └───────────┘
          ▲       ▲       (in dequeue.lua)              │
          │       │                                     │ a push: the script dequeues one task for it
          │       │ stops, or its supervisor            ▼
          │       │ stops its handoff             ┌──────────────────┐
          │       └────────────────────────────── │  HANDED, UNREAD  │
          │                                       │ field: queue→id  │
          └────────────────────────────────────── └──────────────────┘
             reports that it has read the task (and, in the same call, whether it is ready again)

The cluster has no handoff because a script cannot reach both a queue and `handoff:<worker>` there.

Bounds, since the worker gets the task whatever it does by then (it may be frozen, or its host lost):
- It is ready only while it runs nothing. It is handed one task, of all its queues together.
- Its supervisor does not renew the lease of a task that it has neither read nor begun, so another worker gets it.
- A wait ends after BLOCK_SECONDS. A longer one has lost its connection without notice, and is given up.
- When the connection breaks between 1 and 2, the id stays in `handed:<worker>`. The worker requeues it when it looks
  for what it holds; its supervisor does so when the worker died; the sweep finds the rest.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..exceptions import BrokerUnavailable
from . import clients, redis_py, replies, scripts
from .entries import Dequeued
from .keys import QueueKeys, handoff_key
from .redis_internals import socket_of

if TYPE_CHECKING:
    from . import Broker

# A wait that lasts longer than BLOCK_SECONDS by this much has lost its connection without notice.
PATIENCE_SECONDS = 5.0
# How long a reply that Redis has sent may take to arrive.
LAST_REPLY_SECONDS = 0.1


# --- the calls of dequeue.lua


class DequeueCall(NamedTuple):
    """The keys and the arguments of a call of `dequeue.lua`."""

    keys: list[str]
    arguments: list[Any]


def dequeue_call(keys: QueueKeys, worker_id: str, count: int, lease_seconds: int, *, with_handoff: bool) -> DequeueCall:
    """Return the call of a worker that asks for tasks. with_handoff: name the hash that says whether it is ready."""
    names = [keys.pending, keys.priority, keys.active, keys.lease, keys.paused, keys.held(worker_id)]
    if with_handoff:
        names.append(handoff_key(worker_id, keys.alias))
    return DequeueCall(names, [keys.task_prefix, count, lease_seconds, worker_id, ""])


def handed_call(keys: QueueKeys, worker_id: str, lease_seconds: int) -> DequeueCall:
    """Return the call behind `BLMOVE`, which dequeues one task for a worker that is ready."""
    names, arguments = dequeue_call(keys, worker_id, 1, lease_seconds, with_handoff=True)
    return DequeueCall([*names, keys.handed(worker_id)], [*arguments[:-1], keys.queue])


# The queue is paused, or all that waits in it is left to other programs for some seconds.
NOTHING_FOR_NOW = (b"paused", b"left")


def read_dequeued(reply: Sequence[Any], count: int) -> Dequeued:
    """Return what the reply to `dequeue_call` says. count: how many tasks were asked for."""
    word, *flat = reply
    leases = replies.leases(flat)
    return Dequeued(leases, paused=word in NOTHING_FOR_NOW, is_drained=word == b"taken" and len(leases) < count)


def read_handed(reply: Sequence[Any]) -> Dequeued | None:
    """Return what the reply to `handed_call` says, None when the worker was not ready."""
    word, *flat = reply
    if word == b"not ready":
        return None
    return Dequeued(replies.leases(flat), paused=word in NOTHING_FOR_NOW, is_drained=word == b"taken")


# --- the waits of a worker


class WaitResult(NamedTuple):
    """What ended a wait.

    may_have_work: the queue may have tasks, so dequeue. handed: what the script dequeued, None when the worker was not
    ready or there is no handoff. since: monotonic seconds at which the wait began; no lease is older.
    """

    may_have_work: bool
    handed: Dequeued | None
    since: float


class Wait(NamedTuple):
    """A wait in progress. socket: what to sleep on. since: monotonic seconds."""

    socket: Any
    since: float


class QueueConnection:
    """The connection on which one queue is waited for, kept from wait to wait."""

    def __init__(self, pool: Any) -> None:
        self.connection: Any = pool.get_connection()
        self._pool = pool
        # Whether its server has the script.
        self._has_script = False

    def send(self, commands: list[tuple[Any, ...]]) -> None:
        """Send commands in one write."""
        self.connection.send_packed_command(self.connection.pack_commands(commands))

    def command_of(self, call: DequeueCall) -> tuple[Any, ...]:
        """Return the command that runs `dequeue.lua`; the first one sends its text, since the server may be new."""
        text, digest = scripts.script("dequeue")
        command = ("EVALSHA", digest) if self._has_script else ("EVAL", text)
        self._has_script = True
        return (*command, len(call.keys), *call.keys, *call.arguments)

    def reopen_if_closed(self) -> None:
        """Disconnect if the server has closed the connection while nothing was expected on it."""
        is_closed = True
        with suppress(redis_py.RedisError):
            is_closed = self.connection.can_read()  # no reply is due: what can be read is the end of the stream
        if is_closed:
            self.connection.disconnect()

    def close(self) -> None:
        """Disconnect, and return the connection to its pool."""
        self.connection.disconnect()
        self._pool.release(self.connection)


class Handoff:
    """The waits of one idle worker process, with handoff or in the plain variant. Used by its main thread only."""

    def __init__(self, broker: Broker, worker_id: str, lease_seconds: int) -> None:
        self.broker = broker
        self.worker_id = worker_id
        self.lease_seconds = lease_seconds
        # Short beside a lease: all a worker knows of the age of a handed lease is how long it has waited.
        self.block_seconds = min(clients.BLOCK_SECONDS, lease_seconds / 4)
        self._connections: dict[str, QueueConnection] = {}
        self._waits: dict[str, Wait] = {}
        # The queue of a task that was read, which Redis still lists as unread.
        self._unread: str | None = None
        # Whether Redis has been told that this worker is ready, and it has dequeued nothing since.
        self._is_ready = False
        # Whether the reply to a wait was lost, maybe with a task.
        self._has_lost_reply = False

    @property
    def is_on(self) -> bool:
        """Whether tasks are handed to this worker; if not, pushes only wake it."""
        return self.broker.uses_handoff

    @property
    def queues(self) -> list[str]:
        """The queues that have a connection."""
        return list(self._connections)

    @property
    def sockets(self) -> dict[int, str]:
        """What to sleep on: file descriptor → queue."""
        return {wait.socket.fileno(): queue for queue, wait in self._waits.items() if wait.socket.fileno() >= 0}

    @property
    def could_be_ready(self) -> bool:
        """Whether a task would be handed to this worker if it reported that it is ready."""
        return bool(self._waits) and not self._is_ready and self.is_on

    def note_dequeue(self) -> None:
        """Note that this worker has dequeued tasks itself: it is no longer ready until it reports so again."""
        self._is_ready = False

    def report_ready(self, *, ready: bool) -> None:
        """Say to Redis that the handed task is read, and whether this worker is ready, unless Redis knows both.

        Raises: BrokerUnavailable; Redis may or may not know then.
        """
        if not self.is_on:
            return
        if self._has_lost_reply:
            self.broker.stop_handoff(self.worker_id)
            self._has_lost_reply = self._is_ready = False
        if self._unread is not None or (ready and not self._is_ready):
            self.broker.handoff_ready(self._unread or "", self.worker_id, ready=ready)
            self._unread, self._is_ready = None, ready

    def wait_for(self, queue: str) -> None:
        """Start to wait for a push, unless this is already waiting. Raises: BrokerUnavailable; nothing waits then."""
        wait = self._waits.get(queue)
        if wait is not None and time.monotonic() - wait.since < self.block_seconds + PATIENCE_SECONDS:
            return
        try:
            if wait is not None:
                raise TimeoutError("no reply")
            self._waits[queue] = self._start(queue)
        except Exception as error:
            raise self._give_up(queue, error) from error

    def read(self, queue: str) -> WaitResult | None:
        """Read what ended a wait; return None if it goes on.

        Raises: BrokerUnavailable; the wait is over then, and what came is lost.
        """
        wait = self._waits[queue]
        connection, is_on = self._connections[queue].connection, self.is_on
        try:
            # TLS has things to read that are no reply.
            if type(wait.socket) is not socket.socket and not connection.can_read():
                return None
            moved = connection.read_response()
            reply: Any = connection.read_response() if is_on else None
        except Exception as error:
            raise self._give_up(queue, error) from error
        del self._waits[queue]
        handed = read_handed(reply) if is_on else None
        if handed is None or handed.leases:
            self._is_ready = False
        if handed is None:
            return WaitResult(moved is not None, None, wait.since)
        if handed.leases:
            self._unread = queue
        return WaitResult(not (handed.is_drained or handed.paused), handed, wait.since)

    def close(self) -> dict[str, WaitResult]:
        """End every wait; return the tasks that were handed at the last moment, by queue."""
        was_ready, self._is_ready = self._is_ready, False
        handed: dict[str, WaitResult] = {}
        with suppress(BrokerUnavailable, redis_py.RedisError, OSError):
            if self.is_on and not self.broker.stop_handoff(self.worker_id) and was_ready:
                for queue in list(self._waits):
                    if self._connections[queue].connection.can_read(LAST_REPLY_SECONDS) and (found := self.read(queue)):
                        handed[queue] = found
        for queue in self.queues:
            self.stop_waiting(queue)
        return handed

    def stop_waiting(self, queue: str) -> None:
        """Close the connection of a queue, and with it its wait."""
        self._waits.pop(queue, None)
        if connection := self._connections.pop(queue, None):
            connection.close()

    def _start(self, queue: str) -> Wait:
        """Send the commands of a wait."""
        connection = self._connect(queue)
        keys = self.broker.keys(queue)
        since = time.monotonic()
        if self.is_on:
            move = ("BLMOVE", keys.pending, keys.handed(self.worker_id), "RIGHT", "LEFT", self.block_seconds)
            call = handed_call(keys, self.worker_id, self.lease_seconds)
            connection.send([move, connection.command_of(call)])
        else:
            connection.send([("BLMOVE", keys.pending, keys.pending, "RIGHT", "RIGHT", self.block_seconds)])
        return Wait(socket_of(connection.connection), since)

    def _connect(self, queue: str) -> QueueConnection:
        client = clients.client("blocking")
        if connection := self._connections.get(queue):
            connection.reopen_if_closed()
            if socket_of(connection.connection) is not None:
                return connection
            self.stop_waiting(queue)
        connection = QueueConnection(clients.pool_for(client, self.broker.keys(queue).pending))
        self._connections[queue] = connection
        return connection

    def _give_up(self, queue: str, error: Exception) -> Exception:
        """Close the connection of a queue, which may hold more replies; return the error to raise."""
        self.stop_waiting(queue)
        self._has_lost_reply = True
        if not isinstance(error, redis_py.RedisError | OSError):
            return error
        try:
            with clients.broker_errors(clients.client("blocking")):
                raise error
        except BrokerUnavailable as unavailable:
            return unavailable
        except (redis_py.RedisError, OSError):
            return BrokerUnavailable(f"cannot wait for queue {queue} in Redis: {str(error)[:200]}")
