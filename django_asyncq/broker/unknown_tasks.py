"""The tasks that wait for code that has them: no worker knows their name, or the version of their arguments.

Their entries are in `scheduled`, due in an hour, when one more look does no harm. The key `unknown` of their queue says
by name which they are, so that all of a name are due at once when a worker with that code starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from . import entries as replies
from . import scripts
from .access import Access
from .keys import due_channel, keys_of
from .reading import Command, Reader

MADE_KNOWN_PER_CALL = 500
# A name, and a version that is not 1. Anything may be in Redis, so the number has a length.
LABEL = re.compile(r"(.+) (\d{1,9})", re.DOTALL)


class UnknownTasks(NamedTuple):
    """How many tasks of a name wait for code that has it. version: of the arguments. since: Unix seconds, or 0."""

    queue: str
    name: str
    version: int
    total: int
    since: int


def label_of(name: str, version: int) -> str:
    """Return under which label tasks of this name and version wait."""
    return name if version == 1 else f"{name} {version}"


def _parsed(label: str) -> tuple[str, int]:
    found = LABEL.fullmatch(label)
    return (found[1], int(found[2])) if found else (label, 1)


def reading_unknown(alias: str, queues: Iterable[str]) -> Reader[list[UnknownTasks]]:
    """Read which tasks of these queues wait for code that has them."""
    names = sorted(queues)
    keys = [keys_of(queue, alias) for queue in names]
    found = yield [Command("unknown", [each.unknown, each.scheduled], [each.task_prefix], alias=alias) for each in keys]
    waiting = []
    for queue, reply in zip(names, found, strict=True):
        words = list(reply or ())
        for label, count, since in zip(words[::3], words[1::3], words[2::3], strict=True):
            name, version = _parsed(replies.text(label))
            waiting.append(UnknownTasks(queue, name, version, replies.whole(count) or 0, replies.whole(since) or 0))
    return waiting


def make_known(broker: Access, tasks: UnknownTasks) -> int:
    """Make tasks due that waited for code that has them; return how many. Raises: BrokerUnavailable."""
    keys, total = broker.keys(tasks.queue), 0
    places = [keys.unknown, keys.scheduled, keys.due]
    head = [keys.task_prefix, due_channel(), label_of(tasks.name, tasks.version), MADE_KNOWN_PER_CALL]
    while (made := int(scripts.run("make_known", broker.client, places, head))) > 0:
        total += made
        if made < MADE_KNOWN_PER_CALL:
            break
    return total
