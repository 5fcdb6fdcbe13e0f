"""A lock that this process holds, and until when it may trust it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .lock_files import LockFile

# How much earlier than its TTL a lock is no longer trusted: room for a slow reply and a coarse clock.
MARGIN_SHARE = 0.1

_serials = itertools.count()


def trust_clock() -> float:
    """Return monotonic seconds that also pass while the machine is suspended, where the system has such."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


@dataclass(frozen=True, slots=True)
class Hold:
    """One hold of a lock, from taking it to losing it.

    value: what stands in Redis, "" for a file lock. trusted_until, renew_at: seconds of the clock; no end for a file
    lock. term: None until somebody asks for it. serial: tells a hold from the next one of the same lock.
    """

    file: LockFile | None
    value: str = ""
    ttl_seconds: float = math.inf
    trusted_until: float = math.inf
    renew_at: float = math.inf
    term: int | None = None
    serial: int = field(default_factory=_serials.__next__)

    def since(self, before: float, ttl: float) -> Hold:
        """Return the same hold, confirmed by Redis, which was asked at `before`."""
        trusted_until = before + ttl * (1 - MARGIN_SHARE)
        return replace(self, ttl_seconds=ttl, trusted_until=trusted_until, renew_at=before + ttl / 3)


def key_of(name: str) -> str:
    """Return the key of a lock in Redis."""
    return f"task_lock:{name}"


def text_of(reply: Any) -> str:
    """Read a reply of a client with or without `decode_responses`."""
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


# Holds whose coordinator is gone though its process lives, with its clock.
_orphans: list[tuple[Callable[[], float], Hold]] = []


def orphan(holds: Mapping[str, Hold], clock: Callable[[], float]) -> None:
    """Keep the files of a coordinator that was dropped without a release: its locks last until their time."""
    _orphans.extend((clock, hold) for hold in holds.values() if hold.file is not None)


def let_go_of_orphans() -> None:
    """Unlock the files of those whose time is over; nobody else would."""
    for entry in list(_orphans):
        clock, hold = entry
        if hold.file is not None and clock() >= hold.trusted_until:
            hold.file.unlock()
            with suppress(ValueError):  # Another thread was quicker.
                _orphans.remove(entry)
