"""What a worker process notes of its own progress, in memory that it shares with its supervisor.

A process that hangs cannot say so. Its supervisor reads here that nothing has moved for too long.
"""

from __future__ import annotations

import time
from multiprocessing.sharedctypes import RawArray
from typing import Any

LOOKED_AT, BEAT_AT, LOOP_STUCK_SINCE = range(3)


class Pulse:
    """Three monotonic times, which all processes of a host share. One thread writes each, so no lock is needed.

    looked_at: when the main thread last asked its queues, or had a reason not to, or became ready; 0 before.
    beat_at: when the heartbeat thread last ran. Any thread can run, unless one holds the interpreter.
    loop_stuck_since: since when `async def` tasks wait for an event loop that does not answer; 0 if none do.
    """

    def __init__(self) -> None:
        self.memory: Any = RawArray("d", 3)

    # --- called by the worker process

    def note_look(self) -> None:
        """Note that the queues were asked, or that there is a reason not to."""
        self.memory[LOOKED_AT] = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Note that the queues will not be asked for some seconds, because the process drains."""
        self.memory[LOOKED_AT] = time.monotonic() + seconds

    def note_beat(self, now: float, loop_stuck_since: float) -> None:
        """Note that the heartbeat thread runs, and what it knows of the event loop."""
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
