"""Run messages of other programs: each gets a row at its first claim, and is then a task like any other.

Such a message was not enqueued here, so nothing could refuse it: its gate slot is acquired now, and a message for which
the gate is full goes back without a row. What no task of ours runs goes back too, for other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connections

from .. import conf, gates, lifecycle
from ..broker import Broker, Lease, foreign, redis_clock
from ..broker.foreign import MOST_BYTES, ToAdopt, ToRestore, read_messages, rejected_document
from ..broker.groups import Groups, Taken
from ..broker.message import TaskMessage, UndecodableMessage, decode_message
from ..core import names
from ..core.aliases import aliases_beside
from ..core.batches import group_of_others
from ..core.calls import call_of, gate_columns
from ..core.guard import attempt, class_name, get_logger, is_a
from ..core.headers import checked_headers
from ..core.logs import log_extra
from ..core.names import ROW_ID, uuid7
from ..core.options import MOST_ATTEMPTS
from ..core.time import LONGEST
from ..exceptions import BrokerUnavailable, GateUnavailable, InvalidArguments, InvalidOption
from ..lifecycle import Claimed, Others, Run
from ..lifecycle.base import announce, append_error, is_entry_of, load_rows, log_failed, look_up
from ..lifecycle.dispatching import park_lost
from ..lifecycle.enqueueing import admit
from ..lifecycle.messages import message_of, restore
from ..models import TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import concerns_one_row
from ..storage.inserting import insert_missing
from ..storage.routing import writing_database
from .verdict import Rowless, judge

logger = get_logger("django_asyncq.interop")

# For that long others can take what goes back, and so often a worker looks at it.
RESTORED_SECONDS = 5
# And how long it is then left to other programs, whose servers ask once a second.
LEFT_SECONDS = 5
# Nothing waits for longer: Python's own waits end at some 290 years.
LONGEST_SECONDS = LONGEST.total_seconds()
# What was logged once: (alias, queue, why). A queue may hold a million of one kind.
MOST_LOGGED = 1_000
_logged: set[tuple[str, str, str]] = set()

Item = TypeVar("Item")
Found = TypeVar("Found")


# --- Claims: those of `lifecycle`, which settle the leases of rows, and here what has no row, or one that only another
# program runs.


def claim(broker: Broker, queue: str, worker_id: str, count: int, backend: str) -> Claimed:
    """Claim as `lifecycle.claim` does; give rows to messages of other programs, and send others back."""
    claimed = lifecycle.claim(broker, queue, worker_id, count, backend)
    _settle_others(broker, queue, worker_id, claimed.runs, claimed.others, backend)
    return claimed


def claim_suspect(broker: Broker, queue: str, worker_id: str, backend: str) -> Claimed:
    """Claim as `lifecycle.claim_suspect` does, with the others as `claim`."""
    claimed = lifecycle.claim_suspect(broker, queue, worker_id, backend)
    _settle_others(broker, queue, worker_id, claimed.runs, claimed.others, backend)
    return claimed


def classify(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str) -> list[Run]:
    """Return the runs to start as `lifecycle.classify` does, with the others as `claim`."""
    runs, others = lifecycle.classify(broker, queue, worker_id, leases, backend)
    _settle_others(broker, queue, worker_id, runs, others, backend)
    return runs


def _settle_others(broker: Broker, queue: str, worker_id: str, runs: list[Run], others: Others, backend: str) -> None:
    """Settle what is of other programs; add the runs of those that have a row now."""
    if others.remote:
        # Without our fields: it stays the other program's, whose recoverer looks after it.
        _send_back(broker, queue, worker_id, others.remote, left_seconds=LEFT_SECONDS)
    if others.rowless and (adopted := _settle_rowless(broker, queue, worker_id, others.rowless, backend)):
        added, left = lifecycle.classify(broker, queue, worker_id, adopted, backend)
        runs += added
        _send_back(broker, queue, worker_id, left.rowless)
    if of_others := [run.record for run in runs if run.record.wire_id is not None]:
        _count_attempts(broker, queue, {record.redis_id: record for record in of_others})


def _count_attempts(broker: Broker, queue: str, records: dict[str, TaskRecord]) -> None:
    """Count the attempts that another program has used up since: it may have run the tasks too."""
    for id, stored in read_messages(broker, queue, list(records)).items():
        try:
            retried = decode_message(stored.data).retried
        except UndecodableMessage:
            continue
        records[id].attempt = max(records[id].attempt, min(retried, MOST_ATTEMPTS))


def _settle_rowless(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str) -> list[Lease]:
    """Adopt, restore or reject what a worker has claimed and what has no row; return the leases of those adopted.

    | check    | `names`: a task of the alias      has declared the type; `task_state_changing`: the gate         |
    | row      | INSERT as QUEUED, or as FAILED where the function cannot be called with the payload               |
    | Redis    | the id of the row in the hash, before the INSERT; scheduled, archived or rejected for all others |
    | announce | `task_state_changed`                                                                             |

    If we die before the INSERT, the next claim inserts the row under the id that the hash names; if we die after it,
    the lease expires and the reconciler requeues the task. Raises: BrokerUnavailable, django.db.Error.
    """
    judged = {each.id: each for each in _judged(broker, queue, [lease.id for lease in leases], backend)}
    restore(broker, queue, worker_id, [lease for lease in leases if lease.id not in judged])
    found = [(lease, judged[lease.id]) for lease in leases if lease.id in judged]
    _reject(broker, queue, worker_id, [(lease, each) for lease, each in found if each.reason])
    _restore(broker, queue, worker_id, [(lease, each) for lease, each in found if not each.reason and not each.task])
    adoptable = [ToAdopt(lease, str(uuid7()), _wrong_row(each, queue)) for lease, each in found if each.task]
    candidates = [
        _candidate(broker.alias, queue, judged[each.lease.id], each.lease, each.row)
        for each in foreign.adopt(broker, queue, worker_id, adoptable)
    ]
    good, bad, refused = _give_rows(candidates)
    _send_back(broker, queue, worker_id, [each.lease for each in refused])
    failed = {each.lease.id for each in _report_failed(bad)}
    broker.archive(queue, worker_id, [(each.lease, message_of(each.record)) for each in bad if each.lease.id in failed])
    unstored = [each for each in bad if each.lease.id not in failed]
    back = [ToRestore(each.lease.id, each.lease.fence, text=str(each.error)) for each in unstored]
    foreign.restore(broker, queue, worker_id, back)
    return [each.lease for each in good]


def _judged(broker: Broker, queue: str, ids: Sequence[str], alias: str) -> list[Rowless]:
    """Say what entries without a row are; one without a message is missing."""
    stored = read_messages(broker, queue, ids)
    return [judge(id, queue, stored[id], alias) for id in ids if id in stored]


def _wrong_row(each: Rowless, queue: str) -> str:
    """Return what the field `row` holds, if no script of ours has written it, or if that row is another entry's."""
    row = each.stored.row
    is_wrong = not ROW_ID.fullmatch(row) or any(
        not is_entry_of(found, queue, each.id) for found in load_rows([row]).values()
    )
    return row if is_wrong else ""


