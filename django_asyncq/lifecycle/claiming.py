"""Claim tasks for a worker: lease and fence in Redis, then the rows; an earlier run that is still open is closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .. import conf, failpoints
from ..broker import Broker, Dequeued, Lease
from ..broker.decoding import UndecodableMessage, decode_message
from ..broker.evidence import read_evidence
from ..broker.foreign import ToRestore, restore
from ..broker.row_fields import read_messages
from ..broker.suspects import dequeue_suspect
from ..definitions.names import runs_alone
from ..definitions.task_options import MOST_ATTEMPTS
from ..guard import get_logger
from ..models import TaskRecord, TaskState
from ..runs import log_failed
from ..storage import database_clock, identity
from ..storage.batches import FencedWrite
from ..storage.routing import writing_database
from .adopting import LEFT_SECONDS, RESTORED_SECONDS, restore_at_once, settle_rowless
from .claimed_runs import Run
from .closing import close_cancelled, close_claimed, expire, fail_cancelled
from .dispatching import dispatch
from .events import announce
from .following import write_usable
from .members import limited, load_members
from .messages import entry_of, message_of, named_rows
from .outcome_spill import replay_outcomes
from .ownership import Sorted, sort_entries
from .retrying import retry_due, settle_final_claims
from .running import acknowledge, begin, lose_unseen, record_runs, succeed

logger = get_logger("django_asyncq.lifecycle")

POSTPONE_SECONDS = 15


class Claimed(NamedTuple):
    """What a claim returned. paused: the queue is paused. is_drained: the queue is empty now."""

    runs: list[Run]
    paused: bool
    is_drained: bool


def claim(broker: Broker, queue: str, worker_id: str, count: int, backend: str) -> Claimed:
    """Claim up to `count` tasks of a queue.

    backend: the TASKS alias; a task of another alias is postponed for its own workers.

    | check    | the row: only a QUEUED task is run (`classify`)                     |
    | row      | read; it says RUNNING only after `mark_running` or with the outcome |
    | Redis    | the lease, with the fence raised                                    |
    | announce | nothing yet                                                         |

    If we die in between, the leases expire and the reconciler requeues the tasks.
    """
    taken = broker.dequeue(queue, worker_id, count, conf.current().lease_seconds)
    return receive(broker, queue, worker_id, taken, backend)


def claim_suspect(broker: Broker, queue: str, worker_id: str, backend: str) -> Claimed:
    """Claim the suspect that has waited longest, for a worker in quarantine that holds no task.

    It returns what the worker holds already, if an earlier reply was lost. Otherwise it does what `claim` does.
    """
    lease = dequeue_suspect(broker, queue, worker_id, conf.current().lease_seconds)
    leases = [] if lease is None else [lease]
    return receive(broker, queue, worker_id, Dequeued(leases, paused=False, is_drained=not leases), backend)


def receive(broker: Broker, queue: str, worker_id: str, taken: Dequeued, backend: str) -> Claimed:
    """Turn leases into runs, whether the worker dequeued them or was handed them. backend: as of `claim`."""
    if taken.leases:
        failpoints.reach("claim.leased")
    runs = classify(broker, queue, worker_id, taken.leases, backend)
    if runs:
        failpoints.reach("claim.rows_read")
    return Claimed(runs, taken.paused, taken.is_drained)


def classify(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str, *, may_adopt: bool = True
) -> list[Run]:
    """Load the rows of leased ids and return the runs to start; settle every other lease.

    may_adopt: give rows to messages of other programs; otherwise they go back.
    """
    if not leases:
        return []
    found = sort_entries(broker, queue, [lease.id for lease in leases], backend)
    rows = found.rows
    without_row = [lease for lease in leases if lease.id not in rows]
    adopted = _settle_without_row(broker, queue, worker_id, without_row, found, may_adopt) if without_row else []
    runs = _settle_with_row(broker, queue, worker_id, leases, rows, backend)
    if adopted:
        runs += classify(broker, queue, worker_id, adopted, backend, may_adopt=False)
    return runs


def _settle_with_row(
    broker: Broker,
    queue: str,
    worker_id: str,
    leases: Sequence[Lease],
    rows: Mapping[str, TaskRecord],
    backend: str,
) -> list[Run]:
    """Return the runs to start of the leases that have a row; settle the others of them."""
    # An outcome of these runs may have to be signed when the database is unreachable.
    identity.own()
    # A first lease has the fence 1, so no earlier run can have spilled an outcome: most tasks need no look-up.
    again = [lease for lease in leases if lease.fence > 1]
    recorded_now = replay_outcomes(broker, queue, worker_id, again, rows) if again else set()
    runs: list[Run] = []
    open_runs: list[Run] = []
    outdated: list[TaskRecord] = []
    final, foreign, retrying = [], [], []
    for lease in [lease for lease in leases if lease.id not in recorded_now]:
        record = rows.get(lease.id)
        if record is None:
            continue
        if record.is_final:
            final.append(lease)
        elif record.is_in_batch or not broker.holds(record.backend):
            outdated.append(record)
        elif _is_for_others(record, lease, backend):
            foreign.append(lease)
        elif record.state == TaskState.QUEUED and record.fence >= lease.fence:
            outdated.append(record)
        elif record.state == TaskState.FAILED:
            retrying.append((lease, message_of(record), entry_of(record).due_at or 0))
        else:
            (open_runs if record.state == TaskState.RUNNING else runs).append(Run(record, lease))
    _settle_others(broker, queue, worker_id, rows, _Others(final, foreign, outdated, retrying))
    if open_runs:
        runs += _close_open_runs(broker, worker_id, open_runs)
    runs = close_claimed(broker, queue, worker_id, runs)
    if any(run.record.wire_id is not None for run in runs):
        _count_attempts_of_others(broker, queue, runs)
    return with_members(broker, worker_id, _set_suspects_aside(broker, queue, worker_id, runs))


def with_members(broker: Broker | None, worker_id: str, runs: list[Run]) -> list[Run]:
    """Load the members of batches; return the runs to start. A batch without any has succeeded.

    Members that were cancelled, or can no longer begin, are closed first. broker: None without Redis.
    """
    of_batches = [run for run in runs if run.record.is_batch]
    if not of_batches:
        return runs
    load_members(of_batches)
    cancelled, late = limited(of_batches)
    if cancelled or late:
        close_cancelled(cancelled)
        expire(late)
        load_members(of_batches)
    empty = [run for run in of_batches if not run.members]
    if not empty:
        return runs
    now = database_clock.now()
    for run in empty:
        begin(run, worker_id, now)
        succeed(run, None, now)
    lost = record_runs(empty)
    if broker is not None:
        acknowledge(broker, worker_id, empty, lost)
    announce([run.record for run in empty if run not in lost], TaskState.QUEUED, TaskState.SUCCEEDED)
    return [run for run in runs if run not in empty]


class _Others(NamedTuple):
    """Leases, or rows, of which no run comes here now: see `_settle_others`."""

    final: list[Lease]
    foreign: list[Lease]
    outdated: list[TaskRecord]
    retrying: list[tuple[Lease, bytes, float]]


def _settle_others(broker: Broker, queue: str, worker_id: str, rows: Mapping[str, TaskRecord], others: _Others) -> None:
    """Settle the leases of which no run comes, one kind after the other."""
    if others.final:
        settle_final_claims(broker, queue, worker_id, others.final, rows)
    remote = [ToRestore(lease.id, lease.fence) for lease in others.foreign if rows[lease.id].is_remote]
    if remote:
        # Without our fields: it stays the other program's, whose recoverer looks after it.
        times = {"delay_seconds": RESTORED_SECONDS, "patience_seconds": 0, "left_seconds": LEFT_SECONDS}
        restore(broker, queue, worker_id, remote, **times)
    if elsewhere := [lease for lease in others.foreign if not rows[lease.id].is_remote]:
        broker.postpone(queue, worker_id, elsewhere, POSTPONE_SECONDS)
    if others.outdated:
        _dispatch_again(broker, queue, others.outdated)
    if others.retrying:
        _retry_claimed(broker, queue, worker_id, others.retrying)


def _is_for_others(record: TaskRecord, lease: Lease, backend: str) -> bool:
    """Return whether the task may not run here: it is another program's, or of another alias, or it may run already."""
    if record.is_remote or record.backend != backend:
        return True
    # Redis was restored from an older copy. The run may be alive: its outcome or the reconciler settles it.
    return record.state == TaskState.RUNNING and record.fence > lease.fence


