"""The waiters of a gate in Redis: retries that found the gate full, those that have waited longest first.

A released slot is announced, and the leader then retries the waiters that are next. Until they have it, the free slots
are theirs: a new task is refused as if the gate were full. That holds as long as the leader looks at them, and for
KEPT_SECONDS after it. So waiters that nobody looks at, or that exist only in Redis, hold up nobody for long.
The rows decide who waits: RETRYING with the reason GATE_FULL. This module reads no rows; `audit` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..broker import commands, replies, scripts
from ..broker.keys import waiting_gates_key
from .members import IDS_PER_CALL, client, keys

# Longer than a look of the leader and a slow transaction take, and short for a producer that is refused in vain.
KEPT_SECONDS = 10


def wait(gate: str, ids: Sequence[str], limit: int | None, *, is_next: bool = False) -> None:
    """Let tasks wait at a gate, in the order of their ids; one that waits already keeps its place.

    limit: that the tasks bring along, for a gate without a row. is_next: before all others. Raises: BrokerUnavailable.
    """
    of_gate = keys(gate)
    own_limit = "" if limit is None else limit
    for start in range(0, len(ids), IDS_PER_CALL):
        arguments = [own_limit, "next" if is_next else "", *ids[start : start + IDS_PER_CALL]]
        scripts.run("gate_wait", client(), [of_gate.meta, of_gate.waiters], arguments)
    if ids:
        note_waiting(gate)


def note_waiting(gate: str) -> None:
    """Note for the leader that tasks wait at this gate; called after they were added. Raises: BrokerUnavailable."""
    commands.send(client(), "sadd", waiting_gates_key(), gate)


def waiting_gates() -> set[str]:
    """Return the gates at which tasks wait. Raises: BrokerUnavailable."""
    return set(replies.texts(commands.send(client(), "smembers", waiting_gates_key())))


def waiters(gate: str) -> list[str]:
    """Return the ids of the tasks that wait, those that are next first. Raises: BrokerUnavailable."""
    return replies.texts(commands.send(client(), "zrange", keys(gate).waiters, 0, -1))


def settle(gate: str, gone: Collection[str] = ()) -> None:
    """End a look at the waiters: forget those that wait no longer, and keep the order of the others for KEPT_SECONDS.

    Raises: BrokerUnavailable.
    """
    of_gate = keys(gate)
    scripts.run("gate_settle", client(), [of_gate.meta, of_gate.waiters], list(gone))


def forget_waiters(gate: str, ids: Sequence[str]) -> None:
    """Forget tasks that wait no longer, such as deleted ones. Raises: BrokerUnavailable."""
    commands.send(client(), "zrem", keys(gate).waiters, *ids)


def forget_gate(gate: str) -> None:
    """Note that nobody waits at a gate any more. Raises: BrokerUnavailable."""
    commands.send(client(), "srem", waiting_gates_key(), gate)
    # A task may have begun to wait between the last look and this note.
    if commands.send(client(), "zcard", keys(gate).waiters):
        note_waiting(gate)
