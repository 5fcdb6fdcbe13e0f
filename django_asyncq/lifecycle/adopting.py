"""Run messages of other programs: each gets a row at its first claim, and is then a task like any other.

Such a message was not enqueued here, so nothing could refuse it: its gate slot is acquired now, and a message for which
the gate is full goes back without a row. What no task of ours runs goes back too, for other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connections

from .. import conf, failpoints, gates
from ..broker import Broker, Lease, foreign, redis_clock
from ..broker.foreign import ToAdopt, ToRestore
from ..broker.groups import Groups, MemberToAdopt, Taken
from ..broker.message import TaskMessage
from ..broker.rejected import MOST_BYTES, rejected_document
from ..definitions import wire_names
from ..definitions.batches import group_of_others
from ..definitions.calls import gate_name
from ..definitions.headers import checked_headers
from ..definitions.names import ROW_ID, uuid7
from ..definitions.task_options import MOST_ATTEMPTS
from ..definitions.wire_payload import call_of
from ..durations import LONGEST
from ..exceptions import BrokerUnavailable, GateUnavailable, InvalidArguments, InvalidOption
from ..guard import attempt, class_name, get_logger, is_a
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..prefixes import aliases_beside
from ..runs import log_failed
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.inserting import insert_missing
from ..storage.routing import writing_database
from .dispatching import park_lost
from .enqueueing import admit
from .events import announce
from .failures import append_error
from .messages import message_of
from .ownership import Rowless, is_entry_of, load_rows

logger = get_logger("django_asyncq.lifecycle")

# For that long others can take what goes back, and so often a worker looks at it.
RESTORED_SECONDS = 5
# And how long it is then left to other programs, whose servers ask once a second.
LEFT_SECONDS = 5
# Nothing waits for longer: Python's own waits end at some 290 years.
LONGEST_SECONDS = LONGEST.total_seconds()
# What was logged once: (alias, queue, why). A queue may hold a million of one kind.
MOST_LOGGED = 1_000
_logged: set[tuple[str, str, str]] = set()


class Candidate(NamedTuple):
    """A message that gets a row. lease: with a raised fence. record: not inserted yet. error: why it cannot run."""

    lease: Lease
    record: TaskRecord
    error: InvalidArguments | None


def settle_rowless(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rowless: Sequence[Rowless], *, may_adopt: bool
) -> list[Lease]:
    """Adopt, restore or reject what a worker has claimed and what has no row; return the leases of those adopted.

    | check    | `wire_names`: a task of the alias has declared the type; `task_state_changing`: the gate         |
    | row      | INSERT as QUEUED, or as FAILED where the function cannot be called with the payload               |
    | Redis    | the id of the row in the hash, before the INSERT; scheduled, archived or rejected for all others |
    | announce | `task_state_changed`                                                                             |

    If we die before the INSERT, the next claim inserts the row under the id that the hash names; if we die after it,
    the lease expires and the reconciler requeues the task. Raises: BrokerUnavailable, django.db.Error.
    """
    by_id = {lease.id: lease for lease in leases}
    _reject(broker, queue, worker_id, [(by_id[each.id], each) for each in rowless if each.reason])
    others = [each for each in rowless if not each.reason]
    adoptable = [each for each in others if each.task is not None and may_adopt]
    back = [each for each in others if each.task is None or not may_adopt]
    _restore(broker, queue, worker_id, [(by_id[each.id], each) for each in back])
    return _adopt(broker, queue, worker_id, by_id, adoptable) if adoptable else []


def _adopt(
    broker: Broker, queue: str, worker_id: str, leases: Mapping[str, Lease], adoptable: Sequence[Rowless]
) -> list[Lease]:
    named = [ToAdopt(leases[each.id], str(uuid7()), each.row if _is_wrong(each, queue) else "") for each in adoptable]
    by_id = {each.id: each for each in adoptable}
    candidates = [
        _candidate(broker.alias, queue, by_id[adopted.lease.id], adopted.lease, UUID(adopted.row))
        for adopted in foreign.adopt(broker, queue, worker_id, named)
    ]
    found = _give_rows(candidates)
    if found.refused:
        back = [ToRestore(each.lease.id, each.lease.fence) for each in found.refused]
        foreign.restore(broker, queue, worker_id, back, delay_seconds=RESTORED_SECONDS, patience_seconds=0)
    _archive(broker, queue, worker_id, found.bad)
    return [each.lease for each in found.good]


def adopt_members(broker: Broker, queue: str, taken: Taken, rowless: Sequence[Rowless]) -> None:
    """Give rows to members of another program's group that were taken, and that a task with `batch` runs.

    | check    | `wire_names` and `batch` of the task; `task_state_changing`: the gate                             |
    | row      | INSERT as QUEUED, with the group; or as FAILED where the function cannot be called with the payload |
    | Redis    | the id of the row in the hash, before the INSERT; nothing else: the caller takes the members       |
    | announce | `task_state_changed`                                                                               |

    If we die, the members go back to their group, and the process that takes them next finds the rows. What gets no
    row stays as it is. Raises: BrokerUnavailable, django.db.Error.
    """
    known = {each.id: found for each in rowless if (found := batched_by(broker, each)) is not None}
    if not known:
        return
    adoptable = [each._replace(task=known[each.id][1]) for each in rowless if each.id in known]
    wanted = [MemberToAdopt(each.id, str(uuid7()), each.row if _is_wrong(each, queue) else "") for each in adoptable]
    rows = Groups(broker.role, broker.alias).adopt(queue, taken, wanted)
    candidates = []
    for each in adoptable:
        if each.id in rows:
            alias, task = known[each.id]
            candidate = _candidate(alias, queue, each, Lease(each.id, 0), UUID(rows[each.id]))
            candidate.record.group = group_of_others(task, taken.group)
            candidates.append(candidate)
    bad = _give_rows(candidates).bad
    stored = load_rows([str(each.record.id) for each in bad])
    failed = [each.record for each in bad if str(each.record.id) in stored]
    for record in failed:
        log_failed(record)
    announce(failed, None, TaskState.FAILED)


def batched_by(broker: Broker, each: Rowless) -> tuple[str, Any] | None:
    """Return the task that runs a member of another program's group together with others, and its alias; or None."""
    if each.reason or each.message is None:
        return None
    for alias in aliases_beside(broker.alias):
        task = wire_names.task_of(each.message.type, alias)
        if task is not None and task.batch is not None:
            return alias, task
    return None


