"""Run tasks: begin, succeed or fail, record, acknowledge; or requeue, postpone and refuse.

A Run is one claim of one task. `begin`, `succeed` and `fail` change the `TaskRecord` in memory. `record_runs` writes
the rows of a whole batch, and only those of runs that still hold their fence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connections, transaction

from .. import conf
from ..broker import Broker, Lease
from ..broker.unknown_tasks import label_of
from ..core.guard import class_name, get_logger, is_a
from ..core.logs import about, log_extra
from ..core.names import runs_alone
from ..core.payload import CLEARED, MESSAGE_CHARACTERS, storable_text, text_of
from ..core.typed import is_typed, occurs_in
from ..core.versions import upgraded
from ..exceptions import TaskCancelled, TaskExpired, WorkerLost
from ..models import FailureReason, Suspicion, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.batches import FencedWrite
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import lock_free_rows, rows_of, transaction_of, writing_database
from .base import Run, announce, append_error, load_rows, log_failed, reason_of
from .dispatching import by_queue
from .following import write_fenced
from .members import write_of
from .messages import acknowledge_done, entry_of, later_fence, message_of, named_rows

logger = get_logger("django_asyncq.lifecycle")


def lose(record: TaskRecord, reason: str, now: datetime, *, may_count: bool = False, stack: str = "") -> None:
    """RUNNING → QUEUED in memory after the worker was lost, perhaps because of this task.

    The first loss is nobody's fault: most come from outside, as with a deploy or a lost host, and the task goes back as
    any other. Lost again before a run of it has ended, it runs alone next.
    may_count: whether no other task can have caused it; then each loss but the first counts a crash, see `count_crash`.
    stack: the last stack of the process, if it could still write one.
    """
    if record.suspicion and may_count:
        count_crash(record, reason, now, stack=stack)
        return
    record.state = TaskState.QUEUED
    _lose(record, reason, now, stack, Suspicion.SUSPECT if record.suspicion else Suspicion.LOST)


def count_crash(record: TaskRecord, reason: str, now: datetime, *, stack: str = "") -> None:
    """RUNNING → QUEUED in memory after this task took its worker down; → FAILED after too many crashes in a row.

    It runs alone next.
    """
    record.crash_count += 1
    if record.crash_count >= conf.current().max_crashes:
        record.state = TaskState.FAILED
        record.retry_at = None
        record.finished_at = now
    else:
        record.state = TaskState.QUEUED
    _lose(record, reason, now, stack, Suspicion.SUSPECT)


def _lose(record: TaskRecord, reason: str, now: datetime, stack: str, suspicion: Suspicion) -> None:
    if record.is_batch and record.is_suspect:
        # Lost alone: its members run one by one next, so that only the one to blame fails (`members`).
        record.state, record.retry_at, record.finished_at = TaskState.FAILED, None, now
    record.suspicion = suspicion
    append_error(record, WorkerLost(reason), stack, now)
    # A loss uses no attempt. The worker stays in `worker_ids`, next to its error.
    record.attempt = max(record.attempt - 1, 0)


def lose_unseen(record: TaskRecord, reason: str) -> None:
    """RUNNING → QUEUED, or FAILED after too many crashes, in memory: nobody saw its worker die.

    Only a task in quarantine counts a crash, as in `blame_unseen`.
    """
    was_alone = bool(record.worker_ids) and runs_alone(record.worker_ids[-1])
    lose(record, reason, database_clock.now(), may_count=was_alone)


def begin(run: Run, worker_id: str, now: datetime) -> None:
    """QUEUED → RUNNING in memory, before the function is called.

    The row is written later, by `mark_running` or with the outcome.
    """
    record = run.record
    record.state = TaskState.RUNNING
    run.read_fence, record.fence = record.fence, run.lease.fence
    record.attempt += 1
    record.started_at = record.started_at or now
    record.last_attempted_at = now
    record.worker_ids = [*record.worker_ids, worker_id]
    if record.progress is not None:
        record.progress = CLEARED
    run.begun = True
    for member in run.members:
        begin(member, worker_id, now)


def upgrade(record: TaskRecord, task: Any) -> None:
    """Give a task the arguments that this code takes, where older code enqueued it; the next write of its row has them.

    Raises: UpgradeFailed, and nothing is changed.
    """
    given = upgraded(task, record.args, record.kwargs, record.version, has_typed=record.has_typed_arguments)
    record.args, record.kwargs, record.version, record.is_upgraded = given.args, given.kwargs, task.version, True
    record.has_typed_arguments = is_typed(task) and occurs_in(given)


def succeed(run: Run, value: Any, now: datetime) -> None:
    """RUNNING → SUCCEEDED in memory; `record_runs` writes the row. value: from `payload.storable_result`."""
    record = run.record
    record.state = TaskState.SUCCEEDED
    record.suspicion = Suspicion.NONE
    record.return_value = value
    record.finished_at = now


def complete(
    run: Run, value: Any, now: datetime, *, settle_members: Callable[[Run], object] | None = None
) -> Run | None:
    """Write the success in the caller's transaction; return the completed run, or None for a stale fence.

    settle_members: of a batch: changes the rows of the members in memory, as the value says.

    | check    | the fence: if another run holds it, the caller rolls its effects back                 |
    | row      | RUNNING or QUEUED → SUCCEEDED, in the transaction that holds the effects of the task  |
    | Redis    | after the commit: the reporter acknowledges                                           |
    | announce | after the acknowledgement: `task_state_changed`                                       |

    If we die before the commit, nothing of the run remains and the reconciler recovers it. If we die after it, the
    next worker that claims the entry finds the row final and acknowledges. The given run is unchanged, because after a
    rollback it must still be finished.
    """
    database = writing_database(TaskRecord)
    members = [replace(each, record=copy.copy(each.record)) for each in run.members]
    completed = replace(run, record=copy.copy(run.record), members=members)
    succeed(completed, value, now)
    if settle_members is not None:
        settle_members(completed)
    write = [write_of(completed)]
    try:
        # The savepoint saves the effects when the database refuses the result. It never refuses None.
        with transaction_of(TaskRecord, savepoint=value is not None):
            written = write_fenced(write, database)
    except DatabaseError as error:
        if value is None or kind_of(error) is not ErrorKind.ROW:
            raise
        logger.exception("task %s: the database refuses its result", run.record.id, extra=log_extra(run.record))
        strip_result(completed, str(error))
        written = write_fenced(write, database)
    return completed if written else None


def strip_result(run: Run, reason: str) -> None:
    """Replace what the database refused by notes, so that at least the outcome can be recorded."""
    record = run.record
    if record.state == TaskState.SUCCEEDED:
        record.return_value = {"result_not_stored": storable_text(reason, MESSAGE_CHARACTERS)}
    record.errors = [
        {**error, "message": "not stored: the database refused it", "traceback": ""} for error in record.errors
    ]


def fail(
    run: Run,
    exception: BaseException,
    traceback: str,
    now: datetime,
    *,
    retry_at: datetime | None,
    counted: bool = True,
    is_cancelled: bool = False,
) -> None:
    """RUNNING → FAILED in memory, or RETRYING with `retry_at`; `record_runs` writes the row.

    counted: whether the run uses up an attempt. is_cancelled: its task was cancelled before it failed.
    """
    record = run.record
    record.state = TaskState.FAILED
    record.suspicion = Suspicion.NONE
    record.retry_at = retry_at
    record.finished_at = None if retry_at else now
    run.counted = counted
    if is_a(exception, TaskExpired) or (is_a(exception, TaskCancelled) and not exception.had_begun):
        # Its function was not called.
        undo_attempt(record)
        if not record.attempt:
            record.started_at = record.last_attempted_at = None
    if retry_at and counted:
        # Crashes and cuts are counted in a row. The number of attempts bounds how often the row begins anew.
        record.crash_count = 0
    if counted:
        append_error(record, exception, traceback, now)
    else:
        record.reason = reason_of(exception)
        undo_attempt(record)
    if is_cancelled:
        record.reason = FailureReason.CANCELLED


def undo_attempt(record: TaskRecord) -> None:
    """Undo the attempt that `begin` counted."""
    record.attempt = max(record.attempt - 1, 0)
    record.worker_ids = record.worker_ids[:-1]


def mark_running(runs: Sequence[Run], *, patient: bool = True) -> list[Run]:
    """Record that runs are RUNNING, when they have not finished after a while; return those that lost their lease.

    patient: as of `write_fenced`; otherwise runs whose rows are locked are not marked, as `written` shows.

    | check    | the fence: a run that lost its lease changes nothing |
    | row      | QUEUED → RUNNING                                     |
    | Redis    | nothing: the lease is there since the claim          |
    | announce | `task_state_changed`                                 |

    If we die in between, the row is RUNNING without a lease, and the reconciler requeues the task.
    """
    lost, locked = (record_runs(runs), set[Run]()) if patient else record_unlocked(runs)
    marked = [run for run in runs if run not in locked]
    for run in marked:
        run.written = True
    announce(every_record(run for run in marked if run not in lost), TaskState.QUEUED, TaskState.RUNNING)
    return lost


class Recorded(NamedTuple):
    """What became of the runs of a batch. lost: they no longer hold their fence. locked: nothing was written yet."""

    lost: list[Run]
    locked: set[Run]


def record_unlocked(runs: Sequence[Run]) -> Recorded:
    """Do what `record_runs` does, except for rows that another transaction has locked: it may last for long.

    That costs a plain batch nothing: only after the database has refused a statement are the rows locked one by one.
    On a database that cannot skip locked rows, as SQLite, the refusal is raised.
    """
    try:
        return Recorded(record_runs(runs, patient=False), set())
    except DatabaseError as error:
        features = connections[writing_database(TaskRecord)].features
        if kind_of(error) is not ErrorKind.AGAIN or not features.has_select_for_update_skip_locked:
            raise
    rows = rows_of(TaskRecord).filter(id__in=[run.record.id for run in runs])
    with transaction_of(TaskRecord):
        free = lock_free_rows(rows)
        # A deleted row is not free either, and its run is lost.
        locked_ids = set(rows.values_list("id", flat=True)) - free
        recorded = _record_free([run for run in runs if run.record.id not in locked_ids])
    return Recorded(recorded.lost, recorded.locked | {run for run in runs if run.record.id in locked_ids})


def _record_free(runs: Sequence[Run]) -> Recorded:
    """Record runs whose rows the caller's transaction has locked.

    MySQL may refuse one all the same: an INSERT also locks the neighbour of its unique slot in the index, for as long
    as its transaction lasts. So after a refusal each is written by itself.
    """
    lost, locked = list[Run](), set[Run]()
    parts = [list(runs)]
    while parts:
        part = parts.pop()
        try:
            with transaction_of(TaskRecord):
                lost += record_runs(part, patient=False)
        except DatabaseError as error:
            # A deadlock ends the transaction, and with it what was written before.
            if kind_of(error) is not ErrorKind.AGAIN or transaction.get_rollback(writing_database(TaskRecord)):
                raise
            if len(part) == 1:
                locked |= set(part)
            else:
                parts = [[run] for run in part]
    return Recorded(lost, locked)


def record_runs(runs: Sequence[Run], *, patient: bool = True) -> list[Run]:
    """Write the rows of runs with one UPDATE for the batch; return the runs that no longer hold their fence.

    patient: as of `write_fenced`.
    Raises: django.db.Error; all or nothing was written then, and the call may be repeated.
    """
    database = writing_database(TaskRecord)
    writes = [
        write_of(run) if run.members else FencedWrite(run.record, run.lease.fence, run.read_fence) for run in runs
    ]
    accepted = write_fenced(writes, database, patient=patient)
    for run, write in zip(runs, writes, strict=True):
        if write.members:
            # The others were cancelled or replaced meanwhile, and are no longer the batch's.
            run.members = [member for member in run.members if member.record.id in accepted]
    lost = [run for run in runs if run.record.id not in accepted]
    for run in lost:
        with about(run.record):
            logger.warning(
                "task %s: lost its lease (fence %d); its outcome is not recorded",
                run.record.id,
                run.lease.fence,
                extra=log_extra(run.record),
            )
    return lost


def already_recorded(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose outcome the row already has: a commit without an answer may have succeeded."""
    rows = load_rows([str(run.record.id) for run in runs])
    found = [(run, rows.get(str(run.record.id))) for run in runs]
    return [run for run, row in found if row and (row.fence, row.state) == (run.record.fence, run.record.state)]


