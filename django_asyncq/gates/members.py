"""The members of a gate in Redis: the keys, who holds a slot, and how a slot is released by task id.

Slots have the format of the Go service that first had them: ZSET `asynch:qgate:<name>`, member = task id, score =
expiry in Unix seconds. Other programs may have slots of the same gate: which are ours is noted beside them.
This module reads no rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .. import conf
from ..broker import GateKeys, clients, entries, redis_clock, scripts
from ..broker.keys import free_slot_channel, waiting_gates_key
from ..broker.reading import WITH_SCORES, Command, Reader, read
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
    """Return what `reading_slots` finds. Raises: BrokerUnavailable."""
    return read("producer", reading_slots(gate))


def reading_slots(gate: str) -> Reader[list[Slot]]:
    """Read the gate's slots, the one that expires first in front."""
    (pairs,) = yield [Command("zrange", [keys(gate).members], (0, -1), WITH_SCORES)]
    return [Slot(entries.text(member), int(min(max(score, 0), LATEST))) for member, score in pairs]


def release_ids(gate: str, ids: Sequence[str]) -> int:
    """Release the slots of these tasks, whichever run holds them; return how many were held.

    Raises: BrokerUnavailable.
    """
    return release_runs(gate, [(id, "") for id in ids])


def release_runs(gate: str, runs: Sequence[tuple[str, str]], alias: str = "") -> int:
    """Release the slots of runs; return how many were held. Raises: BrokerUnavailable.

    runs: task id and fence of the run; a fence of "" releases the slot of any run. alias: as of `clients.client`.
    """
    of_gate = keys(gate)
    places = [of_gate.members, of_gate.retaken, of_gate.waiters, of_gate.ours]
    released = 0
    for start in range(0, len(runs), IDS_PER_CALL):
        words = [word for run in runs[start : start + IDS_PER_CALL] for word in run]
        arguments = [free_slot_channel(), gate, *words]
        released += int(scripts.run("gate_release", client(alias), places, arguments))
    return released


def reading_held(gate: str) -> Reader[int]:
    """Read how many slots of a gate have not expired."""
    soonest = int((yield from redis_clock.reading_seconds())) + 1
    (count,) = yield [Command("zcount", [keys(gate).members], (soonest, "+inf"))]
    return entries.count(count)


def noted_ids(gate: str) -> set[str]:
    """Return what `reading_noted` finds. Raises: BrokerUnavailable."""
    return read("producer", reading_noted(gate))


def reading_noted(gate: str) -> Reader[set[str]]:
    """Read the ids that this project has given a slot and not released."""
    (found,) = yield [Command("smembers", [keys(gate).ours])]
    return set(entries.texts(found))


def trim_noted(gate: str, ids: Sequence[str]) -> None:
    """Forget ids whose slot has expired, of those that were noted as ours. Raises: BrokerUnavailable."""
    of_gate = keys(gate)
    for start in range(0, len(ids), IDS_PER_CALL):
        scripts.run("gate_trim", client(), [of_gate.members, of_gate.ours], ids[start : start + IDS_PER_CALL])


def forget_built(gate: str) -> None:
    """Have the gate rebuilt at its next use, because its limit was changed. Raises: BrokerUnavailable."""
    scripts.run("forget_built", client(), keys(gate)[1:2], ["limit", "expected_seconds"])


def client(alias: str = "") -> clients.Client:
    """Return the client that gates use, with the short timeouts of a producer. alias: as of `clients.client`."""
    return clients.client("producer", alias)


# --- The waiters of a gate in Redis: retries, and new tasks that may wait, for which there was no slot. Those with the
# highest priority are first, then those that have waited longest.
#
# A released slot is announced, and the leader then asks the gate for the waiters that are next. Until they have it, the
# free slots are theirs: a new task is refused as if the gate were full. That holds as long as the leader looks at them,
# and for KEPT_SECONDS after it. So waiters that nobody looks at, or that exist only in Redis, hold up nobody for
# long. The rows decide who waits: QUEUED or RETRYING with the reason GATE_FULL. This module reads no rows; `audit`
# does.

