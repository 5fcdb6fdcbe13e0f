"""Change a task that has not begun: its arguments by a newer call, its time and priority by a person.

A row that says QUEUED may be running, because RUNNING is written only after a while. So the UPDATE also raises
the row's fence: the row then refuses the outcome of every run that has read the old arguments, also of one that a
worker claims before the UPDATE is committed (`batches.GUARD`). A worker that had the task before is asked to
stop, and when it has reported, `settle_lost` dispatches the task again. So no newer arguments are lost, and two
bodies of one task never overlap.

For Redis the new fence is also above those that were handed out before the UPDATE. Others may have been handed
out before the commit, if Redis was emptied, say: an entry that waits with one is as the row was before, so it is
taken out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Case, DateTimeField, F, Q, Value, When
from django.db.models.functions import Greatest

from .. import gates
from ..broker import Broker, task_entries
from ..core.aliases import uses_redis
from ..exceptions import BrokerUnavailable
from ..models import FailureReason, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from .base import CommitHook, load_rows
from .closing import STAYING, WAITING, take_out
from .dispatching import by_queue, dispatch, flush_pushes, note_failed_push
from .following import follower_slot, settle_followers
from .messages import entry_of, later_fence, named_rows
from .waiting import WAITS

# What a newer call brings along. The queue, the gate and what the task has been through stay.
FROM_CALL = (
    "args",
    "kwargs",
    "version",
    "has_typed_arguments",
    "run_after",
    "delay_seconds",
    "expires_at",
    "deadline",
    "priority",
    "timeout_seconds",
    "soft_timeout_seconds",
    "expected_seconds",
    "headers",
)
# How often the commit of a replacement looks whether another one has overtaken it.
MOST_LOOKS = 10


class Replacement(CommitHook):
    """Brings to Redis what a transaction replaced: new times and priorities, and higher fences."""

    def follow_up(self) -> None:
        ids = {record.id for record in self.records}
        pushed: dict[UUID, int] = {}
        for _ in range(MOST_LOOKS):
            # From the rows: of two replacements, the one that commits last may follow up first.
            changed = [row for row in _waiting(ids) if pushed.get(row.id) != row.fence]
            if not changed:
                return
            pushed |= {row.id: row.fence for row in changed}
            _bring_to_redis(changed)


def replace_holder(record: TaskRecord) -> TaskRecord | None:
    """Give the task that holds a key the arguments of a new call, unless it runs; return its row.

    record: the new call, unsaved. Returns None when no task holds the key, or the one that does has begun, or was
    cancelled while it ran.
    A QUEUED task gets the call's time. A RETRYING one is retried then, or at once, and has all its attempts again.

    | check    | the row is QUEUED or RETRYING; it is locked until the caller's transaction ends                 |
    | row      | the arguments, times and limits of the new call; another fence, which voids runs with the old  |
    | Redis    | after the commit: taken out and pushed again; a worker that has claimed it is asked to stop, and |
    |          | its report dispatches the task again (`settle_lost`)                                            |
    | announce | nothing: the state is the same                                                                  |

    If we die after the commit, the entry has a fence that is too low: the worker that claims it dispatches it again.
    One that was pushed while the transaction was open runs at the old time, with the new arguments.
    """
    now = database_clock.now()
    # One that was cancelled while it ran never runs again, though its worker may have put it back: it is followed.
    holder = rows_of(TaskRecord).filter(
        WAITING, unique_slot=record.unique_key, after_id=None, cancel_requested_at__isnull=True
    )
    return _replace(holder, record, retry_at=_retry_at(record, now), max_attempts=_attempts(record))


def replace_follower(record: TaskRecord) -> TaskRecord | None:
    """Give the follower of a key the arguments of a new call; return its row, or None when there is no follower.

    Otherwise as `replace_holder`; a follower has no entry in Redis, and its commit looks whether the key is free.
    """
    followers = rows_of(TaskRecord).filter(
        state=TaskState.QUEUED, unique_slot=follower_slot(record.unique_key), after_id__isnull=False
    )
    return _replace(followers, record, max_attempts=_attempts(record))


def reschedule(id: UUID, *, run_after: datetime | None, priority: int) -> TaskRecord | None:
    """Give a task that waits another time and priority; return its row, or None when it waits no more.

    run_after: None for as soon as a worker is free.

    | check    | QUEUED, of our workers, in no batch and no group, waits for no task; the row is locked; no worker   |
    |          | has taken its entry                                                                                 |
    | Redis    | the entry is taken out; after the commit the task is pushed as its row says                         |
    | row      | `run_after` and `priority`; another fence, which voids a run that begins in between                 |
    | announce | nothing: the state is the same                                                                      |

    If we die in between, the reconciler pushes the task. Raises: BrokerUnavailable; nothing is changed then.
    """
    waiting = rows_of(TaskRecord).filter(
        IS_READY, id=id, state=TaskState.QUEUED, after_id=None, batch_id=None, group="", is_remote=False
    )
    with transaction_of(TaskRecord):
        row = waiting.filter(cancel_requested_at__isnull=True).select_for_update().first()
        if row is None:
            return None
        if uses_redis(row.backend):
            flush_pushes()
            broker = Broker("producer", row.backend)
            (word,) = task_entries.take_out(broker, row.queue_name, [(row.redis_id, row.fence)], named_rows([row]))
            if word in STAYING:
                return None
        changes = {"retry_at": run_after} if row.waits_for_slot else {}
        waiting.update(run_after=run_after, priority=priority, fence=_raised_fence(row), **changes)
        if row.waits_for_slot:
            # After the commit it gets another place.
            gates.forget_waiting([row])
        row = waiting.get()
        connection = connections[writing_database(TaskRecord)]
        hook = Replacement.of_transaction(connection)
        hook.records.append(row)
        hook.register(connection)
    return row


def _replace(rows: Any, record: TaskRecord, **changes: Any) -> TaskRecord | None:
    database = writing_database(TaskRecord)
    # Without a savepoint of its own: all that a list replaces is then brought to Redis together.
    with transaction_of(TaskRecord, savepoint=False):
        # One UPDATE, so that SQLite takes its lock before anything is read.
        values = {name: _from_call(record, name) for name in FROM_CALL}
        # A batch that has it runs with what it read, and its row then refuses that outcome.
        # Where the old arguments had come to says nothing of the new ones.
        values |= {"batch_id": None, "group": record.group, "checkpoint": None}
        if not rows.update(**values, **changes, fence=_raised_fence(record)):
            return None
        slots = (record.unique_key, follower_slot(record.unique_key))
        is_follower = "retry_at" not in changes
        (replaced,) = rows_of(TaskRecord).filter(unique_slot=slots[is_follower])
    # Behind the block: one without a savepoint would hide from the test kit that it has ended.
    connection = connections[database]
    hook = Replacement.of_transaction(connection)
    hook.records.append(replaced)
    hook.register(connection)
    found: TaskRecord = replaced
    return found


def _from_call(record: TaskRecord, name: str) -> Any:
    """Return what the row gets of a new call. A duration counts from the moment of the UPDATE."""
    delay = record.delays.get(name)
    if delay is None:
        return getattr(record, name)
    return database_clock.expression(connections[writing_database(TaskRecord)], delay)


def _raised_fence(record: TaskRecord) -> Any:
    """Return a fence above that of the row, and above every one that was handed out for it until now."""
    return Greatest(F("fence") + 1, Value(later_fence(record)))


def _attempts(record: TaskRecord) -> Any:
    """Return the new maximum: the attempts of the old arguments are not those of the new ones."""
    return F("attempt") + record.max_attempts


def _retry_at(record: TaskRecord, now: datetime) -> Case:
    """Return when a RETRYING task is retried: at the time of the call, or at once.

    One that waits at its gate goes on waiting; a QUEUED one that does asks again at the time of the call.
    """
    at_gate = Q(state=TaskState.FAILED, reason=FailureReason.GATE_FULL)
    run_after = _from_call(record, "run_after")
    moment = run_after if "run_after" in record.delays else Value(run_after or now, output_field=DateTimeField())
    later = Greatest(F("retry_at"), moment) if run_after else F("retry_at")
    delayed = moment if run_after else Value(None, output_field=DateTimeField())
    return Case(
        When(at_gate, then=later),
        When(state=TaskState.FAILED, then=moment),
        When(WAITS, then=delayed),
        default=F("retry_at"),
        output_field=DateTimeField(),
    )


def _waiting(ids: Collection[UUID]) -> list[TaskRecord]:
    rows = load_rows(map(str, sorted(ids))).values()
    return [row for row in rows if row.state == TaskState.QUEUED or row.retry_at is not None]


def _bring_to_redis(rows: Sequence[TaskRecord]) -> None:
    """Take the entries of replaced tasks out, and push them as their rows say. Never raises for Redis."""
    settle_followers(rows)
    rows = [row for row in rows if row.after_id is None]
    queued = [row for row in rows if row.state == TaskState.QUEUED]
    claimed = take_out(queued, overtaken=True)
    # With the fence of the row: an entry that another replacement has overtaken is then refused at its claim.
    dispatch([row for row in queued if row.id not in claimed])
    retrying = [row for row in rows if row.state == TaskState.FAILED]
    if not retrying:
        return
    try:
        for broker, queue, group in by_queue(Broker("producer", retrying[0].backend), retrying):
            broker.park(queue, [entry_of(row, fence=row.fence) for row in group])
    except BrokerUnavailable as error:
        note_failed_push(error, retrying)
