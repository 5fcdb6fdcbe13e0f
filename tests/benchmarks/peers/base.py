"""What the harness knows about a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

MEASURES = (
    "enqueue",
    "transaction",
    "bulk",
    "drain",
    "latency",
    "sleep",
    "asleep",
    "mix",
    "retries",
    "gated",
    "idle",
    "flow",
)


class Stores(Protocol):
    """The two servers, to look into."""

    def redis(self, *words: Any) -> Any:
        """Send Redis one command."""

    def sql(self, statement: str) -> Any:
        """Return the first value of a query."""


class Peer(ABC):
    """One task queue, with the settings that its users would choose after measuring.

    requirements: name of a file in requirements/. application: module in inside/ (see inside/producer.py).
    packages: those whose versions are printed. record: where a task's state is kept, and when it is written.
    settings: setting → reason. unmeasured: measure → why it makes no sense here; all others are taken.
    drain_limit: the largest backlog that is drained; a larger one takes many minutes and says the same.
    sleep_slots: how many tasks it runs at once with two processes.
    """

    name: ClassVar[str]
    requirements: ClassVar[str]
    application: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    record: ClassVar[str]
    settings: ClassVar[Mapping[str, str]]
    unmeasured: ClassVar[Mapping[str, str]]
    uses_postgres: ClassVar[bool] = False
    uses_redis: ClassVar[bool] = True
    drain_limit: ClassVar[int] = 1_000_000
    sleep_slots: ClassVar[int] = 32

    @abstractmethod
    def workers(self, profile: str) -> list[list[str]]:
        """Return the commands that run the workers for a measure: two processes that run tasks, at most.

        profile: a measure's name. The first word is looked up in the environment's bin.
        """

    @abstractmethod
    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Whether its own books say that all tasks have ended and are acknowledged."""

    def environment(self, profile: str) -> dict[str, str]:
        """Return variables that it needs; profile "" is the producer's."""
        return {}

    def migrations(self) -> list[list[str]]:
        """Return the commands that make its tables."""
        return []

    def measures(self, name: str) -> bool:
        """Whether this measure makes sense for it."""
        return name not in self.unmeasured


NO_GATE = "has no queue limit of this kind"
NO_TRANSACTION = "its tasks take no part in a database transaction; compare with `enqueue`"
NO_BULK = "has no bulk call"
NO_ASYNC = "its workers run `def` only"
MIGRATE = [["python", "-m", "django", "migrate", "-v", "0"]]
