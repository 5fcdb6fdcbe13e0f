"""Read the replies of Redis: any program may have written what they hold, so nothing here raises an error.

Every value that was stored in Redis is decoded here, not where it is used. Each function answers None to what it cannot
read, and the caller then goes on as if it were not there. The scripts do the same for what they read themselves
(`lua/values.lua`), and set keys of a wrong type aside (`lua/prelude.lua`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .entries import Expired, Extended, HeldMessage, Lease, id_text

# As in `lua/values.lua`. Redis itself has 64 bits.
LARGEST_FENCE = 9 * 10**15
LARGEST_WHOLE = 2**63 - 1
WHOLE = re.compile(rb"-?[0-9]{1,19}")


def text(reply: Any) -> str:
    """Return a reply as text; bytes that are not UTF-8 survive the way back through `id_bytes`."""
    return id_text(reply) if isinstance(reply, bytes) else str(reply)


def texts(replies: Iterable[Any]) -> list[str]:
    """Return replies as texts."""
    return [text(reply) for reply in replies]


def whole(reply: Any, smallest: int = -LARGEST_WHOLE, largest: int = LARGEST_WHOLE) -> int | None:
    """Return a whole number between two bounds, or None."""
    if isinstance(reply, bytes) and WHOLE.fullmatch(reply):
        reply = int(reply)
    return reply if type(reply) is int and smallest <= reply <= largest else None


def count(reply: Any) -> int:
    """Return how many there were; 0 when the reply is no number."""
    return whole(reply, 0) or 0


def number(reply: Any) -> float | None:
    """Return a finite number, or None."""
    try:
        found = float(reply)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def leases(flat: Sequence[Any]) -> list[Lease]:
    """Return the leases in a flat list of ids and fences; skip those with a fence that was not made here."""
    pairs = zip(flat[::2], flat[1::2], strict=False)
    found = [(id, whole(fence, 0, LARGEST_FENCE)) for id, fence in pairs]
    return [Lease(text(id), fence) for id, fence in found if fence is not None]


def expired(flat: Sequence[Any]) -> list[Expired]:
    """Return the expired leases in a flat list of ids, fences and workers; skip those with an unreadable fence."""
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=False)
    found = [(id, whole(fence, 0, LARGEST_FENCE), worker) for id, fence, worker in triples]
    return [Expired(text(id), fence, text(worker)) for id, fence, worker in found if fence is not None]


def extended(reply: Sequence[Any]) -> Extended:
    """Return what one worker's part of the reply of `extend.lua` says."""
    kept, lost, cancelled, flat = reply
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=False)
    messages = tuple(HeldMessage(text(row), text(id), message) for row, id, message in triples)
    return Extended(count(kept), texts(lost), texts(cancelled), messages)
