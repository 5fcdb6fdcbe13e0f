"""What waits under fair keys, for people: the place of a task, and the keys of which most tasks wait."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from . import entries as replies
from . import scripts
from .access import Access
from .keys import keys_of
from .reading import Command, Reader

# How many keys are shown.
MOST_KEYS = 10


class FairKey(NamedTuple):
    """A fair key of a queue, and about how many of its tasks wait."""

    key: str
    waiting: int


def place_in_line(broker: Access, queue: str, id: str) -> int | None:
    """Return how many tasks come before a waiting one, and 1; None when it does not wait under a key or a priority.

    Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    found = scripts.run("fair_place", broker.client, [keys.pending, keys.priority, keys.fair], [replies.id_bytes(id)])
    return replies.count(found) or None


def reading_fair_keys(alias: str, queue: str) -> Reader[list[FairKey]]:
    """Read the keys of a queue of which most tasks wait, those first; at most MOST_KEYS."""
    keys = keys_of(queue, alias)
    (reply,) = yield [Command("fair_keys", [keys.priority, keys.fair], [keys.task_prefix], alias=alias)]
    words, waiting = list(reply or ()), Counter[str]()
    for key, count in zip(words[::2], words[1::2], strict=True):
        waiting[replies.text(key)] += replies.count(count)
    return [FairKey(*each) for each in sorted(waiting.items(), key=lambda each: (-each[1], each[0]))[:MOST_KEYS]]
