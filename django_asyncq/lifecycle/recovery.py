"""How a task comes back: retried by time or by a person, or recovered from a lost worker."""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections, router, transaction
from django.utils import timezone

from .. import failpoints
from ..broker import Broker, Lease
from ..exceptions import GateUnavailable
from ..models import TaskRecord, TaskState
from ..storage.batches import FencedWrite, write_fenced
from .dispatching import GATE_RETRY_SECONDS, dispatch
from .enqueueing import CommitHook
from .events import announce, ask
from .messages import entry_of, later_fence, message_of
from .outcome_spill import replay_outcomes
from .running import Run, begin, count_crash, fail, load_rows, undo_attempt

logger = logging.getLogger("django_asyncq.lifecycle")


class Retried(NamedTuple):
    """What became of a retry. full: their gate had no room; not_failed: they were not in state 3, or are gone."""

    retried: list[TaskRecord]
    full: list[TaskRecord]
    not_failed: list[UUID]


class Redispatch(CommitHook):
    """Pushes all that a transaction retried."""

    def __call__(self) -> None:
        failpoints.reach("retry.committed")
        dispatch(self.records, again=True)
        announce(self.records, TaskState.FAILED, TaskState.QUEUED)


def retry(ids: Collection[UUID], *, by_person: bool) -> Retried:
    """Queue failed tasks again, as many as their gates admit.

    by_person: also those that have ended for good; lost workers are then forgotten, attempts are not, so a task
        that has used them up gets one try.

    | check    | `task_state_changing`: the gate's receiver acquires again, and may refuse some |
    | row      | 3 → 0, the rows locked; two who retry the same task at once: one does          |
    | Redis    | after the commit: out of retry or archived, into pending                       |
    | announce | `task_state_changed`                                                           |

    If we die in between, the reconciler pushes the row.
    Raises: GateUnavailable and what other receivers veto with; nothing is changed then.
    """
    database = router.db_for_write(TaskRecord)
    with transaction.atomic(using=database):
        rows = TaskRecord.objects.using(database).select_for_update().filter(id__in=ids, state=TaskState.FAILED)
        records = list(rows if by_person else rows.filter(retry_at__isnull=False))
        refused = ask(records, TaskState.FAILED, partial=True, timed=not by_person) if records else set()
        failpoints.reach("retry.slot_acquired")
        admitted = [record for record in records if record.id not in refused]
        changes: dict[str, Any] = {"state": TaskState.QUEUED, "retry_at": None, "finished_at": None, "run_after": None}
        if by_person:
            changes["crash_count"] = 0
        for record in admitted:
            for name, value in changes.items():
                setattr(record, name, value)
        # Not `bulk_update`: it writes a CASE for each value, though all rows get the same.
        rows.filter(id__in=[record.id for record in admitted]).update(**changes)
        if admitted:
            connection = connections[database]
            hook = Redispatch.of_transaction(connection)
            hook.records.extend(admitted)
            hook.register(connection)
    found = {record.id for record in records}
    return Retried(
        admitted, [record for record in records if record.id in refused], [id for id in ids if id not in found]
    )


def retry_due(broker: Broker, queue: str, ids: Sequence[str]) -> int:
    """Queue tasks again whose `retry_at` has come; those whose gate is full are looked at again later.

    ids: as found due in Redis. Returns how many were queued. Entries that have no row in 3 are removed.
    """
    rows = load_rows([Lease(id, 0) for id in ids])
    stale = [id for id in ids if (row := rows.get(id)) is None or row.is_final]
    if stale:
        broker.remove(queue, stale)
    waiting = [row for row in rows.values() if row.state == TaskState.FAILED and row.retry_at is not None]
    try:
        outcome = retry([row.id for row in waiting], by_person=False)
        full = outcome.full
        retried = len(outcome.retried)
    except GateUnavailable:
        full, retried = waiting, 0
    if full:
        retry_at = timezone.now() + timedelta(seconds=GATE_RETRY_SECONDS)
        unchanged = TaskRecord.objects.filter(id__in=[row.id for row in full], state=TaskState.FAILED)
        unchanged.filter(retry_at__isnull=False).update(retry_at=retry_at)
        for row in full:
            row.retry_at = retry_at
        broker.park(queue, [entry_of(row) for row in full])
    return retried


