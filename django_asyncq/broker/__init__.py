"""The queues in Redis, in asynq's layout: one method per script.

Knows keys, messages as bytes, leases and fences; must not know rows. A task's hash, and the one list or zset that
holds its id, change together in one script. Every method may be called again after a lost reply: its reply says what
is the case now. One script call gets at most 200 tasks, so that Redis is never busy for long; a longer batch is
several calls, and an error may leave it half done.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

from .. import conf
from . import clients, redis_clock, redis_py, scripts
from . import entries as replies
from .access import Access, queues_with
from .clients import broker_errors, misconfigured
from .entries import (
    Dequeued,
    Entry,
    Expired,
    Extended,
    Forwarded,
    GateKeys,
    Lease,
    Reachability,
    arguments_of,
    due_of,
    id_bytes,
    lease_arguments,
    line_of,
)
from .keys import (
    QueueKeys,
    alive_key,
    due_channel,
    is_name,
    names_channel,
    own_queues_key,
    queues_key,
    reachability_key,
)
from .reading import Command, Reader, read
from .task_entries import HOLDER

__all__ = ["Broker", "Dequeued", "Entry", "Expired", "Extended", "Forwarded", "GateKeys", "Lease", "Reachability"]

IDS_PER_CALL = 200
# `archive` trims 100 tasks a call; with at most as many new ones the archive cannot exceed its limit.
ARCHIVED_PER_CALL = 100
# Removing an id from a pending list of 100,000 ids takes about 1 ms: 50 of them, 50 ms.
REMOVED_PER_CALL = 50
# How many leases are looked at: those of Go workers may come before our own.
LEASES_LOOKED_AT = 1000
ARCHIVE_SECONDS = 90 * 86_400
# 200 queues take Redis 0.2 ms.
QUEUES_PER_CALL = 200
# asynq documents 10,000 and keeps one less.
ARCHIVE_SIZE = 9_999
# A queue is registered again each minute: the set may have been lost, or the queue removed.
REGISTERED_SECONDS = 60
# How long a process uses the queue names it has read: so much later it notices a new queue.
KNOWN_SECONDS = 5.0

_registered: dict[tuple[str, str], float] = {}
# Prefix → when the names were read, and the names.
_known: dict[str, tuple[float, set[str]]] = {}
_registered_lock = threading.Lock()


class Broker(Access):
    """Work with the queues of one alias in TASKS.

    Every method raises BrokerUnavailable when Redis is unreachable or refuses the command.
    """

    # Of a worker: a digest of the names of the tasks that its code has.
    code = ""

    @property
    def reaches_all(self) -> bool:
        """Whether one script may use keys of a queue and of a gate or a worker; in a cluster their slots differ."""
        return not clients.is_cluster(self.client)

    # --- queue names, and the state of Redis

    def register_queue(self, queue: str) -> bool:
        """Add the queue to those of the project, once a minute, and to the set of all queues, which tools read.

        Returns whether it was new to the project.
        """
        key = (self.prefix, queue)
        now = time.monotonic()
        with _registered_lock:
            if now < _registered.get(key, 0.0):
                return False
        scripts.send(self.client, "sadd", queues_key(self.alias), queue)
        is_new = bool(scripts.send(self.client, "sadd", own_queues_key(self.alias), queue))
        if is_new:
            with broker_errors(self.client):
                self.client.publish(names_channel(self.alias), queue)
        with _registered_lock:
            _registered[key] = now + REGISTERED_SECONDS
            _known.pop(self.prefix, None)
        return is_new

    @staticmethod
    def forget_registered() -> None:
        """Register every queue again at its next use, because Redis may have lost its memory."""
        with _registered_lock:
            _registered.clear()
            _known.clear()

    def queues(self) -> set[str]:
        """Return the names of the queues that code, rows or settings have given to the alias.

        Not those in asynq's own set: other programs have queues too, whose messages are theirs alone.
        """
        return read(self.role, self.reading_queues())

    def reading_queues(self) -> Reader[set[str]]:
        """Read what `queues` returns."""
        (members,) = yield [Command("smembers", [own_queues_key(self.alias)], alias=self.alias)]
        found = {name for name in replies.texts(members) if is_name(name)}
        with _registered_lock:
            # Redis has lost them, or another program has: they are registered again at their next use.
            for key in [key for key in _registered if key[0] == self.prefix and key[1] not in found]:
                del _registered[key]
        return found

    def known_queues(self) -> list[str]:
        """Return the names of its queues, sorted, as this process read them at most KNOWN_SECONDS or one beat ago.

        Leases last for several beats, so the lease of the first task of a new queue is renewed in time.
        """
        now = time.monotonic()
        read_at, names = _known.get(self.prefix, (-math.inf, set()))
        if now - read_at >= min(KNOWN_SECONDS, conf.current().beat_seconds):
            names = self.queues()
            with _registered_lock:
                _known[self.prefix] = (now, names)
        return sorted(names)

    def alive_since(self) -> int | None:
        """Return the Unix seconds since which Redis remembers everything; None when it has lost its memory."""
        return replies.whole(scripts.send(self.client, "get", alive_key()), 0)

    def mark_alive(self) -> None:
        """Mark that Redis remembers everything from now on; an existing mark stays."""
        self.forget_registered()
        scripts.run("mark_alive", self.client, [alive_key()])

    def reachability(self, gap_seconds: float) -> Reachability:
        """Record that Redis was reached now, and return how long it has been reachable.

        gap_seconds: how long a time without any call of this method, in any process, counts as an outage.
        """
        keys = [alive_key(), reachability_key()]
        found = scripts.run("reachability", self.client, keys, [round(gap_seconds * 1000)])
        return Reachability(replies.whole(found[0], 0), replies.count(found[1]) / 1000)

    def notify_due(self) -> None:
        """Notify every process that sleeps until the next due task: a nearer one may exist now."""
        with broker_errors(self.client):
            self.client.publish(due_channel(), "1")

    def ping(self) -> None:
        """Check that Redis answers."""
        with broker_errors(self.client):
            self.client.ping()

    def eviction_policy(self) -> str:
        """Return `maxmemory-policy`; "" when the server or the rights of its user do not say it.

        By INFO, because managed servers refuse CONFIG.
        """
        with broker_errors(self.client):
            try:
                found = self.client.info("memory")
            except redis_py.ResponseError as error:
                if misconfigured(error):
                    raise
                return ""
        return str(found.get("maxmemory_policy", ""))

    # --- adding tasks

    def enqueue(self, queue: str, entries: Sequence[Entry], *, again: bool = False) -> list[str]:
        """Make tasks pending, the first to run first, and confirm the slots of those with a `gate`.

        again: also move an id that waits in retry, archived, completed or scheduled.
        Returns, for each: "queued", "exists", "duplicate" (another id holds its lock), or "no_slot" (acquire one).
        """
        keys = self.keys(queue)
        gates = {entry.gate: 0 for entry in entries if entry.gate is not None}
        places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed, keys.due]
        places += [keys.wake, keys.fair]
        head: list[Any] = [keys.task_prefix, "again" if again else ""]
        head += [conf.unasked_seconds(), len(gates)]
        for number, gate in enumerate(gates, 1):
            gates[gate] = number
            places += [gate.members, gate.meta]
            head += ["" if gate.limit is None else gate.limit, gate.expected_seconds]
        items = [[*arguments_of(entry), gates[entry.gate] if entry.gate else 0] for entry in entries]
        return self._words("enqueue", places, head, items)

    def schedule(self, queue: str, entries: Sequence[Entry], *, group: str = "", rules: str = "") -> list[str]:
        """Schedule new tasks for their `due_at`. Returns, for each: "scheduled", "exists" or "duplicate".

        group, rules: the group that all of them join when they are due, and its rules; "" for none.
        """
        keys = self.keys(queue)
        items = [[*arguments_of(entry), *due_of(entry.due_at)] for entry in entries]
        return self._words(
            "schedule", [keys.scheduled, keys.due], [keys.task_prefix, due_channel(), group, rules], items
        )

    def park(self, queue: str, entries: Sequence[Entry]) -> list[str]:
        """Put tasks, new ones and those that wait elsewhere, into the retry set until their `due_at`.

        Returns, for each: "parked", or "exists" (it is pending, active, completed or in a group).
        """
        keys = self.keys(queue)
        items = [[*arguments_of(entry), due_of(entry.due_at)[0]] for entry in entries]
        places = [keys.retry, keys.scheduled, keys.archived, keys.due]
        return self._words("park", places, [keys.task_prefix, due_channel()], items)

    # --- run

    def dequeue(self, queue: str, worker_id: str, count: int, lease_seconds: int) -> Dequeued:
        """Dequeue the next tasks, at most `count` and at most 200; each gets a fence above any it had.

        Order: priorities above 0, the highest first; then pending, the oldest first; then priorities below 0. Of one
        priority, tasks with a fair key come in fair order, and all others as if they had one key together.
        """
        count = max(0, min(count, IDS_PER_CALL))
        keys = self.keys(queue)
        places = [keys.pending, keys.priority, keys.active, keys.lease, keys.paused, keys.held(worker_id), keys.wake]
        places.append(keys.fair)
        arguments = [keys.task_prefix, count, lease_seconds, worker_id, self.code]
        word, *flat = scripts.run("dequeue", self.client, places, arguments)
        leases = replies.leases(flat)
        # One that left all tasks to others finds nothing for now, as in a queue that is paused.
        paused = word in (b"paused", b"left")
        return Dequeued(leases, paused=paused, is_drained=word == b"taken" and len(leases) < count)

    def wake(self, queues: Sequence[str]) -> None:
        """Wake an idle worker for each of some queues that has tasks and no token, and is not paused."""
        found = [self.keys(queue) for queue in queues_with(self, queues, "pending", "priority")]
        size = QUEUES_PER_CALL if self.reaches_all else 1
        for part in (found[start : start + size] for start in range(0, len(found), size)):
            places = [key for keys in part for key in (keys.pending, keys.priority, keys.paused, keys.wake)]
            scripts.run("wake", self.client, places)

    def has_pending(self, queue: str) -> bool:
        """Return whether a task waits in a queue that is not paused."""
        keys = self.keys(queue)
        with broker_errors(self.client):
            waits = self.client.exists(keys.pending) or self.client.exists(keys.priority)
            return bool(waits) and not self.client.exists(keys.paused)

    def held(self, queue: str, worker_id: str) -> list[Lease]:
        """Return the leases of tasks that the worker has dequeued and not acknowledged, and that no other holds now."""
        keys = self.keys(queue)
        flat = scripts.run("held", self.client, [keys.held(worker_id)], [keys.task_prefix, id_bytes(worker_id)])
        return replies.leases(flat)

    def extend(
        self,
        queue: str,
        worker_ids: Sequence[str],
        lease_seconds: int,
        wanted: Collection[str] = (),
    ) -> list[Extended]:
        """Renew the leases of each of these workers; a task that one has lost is no longer held by it.

        wanted: row ids of running tasks whose messages are returned.
        """
        keys = self.keys(queue)
        places = [keys.lease, *map(keys.held, worker_ids)]
        found = scripts.run("extend", self.client, places, [keys.task_prefix, lease_seconds, *wanted])
        return [replies.extended(each) for each in found]

    def reassert(self, queue: str, worker_id: str, entries: Sequence[Entry], lease_seconds: int) -> list[str]:
        """Recreate the entries of running tasks after Redis lost its memory. entries: each has the fence of its lease.

        Returns, for each: "reasserted", "exists" (an entry with this fence), or "stale" (an entry with another fence).
        """
        keys = self.keys(queue)
        places = [keys.active, keys.lease, keys.held(worker_id)]
        rows = [[id_bytes(entry.id), entry.message, entry.fence, line_of(entry), entry.row] for entry in entries]
        return self._words("reassert", places, [keys.task_prefix, lease_seconds, worker_id], rows)

    # --- finishing tasks. "stale": not active with this fence, nothing changed; "missing": Redis does not know it.

    def done(self, queue: str, worker_id: str, leases: Sequence[Lease]) -> list[str]:
        """Remove finished tasks and count them. Returns, for each: "done", "stale" or "missing"."""
        keys = self.keys(queue)
        now = redis_clock.now(self.alias)
        places = [*_active(keys, worker_id), *redis_clock.successes(keys, now)]
        rows = [(lease.id.encode("utf-8", "surrogateescape"), lease.fence) for lease in leases]
        return self._words("done", places, [keys.task_prefix, *redis_clock.limits(now)], rows)

    def retry(
        self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes, float]], *, counted: bool = True
    ) -> list[str]:
        """Move failed tasks to the retry set. items: (lease, message, due in Unix seconds).

        counted: whether to count a failure in the counters of the day and of the queue.
        Returns, for each: "retried", "stale" or "missing".
        """
        keys = self.keys(queue)
        now = redis_clock.now(self.alias)
        places = [*_active(keys, worker_id), keys.retry, *redis_clock.counters(keys, now)]
        head = [keys.task_prefix, *redis_clock.limits(now), int(counted), due_channel()]
        rows = [[*lease_arguments(lease), message, due_of(due_at)[0]] for lease, message, due_at in items]
        return self._words("retry", places, head, rows)

    def archive(self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
        """Move tasks that failed for the last time to the archive. items: (lease, message; b"" keeps the old one).

        Returns, for each: "archived", "stale" or "missing".
        """
        keys = self.keys(queue)
        now = redis_clock.now(self.alias)
        places = [*_active(keys, worker_id), keys.archived, *redis_clock.counters(keys, now)]
        head = [keys.task_prefix, *redis_clock.limits(now), ARCHIVE_SECONDS, ARCHIVE_SIZE]
        rows = [[*lease_arguments(lease), message] for lease, message in items]
        return self._words("archive", places, head, rows, size=ARCHIVED_PER_CALL)

    def requeue(
        self,
        queue: str,
        worker_id: str,
        leases: Sequence[Lease],
        *,
        raise_fence: bool = False,
        suspects: Collection[str] = (),
        left_seconds: int = 0,
    ) -> list[str]:
        """Requeue unfinished tasks; they are the next to run, in the order given.

        raise_fence: by one, so that nothing is accepted any more from the run that held them.
        suspects: ids of those that must run alone; they wait behind earlier ones, where `dequeue` does not look.
        left_seconds: for how long workers with the `code` of this one do not take them.
        Returns, for each: "requeued", "stale" or "missing".
        """
        keys = self.keys(queue)
        places = [*_active(keys, worker_id), keys.pending, keys.priority, keys.suspects, keys.wake, keys.fair]
        head = [keys.task_prefix, int(raise_fence), self.code if left_seconds else "", left_seconds]
        head.append(HOLDER)
        # The script puts each task before the one it got earlier.
        rows = [[*lease_arguments(lease), int(lease.id in suspects)] for lease in reversed(leases)]
        return self._words("requeue", places, head, rows)[::-1]

    def postpone(
        self,
        queue: str,
        worker_id: str,
        leases: Sequence[Lease],
        delay_seconds: int,
        *,
        labels: Sequence[str] = (),
        due_ms: Sequence[int] = (),
    ) -> list[int]:
        """Postpone leased tasks without running them.

        labels: for each, under which it waits for code that has it, as of `unknown_tasks`; the time for which it does
        is counted. None for tasks that wait for something else.
        due_ms: for each, when it may be claimed again, in Unix milliseconds by Redis's clock; none for the delay.
        Returns, for each: the seconds since it was first postponed, or -1 when it is stale or missing.
        """
        keys = self.keys(queue)
        places = [*_active(keys, worker_id), keys.scheduled, keys.due, keys.unknown]
        head = [keys.task_prefix, delay_seconds, due_channel()]
        more = zip(leases, labels or repeat(""), due_ms or repeat(""), strict=False)
        items = [[*lease_arguments(lease), label, due] for lease, label, due in more]
        ages = scripts.run_in_parts("postpone", self.client, places, head, items, IDS_PER_CALL)
        return [replies.whole(age) or 0 for age in ages]

    # --- maintenance

    def forward(self, queue: str, source: Literal["scheduled", "retry"], limit: int = 100) -> Forwarded:
        """Move due tasks to pending, priority or their group; return, but do not move, our own tasks in retry."""
        keys = self.keys(queue)
        is_retry = source == "retry"
        places = [keys.retry if is_retry else keys.scheduled, keys.pending, keys.priority, keys.groups, keys.due]
        places += [keys.group_due, keys.group_rules, keys.wake, keys.fair]
        arguments = [keys.task_prefix, keys.group_prefix, min(limit, IDS_PER_CALL), int(is_retry)]
        moved, next_ms, *own = scripts.run("forward", self.client, places, arguments)
        next_ms = replies.whole(next_ms)
        return Forwarded(replies.count(moved), replies.texts(own), None if next_ms is None else next_ms / 1000)

    def expired(self, queue: str, limit: int = 100) -> list[Expired]:
        """Return our tasks whose lease has expired, the longest expired first."""
        keys = self.keys(queue)
        arguments = [keys.task_prefix, limit, LEASES_LOOKED_AT, conf.current().lease_seconds]
        found = scripts.run("expired", self.client, [keys.lease, keys.active], arguments)
        return replies.expired(found)

    def remove(self, queue: str, ids: Sequence[str], rows: Mapping[str, str] | None = None) -> int:
        """Remove tasks from wherever they are, with their locks; return how many existed.

        rows: the rows that the hashes of these ids must name. Another program may have used the id again.
        """
        rows = rows or {}
        keys = self.keys(queue)
        places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed]
        places += [keys.active, keys.lease, keys.groups, keys.due, keys.suspects, keys.fair]
        head = [keys.task_prefix, keys.held_prefix, keys.group_prefix]
        parts = _chunks([[id_bytes(id), rows.get(id, "")] for id in ids], REMOVED_PER_CALL)
        return sum(int(scripts.run("remove", self.client, places, [*head, *part])) for part in parts)

    def prune_completed(self, queue: str, limit: int = 100) -> int:
        """Delete tasks of Go workers whose retention has expired, at most `limit` and 200; return how many."""
        keys = self.keys(queue)
        limit = max(0, min(limit, IDS_PER_CALL))
        return int(scripts.run("prune_completed", self.client, [keys.completed], [keys.task_prefix, limit]))

    def _words(
        self,
        name: str,
        keys: Sequence[str],
        head: Sequence[Any],
        items: Sequence[Sequence[Any]],
        size: int = IDS_PER_CALL,
    ) -> list[str]:
        """Run a script that returns one word for each item, with `size` items a call."""
        words: list[str] = []
        for part in _chunks(items, size):
            words += replies.texts(scripts.run(name, self.client, keys, [*head, *part]))
        return words


def _chunks(items: Sequence[Sequence[Any]], size: int) -> Iterator[list[Any]]:
    """Yield the arguments of `size` items at a time."""
    for start in range(0, len(items), size):
        yield [argument for item in items[start : start + size] for argument in item]


def _active(keys: QueueKeys, worker_id: str) -> list[str]:
    """Return the keys that hold a task while it runs."""
    return [keys.active, keys.lease, keys.held(worker_id)]
