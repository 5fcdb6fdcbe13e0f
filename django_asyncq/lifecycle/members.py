"""The members of a batch: their rows change with that of the batch, in one transaction.

| the batch's row becomes           | its members become                                                         |
|-----------------------------------|----------------------------------------------------------------------------|
| RUNNING                           | RUNNING                                                                    |
| SUCCEEDED, FAILED by the function | each its own outcome: SUCCEEDED, FAILED or RETRYING                        |
| QUEUED again                      | QUEUED; they stay in the batch                                             |
| FAILED without their outcomes     | QUEUED by themselves, without a group: each runs alone, as a batch of one  |

The last is the case when its worker has died while it was alone, when it had to be killed, and when nobody has its
code.
A member that was cancelled or replaced meanwhile is no longer the batch's: its row refuses what the batch writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from django.db import connections
from django.db.models import Case, Exists, F, IntegerField, OuterRef, Q, Value, When
from django.db.models.functions import Greatest

from ..broker import Lease
from ..models import TaskRecord, TaskState
from ..storage import database_clock
from ..storage.batches import FencedWrite
from ..storage.routing import as_check, rows_of, transaction_of, writing_database
from .base import CommitHook, Run
from .children import write_outcomes
from .dispatching import dispatch

# How many batches one look compares with their members; the next sweep looks again.
MOST_BATCHES = 1000
LIVE = Q(state__in=(TaskState.QUEUED, TaskState.RUNNING))
# In the rows of some batches, or of some ids.
IS_LIVE = as_check(LIVE)
# An attempt that was counted when the member was written as RUNNING, and that a lost batch does not use.
UNCOUNTED = Case(
    When(state=TaskState.RUNNING, then=Greatest(F("attempt") - 1, Value(0))),
    default=F("attempt"),
    output_field=IntegerField(),
)


class Release(CommitHook):
    """Pushes the members that a batch has left behind."""

    def follow_up(self) -> None:
        dispatch(self.records, again=True)


def load_members(runs: Sequence[Run]) -> None:
    """Give the runs of batches their members: those that were not cancelled, in the order of their ids.

    A plain run costs nothing. Raises: django.db.Error.
    """
    by_id = {run.record.id: run for run in runs if run.record.is_batch}
    if not by_id:
        return
    for run in by_id.values():
        run.members = []
    for record in rows_of(TaskRecord).filter(IS_LIVE, batch_id__in=by_id).order_by("id"):
        # One that a lost run has marked keeps its fence; any other gets the next one.
        fence = record.fence + (record.state == TaskState.QUEUED)
        assert record.batch_id is not None  # noqa: S101 - as filtered
        by_id[record.batch_id].members.append(Run(record, Lease(record.redis_id, fence)))


def limited(runs: Iterable[Run]) -> tuple[set[UUID], set[UUID]]:
    """Return the ids of members that were cancelled while their batch ran, and of those that can no longer begin."""
    now = database_clock.now()
    records = [member.record for run in runs for member in run.members]
    cancelled = {record.id for record in records if record.cancel_requested_at is not None}
    late = {record.id for record in records if record.expires_at is not None and record.expires_at <= now}
    return cancelled, late - cancelled


def write_of(run: Run) -> FencedWrite:
    """Return the write of a run, with those of its members unless they only follow the row of the batch."""
    record, members = run.record, run.members
    if not members or record.state == TaskState.QUEUED:
        return FencedWrite(record, run.lease.fence, run.read_fence)
    if record.state != TaskState.RUNNING and any(each.record.is_in_batch for each in members):
        return FencedWrite(record, run.lease.fence, run.read_fence)
    of_members = [FencedWrite(each.record, each.lease.fence, each.read_fence) for each in members]
    return FencedWrite(record, run.lease.fence, run.read_fence, of_members)


def follow(writes: Iterable[FencedWrite], database: str, *, patient: bool) -> tuple[Mapping[UUID, str], set[str]]:
    """Have the members of written batches follow, in the caller's transaction; return the unique keys they free.

    writes: of batches, which their rows have accepted. Returns: the id of each member that was written → its key, ""
    for one that frees none; and the keys that tasks have freed which waited for members, and failed for them.
    """
    outcomes: list[FencedWrite] = []
    waiting: list[UUID] = []
    left: list[UUID] = []
    for write in writes:
        if write.members:
            outcomes += write.members
        elif write.record.state == TaskState.QUEUED:
            waiting.append(write.record.id)
        elif write.record.is_final:
            left.append(write.record.id)
    rows = rows_of(TaskRecord)
    if waiting:
        running = rows.filter(as_check(state=TaskState.RUNNING), batch_id__in=waiting)
        running.update(attempt=UNCOUNTED, state=TaskState.QUEUED)
    if left:
        release(rows.filter(IS_LIVE, batch_id__in=left))
    accepted, freed = write_outcomes(outcomes, database, patient=patient) if outcomes else (set(), set())
    return {
        each.record.id: each.record.unique_key if each.record.frees_slot else ""
        for each in outcomes
        if each.record.id in accepted
    }, freed


def release(rows: object, *, keeps_group: bool = False) -> int:
    """Have members of no batch wait by themselves, each as a batch of one, or in their group; return how many.

    | check    | none: the caller's transaction holds the row of the batch, or has seen that there is none |
    | row      | QUEUED or RUNNING → QUEUED, without a batch; without a group, unless it keeps that       |
    | Redis    | after the commit: pending, or in the group                                               |
    | announce | nothing: a slot of a gate stays                                                          |

    If we die after the commit, the reconciler pushes the rows.
    """
    database = writing_database(TaskRecord)
    with transaction_of(TaskRecord):
        ids = list(rows.values_list("id", flat=True))  # type: ignore[attr-defined]
        if not ids:
            return 0
        changes = {} if keeps_group else {"group": ""}
        found = rows_of(TaskRecord).filter(IS_LIVE, id__in=ids)
        found.update(attempt=UNCOUNTED, state=TaskState.QUEUED, batch_id=None, **changes)
        connection = connections[database]
        hook = Release.of_transaction(connection)
        hook.records.extend(rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED, batch_id=None), id__in=ids))
        hook.register(connection)
    return len(ids)


def release_orphans() -> int:
    """Have members wait in their groups again whose batch is over, or has no row; return how many.

    Somebody has deleted the row of the batch, or its outcome was written by a release that knows no batches.
    """
    rows = rows_of(TaskRecord)
    members = rows.filter(LIVE, batch_id__isnull=False)
    live = rows.filter(id=OuterRef("batch_id"), finished_at__isnull=True)
    # Without an order, of which DISTINCT would be one; and not of the first batches only, which may all be live.
    # As a check, or PostgreSQL may read all that is kept to join it, while it knows nothing of the table.
    over = members.filter(as_check(~Q(Exists(live)))).order_by().values_list("batch_id", flat=True)
    found = list(over.distinct()[:MOST_BATCHES])
    return release(rows.filter(IS_LIVE, batch_id__in=found), keeps_group=True) if found else 0