def every_record(runs: Iterable[Run]) -> list[TaskRecord]:
    """Return the rows of runs, each followed by those of its members."""
    return [each.record for run in runs for each in (run, *run.members)]


def acknowledge(broker: Broker, worker_id: str, runs: Sequence[Run], lost: Sequence[Run] = ()) -> None:
    """Acknowledge recorded runs in Redis: done, retry, archive or requeue, one script per queue and kind.

    lost: runs that no longer held their fence. Their entry is removed, unless another run holds it.

    | check    | the fence: an entry that another run holds is left alone |
    | row      | written before, by `record_runs`                         |
    | Redis    | removed, retry, archived, or pending after a cut; scheduled after a run without a connection |
    | announce | afterwards, by the caller                                |

    If we die before, the next worker that claims the entry finds the row final and acknowledges it.
    Raises: BrokerUnavailable; the call may be repeated.
    """
    runs_by_id, lost_runs = {run.record.id: run for run in runs}, set(lost)
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        of = [runs_by_id[record.id] for record in group]
        # A discarded task has failed for its row only, as one that returns `RevokeTask` in asynq.
        done, rest = list[Run](), list[Run]()
        for run in of:
            is_over = run.record.state == TaskState.SUCCEEDED or run in lost_runs or run.record.is_discarded
            (done if is_over else rest).append(run)
        if done:
            acknowledge_done(
                of_alias, queue, worker_id, [(None if run in lost_runs else run.record, run.lease) for run in done]
            )
        for counted in (True, False):
            again = [run for run in rest if run.record.retry_at and run.counted is counted]
            if again:
                of_alias.retry(queue, worker_id, [_retry_item(run) for run in again], counted=counted)
        _requeue_or_postpone(of_alias, queue, worker_id, [run for run in rest if run.record.state == TaskState.QUEUED])
        final = [run for run in rest if run.record.state == TaskState.FAILED and run.record.retry_at is None]
        if final:
            of_alias.archive(queue, worker_id, [(run.lease, message_of(run.record)) for run in final])
    members = [each.record for run in runs if run not in lost_runs for each in run.members]
    if retrying := [record for record in members if record.retry_at]:
        # Each has an entry of its own again.
        for of_alias, queue, group in by_queue(broker, retrying):
            of_alias.park(queue, [entry_of(record, fence=later_fence(record)) for record in group])


