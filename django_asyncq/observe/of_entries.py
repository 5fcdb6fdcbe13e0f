"""What Redis holds and no row does, for an `Inspector`: messages of other programs that no worker of ours has taken.

They are operated as asynq's own tools do it. An entry with a row belongs to `of_tasks`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from datetime import UTC, datetime

from .. import lifecycle
from ..broker import Broker
from ..broker.inspection import QueueReading, StoredEntry
from ..broker.keys import is_name
from ..broker.task_entries import ask_to_stop, make_pending, take_out
from ..core.aliases import one_alias_per_prefix
from ..models import TaskRecord
from .values import EntryDetails, EntryInfo

# The states whose score is a time in Unix seconds.
TIMED = ("scheduled", "retry", "archived", "completed")
# Where the year has four digits; a score, and what a message says, may be any number.
LATEST = 253_370_764_800
FAILED = ("retry", "archived")
GONE = "it is no longer in Redis"
WHY_NOT = {
    "": "its state in Redis cannot be read",
    "pending": "it is due already",
    "active": "it is running",
    "aggregating": "it waits in a group of another program",
    "completed": "it has succeeded",
}


def moment(seconds: float | None) -> datetime | None:
    """Return a time that Redis holds; None for what is none."""
    return None if seconds is None or not 0 <= seconds <= LATEST else datetime.fromtimestamp(seconds, UTC)


def entry_info(each: StoredEntry, row: TaskRecord | None) -> EntryInfo:
    """Return what a list shows of an entry."""
    message = each.message
    return EntryInfo(
        id=each.id,
        state=each.state,
        type=message.type if message else None,
        row=row.id if row else None,
        at=moment(each.score) if each.state in TIMED else None,
        retried=message.retried if message else 0,
        error=message.error_msg if message else "",
        payload=message.payload if message else b"",
    )


class Entries:
    """Find entries by their ids, and run, cancel and delete those that have no row.

    What changes an entry returns why it was refused; "" when it was done.
    """

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def queues(self) -> list[tuple[str, str]]:
        """Return the alias and the name of each queue that Redis knows, those of other programs too, sorted."""
        aliases = one_alias_per_prefix() if self._backend is None else [self._backend]
        named = {
            alias: Broker("worker", alias).queues() | QueueReading("worker", alias).of_asynq() for alias in aliases
        }
        return sorted((alias, queue) for alias, names in named.items() for queue in names if is_name(queue))

    def find(self, name: str) -> list[EntryDetails]:
        """Return the entries with an id, one of each queue that has it; those of tasks with a row too.

        name: the id, or the queue, a slash and the id. One round trip for each queue.
        """
        found = []
        for alias, queue in self.queues():
            own = [name.removeprefix(f"{queue}/")] if name.startswith(f"{queue}/") else []
            for id in (name, *own):
                stored = QueueReading("worker", alias).entry(queue, id)
                if stored is not None:
                    row = lifecycle.rows_of_entries(Broker("worker", alias), queue, [id]).get(id)
                    found.append(_details_of(stored, row, alias, queue))
        return found

    def run(self, entry: EntryDetails) -> str:
        """Make an entry pending that is scheduled, in retry or archived."""
        return self._push(entry, ("scheduled", *FAILED))

    def retry(self, entry: EntryDetails) -> str:
        """Make an entry pending that is in retry or archived."""
        return self._push(entry, FAILED)

    def cancel(self, entry: EntryDetails) -> str:
        """Ask the worker of an active entry to stop, on asynq's channel. One that waits can be deleted instead."""
        state = self._state(entry)
        if state != "active":
            waits = "it is not running: to take it out of its queue, delete it"
            return WHY_NOT[state] if state in ("", "completed") else GONE if state is None else waits
        (word,) = ask_to_stop(Broker("worker", entry.backend), entry.queue, [entry.id])
        return "" if word == "asked" else GONE

    def delete(self, entry: EntryDetails) -> str:
        """Remove an entry that no worker runs, with its lock."""
        broker, state = Broker("worker", entry.backend), self._state(entry)
        if state == "active":
            return "it is running: cancel it first"
        if state == "":
            # It may be in any list; nobody runs what has no state.
            return "" if broker.remove(entry.queue, [entry.id]) else GONE
        (word,) = take_out(broker, entry.queue, [(entry.id, None)], overtaken=True)
        if word == "active":
            return "a worker has just taken it, and was asked to stop"
        return "" if word == "removed" else GONE

    def _push(self, entry: EntryDetails, states: Collection[str]) -> str:
        if entry.state == "":
            return WHY_NOT[""]
        word = make_pending(Broker("worker", entry.backend), entry.queue, entry.id, states)
        if word == "moved":
            return ""
        return GONE if word in ("", "row") else WHY_NOT.get(word, "it has not failed")

    def _state(self, entry: EntryDetails) -> str | None:
        """Return the state of now; None when the entry is gone."""
        found = QueueReading("worker", entry.backend).entry(entry.queue, entry.id)
        return found.state if found else None


def _details_of(each: StoredEntry, row: TaskRecord | None, alias: str, queue: str) -> EntryDetails:
    info, message = entry_info(each, row), each.message
    return EntryDetails(
        **{each.name: getattr(info, each.name) for each in fields(EntryInfo)},
        backend=alias,
        queue=queue,
        max_retries=message.retry if message else 0,
        timeout_seconds=message.timeout if message else 0,
        deadline=moment(message.deadline or None) if message else None,
        last_failed_at=moment(message.last_failed_at or None) if message else None,
        completed_at=moment(message.completed_at or None) if message else None,
        headers=dict(message.headers) if message else {},
    )
