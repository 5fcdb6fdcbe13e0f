"""Wake lists: an idle worker process waits for pushes to many queues on one connection.

For few queues a worker waits on a connection each (`handoff`). Of 50 processes and 200 queues these would be 10,000
connections. So for more than FEW queues it waits at a wake list: it blocks until the name of a queue comes that may
have tasks. The leader waits for the queues in the place of all workers, and puts their names there.

    a push ──▶ pending ──▶ the leader ──▶ wake list ──▶ the worker that has waited longest
                 ▲            ▲                                     │ dequeues
                 │ BLMOVE     └───────── drained queues ◀───────────┘ until the queue is empty
                 └─ changes nothing

From then on the leader does not wait for that queue until a worker has found it empty, so a backlog wakes nobody all
the time. A worker that has no free slot while the queue has more tasks wakes the next one; when none is idle, the name
waits. After a second the leader waits again in any case: the worker may have died, or the queue is paused.

Workers that serve the same queues share a wake list. While nobody leads, they look by themselves each five seconds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..exceptions import BrokerUnavailable
from . import replies, scripts
from .access import Access
from .blocking import BlockingWait, Commands, descriptors
from .keys import drained_key, is_name, wake_list_key, wake_lists_key

# For how long a wake list counts after a worker has entered it, and how often one does so.
COUNTS_MS, ENTERED_SECONDS = 60_000, 10.0
# For how long the names in a list are kept: longer than any worker blocks.
KEPT_SECONDS = 60
WAIT_AGAIN_SECONDS = 1.0
# How often the leader reads which wake lists and queues there are, if nobody says that one is new.
READ_SECONDS = 5.0
# Each is a connection of the leader. Tasks of further queues are found when workers look.
MOST_QUEUES = 500
# Stands among the drained queues when there may be a wake list or a queue that the leader does not know.
NEW = "\n"


class WakeLists(Access):
    """The wake lists of one alias. Every method raises BrokerUnavailable."""

    def enter(self, wake_list: str) -> bool:
        """Note that a worker waits at a wake list; return whether nobody did."""
        arguments = [wake_list, COUNTS_MS]
        return bool(scripts.run("wake_lists", self.client, [wake_lists_key(self.alias)], arguments)[0])

    def read(self) -> list[str]:
        """Return the wake lists at which workers wait."""
        return replies.texts(scripts.run("wake_lists", self.client, [wake_lists_key(self.alias)], ["", 0])[1:])

    def wake(self, wake_list: str, queue: str) -> None:
        """Wake the worker that has waited longest at a wake list."""
        self._put(_key(wake_list, self.alias), queue)

    def note_drained(self, queue: str) -> None:
        """Have the leader wait for pushes to a queue again. queue: or NEW."""
        self._put(drained_key(self.alias), queue)

    def _put(self, key: str, queue: str) -> None:
        scripts.run("wake", self.client, [key], [queue, KEPT_SECONDS])


def wake_list_of(queues: Collection[str]) -> str:
    """Return the wake list of the workers that serve these queues. queues: none for all that there are."""
    return json.dumps(sorted(queues))


def _queues_of(wake_list: str, all_queues: Sequence[str]) -> list[str]:
    """Return the queues of a wake list; none of what another program has written in its place."""
    try:
        found = json.loads(wake_list)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [name for name in found if isinstance(name, str) and is_name(name)] if found else list(all_queues)


def _key(wake_list: str, alias: str) -> str:
    return wake_list_key(hashlib.sha256(wake_list.encode("utf-8", "surrogateescape")).hexdigest()[:16], alias)


class WakeWait:
    """The wait of one idle worker process at its wake list. Used by its main thread only.

    named: the queues that it was started for; none for all that there are.
    """

    def __init__(self, access: Access, named: Collection[str]) -> None:
        self._lists = WakeLists(access.role, access.alias)
        self._list = wake_list_of(named)
        self._wait = BlockingWait(_key(self._list, access.alias), "the wake list")
        # Monotonic seconds.
        self._enter_at = 0.0
        self._announced: frozenset[str] = frozenset()
        # Queues for which it was woken, and that it has not settled.
        self._woken_for: set[str] = set()

    @property
    def socket(self) -> Any:
        """What to sleep on; None when nothing waits."""
        return self._wait.socket

    def begin(self, served: Collection[str]) -> None:
        """Begin to wait, unless this is waiting. served: the queues known now. Raises: BrokerUnavailable."""
        now, names, is_new = time.monotonic(), frozenset(served), False
        try:
            if self._wait.begin(_pop(self._wait)) and now >= self._enter_at:
                is_new = self._lists.enter(self._list)
                self._enter_at = now + ENTERED_SECONDS
            if is_new or names != self._announced:
                self._lists.note_drained(NEW)
                self._announced = names
        except BrokerUnavailable:
            self._forget()
            raise

    def read(self) -> bool | None:
        """Read what ended the wait: whether a queue may have tasks; None when it goes on. Raises: BrokerUnavailable.

        A name that is lost with an error comes again.
        """
        try:
            found = self._wait.read()
        except BrokerUnavailable:
            self._forget()
            raise
        if found is None:
            return None
        name = _popped(found)
        if name:
            self._woken_for.add(name)
        return bool(name)

    def settle(self, drained: Collection[str], paused: Collection[str] = (), *, is_full: bool) -> None:
        """Say which queues are empty now; wake the next worker for others, if this process takes no more tasks.

        For what is left the leader waits again, as it does when this is lost: so it raises nothing.
        """
        if not self._woken_for:
            return
        woken_for, self._woken_for = self._woken_for, set()
        with suppress(BrokerUnavailable):
            for queue in woken_for:
                if queue in drained:
                    self._lists.note_drained(queue)
                elif is_full and queue not in paused:
                    self._lists.wake(self._list, queue)

    def close(self) -> None:
        """Wait no longer; another worker is woken in the place of this one."""
        self.settle((), is_full=True)
        self._wait.close()

    def _forget(self) -> None:
        """Say everything again: Redis may be a new one."""
        self._enter_at, self._announced = 0.0, frozenset()


class Waker:
    """The waits of the leader for all queues of one alias that have a wake list. Used by one thread.

    `begin` and `read` raise BrokerUnavailable; it must then be closed, and may begin anew.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lists = WakeLists(access.role, access.alias)
        self._drained = BlockingWait(drained_key(access.alias), "drained queues")
        # Queue → its wake lists.
        self._lists_of: dict[str, list[str]] = {}
        self._waits: dict[str, BlockingWait] = {}
        # Queue for which a worker was woken → monotonic seconds at which it is waited for again in any case.
        self._wait_at: dict[str, float] = {}
        self._read_at = 0.0

    def begin(self, all_queues: Callable[[], Iterable[str]], now: float) -> float:
        """Wait for every queue that is to be waited for; return the seconds until there is more to do.

        all_queues: returns those of the alias. now: monotonic seconds.
        """
        self._drained.begin(_pop(self._drained))
        if now >= self._read_at:
            self._read(sorted(all_queues()))
            self._read_at = now + READ_SECONDS
        for queue, wait in self._waits.items():
            if self._wait_at.get(queue, 0.0) <= now:
                self._wait_at.pop(queue, None)
                wait.begin(_look(wait))
        return max(min([self._read_at, *self._wait_at.values()]) - now, 0.0)

    @property
    def sockets(self) -> dict[int, str]:
        """What to sleep on: file descriptor → queue, or "" for the drained queues."""
        return descriptors({"": self._drained.socket} | {queue: wait.socket for queue, wait in self._waits.items()})

    def read(self, queue: str, now: float) -> None:
        """Read what ended a wait, and wake a worker if it is a push. queue: or "" for the drained queues."""
        if queue:
            self._read_queue(queue, now)
        elif found := self._drained.read():
            drained = _popped(found)
            self._wait_at.pop(drained, None)
            if drained == NEW:
                self._read_at = 0.0

    def close(self) -> None:
        """Wait for nothing."""
        for wait in (self._drained, *self._waits.values()):
            wait.close()
        self._waits.clear()
        self._wait_at.clear()
        self._read_at = 0.0

    def _read(self, all_queues: Sequence[str]) -> None:
        """Read which queues have wake lists, and wait for no others."""
        found: dict[str, list[str]] = {}
        for wake_list in self._lists.read():
            for queue in _queues_of(wake_list, all_queues):
                found.setdefault(queue, []).append(wake_list)
        self._lists_of = {queue: found[queue] for queue in sorted(found)[:MOST_QUEUES]}
        for queue in self._waits.keys() - self._lists_of.keys():
            self._waits.pop(queue).close()
            self._wait_at.pop(queue, None)
        for queue in self._lists_of.keys() - self._waits.keys():
            self._waits[queue] = BlockingWait(self._access.keys(queue).pending, f"queue {queue}")

    def _read_queue(self, queue: str, now: float) -> None:
        found = self._waits[queue].read()
        if found is None or found[0] is None:
            return
        self._wait_at[queue] = now + WAIT_AGAIN_SECONDS
        for wake_list in self._lists_of[queue]:
            self._lists.wake(wake_list, queue)


def _pop(wait: BlockingWait) -> Callable[[bool], Commands]:
    """Return what waits for a name in a list: a push wakes the connection that has waited longest, and no other."""
    return lambda _: [("BLPOP", wait.key, wait.block_seconds)]


def _look(wait: BlockingWait) -> Callable[[bool], Commands]:
    """Return what waits for an id in a list, and changes nothing: the id returns to where it was."""
    return lambda _: [("BLMOVE", wait.key, wait.key, "RIGHT", "RIGHT", wait.block_seconds)]


def _popped(found: Sequence[Any]) -> str:
    """Return the name that `_pop` brought; "" for none."""
    return replies.text(found[0][1]) if found[0] else ""
