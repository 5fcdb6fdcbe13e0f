"""Read what Redis holds of a queue besides the places of unfinished tasks. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from . import commands, redis_clock, replies, scripts
from .access import Access
from .clients import Role, is_cluster
from .decoding import UndecodableMessage, decode_message
from .inspection import PLACES
from .keys import queues_key
from .message import TaskMessage
from .rejected import MOST_BYTES
from .row_fields import MESSAGES_PER_CALL, StoredMessage, read_messages


class QueueContents(NamedTuple):
    """What Redis holds of a queue: numbers, and since when it is paused, in Unix seconds; None when it is not.

    pending: with priority and suspects. processed: asynq's counter since Redis remembers, failed attempts included.
    processed_today, failed_today: its counters of the UTC day.
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


# A script is a round trip, and holds all others up while it runs: 20 queues take it 0.2 ms.
QUEUES_PER_CALL = 20


def read_contents(role: Role, queues: Iterable[tuple[str, str]]) -> dict[tuple[str, str], QueueContents]:
    """Return what Redis holds of queues. queues: alias and name of each. Raises: BrokerUnavailable."""
    found: dict[tuple[str, str], QueueContents] = {}
    for alias, pairs in groupby(sorted(queues), itemgetter(0)):
        names = [name for _, name in pairs]
        contents = QueueReading(role, alias).contents(names)
        found |= {(alias, name): each for name, each in zip(names, contents, strict=True)}
    return found


class QueueReading(Access):
    """Read queues. Every method raises BrokerUnavailable when Redis is unreachable."""

    def of_asynq(self) -> set[str]:
        """Return the names in asynq's own set of queues, those of other programs too."""
        return set(replies.texts(commands.send(self.client, "smembers", queues_key(self.alias))))

    def contents(self, queues: Sequence[str]) -> list[QueueContents]:
        """Return what Redis holds of each of these queues; one script for some at a time."""
        today = f"{datetime.fromtimestamp(redis_clock.seconds(self.role), UTC):%Y-%m-%d}"
        # In a cluster each queue has its own slot.
        at_once = 1 if is_cluster(self.client) else QUEUES_PER_CALL
        return [
            _contents(found)
            for start in range(0, len(queues), at_once)
            for found in self._numbers(queues[start : start + at_once], today)
        ]

    def _numbers(self, queues: Sequence[str], today: str) -> list[list[Any]]:
        names: list[str] = []
        for queue in queues:
            keys = self.keys(queue)
            names += [getattr(keys, name) for name in (*NUMBERED, "paused", "processed")]
            names += [keys.processed_on(today), keys.failed_on(today)]
        found: list[list[Any]] = scripts.run("queue_numbers", self.client, names)
        return found

    def entries(self, queue: str, state: str, most: int) -> list[StoredEntry]:
        """Return entries of one state, those that come first in it. state: a name in STATES."""
        key = getattr(self.keys(queue), state)
        scores: dict[str, float | None]
        if STATES[state] == "list":
            # In asynq's lists the next one stands last.
            ids = replies.texts(commands.send(self.client, "lrange", key, -most, -1))
            scores = dict.fromkeys(reversed(ids))
        else:
            pairs = commands.send(self.client, "zrange", key, 0, most - 1, withscores=True)
            scores = {replies.text(id): replies.number(score) for id, score in pairs}
        found: list[StoredEntry] = []
        items = list(scores.items())
        # Some at a time: a message may have megabytes.
        for start in range(0, len(items), MESSAGES_PER_CALL):
            part = dict(items[start : start + MESSAGES_PER_CALL])
            stored = read_messages(self, queue, list(part))
            found += [StoredEntry(id, state, score, _decoded(stored.get(id))) for id, score in part.items()]
        return found

    def groups(self, queue: str) -> dict[str, int]:
        """Return the groups of a queue, sorted, and how many messages wait in each."""
        keys = self.keys(queue)
        names = sorted(replies.texts(commands.send(self.client, "smembers", keys.groups)))
        return {name: self._size("zcard", keys.group(name)) for name in names}

    def _size(self, command: str, key: str) -> int:
        return replies.count(commands.send(self.client, command, key))


def _contents(found: Sequence[Any]) -> QueueContents:
    sizes = dict(zip(NUMBERED, map(replies.count, found), strict=False))
    paused, *counters = found[len(NUMBERED) :]
    processed, processed_today, failed_today = map(replies.count, counters)
    sizes["pending"] += sizes["priority"] + sizes["suspects"]
    return QueueContents(
        **sizes,
        processed=processed,
        processed_today=processed_today,
        failed_today=failed_today,
        # The key pauses the queue, whatever it holds.
        paused_since=None if paused is None else replies.number(paused) or 0.0,
    )


def _decoded(stored: StoredMessage | None) -> TaskMessage | None:
    try:
        message = decode_message(stored.data) if stored and stored.data else None
    except UndecodableMessage:
        return None
    return message and message._replace(payload=message.payload[:MOST_BYTES])
