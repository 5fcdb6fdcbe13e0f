"""Make the slots of a gate agree with the rows, which decide who holds one.

`build` makes the slots anew after Redis lost its memory. `audit` repairs small differences. Neither changes a row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from .. import conf
from ..broker import clients, entries, redis_clock, scripts
from ..broker.inspection import reading_claimed
from ..broker.reading import Reader, read, side_by_side
from ..core.names import ROW_ID
from ..core.registry import every_task, load_task_modules
from ..models import Gate, Pause, PauseKind, TaskRecord, TaskState
from ..models.tasks import HOLDS_SLOT, of_gates
from ..storage.isolation import page_of
from ..storage.routing import as_check, lock_free_rows, rows_of, transaction_of
from .members import (
    IDS_PER_CALL,
    client,
    forget_built,
    forget_waiters,
    hold_seconds,
    keys,
    note_waiting,
    reading_noted,
    reading_slots,
    release_ids,
    trim_noted,
    wait,
    waiters,
)

# --- Whether a gate is paused, as its row says. `audit.build` writes it to Redis.


def is_paused(gate: str) -> bool:
    """Return whether a gate admits no new task until it is resumed."""
    return rows_of(Pause).filter(kind=PauseKind.GATE, name=gate).exists()


LIVE_STATES = (TaskState.QUEUED, TaskState.RUNNING)
KEYS_PER_SCAN = 1000


class Drift(NamedTuple):
    """What an audit repaired. added: tasks without a slot; removed: slots without a task."""

    added: int
    removed: int


class Look(NamedTuple):
    """What a look at the waiters of a gate found. waiting: how many wait. ids: those with a free slot, in order."""

    waiting: int
    ids: list[str]


def build(gate: str) -> None:
    """Give a slot to every task that is QUEUED or RUNNING, a place to every task that waits, then let the gate admit.

    It admits nothing while it is paused. Slots of other programs that Redis has lost are unknown here, and missing.
    Does nothing when the limit of the gate is changed, or it is paused or resumed, in the meantime.
    Raises: BrokerUnavailable.
    """
    # First: a new task must not come before those that wait.
    _wait_again(gate, _waiting(gate))
    of_gate = keys(gate)
    changes = scripts.send(client(), "hget", of_gate.meta, "changes") or b""
    row = rows_of(Gate).filter(name=gate).first()
    holders = _live(gate, "state", "fence")
    expected = row.expected_seconds if row else conf.current().expected_seconds
    limit = [row.limit, row.expected_seconds] if row else ["", ""]
    arguments = [changes, *limit, hold_seconds(expected), "1" if is_paused(gate) else ""]
    for id, state, fence in holders:
        # The fence of the last run that has finished. A RUNNING row names the run that holds the slot, so its last
        # finished run is the one before; the others name a finished run.
        arguments += [str(id), fence - 1 if state == TaskState.RUNNING else fence]
    if scripts.run("gate_build", client(), of_gate, arguments) != b"built":
        return
    # A task that finished after its row was read got a slot that nobody would release.
    release_ids(gate, sorted({str(id) for id, _, _ in holders}.difference(_holders(gate))))


def occupied() -> set[str]:
    """Return the names of all gates with slots that this project has built, including gates without a live task.

    Scans the keys of the gates in Redis. Raises: BrokerUnavailable.
    """
    prefix = conf.current().gate_prefix
    with clients.broker_errors(client()):
        found = client().scan_iter(match=f"{prefix}*", count=KEYS_PER_SCAN)
        names = {key.decode("utf-8", "replace").removeprefix(prefix) for key in found}
        # A gate without the mark "built" belongs to another program.
        return {name for name in names if scripts.send(client(), "hexists", keys(name).meta, "built")}


def audit(gate: str, *, seen: set[str] | None = None, dry_run: bool = False) -> Drift:
    """Renew the slots of tasks that are QUEUED or RUNNING, add missing slots and remove those without a task.

    Only slots that are noted as ours are removed. Those of other programs count, and last until their own expiry.
    Slots younger than a provisional one are skipped, by Redis's clock: their row may not be committed yet. So are those
    whose row another transaction has locked: it may be just retried. A finished task keeps its slot while a worker has
    it: it was cancelled, say, and its body still runs.
    A follower that has lost its slot gets none: it asks when it moves up, so the limit holds.
    seen: slots without a live task that the last audit found. Only those are removed, because a worker releases a
        slot shortly after it has written the outcome, and not while a worker has the task: the function of one that
        was cancelled may still run. The set is replaced by what this audit finds. None: remove all.
    dry_run: only count. Raises: BrokerUnavailable.
    """
    return read("producer", auditing(gate, seen=seen, dry_run=dry_run))


def auditing(gate: str, *, seen: set[str] | None = None, dry_run: bool = False) -> Reader[Drift]:
    """Do what `audit` does; with `dry_run` it only reads."""
    # The members last: an id that gets a slot in between is then no member that was noted, and is left alone.
    _, noted, held = yield from side_by_side(redis_clock.reading_seconds(), reading_noted(gate), reading_slots(gate))
    members = {slot.id: slot.expires_at for slot in held}
    row = rows_of(Gate).filter(name=gate).first()
    if not dry_run and _is_outdated(gate, row):
        forget_built(gate)  # it was changed while Redis was unreachable
    found = _live(gate, "after_id")
    holders = [str(id) for id, after_id in found if after_id is None or str(id) in members]
    provisional_until = redis_clock.seconds("producer") + conf.PROVISIONAL_SECONDS
    lasting = {id for id, expires_at in members.items() if expires_at > provisional_until}
    unmatched = (lasting & noted).difference(holders)
    # Before the second look at the rows: a person may retry such a task meanwhile.
    claimed = yield from reading_claimed(_by_queue(gate, unmatched if seen is None else unmatched & seen))
    lacking: set[str] = set()
    if dry_run and (not row or row.limit > 0):
        lacking = set(holders) - {slot.id for slot in (yield from reading_slots(gate))}
    elif not row or row.limit > 0:
        lacking = _renew(gate, row, holders)
    if lacking or unmatched:
        live = set(_holders(gate))
        # A task that finished between the read and the renewal has got a slot again.
        finished = lacking - live
        if not dry_run:
            release_ids(gate, sorted(finished))
        lacking, unmatched = lacking - finished, unmatched - live
    surplus = (unmatched if seen is None else unmatched & seen) - claimed
    if seen is not None:
        seen.clear()
        seen.update(unmatched - surplus)
    if not dry_run and (expired := noted.difference(members)):
        trim_noted(gate, sorted(expired))
    return Drift(len(lacking), len(surplus) if dry_run else _release_surplus(gate, sorted(surplus)))


def _release_surplus(gate: str, ids: Sequence[str]) -> int:
    """Release slots without a live task; return how many were held.

    A row that is locked may be just retried, and keeps its slot. The others are locked meanwhile, so that none is.
    """
    count = 0
    for start in range(0, len(ids), IDS_PER_CALL):
        part = ids[start : start + IDS_PER_CALL]
        with transaction_of(TaskRecord):
            rows = rows_of(TaskRecord).filter(id__in=[UUID(id) for id in part if ROW_ID.fullmatch(id)])
            free = lock_free_rows(rows.filter(as_check(~HOLDS_SLOT)))
            kept = {str(id) for (id,) in page_of(rows.order_by("id"), size=None)} - {str(id) for id in free}
            count += release_ids(gate, [id for id in part if id not in kept])
    return count


def _by_queue(gate: str, ids: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """Return those of these tasks that have a row, by alias and queue."""
    # Any program may have noted any text.
    with_row = [UUID(id) for id in ids if ROW_ID.fullmatch(id)]
    queues: dict[tuple[str, str], list[str]] = {}
    for start in range(0, len(with_row), IDS_PER_CALL):
        rows = rows_of(TaskRecord).filter(as_check(of_gates([gate])), id__in=with_row[start : start + IDS_PER_CALL])
        for id, alias, queue in page_of(rows, "backend", "queue_name", size=None):
            queues.setdefault((alias, queue), []).append(str(id))
    return queues


def _renew(gate: str, row: Gate | None, holders: Sequence[str]) -> set[str]:
    """Extend the slots of the holders and give one to each that has none; return the ids that had none."""
    hold = hold_seconds(row.expected_seconds if row else conf.current().expected_seconds)
    of_gate, lacking = keys(gate), set[str]()
    for start in range(0, len(holders), IDS_PER_CALL):
        arguments = [hold, *holders[start : start + IDS_PER_CALL]]
        found = scripts.run("gate_renew", clients.client("worker"), [of_gate.members, of_gate.ours], arguments)
        lacking |= set(entries.texts(found))
    return lacking


def look(gate: str, most: int) -> Look:
    """Look at the waiters of a gate; build it first when needed. `settle` ends the look when there were any.

    most: how many ids to return. Raises: BrokerUnavailable.
    """
    of_gate = keys(gate)
    places = [of_gate.members, of_gate.meta, of_gate.waiters]
    word, count, *ids = scripts.run("gate_next", client(), places, [most])
    while word == b"unbuilt":
        build(gate)
        word, count, *ids = scripts.run("gate_next", client(), places, [most])
    return Look(entries.count(count), entries.texts(ids))


def audit_waiters(gate: str, *, seen: set[str] | None = None) -> Drift:
    """Let the tasks wait whose rows say so, and forget the others; return how many were added and removed.

    A task that is just being retried may be added; the next look of the leader forgets it.
    seen: as for `audit`, because a task begins to wait shortly before its row says so. Raises: BrokerUnavailable.
    """
    rows, known = _waiting(gate), set(waiters(gate))
    missing = [row for row in rows if str(row[0]) not in known]
    strangers = known.difference(str(id) for id, *_ in rows)
    if seen is not None:
        strangers, found = strangers & seen, strangers
        seen.clear()
        seen.update(found - strangers)
    _wait_again(gate, missing)
    if rows:
        # Which gates are looked at is known in Redis alone.
        note_waiting(gate)
    if strangers:
        forget_waiters(gate, sorted(strangers))
    return Drift(len(missing), len(strangers))


def _waiting(gate: str) -> list[tuple[Any, ...]]:
    """Return id, own limit and priority of each task whose row says that it waits at the gate."""
    return page_of(rows_of(TaskRecord).waiting_at_gate(gate).order_by("id"), "queue_limit", "priority", size=None)


def next_without(gate: str, full: Collection[str], tried: Collection[str], most: int) -> list[str]:
    """Return the ids of the tasks that are next in the line of a gate and need none of some other gates.

    full: those. tried: ids that are not wanted. Raises: django.db.Error.
    """
    rows = rows_of(TaskRecord).waiting_at_gate(gate).exclude(of_gates(full))
    rows = rows.exclude(id__in=[UUID(id) for id in tried if ROW_ID.fullmatch(id)])
    return [str(id) for id in rows.order_by("-priority", "id").values_list("id", flat=True)[:most]]


def _wait_again(gate: str, rows: Sequence[tuple[Any, ...]]) -> None:
    wait(gate, [TaskRecord(id=id, queue_limit=limit, priority=priority, backend="") for id, limit, priority in rows])


def _is_outdated(gate: str, row: Gate | None) -> bool:
    """Whether Redis has another limit or other expected seconds than the Gate row, or does not know of a pause."""
    limit, expected, paused = scripts.send(client(), "hmget", keys(gate).meta, "limit", "expected_seconds", "paused")
    known = (entries.whole(limit) or 0, entries.number(expected) or 0.0) if limit else None
    return known != ((row.limit, row.expected_seconds) if row else None) or (paused is not None) != is_paused(gate)


def _live(gate: str, *columns: str) -> list[tuple[Any, ...]]:
    """Return id and some columns of each task that holds a slot by its row."""
    parts = rows_of(TaskRecord).in_two_parts_at(gate)
    return [row for rows in parts for row in page_of(rows.filter(HOLDS_SLOT).order_by("id"), *columns, size=None)]


def _holders(gate: str) -> list[str]:
    return [str(id) for (id,) in _live(gate)]


# --- How many slots a gate needs.


def slots_taken(gate: str) -> int:
    """Return how many tasks hold a slot of a gate, by their rows."""
    return sum(rows.filter(HOLDS_SLOT).count() for rows in rows_of(TaskRecord).in_two_parts_at(gate))


# --- How long a task of a gate without a row is expected to take, for the row that a person makes.


def expected_seconds_of(gate: str) -> float:
    """Return what the newest queued or running task of a gate says, else the tasks declared with it, else the setting.

    Redis knows it only of a gate with a row. Of several declarations the longest counts: a caller that comes back too
    early is refused again.
    """
    live = rows_of(TaskRecord).at_gate(gate).filter(state__in=LIVE_STATES, expected_seconds__isnull=False)
    found = live.order_by("-id").values_list("expected_seconds", flat=True).first()
    if found is not None:
        return float(found)
    load_task_modules()
    declared = [
        (str(source), each.expected_seconds)
        for each in every_task()
        for source in (each.gate if isinstance(each.gate, tuple) else (each.gate,))
        if each.expected_seconds and isinstance(source, str)
    ]
    exact = [seconds for source, seconds in declared if source == gate]
    formatted = [seconds for source, seconds in declared if _may_name(source, gate)]
    wanted = exact or formatted
    return float(max(each for each in wanted if each)) if wanted else conf.current().expected_seconds


def _may_name(template: str, gate: str) -> bool:
    """Return whether a format such as "{model}-slow" can give this name."""
    fixed = re.split(r"\{[^{}]*\}", template)
    return len(fixed) > 1 and re.fullmatch(".+".join(map(re.escape, fixed)), gate) is not None
