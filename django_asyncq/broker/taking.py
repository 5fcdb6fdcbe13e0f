"""What `dequeue.lua` is told, and what its answer means: for a worker that asks, and for one that stands by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .entries import Dequeued, Lease, id_text
from .keys import keys_of, standby_key


class Call(NamedTuple):
    """The keys and the arguments of a call of `dequeue.lua`."""

    keys: list[str]
    arguments: list[Any]


def asking(queue: str, worker_id: str, count: int, lease_seconds: int, *, reaches_standby: bool) -> Call:
    """Return the call of a worker that takes tasks. reaches_standby: not in a cluster, where it is apart."""
    keys = keys_of(queue)
    places = [keys.pending, keys.priority, keys.active, keys.lease, keys.paused, keys.held(worker_id)]
    if reaches_standby:
        places.append(standby_key(worker_id))
    return Call(places, [keys.task_prefix, count, lease_seconds, worker_id, ""])


def standing_by(queue: str, worker_id: str, lease_seconds: int) -> Call:
    """Return the call by which one task is handed to a worker, right behind the `BLMOVE` that has moved it."""
    places, arguments = asking(queue, worker_id, 1, lease_seconds, reaches_standby=True)
    return Call([*places, keys_of(queue).handed(worker_id)], [*arguments[:-1], queue])


def taken(reply: Sequence[Any], count: int) -> Dequeued:
    """Return what a worker was given that asked for `count`."""
    word, *found = reply
    leases = leases_of(found)
    return Dequeued(leases, paused=word == b"paused", is_drained=word == b"taken" and len(leases) < count)


def handed(reply: Sequence[Any]) -> Dequeued | None:
    """Return what a worker was handed that stood by, or None when it stood by no longer."""
    word, *found = reply
    if word == b"withdrawn":
        return None
    return Dequeued(leases_of(found), paused=word == b"paused", is_drained=word == b"taken")


def leases_of(flat: Sequence[Any]) -> list[Lease]:
    """Return the leases of a script's flat list of ids and fences."""
    return [Lease(id_text(id), int(fence)) for id, fence in zip(flat[::2], flat[1::2], strict=True)]
