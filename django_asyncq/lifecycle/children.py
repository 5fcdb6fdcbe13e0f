"""The tasks that wait for others: what becomes of them when a task that they wait for has finished.

A child is a QUEUED row whose `waits_for` counts its parents that have not finished (`TaskEdge`). It is a row alone: it
has no slot of its gate and no entry in Redis, and is never pushed while it waits. The write that makes a parent final
counts it out of its children, in the same transaction, and only where that write has changed the row: so each parent is
counted once, whatever is repeated. A child that waits for nobody then is pushed after the commit, like a new task.

| a parent                    | its children that waited for it                                                |
|-----------------------------|--------------------------------------------------------------------------------|
| has SUCCEEDED               | wait for one task fewer                                                        |
| has FAILED, and no attempt  | become FAILED, PARENT_FAILED, with what waited for them in turn; those that    |
| follows, or was deleted     | run anyway (`after_failure`) wait for one task fewer                           |

A plain task pays for none of this. A child is enqueued under the lock of its parents, and gives them a workflow; so the
write of an outcome that has read its row without one demands that there is still none (`batches.write_fenced`), and a
row that has refused it is read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import F

from ..core.compat import batched
from ..core.time import Delay
from ..exceptions import BrokerUnavailable, GateUnavailable, ParentFailed
from ..models import FailureReason, TaskEdge, TaskRecord, TaskState
from ..storage import batches, database_clock
from ..storage.batches import FencedWrite
from ..storage.routing import as_check, lock_rows, rows_of, transaction_of, writing_database
from .base import CommitHook, announce, append_error, log_failed
from .dispatching import dispatch, note_failed_push
from .messages import later_fence
from .waiting import let_in

# Databases bound the number of parameters.
IDS_PER_STATEMENT = 500
# How long the outcomes of several tasks wait for their turn at a task that waits for many: each turn takes some ms.
TURN_MILLISECONDS = 500
# What `waiting.let_in` is given at once.
ASKED_TOGETHER = 100
WAITS_FOR_TASKS = as_check(state=TaskState.QUEUED, waits_for__gt=0)


class Settled(CommitHook):
    """Pushes the tasks that wait for no other one since a transaction, and announces those that failed for another.

    records: both. failed: the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[TaskRecord] = []

    def follow_up(self) -> None:
        for record in self.failed:
            log_failed(record)
        announce(self.failed, TaskState.QUEUED, TaskState.FAILED)
        closed = {record.id for record in self.failed}
        ready = [record for record in self.records if record.id not in closed]
        # One that ran before may have left an entry.
        for again in (False, True):
            dispatch([each for each in ready if bool(each.fence) is again and not _asks_gate(each)], again=again)
        for asking in batched([record.id for record in ready if _asks_gate(record)], ASKED_TOGETHER):
            try:
                let_in(asking)
            except (BrokerUnavailable, GateUnavailable) as error:
                # The leader has them wait at their gate, and lets them in.
                note_failed_push(error, ready)
                return


def _asks_gate(record: TaskRecord) -> bool:
    return record.waits_for_slot and record.retry_at is None


class Ended(NamedTuple):
    """A task that has finished, or is gone. name: of its function. word: what has become of it; "" for a success."""

    id: UUID
    name: str
    word: str


def ended(record: TaskRecord) -> Ended:
    """Return what children learn of a final row."""
    if record.state == TaskState.SUCCEEDED:
        return Ended(record.id, record.name, "")
    word = "was cancelled" if record.reason == FailureReason.CANCELLED else "has failed"
    return Ended(record.id, record.name, word)


# --- The write of outcomes, and the count, in one transaction.


def write_outcomes(writes: Sequence[FencedWrite], database: str, *, patient: bool) -> tuple[set[UUID], set[str]]:
    """Do what `batches.write_fenced` does; what waited for a task that is final then is counted, or fails.

    Returns: the ids of the rows that were written, and the unique keys that failed children have freed.
    """
    plain = [write for write in writes if write.record.workflow_id is None]
    linked = [write for write in writes if write.record.workflow_id is not None]
    accepted = batches.write_fenced(plain, database, patient=patient, unlinked=True) if plain else set()
    if len(accepted) < len(plain):
        linked += linked_since([write for write in plain if write.record.id not in accepted])
    going_on = [write for write in linked if not write.record.is_final]
    if going_on:
        accepted |= batches.write_fenced(going_on, database, patient=patient)
        linked = [write for write in linked if write.record.is_final]
    if not linked:
        return accepted, set()
    with transaction_of(TaskRecord):
        if not patient:
            batches.limit_waits(connections[database])
        # What is written already, because an earlier reply was lost, was counted then.
        open_ids = _open_among([write.record.id for write in linked])
        written = batches.write_fenced(linked, database, patient=patient)
        if not patient and len(linked) > 1:
            # Many workers count the members of one group at the same time. One row is written alone after a refusal.
            batches.limit_waits(connections[database], TURN_MILLISECONDS)
        final = [write.record for write in linked if write.record.id in written & open_ids]
        return accepted | written, settle([ended(record) for record in final])


