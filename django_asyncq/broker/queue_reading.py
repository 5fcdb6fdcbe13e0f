"""Read what Redis holds of a queue besides the places of unfinished tasks. Changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from . import commands, redis_clock, replies, scripts
from .access import Access
from .decoding import UndecodableMessage, decode_message
from .inspection import PLACES
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


class QueueReading(Access):
    """Read one queue at a time. Every method raises BrokerUnavailable when Redis is unreachable."""

    def contents(self, queue: str) -> QueueContents:
        """Return what Redis holds of a queue; one script."""
        keys = self.keys(queue)
        today = f"{datetime.fromtimestamp(redis_clock.seconds(self.role), UTC):%Y-%m-%d}"
        names = [getattr(keys, name) for name in (*NUMBERED, "paused", "processed")]
        found = scripts.run("queue_numbers", self.client, [*names, keys.processed_on(today), keys.failed_on(today)])
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


def _decoded(stored: StoredMessage | None) -> TaskMessage | None:
    try:
        message = decode_message(stored.data) if stored and stored.data else None
    except UndecodableMessage:
        return None
    return message and message._replace(payload=message.payload[:MOST_BYTES])
