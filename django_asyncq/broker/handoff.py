"""How an idle worker is woken by a push to `pending`, without polling and without a thread of its own.

It blocks on one connection for each queue: `BLMOVE` moves the next id aside for it, and right behind it, on the same
connection, Redis runs the script that takes. A worker that runs nothing *stands by*, and is handed that task: it is in
its hands when it wakes, and of an idle fleet one process wakes. For any other the script puts the id back, for the next
who waits, and the worker is told that there may be work.

Who stands by is handed the task whatever it does by then, so that is bounded: it is handed one, of all its queues;
nothing once it has taken any other; and until it says that it has read it, or runs it, its supervisor does not renew
the lease. In a cluster, where a worker's standby and its queues live apart, all are only woken.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..exceptions import BrokerUnavailable
from . import Broker, clients, scripts, taking
from .entries import Dequeued
from .keys import keys_of

# Longer than a wait takes it, its connection must have been lost without a word.
PATIENCE_SECONDS = 5.0
# Until an answer that Redis has given has come over the network.
LAST_ANSWER_SECONDS = 0.1


class Heard(NamedTuple):
    """What ended a wait.

    is_told: there may be work; who asks will see. taken: what was handed, None when nothing can have been. since:
    monotonic seconds at which the wait began; no lease is older.
    """

    is_told: bool
    taken: Dequeued | None
    since: float


class Wait(NamedTuple):
    """A wait under way. socket: what to sleep on. since: monotonic seconds."""

    socket: Any
    since: float


class Link:
    """The connection of one queue, kept from wait to wait."""

    def __init__(self, pool: Any) -> None:
        self.connection: Any = pool.get_connection()
        self._pool = pool
        # Whether its server has the script.
        self._is_known = False

    def send(self, commands: list[tuple[Any, ...]]) -> None:
        """Send commands in one go."""
        self.connection.send_packed_command(self.connection.pack_commands(commands))

    def dequeue(self, call: taking.Call) -> tuple[Any, ...]:
        """Return the command that takes; at first with the script's text, for the server may be new."""
        text, digest = scripts.script("dequeue")
        how = ("EVALSHA", digest) if self._is_known else ("EVAL", text)
        self._is_known = True
        return (*how, len(call.keys), *call.keys, *call.arguments)

    def end(self) -> None:
        """Close it."""
        self.connection.disconnect()
        self._pool.release(self.connection)


