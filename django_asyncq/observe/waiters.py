"""The waiters of this process, the one listener that wakes them, and the looks at rows that all share.

One thread and one connection listen for any number of waiters. They start with the first one, and stop some time after
the last one. A forked child has neither, and starts its own. No thread looks at rows by itself: a waiter whose sleep is
over looks for all. What it finds only has the others look for themselves, because it may see what nobody has committed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from django.core.signals import setting_changed

from .. import conf
from ..broker import clients
from ..broker.waits import OverListener, mark_waited
from ..core.compat import batched
from ..exceptions import BrokerUnavailable
from ..models import TaskRecord, TaskState
from ..storage.routing import rows_of

# How long the thread and its connection stay when nothing waits: a busy process waits again and again.
IDLE_SECONDS = 60.0
# The rows of all tasks are read this often without an announcement; those of unmarked ones sooner, each time after
# twice as long, up to the longest. A waiter adds a random part, so that not all of them wake at once.
LOOK_SECONDS = 4.0
SHORTEST_LOOK_SECONDS = 0.08
LONGEST_LOOK_SECONDS = 0.8
ROWS_PER_QUERY = 500


class Waiter:
    """Waits for some tasks. queues: id → alias and queue. wake: called from any thread; must return at once."""

    def __init__(self, queues: Mapping[str, tuple[str, str]], wake: Callable[[], object]) -> None:
        self.queues = queues
        self.wake = wake
        self._ids: deque[str] = deque()

    def note(self, id: str) -> None:
        """Note that a task may be over, and wake."""
        self._ids.append(id)
        self.wake()

    def has_ids(self) -> bool:
        """Whether a task may be over since the last call of `taken_ids`."""
        return bool(self._ids)

    def taken_ids(self) -> set[str]:
        """Return the tasks that may be over, and forget them."""
        found: set[str] = set()
        while self._ids:
            found.add(self._ids.popleft())
        return found


class Waiters:
    """All waiters of one process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, set[Waiter]] = {}
        self._queues: dict[str, tuple[str, str]] = {}
        # Those whose announcement would not come: Redis does not have them, or is unreachable.
        self._unmarked: set[str] = set()
        self._unmarked_pause = 0.0
        # Monotonic times of the next looks: at all rows, and at the unmarked ones.
        self._look_at = 0.0
        self._unmarked_look_at = 0.0
        self._listener: OverListener | None = None
        self._idle_since = time.monotonic()

    @property
    def is_listening(self) -> bool:
        """Whether announcements arrive: the server has confirmed the subscription."""
        listener = self._listener
        return listener is not None and listener.is_listening and listener.is_current

    def join(self, waiter: Waiter) -> None:
        """Have a waiter woken from now on; its tasks are unmarked."""
        with self._lock:
            if not self._by_id:
                self._look_at = time.monotonic() + LOOK_SECONDS
            for id, queue in waiter.queues.items():
                self._by_id.setdefault(id, set()).add(waiter)
                self._queues[id] = queue
            self._look_soon(waiter.queues)

    def leave(self, waiter: Waiter) -> None:
        """Wake a waiter no more."""
        with self._lock:
            for id in waiter.queues:
                if waiters := self._by_id.get(id):
                    waiters.discard(waiter)
                    if not waiters:
                        del self._by_id[id], self._queues[id]
                        self._unmarked.discard(id)
            if not self._by_id:
                self._idle_since = time.monotonic()

    # --- looks at rows

    def next_look_at(self) -> float:
        """Return the monotonic time of the next look."""
        return min(self._look_at, self._unmarked_look_at) if self._unmarked else self._look_at

    def claim_look(self) -> set[str]:
        """Return the ids that the caller must look at now, for all waiters; none when no look is due."""
        now = time.monotonic()
        if now < self.next_look_at():
            return set()
        with self._lock:
            if now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                found = set(self._by_id)
            elif now >= self._unmarked_look_at:
                found = set(self._unmarked)
            else:
                return set()
            self._unmarked_pause = min(max(2 * self._unmarked_pause, SHORTEST_LOOK_SECONDS), LONGEST_LOOK_SECONDS)
            self._unmarked_look_at = now + self._unmarked_pause
            return found

    def look(self, ids: Collection[str]) -> None:
        """Mark tasks, read their rows, and wake what waits for those that may be over. Raises: django.db.Error."""
        with self._lock:
            queues = {id: self._queues[id] for id in ids if id in self._queues}
        try:
            self.mark(queues)
            for id in over_among(list(queues)):
                self._note(id)
        except BaseException:
            self.look_soon(ids)
            raise

    def mark(self, queues: Mapping[str, tuple[str, str]]) -> None:
        """Mark tasks as waited for, if announcements would arrive; the others are looked at soon, and marked then."""
        marked: set[str] = set()
        try:
            self._listen()
            # Otherwise it has all looked at when it begins to listen.
            if self.is_listening:
                by_queue: dict[tuple[str, str], list[str]] = defaultdict(list)
                for id, queue in queues.items():
                    by_queue[queue].append(id)
                for (alias, name), group in by_queue.items():
                    marked |= mark_waited(alias, name, group)
        except BrokerUnavailable:
            pass
        with self._lock:
            self._unmarked -= marked
            self._unmarked |= {id for id in queues if id not in marked and id in self._by_id}

    def look_soon(self, ids: Collection[str]) -> None:
        """Have tasks looked at soon, and marked again, if anything waits for them still."""
        with self._lock:
            self._look_soon([id for id in ids if id in self._by_id])

    def _look_soon(self, ids: Collection[str]) -> None:
        if not ids:
            return
        soon = time.monotonic() + SHORTEST_LOOK_SECONDS
        self._unmarked_look_at = min(self._unmarked_look_at, soon) if self._unmarked else soon
        self._unmarked_pause = SHORTEST_LOOK_SECONDS
        self._unmarked.update(ids)

    # --- the listener

    def stop(self) -> None:
        """Stop the listener; the next look starts a new one."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()

    def leave_to_parent(self) -> None:
        """Close this process's copy of the connection, and send nothing. For a forked child; takes no lock."""
        if self._listener is not None:
            self._listener.leave_to_parent()

    def look_at_all(self) -> None:
        """Have all rows looked at now: announcements may have been missed."""
        with self._lock:
            self._look_at = 0.0
            waiters = {waiter for each in self._by_id.values() for waiter in each}
        for waiter in waiters:
            waiter.wake()

    def _listen(self) -> None:
        """Start the listener, unless it runs.

        Raises: ImproperlyConfigured, RedisNotForTests; BrokerUnavailable when no node of a cluster answers.
        """
        clients.client("producer")  # checks the settings in the caller's thread
        with self._lock:
            former = self._listener
            if former is not None and former.is_current:
                return
            self._listener = None
            listener = OverListener(
                self._note, _Begun(self), is_needed=self._is_needed, on_death=lambda name: self.look_at_all()
            )
            # Only one that has started is kept: the next look tries again.
            with suppress(RuntimeError):  # no more threads may be started now
                listener.start()
                self._listener = listener
        if former is not None:
            former.stop()

    def _note(self, id: str) -> None:
        with self._lock:
            waiters = list(self._by_id.get(id, ()))
        for waiter in waiters:
            waiter.note(id)

    def _is_needed(self) -> bool:
        with self._lock:
            if self._by_id or time.monotonic() - self._idle_since < IDLE_SECONDS:
                return True
            # Under the lock: a waiter that comes now starts a new one.
            self._listener = None
            return False


