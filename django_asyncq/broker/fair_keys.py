"""What waits under fair keys, for people: the place of a task, and the keys of which most tasks wait."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from . import entries as replies
from .keys import keys_of
from .reading import Command, Reader

# How many keys are shown.
MOST_KEYS = 10


class FairKey(NamedTuple):
    """A fair key of a queue, and about how many of its tasks wait."""

    key: str
    waiting: int


def reading_place_in_line(alias: str, queue: str, id: str) -> Reader[int | None]:
    """Read how many tasks come before a waiting one, and 1; None when it does not wait under a key or a priority."""
    keys = keys_of(queue, alias)
    lists = [keys.pending, keys.priority, keys.fair]
    (found,) = yield [Command("fair_place", lists, [replies.id_bytes(id)], alias=alias)]
    return replies.count(found) or None


def reading_fair_keys(alias: str, queue: str) -> Reader[list[FairKey]]:
    """Read the keys of a queue of which most tasks wait, those first; at most MOST_KEYS."""
    keys = keys_of(queue, alias)
    (reply,) = yield [Command("fair_keys", [keys.priority, keys.fair], [keys.task_prefix], alias=alias)]
    words, waiting = list(reply or ()), Counter[str]()
    for key, count in zip(words[::2], words[1::2], strict=True):
        waiting[replies.text(key)] += replies.count(count)
    return [FairKey(*each) for each in sorted(waiting.items(), key=lambda each: (-each[1], each[0]))[:MOST_KEYS]]