# Longer than a look of the leader and a slow transaction take, and short for a producer that is refused in vain.
KEPT_SECONDS = 10


def wait(gate: str, records: Sequence[TaskRecord], *, is_next: bool = False) -> None:
    """Let tasks wait at a gate, by priority and then in the order of their ids; one that waits keeps its place.

    records: reached by one client, with one limit of their own, for a gate without a row. is_next: before all others.
    Raises: BrokerUnavailable.
    """
    for start in range(0, len(records), IDS_PER_CALL):
        part = records[start : start + IDS_PER_CALL]
        of_gate, limit, alias = keys(gate), part[0].queue_limit, part[0].backend
        arguments: list[Any] = ["" if limit is None else limit, "next" if is_next else ""]
        for record in part:
            arguments += [str(record.id), record.priority]
        scripts.run("gate_wait", client(alias), [of_gate.meta, of_gate.waiters], arguments)
        if not start:
            note_waiting(gate, alias)


def note_waiting(gate: str, alias: str = "") -> None:
    """Note for the leader that tasks wait at this gate; called after they were added. Raises: BrokerUnavailable."""
    scripts.send(client(alias), "sadd", waiting_gates_key(), gate)


def waiting_gates() -> set[str]:
    """Return the gates at which tasks wait. Raises: BrokerUnavailable."""
    return set(entries.texts(scripts.send(client(), "smembers", waiting_gates_key())))


def waiters(gate: str) -> list[str]:
    """Return what `reading_waiters` finds. Raises: BrokerUnavailable."""
    return read("producer", reading_waiters(gate))


def reading_waiters(gate: str, most: int | None = None) -> Reader[list[str]]:
    """Read the ids of the tasks that wait, those that are next first. most: of them; None for all."""
    (found,) = yield [Command("zrange", [keys(gate).waiters], (0, -1 if most is None else most - 1))]
    return entries.texts(found)


def reading_place_in_line(gate: str, id: str, alias: str) -> Reader[int | None]:
    """Read the place of a task among those that wait, from 1 on; None for one that Redis does not know to wait."""
    (rank,) = yield [Command("zrank", [keys(gate).waiters], (id,), alias=alias)]
    return None if rank is None else entries.count(rank) + 1


def reading_place(gate: str, id: str, alias: str) -> Reader[str]:
    """Read the score of a task among those that wait, "" for one that does not."""
    (score,) = yield [Command("zscore", [keys(gate).waiters], (id,), alias=alias)]
    number = entries.number(score)
    return "" if number is None else f"{number:.0f}"


def settle(gate: str, gone: Collection[str] = (), *, is_kept: bool = True) -> None:
    """End a look at the waiters: forget those that wait no longer, and keep the order of the others for KEPT_SECONDS.

    is_kept: False when those that wait can use no free slot, because they wait for other gates: anybody may have it.
    Raises: BrokerUnavailable.
    """
    of_gate = keys(gate)
    arguments = ["kept" if is_kept else "", *gone]
    scripts.run("gate_settle", client(), [of_gate.meta, of_gate.waiters], arguments)


def forget_waiters(gate: str, ids: Sequence[str], alias: str = "") -> None:
    """Forget tasks that wait no longer, such as deleted ones. Raises: BrokerUnavailable."""
    scripts.send(client(alias), "zrem", keys(gate).waiters, *ids)


def forget_gate(gate: str) -> None:
    """Note that nobody waits at a gate any more. Raises: BrokerUnavailable."""
    scripts.send(client(), "srem", waiting_gates_key(), gate)
    # A task may have begun to wait between the last look and this note.
    if scripts.send(client(), "zcard", keys(gate).waiters):
        note_waiting(gate)