class _Begun:
    """The event that the listener sets when it begins to listen."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters

    def set(self) -> None:
        """Have all rows looked at."""
        self._waiters.look_at_all()


def over_among(ids: Sequence[str]) -> Iterator[str]:
    """Yield the tasks whose rows are final or missing; arguments, which may be large, are not read."""
    for part in batched(ids, ROWS_PER_QUERY):
        rows = rows_of(TaskRecord).filter(id__in=part).values_list("id", "state", "retry_at")
        goes_on = {
            str(id)
            for id, state, retry_at in rows
            if not (state == TaskState.SUCCEEDED or (state == TaskState.FAILED and retry_at is None))
        }
        yield from (id for id in part if id not in goes_on)


_waiters = Waiters()


def of_process() -> Waiters:
    """Return the waiters of this process."""
    return _waiters


def _begin_anew() -> None:
    """Begin with nothing, in the child of a fork: the parent has the thread, and reads from the connection."""
    global _waiters
    _waiters.leave_to_parent()
    _waiters = Waiters()


def _stop(*, setting: str, **kwargs: Any) -> None:
    """Stop listening to a Redis that a test has replaced."""
    if setting in ("CACHES", conf.NAME):
        _waiters.stop()


setting_changed.connect(_stop, dispatch_uid="django_asyncq.waiters")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
