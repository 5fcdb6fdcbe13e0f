"""Check the names that become part of Redis keys, read worker ids, and make task ids. Uses no store."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from datetime import datetime

from ..exceptions import InvalidOption

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GATE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")
TASK_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
# The id of a row as text. Redis may hold any other text as the id of a task.
ROW_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# The end of the id of a worker process that runs one task at a time, in quarantine.
ALONE = "-alone"

_lock = threading.Lock()
_last_instant = 0


def check_queue_name(name: object) -> None:
    """Refuse a queue name that would break keys. A brace would move the queue to another cluster slot.

    Raises: InvalidOption.
    """
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise InvalidOption(
            f"queue name {name!r} is not valid: use 1 to 64 letters, digits, '_', '.' and '-' (no spaces or braces)"
        )


def check_gate_name(name: object) -> None:
    """Refuse a gate name that would break keys.

    Raises: InvalidOption.
    """
    if not isinstance(name, str) or not GATE_NAME.fullmatch(name):
        raise InvalidOption(
            f"gate name {name!r} is not valid: use 1 to 200 letters, digits, '_', '.', ':', '/' and '-' "
            f"(no spaces or braces)"
        )


def runs_alone(worker_id: str) -> bool:
    """Return whether a worker of this id runs one task at a time, in quarantine."""
    return worker_id.endswith(ALONE)


def uuid7() -> uuid.UUID:
    """Return a new UUIDv7, within a process always greater than the previous one.

    48 bits of Unix milliseconds, 12 bits of the fraction of the millisecond, 62 random bits.
    Source: RFC 9562, section 5.7 and method 3 of section 6.2.
    """
    global _last_instant
    nanoseconds = time.time_ns()
    instant = (nanoseconds // 1_000_000) << 12 | (nanoseconds % 1_000_000) * 4096 // 1_000_000
    with _lock:
        # Two ids within a quarter of a microsecond, or after the clock was set back, would not rise.
        instant = _last_instant = max(instant, _last_instant + 1)
    random_bits = int.from_bytes(os.urandom(8)) & (1 << 62) - 1
    value = (instant >> 12) << 80 | 0x7 << 76 | (instant & 0xFFF) << 64 | 0b10 << 62 | random_bits
    return uuid.UUID(int=value)


def lowest_uuid7_at(moment: datetime) -> uuid.UUID:
    """Return the lowest UUIDv7 of a millisecond; of times that none can name, of the nearest one."""
    milliseconds = min(max(int(moment.timestamp() * 1000), 0), 2**48 - 1)
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | 0b10 << 62)
