"""The newest progress of running tasks: JSON in the hash of the task, behind the fence of the run that reported it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import scripts
from .access import Access
from .commands import send
from .entries import Lease, id_bytes

RUNS_PER_CALL = 100


class ProgressNotes(Access):
    """Write and read progress. Every method raises BrokerUnavailable when Redis is unreachable."""

    def write(self, queue: str, items: Sequence[tuple[Lease, bytes]]) -> int:
        """Note the progress of runs; return how many were noted: those that still hold their task."""
        keys = self.keys(queue)
        noted = 0
        for start in range(0, len(items), RUNS_PER_CALL):
            arguments: list[Any] = [keys.task_prefix]
            for lease, progress in items[start : start + RUNS_PER_CALL]:
                arguments += [id_bytes(lease.id), lease.fence, progress]
            noted += int(scripts.run("progress", self.client, [keys.pending], arguments))
        return noted

    def read(self, queue: str, id: str, fence: int, *, largest_bytes: int) -> bytes | None:
        """Return what the run with this fence has noted last; None when it has noted nothing, or too much."""
        found = send(self.client, "hget", self.keys(queue).task(id), "progress")
        written_by, _, progress = found.partition(b" ") if isinstance(found, bytes) else (b"", b"", b"")
        return progress if written_by == str(fence).encode() and len(progress) <= largest_bytes else None
