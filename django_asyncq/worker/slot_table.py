"""The slot table: what each slot of a worker process runs, in memory that it shares with its supervisor.

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

# --- What a worker process notes of its own progress, in memory that it shares with its supervisor.
#
# A process that hangs cannot say so. Its supervisor reads here that nothing has moved for too long.

LOOKED_AT, BEAT_AT, LOOP_STUCK_SINCE, TAKES_NONE, FINISHED = range(5)


class Pulse:
    """Three monotonic times, which all processes of a host share, a flag, a number. One thread writes each, unlocked.

    looked_at: when the main thread last asked its queues, or had a reason not to, or became ready; 0 before.
    beat_at: when the heartbeat thread last ran. Any thread can run, unless one holds the interpreter.
    loop_stuck_since: since when `async def` tasks wait for an event loop that does not answer; 0 if none do.
    takes_none: whether the main thread has obeyed a request to take no more tasks. finished: how many runs have
    finished, as of beat_at.
    """

    def __init__(self) -> None:
        self.memory: Any = RawArray("d", 5)

    # --- called by the worker process

    def note_look(self) -> None:
        """Note that the queues were asked, or that there is a reason not to."""
        self.memory[LOOKED_AT] = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Note that the queues will not be asked for some seconds, because the process drains."""
        self.memory[LOOKED_AT] = time.monotonic() + seconds

    def note_takes_none(self, *, takes_none: bool) -> None:
        """Note that the main thread takes no more tasks, or takes tasks again."""
        self.memory[TAKES_NONE] = takes_none

    def note_beat(self, now: float, loop_stuck_since: float, finished: int) -> None:
        """Note that the heartbeat thread runs, what it knows of the event loop, and how many runs have finished."""
        self.memory[FINISHED] = finished
        self.memory[LOOP_STUCK_SINCE] = loop_stuck_since
        self.memory[BEAT_AT] = now

    # --- called by the supervisor

    @property
    def looked_at(self) -> float:
        """See the class."""
        return float(self.memory[LOOKED_AT])

    @property
    def beat_at(self) -> float:
        """See the class."""
        return float(self.memory[BEAT_AT])

    @property
    def loop_stuck_since(self) -> float:
        """See the class."""
        return float(self.memory[LOOP_STUCK_SINCE])

    @property
    def finished(self) -> int:
        """See the class."""
        return int(self.memory[FINISHED])

    @property
    def takes_none(self) -> bool:
        """See the class."""
        return bool(self.memory[TAKES_NONE])


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

    pulse: what the process notes of its progress beside them.
    """

    def __init__(self, slots: int) -> None:
        self.memory: Any = RawArray("c", SLOT.size * slots)
        self.pulse = Pulse()
        # For those that write; each process has its own.
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[Any, Pulse]:
        """Return what goes to another process, which shares it."""
        return self.memory, self.pulse

    def __setstate__(self, state: tuple[Any, Pulse]) -> None:
        """Use what another process shares."""
        self.memory, self.pulse = state
        self._lock = threading.Lock()

    def disconnect(self) -> None:
        """Go on with memory of this process alone. For a forked child, which must not write over its parent's runs."""
        self.memory = ctypes.create_string_buffer(len(self.memory))
        self._lock = threading.Lock()

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
