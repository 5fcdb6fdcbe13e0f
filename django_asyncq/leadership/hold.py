"""One hold of a lock by this process, and until when the process may trust it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .. import conf
from ..broker import clients
from .lock_files import LockFile

# The last tenth of the TTL is not trusted: a margin for a slow reply and a coarse clock.
MARGIN_SHARE = 0.1

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class Hold:
    """Describe one hold of a lock, from acquiring it to releasing or losing it.

    value: the value in Redis, "" for a file lock. trusted_until, renew_at: seconds of the clock, infinite for a file
    lock. term: None until it is first asked for. serial: distinguishes this hold from the next one of the same lock.
    """

    file: LockFile | None
    value: str = ""
    ttl_seconds: float = math.inf
    trusted_until: float = math.inf
    renew_at: float = math.inf
    term: int | None = None
    serial: int = field(default_factory=_serials.__next__)

    def renewed(self, before: float, ttl: float) -> Hold:
        """Return this hold as Redis has confirmed it. before: clock time before the call."""
        trusted_until = before + ttl * (1 - MARGIN_SHARE)
        return replace(self, ttl_seconds=ttl, trusted_until=trusted_until, renew_at=before + ttl / 3)


def key_of(name: str) -> str:
    """Return the key of a lock in Redis."""
    return f"{conf.current().lock_prefix}{name}"


def environment_scope() -> str:
    """Return what tells apart the environments that share a lock folder: their Redis, and their prefix in it.

    Of the settings, also for a coordinator with a client of its own: in doubt, two exclude each other.
    """
    return f"{clients.server_identity()} {conf.current().key_prefix}"


def text_of(reply: Any) -> str:
    """Return a reply as text, from a client with or without `decode_responses`."""
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


# Holds of garbage-collected coordinators, with their clocks.
_orphans: list[tuple[Callable[[], float], Hold]] = []


def keep_orphans(holds: Mapping[str, Hold], clock: Callable[[], float]) -> None:
    """Keep the files of a garbage-collected coordinator, so that its locks last until they expire."""
    _orphans.extend((clock, hold) for hold in holds.values() if hold.file is not None)


def unlock_orphans() -> None:
    """Unlock the files of garbage-collected coordinators whose locks have expired."""
    for entry in list(_orphans):
        clock, hold = entry
        if hold.file is not None and clock() >= hold.trusted_until:
            hold.file.unlock()
            with suppress(ValueError):  # Another thread has removed it.
                _orphans.remove(entry)
