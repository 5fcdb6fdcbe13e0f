"""Ask many queues at once whether anything is in them, so that an empty one costs no script of its own.

A project may have hundreds of queues, of which few have anything to do at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from . import scripts
from .access import Access
from .clients import is_cluster
from .keys import QueueKeys

# So many queues are few: a worker waits for each on a connection of its own, and nobody looks before asking them.
FEW = 8
# 0.2 ms of Redis.
KEYS_PER_CALL = 1_000


def queues_with(access: Access, queues: Sequence[str], *names: str, held_by: Collection[str] = ()) -> list[str]:
    """Return those queues of which one of some keys exists; all of them if they are few, or Redis is a cluster.

    names: of fields of `QueueKeys`. held_by: ids of workers; what one of them holds of a queue counts too.
    In a cluster each queue has its own slot, so a look would cost as much as the script that it saves.
    Raises: BrokerUnavailable.
    """
    if len(queues) <= FEW or is_cluster(access.client):
        return list(queues)
    places = [(queue, key) for queue in queues for key in _keys(access.keys(queue), names, held_by)]
    found: set[str] = set()
    for start in range(0, len(places), KEYS_PER_CALL):
        part = places[start : start + KEYS_PER_CALL]
        existing = scripts.run("existing", access.client, [key for _, key in part])
        found.update(part[place - 1][0] for place in existing)
    return [queue for queue in queues if queue in found]


def _keys(keys: QueueKeys, names: Iterable[str], held_by: Iterable[str]) -> Iterator[str]:
    yield from (getattr(keys, name) for name in names)
    yield from map(keys.held, held_by)
