"""Close tasks before another run of them begins: because they were cancelled, or have not begun in time.

A row that says QUEUED may be running, because RUNNING is written only after a while. So closing a row also raises its
fence above all that were handed out: the row then refuses the outcome of a run that a worker has claimed already. Such
a run is void. Its entry, its lease and its gate slot stay until its worker reports it (`settle_lost`), its lease
expires or its worker is lost (`settle_final`); so two bodies of a task never overlap, and the limit of a gate holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Q
from django.template.defaultfilters import pluralize

from .. import failpoints
from ..aliases import through_redis
from ..broker import Broker, Lease, stopping
from ..broker.inspection import claimed_ids
from ..exceptions import BrokerUnavailable, TaskCancelled, TaskExpired
from ..guard import get_logger
from ..logs import log_extra
from ..models import FailureReason, TaskRecord, TaskState
from ..runs import log_failed
from ..storage import database_clock
from ..storage.batches import FencedWrite
from ..storage.routing import rows_of, transaction_of, writing_database
from ..storage.row_conditions import as_check
from . import push_batcher
from .claimed_runs import Run
from .dispatching import by_queue, dispatch
from .events import announce
from .failures import append_error
from .following import free_slots, write_usable
from .messages import later_fence, named_rows
from .on_commit import CommitHook
from .ownership import load_rows
from .runs_here import ask_runs_here
from .wire_calls import acknowledge_done

logger = get_logger("django_asyncq.lifecycle")

# Why a row may be final although a worker still runs the task.
VOIDING = (FailureReason.CANCELLED, FailureReason.EXPIRED)
# QUEUED or RETRYING.
WAITING = Q(state=TaskState.QUEUED) | Q(state=TaskState.FAILED, retry_at__isnull=False)
# No worker of ours would report its end.
RUN_ELSEWHERE = Q(state=TaskState.RUNNING, is_remote=True)
ROWS_PER_PAGE = 500
# What `take_out` says of entries that it leaves where they are.
STAYING = ("active", "overtaken")


class Stop(CommitHook):
    """Takes the tasks out of Redis that a transaction closed, and asks the workers of running ones to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[UUID, TaskState] = {}
        self.running: list[TaskRecord] = []

    def follow_up(self) -> None:
        failpoints.reach("close.committed")
        ask_runs_here([*self.running, *self.records])
        if self.running:
            ask_to_stop(self.running)
        if not self.records:
            return
        for record in self.records:
            log_failed(record)
        claimed = take_out(through_redis(self.records))
        failpoints.reach("close.taken_out")
        # What has no slot is announced here alone, so that nobody announces it twice.
        settled = [record for record in self.records if not (record.gate and record.id in claimed)]
        for old in (TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED):
            announce([record for record in settled if self.old[record.id] == old], old, TaskState.FAILED)


def close(records: Sequence[TaskRecord], exception: BaseException, now: datetime, **changes: Any) -> None:
    """QUEUED or RETRYING → FAILED for rows that the caller's transaction has locked. changes: of other columns.

    | check    | none: the rows are locked, and were seen to wait                                           |
    | row      | QUEUED or RETRYING → FAILED, with the error and a fence above all that were handed out     |
    | Redis    | after the commit: removed; what a worker has claimed stays, and the worker is asked to stop |
    | announce | after the commit: `task_state_changed`; while a worker may use the slot of a gate, later   |

    If we die after the commit, a worker that claims the entry finds the row final and settles it (`settle_final`).
    """
    if not records:
        return
    fence = later_fence(max(records, key=lambda record: record.fence))
    connection = connections[writing_database(TaskRecord)]
    hook = Stop.of_transaction(connection)
    groups: dict[str, list[TaskRecord]] = {}
    for record in records:
        hook.old[record.id] = TaskState(record.state)
        _fail(record, exception, now)
        record.fence = fence
        for name, value in changes.items():
            setattr(record, name, value)
        # Most have never run, and get the same entry: one UPDATE for all of them.
        groups.setdefault(repr(record.errors), []).append(record)
    for group in groups.values():
        first = group[0]
        names = ("state", "reason", "fence", "retry_at", "finished_at", "errors", "last_exception", *changes)
        ids = [record.id for record in group]
        waiting = rows_of(TaskRecord).filter(as_check(WAITING | RUN_ELSEWHERE), id__in=ids)
        waiting.update(**{name: getattr(first, name) for name in names})
    free_slots(records)
    failpoints.reach("close.rows_written")
    hook.records.extend(records)
    hook.register(connection)


def _fail(record: TaskRecord, exception: BaseException, now: datetime) -> None:
    """Change a row in memory to a final failure, for which no attempt is counted."""
    record.state = TaskState.FAILED
    record.retry_at = None
    record.finished_at = now
    append_error(record, exception, "", now)


