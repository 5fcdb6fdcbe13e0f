"""What has become due moves on: delayed tasks to pending, retries through `lifecycle` to queued.

Any number of processes may do this at once: forwarding is one script, and a retry locks its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .. import failpoints, lifecycle
from ..broker import Broker

LARGEST_BATCH = 100


class Due(NamedTuple):
    """What one look did. next_seconds: until the nearest time still to come, by Redis's clock, or None."""

    forwarded: int
    retried: int
    next_seconds: float | None


def forward_due(broker: Broker, queues: Iterable[str]) -> Due:
    """Move all that is due in these queues. Raises: BrokerUnavailable, django.db.Error; what was moved stays so."""
    forwarded = retried = 0
    coming: list[float] = []
    for queue in queues:
        for source in ("scheduled", "retry"):
            while True:
                answer = broker.forward(queue, source, LARGEST_BATCH)
                forwarded += answer.moved
                if answer.own:
                    failpoints.reach("forward.retry_found")
                    retried += lifecycle.retry_due(broker, queue, answer.own)
                if answer.moved + len(answer.own) < LARGEST_BATCH:
                    break
            if answer.next_seconds is not None:
                coming.append(answer.next_seconds)
    return Due(forwarded, retried, min(coming, default=None))
