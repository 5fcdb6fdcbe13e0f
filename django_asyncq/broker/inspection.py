"""What does not agree within Redis: ids without a hash, hashes in no list, active tasks without a lease.

Every script changes an id's hash and its list together, so one without the other comes from an evicting server or a
foreign tool. What is found is asked once more by the script that mends it, so a task that moves meanwhile is safe.
No script looks at more than some hundred ids; whole queues and the key space are walked in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import clients, scripts
from .clients import broker_errors
from .entries import id_bytes, id_text
from .keys import keys_of, prefix

IDS_PER_PAGE = 500
IDS_PER_CALL = 200
# Searching a list of 100,000 ids takes about 1 ms: 50 of them, 50 ms.
SEARCHED_PER_CALL = 50
# As many keys of anybody's are looked at in one call.
KEYS_PER_SCAN = 1000

# Where a task stands before it has ended, and of what kind the key is.
PLACES = {"pending": "list", "priority": "zset", "scheduled": "zset", "retry": "zset", "active": "list"}


class EntryState(NamedTuple):
    """How a task stands in Redis. state: asynq's word, "" without a message. fence: "" for none."""

    id: str
    state: str
    fence: str


class Page(NamedTuple):
    """Some ids of one place, in their order."""

    place: str
    tasks: list[EntryState]


class Hashes(NamedTuple):
    """Some keys of the key space. tasks: queue → ids. workers: queue → ids of workers that hold something."""

    tasks: dict[str, list[str]]
    workers: dict[str, list[str]]


class Misplaced(NamedTuple):
    """What `Inspection.misplaced` found. leaseless: active, ours. astray: it may stand in no list."""

    leaseless: list[str]
    astray: list[str]


class Inspection:
    """Finds and mends one queue at a time. Every method raises BrokerUnavailable when Redis is away."""

    def __init__(self, role: clients.Role = "worker") -> None:
        self.role = role

    @property
    def client(self) -> clients.Client:
        """The redis client of this role."""
        return clients.client(self.role)

    # --- what is there

    def pages(self, queue: str) -> Iterator[Page]:
        """Walk the places of a queue. What moves meanwhile may be seen twice, or at the next walk."""
        keys = keys_of(queue)
        for place, kind in PLACES.items():
            key, start = getattr(keys, place), 0
            while True:
                with broker_errors():
                    read = self.client.lrange if kind == "list" else self.client.zrange
                    ids = [id_text(id) for id in read(key, start, start + IDS_PER_PAGE - 1)]
                if ids:
                    yield Page(place, self.entry_states(queue, ids))
                if len(ids) < IDS_PER_PAGE:
                    break
                start += IDS_PER_PAGE

    def entry_states(self, queue: str, ids: Sequence[str]) -> list[EntryState]:
        """Return how tasks stand, in the order given."""
        keys = keys_of(queue)
        found: list[EntryState] = []
        for part in _parts(ids, IDS_PER_CALL):
            reply = scripts.run("states", self.client, [keys.pending], [keys.task_prefix, *map(id_bytes, part)])
            words = [id_text(word) for word in reply]
            found += map(EntryState, part, words[::2], words[1::2])
        return found

    def hashes(self) -> Iterator[Hashes]:
        """Walk the hashes of tasks, and of what workers hold, of all queues."""
        start = f"{prefix()}:{{"
        with broker_errors():
            # A cluster client walks every node.
            names = self.client.scan_iter(match=f"{start}*}}:*", count=KEYS_PER_SCAN)
        page, size = Hashes({}, {}), 0
        while True:
            with broker_errors():
                name = next(names, None)
            if name is None:
                break
            queue, _, rest = id_text(name).removeprefix(start).partition("}:")
            kind, _, id = rest.partition(":")
            # Looked at by the part behind the queue, for other keys of ours have colons too.
            found = page.tasks if kind == "t" else page.workers if kind == "held" else None
            if found is not None and id:
                found.setdefault(queue, []).append(id)
                size += 1
            if size >= KEYS_PER_SCAN:
                yield page
                page, size = Hashes({}, {}), 0
        yield page

    def misplaced(self, queue: str, ids: Sequence[str]) -> Misplaced:
        """Return which hashes may stand in no list, and which active tasks of ours have no lease."""
        keys = keys_of(queue)
        places = [keys.pending, keys.priority, keys.lease, keys.scheduled, keys.retry, keys.archived, keys.completed]
        found = Misplaced([], [])
        for part in _parts(ids, IDS_PER_CALL):
            reply = scripts.run("misplaced", self.client, places, [keys.task_prefix, *map(id_bytes, part)])
            for id, word in zip(reply[::2], reply[1::2], strict=True):
                (found.leaseless if word == b"leaseless" else found.astray).append(id_text(id))
        return found

    def sizes(self, queue: str) -> dict[str, int]:
        """Return how many tasks stand in each place of a queue, by asynq's words; pending has those with a priority."""
        keys = keys_of(queue)
        with broker_errors():
            return {
                "pending": self.client.llen(keys.pending) + self.client.zcard(keys.priority),
                "active": self.client.llen(keys.active),
                **{place: self.client.zcard(getattr(keys, place)) for place in ("scheduled", "retry", "archived")},
            }

    # --- mending; each returns how many it mended

    def drop_strays(self, queue: str, place: str, ids: Sequence[str]) -> int:
        """Take ids without a message out of a place."""
        keys = keys_of(queue)
        return self._count(
            "drop_strays", [getattr(keys, place), keys.due], [keys.task_prefix, PLACES[place]], ids, SEARCHED_PER_CALL
        )

    def grant_leases(self, queue: str, ids: Sequence[str], lease_seconds: int) -> int:
        """Give a lease to what our workers have taken and what has none."""
        keys = keys_of(queue)
        head = [keys.task_prefix, keys.held_prefix, lease_seconds]
        return self._count("grant_lease", [keys.active, keys.lease], head, ids, SEARCHED_PER_CALL)

    def repair_orphans(self, queue: str, ids: Sequence[str]) -> int:
        """Make hashes that stand in no list pending again, or delete those whose time only the row knows.

        ids: of tasks that have a row.
        """
        keys = keys_of(queue)
        places = [keys.pending, keys.active, keys.priority, keys.lease]
        places += [keys.scheduled, keys.retry, keys.archived, keys.completed, keys.due]
        return self._count("repair_orphans", places, [keys.task_prefix, keys.wake], ids, SEARCHED_PER_CALL)

    def prune_held(self, queue: str, worker_id: str) -> int:
        """Forget what a worker does not hold any more."""
        keys = keys_of(queue)
        arguments = [keys.task_prefix, id_bytes(worker_id)]
        return int(scripts.run("prune_held", self.client, [keys.held(worker_id)], arguments))

    def discard(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting tasks whose row is final, unless they have been pushed or taken since they were seen."""
        keys = keys_of(queue)
        places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.due]
        discarded = 0
        for start in range(0, len(tasks), SEARCHED_PER_CALL):
            part = [
                word for task in tasks[start : start + SEARCHED_PER_CALL] for word in (id_bytes(task.id), task.fence)
            ]
            discarded += int(scripts.run("discard", self.client, places, [keys.task_prefix, *part]))
        return discarded

    def _count(self, name: str, keys: Sequence[str], head: Sequence[object], ids: Sequence[str], size: int) -> int:
        parts = _parts(ids, size)
        return sum(int(scripts.run(name, self.client, keys, [*head, *map(id_bytes, part)])) for part in parts)


def _parts(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