def may_adopt_members(broker: Broker) -> bool:
    """Whether any task runs messages of other programs together, so that their groups are looked at."""
    tasks = [task for alias in aliases_beside(broker.alias) for task in wire_names.tasks_of(alias)]
    return any(task.batch is not None for task in tasks)


class _Rows(NamedTuple):
    """What became of candidates. bad: with FAILED rows. refused: without rows, since a gate is full."""

    good: list[Candidate]
    bad: list[Candidate]
    refused: list[Candidate]


def _give_rows(candidates: Sequence[Candidate]) -> _Rows:
    """Insert the rows of messages whose hashes name them, as far as their gates admit them."""
    failpoints.reach("adopt.row_named")
    good = [each for each in candidates if each.error is None]
    bad = [each for each in candidates if each.error is not None]
    admitted = _admitted(good)
    refused = [each for each in good if each.record.id not in admitted]
    good = [each for each in good if each.record.id in admitted]
    try:
        bad += _insert([*good, *bad])
    except BaseException:
        gates.release_uncommitted([each.record for each in good])
        raise
    failpoints.reach("adopt.row_inserted")
    refused_ids = {each.record.id for each in bad}
    good = [each for each in good if each.record.id not in refused_ids]
    announce([each.record for each in good], None, TaskState.QUEUED)
    try:
        park_lost([each.record for each in good if each.record.gate])
    except GateUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    return _Rows(good, bad, refused)


def _is_wrong(each: Rowless, queue: str) -> bool:
    """Whether the field `row` holds what no script of ours has written, or the id of a row that is another entry's."""
    if not each.row:
        return False
    found = load_rows([each.row]).values()
    return not ROW_ID.fullmatch(each.row) or any(not is_entry_of(row, queue, each.id) for row in found)


