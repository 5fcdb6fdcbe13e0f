"""Find and repair entries that do not agree: ids without a hash, hashes in no list, active tasks without a lease.

Every script changes a task's hash and its list together, so one without the other comes from an evicting server or a
foreign tool. The script that repairs an entry checks it again, so a task that moves meanwhile is safe. No script looks
at more than some hundred ids; whole queues and the key space are read in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from . import commands, replies, scripts
from .access import Access
from .clients import Role, broker_errors
from .entries import id_bytes
from .keys import is_name

IDS_PER_PAGE = 500
IDS_PER_CALL = 200
# Searching a list of 100,000 ids takes about 1 ms: 50 of them, 50 ms.
SEARCHED_PER_CALL = 50
# How many keys, of any program, one SCAN looks at.
KEYS_PER_SCAN = 1000

# Where an unfinished task is, and the type of that key.
PLACES = {
    "pending": "list",
    "priority": "zset",
    "suspects": "zset",
    "scheduled": "zset",
    "retry": "zset",
    "active": "list",
}


class EntryState(NamedTuple):
    """Describe a task in Redis. state: asynq's word, "" without a message. fence: "" for none.

    row: what the entry of another program names as its row; "" for an entry whose id is that of its row.
    """

    id: str
    state: str
    fence: str
    row: str = ""


class Page(NamedTuple):
    """Hold some tasks of one list or zset, in their order."""

    place: str
    tasks: list[EntryState]


class Hashes(NamedTuple):
    """Hold some keys of the key space. tasks: queue → ids. workers: queue → ids of workers that hold tasks."""

    tasks: dict[str, list[str]]
    workers: dict[str, list[str]]


class Misplaced(NamedTuple):
    """Hold what `Inspection.misplaced` found.

    leaseless: active tasks of ours without a lease. orphans: hashes that may be in no list.
    """

    leaseless: list[str]
    orphans: list[str]


class Inspection(Access):
    """Inspect and repair one queue at a time. Every method raises BrokerUnavailable when Redis is unreachable."""

    # --- reading

    def pages(self, queue: str) -> Iterator[Page]:
        """Yield the unfinished tasks of a queue. One that moves meanwhile may come twice, or not at all."""
        keys = self.keys(queue)
        for place, kind in PLACES.items():
            key, start = getattr(keys, place), 0
            while True:
                command = "lrange" if kind == "list" else "zrange"
                ids = replies.texts(commands.send(self.client, command, key, start, start + IDS_PER_PAGE - 1))
                if ids:
                    yield Page(place, self.entry_states(queue, ids))
                if len(ids) < IDS_PER_PAGE:
                    break
                start += IDS_PER_PAGE

    def entry_states(self, queue: str, ids: Sequence[str]) -> list[EntryState]:
        """Return the states of tasks, in the order given."""
        keys = self.keys(queue)
        found: list[EntryState] = []
        for part in _parts(ids, IDS_PER_CALL):
            reply = scripts.run("entry_states", self.client, [keys.pending], [keys.task_prefix, *map(id_bytes, part)])
            words = replies.texts(reply)
            found += map(EntryState, part, words[::3], words[1::3], words[2::3])
        return found

    def hashes(self) -> Iterator[Hashes]:
        """Yield the hashes of tasks and of workers' held tasks, of all queues of the alias."""
        start = f"{self.prefix}:{{"
        with broker_errors(self.client):
            # A cluster client scans every node.
            names = self.client.scan_iter(match=f"{start}*}}:*", count=KEYS_PER_SCAN)
        page, size = Hashes({}, {}), 0
        while True:
            with broker_errors(self.client):
                name = next(names, None)
            if name is None:
                break
            queue, _, rest = replies.text(name).removeprefix(start).partition("}:")
            kind, _, id = rest.partition(":")
            # Decided by the part after the queue, because other keys of ours have colons too.
            found = page.tasks if kind == "t" else page.workers if kind == "held" else None
            if found is not None and id and is_name(queue):
                found.setdefault(queue, []).append(id)
                size += 1
            if size >= KEYS_PER_SCAN:
                yield page
                page, size = Hashes({}, {}), 0
        yield page

    def misplaced(self, queue: str, ids: Sequence[str]) -> Misplaced:
        """Return the hashes that may be in no list, and our active tasks without a lease."""
        keys = self.keys(queue)
        places = [keys.pending, keys.priority, keys.lease, keys.scheduled, keys.retry, keys.archived, keys.completed]
        places += [keys.suspects, keys.aggregation_sets]
        found = Misplaced([], [])
        for part in _parts(ids, IDS_PER_CALL):
            reply = scripts.run(
                "misplaced", self.client, places, [keys.task_prefix, keys.group_prefix, *map(id_bytes, part)]
            )
            for id, word in zip(reply[::2], reply[1::2], strict=True):
                (found.leaseless if word == b"leaseless" else found.orphans).append(replies.text(id))
        return found

    def sizes(self, queue: str) -> dict[str, int]:
        """Return how many tasks are in each of asynq's states; pending includes those with a priority, and suspects."""
        keys = self.keys(queue)

        def size(command: str, place: str) -> int:
            return replies.count(commands.send(self.client, command, getattr(keys, place)))

        return {
            "pending": size("llen", "pending") + size("zcard", "priority") + size("zcard", "suspects"),
            "active": size("llen", "active"),
            **{place: size("zcard", place) for place in ("scheduled", "retry", "archived")},
        }

    # --- repairing; each method returns how many tasks it repaired

    def remove_dangling(self, queue: str, place: str, ids: Sequence[str]) -> int:
        """Remove ids without a message from a list or zset. place: a name in PLACES."""
        keys = self.keys(queue)
        head = [keys.task_prefix, PLACES[place]]
        return self._count("remove_dangling", [getattr(keys, place), keys.due], head, ids, SEARCHED_PER_CALL)

    def grant_leases(self, queue: str, ids: Sequence[str], lease_seconds: int) -> int:
        """Give a lease to tasks that our workers run and that have none."""
        keys = self.keys(queue)
        head = [keys.task_prefix, keys.held_prefix, lease_seconds]
        return self._count("grant_lease", [keys.active, keys.lease], head, ids, SEARCHED_PER_CALL)

    def repair_orphans(self, queue: str, ids: Sequence[str]) -> int:
        """Make pending tasks that are in no list the next to run, and delete other hashes that are in no list.

        ids: of tasks that have a row; a deleted one is pushed again from its row.
        """
        keys = self.keys(queue)
        places = [keys.pending, keys.active, keys.priority, keys.lease]
        places += [keys.scheduled, keys.retry, keys.archived, keys.completed, keys.suspects, keys.due]
        places.append(keys.aggregation_sets)
        head = [keys.task_prefix, keys.wake, keys.group_prefix]
        return self._count("repair_orphans", places, head, ids, SEARCHED_PER_CALL)

    def prune_held(self, queue: str, worker_id: str) -> int:
        """Remove from a worker's held tasks those that it no longer holds."""
        keys = self.keys(queue)
        arguments = [keys.task_prefix, id_bytes(worker_id)]
        return int(scripts.run("prune_held", self.client, [keys.held(worker_id)], arguments))

    def remove_waiting(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting tasks whose row is final, unless they were pushed or dequeued since they were seen."""
        keys = self.keys(queue)
        places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.suspects, keys.due]
        removed = 0
        for start in range(0, len(tasks), SEARCHED_PER_CALL):
            part = [
                word for task in tasks[start : start + SEARCHED_PER_CALL] for word in (id_bytes(task.id), task.fence)
            ]
            removed += int(scripts.run("remove_waiting", self.client, places, [keys.task_prefix, *part]))
        return removed

    def _count(self, name: str, keys: Sequence[str], head: Sequence[object], ids: Sequence[str], size: int) -> int:
        parts = _parts(ids, size)
        return sum(int(scripts.run(name, self.client, keys, [*head, *map(id_bytes, part)])) for part in parts)


def claimed_ids(role: Role, ids: Mapping[tuple[str, str], Sequence[str]]) -> set[str]:
    """Return which tasks a worker has claimed. ids: by alias and queue. Raises: BrokerUnavailable."""
    return {
        entry.id
        for (alias, queue), of_queue in ids.items()
        for entry in Inspection(role, alias).entry_states(queue, of_queue)
        if entry.state == "active"
    }


def _parts(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