# --- Members of groups: what another program's client adds with a group, and a task with `batch` runs.


def form_batches(broker: Broker, queue: str) -> tuple[int, float | None]:
    """Make batches as `lifecycle.form_batches` does, also of members that other programs have enqueued.

    | check    | `names` and `batch` of the task;      `task_state_changing`: the gate                               |
    | row      | INSERT as QUEUED, with the group; or as FAILED where the function cannot be called with the payload |
    | Redis    | the id of the row in the hash, before the INSERT; nothing else: the members are taken already       |
    | announce | `task_state_changed`                                                                                |

    If we die, the members go back to their group, and the process that takes them next finds the rows. What gets no
    row stays as it is. Raises: BrokerUnavailable, django.db.Error.
    """
    tasks = [task for alias in aliases_beside(broker.alias) for task in names.tasks_of(alias)]
    if any(task.batch is not None for task in tasks):
        _look_at_groups(broker, queue)
    return lifecycle.form_batches(broker, queue, partial(_adopt_members, broker, queue))


def _look_at_groups(broker: Broker, queue: str) -> None:
    """Have groups of other programs taken by the rules of the task that runs one of their members with others."""
    groups = Groups(broker.role, broker.alias)
    found = groups.look(queue)
    ids = look_up(broker, queue, [id for ids in found.values() for id in ids]).missing
    tasks = {each.id: _batched_by(broker, each) for each in _judged(broker, queue, ids, broker.alias)}
    first = {name: next(filter(None, map(tasks.get, ids)), None) for name, ids in found.items()}
    if rules := {name: each[1].batch.rules for name, each in first.items() if each is not None}:
        groups.ensure(queue, rules)