def _candidate(alias: str, queue: str, rowless: Rowless, lease: Lease, id: UUID) -> Candidate:
    """Make the row of a message, in memory."""
    message, task = rowless.message, rowless.task
    assert message is not None and task is not None  # noqa: S101 - chosen by the caller
    now = database_clock.of_host()
    deadline = _deadline_of(message, now)
    most = min(max(message.retry, 0) + 1, MOST_ATTEMPTS)
    record = TaskRecord(
        id=id,
        name=task.module_path,
        backend=alias,
        queue_name=queue,
        attempt=min(max(message.retried, 0), MOST_ATTEMPTS),
        max_attempts=most,
        timeout_seconds=min(message.timeout, LONGEST_SECONDS) if message.timeout > 0 else None,
        deadline=deadline,
        expires_at=deadline,
        soft_timeout_seconds=task.soft_timeout,
        expected_seconds=task.expected_seconds,
        queue_limit=task.queue_limit,
        keep_logs=task.keep_logs,
        wire_id=rowless.id,
        wire_message=rowless.data,
        enqueued_at=now,
    )
    _, error = attempt(_fill, record, task, message)
    if error is None:
        return Candidate(lease, record, None)
    # A gate's callable may raise anything for arguments of others.
    reason = str(error) if is_a(error, InvalidOption) else f"{class_name(error)}: {error}"
    refused = InvalidArguments(reason, path="")
    _fail(record, refused)
    return Candidate(lease, record, refused)


def _fill(record: TaskRecord, task: Any, message: TaskMessage) -> None:
    """Write the arguments, the gate and the headers of a message into its row. Raises: InvalidOption, and any error."""
    args, kwargs = call_of(task, message.payload)
    record.gate = gate_name(task, args, kwargs)
    record.headers = checked_headers(message.headers) if message.headers else None
    if task.payload == "json":
        record.args, record.kwargs = args, kwargs


def _deadline_of(message: TaskMessage, now: datetime) -> datetime | None:
    last = now.timestamp() + LONGEST_SECONDS
    return datetime.fromtimestamp(message.deadline, UTC) if 0 < message.deadline <= last else None


def _fail(record: TaskRecord, error: InvalidArguments) -> None:
    now = database_clock.now()
    record.args, record.kwargs, record.headers, record.gate = [], {}, None, ""
    record.state, record.finished_at = TaskState.FAILED, now
    append_error(record, error, "", now)


def _admitted(candidates: Sequence[Candidate]) -> set[UUID]:
    """Return the ids of the rows that may be queued now. A receiver that vetoes one does not keep the others out.

    Raises: BrokerUnavailable, when a gate cannot be asked.
    """
    records = [each.record for each in candidates]
    if not records:
        return set()
    found, error = attempt(admit, records, partial=True)
    if error is None:
        return {record.id for record in found}
    if is_a(error, GateUnavailable):
        raise BrokerUnavailable(str(error)) from error
    if is_a(error, (BrokerUnavailable, DatabaseError)):
        raise error
    if len(records) > 1:
        return set().union(*(_admitted([each]) for each in candidates))
    record = records[0]
    # It comes again every few seconds, and so do all that are like it.
    if _is_new(record.backend, record.queue_name, f"refused {record.name} {class_name(error)}"):
        text = "task %s %s: it was refused, and goes back, like all that are refused for this reason: %s"
        logger.error(text, record.id, record.name, error, extra=log_extra(record))
    return set()