class Handoff:
    """The waits of one worker process, for its main thread alone."""

    def __init__(self, worker_id: str, lease_seconds: int) -> None:
        self.broker = Broker("worker")
        self.worker_id = worker_id
        self.lease_seconds = lease_seconds
        # Short beside a lease: who is handed a task knows no more of its age than how long he has waited.
        self.block_seconds = min(clients.BLOCK_SECONDS, lease_seconds / 4)
        self._links: dict[str, Link] = {}
        self._waits: dict[str, Wait] = {}
        # The queue of what was handed, which Redis still takes for unread.
        self._unread: str | None = None
        # Whether Redis was told that a task may be handed, and nothing was taken since.
        self._stands_by = False
        # Whether a wait was lost, with what it had brought.
        self._has_lost = False

    @property
    def sockets(self) -> dict[int, str]:
        """What to sleep on: file descriptor → queue."""
        return {wait.socket.fileno(): queue for queue, wait in self._waits.items() if wait.socket.fileno() >= 0}

    @property
    def could_stand_by(self) -> bool:
        """Whether a task would be handed, if Redis were told that it may be."""
        return bool(self._waits) and not self._stands_by and self.broker.reaches_all

    def took(self) -> None:
        """Take note that the worker has taken tasks itself: nothing is handed to it until it is told to stand by."""
        self._stands_by = False

    def stand_by(self, *, may_be_handed: bool) -> None:
        """Tell Redis, if it does not know, that what was handed is read, and whether a task may be handed now.

        Raises: BrokerUnavailable; then Redis may know or not.
        """
        if not self.broker.reaches_all:
            return
        if self._has_lost:
            self.broker.dismiss(self.worker_id)
            self._has_lost = self._stands_by = False
        if self._unread is not None or (may_be_handed and not self._stands_by):
            self.broker.stand_by(self._unread or "", self.worker_id, may_be_handed=may_be_handed)
            self._unread, self._stands_by = None, may_be_handed

    def wait_for(self, queue: str) -> None:
        """Wait for a push, unless it is waited for. Raises: BrokerUnavailable; then it is not waited for."""
        wait = self._waits.get(queue)
        if wait is not None and time.monotonic() - wait.since < self.block_seconds + PATIENCE_SECONDS:
            return
        try:
            if wait is not None:
                raise TimeoutError("no answer")
            self._waits[queue] = self._begin(queue)
        except Exception as error:
            raise self._given_up(queue, error) from error

    def hear(self, queue: str) -> Heard | None:
        """Read what ended a wait; None when it goes on.

        Raises: BrokerUnavailable; then it is over, and what came is lost.
        """
        wait = self._waits[queue]
        connection, takes = self._links[queue].connection, self.broker.reaches_all
        try:
            # TLS has things to read that are no answer.
            if type(wait.socket) is not socket.socket and not connection.can_read():
                return None
            found = connection.read_response()
            reply: Any = connection.read_response() if takes else None
        except Exception as error:
            raise self._given_up(queue, error) from error
        del self._waits[queue]
        if not takes:
            return Heard(found is not None, None, wait.since)
        taken = taking.handed(reply)
        if taken is None or taken.leases:
            self._stands_by = False
        if taken is not None and taken.leases:
            self._unread = queue
        is_told = found is not None if taken is None else not (taken.is_drained or taken.paused)
        return Heard(is_told, taken, wait.since)

    def close(self) -> dict[str, Heard]:
        """End every wait; return what was handed at the last moment, by queue."""
        stood_by, self._stands_by = self._stands_by, False
        handed: dict[str, Heard] = {}
        with suppress(BrokerUnavailable, RedisError, OSError):
            if not self.broker.dismiss(self.worker_id) and stood_by:
                for queue in list(self._waits):
                    if self._links[queue].connection.can_read(LAST_ANSWER_SECONDS) and (heard := self.hear(queue)):
                        handed[queue] = heard
        for queue in list(self._links):
            self.leave(queue)
        return handed

    def leave(self, queue: str) -> None:
        """Close the connection of a queue, and with it its wait."""
        self._waits.pop(queue, None)
        if link := self._links.pop(queue, None):
            link.end()

    def _begin(self, queue: str) -> Wait:
        client = clients.client("blocking")
        link = self._link(client, queue)
        keys = keys_of(queue)
        since = time.monotonic()
        if self.broker.reaches_all:
            call = taking.standing_by(queue, self.worker_id, self.lease_seconds)
            moves = "BLMOVE", keys.pending, keys.handed(self.worker_id), "RIGHT", "LEFT", self.block_seconds
            link.send([moves, link.dequeue(call)])
        else:
            link.send([("BLMOVE", keys.pending, keys.pending, "RIGHT", "RIGHT", self.block_seconds)])
        return Wait(link.connection._sock, since)

    def _link(self, client: Any, queue: str) -> Link:
        if link := self._links.get(queue):
            _renew(link.connection)
            if link.connection._sock is not None:
                return link
            self.leave(queue)  # it was closed while nobody used it
        link = self._links[queue] = Link(clients.pool_for(client, keys_of(queue).pending))
        return link

    def _given_up(self, queue: str, error: Exception) -> Exception:
        """Drop the connection of a queue, for it may have answers left; return what is to be raised."""
        self.leave(queue)
        self._has_lost = True
        if not isinstance(error, RedisError | OSError):
            return error
        try:
            with clients.broker_errors():
                raise error
        except BrokerUnavailable as unavailable:
            return unavailable
        except (RedisError, OSError):
            return BrokerUnavailable(f"Redis does not let {queue} be waited for: {str(error)[:200]}")


def _renew(connection: Any) -> None:
    """Have a connection that was closed while nobody used it connect anew at its next command."""
    has_ended = True
    with suppress(RedisError):
        has_ended = connection.can_read()  # nothing is expected: what there is to read is its end
    if has_ended:
        connection.disconnect()