def linked_since(writes: Sequence[FencedWrite]) -> list[FencedWrite]:
    """Return the writes whose rows have got children since their runs have read them; their records then say so."""
    by_id = {write.record.id: write for write in writes}
    # Locked, because a snapshot above READ COMMITTED may not show what the UPDATE has met.
    rows = rows_of(TaskRecord).filter(id__in=by_id, workflow_id__isnull=False).only("id", "workflow_id").order_by("id")
    with transaction_of(TaskRecord):
        found = list(rows.select_for_update())
    for row in found:
        by_id[row.id].record.workflow_id = row.workflow_id
    return [by_id[row.id] for row in found]


def _open_among(ids: Sequence[UUID]) -> set[UUID]:
    """Lock rows, and return the ids of those that are not final."""
    rows = rows_of(TaskRecord).only("id", "state", "finished_at")
    return {
        row.id
        for part in batched(sorted(ids), IDS_PER_STATEMENT)
        for row in lock_rows(rows.filter(id__in=part))
        if not row.finished_at
    }


# --- Count, level by level.


def settle(parents: Sequence[Ended]) -> set[str]:
    """Count tasks that have finished out of their children; return the unique keys that failed children have freed.

    Called in the transaction that has made the parents final, or deleted them.

    | check    | the child is QUEUED and waits; it is locked                                                   |
    | row      | `waits_for` is less by one for each parent; QUEUED → FAILED, PARENT_FAILED, after a failure   |
    | Redis    | after the commit: pending, scheduled, or in the line of its gate, if it waits for no task     |
    | announce | after the commit: `task_state_changed` of those that failed                                   |

    If we die after the commit, the reconciler pushes the rows, and has those wait that ask their gate.
    """
    freed: set[str] = set()
    level = list(parents)
    while level:
        edges = _edges_from(level)
        failed = [
            child for part in batched(sorted(edges), IDS_PER_STATEMENT) for child in _settle_children(part, edges)
        ]
        freed |= _fail({child: _blame(edges[child.id]) for child in failed})
        level = [ended(child) for child in failed]
    return freed


class _Loss(NamedTuple):
    """A parent of a child that has finished. runs_anyway: whether the child runs all the same."""

    parent: Ended
    runs_anyway: bool


def _edges_from(level: Sequence[Ended]) -> dict[UUID, dict[UUID, _Loss]]:
    """Return for each child of these tasks which of them it waited for."""
    by_id = {parent.id: parent for parent in level}
    found: dict[UUID, dict[UUID, _Loss]] = defaultdict(dict)
    for part in batched(list(by_id), IDS_PER_STATEMENT):
        edges = rows_of(TaskEdge).filter(parent_id__in=part).order_by()
        if connections[edges.db].vendor == "mysql":
            # A snapshot above READ COMMITTED may not show those of a child that was enqueued since.
            edges = edges.select_for_update()
        for parent_id, child_id, runs_anyway in edges.values_list("parent_id", "child_id", "runs_anyway"):
            found[child_id][parent_id] = _Loss(by_id[parent_id], runs_anyway)
    return found


def _blame(losses: Mapping[UUID, _Loss]) -> Ended | None:
    """Return the parent for which a child fails; None for a child that does not."""
    return next((loss.parent for loss in losses.values() if loss.parent.word and not loss.runs_anyway), None)


def _settle_children(ids: Sequence[UUID], edges: Mapping[UUID, Mapping[UUID, _Loss]]) -> list[TaskRecord]:
    """Count parents out of these children; return those that fail."""
    children = lock_rows(rows_of(TaskRecord).filter(WAITS_FOR_TASKS, id__in=ids))
    failed: list[TaskRecord] = []
    counts: dict[int, list[TaskRecord]] = defaultdict(list)
    for child in children:
        if _blame(edges[child.id]) is not None:
            failed.append(child)
        else:
            counts[len(edges[child.id])].append(child)
    for count, group in counts.items():
        rows_of(TaskRecord).filter(id__in=[child.id for child in group]).update(waits_for=F("waits_for") - count)
        for child in group:
            child.waits_for = (child.waits_for or 0) - count
    begin_ready([child for group in counts.values() for child in group if not child.waits_for])
    return failed


def begin_ready(records: Sequence[TaskRecord]) -> None:
    """Have tasks begin to wait for a worker that wait for no other task any more, in the caller's transaction.

    A delay counts from now. One with a gate asks it after the commit, and waits there if that is full: no caller is
    there to be refused.
    """
    groups: dict[tuple[float | None, bool], list[TaskRecord]] = defaultdict(list)
    for record in records:
        groups[record.delay_seconds, bool(record.gate)].append(record)
    rows = rows_of(TaskRecord)
    for (seconds, has_gate), group in groups.items():
        changes: dict[str, Any] = {}
        if seconds is not None:
            delay = Delay(timedelta(seconds=seconds))
            changes["run_after"] = database_clock.expression(connections[rows.db], delay)
            now = database_clock.now(rows.db)
            for record in group:
                record.run_after = delay.after(now)
        if has_gate:
            changes["reason"] = FailureReason.GATE_FULL
            for record in group:
                record.reason = FailureReason.GATE_FULL
        if changes:
            rows.filter(id__in=[record.id for record in group]).update(**changes)
        delayed = [record for record in group if record.run_after is not None and not record.is_remote]
        if has_gate and delayed:
            # It asks when its time has come.
            rows.filter(id__in=[record.id for record in delayed]).update(retry_at=F("run_after"))
            for record in delayed:
                record.retry_at = record.run_after
    if records:
        connection = connections[rows.db]
        hook = Settled.of_transaction(connection)
        hook.records.extend(records)
        hook.register(connection)