def _insert(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Insert the rows that do not exist yet; return those that the database refuses, which are inserted as FAILED."""
    if not candidates:
        return []
    connection = connections[writing_database(TaskRecord)]
    try:
        insert_missing([each.record for each in candidates], connection)
    except (DatabaseError, InvalidArguments) as error:
        if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
            raise
        if len(candidates) > 1:
            return [refused for each in candidates for refused in _insert([each])]
        if candidates[0].error is not None:
            # `_archive` finds no row, and leaves the reason in Redis.
            return []
        reason = InvalidArguments(f"the database cannot store it: {error}", path="")
        gates.release_uncommitted([candidates[0].record] if candidates[0].record.gate else [])
        _fail(candidates[0].record, reason)
        refused = candidates[0]._replace(error=reason)
        _insert([refused])
        return [refused]
    return []


def _archive(broker: Broker, queue: str, worker_id: str, bad: Sequence[Candidate]) -> None:
    """Archive messages with which the function cannot be called; their rows say why."""
    if not bad:
        return
    rows = load_rows([str(each.record.id) for each in bad])
    final = [each for each in bad if (row := rows.get(str(each.record.id))) is not None and row.is_final]
    broker.archive(queue, worker_id, [(each.lease, message_of(each.record)) for each in final])
    unstored = [each for each in bad if str(each.record.id) not in rows]
    back = [ToRestore(each.lease.id, each.lease.fence, text=str(each.error)) for each in unstored]
    foreign.restore(broker, queue, worker_id, back, delay_seconds=0, patience_seconds=0)
    for each in final:
        log_failed(each.record)
    announce([each.record for each in final], None, TaskState.FAILED)


def restore_at_once(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease | str]) -> list[str]:
    """Restore entries without a row, for any program; leases: or ids, of those that wait in retry.

    Returns, for each: "restored", "stale" or "missing". Raises: BrokerUnavailable.
    """
    back = [ToRestore(each, None) if isinstance(each, str) else ToRestore(each.id, each.fence) for each in leases]
    return foreign.restore(broker, queue, worker_id, back, delay_seconds=0, patience_seconds=0) if back else []


def _restore(broker: Broker, queue: str, worker_id: str, found: Sequence[tuple[Lease, Rowless]]) -> None:
    """Restore tasks for which this alias has no task; archive those that nobody has taken for long, with a text."""
    if not found:
        return
    patience = conf.current().unregistered_patience_seconds
    back = [
        ToRestore(lease.id, lease.fence, each.message.retried if each.message else 0, each.text)
        for lease, each in found
    ]
    words = foreign.restore(
        broker,
        queue,
        worker_id,
        back,
        delay_seconds=RESTORED_SECONDS,
        patience_seconds=patience,
        left_seconds=LEFT_SECONDS,
    )
    for (_, each), word in zip(found, words, strict=True):
        kind = each.message.type[:200] if each.message else "too large to be read"
        if word == "restored":
            text = "queue %s: no task here runs messages of the type %r; they go back, and are archived after %d s"
            _log_once(broker, queue, f"back {kind}", text, broker.name_of(queue), kind, patience)
        elif word == "archived":
            text = "queue %s: archived messages of the type %r that nobody had run for %d s: %s"
            _log_once(broker, queue, f"archived {kind}", text, broker.name_of(queue), kind, patience, each.text)


def _reject(broker: Broker, queue: str, worker_id: str, found: Sequence[tuple[Lease, Rowless]]) -> None:
    """Keep what can be no task in the list of the rejected; archive what that list would cut."""
    if not found:
        return
    now = redis_clock.seconds()
    large = [(lease, each) for lease, each in found if each.size_bytes > MOST_BYTES]
    small = [(lease, each) for lease, each in found if each.size_bytes <= MOST_BYTES]
    back = [ToRestore(lease.id, lease.fence, text=each.text) for lease, each in large]
    foreign.restore(broker, queue, worker_id, back, delay_seconds=0, patience_seconds=0)
    items = [(lease, rejected_document("queue", each.id, each.data, each.reason, now)) for lease, each in small]
    foreign.reject(broker, queue, worker_id, items)
    name, keys = broker.name_of(queue), broker.keys(queue)
    if large:
        text = "queue %s: archived a message: %s; it is in %s"
        _log_once(broker, queue, "archived as rejected", text, name, large[0][1].reason, keys.archived)
    if small:
        text = "queue %s: rejected a message: %s; it is kept for seven days in %s"
        _log_once(broker, queue, "rejected", text, name, small[0][1].reason, keys.rejected)


def _log_once(broker: Broker, queue: str, why: str, text: str, *values: Any) -> None:
    """Log a warning once in the life of a process."""
    if _is_new(broker.alias, queue, why):
        logger.warning(text, *values, extra={"queue": queue})


def _is_new(alias: str, queue: str, why: str) -> bool:
    key = (alias, queue, why)
    if key in _logged or len(_logged) >= MOST_LOGGED:
        return False
    _logged.add(key)
    return True
