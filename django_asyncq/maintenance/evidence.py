"""Find what other programs have done to our tasks: each round among what is new in two zsets, the sweep by rows.

A Go server or asynq's tools leave a task in `completed`, `archived` or `retry`. `lifecycle.evidence` decides whether
that is their doing, and writes it into the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple
from uuid import UUID

from .. import conf, lifecycle
from ..broker import Broker, redis_clock
from ..broker.evidence import changed_retries, new_members
from ..broker.many_queues import queues_with
from ..faults import Parts
from ..models import TaskRecord
from ..storage.isolation import each_alone
from ..storage.routing import writing_database

PLACES: tuple[Literal["completed", "archived"], ...] = ("completed", "archived")
ROWS_PER_CALL = 200


class RowAndEntry(NamedTuple):
    """A row, and the state of its entry in Redis."""

    row: TaskRecord
    entry_state: str


class EvidenceRepairs:
    """Settle rows by their entries."""

    def __init__(self, broker: Broker, parts: Parts) -> None:
        self.broker = broker
        self._parts = parts
        # (prefix, queue, zset) → Unix seconds until which its members have been looked at.
        self._since: dict[tuple[str, str, str], int] = {}

    def tick(self, brokers: Iterable[Broker]) -> int:
        """Settle what has come into `completed` and `archived` since the last call; return how many rows changed.

        brokers: one for each prefix. Tasks of older calls are found by the sweep.
        """
        settled = 0
        for broker in brokers:
            for queue in queues_with(broker, broker.known_queues(), *PLACES, "retry"):
                what = f"settling of what other programs did in queue {broker.name_of(queue)}"
                settled += self._parts.attempt(what, partial(self._settle_queue, broker, queue), 0)
        return settled

    def _settle_queue(self, broker: Broker, queue: str) -> int:
        settled = 0
        for place in PLACES:
            key = (broker.prefix, queue, place)
            since = self._since.get(key)
            if since is None:
                since = int(redis_clock.seconds() - conf.current().sweep_seconds)
            ids, next_since = new_members(broker, queue, place, since)
            if ids:
                rows = lifecycle.rows_of_entries(broker, queue, ids).values()
                # Our own reporter archives what has failed for good.
                settled += len(self._settle([row for row in rows if place == "completed" or not row.is_final]))
            # After the work: what failed is looked at again.
            self._since[key] = next_since
        if ids := changed_retries(broker, queue):
            settled += len(self._settle(list(lifecycle.rows_of_entries(broker, queue, ids).values())))
        return settled

    def unsettled(self, page: Sequence[RowAndEntry]) -> list[RowAndEntry]:
        """Settle the rows of a page whose entries are not where we would have left them; return the others."""
        odd = [found.row for found in page if found.entry_state]
        settled = self._settle(odd)
        return [found for found in page if found.row.id not in settled]

    def _settle(self, rows: Sequence[TaskRecord]) -> set[UUID]:
        # Those that only another program runs are followed by `remote`, until they are final.
        own = [row for row in rows if not row.is_remote or row.is_final]
        if not own:
            return set()

        def settle(part: Sequence[TaskRecord]) -> list[UUID]:
            return list(lifecycle.settle_evidence(self.broker, part))

        database = writing_database(TaskRecord)
        settled = set[UUID]()
        for start in range(0, len(own), ROWS_PER_CALL):
            part = own[start : start + ROWS_PER_CALL]
            settled |= set(each_alone("settling of tasks", part, settle, key=lambda row: row.id, database=database))
        return settled
