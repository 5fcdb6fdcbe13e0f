"""Admit tasks to gates: acquire, confirm and release their slots.

The slot of a new task is acquired before its row is committed, and provisional: it expires after a minute, since only
the process that has it knows the row. `confirm` makes it last after the commit. That of a retry lasts at once: its row
is known, and whatever is lost after the commit, no other task may get the slot. The audit takes it back where the
commit never came. A gate that was not built since Redis lost its memory is built from the rows before it admits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

from django.template.defaultfilters import pluralize

from .. import conf
from ..broker import clients, entries, scripts
from ..broker.reading import read, side_by_side
from ..core.aliases import client_factory_of
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..core.several_gates import GateLimit
from ..exceptions import BrokerUnavailable, GateUnavailable, QueueFull, UnknownGate
from ..models import FailureReason, TaskRecord
from ..storage.rollbacks import release_rolled_back
from .auditor import build
from .members import (
    IDS_PER_CALL,
    KEPT_SECONDS,
    client,
    forget_waiters,
    keys,
    note_waiting,
    reading_place,
    release_runs,
    wait,
)

logger = get_logger("django_asyncq.gates")

# Nobody knows when a person resumes a gate; a client that asks each half minute does no harm.
PAUSED_RETRY_SECONDS = 30


# "all": all or none. "partial": as many as possible. "wait": the same, and those refused wait for a slot.
Mode = Literal["all", "partial", "wait"]


class Admission(NamedTuple):
    """What gates answered. refused: ids without slots → the gate that refused; joined: those of them that wait there.

    Of the first gate that is not open: limit (0 or less: all are open), occupancy, expected seconds, and how many tasks
    waited there before this call.
    """

    refused: dict[str, str]
    joined: set[str]
    limit: int
    occupancy: int
    expected_seconds: float
    waiting: int


def acquire(
    records: Sequence[TaskRecord], *, partial: bool = False, again: bool = False, timed: bool = False
) -> set[UUID]:
    """Acquire the slots of each task that names gates; return the ids refused (only with `partial`).

    A task gets a slot of each of its gates, or none. One that is refused stands at the gate that refused it.
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
    for of_tasks, group in _asked_together(records, _all_gates):
        try:
            admission = admit(of_tasks, group, mode=mode, seconds=conf.PROVISIONAL_SECONDS, most=group[0].max_waiting)
        except GateUnavailable as error:
            count, text = len(group), "gate %s: %d task%s will wait until Redis can be asked: %s"
            logger.warning(text, error.gate, count, pluralize(count), error, extra=log_extra(*group))
            admission = Admission({}, {str(record.id) for record in group}, 0, 0, 0.0, 0)
        refused |= _stand_where_refused(group, admission) if admission.refused else set()
        for record in group:
            if str(record.id) in admission.joined:
                record.reason = FailureReason.GATE_FULL
                refused.discard(record.id)
    return refused


def _stand_where_refused(group: Iterable[TaskRecord], admission: Admission) -> set[UUID]:
    """Have each refused task stand at the gate that refused it; return their ids."""
    refused = [record for record in group if str(record.id) in admission.refused]
    for record in refused:
        record.stand_at(admission.refused[str(record.id)])
    return {record.id for record in refused}


def confirm(records: Sequence[TaskRecord], *, again: bool = False) -> set[UUID]:
    """Make the slots of committed tasks last; return the ids whose slot is lost and whose gate is full.

    A task that has lost a slot gets another one while the gate has a free slot, or else waits at the gate: it stands
    there in memory, and the caller writes that into its row.
    again: they may have run before; a late release by such a run then leaves the slot alone.
    Raises: GateUnavailable.
    """
    return _admit_groups(records, mode="wait", seconds=0, again=again, must_exist=False)


def _admit_groups(
    records: Sequence[TaskRecord], *, mode: Mode, seconds: int, again: bool, must_exist: bool
) -> set[UUID]:
    """Ask the gates to admit their tasks. must_exist: whether a gate without a limit is an error."""
    refused: set[UUID] = set()
    for of_tasks, group in _asked_together(records, _all_gates):
        rest, admission = of_tasks, None
        while rest and admission is None:
            try:
                admission = admit(rest, group, mode=mode, seconds=seconds, again=again)
            except UnknownGate as error:
                if must_exist:
                    raise
                # The limit was removed after the tasks had been admitted; without a limit no task has to wait.
                count, note = len(group), "%d task%s admitted without a slot: %s"
                logger.warning(note, count, pluralize(count), error, extra=log_extra(*group))
                rest = tuple(each for each in rest if each.name != error.gate)
        if admission is not None and admission.refused:
            refused |= _stand_where_refused(group, admission)
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
    for gate, group in _asked_together(waited, _line):
        try:
            wait(gate.name, group, is_next=True)
        except BrokerUnavailable as error:
            text = "gate %s: cannot hand freed slots to the tasks that wait (the leader does it later): %s"
            logger.warning(text, gate.name, error)
    # Afterwards: a released slot is announced, and the leader then looks at those that are next.
    _release_groups(records, lambda record: "")