def _retry_claimed(broker: Broker, queue: str, worker_id: str, retrying: Sequence[tuple[Lease, bytes, float]]) -> None:
    """Return RETRYING tasks to where they wait; retry those at once that another program has made pending.

    asynq's forwarder does that when they are due, its tools when a person wants it. The row must be retried first,
    which acquires a gate slot.
    """
    found = read_evidence(broker, queue, [lease.id for lease, _, _ in retrying])
    broker.retry(queue, worker_id, retrying, counted=False)
    if moved := [each.id for each in found if each.settled]:
        retry_due(broker, queue, moved)


def _dispatch_again(broker: Broker, queue: str, records: Sequence[TaskRecord]) -> None:
    """Replace entries of which no run can come.

    The row would refuse the outcome of a run with their fence, so they get a higher one; or the settings have changed
    the prefix of their alias, so they are pushed there. A member of a batch, which a tool has put into pending while
    the batch was made, has no entry of its own.
    """
    broker.remove(queue, [record.redis_id for record in records], named_rows(records))
    dispatch([record for record in records if record.state == TaskState.QUEUED], again=True)


def _settle_without_row(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], found: Sorted, may_adopt: bool
) -> list[Lease]:
    """Give rows to messages of other programs, or restore them; return the leases of those that have one now.

    The entries of rows that cannot be used are removed; a sweep dispatches them again when they have been corrected.
    """
    if unusable := [lease.id for lease in leases if lease.id in found.unusable]:
        broker.remove(queue, unusable)
    known = {each.id for each in found.rowless}
    gone = [lease for lease in leases if lease.id not in known | found.unusable]
    restore_at_once(broker, queue, worker_id, gone)
    rest = [lease for lease in leases if lease.id in known]
    return settle_rowless(broker, queue, worker_id, rest, found.rowless, may_adopt=may_adopt) if rest else []


