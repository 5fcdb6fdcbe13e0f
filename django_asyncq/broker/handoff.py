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

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..exceptions import BrokerUnavailable
from . import clients, redis_py, replies, scripts
from .blocking import BlockingWait, Commands, descriptors
from .entries import Dequeued
from .keys import QueueKeys, handoff_key

if TYPE_CHECKING:
    from . import Broker

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


class Handoff:
    """The waits of one idle worker process, with handoff or in the plain variant. Used by its main thread only."""

    def __init__(self, broker: Broker, worker_id: str, lease_seconds: int) -> None:
        self.broker = broker
        self.worker_id = worker_id
        self.lease_seconds = lease_seconds
        # Short beside a lease: all a worker knows of the age of a handed lease is how long it has waited.
        self.block_seconds = min(clients.BLOCK_SECONDS, lease_seconds / 4)
        self._waits: dict[str, BlockingWait] = {}
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
        return list(self._waits)

    @property
    def sockets(self) -> dict[int, str]:
        """What to sleep on: file descriptor → queue."""
        return descriptors({queue: wait.socket for queue, wait in self._waits.items()})

    @property
    def could_be_ready(self) -> bool:
        """Whether a task would be handed to this worker if it reported that it is ready."""
        return self.is_on and not self._is_ready and any(each.since is not None for each in self._waits.values())

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
        if wait is None:
            wait = BlockingWait(self.broker.keys(queue).pending, f"queue {queue}", self.block_seconds)
            self._waits[queue] = wait
        try:
            wait.begin(lambda is_first: self._commands(queue, is_first=is_first))
        except BaseException:
            self.stop_waiting(queue)
            self._has_lost_reply = True
            raise

    def read(self, queue: str) -> WaitResult | None:
        """Read what ended a wait; return None if it goes on.

        Raises: BrokerUnavailable; the wait is over then, and what came is lost.
        """
        wait = self._waits[queue]
        since = wait.since or 0.0
        try:
            replies_of_wait = wait.read(2 if self.is_on else 1)
        except BaseException:
            self.stop_waiting(queue)
            self._has_lost_reply = True
            raise
        if replies_of_wait is None:
            return None
        moved, *reply = replies_of_wait
        handed = read_handed(reply[0]) if reply else None
        if handed is None or handed.leases:
            self._is_ready = False
        if handed is None:
            return WaitResult(moved is not None, None, since)
        if handed.leases:
            self._unread = queue
        return WaitResult(not (handed.is_drained or handed.paused), handed, since)

    def close(self) -> dict[str, WaitResult]:
        """End every wait; return the tasks that were handed at the last moment, by queue."""
        was_ready, self._is_ready = self._is_ready, False
        handed: dict[str, WaitResult] = {}
        with suppress(BrokerUnavailable, redis_py.RedisError, OSError):
            if self.is_on and not self.broker.stop_handoff(self.worker_id) and was_ready:
                for queue in list(self._waits):
                    if self._is_answered(queue) and (found := self.read(queue)):
                        handed[queue] = found
        for queue in self.queues:
            self.stop_waiting(queue)
        return handed

    def stop_waiting(self, queue: str) -> None:
        """Close the connection of a queue, and with it its wait."""
        if wait := self._waits.pop(queue, None):
            wait.close()

    def _is_answered(self, queue: str) -> bool:
        wait = self._waits[queue]
        return wait.since is not None and wait.can_read(LAST_REPLY_SECONDS)

    def _commands(self, queue: str, *, is_first: bool) -> Commands:
        """Return the commands of a wait. is_first: send the script's text, since the server may be new."""
        keys = self.broker.keys(queue)
        if not self.is_on:
            return [("BLMOVE", keys.pending, keys.pending, "RIGHT", "RIGHT", self.block_seconds)]
        call = handed_call(keys, self.worker_id, self.lease_seconds)
        text, digest = scripts.script("dequeue")
        begin = ("EVAL", text) if is_first else ("EVALSHA", digest)
        return [
            ("BLMOVE", keys.pending, keys.handed(self.worker_id), "RIGHT", "LEFT", self.block_seconds),
            (*begin, len(call.keys), *call.keys, *call.arguments),
        ]
