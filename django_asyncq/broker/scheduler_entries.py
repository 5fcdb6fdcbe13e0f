"""Write schedules for asynq's tools: entries that expire unless they are renewed, and their latest events.

The package never reads them back: the rows decide. Source: `asynq-wire.md` section 13.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence

from ..prefixes import one_alias_per_prefix
from . import clients, commands, redis_clock, scripts
from .clients import broker_errors
from .keys import scheduler_history_key, scheduler_key, schedulers_key

EVENTS_KEPT = 1000


class SchedulerEntryList:
    """Keep the entries of one scheduler process. Every method raises BrokerUnavailable when Redis is unreachable."""

    def __init__(self) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"

    def beat(self, entries: Sequence[bytes], seconds: int) -> None:
        """List these entries for `seconds`."""
        client = clients.client("worker")
        commands.send(client, "zadd", schedulers_key(), {scheduler_key(self.id): int(redis_clock.seconds()) + seconds})
        scripts.run("scheduler_beat", client, [scheduler_key(self.id)], [seconds, *entries])

    def note(self, entry_id: str, event: bytes, at: int) -> None:
        """Add one firing to the history of an entry. at: Unix seconds."""
        client = clients.client("worker")
        scripts.run("scheduler_event", client, [scheduler_history_key(entry_id)], [at, event, EVENTS_KEPT])

    def clear(self) -> None:
        """Remove all entries at a clean stop. Events stay: the entry may belong to another scheduler by now."""
        client = clients.client("worker")
        commands.send(client, "zrem", schedulers_key(), scheduler_key(self.id))
        with broker_errors(client):
            client.delete(scheduler_key(self.id))


def forget_events(entry_id: str) -> None:
    """Remove the history of a deleted entry. Raises: BrokerUnavailable."""
    client = clients.client("producer")
    with broker_errors(client):
        client.delete(scheduler_history_key(entry_id))
