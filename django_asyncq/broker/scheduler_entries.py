"""What asynq's tools list of schedules: entries that live as long as a scheduler beats, and their latest events.

Nothing is ever read from here; the rows decide. Source: `asynq-wire.md` section 13.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence

from . import clients, scripts
from .clients import broker_errors
from .keys import scheduler_history_key, scheduler_key, schedulers_key

EVENTS_KEPT = 1000


class SchedulerEntryList:
    """The entries of one scheduler process. Every method raises BrokerUnavailable when Redis is away."""

    def __init__(self) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"

    def beat(self, entries: Sequence[bytes], seconds: int) -> None:
        """Show these entries for so long."""
        client = clients.client("worker")
        with broker_errors():
            client.zadd(schedulers_key(), {scheduler_key(self.id): int(time.time()) + seconds})
        scripts.run("scheduler_beat", client, [scheduler_key(self.id)], [seconds, *entries])

    def note(self, entry_id: str, event: bytes, at: int) -> None:
        """Note a firing. at: Unix seconds."""
        client = clients.client("worker")
        scripts.run("scheduler_event", client, [scheduler_history_key(entry_id)], [at, event, EVENTS_KEPT])

    def clear(self) -> None:
        """Show nothing any more; a clean stop. Events stay: the entry may be another scheduler's by now."""
        client = clients.client("worker")
        with broker_errors():
            client.zrem(schedulers_key(), scheduler_key(self.id))
            client.delete(scheduler_key(self.id))


def forget_events(entry_id: str) -> None:
    """Remove the events of an entry that is no more. Raises: BrokerUnavailable."""
    with broker_errors():
        clients.client("producer").delete(scheduler_history_key(entry_id))