def close_cancelled(ids: Collection[UUID] | None = None) -> int:
    """Close the tasks that wait although somebody has cancelled them while they ran; return how many.

    ids: None for all. Rows that another transaction has locked are skipped.
    """
    return _close_where("cancel_requested_at", Q(cancel_requested_at__isnull=False), ids, _cancelled)


def expire(ids: Collection[UUID] | None = None) -> int:
    """Close the tasks that wait and have not begun in time; return how many. ids, locked rows: as `close_cancelled`.

    ids: None for all, except those that a worker has claimed: they may have begun in time, before their rows say so,
    and the worker closes those that have not. Raises: then also BrokerUnavailable.
    """
    condition = Q(expires_at__lte=database_clock.now())
    return _close_where("expires_at", condition, ids, lambda _: expired(), are_claimed_left=ids is None)


def _close_where(
    column: str,
    condition: Q,
    ids: Collection[UUID] | None,
    error_of: Callable[[TaskRecord], BaseException],
    *,
    are_claimed_left: bool = False,
) -> int:
    """Close the waiting rows with a condition, page by page. column: the first of the index that finds them."""
    # The index holds no finished row. A database uses it only for a query that repeats this condition.
    look = Q(WAITING, condition, finished_at__isnull=True)
    rows, still = rows_of(TaskRecord), as_check(look)
    skip_locked = connections[rows.db].features.has_select_for_update_skip_locked
    wanted = rows.filter(look) if ids is None else rows.filter(still, id__in=ids)
    wanted = wanted.only("id", "backend", "queue_name", "wire_id", "batch_id", column).order_by(column, "id")
    closed, rest = 0, wanted
    # Without a lock, because MySQL would also lock the rows that it only looks at.
    while page := list(rest[:ROWS_PER_PAGE]):
        claimed = _claimed(page) if are_claimed_left else set()
        with transaction_of(TaskRecord):
            of_page = rows.filter(still, id__in=[record.id for record in page if record.id not in claimed])
            records = list(of_page.order_by("id").select_for_update(skip_locked=skip_locked))
            now = database_clock.now()
            groups: dict[str, list[TaskRecord]] = {}
            for record in records:
                groups.setdefault(str(error_of(record)), []).append(record)
            for group in groups.values():
                close(group, error_of(group[0]), now)
        closed += len(records)
        if len(page) < ROWS_PER_PAGE:
            break
        # Those that were skipped stay in front of the others.
        last = getattr(page[-1], column)
        rest = wanted.filter(Q(**{f"{column}__gt": last}) | Q(**{column: last}, id__gt=page[-1].id))
    return closed


def _claimed(records: Sequence[TaskRecord]) -> set[UUID]:
    """Return the ids of the tasks that a worker has claimed, as Redis knows. Raises: BrokerUnavailable."""
    queues: dict[tuple[str, str], list[str]] = {}
    for record in through_redis(records):
        queues.setdefault((record.backend, record.queue_name), []).append(_claimed_as(record))
    claimed = claimed_ids("producer", queues)
    return {record.id for record in records if _claimed_as(record) in claimed}


def _claimed_as(record: TaskRecord) -> str:
    """Return the id with which a worker claims a task: that of its batch, if it is in one."""
    return record.redis_id if record.batch_id is None else str(record.batch_id)


def expired() -> TaskExpired:
    """Return the error of a task that has not begun in time. The row says when that was."""
    return TaskExpired("it had not begun by the time at which it expires")


def is_expired(record: TaskRecord, now: datetime) -> bool:
    """Whether no run of the task may begin any more."""
    return record.expires_at is not None and record.expires_at <= now


def _cancelled(record: TaskRecord) -> TaskCancelled:
    return TaskCancelled(record.cancelled_by or "it was cancelled")


def fail_cancelled(record: TaskRecord, now: datetime) -> None:
    """QUEUED or RETRYING → FAILED in memory, if somebody has cancelled the task while it ran."""
    if record.cancel_requested_at is not None and record.finished_at is None:
        _fail(record, _cancelled(record), now)


