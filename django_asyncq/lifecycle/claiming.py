"""Claim tasks for a worker: lease and fence in Redis, then the rows; an earlier run that is still open is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import conf
from ..broker import Broker, Dequeued, Lease
from ..broker.foreign import read_evidence
from ..broker.task_entries import dequeue_suspect
from ..core.guard import get_logger
from ..core.names import runs_alone, runs_isolated
from ..models import Suspicion, TaskRecord, TaskState
from ..storage import database_clock, identity
from ..storage.batches import FencedWrite
from ..storage.routing import writing_database
from .base import Run, announce, log_failed, look_up
from .closing import close_cancelled, close_claimed, expire, fail_cancelled
from .dispatching import dispatch
from .following import write_usable
from .members import limited, load_members
from .messages import entry_of, message_of, named_rows
from .parents import fill_values
from .retrying import retry_due, settle_final_claims
from .running import acknowledge, begin, lose_unseen, record_runs, succeed
from .spill import replay_outcomes

logger = get_logger("django_asyncq.lifecycle")

POSTPONE_SECONDS = 15


class Claimed(NamedTuple):
    """What a claim returned. paused: the queue is paused. is_drained: the queue is empty now.

    others: leases of what is another program's, which `interop` settles.
    """

    runs: list[Run]
    paused: bool
    is_drained: bool
    others: Others


class Others(NamedTuple):
    """Leases of entries of other programs. remote: the row says that only another program runs it."""

    rowless: list[Lease]
    remote: list[Lease]


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
    return _received(broker, queue, worker_id, taken, backend)


def claim_suspect(broker: Broker, queue: str, worker_id: str, backend: str) -> Claimed:
    """Claim the suspect that has waited longest, for a worker that runs one task and holds none.

    It returns what the worker holds already: what was claimed for it. Otherwise it does what `claim` does.
    """
    lease = dequeue_suspect(broker, queue, worker_id, conf.current().lease_seconds)
    leases = [] if lease is None else [lease]
    return _received(broker, queue, worker_id, Dequeued(leases, paused=False, is_drained=not leases), backend)


def _received(broker: Broker, queue: str, worker_id: str, taken: Dequeued, backend: str) -> Claimed:
    runs, others = classify(broker, queue, worker_id, taken.leases, backend)
    return Claimed(runs, taken.paused, taken.is_drained, others)


def classify(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str
) -> tuple[list[Run], Others]:
    """Load the rows of leased ids; return the runs to start, and what is of other programs. Settle every other lease.

    The entries of rows that cannot be used are removed; a sweep dispatches them again when they have been corrected.
    """
    others = Others([], [])
    if not leases:
        return [], others
    rows, missing, unusable = look_up(broker, queue, [lease.id for lease in leases])
    if unusable:
        broker.remove(queue, unusable)
    if missing:
        others.rowless.extend(lease for lease in leases if lease.id in missing)
    # An outcome of these runs may have to be signed when the database is unreachable.
    identity.own()
    # A first lease has the fence 1, so no earlier run can have spilled an outcome: most tasks need no look-up.
    again = [lease for lease in leases if lease.fence > 1]
    recorded_now = replay_outcomes(broker, queue, worker_id, again, rows) if again else set()
    runs: list[Run] = []
    open_runs: list[Run] = []
    outdated: list[TaskRecord] = []
    final, elsewhere, retrying = [], [], []
    is_ours = broker.holds(backend)
    for lease in [lease for lease in leases if lease.id not in recorded_now]:
        record = rows.get(lease.id)
        if record is None:
            continue
        # The first is the way of most.
        if (
            record.state == TaskState.QUEUED
            and record.fence < lease.fence
            and record.batch_id is None
            and not record.reason
            and not record.waits_for
            and record.backend == backend
            and not record.is_remote
            and is_ours
        ):
            runs.append(Run(record, lease))
        elif record.is_final:
            final.append(lease)
        elif record.is_in_batch or record.waits_for_tasks or not broker.holds(record.backend):
            outdated.append(record)
        elif record.is_remote:
            others.remote.append(lease)
        elif _is_for_others(record, lease, backend):
            elsewhere.append(lease)
        elif record.waits_for_slot:
            retrying.append((lease, message_of(record), entry_of(record).due_at or 0))
        elif record.state == TaskState.QUEUED and record.fence >= lease.fence:
            outdated.append(record)
        elif record.state == TaskState.FAILED:
            retrying.append((lease, message_of(record), entry_of(record).due_at or 0))
        else:
            open_runs.append(Run(record, lease))
    if final:
        settle_final_claims(broker, queue, worker_id, final, rows)
    if elsewhere:
        broker.postpone(queue, worker_id, elsewhere, POSTPONE_SECONDS)
    if outdated:
        _dispatch_again(broker, queue, outdated)
    if retrying:
        _retry_claimed(broker, queue, worker_id, retrying)
    if open_runs:
        runs += _close_open_runs(broker, worker_id, open_runs)
    runs = _set_suspects_aside(broker, queue, worker_id, close_claimed(broker, queue, worker_id, runs))
    return with_members(broker, worker_id, runs), others


def with_members(broker: Broker, worker_id: str, runs: list[Run]) -> list[Run]:
    """Load the members of batches, and the values of parents; return the runs to start.

    A batch without members has succeeded. Members that were cancelled, or can no longer begin, are closed first.
    """
    of_batches = [run for run in runs if run.record.batch_size is not None]
    if of_batches:
        runs = _with_members(broker, worker_id, runs, of_batches)
    if nodes := [each for run in runs for each in (run, *run.members) if each.record.waits_for is not None]:
        fill_values(nodes)
    return runs


def _with_members(broker: Broker, worker_id: str, runs: list[Run], of_batches: list[Run]) -> list[Run]:
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
    acknowledge(broker, worker_id, empty, lost)
    announce([run.record for run in empty if run not in lost], TaskState.QUEUED, TaskState.SUCCEEDED)
    return [run for run in runs if run not in empty]


def _is_for_others(record: TaskRecord, lease: Lease, backend: str) -> bool:
    """Return whether the task may not run here: it is of another alias, or it may run already."""
    if record.backend != backend:
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
    the batch was made, has no entry of its own; nor has a task that waits for others.
    """
    broker.remove(queue, [record.redis_id for record in records], named_rows(records))
    dispatch([record for record in records if record.state == TaskState.QUEUED], again=True)


def _set_suspects_aside(broker: Broker, queue: str, worker_id: str, runs: list[Run]) -> list[Run]:
    """Return the runs to start here: a suspect runs in quarantine only, whatever has pushed it to other workers.

    So a Redis that lost its memory, or a tool, may make a suspect pending like any other task.
    """
    suspects = [run for run in runs if run.record.suspicion == Suspicion.SUSPECT]
    if not suspects or runs_alone(worker_id) or runs_isolated(worker_id):
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
    writes = [FencedWrite(run.record, run.record.fence, run.record.fence) for run in runs]
    written = write_usable(writes, writing_database(TaskRecord))
    final = [run for run in runs if run.record.is_final and run.record.id in written]
    for run in final:
        log_failed(run.record)
    acknowledge(broker, worker_id, final)
    announce([run.record for run in final], TaskState.RUNNING, TaskState.FAILED)
    return [run for run in runs if run not in final and run.record.id in written]