def _batched_by(broker: Broker, each: Rowless) -> tuple[str, Any] | None:
    """Return the task that runs a member of another program's group together with others, and its alias; or None."""
    if each.reason or each.message is None:
        return None
    for alias in aliases_beside(broker.alias):
        task = names.task_of(each.message.type, alias)
        if task is not None and task.batch is not None:
            return alias, task
    return None


def _adopt_members(broker: Broker, queue: str, taken: Taken, ids: Sequence[str]) -> None:
    """Give rows to members of a group that have none."""
    judged = [(each, _batched_by(broker, each)) for each in _judged(broker, queue, ids, broker.alias)]
    found = {each.id: (each, *by) for each, by in judged if by is not None}
    wanted = [ToAdopt(Lease(id, 0), str(uuid7()), _wrong_row(each, queue)) for id, (each, *_) in found.items()]
    candidates = []
    for lease, row in foreign.adopt_members(broker, queue, taken, wanted):
        each, alias, task = found[lease.id]
        candidate = _candidate(alias, queue, each._replace(task=task), lease, row)
        candidate.record.group = group_of_others(task, taken.group)
        candidates.append(candidate)
    _report_failed(_give_rows(candidates).bad)


# --- Rows for messages, however they were taken.


class Candidate(NamedTuple):
    """A message that gets a row. lease: with a raised fence. record: not inserted yet. error: why it cannot run."""

    lease: Lease
    record: TaskRecord
    error: InvalidArguments | None


class _Rows(NamedTuple):
    """What became of candidates. bad: with FAILED rows. refused: without rows, since a gate is full."""

    good: list[Candidate]
    bad: list[Candidate]
    refused: list[Candidate]


def _give_rows(candidates: Sequence[Candidate]) -> _Rows:
    """Insert the rows of messages whose hashes name them, as far as their gates admit them."""
    if not candidates:
        return _Rows([], [], [])
    good = [each for each in candidates if each.error is None]
    bad = [each for each in candidates if each.error is not None]
    admitted = _admitted(good)
    refused = [each for each in good if each not in admitted]
    try:
        bad += _insert([*admitted, *bad])
    except BaseException:
        gates.release_uncommitted([each.record for each in admitted])
        raise
    failed = {each.record.id for each in bad}
    good = [each for each in admitted if each.record.id not in failed]
    announce([each.record for each in good], None, TaskState.QUEUED)
    try:
        park_lost([each.record for each in good if each.record.gate])
    except GateUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    return _Rows(good, bad, refused)


def _report_failed(bad: Sequence[Candidate]) -> list[Candidate]:
    """Log and announce the messages with which the function cannot be called, if their rows say so; return those."""
    rows = load_rows([str(each.record.id) for each in bad])
    failed = [each for each in bad if (row := rows.get(str(each.record.id))) is not None and row.is_final]
    for each in failed:
        log_failed(each.record)
    announce([each.record for each in failed], None, TaskState.FAILED)
    return failed