def wait_again(records: Iterable[TaskRecord]) -> None:
    """Let committed tasks wait whose rows say so; one that waits already keeps its place. Raises: GateUnavailable."""
    for gate, group in _asked_together(records, _line):
        try:
            wait(gate.name, group)
        except BrokerUnavailable as error:
            raise GateUnavailable(gate.name, str(error).rstrip(".")) from error


def release_deleted(records: Sequence[TaskRecord]) -> None:
    """Release the slots of deleted tasks, whichever run holds them, and forget those that waited for one."""
    _release_groups(records, lambda record: "")
    forget_waiting([record for record in records if record.retry_at is not None or record.waits_for_slot])


def forget_waiting(records: Iterable[TaskRecord]) -> None:
    """Forget tasks that will not be retried, if they wait at a gate. Never raises for Redis.

    At each of their gates: the leader may have moved one to another line since its row was read.
    """
    for gate, group in _asked_together(records, _each_gate):
        try:
            forget_waiters(gate.name, [str(record.id) for record in group], group[0].backend)
        except BrokerUnavailable as error:
            logger.warning("gate %s: closed tasks still wait; the leader will forget them: %s", gate.name, error)


def _release_groups(records: Iterable[TaskRecord], fence_of: Callable[[TaskRecord], str]) -> None:
    for gate, group in _asked_together(records, _each_gate):
        try:
            release_runs(gate.name, [(str(record.id), fence_of(record)) for record in group], group[0].backend)
        except BrokerUnavailable as error:
            name, count = gate.name, len(group)
            logger.warning(
                "gate %s: release of %d slot%s failed; the audit will retry: %s", name, count, pluralize(count), error
            )


# --- Group tasks for one call: those of one gate, or of the same gates. Tasks with other limits are apart, because a
# gate without a row admits them by these limits, and so are those whose slots another client reaches.

T = TypeVar("T")


def _asked_together(
    records: Iterable[TaskRecord], places_of: Callable[[TaskRecord], Sequence[T]]
) -> Iterator[tuple[T, list[TaskRecord]]]:
    """Yield each place and the tasks that have it. places_of: one of the next three."""
    groups: dict[tuple[T, int | None, Any], list[TaskRecord]] = {}
    for record in records:
        if record.gate:
            for place in places_of(record):
                key = place, record.max_waiting, client_factory_of(record.backend)
                groups.setdefault(key, []).append(record)
    for key, group in groups.items():
        yield key[0], group


def _all_gates(record: TaskRecord) -> tuple[tuple[GateLimit, ...]]:
    """All gates at once: a task gets all its slots or none."""
    return (record.gates,)


def _each_gate(record: TaskRecord) -> tuple[GateLimit, ...]:
    """Each gate by itself: a slot is released, and a task forgotten, gate by gate."""
    return record.gates


def _line(record: TaskRecord) -> tuple[GateLimit]:
    """The gate at which the task waits, if it waits."""
    return (GateLimit(record.gate, record.queue_limit),)


# --- Ask gates.


def admit(
    of_tasks: Sequence[GateLimit],
    records: Sequence[TaskRecord],
    *,
    mode: Mode,
    seconds: int,
    again: bool = False,
    most: int | None = None,
) -> Admission:
    """Ask gates for slots that last `seconds` (0: the full time); build a gate first when needed.

    of_tasks: the gates of all these tasks, by name. records: reached by one client. again: the tasks are retried. most:
    how many tasks may wait at a gate; None: of these only those of the mode "wait".
    Raises: QueueFull (in the mode "all"), UnknownGate, GateUnavailable.
    """
    ask: Callable[..., Admission] = _admit_some
    if len(of_tasks) > 1 and clients.is_cluster(client(records[0].backend)):
        ask = _admit_in_turn
    try:
        found = Admission({}, set(), 0, 0, 0.0, 0)
        for start in range(0, len(records), IDS_PER_CALL):
            part = records[start : start + IDS_PER_CALL]
            more = ask(of_tasks, part, mode=mode, seconds=seconds, again=again, most=most)
            for gate in {more.refused[id] for id in more.joined} - {found.refused[id] for id in found.joined}:
                note_waiting(gate, records[0].backend)
            found = more._replace(refused=found.refused | more.refused, joined=found.joined | more.joined)
        return found
    except BrokerUnavailable as error:
        raise GateUnavailable(of_tasks[0].name, str(error).rstrip(".")) from error


