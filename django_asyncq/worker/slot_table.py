"""What each slot of a worker process runs, in memory that it shares with its supervisor.

The memory outlives the process: after a `kill -9` the supervisor reads here what was running. Before that it sees which
run has outlived its timeout, without a message for each task.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple
from uuid import UUID

from .log_table import LogTable
from .pulse import Pulse

# Hard deadline (CLOCK_MONOTONIC seconds, which all processes of a host share; 0: none), thread, task id, when the run
# began (the same clock), occupied, cancelled. Both times lie at multiples of eight bytes, so a reader never sees half.
SLOT = struct.Struct("=dQ16sdBB6x")
DEADLINE = struct.Struct("=d")
OCCUPIED, CANCELLED = 40, 41


class Running(NamedTuple):
    """One occupied slot. deadline: monotonic seconds at which the process is replaced, or 0.

    thread: identifier of the thread that began the task, as a crash stack names it. is_cancelled: whether its task was
    cancelled, and the run is asked to stop. began_at: monotonic seconds.
    """

    id: str
    deadline: float
    thread: int = 0
    is_cancelled: bool = False
    began_at: float = 0.0


class SlotTable:
    """A fixed number of slots. The slot writes its own part, and so does the thread that cancels its run.

    pulse: what the process notes of its progress beside them. logs: the last lines that the slots' runs have logged;
    None where no task keeps any.
    """

    def __init__(self, slots: int, *, keeps_logs: bool = False) -> None:
        self.memory: Any = RawArray("c", SLOT.size * slots)
        self.pulse = Pulse()
        self.logs = LogTable(slots) if keeps_logs else None
        # For those that write; each process has its own.
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[Any, Pulse, LogTable | None]:
        """Return what goes to another process, which shares it."""
        return self.memory, self.pulse, self.logs

    def __setstate__(self, state: tuple[Any, Pulse, LogTable | None]) -> None:
        """Use what another process shares."""
        self.memory, self.pulse, self.logs = state
        self._lock = threading.Lock()

    def disconnect(self) -> None:
        """Go on with memory of this process alone. For a forked child, which must not write over its parent's runs."""
        self.memory = ctypes.create_string_buffer(len(self.memory))
        self._lock = threading.Lock()
        if self.logs is not None:
            self.logs.disconnect()

    def enter(self, slot: int, id: UUID, deadline: float) -> None:
        """Write that a slot runs a task in this thread.

        `occupied` is written last, so a reader never takes half of it for whole.
        """
        start = slot * SLOT.size
        with self._lock:
            SLOT.pack_into(self.memory, start, deadline, threading.get_ident(), id.bytes, time.monotonic(), 0, 0)
            self.memory[start + OCCUPIED] = b"\1"

    def leave(self, slot: int) -> None:
        """Write that a slot is free."""
        with self._lock:
            self.memory[slot * SLOT.size + OCCUPIED] = b"\0"

    def cancel(self, slot: int, id: UUID, deadline: float) -> None:
        """Write that the run of a slot is to stop by a deadline, if none comes first; unless the slot has left it."""
        start = slot * SLOT.size
        with self._lock:
            own, _, found, _, occupied, _ = SLOT.unpack_from(self.memory, start)
            if not occupied or found != id.bytes:
                return
            self.memory[start + CANCELLED] = b"\1"
            # Last: whoever finds the deadline passed finds the reason too.
            DEADLINE.pack_into(self.memory, start, min(own, deadline) if own else deadline)

    def running(self) -> list[Running]:
        """Return the occupied slots."""
        slots = SLOT.iter_unpack(self.memory.raw)
        return [
            Running(str(UUID(bytes=id)), deadline, thread, bool(is_cancelled), began_at)
            for deadline, thread, id, began_at, occupied, is_cancelled in slots
            if occupied
        ]
