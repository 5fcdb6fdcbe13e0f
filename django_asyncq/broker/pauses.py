"""What Redis holds of pauses: asynq's key of a queue, our mark beside it, and the set of paused tasks.

The mark says which row has paused a queue. A key without a mark is another program's; a mark without its key says
that another program has resumed the queue. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import clients, commands, replies, scripts
from .access import Access
from .clients import broker_errors
from .keys import paused_tasks_key, pauses_channel
from .many_queues import queues_with


class PauseState(NamedTuple):
    """What Redis says of a queue. mark: of the row that has paused it; "" for none."""

    is_paused: bool
    mark: str


def read_state(access: Access, queue: str) -> PauseState:
    """Return whether a queue is paused, and by which row. Raises: BrokerUnavailable."""
    word, mark = scripts.run("pause_state", access.client, _places(access, queue))
    return PauseState(word == b"paused", replies.text(mark))


def read_states(access: Access, queues: Sequence[str]) -> dict[str, PauseState]:
    """Return the same of many queues. Raises: BrokerUnavailable."""
    paused = queues_with(access, queues, "paused", "pause_mark")
    return dict.fromkeys(queues, PauseState(False, "")) | {queue: read_state(access, queue) for queue in paused}


def pause_queue(access: Access, queue: str, *, since: int, mark: str) -> None:
    """Pause a queue because of a row. since: Unix seconds. Raises: BrokerUnavailable."""
    scripts.run("pause_queue", access.client, _places(access, queue), [since, mark])


def resume_queue(access: Access, queue: str, mark: str) -> bool:
    """Resume a queue whose row is deleted, and wake the workers; False when another row has paused it since.

    Raises: BrokerUnavailable.
    """
    word = scripts.run("resume_queue", access.client, _places(access, queue), [mark, pauses_channel()])
    return replies.text(word) == "resumed"


def note_pause(access: Access, queue: str, mark: str) -> str:
    """Mark another program's pause as that of a row; return "noted", "gone" or "marked". Raises: BrokerUnavailable."""
    return replies.text(scripts.run("note_pause", access.client, _places(access, queue), [mark]))


def forget_pause(access: Access, queue: str, mark: str) -> bool:
    """Forget the mark of a pause that another program has ended; False when it is paused. Raises: BrokerUnavailable."""
    return replies.text(scripts.run("forget_pause", access.client, _places(access, queue), [mark])) == "forgotten"


def paused_tasks(role: clients.Role) -> set[str]:
    """Return the names of the paused tasks. Raises: BrokerUnavailable."""
    return set(replies.texts(commands.send(clients.client(role), "smembers", paused_tasks_key())))


def pause_task(role: clients.Role, name: str) -> None:
    """Have workers postpone the calls of a task, and notify them. Raises: BrokerUnavailable."""
    client = clients.client(role)
    commands.send(client, "sadd", paused_tasks_key(), name)
    with broker_errors(client):
        client.publish(pauses_channel(), "1")


def resume_task(role: clients.Role, name: str) -> None:
    """Have workers run the calls of a task again, and notify them. Raises: BrokerUnavailable."""
    client = clients.client(role)
    commands.send(client, "srem", paused_tasks_key(), name)
    with broker_errors(client):
        client.publish(pauses_channel(), "1")


def _places(access: Access, queue: str) -> list[str]:
    keys = access.keys(queue)
    return [keys.paused, keys.pause_mark]