def close_claimed(broker: Broker, queue: str, worker_id: str, runs: list[Run]) -> list[Run]:
    """Close the tasks that a worker has just claimed and that must not begin; return the runs to start.

    | check    | the fence: a run that lost its lease changes nothing          |
    | row      | QUEUED → FAILED, where it was cancelled or has expired        |
    | Redis    | the entry is removed                                          |
    | announce | `task_state_changed`                                          |

    If we die in between, the next worker that claims the entry finds the row final and removes the entry.
    """
    limited = [run for run in runs if run.record.expires_at is not None or run.record.cancel_requested_at is not None]
    if not limited:
        return runs
    now = database_clock.now()
    over: list[Run] = []
    for run in limited:
        fail_cancelled(run.record, now)
        if run.record.finished_at is None and is_expired(run.record, now):
            _fail(run.record, expired(), now)
        if run.record.finished_at is not None:
            over.append(run)
    if not over:
        return runs
    for run in over:
        run.record.fence = run.lease.fence
    writes = [FencedWrite(run.record, run.lease.fence) for run in over]
    written = write_usable(writes, writing_database(TaskRecord))
    failpoints.reach("close_claimed.rows_written")
    closed = [run for run in over if run.record.id in written]
    for run in closed:
        log_failed(run.record)
    # Those that were not written are another run's, or were closed by somebody else at this moment.
    broker.done(queue, worker_id, [run.lease for run in over])
    announce([run.record for run in closed], TaskState.QUEUED, TaskState.FAILED)
    settle_lost(broker, [run for run in over if run not in closed])
    return [run for run in runs if run not in over]


# --- void runs


def settle_final(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> None:
    """Remove the entries of tasks whose row is final already, and announce those whose void run held a gate slot.

    leases: of these tasks; the worker holds them, or held them when it was lost. rows: by id.
    """
    if not leases:
        return
    acknowledge_done(broker, queue, worker_id, [(rows[lease.id], lease) for lease in leases])
    _announce_void((rows[lease.id], lease) for lease in leases)


def settle_lost(broker: Broker, runs: Sequence[Run]) -> list[Run]:
    """Follow up runs whose outcome the row has refused, after their entries were removed; return the void ones.

    A task with a gate that was cancelled, or has expired, meanwhile is announced now, which releases its slot. One that
    was replaced, so that its row is QUEUED with a higher fence, is dispatched again.
    Raises: django.db.Error. The auditor of the gates and the reconciler then do the same.
    """
    if not runs:
        return []
    rows = load_rows([str(run.record.id) for run in runs])
    void = [run for run in runs if (row := rows.get(str(run.record.id))) and row.fence > run.lease.fence]
    found = [rows[str(run.record.id)] for run in void]
    _announce_void(zip(found, [run.lease for run in void], strict=True))
    dispatch([row for row in found if row.state == TaskState.QUEUED and broker.holds(row.backend)], again=True)
    return void


def _announce_void(found: Iterable[tuple[TaskRecord, Lease]]) -> None:
    """Announce the tasks with a gate that were closed while a worker had claimed them: nothing was announced then."""
    closed = [(row, lease) for row, lease in found if row.gate and row.is_final and row.reason in VOIDING]
    void = [row for row, lease in closed if row.fence > lease.fence]
    announce(void, TaskState.QUEUED, TaskState.FAILED)


# --- Redis


def take_out(records: Sequence[TaskRecord]) -> set[UUID]:
    """Remove closed tasks from Redis; return the ids of those that a worker has claimed, or may have.

    A task that was retried or replaced by somebody else since counts as claimed: its entry is not that of these rows.
    """
    if not records:
        return set()
    # A task that is pushed after its removal would stay in Redis.
    push_batcher.flush_pushes()
    # Until Redis has answered, a task may be running, and a slot that is released may be in use.
    claimed = {record.id for record in records if record.gate}
    try:
        for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
            words = stopping.take_out(
                broker, queue, [(record.redis_id, record.fence) for record in group], named_rows(group)
            )
            claimed -= {record.id for record in group}
            claimed |= {record.id for record, word in zip(group, words, strict=True) if word in STAYING}
    except BrokerUnavailable as error:
        count, text = len(records), "removal of %d closed task%s from Redis failed; workers will not run them: %s"
        logger.warning(text, count, pluralize(count), error, extra=log_extra(*records))
    return claimed


def ask_again() -> int:
    """Ask the workers of all running tasks to stop that somebody has cancelled; return how many such tasks there are.

    At most ROWS_PER_PAGE, those that wait longest: the next pass follows within seconds.
    """
    running = rows_of(TaskRecord).filter(
        state=TaskState.RUNNING, cancel_requested_at__isnull=False, finished_at__isnull=True
    )
    records = list(
        running.order_by("cancel_requested_at").only("id", "name", "backend", "queue_name", "wire_id")[:ROWS_PER_PAGE]
    )
    ask_to_stop(records)
    return len(records)


def ask_to_stop(records: Iterable[TaskRecord]) -> None:
    """Ask the workers of running tasks to stop. Never raises for Redis: the reconciler asks again."""
    records = through_redis(records)
    if not records:
        return
    try:
        for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
            stopping.ask_to_stop(broker, queue, [record.redis_id for record in group])
    except BrokerUnavailable as error:
        count, text = len(records), "%d running task%s could not be asked to stop; the reconciler will ask again: %s"
        logger.warning(text, count, pluralize(count), error, extra=log_extra(*records))