# --- Parents that are asked whether they have finished.


class Parents(NamedTuple):
    """What some tasks wait for, with those of their parents that have rows, locked.

    edges: child → parent → whether the child runs also when that fails.
    """

    rows: Mapping[UUID, TaskRecord]
    edges: Mapping[UUID, Mapping[UUID, bool]]

    def of(self, child: UUID) -> list[tuple[TaskRecord, bool]]:
        """Return the parents of a child that have rows."""
        return [(self.rows[id], anyway) for id, anyway in self.edges.get(child, {}).items() if id in self.rows]

    def count_open(self, child: UUID) -> int:
        """Return how many of them have not finished."""
        return sum(not parent.is_final for parent, _ in self.of(child))


def locked_parents(children: Iterable[UUID]) -> Parents:
    """Lock all that some tasks wait for, before these themselves: one that finishes now would not find its child."""
    edges: dict[UUID, dict[UUID, bool]] = defaultdict(dict)
    for part in batched(sorted(children), IDS_PER_STATEMENT):
        found = rows_of(TaskEdge).filter(child_id__in=part).order_by()
        for child_id, parent_id, runs_anyway in found.values_list("child_id", "parent_id", "runs_anyway"):
            edges[child_id][parent_id] = runs_anyway
    ids = sorted({parent_id for of_child in edges.values() for parent_id in of_child})
    rows = rows_of(TaskRecord).only("id", "state", "retry_at")
    return Parents(
        {row.id: row for part in batched(ids, IDS_PER_STATEMENT) for row in lock_rows(rows.filter(id__in=part))}, edges
    )


def settle_deleted(records: Sequence[TaskRecord]) -> set[str]:
    """Fail what waits for tasks that were deleted before they finished; return the unique keys that this has freed.

    Called in the transaction that has deleted them, or behind it. What was deleted may have been read long before, so
    the children say whether it was counted: one that has waits for as many as have not finished.
    """
    gone = {record.id: Ended(record.id, record.name, "was deleted") for record in records}
    ids = sorted(_edges_from(list(gone.values())))
    if not ids:
        return set()
    parents = locked_parents(ids)
    lost: dict[TaskRecord, Ended | None] = {}
    fewer: list[TaskRecord] = []
    for child in [
        row
        for part in batched(ids, IDS_PER_STATEMENT)
        for row in lock_rows(rows_of(TaskRecord).filter(WAITS_FOR_TASKS, id__in=part))
    ]:
        count, edges = parents.count_open(child.id), parents.edges[child.id]
        if count == child.waits_for:
            continue
        if all(edges.values()):
            child.waits_for = count
            rows_of(TaskRecord).filter(id=child.id).update(waits_for=count)
            fewer.append(child)
        else:
            lost[child] = next(parent for id, parent in gone.items() if id in edges)
    begin_ready([child for child in fewer if not child.waits_for])
    return _fail(lost) | settle([ended(child) for child in lost])


def fail_new(children: Mapping[TaskRecord, Ended]) -> set[str]:
    """Have tasks fail that were just inserted, because a parent had failed before; return the unique keys freed.

    What was inserted with them, and waits for them, fails too.
    """
    freed = _fail(children)
    return freed | settle([ended(child) for child in children])


def _fail(children: Mapping[TaskRecord, Ended | None]) -> set[str]:
    """QUEUED → FAILED for locked rows that wait; return the unique keys that they have freed."""
    if not children:
        return set()
    database = writing_database(TaskRecord)
    now = database_clock.now(database)
    fence = later_fence(max(children, key=lambda record: record.fence))
    writes: list[FencedWrite] = []
    for record, parent in children.items():
        read_fence = record.fence
        record.state, record.fence, record.finished_at = TaskState.FAILED, fence, now
        assert parent is not None  # noqa: S101 - `_blame` has found one
        text = f"task {parent.name} ({parent.id}), which it waited for, {parent.word}"
        append_error(record, ParentFailed(text), "", now)
        writes.append(FencedWrite(record, 0, read_fence))
    batches.write_fenced(writes, database)
    freed = {record.unique_key for record in children if record.frees_slot}
    for record in children:
        if record.frees_slot:
            record.unique_slot = None
    hook = Settled.of_transaction(connections[database])
    hook.failed.extend(children)
    hook.records.extend(children)
    hook.register(connections[database])
    return freed


def settle_records(records: Iterable[TaskRecord]) -> set[str]:
    """Do what `settle` does for final rows; those that have no workflow have no children."""
    return settle([ended(record) for record in records if record.workflow_id is not None])
