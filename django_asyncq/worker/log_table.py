"""The last lines that each slot's run has logged, in memory that a worker process shares with its supervisor.

After a `kill -9` the supervisor finds here what the runs had logged: it stores these lines, which their process cannot.
The memory is made only where tasks keep lines; each slot has a fixed part of it, whose oldest lines are overwritten.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from multiprocessing.sharedctypes import RawArray
from typing import Any
from uuid import UUID

from ..run_log import KeptLog, Line, clean

# Per slot, and for all slots of a process together.
SLOT_BYTES = 65_536
MOST_BYTES = 16_777_216
LEAST_BYTES = 2_048
# task id, fence of the run, its attempt, fence of the run whose lines are stored already
HEADER = struct.Struct("=16sQIQ")
FENCE = struct.Struct("=Q")
RECORDED_AT = HEADER.size - FENCE.size
# Each slot has two halves: one grows, and when it is full, the other one begins anew. Each begins with a number, which
# is higher in the newer one.
ORDER = struct.Struct("=I")
# Of a line: checksum and length of what follows; a process may die while it writes. A length of 0 ends a half.
FRAME = struct.Struct("=II")
# number, Unix seconds, level, length of the logger's name; then the name and the text
LINE = struct.Struct("=IdHH")
NOTHING = FRAME.pack(0, 0)


class LogTable:
    """One part for each slot. The run of a slot writes its part, under the lock of its `RunLog`; so no lock is here."""

    def __init__(self, slots: int) -> None:
        self.half_bytes = (max(min(SLOT_BYTES, MOST_BYTES // slots), LEAST_BYTES) - HEADER.size) // 2
        self.slot_bytes = HEADER.size + 2 * self.half_bytes
        self.memory: Any = RawArray("c", self.slot_bytes * slots)
        # Where each slot writes next: the number of its half, and the position within it.
        self._next = [(0, 0)] * slots

    def disconnect(self) -> None:
        """Go on with memory of this process alone. For a forked child, which must not write over its parent's lines."""
        self.memory = ctypes.create_string_buffer(len(self.memory))

    # --- called by the worker process

    def begin(self, slot: int, id: UUID, fence: int, attempt: int) -> None:
        """Begin with the lines of a run; those of the run before it are dropped."""
        start = slot * self.slot_bytes
        # First without a fence: a reader never takes the lines of one run for those of another.
        HEADER.pack_into(self.memory, start, b"", 0, 0, 0)
        for half in (1, 0):
            self._begin_half(slot, half, 1 - half)
        HEADER.pack_into(self.memory, start, id.bytes, fence, attempt, 0)

    def add(self, slot: int, line: Line) -> None:
        """Keep a line. One that is longer than the memory is cut."""
        logger, text = line.logger.encode(), line.text.encode()
        longest = self.half_bytes - ORDER.size - FRAME.size - LINE.size - len(NOTHING) - len(logger)
        body = LINE.pack(line.number, line.logged_at, line.level, len(logger)) + logger + text[: max(longest, 0)]
        half, at = self._next[slot]
        if at + FRAME.size + len(body) + len(NOTHING) > self.half_bytes:
            (order,) = ORDER.unpack_from(self.memory, self._half(slot, half))
            half, at = 1 - half, ORDER.size
            self._begin_half(slot, half, order + 1)
        place = self._half(slot, half) + at
        frame = FRAME.pack(zlib.crc32(body), len(body))
        # The frame last: until then the half ends before this line.
        self._write(place + FRAME.size, body + NOTHING)
        self._write(place, frame)
        self._next[slot] = (half, at + FRAME.size + len(body))

    def note_recorded(self, slot: int, fence: int) -> None:
        """Note that the lines of a run need not be stored any more; another thread may be writing those of the next."""
        FENCE.pack_into(self.memory, slot * self.slot_bytes + RECORDED_AT, fence)

    # --- called by the supervisor

    def runs(self) -> list[KeptLog]:
        """Return the lines that a dead process has left."""
        memory = bytes(self.memory.raw)
        found = []
        for start in range(0, len(memory), self.slot_bytes):
            id, fence, attempt, recorded = HEADER.unpack_from(memory, start)
            if not fence or fence == recorded:
                continue
            first = start + HEADER.size
            halves = [memory[at : at + self.half_bytes] for at in (first, first + self.half_bytes)]
            # One that has never been used has the number 0, and no lines.
            halves.sort(key=lambda half: int(ORDER.unpack_from(half)[0]))
            if lines := [line for half in halves for line in _lines_of(half)]:
                found.append(KeptLog(UUID(bytes=id), fence, attempt, lines))
        return found

    def _half(self, slot: int, half: int) -> int:
        return slot * self.slot_bytes + HEADER.size + half * self.half_bytes

    def _write(self, at: int, data: bytes) -> None:
        # Not the array itself, which would convert each byte.
        memoryview(self.memory).cast("B")[at : at + len(data)] = data

    def _begin_half(self, slot: int, half: int, order: int) -> None:
        """Begin a half anew."""
        start = self._half(slot, half)
        self._write(start + ORDER.size, NOTHING)
        ORDER.pack_into(self.memory, start, order)
        self._next[slot] = (half, ORDER.size)


def _lines_of(half: bytes) -> list[Line]:
    """Return the whole lines of a half, up to one that was not written to its end."""
    lines = []
    at = ORDER.size
    while at + FRAME.size <= len(half):
        checksum, size = FRAME.unpack_from(half, at)
        body = half[at + FRAME.size : at + FRAME.size + size]
        if size < LINE.size or len(body) < size or zlib.crc32(body) != checksum:
            break
        number, logged_at, level, length = LINE.unpack_from(body)
        logger, text = body[LINE.size : LINE.size + length], body[LINE.size + length :]
        lines.append(
            Line(number, logged_at, level, logger.decode(errors="replace"), clean(text.decode(errors="ignore")))
        )
        at += FRAME.size + size
    return lines
