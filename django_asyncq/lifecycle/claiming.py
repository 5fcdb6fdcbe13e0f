"""Claim tasks for a worker: lease and fence in Redis, then the rows; an earlier run that is still open is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import conf, failpoints
from ..broker import Broker, Dequeued, Lease, without_row
from ..broker.suspects import dequeue_suspect
from ..definitions.names import runs_alone
from ..guard import get_logger
from ..logs import log_extra_of_ids
from ..models import TaskRecord, TaskState
from ..runs import log_failed
from ..storage import identity
from ..storage.batches import FencedWrite, write_usable
from ..storage.isolation import is_set_aside
from ..storage.routing import writing_database
from .dispatching import dispatch
from .events import announce
from .messages import entry_of, message_of
from .outcome_spill import replay_outcomes
from .running import Run, acknowledge, load_rows, lose_unseen

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


def classify(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str) -> list[Run]:
    """Load the rows of leased ids and return the runs to start; settle every other lease."""
    if not leases:
        return []
    rows = load_rows(leases)
    # An outcome of these runs may have to be signed when the database is unreachable.
    identity.own()
    # A first lease has the fence 1, so no earlier run can have spilled an outcome: most tasks need no look-up.
    again = [lease for lease in leases if lease.fence > 1]
    recorded_now = replay_outcomes(broker, queue, worker_id, again, rows) if again else set()
    runs: list[Run] = []
    open_runs: list[Run] = []
    outdated: list[TaskRecord] = []
    without_row: list[Lease] = []
    final, foreign, retrying = [], [], []
    for lease in [lease for lease in leases if lease.id not in recorded_now]:
        record = rows.get(lease.id)
        if record is None:
            without_row.append(lease)
        elif record.is_final:
            final.append(lease)
        elif not broker.holds(record.backend):
            outdated.append(record)
        elif record.backend != backend:
            foreign.append(lease)
        elif record.state == TaskState.RUNNING and record.fence > lease.fence:
            # Redis was restored from an older copy. The run may be alive: its outcome or the reconciler settles it.
            foreign.append(lease)
        elif record.state == TaskState.QUEUED and record.fence >= lease.fence:
            outdated.append(record)
        elif record.state == TaskState.FAILED:
            retrying.append((lease, message_of(record), entry_of(record).due_at or 0))
        else:
            (open_runs if record.state == TaskState.RUNNING else runs).append(Run(record, lease))
    if without_row:
        _settle_without_row(broker, queue, worker_id, without_row)
    if final:
        broker.done(queue, worker_id, final)
    if foreign:
        broker.postpone(queue, worker_id, foreign, POSTPONE_SECONDS)
    if outdated:
        _dispatch_again(broker, queue, outdated)
    if retrying:
        # asynq's own forwarder moved a task whose row must first be retried, which acquires a gate slot.
        broker.retry(queue, worker_id, retrying, counted=False)
    if open_runs:
        runs += _close_open_runs(broker, worker_id, open_runs)
    return _set_suspects_aside(broker, queue, worker_id, runs)


def _dispatch_again(broker: Broker, queue: str, records: Sequence[TaskRecord]) -> None:
    """Replace entries of which no run can come.

    The row would refuse the outcome of a run with their fence, so they get a higher one; or the settings have changed
    the prefix of their alias, so they are pushed there.
    """
    broker.remove(queue, [str(record.id) for record in records])
    dispatch([record for record in records if record.state == TaskState.QUEUED], again=True)


def _settle_without_row(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease]) -> None:
    """Archive the entries of tasks that have no row; remove those whose row exists but cannot be used.

    A sweep dispatches the latter again when their rows have been corrected.
    """
    if unusable := [lease.id for lease in leases if is_set_aside(lease.id)]:
        broker.remove(queue, unusable)
    if orphans := [lease for lease in leases if lease.id not in unusable]:
        ids = [lease.id for lease in orphans]
        text = "queue %s: no row for %s; archived in Redis"
        logger.error(text, broker.name_of(queue), ", ".join(ids), extra=log_extra_of_ids(ids, queue=queue))
        without_row.archive_claimed(broker, queue, worker_id, orphans)


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
    written = write_usable([FencedWrite(run.record, run.record.fence) for run in runs], writing_database(TaskRecord))
    final = [run for run in runs if run.record.is_final and run.record.id in written]
    for run in final:
        log_failed(run.record)
    acknowledge(broker, worker_id, final)
    announce([run.record for run in final], TaskState.RUNNING, TaskState.FAILED)
    return [run for run in runs if run not in final and run.record.id in written]
