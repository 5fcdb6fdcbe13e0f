"""What a Redis that has lost its memory must know before any task is pushed to it."""

from __future__ import annotations

from .. import failpoints
from ..broker import Broker
from ..pausing.keeper import PauseKeeper


def prepare(broker: Broker) -> None:
    """Restore the pauses, so that no task of a paused queue begins; then mark that Redis remembers from now on.

    Safe to call at any time. Raises: BrokerUnavailable, django.db.Error.
    """
    PauseKeeper().tick()
    # Before the rebuild: tasks enqueued from now on are pushed by their own process.
    broker.mark_alive()
    failpoints.reach("reconcile.marked_alive")
