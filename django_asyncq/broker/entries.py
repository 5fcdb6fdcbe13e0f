"""The values that go into the broker and come out of it."""

from __future__ import annotations

from typing import NamedTuple


class GateKeys(NamedTuple):
    """Where a gate's slots are, and what holds where its meta hash says nothing. limit: None for none."""

    members: str
    meta: str
    limit: int | None
    expected_seconds: float


class Entry(NamedTuple):
    """A task to be queued.

    message: an encoded TaskMessage. fence: the lowest it may have, 0 for a new one. due_at: Unix
    seconds, also between two, for what waits for its time. unique_key: full name of the lock,
    "" for none; unique_seconds: how long it lasts, at least 1. gate: where its slot is to be made lasting.
    """

    id: str
    message: bytes
    fence: int = 0
    priority: int = 0
    due_at: float | None = None
    unique_key: str = ""
    unique_seconds: int = 0
    gate: GateKeys | None = None


class Lease(NamedTuple):
    """What a run has in its hand: the task's id, and the fence that every later write must name."""

    id: str
    fence: int


class Dequeued(NamedTuple):
    """What a dequeue brought, the next to run first.

    paused: nothing comes until the queue is resumed. is_drained: nothing was left.
    """

    leases: list[Lease]
    paused: bool
    is_drained: bool


class Forwarded(NamedTuple):
    """What a look at due tasks did. own: ids in retry whose row must change first; they are still there.

    next_seconds: until the nearest of what is left without `own`, by the server's clock; negative when the
    limit cut the look short.
    """

    moved: int
    own: list[str]
    next_seconds: float | None


class Extended(NamedTuple):
    """What a renewal did. lost: ids the worker held no longer."""

    kept: int
    lost: list[str]


class Pulse(NamedTuple):
    """What a pulse told. alive_since: Unix seconds, None when Redis has lost its memory.

    in_reach_seconds: since the end of the last outage, of whatever length; very long when there was none.
    """

    alive_since: int | None
    in_reach_seconds: float


class Expired(NamedTuple):
    """A lease that has run out, and whose it was."""

    id: str
    fence: int
    worker: str


def id_bytes(id: str) -> bytes:
    """Return an id as Redis has it, also one that a foreign producer wrote in broken UTF-8."""
    return id.encode("utf-8", "surrogateescape")


def id_text(id: bytes) -> str:
    """Return an id that came from Redis; what is not UTF-8 survives the way back through `id_bytes`."""
    return id.decode("utf-8", "surrogateescape")
