"""The strict queue limit: at most N tasks of a gate are queued or running.

Slots live in Redis, in the format of the Go service that first had them: ZSET `asynch:qgate:<name>`, member = task id,
score = expiry in Unix seconds. The rows decide who may hold one: a gate that has not been built since Redis lost its
memory is built from the rows in 0 and 1 before it admits anybody. A slot taken before its row is committed is
provisional; `confirm` makes it last.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from django.db.models import QuerySet

from .. import conf, failpoints
from ..broker import GateKeys, clients, scripts
from ..exceptions import BrokerUnavailable, GateUnavailable, QueueFull, UnknownGate
from ..models import Gate, TaskRecord, TaskState

logger = logging.getLogger("django_asyncq.gates.slots")

LIVE_STATES = (TaskState.QUEUED, TaskState.RUNNING)
IDS_PER_CALL = 200
KEYS_PER_SCAN = 1000
LONGEST_HOLD_SECONDS = 86_400
SHORTEST_HOLD_SECONDS = 3_600


class Admission(NamedTuple):
    """What a gate answered. refused: ids that hold no slot; limit 0 or less: the gate is open."""

    refused: set[str]
    limit: int
    occupancy: int
    expected_seconds: float


class Slot(NamedTuple):
    """A member of a gate. expires_at: Unix seconds."""

    id: str
    expires_at: int


class Drift(NamedTuple):
    """What an audit mended: tasks that had no slot, and slots that had no task."""

    added: int
    removed: int


def keys(gate: str) -> tuple[str, str, str]:
    """Return the gate's keys: members, meta, retaken; the braces put the others into the first's cluster slot."""
    return _keys(conf.current().gate_prefix, gate)


@lru_cache(maxsize=1024)
def _keys(prefix: str, gate: str) -> tuple[str, str, str]:
    members = f"{prefix}{gate}"
    return members, f"{{{members}}}:meta", f"{{{members}}}:retaken"


def keys_for(record: TaskRecord) -> GateKeys:
    """Return what another script needs to make the slot of a record last."""
    members, meta, _ = keys(record.gate)
    expected_seconds = record.expected_seconds or conf.current().expected_seconds
    return GateKeys(members, meta, record.queue_limit, expected_seconds)


def hold_seconds(expected_seconds: float) -> int:
    """Return how long a slot lasts without renewal: ten times the expected time, between an hour and a day."""
    return min(max(math.ceil(10 * expected_seconds), SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)


def acquire(
    records: Sequence[TaskRecord], *, partial: bool = False, again: bool = False, timed: bool = False
) -> set[UUID]:
    """Take a provisional slot for each record that names a gate; return the ids refused (only with `partial`).

    again: they are retried. What their earlier runs still give back is not the slot taken now.
    timed: a gate that has lost its limit since they were admitted lets them pass, for there is nobody to tell.
    Raises: QueueFull when a gate has no room for all of its records, UnknownGate, GateUnavailable. Slots taken before
    the error are left to the caller's `release_uncommitted`.
    """
    seconds = conf.current().provisional_seconds
    return _admit_groups(records, partial=partial, seconds=seconds, again=again, must_exist=not timed)


def confirm(records: Sequence[TaskRecord]) -> set[UUID]:
    """Make the slots of committed records last; return the ids that have lost theirs and found the gate full.

    Raises: GateUnavailable.
    """
    return _admit_groups(records, partial=True, seconds=0, again=False, must_exist=False)


def _admit_groups(
    records: Sequence[TaskRecord], *, partial: bool, seconds: int, again: bool, must_exist: bool
) -> set[UUID]:
    """Ask each gate for its records. must_exist: a gate without a limit is an error, else it is none."""
    refused: set[UUID] = set()
    for gate, group in by_gate(records).items():
        try:
            admission = admit(gate, group, partial=partial, seconds=seconds, again=again)
        except UnknownGate as error:
            if must_exist:
                raise
            # Its limit was removed after the task was admitted; without one it waits for nothing.
            logger.warning("%d tasks go on without a slot: %s", len(group), error)
            continue
        if admission.refused:
            refused |= {record.id for record in group if str(record.id) in admission.refused}
    return refused


def release(records: Iterable[TaskRecord]) -> None:
    """Give back the slots of runs that have ended; one that a retry has taken since is not theirs.

    What Redis cannot take now, the auditor gives back later.
    """
    _release_groups(records, lambda record: str(record.fence))


def release_uncommitted(records: Iterable[TaskRecord]) -> None:
    """Give back the slots of tasks that are not to be queued after all, or that are deleted."""
    _release_groups(records, lambda record: "")


def _release_groups(records: Iterable[TaskRecord], fence_of: Callable[[TaskRecord], str]) -> None:
    for gate, group in by_gate(records).items():
        try:
            _release(gate, [(str(record.id), fence_of(record)) for record in group])
        except BrokerUnavailable as error:
            logger.warning("gate %s: %d slots not released now: %s", gate, len(group), error)


def release_ids(gate: str, ids: Sequence[str]) -> int:
    """Give slots back by task id, whoever holds them; return how many were held. Raises: BrokerUnavailable."""
    return _release(gate, [(id, "") for id in ids])


def _release(gate: str, runs: Sequence[tuple[str, str]]) -> int:
    members, _, retaken = keys(gate)
    released = 0
    for start in range(0, len(runs), IDS_PER_CALL):
        words = [word for run in runs[start : start + IDS_PER_CALL] for word in run]
        released += int(scripts.run("gate_release", _client(), [members, retaken], words))
    return released


def by_gate(records: Iterable[TaskRecord]) -> dict[str, list[TaskRecord]]:
    """Group the records that name a gate by it."""
    groups: dict[str, list[TaskRecord]] = {}
    for record in records:
        if record.gate:
            groups.setdefault(record.gate, []).append(record)
    return groups


def admit(gate: str, records: Sequence[TaskRecord], *, partial: bool, seconds: int, again: bool = False) -> Admission:
    """Ask one gate for slots of `seconds` (0: the full time), building it first when that is due.

    again: the records are retried. Raises: QueueFull (not with `partial`), UnknownGate, GateUnavailable.
    """
    try:
        admission = _admit_some(gate, records[:IDS_PER_CALL], partial=partial, seconds=seconds, again=again)
        for start in range(IDS_PER_CALL, len(records), IDS_PER_CALL):
            part = records[start : start + IDS_PER_CALL]
            more = _admit_some(gate, part, partial=partial, seconds=seconds, again=again)
            admission = more._replace(refused=admission.refused | more.refused)
        return admission
    except BrokerUnavailable as error:
        raise GateUnavailable(gate) from error


def _admit_some(gate: str, records: Sequence[TaskRecord], *, partial: bool, seconds: int, again: bool) -> Admission:
    limit, settings = records[0].queue_limit, conf.current()
    arguments = [
        seconds,
        "" if limit is None else limit,
        records[0].expected_seconds or settings.expected_seconds,
        "partial" if partial else "all",
        settings.unasked_seconds,
    ]
    for record in records:
        arguments += [str(record.id), record.fence if again else ""]
    reply = scripts.run("gate_acquire", _client(), keys(gate), arguments)
    while reply[0] == b"unbuilt":
        build(gate)
        reply = scripts.run("gate_acquire", _client(), keys(gate), arguments)
    word, known_limit, occupancy, expected = reply[0], int(reply[1]), int(reply[2]), float(reply[3])
    if word == b"undefined":
        raise UnknownGate(gate)
    if word == b"full":
        raise QueueFull(
            gate=gate, limit=known_limit, occupancy=occupancy, retry_after=retry_after(known_limit, expected)
        )
    return Admission({id.decode() for id in reply[4:]}, known_limit, occupancy, expected)


def retry_after(limit: int, expected_seconds: float) -> int:
    """Estimate in how many seconds a full gate frees a slot: one of `limit` tasks ends each expected / limit."""
    return max(1, math.ceil(expected_seconds / max(limit, 1)))


def build(gate: str) -> None:
    """Make every task in 0 or 1 a member, then let the gate admit; nothing when its limit is changed meanwhile.

    Raises: BrokerUnavailable.
    """
    with clients.broker_errors():
        changes = _client().hget(keys(gate)[1], "changes") or b""
    row = Gate.objects.filter(name=gate).first()
    holders = list(_live(gate).values_list("id", "state", "fence"))
    expected = row.expected_seconds if row else conf.current().expected_seconds
    limit = [row.limit, row.expected_seconds] if row else ["", ""]
    arguments = [changes, *limit, hold_seconds(expected)]
    for id, state, fence in holders:
        # A row in 1 tells of the run that has the slot, one in 0 of the run before: the slot is not that one's.
        arguments += [str(id), fence if state == TaskState.QUEUED else fence - 1]
    if scripts.run("gate_build", _client(), keys(gate), arguments) != b"built":
        return
    failpoints.reach("build.gate_built")
    # A task that ended between the read and the build has been made a member again.
    release_ids(gate, sorted({str(id) for id, _, _ in holders}.difference(_holders(gate))))


def forget_built(gate: str) -> None:
    """Have the gate built anew at its next use: its limit was changed. Raises: BrokerUnavailable."""
    scripts.run("gate_forget", _client(), keys(gate)[1:2])


def slots(gate: str) -> list[Slot]:
    """Return the members, the one that expires first in front. Raises: BrokerUnavailable."""
    with clients.broker_errors():
        pairs = _client().zrange(keys(gate)[0], 0, -1, withscores=True)
    return [Slot(member.decode(), int(score)) for member, score in pairs]


def occupied() -> set[str]:
    """Return the names of gates that have members and were built here, also those that no live task is at.

    Walks the key space. Raises: BrokerUnavailable.
    """
    prefix = conf.current().gate_prefix
    with clients.broker_errors():
        found = _client().scan_iter(match=f"{prefix}*", count=KEYS_PER_SCAN)
        names = {key.decode("utf-8", "replace").removeprefix(prefix) for key in found}
        # A gate without the mark is another program's alone.
        return {name for name in names if _client().hexists(keys(name)[1], "built")}


def audit(gate: str, now: float, *, seen: set[str] | None = None, dry_run: bool = False) -> Drift:
    """Make the members agree with the rows in 0 and 1: renew, add and remove.

    now: Unix seconds. Slots younger than a provisional one are left alone: their row may not be committed yet.
    seen: the members without a live row that the last audit found; only what is among them goes, for a worker that
        has written an end gives the slot back a moment later; those found now take their place. None: all go at once.
    dry_run: only count. Raises: BrokerUnavailable.
    """
    members = {slot.id: slot.expires_at for slot in slots(gate)}
    row = Gate.objects.filter(name=gate).first()
    if not dry_run and _known_limit(gate) != _limit_of(row):
        forget_built(gate)  # it was changed while Redis was away
    holders = _holders(gate)
    provisional_until = now + conf.current().provisional_seconds
    strangers = {id for id, expires_at in members.items() if expires_at > provisional_until}.difference(holders)
    lacking = set() if row and row.limit <= 0 else _renew(gate, row, holders, dry_run=dry_run)
    if lacking or strangers:
        live = set(_holders(gate))
        # A task that ended between the read and the renewal has been made a member again.
        ended = lacking - live
        if not dry_run:
            release_ids(gate, sorted(ended))
        lacking, strangers = lacking - ended, strangers - live
    if seen is not None:
        strangers, found = strangers & seen, strangers
        seen.clear()
        seen.update(found - strangers)
    return Drift(len(lacking), len(strangers) if dry_run else release_ids(gate, sorted(strangers)))


def _renew(gate: str, row: Gate | None, holders: Sequence[str], *, dry_run: bool) -> set[str]:
    """Extend the holders' slots, and give one to those that have none; return those."""
    if dry_run:
        return set(holders) - {slot.id for slot in slots(gate)}
    hold = hold_seconds(row.expected_seconds if row else conf.current().expected_seconds)
    lacking: set[str] = set()
    for start in range(0, len(holders), IDS_PER_CALL):
        arguments = [hold, *holders[start : start + IDS_PER_CALL]]
        found = scripts.run("gate_renew", clients.client("worker"), keys(gate)[:1], arguments)
        lacking |= {id.decode() for id in found}
    return lacking


def _limit_of(row: Gate | None) -> tuple[int, float] | None:
    return (row.limit, row.expected_seconds) if row else None


def _known_limit(gate: str) -> tuple[int, float] | None:
    """Return what Redis knows of the Gate row."""
    with clients.broker_errors():
        limit, expected = _client().hmget(keys(gate)[1], "limit", "expected_seconds")
    return (int(limit), float(expected)) if limit else None


def _live(gate: str) -> QuerySet[TaskRecord]:
    return TaskRecord.objects.filter(gate=gate, state__in=LIVE_STATES).order_by("id")


def _holders(gate: str) -> list[str]:
    return [str(id) for id in _live(gate).values_list("id", flat=True)]


def _client() -> clients.Client:
    return clients.client("producer")
