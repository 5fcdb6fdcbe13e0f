"""What each slot of a worker process runs, in memory it shares with its supervisor.

It outlives the process: after a `kill -9` the supervisor reads here what was running, and before that which run has
outlived its timeout, without a message for each task.
"""

from __future__ import annotations

import struct
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple
from uuid import UUID

# occupied, task id, hard deadline (CLOCK_MONOTONIC seconds, which all processes of a host share; 0: none)
ENTRY = struct.Struct("=B16sd")


class Running(NamedTuple):
    """One occupied slot. deadline: monotonic seconds at which the process is replaced, or 0."""

    id: str
    deadline: float


class SlotTable:
    """A fixed number of entries; each is written by one slot only, so no lock is needed."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.memory: Any = RawArray("c", ENTRY.size * slots)

    def enter(self, slot: int, id: UUID, deadline: float) -> None:
        """Write that a slot runs a task; `occupied` last, so that a reader never sees half an entry as whole."""
        start = slot * ENTRY.size
        ENTRY.pack_into(self.memory, start, 0, id.bytes, deadline)
        self.memory[start] = b"\1"

    def leave(self, slot: int) -> None:
        """Write that a slot is free."""
        self.memory[slot * ENTRY.size] = b"\0"

    def running(self) -> list[Running]:
        """Return the occupied slots."""
        found = []
        for slot in range(self.slots):
            start = slot * ENTRY.size
            occupied, id, deadline = ENTRY.unpack(self.memory[start : start + ENTRY.size])
            if occupied:
                found.append(Running(str(UUID(bytes=id)), deadline))
        return found