def _admit_in_turn(
    of_tasks: Sequence[GateLimit],
    records: Sequence[TaskRecord],
    *,
    mode: Mode,
    seconds: int,
    again: bool,
    most: int | None,
) -> Admission:
    """Ask one gate after the other, where they are on several nodes of a cluster, so that no script reaches them all.

    What was acquired is given back when a later gate refuses. When one raises, the caller does that, as for a task
    of one gate; else the slots expire, or the audit finds them.
    """
    refused, joined, rest = dict[str, str](), set[str](), list(records)
    places, answers = _places_in_line(records), list[Admission]()
    for number, gate in enumerate(of_tasks):
        answer = _admit_some((gate,), rest, mode=mode, seconds=seconds, again=again, most=most, places=places)
        answers.append(answer)
        if not answer.refused:
            continue
        refused |= answer.refused
        joined |= answer.joined
        without = list(answer.refused)
        for other in (*of_tasks[:number], *of_tasks[number + 1 :]):
            release_runs(other.name, [(id, "") for id in without], records[0].backend)
            if answer.joined:
                forget_waiters(other.name, list(answer.joined), records[0].backend)
        rest = [record for record in rest if str(record.id) not in answer.refused]
        if not rest:
            break
    first = next((each for each in answers if each.limit > 0), answers[0])
    return first._replace(refused=refused, joined=joined)


def _places_in_line(records: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the place that each task has in the line where it stands: at the other gates it has the same."""
    waiting = [record for record in records if record.reason == FailureReason.GATE_FULL]
    readers = [reading_place(record.gate, str(record.id), record.backend) for record in waiting]
    found = read("producer", side_by_side(*readers))
    return {str(record.id): place for record, place in zip(waiting, found, strict=True) if place}


def _admit_some(
    of_tasks: Sequence[GateLimit],
    records: Sequence[TaskRecord],
    *,
    mode: Mode,
    seconds: int,
    again: bool,
    most: int | None,
    places: Mapping[str, str] = MappingProxyType({}),
) -> Admission:
    at, expected_seconds = client(records[0].backend), records[0].expected_seconds or conf.current().expected_seconds
    bound = "" if most is None else most
    arguments: list[Any] = [seconds, mode, conf.unasked_seconds(), KEPT_SECONDS, bound, len(of_tasks)]
    of_gates: list[str] = []
    for gate in of_tasks:
        of_gates += keys(gate.name)
        arguments += ["" if gate.limit is None else gate.limit, expected_seconds]
    for record in records:
        id = str(record.id)
        arguments += [id, (record.fence or "") if again else "", record.priority, places.get(id, "")]
    reply = scripts.run("gate_acquire", at, of_gates, arguments)
    while reply[0] == b"unbuilt":
        build(of_tasks[reply[1] - 1].name)
        reply = scripts.run("gate_acquire", at, of_gates, arguments)
    word, gate, known_limit = reply[0], of_tasks[reply[1] - 1].name, entries.whole(reply[2]) or 0
    occupancy, expected, waiting = entries.count(reply[3]), entries.number(reply[4]) or 0.0, entries.count(reply[5])
    if word == b"undefined":
        raise UnknownGate(gate)
    if word in (b"full", b"paused"):
        raise _full(gate, known_limit, occupancy, expected, waiting, paused=word == b"paused")
    without = list(zip(entries.texts(reply[6::3]), reply[7::3], reply[8::3], strict=True))
    refused = {id: of_tasks[number - 1].name for id, number, _ in without}
    return Admission(
        refused, {id for id, _, waits in without if waits == b"1"}, known_limit, occupancy, expected, waiting
    )


def _full(gate: str, limit: int, occupancy: int, expected_seconds: float, waiting: int, *, paused: bool) -> QueueFull:
    seconds = PAUSED_RETRY_SECONDS if paused else retry_after(limit, expected_seconds, waiting)
    return QueueFull(gate=gate, limit=limit, occupancy=occupancy, waiting=waiting, retry_after=seconds, paused=paused)


def retry_after(limit: int, expected_seconds: float, waiting: int = 0) -> int:
    """Estimate after how many seconds a full gate has a free slot for a new task.

    `limit` tasks finish per `expected_seconds`. waiting: tasks that get a slot before.
    """
    return max(1, math.ceil(expected_seconds * (waiting + 1) / max(limit, 1)))
