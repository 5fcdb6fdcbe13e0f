"""Give a task that has not begun the arguments of a newer call: `on_duplicate="replace"`, and a follower's.

A row that says QUEUED may be running, because RUNNING is written only after a while. So the UPDATE also raises the
row's fence above all that were handed out: the row then refuses the outcome of a run with the old arguments, its worker
is asked to stop, and when it has reported, `settle_lost` dispatches the task again. So no newer arguments are lost,
and two bodies of one task never overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Case, DateTimeField, F, Q, Value, When
from django.db.models.functions import Greatest

from .. import failpoints
from ..aliases import through_redis
from ..broker import Broker
from ..exceptions import BrokerUnavailable
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from .closing import WAITING, take_out
from .dispatching import by_queue, dispatch, note_failed_push
from .following import follower_slot, settle_followers
from .messages import entry_of, later_fence
from .on_commit import CommitHook
from .ownership import load_rows

# What a newer call brings along. The queue, the gate and what the task has been through stay.
FROM_CALL = (
    "args",
    "kwargs",
    "run_after",
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
        failpoints.reach("replace.committed")
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
    | row      | the arguments, times and limits of the new call; the fence above all that were handed out      |
    | Redis    | after the commit: taken out and pushed again; a worker that has claimed it is asked to stop, and |
    |          | its report dispatches the task again (`settle_lost`)                                            |
    | announce | nothing: the state is the same                                                                  |

    If we die after the commit, the entry has a fence that is too low: the worker that claims it dispatches it again.
    """
    now = database_clock.now()
    # One that was cancelled while it ran never runs again, though its worker may have put it back: it is followed.
    holder = rows_of(TaskRecord).filter(
        WAITING, unique_slot=record.unique_key, after_id=None, cancel_requested_at__isnull=True
    )
    return _replace(holder, record, retry_at=_retry_at(record.run_after, now), max_attempts=_attempts(record))


def replace_follower(record: TaskRecord) -> TaskRecord | None:
    """Give the follower of a key the arguments of a new call; return its row, or None when there is no follower.

    Otherwise as `replace_holder`; a follower has no entry in Redis, and its commit looks whether the key is free.
    """
    followers = rows_of(TaskRecord).filter(
        state=TaskState.QUEUED, unique_slot=follower_slot(record.unique_key), after_id__isnull=False
    )
    return _replace(followers, record, max_attempts=_attempts(record))


def _replace(rows: Any, record: TaskRecord, **changes: Any) -> TaskRecord | None:
    database = writing_database(TaskRecord)
    # Without a savepoint of its own: all that a list replaces is then brought to Redis together.
    with transaction_of(TaskRecord, savepoint=False):
        # One UPDATE, so that SQLite takes its lock before anything is read.
        values = {name: getattr(record, name) for name in FROM_CALL}
        # A batch that has it runs with what it read, and its row then refuses that outcome.
        if not rows.update(**values, **changes, batch_id=None, group=record.group, fence=_raised_fence(record)):
            return None
        slots = (record.unique_key, follower_slot(record.unique_key))
        is_follower = "retry_at" not in changes
        (replaced,) = rows_of(TaskRecord).filter(unique_slot=slots[is_follower])
        connection = connections[database]
        hook = Replacement.of_transaction(connection)
        hook.records.append(replaced)
        hook.register(connection)
    found: TaskRecord = replaced
    return found


def _raised_fence(record: TaskRecord) -> Any:
    """Return a fence above that of the row, and above every one that was handed out for it."""
    return Greatest(F("fence") + 1, Value(later_fence(record)))


def _attempts(record: TaskRecord) -> Any:
    """Return the new maximum: the attempts of the old arguments are not those of the new ones."""
    return F("attempt") + record.max_attempts


def _retry_at(run_after: datetime | None, now: datetime) -> Case:
    """Return when a RETRYING task is retried: at the time of the call, or at once.

    One that waits at its gate goes on waiting.
    """
    at_gate = Q(state=TaskState.FAILED, reason=FailureReason.GATE_FULL)
    moment = Value(run_after or now, output_field=DateTimeField())
    later = Greatest(F("retry_at"), moment) if run_after else F("retry_at")
    return Case(
        When(at_gate, then=later),
        When(state=TaskState.FAILED, then=moment),
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
    claimed = take_out(through_redis(queued))
    failpoints.reach("replace.taken_out")
    # With the fence of the row: an entry that another replacement has overtaken is then refused at its claim.
    dispatch([row for row in queued if row.id not in claimed])
    retrying = through_redis([row for row in rows if row.state == TaskState.FAILED])
    if not retrying:
        return
    try:
        for broker, queue, group in by_queue(Broker("producer", retrying[0].backend), retrying):
            broker.park(queue, [entry_of(row, fence=row.fence) for row in group])
    except BrokerUnavailable as error:
        note_failed_push(error, retrying)
