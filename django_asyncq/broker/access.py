"""What every class that reads or writes queues has: a Redis client of one role, and the keys of one alias."""

from __future__ import annotations

from typing import Self

from ..prefixes import DEFAULT_ALIAS, prefix_of
from . import clients
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
        """The redis client of this role."""
        return clients.client(self.role)

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