def _requeue_or_postpone(broker: Broker, queue: str, worker_id: str, runs: Sequence[Run]) -> None:
    """Return unfinished runs to the head of their queue, or postpone them."""
    for seconds in {run.pause_seconds for run in runs}:
        leases = [run.lease for run in runs if run.pause_seconds == seconds]
        if seconds:
            broker.postpone(queue, worker_id, leases, seconds)
        else:
            broker.requeue(queue, worker_id, leases)


def _retry_item(run: Run) -> tuple[Lease, bytes, int]:
    retry_at = run.record.retry_at
    assert retry_at is not None  # noqa: S101 - chosen by the caller
    return run.lease, message_of(run.record), math.ceil(retry_at.timestamp())


def requeue(broker: Broker, worker_id: str, runs: Sequence[Run]) -> None:
    """Return unfinished tasks to the head of their queue, suspects to their own place; no attempt is used.

    | check    | the fence: a run that lost its lease changes nothing |
    | row      | RUNNING → QUEUED, where the row says RUNNING         |
    | Redis    | pending, at the head; or suspects                    |
    | announce | `task_state_changed`, where the row said RUNNING     |

    If we die in between, the lease expires and the reconciler requeues the task.
    """
    for run in runs:
        if run.begun:
            undo_attempt(run.record)
            run.record.state = TaskState.QUEUED
    begun = [run for run in runs if run.begun]
    lost = record_runs([run for run in begun if run.written])
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs if run not in lost]):
        ids = {record.id for record in group}
        suspects = {record.redis_id for record in group if record.is_suspect}
        of_alias.requeue(queue, worker_id, [run.lease for run in runs if run.record.id in ids], suspects=suspects)
    announce([run.record for run in begun if run.written and run not in lost], TaskState.RUNNING, TaskState.QUEUED)