def _candidate(alias: str, queue: str, rowless: Rowless, lease: Lease, id: str) -> Candidate:
    """Make the row of a message, in memory."""
    message, task = rowless.message, rowless.task
    assert message is not None and task is not None  # noqa: S101 - chosen by the caller
    now = database_clock.of_host()
    deadline = _deadline_of(message, now)
    most = min(max(message.retry, 0) + 1, MOST_ATTEMPTS)
    record = TaskRecord(
        id=UUID(id),
        name=task.module_path,
        version=task.version,
        backend=alias,
        queue_name=queue,
        attempt=min(max(message.retried, 0), MOST_ATTEMPTS),
        max_attempts=most,
        timeout_seconds=min(message.timeout, LONGEST_SECONDS) if message.timeout > 0 else None,
        deadline=deadline,
        expires_at=deadline,
        soft_timeout_seconds=task.soft_timeout,
        expected_seconds=task.expected_seconds,
        keep_logs=task.keep_logs,
        wire_id=rowless.id,
        wire_message=rowless.stored.data,
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
    for name, value in gate_columns(task, args, kwargs).items():
        setattr(record, name, value)
    record.headers = checked_headers(message.headers) if message.headers else None
    if task.payload == "json":
        record.args, record.kwargs = args, kwargs


def _deadline_of(message: TaskMessage, now: datetime) -> datetime | None:
    last = now.timestamp() + LONGEST_SECONDS
    return datetime.fromtimestamp(message.deadline, UTC) if 0 < message.deadline <= last else None


def _fail(record: TaskRecord, error: InvalidArguments) -> None:
    now = database_clock.now()
    record.args, record.kwargs, record.headers, record.gate, record.other_gates = [], {}, None, "", ""
    record.state, record.finished_at = TaskState.FAILED, now
    append_error(record, error, "", now)


def _admit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose rows may be queued now. Raises: BrokerUnavailable, when a gate cannot be asked."""
    try:
        ids = {record.id for record in admit([each.record for each in candidates], partial=True)}
    except GateUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    return [each for each in candidates if each.record.id in ids]


def _admitted(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose rows may be queued. A receiver that vetoes one does not keep the others out."""
    admitted, vetoed = together(candidates, _admit, lambda error: is_a(error, (BrokerUnavailable, DatabaseError)))
    for (_, record, _), error in vetoed:
        # It comes again every few seconds, and so do all that are like it.
        if _is_new(record.backend, record.queue_name, f"refused {record.name} {class_name(error)}"):
            text = "task %s %s: refused and returned to the queue (logged once per reason): %s"
            logger.error(text, record.id, record.name, error, extra=log_extra(record))
    return admitted


def _insert(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Insert the rows that do not exist yet; return those that the database refuses, which are inserted as FAILED."""
    failed = []
    for candidate, error in together(candidates, _insert_rows, _is_of_no_row)[1]:
        # Where its FAILED row is refused too, `_report_failed` finds none, and the reason is left in Redis.
        if candidate.error is None:
            reason = InvalidArguments(f"the database cannot store it: {error}", path="")
            gates.release_uncommitted([candidate.record] if candidate.record.gate else [])
            _fail(candidate.record, reason)
            failed.append(candidate._replace(error=reason))
            together(failed[-1:], _insert_rows, _is_of_no_row)
    return failed


def _insert_rows(candidates: Sequence[Candidate]) -> list[Candidate]:
    insert_missing([each.record for each in candidates], connections[writing_database(TaskRecord)])
    return list(candidates)


def _is_of_no_row(error: BaseException) -> bool:
    return not is_a(error, InvalidArguments) and not concerns_one_row(error)


def together(
    items: Sequence[Item], act: Callable[[Sequence[Item]], list[Found]], concerns_all: Callable[[BaseException], bool]
) -> tuple[list[Found], list[tuple[Item, BaseException]]]:
    """Do something with all items, and if one of them is at fault, with each alone; return what was found, and these.

    act: one that fails must have changed nothing. concerns_all: whether an error says nothing about the item at which
    it was met; it is raised.
    """
    found, error = attempt(act, items) if items else ([], None)
    if error is None:
        return list(found), []
    if concerns_all(error):
        raise error
    if len(items) == 1:
        return [], [(items[0], error)]
    parts = [together([item], act, concerns_all) for item in items]
    return [each for found, _ in parts for each in found], [each for _, at_fault in parts for each in at_fault]


# --- What goes back to other programs.


def _send_back(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], *, left_seconds: int = 0) -> None:
    """Restore tasks that cannot run here now, to be looked at again after RESTORED_SECONDS."""
    if leases:
        back = [ToRestore(lease.id, lease.fence) for lease in leases]
        foreign.restore(broker, queue, worker_id, back, delay_seconds=RESTORED_SECONDS, left_seconds=left_seconds)


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
    large = [(lease, each) for lease, each in found if (each.stored.size_bytes or 0) > MOST_BYTES]
    small = [(lease, each) for lease, each in found if (each.stored.size_bytes or 0) <= MOST_BYTES]
    back = [ToRestore(lease.id, lease.fence, text=each.text) for lease, each in large]
    foreign.restore(broker, queue, worker_id, back)
    items = [(lease, rejected_document("queue", each.id, each.stored.data, each.reason, now)) for lease, each in small]
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
