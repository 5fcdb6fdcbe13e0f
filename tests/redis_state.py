"""What many tests read from Redis."""

from __future__ import annotations

from collections.abc import Iterable

from django_asyncq.broker import Broker
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.task_entries import SpilledOutcomes
from django_asyncq.lifecycle import spill

from . import acl


def pending(queue: str = "default") -> list[str]:
    """The ids in pending, the next to run first."""
    return [id.decode() for id in acl.unrestricted(Broker().client).lrange(QueueKeys(queue).pending, 0, -1)][::-1]


def scheduled(queue: str = "default") -> dict[str, float]:
    """The delayed tasks: id → the Unix second at which each is due."""
    found = acl.unrestricted(Broker().client).zrange(QueueKeys(queue).scheduled, 0, -1, withscores=True)
    return {id.decode(): due for id, due in found}


def unknown(ids: Iterable[object], queue: str = "default") -> list[str]:
    """Return the ids that have no entry in Redis, in the order given."""
    return [task.id for task in Inspection("worker").entry_states(queue, [str(id) for id in ids]) if not task.state]


def stored(*ids: str, queue: str = "default") -> dict[str, bytes]:
    """Return the outcomes that are spilled with these tasks, by id."""
    found = SpilledOutcomes().read(queue, ids, largest_bytes=spill.LARGEST_BYTES)
    return {id: spilled.outcome for id, spilled in found.items()}
