"""Find and repair entries that do not agree: ids without a hash, hashes in no list, active tasks without a lease.

Every script changes a task's hash and its list together, so one without the other comes from an evicting server or a
foreign tool. The script that repairs an entry checks it again, so a task that moves meanwhile is safe. No script looks
at more than some hundred ids; whole queues and the key space are read in pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..core.compat import batched
from . import entries, redis_clock, scripts
from . import entries as replies
from .access import Access
from .clients import Client, broker_errors
from .entries import id_bytes
from .foreign import MESSAGES_PER_CALL, MOST_BYTES, StoredMessage, read_evidence, read_messages
from .keys import alive_key, hour_of, is_name, keys_of, queues_key
from .message import TaskMessage, UndecodableMessage, decode_message
from .reading import Command, Reader, asking, read, side_by_side

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
                ids = entries.texts(scripts.send(self.client, command, key, start, start + IDS_PER_PAGE - 1))
                if ids:
                    yield Page(place, self.entry_states(queue, ids))
                if len(ids) < IDS_PER_PAGE:
                    break
                start += IDS_PER_PAGE

    def entry_states(self, queue: str, ids: Sequence[str]) -> list[EntryState]:
        """Return the states of tasks, in the order given."""
        return read(self.role, _reading_states(self.alias, queue, ids))

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
            queue, _, rest = entries.text(name).removeprefix(start).partition("}:")
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
        for part in batched(ids, IDS_PER_CALL):
            reply = scripts.run(
                "misplaced", self.client, places, [keys.task_prefix, keys.group_prefix, *map(id_bytes, part)]
            )
            for id, word in zip(reply[::2], reply[1::2], strict=True):
                (found.leaseless if word == b"leaseless" else found.orphans).append(entries.text(id))
        return found

    def sizes(self, queue: str) -> dict[str, int]:
        """Return how many tasks are in each of asynq's states; pending includes those with a priority, and suspects."""
        keys = self.keys(queue)

        def size(command: str, place: str) -> int:
            return entries.count(scripts.send(self.client, command, getattr(keys, place)))

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
        places += [keys.aggregation_sets, keys.wake, keys.fair]
        head = [keys.task_prefix, keys.group_prefix]
        return self._count("repair_orphans", places, head, ids, SEARCHED_PER_CALL)

    def prune_held(self, queue: str, worker_id: str) -> int:
        """Remove from a worker's held tasks those that it no longer holds."""
        keys = self.keys(queue)
        arguments = [keys.task_prefix, id_bytes(worker_id)]
        return int(scripts.run("prune_held", self.client, [keys.held(worker_id)], arguments))

    def remove_waiting(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting tasks whose row is final, unless they were pushed or dequeued since they were seen."""
        keys = self.keys(queue)
        places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.suspects, keys.due, keys.fair]
        removed = 0
        for start in range(0, len(tasks), SEARCHED_PER_CALL):
            part = [
                word for task in tasks[start : start + SEARCHED_PER_CALL] for word in (id_bytes(task.id), task.fence)
            ]
            removed += int(scripts.run("remove_waiting", self.client, places, [keys.task_prefix, *part]))
        return removed

    def _count(self, name: str, keys: Sequence[str], head: Sequence[object], ids: Sequence[str], size: int) -> int:
        parts = batched(ids, size)
        return sum(int(scripts.run(name, self.client, keys, [*head, *map(id_bytes, part)])) for part in parts)


def reading_claimed(ids: Mapping[tuple[str, str], Sequence[str]]) -> Reader[set[str]]:
    """Read which tasks a worker has claimed. ids: by alias and queue."""
    of_queues = yield from side_by_side(
        *(_reading_states(alias, queue, of_queue) for (alias, queue), of_queue in ids.items())
    )
    return {entry.id for found in of_queues for entry in found if entry.state == "active"}


def _reading_states(alias: str, queue: str, ids: Sequence[str]) -> Reader[list[EntryState]]:
    keys, parts = keys_of(queue, alias), list(batched(ids, IDS_PER_CALL))
    commands = [
        Command("entry_states", [keys.pending], [keys.task_prefix, *map(id_bytes, part)], alias=alias) for part in parts
    ]
    found: list[EntryState] = []
    for part, reply in zip(parts, (yield from asking(*commands)), strict=True):
        words = entries.texts(reply)
        found += map(EntryState, part, words[::3], words[1::3], words[2::3])
    return found


# --- Read what Redis holds of a queue besides the places of unfinished tasks. Changes nothing.


class QueueContents(NamedTuple):
    """What Redis holds of a queue: numbers, and since when it is paused, in Unix seconds; None when it is not.

    pending: with priority and suspects. processed: asynq's counter since Redis remembers, failed attempts included.
    processed_today, failed_today: its counters of the UTC day. group_members: how many wait in its groups, of the first
    1,000. pending_since: since when that entry of pending waits which has waited longest, in Unix seconds; None when
    none does, or does not say so.
    """

    pending: int
    priority: int
    suspects: int
    active: int
    scheduled: int
    retry: int
    archived: int
    completed: int
    groups: int
    inbox: int
    rejected: int
    processed: int
    processed_today: int
    failed_today: int
    paused_since: float | None
    group_members: int
    pending_since: float | None


class StoredEntry(NamedTuple):
    """An entry of a queue. state: a name in STATES. message: None when it cannot be read, or was deleted.

    score: of the zset, None for a list. Its payload is cut at 64 KiB.
    """

    id: str
    state: str
    score: float | None
    message: TaskMessage | None


# What the script counts, in the order of its keys.
NUMBERED = (
    "pending",
    "active",
    "inbox",
    "rejected",
    "priority",
    "suspects",
    "scheduled",
    "retry",
    "archived",
    "completed",
    "groups",
)
# Where an entry can be, and the type of that key: asynq's states, with what waits elsewhere here.
STATES = {**PLACES, "archived": "zset", "completed": "zset"}


# The year 9999. Another program may have written any number.
LATEST_NS = 253_402_300_799 * 10**9


def reading_contents(queues: Iterable[tuple[str, str]]) -> Reader[dict[tuple[str, str], QueueContents]]:
    """Read what Redis holds of queues. queues: alias and name of each."""
    if not (pairs := list(queues)):
        return {}
    today = f"{datetime.fromtimestamp((yield from redis_clock.reading_seconds(pairs[0][0])), UTC):%Y-%m-%d}"
    replies = yield from asking(*(_numbers(alias, queue, today) for alias, queue in pairs))
    return dict(zip(pairs, map(_contents, replies), strict=True))


def _numbers(alias: str, queue: str, today: str) -> Command:
    keys = keys_of(queue, alias)
    names = [getattr(keys, name) for name in (*NUMBERED, "paused", "processed")]
    names += [keys.processed_on(today), keys.failed_on(today)]
    return Command("queue_numbers", names, [keys.task_prefix, keys.group_prefix], alias=alias)


class QueueReading(Access):
    """Read queues. Every method raises BrokerUnavailable when Redis is unreachable."""

    def of_asynq(self) -> set[str]:
        """Return the names in asynq's own set of queues, those of other programs too."""
        return set(replies.texts(scripts.send(self.client, "smembers", queues_key(self.alias))))

    def active(self, queue: str) -> list[str]:
        """Return the ids of all entries that workers of any program have, whether they have begun or not."""
        return replies.texts(scripts.send(self.client, "lrange", self.keys(queue).active, 0, -1))

    def entries(self, queue: str, state: str, most: int) -> list[StoredEntry]:
        """Return entries of one state, those that come first in it. state: a name in STATES."""
        key = getattr(self.keys(queue), state)
        scores: dict[str, float | None]
        if STATES[state] == "list":
            # In asynq's lists the next one stands last.
            ids = replies.texts(scripts.send(self.client, "lrange", key, -most, -1))
            scores = dict.fromkeys(reversed(ids))
        else:
            pairs = scripts.send(self.client, "zrange", key, 0, most - 1, withscores=True)
            scores = {replies.text(id): replies.number(score) for id, score in pairs}
        found: list[StoredEntry] = []
        items = list(scores.items())
        # Some at a time: a message may have megabytes.
        for start in range(0, len(items), MESSAGES_PER_CALL):
            part = dict(items[start : start + MESSAGES_PER_CALL])
            stored = read_messages(self, queue, list(part))
            found += [StoredEntry(id, state, score, _decoded(stored.get(id))) for id, score in part.items()]
        return found

    def entry(self, queue: str, id: str) -> StoredEntry | None:
        """Return one entry, None when there is no message. state: asynq's word; "" when it cannot be read."""
        stored = read_messages(self, queue, [id]).get(id)
        if stored is None:
            return None
        (found,) = read_evidence(self, queue, [id])
        return StoredEntry(id, found.state, found.score, _decoded(stored))

    def groups(self, queue: str) -> dict[str, int]:
        """Return the groups of a queue, sorted, and how many messages wait in each."""
        keys = self.keys(queue)
        names = sorted(replies.texts(scripts.send(self.client, "smembers", keys.groups)))
        return {name: self._size("zcard", keys.group(name)) for name in names}

    def _size(self, command: str, key: str) -> int:
        return replies.count(scripts.send(self.client, command, key))


def _contents(found: Sequence[Any]) -> QueueContents:
    sizes = dict(zip(NUMBERED, map(replies.count, found), strict=False))
    paused, *counters, members, since_ns = found[len(NUMBERED) :]
    processed, processed_today, failed_today = map(replies.count, counters)
    since = replies.whole(since_ns, 0, LATEST_NS)
    sizes["pending"] += sizes["priority"] + sizes["suspects"]
    return QueueContents(
        **sizes,
        processed=processed,
        processed_today=processed_today,
        failed_today=failed_today,
        # The key pauses the queue, whatever it holds.
        paused_since=None if paused is None else replies.number(paused) or 0.0,
        group_members=replies.count(members),
        pending_since=None if since is None else since / 1e9,
    )


def _decoded(stored: StoredMessage | None) -> TaskMessage | None:
    try:
        message = decode_message(stored.data) if stored and stored.data else None
    except UndecodableMessage:
        return None
    return message and message._replace(payload=message.payload[:MOST_BYTES])


# --- Read how many tasks a queue has processed: by the minute, for 8 days, and by the day, for 90.
#
# The scripts that acknowledge a task count it. asynq's servers count only the days. The counters lie in Redis
# alone: what was counted before Redis lost its memory is missing, and shown as a gap.

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
# As long as Redis keeps them.
LONGEST = timedelta(days=8)
MOST_DAYS = 90
HOURS_PER_CALL = 24
# From its begin on: no worker counts in an hour any more that was over two minutes ago.
SETTLED_SECONDS = 3_600 + 120
# Of 50 queues a week in two sizes of parts.
MOST_HOURS_KEPT = 20_000
# A chart of a week is asked for again and again; adding up the counters of 50 queues takes Redis a second.
_of_hours_over: WeakKeyDictionary[Client, dict[tuple[str, int], list[int]]] = WeakKeyDictionary()


class Minute(NamedTuple):
    """What a queue did in one minute, or in a longer part of an hour, failed attempts included in both numbers.

    None for both: it is not known.
    """

    at: datetime
    processed: int | None
    failed: int | None


class Day(NamedTuple):
    """What a queue did on one day of UTC, by the counters that asynq's tools show too."""

    day: date
    processed: int
    failed: int


class History(Access):
    """Read the counters of one queue at a time. Every method raises BrokerUnavailable when Redis is unreachable."""

    def minutes(self, queue: str, since: datetime) -> list[Minute]:
        """Return every minute from a time on, at most 8 days ago, the oldest first; the last one is not over yet.

        since: aware. A minute in which nothing was counted is a gap when Redis has lost its memory since.
        """
        now = datetime.fromtimestamp(redis_clock.seconds(self.role), UTC)
        return self.parts(queue, max(since.astimezone(UTC), now - LONGEST), now, 1)

    def parts(self, queue: str, since: datetime, until: datetime, minutes: int) -> list[Minute]:
        """Return what `reading_parts` finds."""
        return read(self.role, self.reading_parts(queue, since, until, minutes))

    def reading_parts(self, queue: str, since: datetime, until: datetime, minutes: int) -> Reader[list[Minute]]:
        """Read the sums of equal parts of an hour, the oldest first; Redis adds them up.

        since, until: aware, at most 8 days ago; the parts in which they lie are whole. minutes: of a part; they divide
        60. A part in which nothing was counted is a gap when Redis has lost its memory since.
        """
        first, last = since.astimezone(UTC), until.astimezone(UTC)
        hour = first.replace(minute=0, second=0, microsecond=0)
        # The key of each hour, and the minutes of a part.
        hours: dict[tuple[str, int], datetime] = {}
        while hour <= last:
            hours[self.keys(queue).minutes(hour_of(hour)), minutes] = hour
            hour += HOUR
        over = _of_hours_over.setdefault(self.client, {})
        missing = [key for key in hours if key not in over]
        wanted = [
            Command("hour_parts", [name for name, _ in part], [minutes], alias=self.alias)
            for part in batched(missing, HOURS_PER_CALL)
        ]
        now, (alive, *replies) = yield from side_by_side(
            redis_clock.reading_seconds(self.alias), asking(Command("get", [alive_key()], alias=self.alias), *wanted)
        )
        sums = {key: over[key] for key in hours if key in over} | dict(zip(missing, chain(*replies), strict=True))
        if len(over) > MOST_HOURS_KEPT:
            over.clear()
        # Those that are over are read once, but an empty one again: Redis may get it back, and it costs nothing.
        settled = [key for key in missing if hours[key].timestamp() + SETTLED_SECONDS < now and max(sums[key]) >= 0]
        over.update({key: sums[key] for key in settled})
        remembered, size, found = entries.whole(alive, 0), minutes * MINUTE, []
        for key, hour in hours.items():
            for index in range(0, len(sums[key]), 2):
                at = hour + index // 2 * size
                if at + size <= first or at > last:
                    continue
                processed, failed = (entries.whole(each, 0) for each in sums[key][index : index + 2])
                is_known = processed is not None or (remembered is not None and (at + size).timestamp() > remembered)
                found.append(Minute(at, processed or 0, failed or 0) if is_known else Minute(at, None, None))
        return found

    def days(self, queue: str, count: int) -> list[Day]:
        """Return the latest days, the oldest first; today is not over yet. count: at most 90."""
        today = datetime.fromtimestamp(redis_clock.seconds(), UTC).date()
        days = [today - timedelta(days=number) for number in reversed(range(min(count, MOST_DAYS)))]
        keys = self.keys(queue)
        names = [name for day in days for name in (keys.processed_on(str(day)), keys.failed_on(str(day)))]
        counts = [entries.count(reply) for reply in scripts.run("days", self.client, names)] if names else []
        return [Day(*each) for each in zip(days, counts[::2], counts[1::2], strict=True)]
