"""The tasks of a queue that must run alone, because one of them may have taken its worker process down.

They wait in a key of their own, which the dequeue of ordinary workers never reads.
"""

from __future__ import annotations

from . import replies, scripts
from .access import Access
from .entries import Lease


def dequeue_suspect(
    broker: Access, queue: str, worker_id: str, lease_seconds: int, *, waited_seconds: float = 0.0
) -> Lease | None:
    """Dequeue the task that has waited longest; None when there is none, or when the queue is paused.

    A worker that holds a task already gets that one: the reply to an earlier call was lost.
    waited_seconds: how long the task must have waited. Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    places = [keys.suspects, keys.active, keys.lease, keys.paused, keys.held(worker_id)]
    arguments = [keys.task_prefix, lease_seconds, worker_id, round(waited_seconds * 1000)]
    found = replies.leases(scripts.run("dequeue_suspect", broker.client, places, arguments))
    return found[0] if found else None