def leave_to_others(broker: Broker, worker_id: str, runs: Sequence[Run], seconds: int) -> None:
    """Return tasks to the head of their queue for workers with other code; this code does not take them for a while.

    | check    | the fence: a run that lost its lease changes nothing               |
    | row      | none: it stays QUEUED, and no attempt is used                      |
    | Redis    | pending, at the head; the time that `postpone` counts begins anew  |
    | announce | nothing                                                            |

    If we die before, the lease expires and the reconciler requeues the task.
    """
    runs_by_id = {run.record.id: run for run in runs}
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        leases = [runs_by_id[record.id].lease for record in group]
        of_alias.requeue(queue, worker_id, leases, left_seconds=seconds)


def postpone(
    broker: Broker,
    worker_id: str,
    runs: Sequence[Run],
    delay_seconds: int,
    *,
    is_unknown: bool = False,
    due_ms: Mapping[UUID, int] | None = None,
) -> Mapping[UUID, int]:
    """Put tasks aside that cannot run here now; the row stays QUEUED and no attempt is used.

    is_unknown: whether they wait for code that has them, and are due at once when a worker has it
    (`broker.unknown_tasks`). due_ms: for each id, when it may be claimed again, in Unix milliseconds by Redis's clock.

    Returns: for each id, for how many seconds it has waited for code so far (-1: its lease was lost).
    """
    ages: dict[UUID, int] = {}
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        ids = {record.id for record in group}
        of_queue = [run for run in runs if run.record.id in ids]
        leases = [run.lease for run in of_queue]
        labels = [label_of(run.record.name, run.record.version) for run in of_queue] if is_unknown else []
        due = [due_ms[run.record.id] for run in of_queue] if due_ms else []
        found = of_alias.postpone(queue, worker_id, leases, delay_seconds, labels=labels, due_ms=due)
        ages |= dict(zip([run.record.id for run in of_queue], found, strict=True))
    return ages


