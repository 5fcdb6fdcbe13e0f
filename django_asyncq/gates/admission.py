"""Admit tasks to gates: acquire, confirm and release their slots.

A slot that is acquired before its row is committed is provisional: it expires after a minute. `confirm` makes it last
after the commit. A gate that was not built since Redis lost its memory is built from the rows before it admits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from django.template.defaultfilters import pluralize

from .. import conf
from ..broker import replies, scripts
from ..exceptions import BrokerUnavailable, GateUnavailable, QueueFull, UnknownGate
from ..guard import get_logger
from ..models import TaskRecord
from .audit import build
from .members import IDS_PER_CALL, client, keys, release_runs

logger = get_logger("django_asyncq.gates")


class Admission(NamedTuple):
    """What a gate answered. refused: ids without a slot. limit: 0 or less means that the gate is open."""

    refused: set[str]
    limit: int
    occupancy: int
    expected_seconds: float


def acquire(
    records: Sequence[TaskRecord], *, partial: bool = False, again: bool = False, timed: bool = False
) -> set[UUID]:
    """Acquire a provisional slot for each task that names a gate; return the ids refused (only with `partial`).

    again: the tasks are retried. A late release by one of their earlier runs then leaves the new slot alone.
    timed: the tasks are retried because their time has come. A gate without a limit then admits them: no caller
        could handle the error.
    Raises: QueueFull when a gate has too few free slots, UnknownGate, GateUnavailable. The caller then releases the
    slots acquired so far, with `release_uncommitted`.
    """
    seconds = conf.current().provisional_seconds
    return _admit_groups(records, partial=partial, seconds=seconds, again=again, must_exist=not timed)


def confirm(records: Sequence[TaskRecord]) -> set[UUID]:
    """Make the slots of committed tasks last; return the ids whose slot is lost and whose gate is full.

    A task that has lost its slot gets another one while the gate has a free slot. Raises: GateUnavailable.
    """
    return _admit_groups(records, partial=True, seconds=0, again=False, must_exist=False)


def _admit_groups(
    records: Sequence[TaskRecord], *, partial: bool, seconds: int, again: bool, must_exist: bool
) -> set[UUID]:
    """Ask each gate to admit its tasks. must_exist: whether a gate without a limit is an error."""
    refused: set[UUID] = set()
    for gate, group in by_gate(records).items():
        try:
            admission = admit(gate, group, partial=partial, seconds=seconds, again=again)
        except UnknownGate as error:
            if must_exist:
                raise
            # The limit was removed after the tasks had been admitted; without a limit no task has to wait.
            count = len(group)
            logger.warning("%d task%s admitted without a slot: %s", count, pluralize(count), error)
            continue
        if admission.refused:
            refused |= {record.id for record in group if str(record.id) in admission.refused}
    return refused


def release(records: Iterable[TaskRecord]) -> None:
    """Release the slots of finished runs, except slots that a retry has acquired since.

    Slots that cannot be released because Redis is unreachable are released by the audit.
    """
    _release_groups(records, lambda record: str(record.fence))


def release_uncommitted(records: Iterable[TaskRecord]) -> None:
    """Release the slots of tasks whose change to QUEUED will not be committed."""
    _release_groups(records, lambda record: "")


def release_deleted(records: Iterable[TaskRecord]) -> None:
    """Release the slots of deleted tasks, whichever run holds them."""
    _release_groups(records, lambda record: "")


def _release_groups(records: Iterable[TaskRecord], fence_of: Callable[[TaskRecord], str]) -> None:
    for gate, group in by_gate(records).items():
        try:
            release_runs(gate, [(str(record.id), fence_of(record)) for record in group])
        except BrokerUnavailable as error:
            count = len(group)
            logger.warning(
                "gate %s: release of %d slot%s failed; the audit will retry: %s", gate, count, pluralize(count), error
            )


def by_gate(records: Iterable[TaskRecord]) -> dict[str, list[TaskRecord]]:
    """Group tasks by gate, without those that name none."""
    groups: dict[str, list[TaskRecord]] = {}
    for record in records:
        if record.gate:
            groups.setdefault(record.gate, []).append(record)
    return groups


def admit(gate: str, records: Sequence[TaskRecord], *, partial: bool, seconds: int, again: bool = False) -> Admission:
    """Ask one gate for slots that last `seconds` (0: the full time); build the gate first when needed.

    again: the tasks are retried. Raises: QueueFull (not with `partial`), UnknownGate, GateUnavailable.
    """
    try:
        admission = _admit_some(gate, records[:IDS_PER_CALL], partial=partial, seconds=seconds, again=again)
        for start in range(IDS_PER_CALL, len(records), IDS_PER_CALL):
            part = records[start : start + IDS_PER_CALL]
            more = _admit_some(gate, part, partial=partial, seconds=seconds, again=again)
            admission = more._replace(refused=admission.refused | more.refused)
        return admission
    except BrokerUnavailable as error:
        raise GateUnavailable(gate, str(error).rstrip(".")) from error


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
    reply = scripts.run("gate_acquire", client(), keys(gate), arguments)
    while reply[0] == b"unbuilt":
        build(gate)
        reply = scripts.run("gate_acquire", client(), keys(gate), arguments)
    word, known_limit, occupancy = reply[0], replies.whole(reply[1]) or 0, replies.count(reply[2])
    expected = replies.number(reply[3]) or 0.0
    if word == b"undefined":
        raise UnknownGate(gate)
    if word == b"full":
        raise QueueFull(
            gate=gate, limit=known_limit, occupancy=occupancy, retry_after=retry_after(known_limit, expected)
        )
    return Admission(set(replies.texts(reply[4:])), known_limit, occupancy, expected)


def retry_after(limit: int, expected_seconds: float) -> int:
    """Estimate after how many seconds a full gate has a free slot: `limit` tasks finish per `expected_seconds`."""
    return max(1, math.ceil(expected_seconds / max(limit, 1)))