def _count_attempts_of_others(broker: Broker, queue: str, runs: Sequence[Run]) -> None:
    """Count the attempts that another program has used up since: it may have run the task too."""
    records = {run.record.redis_id: run.record for run in runs if run.record.wire_id is not None}
    for id, stored in read_messages(broker, queue, list(records)).items():
        try:
            retried = decode_message(stored.data).retried
        except UndecodableMessage:
            continue
        records[id].attempt = max(records[id].attempt, min(retried, MOST_ATTEMPTS))


def _set_suspects_aside(broker: Broker, queue: str, worker_id: str, runs: list[Run]) -> list[Run]:
    """Return the runs to start here: a suspect runs in quarantine only, whatever has pushed it to other workers.

    So a Redis that lost its memory, or a tool, may make a suspect pending like any other task.
    """
    suspects = [run for run in runs if run.record.is_suspect]
    if not suspects or runs_alone(worker_id):
        return runs
    ids = {run.lease.id for run in suspects}
    broker.requeue(queue, worker_id, [run.lease for run in suspects], suspects=ids)
    return [run for run in runs if run not in suspects]


def _close_open_runs(broker: Broker, worker_id: str, runs: Sequence[Run]) -> list[Run]:
    """Close the earlier runs that the rows still show; return the runs to start.

    asynq's own recoverer has queued such a task again in Redis without changing the row.
    """
    for run in runs:
        lose_unseen(run.record, "its lease was given to another worker")
        fail_cancelled(run.record, database_clock.now())
    written = write_usable([FencedWrite(run.record, run.record.fence) for run in runs], writing_database(TaskRecord))
    final = [run for run in runs if run.record.is_final and run.record.id in written]
    for run in final:
        log_failed(run.record)
    acknowledge(broker, worker_id, final)
    announce([run.record for run in final], TaskState.RUNNING, TaskState.FAILED)
    return [run for run in runs if run not in final and run.record.id in written]
