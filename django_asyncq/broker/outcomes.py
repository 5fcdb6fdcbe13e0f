"""Outcomes that workers spilled to Redis: bytes in the hash of their task. Only `lifecycle` knows what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import replies, scripts
from .access import Access
from .entries import Lease, id_bytes

# An outcome may have a megabyte. Reading them is not limited like this: hardly any task has one.
WRITTEN_PER_CALL = 20
IDS_PER_CALL = 200


class SpilledOutcome(NamedTuple):
    """What the hash of a task holds. waited_fence: the run whose outcome the task has waited for; 0 for none."""

    outcome: bytes
    waited_fence: int


class SpilledOutcomes(Access):
    """Read and write spilled outcomes. Every method raises BrokerUnavailable when Redis is unreachable."""

    def write(self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
        """Store the outcomes of runs with their tasks, for another process to record, and expire their leases.

        items: (lease, outcome). Returns, for each: "spilled", "stale" or "missing".
        """
        keys = self.keys(queue)
        words: list[str] = []
        for start in range(0, len(items), WRITTEN_PER_CALL):
            arguments: list[Any] = [keys.task_prefix]
            for lease, outcome in items[start : start + WRITTEN_PER_CALL]:
                arguments += [id_bytes(lease.id), lease.fence, outcome]
            found = scripts.run("spill_outcomes", self.client, [keys.lease, keys.held(worker_id)], arguments)
            words += replies.texts(found)
        return words

    def read(self, queue: str, ids: Sequence[str], *, largest_bytes: int) -> dict[str, SpilledOutcome]:
        """Return the outcomes that are stored with these tasks, by id; skip those above `largest_bytes`."""
        keys = self.keys(queue)
        found: dict[str, SpilledOutcome] = {}
        for start in range(0, len(ids), IDS_PER_CALL):
            arguments = [keys.task_prefix, largest_bytes, *map(id_bytes, ids[start : start + IDS_PER_CALL])]
            flat = scripts.run("spilled_outcomes", self.client, [keys.pending], arguments)
            for id, outcome, waited in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                found[replies.text(id)] = SpilledOutcome(outcome, replies.whole(waited, 0) or 0)
        return found

    def mark_waited(self, queue: str, fences: dict[str, int]) -> None:
        """Note that tasks have waited for a process that can verify their outcome. fences: of the outcomes, by id."""
        keys = self.keys(queue)
        arguments: list[Any] = [keys.task_prefix]
        for id, fence in fences.items():
            arguments += [id_bytes(id), fence]
        scripts.run("mark_outcomes_waited", self.client, [keys.pending], arguments)