def recover(
    broker: Broker,
    queue: str,
    worker_id: str,
    leases: Sequence[Lease],
    *,
    reason: str,
    crashed: bool = True,
    started: Collection[str] = (),
    timed_out: Mapping[str, tuple[BaseException, datetime | None]] | None = None,
    stack: str = "",
) -> int:
    """Hand back what a lost worker held; return how many tasks go on or were recorded as ended.

    An outcome that the worker left in Redis is recorded, and its task is not run again.

    crashed: whether the worker died; each task it was running then costs a crash, though never an attempt.
    started: ids that are known to have been running; rows in 1 count as such too.
    timed_out: ids whose process was ended because of them, with the error and the time of the next try if any.
    stack: the process's last one, for the errors of the tasks it was running.

    | check    | the fence: a task that another run holds is left alone                              |
    | row      | 1 → 0 with the fence raised; too many crashes: 3 with `WorkerLost`; timed out: 3    |
    | Redis    | pending at the head, archived, or retry                                             |
    | announce | `task_state_changed`                                                                |

    If we die in between, the lease runs out and the reconciler does the same.
    """
    rows = load_rows(leases)
    final = [lease for lease in leases if lease.id in rows and rows[lease.id].is_final]
    if final:
        broker.done(queue, worker_id, final)
    rest = [lease for lease in leases if lease not in final]
    recorded_now = replay_outcomes(broker, queue, worker_id, rest, rows) if rest else set()
    live = {lease.id: lease for lease in rest if lease.id not in recorded_now}
    loss = Loss(reason, crashed, frozenset(started), timed_out or {}, stack)
    writes = [
        _close_run(Run(rows[id], lease), worker_id, loss)
        for id, lease in live.items()
        if id in rows and rows[id].state != TaskState.FAILED
    ]
    accepted = write_fenced(writes, router.db_for_write(TaskRecord)) if writes else set()
    failpoints.reach("recover.row_written")
    closed = [write.record for write in writes if write.record.id in accepted]
    return len(recorded_now) + _give_on(broker, queue, worker_id, live, closed)


class Loss(NamedTuple):
    """How a worker was lost; the arguments of `recover`."""

    reason: str
    crashed: bool
    started: frozenset[str]
    timed_out: Mapping[str, tuple[BaseException, datetime | None]]
    stack: str


def _close_run(run: Run, worker_id: str, loss: Loss) -> FencedWrite:
    """Change the record of a lost run in memory, its fence raised as Redis will raise its own."""
    record, id, now = run.record, str(run.record.id), timezone.now()
    if record.state == TaskState.QUEUED and (id in loss.started or id in loss.timed_out):
        # It began less than a report ago: the row does not know yet.
        begin(run, worker_id, now)
    if id in loss.timed_out:
        exception, retry_at = loss.timed_out[id]
        fail(run, exception, "", now, retry_at=retry_at)
    elif record.state == TaskState.RUNNING and loss.crashed:
        count_crash(record, loss.reason, now, stack=loss.stack)
    elif record.state == TaskState.RUNNING:
        undo_attempt(record)
        record.state = TaskState.QUEUED
    # So that the lost worker's late answers match neither store.
    record.fence = run.lease.fence + 1
    return FencedWrite(record, run.lease.fence)


def _give_on(
    broker: Broker, queue: str, worker_id: str, leases: Mapping[str, Lease], records: Sequence[TaskRecord]
) -> int:
    """Follow the rows in Redis: requeue what is in 0 (and what has no row), retry or archive what is in 3."""
    ended = {str(record.id): record for record in records if record.state == TaskState.FAILED}
    onward = [lease for id, lease in leases.items() if id not in ended]
    words = broker.requeue(queue, worker_id, onward, raise_fence=True) if onward else []
    if again := [record for record in ended.values() if record.retry_at]:
        items = [(leases[str(record.id)], message_of(record), entry_of(record).due_at or 0) for record in again]
        broker.retry(queue, worker_id, items)
    if over := [record for record in ended.values() if record.retry_at is None]:
        broker.archive(queue, worker_id, [(leases[str(record.id)], message_of(record)) for record in over])
    failpoints.reach("recover.redis_updated")
    announce([record for record in records if record.state == TaskState.QUEUED], TaskState.RUNNING, TaskState.QUEUED)
    announce(list(ended.values()), TaskState.RUNNING, TaskState.FAILED)
    return words.count("requeued")


def abandon(record: TaskRecord, reason: str) -> bool:
    """Close a run that neither Redis nor any worker knows of, and queue the task again; return whether it was so.

    | check    | the fence: the row still tells of that run               |
    | row      | 1 → 0, or 3 with `WorkerLost` after too many crashes     |
    | Redis    | pending (`dispatch`), with a fence above all before      |
    | announce | `task_state_changed`                                     |
    """
    held = record.fence
    count_crash(record, reason, timezone.now())
    # So that of two who abandon the same run at once one does: the other finds another fence.
    record.fence = later_fence(record)
    if record.id not in write_fenced([FencedWrite(record, held)], router.db_for_write(TaskRecord)):
        return False
    failpoints.reach("abandon.row_written")
    if not record.is_final:
        dispatch([record], again=True)
    announce([record], TaskState.RUNNING, TaskState(record.state))
    return True


def describe_exit(exit_code: int | None) -> str:
    """Say how a worker process ended, for the error on the row."""
    if exit_code is not None and exit_code < 0:
        return f"its process was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"its process ended with exit code {exit_code}"
