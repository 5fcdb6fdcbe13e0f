"""What each slot of a worker process runs, in memory that it shares with its supervisor.

The memory outlives the process: after a `kill -9` the supervisor reads here what was running. Before that it sees which
run has outlived its timeout, without a message for each task.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple
from uuid import UUID

from .pulse import Pulse

# occupied, task id, hard deadline (CLOCK_MONOTONIC seconds, which all processes of a host share; 0: none), thread
SLOT = struct.Struct("=B16sdQ")


class Running(NamedTuple):
    """One occupied slot. deadline: monotonic seconds at which the process is replaced, or 0.

    thread: identifier of the thread that began the task, as a crash stack names it.
    """

    id: str
    deadline: float
    thread: int = 0


class SlotTable:
    """A fixed number of slots; only the slot itself writes its part, so no lock is needed.

    pulse: what the process notes of its progress beside them.
    """

    def __init__(self, slots: int) -> None:
        self.memory: Any = RawArray("c", SLOT.size * slots)
        self.pulse = Pulse()

    def disconnect(self) -> None:
        """Go on with memory of this process alone. For a forked child, which must not write over its parent's runs."""
        self.memory = ctypes.create_string_buffer(len(self.memory))

    def enter(self, slot: int, id: UUID, deadline: float) -> None:
        """Write that a slot runs a task in this thread.

        `occupied` is written last, so a reader never takes half of it for whole.
        """
        start = slot * SLOT.size
        SLOT.pack_into(self.memory, start, 0, id.bytes, deadline, threading.get_ident())
        self.memory[start] = b"\1"

    def leave(self, slot: int) -> None:
        """Write that a slot is free."""
        self.memory[slot * SLOT.size] = b"\0"

    def running(self) -> list[Running]:
        """Return the occupied slots."""
        slots = SLOT.iter_unpack(self.memory.raw)
        return [Running(str(UUID(bytes=id)), deadline, thread) for occupied, id, deadline, thread in slots if occupied]
