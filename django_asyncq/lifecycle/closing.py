"""Close tasks before another run of them begins: because they were cancelled, or have not begun in time.

A row that says QUEUED may be running, because RUNNING is written only after a while. So a call that closes a row asks
Redis first (`holding`): what a worker has claimed is not closed here. Where Redis could not say, because it was emptied
or a lease was lost, a body may run all the same. So closing a row also changes its fence: the row then refuses the
outcome of every run that has read it as it was. Such a run is void, and the row notes that it had begun
(`settle_lost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.template.defaultfilters import pluralize

from ..broker import Broker, Lease, task_entries
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..core.payload import MESSAGE_CHARACTERS, storable_text
from ..core.time import AT_LEAST_ZERO, Duration, is_duration, seconds_of
from ..exceptions import BrokerUnavailable, InvalidOption, TaskCancelled, TaskExpired
from ..models import FailureReason, TaskRecord, TaskRecordQuerySet, TaskState
from ..storage import database_clock
from ..storage.batches import FencedWrite
from ..storage.routing import as_check, is_in_transaction, rows_of, transaction_of, writing_database
from . import dispatching
from .base import CommitHook, Run, announce, append_error, ask_runs_here, load_rows, log_failed
from .children import settle_records
from .dispatching import by_queue, dispatch
from .following import free_slots, move_up, write_usable
from .holding import MISSING, OURS, UNKNOWN, Hold
from .messages import acknowledge_done, later_fence, named_rows

logger = get_logger("django_asyncq.lifecycle")

# Why a row may be final although a worker still runs the task.
VOIDING = (FailureReason.CANCELLED, FailureReason.EXPIRED)
# QUEUED or RETRYING.
WAITING = Q(state=TaskState.QUEUED) | Q(state=TaskState.FAILED, retry_at__isnull=False)
ROWS_PER_PAGE = 500
# What `take_out` says of entries that it leaves where they are.
STAYING = ("active", "overtaken")


class Stop(CommitHook):
    """Takes the tasks out of Redis that a transaction closed, and asks the workers of claimed ones to stop.

    borrowed: batches that are held for the sake of members, and that go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[UUID, TaskState] = {}
        self.running: list[TaskRecord] = []
        self.hold = Hold()
        self.borrowed: list[TaskRecord] = []

    def ask_redis(self, records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> dict[UUID, str]:
        """Hold tasks that wait, whose rows are locked, until the transaction ends; return a word for each (`Hold`)."""
        batch_ids = {record.batch_id for record in records if record.batch_id is not None}
        batches = {row.id: row for row in records if row.id in batch_ids}
        if batch_ids.difference(batches):
            found = rows_of(TaskRecord).filter(id__in=batch_ids.difference(batches)).order_by("id").select_for_update()
            batches |= {row.id: row for row in found}
        self.register(connection)
        words, held = self.hold.take(records, batches, connection)
        self.give_back_at_rollback(held, connection, self.hold.give_back, looks_itself=True)
        self.borrowed += held
        return words

    def follow_up(self) -> None:
        ask_runs_here([*self.running, *self.records])
        if self.running:
            ask_to_stop(self.running)
        if self.records:
            self._follow_closed()
        closed = {record.id for record in self.records}
        if borrowed := [row for row in self.borrowed if row.id not in closed]:
            self.hold.give_back(borrowed)

    def _follow_closed(self) -> None:
        for record in self.records:
            log_failed(record)
        claimed = take_out(self.records, holder=self.hold.name)
        # A person has retried them meanwhile, and the push found them held.
        rows = load_rows([str(record.id) for record in self.records if record.id not in claimed]).values()
        dispatch([row for row in rows if row.state == TaskState.QUEUED], again=True)
        # What has no slot is announced here alone, so that nobody announces it twice.
        settled = [record for record in self.records if not (record.gate and record.id in claimed)]
        for old in (TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED):
            announce([record for record in settled if self.old[record.id] == old], old, TaskState.FAILED)


def close(records: Sequence[TaskRecord], exception: BaseException, now: datetime, hook: Stop, **changes: Any) -> None:
    """QUEUED or RETRYING → FAILED for rows that the caller's transaction has locked. changes: of other columns.

    hook: of the caller's transaction, which has asked Redis where anything depends on it.

    | check    | none: the rows are locked, and were seen to wait                                           |
    | row      | QUEUED or RETRYING → FAILED, with the error and a fence above all that were handed out;    |
    |          | what waited for them fails too (`children`)                                                |
    | Redis    | after the commit: removed; what a worker has claimed all the same stays, and is asked to stop |
    | announce | after the commit: `task_state_changed`; while a worker may use the slot of a gate, later   |

    If we die after the commit, a worker that claims the entry finds the row final and settles it (`settle_final`).
    """
    if not records:
        return
    fence = later_fence(max(records, key=lambda record: record.fence))
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
        waiting = rows_of(TaskRecord).filter(as_check(WAITING), id__in=ids)
        waiting.update(**{name: getattr(first, name) for name in names})
    free_slots(records)
    move_up(settle_records(records))
    hook.records.extend(records)
    hook.register(connections[writing_database(TaskRecord)])


def _fail(record: TaskRecord, exception: BaseException, now: datetime) -> None:
    """Change a row in memory to a final failure, for which no attempt is counted."""
    record.state = TaskState.FAILED
    record.retry_at = None
    record.finished_at = now
    append_error(record, exception, "", now)


def close_cancelled(ids: Collection[UUID] | None = None) -> int:
    """Close the tasks that wait although somebody has cancelled them while a worker had them; return how many.

    ids: None for all, except those that a worker has claimed: it closes them, or their runs finish. Otherwise those of
    one process, which knows that no other one runs them. Rows that another transaction has locked are skipped.
    Raises: for all of them also BrokerUnavailable.
    """
    return _close_where("cancel_requested_at", Q(cancel_requested_at__isnull=False), ids, _cancelled)


def expire(ids: Collection[UUID] | None = None) -> int:
    """Close the tasks that wait and have not begun in time; return how many. ids, Raises: as `close_cancelled`."""
    condition = Q(expires_at__lte=database_clock.now())
    return _close_where("expires_at", condition, ids, lambda _: expired())


def _close_where(
    column: str, condition: Q, ids: Collection[UUID] | None, error_of: Callable[[TaskRecord], BaseException]
) -> int:
    """Close the waiting rows with a condition, page by page. column: the first of the index that finds them."""
    # The index holds no finished row. A database uses it only for a query that repeats this condition.
    look = Q(WAITING, condition, finished_at__isnull=True)
    rows, still = rows_of(TaskRecord), as_check(look)
    connection = connections[rows.db]
    skip_locked = connection.features.has_select_for_update_skip_locked
    wanted = rows.filter(look) if ids is None else rows.filter(still, id__in=ids)
    wanted = wanted.only("id", column).order_by(column, "id")
    closed, rest = 0, wanted
    # Without a lock, because MySQL would also lock the rows that it only looks at.
    while page := list(rest[:ROWS_PER_PAGE]):
        with transaction_of(TaskRecord):
            of_page = rows.filter(still, id__in=[record.id for record in page])
            records = list(of_page.order_by("id").select_for_update(skip_locked=skip_locked))
            hook = Stop.of_transaction(connection)
            if ids is None and records:
                words = hook.ask_redis(records, connection)
                if UNKNOWN in words.values():
                    raise BrokerUnavailable("nobody knows which of the tasks that must not begin a worker has claimed")
                # What Redis does not know was pushed by nobody, or it was emptied, and a run is void.
                records = [record for record in records if words[record.id] in (OURS, MISSING)]
            now = database_clock.now()
            groups: dict[str, list[TaskRecord]] = {}
            for record in records:
                groups.setdefault(str(error_of(record)), []).append(record)
            for group in groups.values():
                close(group, error_of(group[0]), now, hook)
        closed += len(records)
        if len(page) < ROWS_PER_PAGE:
            break
        # Those that were skipped stay in front of the others.
        last = getattr(page[-1], column)
        rest = wanted.filter(Q(**{f"{column}__gt": last}) | Q(**{column: last}, id__gt=page[-1].id))
    return closed


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
        run.read_fence, run.record.fence = run.record.fence, run.lease.fence
    writes = [FencedWrite(run.record, run.lease.fence, run.read_fence) for run in over]
    written = write_usable(writes, writing_database(TaskRecord))
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

    A task with a gate that was cancelled, or has expired, meanwhile is announced now, which releases its slot; its row
    notes what the run knows. One that was replaced, so that its row is QUEUED with another fence, is dispatched again.
    Raises: django.db.Error. The auditor of the gates and the reconciler then do the same.
    """
    if not runs:
        return []
    rows = load_rows([str(run.record.id) for run in runs])
    void = [run for run in runs if (row := rows.get(str(run.record.id))) and row.fence != run.read_fence]
    found = [rows[str(run.record.id)] for run in void]
    for run, row in zip(void, found, strict=True):
        if run.begun and row.is_final and row.reason in VOIDING:
            _note_begun(run, row)
    _announce_void(zip(found, [run.lease for run in void], strict=True))
    dispatch([row for row in found if row.state == TaskState.QUEUED and broker.holds(row.backend)], again=True)
    return void


def _note_begun(run: Run, row: TaskRecord) -> None:
    """Write into a row that was closed what a void run of it knows. row: as it was read just now.

    Of a row that was retried since, the fence or what the run has read differs, and nothing is written.
    """
    begun = run.record
    if row.worker_ids != begun.worker_ids[:-1]:
        return
    when = "when it was cancelled" if row.reason == FailureReason.CANCELLED else "when it expired"
    outcome = "ran to its end" if begun.state == TaskState.SUCCEEDED else "then failed or was stopped"
    names = ("attempt", "started_at", "last_attempted_at", "worker_ids")
    for name in names:
        setattr(row, name, getattr(begun, name))
    kind = TaskCancelled if row.reason == FailureReason.CANCELLED else TaskExpired
    append_error(row, kind(f"had begun {when}; {outcome}"), "", database_clock.now())
    closed = rows_of(TaskRecord).filter(as_check(state=TaskState.FAILED, retry_at=None), id=row.id, fence=row.fence)
    closed.update(errors=row.errors, **{name: getattr(row, name) for name in names})


def _announce_void(found: Iterable[tuple[TaskRecord, Lease]]) -> None:
    """Announce the tasks with a gate that were closed while a worker had claimed them: nothing was announced then."""
    closed = [(row, lease) for row, lease in found if row.gate and row.is_final and row.reason in VOIDING]
    # One that its own worker has closed has the fence of the lease.
    void = [row for row, lease in closed if row.fence != lease.fence]
    announce(void, TaskState.QUEUED, TaskState.FAILED)


# --- Redis


def take_out(records: Sequence[TaskRecord], *, holder: str = "", overtaken: bool = False) -> set[UUID]:
    """Remove closed tasks from Redis; return the ids of those that a worker has claimed, or may have.

    holder: whose name they are held by, if they are.

    A task that was retried or replaced by somebody else since counts as claimed: its entry is not that of these rows.
    overtaken: as of `stopping.take_out`.
    """
    if not records:
        return set()
    # A task that is pushed after its removal would stay in Redis.
    dispatching.flush_pushes()
    # Until Redis has answered, a task may be running, and a slot that is released may be in use.
    claimed = {record.id for record in records if record.gate}
    try:
        for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
            entries = [(record.redis_id, record.fence) for record in group]
            words = task_entries.take_out(broker, queue, entries, named_rows(group), holder=holder, overtaken=overtaken)
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
    records = list(records)
    if not records:
        return
    try:
        for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
            task_entries.ask_to_stop(broker, queue, [record.redis_id for record in group])
    except BrokerUnavailable as error:
        count, text = len(records), "%d running task%s could not be asked to stop; the reconciler will ask again: %s"
        logger.warning(text, count, pluralize(count), error, extra=log_extra(*records))


# --- Cancel tasks: those that wait are closed, those that run are asked to stop.

BY_CHARACTERS = 150
# How often a wait looks at the rows of what was asked to stop: soon at first, and less often later.
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5


class Cancelled(NamedTuple):
    """How many tasks a cancel has closed, how many a worker may have and was asked to stop, and how many were over."""

    cancelled: int = 0
    asked: int = 0
    over: int = 0

    def plus(self, other: Cancelled) -> Cancelled:
        """Return the sums."""
        return Cancelled(*map(sum, zip(self, other, strict=True)))


def cancel_rows(rows: TaskRecordQuerySet, *, by: Any = "", reason: str = "", wait: Duration | None = None) -> Cancelled:
    """Do what `cancel_pages` does for the rows of a query. by: a user, or a text."""
    name = by.get_username() if hasattr(by, "get_username") else by
    return cancel_pages(_pages(rows.using(writing_database(TaskRecord))), by=name, reason=reason, wait=wait)


def cancel_pages(
    pages: Iterable[Collection[UUID]],
    *,
    by: str = "",
    reason: str = "",
    backend: str = "",
    wait: Duration | None = None,
) -> Cancelled:
    """Do what `cancel` does for each page, then wait until no task that was asked to stop runs any more.

    wait: for how long at most; None: not at all. What has stopped by then is counted as `cancelled`, and what has
    finished otherwise as `over`. Raises: InvalidOption, for a wait in a transaction too; nothing is written then.
    """
    seconds = _seconds_of(wait)
    total, asked = Cancelled(), list[UUID]()
    for page in pages:
        found, ids = _cancel(page, by=by, reason=reason, backend=backend)
        total, asked = total.plus(found), asked + ids
    if seconds is None or not asked:
        return total
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while (found := how_stopped(asked)).asked and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return total._replace(asked=0).plus(found)


def how_stopped(ids: Sequence[UUID]) -> Cancelled:
    """Return what has become of tasks that were asked to stop: `asked` are those that may still run."""
    left, cancelled = 0, 0
    for start in range(0, len(ids), ROWS_PER_PAGE):
        rows = rows_of(TaskRecord).filter(id__in=ids[start : start + ROWS_PER_PAGE])
        for finished_at, reason in rows.values_list("finished_at", "reason"):
            left += finished_at is None
            cancelled += finished_at is not None and reason == FailureReason.CANCELLED
    return Cancelled(cancelled, left, len(ids) - cancelled - left)


def _seconds_of(wait: Duration | None) -> float | None:
    """Return how long to wait. Raises: InvalidOption."""
    if wait is None:
        return None
    if not is_duration(wait, or_zero=True):
        raise InvalidOption(f"cancel(wait={wait!r}) is not valid: give {AT_LEAST_ZERO}")
    if is_in_transaction(writing_database(TaskRecord)):
        raise InvalidOption("cancel(wait=…) in a transaction: workers see the cancel after its commit. Wait behind it")
    return float(seconds_of(wait))


def _pages(rows: TaskRecordQuerySet) -> Iterator[list[UUID]]:
    if rows.query.is_sliced:
        ids = sorted(rows.values_list("id", flat=True))
        yield from (ids[start : start + ROWS_PER_PAGE] for start in range(0, len(ids), ROWS_PER_PAGE))
        return
    ordered = rows.order_by("id").values_list("id", flat=True)
    page = list(ordered[:ROWS_PER_PAGE])
    while page:
        yield page
        page = list(ordered.filter(id__gt=page[-1])[:ROWS_PER_PAGE]) if len(page) == ROWS_PER_PAGE else []


def cancel(ids: Collection[UUID], *, by: str = "", reason: str = "", backend: str = "") -> Cancelled:
    """Do what `_cancel` does; return the counts alone."""
    return _cancel(ids, by=by, reason=reason, backend=backend)[0]


def _cancel(ids: Collection[UUID], *, by: str, reason: str, backend: str) -> tuple[Cancelled, list[UUID]]:
    """Cancel tasks, in the caller's transaction; return the counts, and the ids of those that were asked to stop.

    ids: at most 500; those without a row are ignored. by: who cancels. reason: for the task's error. backend: only
    tasks of this alias; "" for all.

    | check    | the rows are locked, in the order of their ids; then Redis says which of them no worker has     |
    | row      | those: QUEUED or RETRYING → FAILED, as `close` does; others note that a cancel was asked for    |
    | Redis    | at once: no worker gets those any more (`holding`); after the commit: as `close` does; workers  |
    |          | of the others are asked to stop                                                                 |
    | announce | as `close` does; a task that was asked to stop is announced when it has finished                |

    A task that was asked to stop is closed by the worker that has it, or by the leader; also where Redis is
    unreachable, or does not know the task yet. A batch is cancelled with its members. A cancel of a member that runs is
    noted; its batch is asked to stop once all members are cancelled.

    If we die before the commit, the leader brings back what was held. If we die after it, the reconciler asks again.
    Raises: InvalidOption for another type than text; nothing is written then.
    """
    for option, value in (("by", by), ("reason", reason)):
        if not isinstance(value, str):
            raise InvalidOption(f"cancel({option}=…) takes a text, not {type(value).__qualname__}")
    text = ": ".join(filter(None, (by, reason)))
    # Redis does not know a task that this process has yet to push.
    dispatching.flush_pushes()
    now = database_clock.now()
    changes = {"cancel_requested_at": now, "cancelled_by": storable_text(text[:BY_CHARACTERS], BY_CHARACTERS)}
    connection = connections[writing_database(TaskRecord)]
    with transaction_of(TaskRecord):
        rows = rows_of(TaskRecord).filter(id__in=with_members(ids))
        # In one order, so that two cancels of the same tasks wait for each other instead of deadlocking.
        locked = (rows.filter(backend=backend) if backend else rows).select_for_update().order_by("id")
        records = list(locked)
        waiting = [record for record in records if not record.is_final and record.state != TaskState.RUNNING]
        hook = Stop.of_transaction(connection)
        words = hook.ask_redis(waiting, connection) if waiting else {}
        closed = [record for record in waiting if words[record.id] == OURS]
        error = TaskCancelled(storable_text(text, MESSAGE_CHARACTERS) or "it was cancelled")
        close(closed, error, now, hook, **changes)
        asked = [record for record in records if not record.is_final]
        if asked:
            # The row keeps the name of the first person. A repeated cancel asks the worker again.
            new = [record.id for record in asked if record.cancel_requested_at is None]
            rows.filter(as_check(finished_at__isnull=True), id__in=new).update(**changes)
            hook.running.extend([*asked, *_batches_to_stop(asked, changes)])
            hook.register(connection)
    counts = Cancelled(len(closed), len(asked), len(records) - len(closed) - len(asked))
    return counts, [record.id for record in asked]


def with_members(ids: Collection[UUID]) -> set[UUID]:
    """Return the ids of tasks, and of the members of those that are batches."""
    rows = rows_of(TaskRecord)
    of_batches = rows.filter(as_check(batch_size__isnull=False, finished_at__isnull=True), id__in=ids)
    found = list(of_batches.values_list("id", flat=True))
    if not found:
        return set(ids)
    members = rows.filter(as_check(finished_at__isnull=True, retry_at__isnull=True), batch_id__in=found)
    return {*ids, *members.values_list("id", flat=True)}


def _batches_to_stop(asked: Sequence[TaskRecord], changes: Mapping[str, Any]) -> list[TaskRecord]:
    """Note a cancel in the rows of claimed batches all of whose members were cancelled; return those rows."""
    ids = {record.batch_id for record in asked if record.batch_id is not None}
    if not ids:
        return []
    rows = rows_of(TaskRecord)
    live = as_check(state__in=(TaskState.QUEUED, TaskState.RUNNING), cancel_requested_at__isnull=True)
    ids -= set(rows.filter(live, batch_id__in=ids).values_list("batch_id", flat=True))
    found = rows.filter(as_check(finished_at__isnull=True), id__in=ids)
    found.filter(as_check(cancel_requested_at__isnull=True)).update(**changes)
    return list(found)
