"""The members of a gate in Redis: the keys, who holds a slot, and how a slot is released by task id.

Slots have the format of the Go service that first had them: ZSET `asynch:qgate:<name>`, member = task id, score =
expiry in Unix seconds. Other programs may have slots of the same gate: which are ours is noted beside them.
This module reads no rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .. import conf
from ..broker import GateKeys, clients, commands, replies, scripts
from ..broker.keys import free_slot_channel
from ..models import TaskRecord

IDS_PER_CALL = 200
LONGEST_HOLD_SECONDS = 86_400
SHORTEST_HOLD_SECONDS = 3_600
# A score may be infinite.
LATEST = 2**53


class Slot(NamedTuple):
    """A member of a gate. expires_at: Unix seconds."""

    id: str
    expires_at: int


class Keys(NamedTuple):
    """The keys of a gate. ours: the set of the ids that this project has put into members."""

    members: str
    meta: str
    retaken: str
    waiters: str
    ours: str


def keys(gate: str) -> Keys:
    """Return the gate's keys. The braces keep all in one slot of a Redis Cluster."""
    return _keys(conf.current().gate_prefix, gate)


@lru_cache(maxsize=1024)
def _keys(prefix: str, gate: str) -> Keys:
    members = f"{prefix}{gate}"
    return Keys(members, *(f"{{{members}}}:{word}" for word in Keys._fields[1:]))


def keys_for(record: TaskRecord) -> GateKeys:
    """Return what the enqueue script needs to confirm the slot of a task."""
    of_gate = keys(record.gate)
    expected_seconds = record.expected_seconds or conf.current().expected_seconds
    return GateKeys(of_gate.members, of_gate.meta, record.queue_limit, expected_seconds)


def hold_seconds(expected_seconds: float) -> int:
    """Return how long a slot lasts without renewal: ten times the expected time, between an hour and a day."""
    return min(max(math.ceil(10 * expected_seconds), SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)


def slots(gate: str) -> list[Slot]:
    """Return the gate's slots, the one that expires first in front. Raises: BrokerUnavailable."""
    pairs = commands.send(client(), "zrange", keys(gate)[0], 0, -1, withscores=True)
    return [Slot(replies.text(member), int(min(max(score, 0), LATEST))) for member, score in pairs]


def release_ids(gate: str, ids: Sequence[str]) -> int:
    """Release the slots of these tasks, whichever run holds them; return how many were held.

    Raises: BrokerUnavailable.
    """
    return release_runs(gate, [(id, "") for id in ids])


def release_runs(gate: str, runs: Sequence[tuple[str, str]]) -> int:
    """Release the slots of runs; return how many were held. Raises: BrokerUnavailable.

    runs: task id and fence of the run; a fence of "" releases the slot of any run.
    """
    of_gate = keys(gate)
    places = [of_gate.members, of_gate.retaken, of_gate.waiters, of_gate.ours]
    released = 0
    for start in range(0, len(runs), IDS_PER_CALL):
        words = [word for run in runs[start : start + IDS_PER_CALL] for word in run]
        arguments = [free_slot_channel(), gate, *words]
        released += int(scripts.run("gate_release", client(), places, arguments))
    return released


def noted_ids(gate: str) -> set[str]:
    """Return the ids that this project has given a slot and not released. Raises: BrokerUnavailable."""
    return set(replies.texts(commands.send(client(), "smembers", keys(gate).ours)))


def trim_noted(gate: str, ids: Sequence[str]) -> None:
    """Forget ids whose slot has expired, of those that were noted as ours. Raises: BrokerUnavailable."""
    of_gate = keys(gate)
    for start in range(0, len(ids), IDS_PER_CALL):
        scripts.run("gate_trim", client(), [of_gate.members, of_gate.ours], ids[start : start + IDS_PER_CALL])


def forget_built(gate: str) -> None:
    """Have the gate rebuilt at its next use, because its limit was changed. Raises: BrokerUnavailable."""
    scripts.run("gate_forget", client(), keys(gate)[1:2])


def client() -> clients.Client:
    """Return the client that gates use, with the short timeouts of a producer."""
    return clients.client("producer")
