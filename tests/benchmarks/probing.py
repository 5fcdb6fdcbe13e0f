"""What the task bodies noted, read from the file that `inside/probe.py` maps; `inside/layout.py` has its layout."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from .inside.layout import (
    COMMANDS,
    COUNT,
    FIRST,
    LAST,
    ROUND_TRIPS,
    SIZE_BYTES,
    SLOT_WORDS,
    SLOTS_AT,
    TIMES_AT,
    TIMES_WORDS,
)


@dataclass(frozen=True, slots=True)
class Times:
    """When a task was enqueued (start of the call), began and finished: CLOCK_MONOTONIC in nanoseconds; 0: not yet."""

    enqueued_ns: int
    begun_ns: int
    ended_ns: int


class Probe:
    """Reader of the shared file; one for all measures, cleared between them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(SIZE_BYTES)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), SIZE_BYTES)
        self._words = memoryview(self._map).cast("q")

    def clear(self) -> None:
        """Clear the file; no other process may have it open."""
        self._map[:] = bytes(SIZE_BYTES)

    def _slots(self, field: int) -> list[int]:
        end = SLOTS_AT + self._words[0] * SLOT_WORDS
        return list(self._words[SLOTS_AT + field : end : SLOT_WORDS])

    @property
    def count(self) -> int:
        """The number of finished tasks."""
        return sum(self._slots(COUNT))

    @property
    def first_ns(self) -> int:
        """When the first body began; 0 when none has."""
        return min((at for at in self._slots(FIRST) if at), default=0)

    @property
    def last_ns(self) -> int:
        """When the last body finished so far."""
        return max(self._slots(LAST), default=0)

    @property
    def redis_commands(self) -> int:
        """Commands that redis-py sent from the processes of the peer, including its producer."""
        return sum(self._slots(COMMANDS))

    @property
    def round_trips(self) -> int:
        """The number of round trips of redis-py; a pipeline is one."""
        return sum(self._slots(ROUND_TRIPS))

    def times(self, number: int) -> Times:
        """Return the times of the task with this number."""
        at = TIMES_AT + number * TIMES_WORDS
        return Times(*self._words[at : at + 3])

    def close(self) -> None:
        """Close the file."""
        self._words.release()
        self._map.close()
        self._file.close()
