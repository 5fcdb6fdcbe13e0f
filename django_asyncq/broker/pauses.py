"""Pauses in Redis: asynq's key of a queue, our mark beside it, and the set of paused tasks.

The mark says which row has paused a queue. A key without a mark is another program's; a mark without its key says
that another program has resumed the queue. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import clients, entries, scripts
from .access import Access, queues_with
from .clients import broker_errors
from .keys import paused_tasks_key, pauses_channel


class PauseState(NamedTuple):
    """What Redis says of a queue. mark: of the row that has paused it; "" for none."""

    is_paused: bool
    mark: str


def read_state(access: Access, queue: str) -> PauseState:
    """Return whether a queue is paused, and by which row. Raises: BrokerUnavailable."""
    word, mark = scripts.run("pause_state", access.client, _places(access, queue))
    return PauseState(word == b"paused", entries.text(mark))


def read_states(access: Access, queues: Sequence[str]) -> dict[str, PauseState]:
    """Return the same of many queues. Raises: BrokerUnavailable."""
    paused = queues_with(access, queues, "paused", "pause_mark")
    return dict.fromkeys(queues, PauseState(False, "")) | {queue: read_state(access, queue) for queue in paused}


def pause_queue(access: Access, queue: str, *, since: int, mark: str) -> bool:
    """Pause a queue because of a row; return whether it was running. since: Unix seconds. Raises: BrokerUnavailable."""
    return bool(scripts.run("pause_queue", access.client, _places(access, queue), [since, mark]))


def resume_queue(access: Access, queue: str, mark: str) -> str:
    """Resume a queue whose row is deleted, and wake the workers.

    Returns "resumed", "running" (it was not paused), or "stale": another row has paused it since, nothing was changed.
    Raises: BrokerUnavailable.
    """
    return entries.text(scripts.run("resume_queue", access.client, _places(access, queue), [mark, pauses_channel()]))


def note_pause(access: Access, queue: str, mark: str) -> str:
    """Mark another program's pause as that of a row; return "noted", "gone" or "marked". Raises: BrokerUnavailable."""
    return entries.text(scripts.run("note_pause", access.client, _places(access, queue), [mark]))


def forget_pause(access: Access, queue: str, mark: str) -> bool:
    """Forget the mark of a pause that another program has ended; False when it is paused. Raises: BrokerUnavailable."""
    return entries.text(scripts.run("forget_pause", access.client, _places(access, queue), [mark])) == "forgotten"


def paused_tasks(role: clients.Role) -> set[str]:
    """Return the names of the paused tasks. Raises: BrokerUnavailable."""
    return set(entries.texts(scripts.send(clients.client(role), "smembers", paused_tasks_key())))


def pause_task(role: clients.Role, name: str) -> bool:
    """Have workers postpone the calls of a task, and notify them; return whether it ran. Raises: BrokerUnavailable."""
    return _change_tasks(role, "sadd", name)


def resume_task(role: clients.Role, name: str) -> bool:
    """Have workers run the calls of a task, and notify them; return whether it was held. Raises: BrokerUnavailable."""
    return _change_tasks(role, "srem", name)


def _change_tasks(role: clients.Role, command: str, name: str) -> bool:
    client = clients.client(role)
    is_changed = bool(scripts.send(client, command, paused_tasks_key(), name))
    with broker_errors(client):
        client.publish(pauses_channel(), "1")
    return is_changed


def _places(access: Access, queue: str) -> list[str]:
    keys = access.keys(queue)
    return [keys.paused, keys.pause_mark]
