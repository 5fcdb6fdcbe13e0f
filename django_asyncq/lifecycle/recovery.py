"""Recover the tasks of lost workers, and close runs that neither Redis nor a worker knows."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..broker import Broker, Lease
from ..broker.task_entries import HOLDER
from ..core.guard import EX_SOFTWARE
from ..core.names import runs_alone, runs_isolated
from ..exceptions import WorkerLost
from ..models import Suspicion, TaskRecord, TaskState
from ..signals import run_lost
from ..storage import database_clock
from ..storage.batches import FencedWrite
from ..storage.isolation import is_set_aside
from ..storage.routing import writing_database
from .base import Run, announce, announce_apart, log_failed, rows_of_entries
from .closing import fail_cancelled
from .dispatching import dispatch
from .following import write_usable
from .holding import Hold
from .messages import entry_of, later_fence, message_of, restore
from .retrying import settle_final_claims
from .running import begin, count_crash, fail, lose, lose_unseen, undo_attempt
from .spill import replay_outcomes

LEASE_EXPIRED = "its lease expired: its host or supervisor is down"


def recover(
    broker: Broker,
    queue: str,
    worker_id: str,
    leases: Sequence[Lease],
    *,
    reason: str,
    blame: Blame | None = None,
    timed_out: Mapping[str, tuple[BaseException, datetime | None]] | None = None,
    stack: str = "",
) -> int:
    """Requeue or close the tasks that a lost worker held; return how many were requeued or recorded as finished.

    An outcome that the worker spilled to Redis is recorded, and its task does not run again.

    blame: None when nobody saw the worker die, since its whole host or its supervisor was lost (`blame_unseen`).
    timed_out: ids of the tasks because of which the process was stopped, with the error and `retry_at`, if any.
    stack: the last stack of the process, for the errors of the tasks that may have taken it down.

    | check    | the fence: a task that another run holds is left alone                                  |
    | row      | RUNNING → QUEUED with the fence raised; → FAILED after too many crashes or a timeout    |
    | Redis    | pending at the head, suspects, archived, or retry                                       |
    | announce | `run_lost` for each that had begun, `task_state_changed`                                |

    If we die in between, the leases expire and the reconciler does the same.
    """
    rows = rows_of_entries(broker, queue, [lease.id for lease in leases])
    if worker_id.startswith(HOLDER):
        # It is no worker, and began nothing; an open transaction may hold them still.
        Hold(worker_id).give_back(list(rows.values()))
        broker.remove(queue, [lease.id for lease in leases if lease.id not in rows])
        return 0
    # Another program runs these, and recovers them.
    leases = [lease for lease in leases if lease.id not in rows or not rows[lease.id].is_remote]
    final = [lease for lease in leases if lease.id in rows and rows[lease.id].is_final]
    settle_final_claims(broker, queue, worker_id, final, rows)
    rest = [lease for lease in leases if lease not in final]
    recorded_now = replay_outcomes(broker, queue, worker_id, rest, rows) if rest else set()
    live = {lease.id: lease for lease in rest if lease.id not in recorded_now}
    ids = [str(rows[id].id) for id in live if id in rows]
    loss = Loss(reason, blame or blame_unseen(worker_id, ids), timed_out or {}, stack, was_seen=blame is not None)
    closed, suspects = _close_runs(live, rows, worker_id, loss)
    return len(recorded_now) + _update_redis(broker, queue, worker_id, live, closed, suspects, rows)


def _close_runs(
    live: Mapping[str, Lease], rows: Mapping[str, TaskRecord], worker_id: str, loss: Loss
) -> tuple[list[TaskRecord], set[str]]:
    """Write the rows of lost runs; return those that were written, and the ids that run alone next."""
    runs = [
        _close_run(Run(rows[id], lease), worker_id, loss)
        for id, lease in live.items()
        if id in rows and rows[id].state != TaskState.FAILED and not _is_of_later(rows[id], lease)
    ]
    accepted = write_usable([write for write, _ in runs], writing_database(TaskRecord)) if runs else set()
    closed = [(write.record, lost) for write, lost in runs if write.record.id in accepted]
    for record, lost in closed:
        if lost:
            announce_apart(run_lost, record, **lost)
        if record.state == TaskState.FAILED:
            log_failed(record)
    return [record for record, _ in closed], {write.record.redis_id for write, _ in runs if write.record.is_suspect}


def _is_of_later(row: TaskRecord, lease: Lease) -> bool:
    """Return whether a row was changed since the claim: it waits as somebody wants it now, and the lost run is void."""
    return row.state == TaskState.QUEUED and row.fence >= lease.fence


class Blame(NamedTuple):
    """What the loss of a worker means for the tasks that it held. A task in no set is innocent.

    named: ids of those that took it down, as the process said itself; each counts one crash. alone: of one that was
    alone in it; that counts a crash, unless it is its first loss. suspects: of those that may have done so (`lose`).
    """

    named: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()


def blame_unseen(worker_id: str, ids: Iterable[str]) -> Blame:
    """Return whom to blame when the whole host or the supervisor of a worker was lost, and all it held may have begun.

    A task in quarantine is counted, because it may have taken the host down: a container ends with its main process.
    """
    all_ids = frozenset(ids)
    return Blame(alone=all_ids) if runs_alone(worker_id) else Blame(suspects=all_ids)


class Loss(NamedTuple):
    """How a worker was lost; the arguments of `recover`. was_seen: whether anybody saw it die."""

    reason: str
    blame: Blame
    timed_out: Mapping[str, tuple[BaseException, datetime | None]]
    stack: str
    was_seen: bool


def _close_run(run: Run, worker_id: str, loss: Loss) -> tuple[FencedWrite, dict[str, Any] | None]:
    """Change the `TaskRecord` of a lost run in memory; raise its fence as the script will raise it in Redis.

    Return also what `run_lost` says of it, None if it is not known to have begun.
    """
    record, id, now = run.record, str(run.record.id), database_clock.now()
    read_fence = record.fence
    may_be_blamed = any(id in ids for ids in loss.blame)
    if record.state == TaskState.QUEUED and (may_be_blamed or id in loss.timed_out):
        # The run began after the last report, so the row does not say RUNNING yet.
        begin(run, worker_id, now)
    lost = None
    # Of what a lost host held, a row that does not say RUNNING may have waited there.
    if record.state == TaskState.RUNNING and (loss.was_seen or not run.begun):
        error = loss.timed_out[id][0] if id in loss.timed_out else WorkerLost(loss.reason)
        lost = _lost(record, error, now)
    if id in loss.timed_out:
        exception, retry_at = loss.timed_out[id]
        fail(run, exception, loss.stack, now, retry_at=retry_at)
    elif may_be_blamed:
        if id in loss.blame.named:
            count_crash(record, loss.reason, now, stack=loss.stack)
            if runs_isolated(worker_id):
                # It needs no quarantine to be the only one in its process.
                record.suspicion = Suspicion.NONE
        else:
            lose(record, loss.reason, now, may_count=id in loss.blame.alone, stack=loss.stack)
    elif record.state == TaskState.RUNNING:
        # It is innocent, or its function had returned and its outcome was not recorded yet.
        undo_attempt(record)
        record.state = TaskState.QUEUED
    fail_cancelled(record, now)
    # Both stores then refuse late answers of the lost worker.
    record.fence = run.lease.fence + 1
    return FencedWrite(record, run.lease.fence, read_fence), lost


def _lost(record: TaskRecord, exception: BaseException, now: datetime) -> dict[str, Any]:
    """Return what `run_lost` says of a run, as its row is before it is closed."""
    began_at = record.last_attempted_at or now
    return {"exception": exception, "attempt": record.attempt, "began_at": began_at, "lost_at": now}


def _update_redis(
    broker: Broker,
    queue: str,
    worker_id: str,
    leases: Mapping[str, Lease],
    records: Sequence[TaskRecord],
    suspects: Collection[str],
    rows: Mapping[str, TaskRecord],
) -> int:
    """Make Redis follow the rows: requeue QUEUED tasks, retry or archive FAILED ones; restore what has no row."""
    failed = {record.redis_id: record for record in records if record.state == TaskState.FAILED}
    # A row that cannot be read now is one all the same.
    rowless = [lease for id, lease in leases.items() if id not in rows and not is_set_aside(id)]
    unfinished = [lease for id, lease in leases.items() if id not in failed and lease not in rowless]
    words_of_rowless = restore(broker, queue, worker_id, rowless)
    words = broker.requeue(queue, worker_id, unfinished, raise_fence=True, suspects=suspects) if unfinished else []
    if retrying := [record for record in failed.values() if record.retry_at]:
        items = [(leases[record.redis_id], message_of(record), entry_of(record).due_at or 0) for record in retrying]
        broker.retry(queue, worker_id, items)
    if final := [record for record in failed.values() if record.retry_at is None]:
        broker.archive(queue, worker_id, [(leases[record.redis_id], message_of(record)) for record in final])
    _announce(records)
    return words.count("requeued") + words_of_rowless.count("restored")


def _announce(records: Sequence[TaskRecord]) -> None:
    for state in (TaskState.QUEUED, TaskState.FAILED):
        announce([record for record in records if record.state == state], TaskState.RUNNING, state)


def abandon(record: TaskRecord, reason: str) -> bool:
    """Close a run that neither Redis nor any worker knows, and queue the task again; return whether it was open.

    Its host may have died of it, so after a second time in a row the first worker that claims it sets it aside.

    | check    | the fence: the row still names this run                              |
    | row      | RUNNING → QUEUED, or FAILED with `WorkerLost` after too many crashes |
    | Redis    | pending (`dispatch`), with a fence above all earlier ones            |
    | announce | `run_lost`, `task_state_changed`                                     |

    If we die in between, the reconciler pushes the row.
    """
    held, lost = record.fence, _lost(record, WorkerLost(reason), database_clock.now())
    lose_unseen(record, reason)
    fail_cancelled(record, database_clock.now())
    # Of two processes that abandon a run at the same time, one succeeds: the other finds a different fence.
    record.fence = later_fence(record)
    if record.id not in write_usable([FencedWrite(record, held, held)], writing_database(TaskRecord)):
        return False
    announce_apart(run_lost, record, **lost)
    if record.is_final:
        log_failed(record)
    else:
        dispatch([record], again=True)
    announce([record], TaskState.RUNNING, TaskState(record.state))
    return True


def describe_exit(exit_code: int | None) -> str:
    """Describe how a worker process exited, for the error on the row. exit_code: None if it did not start."""
    if exit_code is None:
        return "its process did not start"
    if exit_code < 0:
        number = -exit_code
        name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""  # real-time ones have none
        return f"its process was killed by signal {number}{name}"
    if exit_code == EX_SOFTWARE:
        return f"a thread of its process died, so the process exited with code {exit_code}"
    return f"its process exited with code {exit_code}"
