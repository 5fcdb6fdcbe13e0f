"""The base of every class that reads or writes queues: a Redis client of one role, and the keys of one alias."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Self

from ..core.aliases import DEFAULT_ALIAS, prefix_of
from . import clients, scripts
from .clients import is_cluster
from .keys import QueueKeys, keys_of


class Access:
    """Reach the queues of one alias in TASKS with the client of one role; roles differ in their timeouts.

    Holds no connection, so it survives a fork.
    """

    def __init__(self, role: clients.Role = "worker", alias: str = DEFAULT_ALIAS) -> None:
        self.role = role
        self.alias = alias

    def of_alias(self, alias: str) -> Self:
        """Return the same for another alias."""
        return self if alias == self.alias else type(self)(self.role, alias)

    @property
    def client(self) -> clients.Client:
        """The redis client of this role and alias."""
        return clients.client(self.role, self.alias)

    @property
    def prefix(self) -> str:
        """The first part of the keys of the alias."""
        return prefix_of(self.alias)

    def holds(self, alias: str) -> bool:
        """Return whether the tasks of another alias lie under this prefix too: two may have one, with other queues."""
        return alias == self.alias or prefix_of(alias) == self.prefix

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue of the alias."""
        return keys_of(queue, self.alias)

    def name_of(self, queue: str) -> str:
        """Return the queue's name for a log line, with the alias unless that is the default one."""
        return queue if self.alias == DEFAULT_ALIAS else f"{queue} of alias {self.alias}"


# --- Ask many queues at once whether anything is in them, so that an empty one costs no script of its own.
#
# A project may have hundreds of queues, of which few have anything to do at any time.

# So many queues are few: nobody looks before asking them.
FEW = 2
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