def refuse(broker: Broker, run: Run, exception: BaseException) -> None:
    """Fail a task whose code is not here and will not come, as in a test; the row says why. Workers wait for code.

    | check    | the fence: a run that lost its lease changes nothing |
    | row      | QUEUED → FAILED, with the error                      |
    | Redis    | the entry is removed                                 |
    | announce | `task_state_changed`                                 |

    If we die in between, the next worker that claims the entry finds the row final and acknowledges.
    """
    record, now = run.record, database_clock.now()
    run.read_fence = record.fence
    record.state, record.fence, record.finished_at = TaskState.FAILED, run.lease.fence, now
    append_error(record, exception, "", now)
    if record_runs([run]):
        return
    log_failed(record)
    broker.remove(record.queue_name, [record.redis_id], named_rows([record]))
    announce([record], TaskState.QUEUED, TaskState.FAILED)


# --- Requeue or postpone a run of which nothing remains in the database, so that it uses no attempt.
#
# One whose connection was cut before its commit has run, so it is counted. One that got no connection is not.

# Each run of such a body is cut, so the text says where to look.
REMEDY = (
    "If this happens in each run, the transaction may be idle for longer than the server's "
    "idle_in_transaction_session_timeout (on MariaDB idle_transaction_timeout): keep it short, "
    "with complete_on_commit() for the last part of the task"
)


def count_cut(run: Run, error: BaseException, traceback: str, now: datetime) -> None:
    """RUNNING → QUEUED in memory after a cut; → FAILED after MAX_CRASHES cuts and crashes in a row.

    error: the database's own. `record_runs` writes the row, and `acknowledge` requeues the task in Redis.
    """
    text = f"{class_name(error)}: {text_of(error)}".strip()
    count_crash(
        run.record,
        f"its database connection was cut, and nothing was committed: {text}. {REMEDY}",
        now,
        stack=traceback,
    )
    # The process did not die of it.
    run.record.suspicion = Suspicion.NONE


def postpone_run(run: Run, pause_seconds: int) -> None:
    """RUNNING → QUEUED in memory for a run that got no connection to the database: no attempt, no crash.

    pause_seconds: how long the task waits before it may be claimed again. `record_runs` writes the row if it says
    RUNNING, and `acknowledge` postpones the task in Redis.
    """
    undo_attempt(run.record)
    run.record.state = TaskState.QUEUED
    run.pause_seconds = pause_seconds
