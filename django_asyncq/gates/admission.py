"""Admit tasks to gates: acquire, confirm and release their slots.

The slot of a new task is acquired before its row is committed, and provisional: it expires after a minute, since only
the process that has it knows the row. `confirm` makes it last after the commit. That of a retry lasts at once: its row
is known, and whatever is lost after the commit, no other task may get the slot. The audit takes it back where the
commit never came. A gate that was not built since Redis lost its memory is built from the rows before it admits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID

from django.template.defaultfilters import pluralize

from .. import conf
from ..broker import entries, scripts
from ..core.aliases import client_factory_of
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..exceptions import BrokerUnavailable, GateUnavailable, QueueFull, UnknownGate
from ..models import FailureReason, TaskRecord
from ..storage.rollbacks import release_rolled_back
from .auditor import build
from .members import IDS_PER_CALL, KEPT_SECONDS, client, forget_waiters, keys, note_waiting, release_runs, wait

logger = get_logger("django_asyncq.gates")

# Nobody knows when a person resumes a gate; a client that asks each half minute does no harm.
PAUSED_RETRY_SECONDS = 30


# "all": all or none. "partial": as many as possible. "wait": the same, and those refused wait for a slot.
Mode = Literal["all", "partial", "wait"]


class Admission(NamedTuple):
    """What a gate answered. refused: ids without a slot; joined: those of them that wait for one.

    limit: 0 or less means that the gate is open. waiting: tasks that waited at the gate before this call.
    """

    refused: set[str]
    joined: set[str]
    limit: int
    occupancy: int
    expected_seconds: float
    waiting: int


def acquire(
    records: Sequence[TaskRecord], *, partial: bool = False, again: bool = False, timed: bool = False
) -> set[UUID]:
    """Acquire a slot for each task that names a gate; return the ids refused (only with `partial`).

    A new task that may wait gets a place at its gate when there is no slot, and the reason GATE_FULL; a delayed one
    asks for its slot when its time has come.
    again: the tasks are retried, so their slots are not provisional. A late release by one of their earlier runs then
        leaves the new slot alone.
    timed: the tasks are retried because their time has come. A gate without a limit then admits them: no caller
        could handle the error. Those refused wait at the gate.
    Raises: QueueFull when a gate is paused or has too few free slots, UnknownGate, GateUnavailable. The caller then
    releases the slots acquired so far, with `release_uncommitted`.
    """
    if [record for record in records if record.gate]:
        release_rolled_back()
    seconds = 0 if again else conf.PROVISIONAL_SECONDS
    mode: Mode = "wait" if timed else "partial" if partial else "all"
    joining = [] if again else [record for record in records if record.max_waiting is not None and record.gate]
    if not joining:
        return _admit_groups(records, mode=mode, seconds=seconds, again=again, must_exist=not timed)
    rest = [record for record in records if record.max_waiting is None]
    refused = _admit_groups(rest, mode=mode, seconds=seconds, again=False, must_exist=True)
    for record in filter(_asks_later, joining):
        record.reason, record.retry_at = FailureReason.GATE_FULL, record.run_after
        if "run_after" in record.delays:
            record.delays = {**record.delays, "retry_at": record.delays["run_after"]}
    return refused | _join([record for record in joining if not _asks_later(record)], mode)


def _asks_later(record: TaskRecord) -> bool:
    """Whether a new task that may wait asks its gate when its time has come.

    A remote one asks at once: another program moves it then.
    """
    return not record.is_remote and (record.run_after is not None or "run_after" in record.delays)


def _join(records: Sequence[TaskRecord], mode: Mode) -> set[UUID]:
    """Acquire slots for new tasks that may wait for them; return the ids that may not even wait.

    Where Redis cannot be asked, they all wait; the leader lets them in when it can be asked again.
    """
    refused: set[UUID] = set()
    for gate, group in _asked_together(records):
        try:
            admission = admit(gate, group, mode=mode, seconds=conf.PROVISIONAL_SECONDS, most=group[0].max_waiting)
        except GateUnavailable as error:
            count, text = len(group), "gate %s: %d task%s will wait until Redis can be asked: %s"
            logger.warning(text, gate, count, pluralize(count), error, extra=log_extra(*group))
            waiting = {str(record.id) for record in group}
        else:
            waiting = admission.joined
            refused |= {record.id for record in group if str(record.id) in admission.refused - waiting}
        for record in group:
            if str(record.id) in waiting:
                record.reason = FailureReason.GATE_FULL
    return refused


def confirm(records: Sequence[TaskRecord], *, again: bool = False) -> set[UUID]:
    """Make the slots of committed tasks last; return the ids whose slot is lost and whose gate is full.

    A task that has lost its slot gets another one while the gate has a free slot, or else waits at the gate.
    again: they may have run before; a late release by such a run then leaves the slot alone.
    Raises: GateUnavailable.
    """
    return _admit_groups(records, mode="wait", seconds=0, again=again, must_exist=False)


def _admit_groups(
    records: Sequence[TaskRecord], *, mode: Mode, seconds: int, again: bool, must_exist: bool
) -> set[UUID]:
    """Ask each gate to admit its tasks. must_exist: whether a gate without a limit is an error."""
    refused: set[UUID] = set()
    for gate, group in _asked_together(records):
        try:
            admission = admit(gate, group, mode=mode, seconds=seconds, again=again)
        except UnknownGate as error:
            if must_exist:
                raise
            # The limit was removed after the tasks had been admitted; without a limit no task has to wait.
            count = len(group)
            text = "%d task%s admitted without a slot: %s"
            logger.warning(text, count, pluralize(count), error, extra=log_extra(*group))
            continue
        if admission.refused:
            refused |= {record.id for record in group if str(record.id) in admission.refused}
    return refused


def release(records: Iterable[TaskRecord]) -> None:
    """Release the slots of finished runs, except slots that a retry has acquired since.

    Slots that cannot be released because Redis is unreachable are released by the audit.
    """
    _release_groups(records, lambda record: str(record.fence))


def release_uncommitted(records: Sequence[TaskRecord]) -> None:
    """Release the slots, and the places in line, of new tasks that will not be committed."""
    _release_groups(records, lambda record: "")
    forget_waiting([record for record in records if record.waits_for_slot])


def give_back(records: Sequence[TaskRecord]) -> None:
    """Release the slots of tasks that are as before after all. Those that waited at their gate are next again."""
    waited = [record for record in records if record.reason == FailureReason.GATE_FULL]
    for gate, group in _asked_together(waited):
        try:
            wait(gate, group, is_next=True)
        except BrokerUnavailable as error:
            text = "gate %s: cannot hand freed slots to the tasks that wait (the leader does it later): %s"
            logger.warning(text, gate, error)
    # Afterwards: a released slot is announced, and the leader then looks at those that are next.
    _release_groups(records, lambda record: "")


def wait_again(records: Iterable[TaskRecord]) -> None:
    """Let committed tasks wait whose rows say so; one that waits already keeps its place. Raises: GateUnavailable."""
    for gate, group in _asked_together(records):
        try:
            wait(gate, group)
        except BrokerUnavailable as error:
            raise GateUnavailable(gate, str(error).rstrip(".")) from error


def release_deleted(records: Sequence[TaskRecord]) -> None:
    """Release the slots of deleted tasks, whichever run holds them, and forget those that waited for one."""
    _release_groups(records, lambda record: "")
    forget_waiting([record for record in records if record.retry_at is not None or record.waits_for_slot])


def forget_waiting(records: Iterable[TaskRecord]) -> None:
    """Forget tasks that will not be retried, if they wait at their gate. Never raises for Redis."""
    for gate, group in _asked_together(records):
        try:
            forget_waiters(gate, [str(record.id) for record in group], group[0].backend)
        except BrokerUnavailable as error:
            logger.warning("gate %s: closed tasks still wait; the leader will forget them: %s", gate, error)


def _release_groups(records: Iterable[TaskRecord], fence_of: Callable[[TaskRecord], str]) -> None:
    for gate, group in _asked_together(records):
        try:
            release_runs(gate, [(str(record.id), fence_of(record)) for record in group], group[0].backend)
        except BrokerUnavailable as error:
            count = len(group)
            logger.warning(
                "gate %s: release of %d slot%s failed; the audit will retry: %s", gate, count, pluralize(count), error
            )


def _asked_together(records: Iterable[TaskRecord]) -> Iterator[tuple[str, list[TaskRecord]]]:
    """Yield each gate and its tasks, apart by the limits that they bring along: without a Gate row it admits them.

    Apart too by what makes the client that reaches the slots.
    """
    groups: dict[tuple[str, int | None, int | None, Any], list[TaskRecord]] = {}
    for record in records:
        if record.gate:
            place = record.gate, record.queue_limit, record.max_waiting, client_factory_of(record.backend)
            groups.setdefault(place, []).append(record)
    for place, group in groups.items():
        yield place[0], group


def admit(
    gate: str,
    records: Sequence[TaskRecord],
    *,
    mode: Mode,
    seconds: int,
    again: bool = False,
    most: int | None = None,
) -> Admission:
    """Ask one gate for slots that last `seconds` (0: the full time); build the gate first when needed.

    records: reached by one client. again: the tasks are retried. most: how many tasks may wait there; None: of these
    only those of the mode "wait".
    Raises: QueueFull (in the mode "all"), UnknownGate, GateUnavailable.
    """
    try:
        found = Admission(set(), set(), 0, 0, 0.0, 0)
        for start in range(0, len(records), IDS_PER_CALL):
            part = records[start : start + IDS_PER_CALL]
            more = _admit_some(gate, part, mode=mode, seconds=seconds, again=again, most=most)
            if more.joined and not found.joined:
                note_waiting(gate, records[0].backend)
            found = more._replace(refused=found.refused | more.refused, joined=found.joined | more.joined)
        return found
    except BrokerUnavailable as error:
        raise GateUnavailable(gate, str(error).rstrip(".")) from error


def _admit_some(
    gate: str, records: Sequence[TaskRecord], *, mode: Mode, seconds: int, again: bool, most: int | None
) -> Admission:
    at, limit = client(records[0].backend), records[0].queue_limit
    arguments = [
        seconds,
        "" if limit is None else limit,
        records[0].expected_seconds or conf.current().expected_seconds,
        mode,
        conf.unasked_seconds(),
        KEPT_SECONDS,
        "" if most is None else most,
    ]
    for record in records:
        arguments += [str(record.id), (record.fence or "") if again else "", record.priority]
    reply = scripts.run("gate_acquire", at, keys(gate), arguments)
    while reply[0] == b"unbuilt":
        build(gate)
        reply = scripts.run("gate_acquire", at, keys(gate), arguments)
    word, known_limit, occupancy = reply[0], entries.whole(reply[1]) or 0, entries.count(reply[2])
    expected, waiting = entries.number(reply[3]) or 0.0, entries.count(reply[4])
    if word == b"undefined":
        raise UnknownGate(gate)
    if word in (b"full", b"paused"):
        raise _full(gate, known_limit, occupancy, expected, waiting, paused=word == b"paused")
    without, joined = entries.texts(reply[6:]), entries.count(reply[5])
    return Admission(set(without), set(without[:joined]), known_limit, occupancy, expected, waiting)


def _full(gate: str, limit: int, occupancy: int, expected_seconds: float, waiting: int, *, paused: bool) -> QueueFull:
    seconds = PAUSED_RETRY_SECONDS if paused else retry_after(limit, expected_seconds, waiting)
    return QueueFull(gate=gate, limit=limit, occupancy=occupancy, waiting=waiting, retry_after=seconds, paused=paused)


def retry_after(limit: int, expected_seconds: float, waiting: int = 0) -> int:
    """Estimate after how many seconds a full gate has a free slot for a new task.

    `limit` tasks finish per `expected_seconds`. waiting: tasks that get a slot before.
    """
    return max(1, math.ceil(expected_seconds * (waiting + 1) / max(limit, 1)))
