"""The values that the broker takes and returns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class GateKeys(NamedTuple):
    """Name the keys of a gate, and the limit and run time to use when its meta hash has none. limit: None for none."""

    members: str
    meta: str
    limit: int | None
    expected_seconds: float


class Entry(NamedTuple):
    """Describe a task to put into a queue.

    message: an encoded TaskMessage. fence: the lowest fence it may have, 0 for a new task. due_at: Unix seconds, with
    fractions, for a delayed task. unique_key: full name of the lock, "" for none; unique_seconds: its TTL, at least 1.
    gate: the gate whose slot the push confirms. row: id of the row, "" where it is that of the entry: only an entry
    whose id another program chose names its row. fair: "<step> <key>" of a task with a fair key, see `core.fairness`.
    """

    id: str
    message: bytes
    fence: int = 0
    priority: int = 0
    due_at: float | None = None
    unique_key: str = ""
    unique_seconds: int = 0
    gate: GateKeys | None = None
    row: str = ""
    fair: str = ""


class Lease(NamedTuple):
    """Identify a run in Redis: the task's id, and the fence that every later write must name."""

    id: str
    fence: int


class Dequeued(NamedTuple):
    """Hold the result of a dequeue, the next task to run first.

    paused: the queue gives out no task for now: it is paused, or what waits is left to others for some seconds.
    is_drained: no task was left.
    """

    leases: list[Lease]
    paused: bool
    is_drained: bool


class Forwarded(NamedTuple):
    """Hold the result of forwarding due tasks. own: due ids in retry that were not moved; their row must change first.

    next_seconds: until the nearest task that is left, except `own`, is due, by the server's clock; None when there is
    none, negative when more tasks than the limit are due.
    """

    moved: int
    own: list[str]
    next_seconds: float | None


class HeldMessage(NamedTuple):
    """Hold the message of a task that a worker runs, only its beginning when it is long. row_id: of its row."""

    row_id: str
    id: str
    message: bytes


class Extended(NamedTuple):
    """Hold the result of renewing leases. lost: ids that the worker no longer holds. cancelled: ids whose task was.

    messages: those that were asked for.
    """

    kept: int
    lost: list[str]
    cancelled: list[str]
    messages: tuple[HeldMessage, ...] = ()


class Reachability(NamedTuple):
    """Say how long Redis has remembered and has been reachable.

    alive_since: Unix seconds since which it remembers everything, None when it has lost its memory.
    reachable_seconds: since the last outage, of any length; very long when there was none.
    """

    alive_since: int | None
    reachable_seconds: float


class Expired(NamedTuple):
    """Describe an expired lease. worker: id of the worker process that held it."""

    id: str
    fence: int
    worker: str


def id_bytes(id: str) -> bytes:
    """Return an id as Redis stores it, also one that a foreign producer wrote in broken UTF-8."""
    return id.encode("utf-8", "surrogateescape")


def id_text(id: bytes) -> str:
    """Return an id from Redis as text; bytes that are not UTF-8 survive the way back through `id_bytes`."""
    return id.decode("utf-8", "surrogateescape")


def due_of(due_at: float | None) -> tuple[int, int]:
    """Return the due time in whole seconds, as asynq writes it, and in ms; 0 ms when it is a whole second.

    Both are rounded up: a task must never start before its time.
    """
    whole = math.ceil(due_at or 0)
    return whole, 0 if due_at is None or due_at == whole else math.ceil(due_at * 1000)


def arguments_of(entry: Entry) -> list[Any]:
    """Return what the scripts that add tasks get for each: id, message, fence, priority, lock key, its seconds, row."""
    lock = id_bytes(entry.unique_key)
    # SET … EX 0 is an error, and would stop the script between two tasks.
    seconds = max(entry.unique_seconds, 1)
    line = entry.priority if not entry.fair else line_of(entry)
    return [id_bytes(entry.id), entry.message, entry.fence, line, lock, seconds, entry.row]


def line_of(entry: Entry) -> str:
    """Return the priority, and the fair key if there is one, as `lua/lines.lua` reads them."""
    return f"{entry.priority} {entry.fair}" if entry.fair else str(entry.priority)


def lease_arguments(lease: Lease) -> list[Any]:
    """Return what the scripts that finish runs get first for each: id, fence."""
    return [id_bytes(lease.id), lease.fence]


# --- Read the replies of Redis: any program may have written what they hold, so nothing here raises an error.
#
# Every value that was stored in Redis is decoded here, not where it is used. Each function answers None to what it
# cannot read, and the caller then goes on as if it were not there. The scripts do the same for what they read
# themselves (`lua/values.lua`), and set keys of a wrong type aside (`lua/prelude.lua`).

# As in `lua/values.lua`. Redis itself has 64 bits.
LARGEST_FENCE = 9 * 10**15
LARGEST_WHOLE = 2**63 - 1
WHOLE = re.compile(rb"-?[0-9]{1,19}")


def text(reply: Any) -> str:
    """Return a reply as text; bytes that are not UTF-8 survive the way back through `id_bytes`."""
    return id_text(reply) if isinstance(reply, bytes) else str(reply)


def texts(replies: Iterable[Any]) -> list[str]:
    """Return replies as texts."""
    return [reply.decode("utf-8", "surrogateescape") if type(reply) is bytes else text(reply) for reply in replies]


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
    fences = [
        fence if type(fence) is int and 0 <= fence <= LARGEST_FENCE else whole(fence, 0, LARGEST_FENCE)
        for fence in flat[1::2]
    ]
    pairs = zip(texts(flat[::2]), fences, strict=False)
    return [Lease(id, fence) for id, fence in pairs if fence is not None]


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
