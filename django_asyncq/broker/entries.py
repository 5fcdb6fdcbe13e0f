"""The values that go into the broker and come out of it."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A task to be queued. fence: 0 for a new one. due_at: Unix seconds, for what waits for its time."""

    id: str
    message: bytes
    fence: int = 0
    priority: int = 0
    due_at: int | None = None
    unique_key: str = ""
    unique_seconds: int = 0


class Lease(NamedTuple):
    """What a run has in its hand: the task's id, and the fence that every later write must name."""

    id: str
    fence: int


class Dequeued(NamedTuple):
    """What a dequeue brought. paused: nothing comes until the queue is resumed."""

    leases: list[Lease]
    paused: bool


class Forwarded(NamedTuple):
    """What a look at due tasks did. own: ids in retry whose row must change first. next_due: Unix seconds."""

    moved: int
    own: list[str]
    next_due: int | None


class Extended(NamedTuple):
    """What a renewal did. lost: ids the worker held no longer."""

    kept: int
    lost: list[str]


class Expired(NamedTuple):
    """A lease that has run out, and whose it was."""

    id: str
    fence: int
    worker: str
