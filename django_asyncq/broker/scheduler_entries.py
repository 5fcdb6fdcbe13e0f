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
        # Aliases in TASKS under whose prefixes there are entries.
        self._aliases: set[str] = set()

    def beat(self, alias: str, entries: Sequence[bytes], seconds: int) -> None:
        """List these entries under the prefix of an alias in TASKS for `seconds`."""
        client, key = clients.client("worker"), scheduler_key(self.id, alias)
        self._aliases.add(alias)
        commands.send(client, "zadd", schedulers_key(alias), {key: int(redis_clock.seconds()) + seconds})
        scripts.run("scheduler_beat", client, [key], [seconds, *entries])

    def note(self, alias: str, entry_id: str, event: bytes, at: int) -> None:
        """Add one firing to the history of an entry of an alias. at: Unix seconds."""
        client = clients.client("worker")
        scripts.run("scheduler_event", client, [scheduler_history_key(entry_id, alias)], [at, event, EVENTS_KEPT])

    def clear(self) -> None:
        """Remove all entries at a clean stop. Events stay: the entry may belong to another scheduler by now."""
        client = clients.client("worker")
        for alias in self._aliases:
            key = scheduler_key(self.id, alias)
            commands.send(client, "zrem", schedulers_key(alias), key)
            with broker_errors(client):
                client.delete(key)


def forget_events(entry_id: str) -> None:
    """Remove the history of a deleted entry. Raises: BrokerUnavailable."""
    client = clients.client("producer")
    for alias in one_alias_per_prefix():
        with broker_errors(client):
            client.delete(scheduler_history_key(entry_id, alias))
