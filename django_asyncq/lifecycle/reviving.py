"""Bring back what failed while it waited for other tasks, when a person retries these, or itself.

A task that failed while it waited has never been ready, so a retry has it wait again, for those of its parents that
have not finished. While one of them has failed, it stays FAILED: nobody would ever count that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from django.db.models import F, QuerySet

from ..core.compat import batched
from ..models import FailureReason, TaskEdge, TaskRecord, TaskState
from ..storage.routing import lock_rows, rows_of
from .children import IDS_PER_STATEMENT, WAITS_FOR_TASKS, begin_ready, locked_parents
from .unique import already_taken, take_again, without

REVIVED = {"state": TaskState.QUEUED, "reason": FailureReason.NONE, "retry_at": None, "finished_at": None}
FORGOTTEN = {"crash_count": 0, "cancel_requested_at": None, "cancelled_by": "", "batch_id": None}


class Revived(NamedTuple):
    """What became of a retry. waiting: tasks that are QUEUED again. blocked: those of the wanted ones that are not."""

    waiting: list[TaskRecord]
    blocked: list[TaskRecord]


def revive(failed: QuerySet[TaskRecord], retried: Collection[UUID], wanted: Sequence[TaskRecord]) -> Revived:
    """Have tasks wait again that had failed for tasks which a person retries, level by level.

    Called in the transaction of the retry. failed: the FAILED rows. retried: the ids of tasks that were final, and are
    QUEUED again. wanted: locked rows that failed while they waited, and that the person retries themselves.

    | check    | PARENT_FAILED, or wanted; no parent has failed that must succeed; no other task has its key      |
    | row      | FAILED → QUEUED, and `waits_for` is how many of its parents have not finished; it takes its unique |
    |          | slot again. One that waits, and was to run anyway, waits for the retried task again              |
    | Redis    | after the commit: nothing, while it waits                                                         |
    | announce | by the caller                                                                                     |
    """
    waiting: list[TaskRecord] = []
    left = {record.id: record for record in wanted}
    level = set(retried)
    while level or left:
        children = _children_of(level)
        _wait_again(children)
        free = _take_slots(failed, _free_among(failed, {*children, *left}, left))
        _write(failed, free)
        waiting += free
        level = {record.id for record in free}
        left = {id: record for id, record in left.items() if id not in level}
        if not level:
            break
    begin_ready([record for record in waiting if not record.waits_for])
    return Revived(waiting, list(left.values()))


def _children_of(ids: Collection[UUID]) -> dict[UUID, set[UUID]]:
    """Return the ids of the tasks that wait for these, with which of them."""
    found: dict[UUID, set[UUID]] = defaultdict(set)
    for part in batched(list(ids), IDS_PER_STATEMENT):
        edges = rows_of(TaskEdge).filter(parent_id__in=part).order_by()
        for parent_id, child_id in edges.values_list("parent_id", "child_id"):
            found[child_id].add(parent_id)
    return found


def _wait_again(children: dict[UUID, set[UUID]]) -> None:
    """Have tasks wait for their retried parents that wait for others still: these had counted as finished."""
    for part in batched(sorted(children), IDS_PER_STATEMENT):
        counts: dict[int, list[UUID]] = defaultdict(list)
        for row in lock_rows(rows_of(TaskRecord).filter(WAITS_FOR_TASKS, id__in=part).only("id")):
            counts[len(children[row.id])].append(row.id)
        for count, ids in counts.items():
            rows_of(TaskRecord).filter(id__in=ids).update(waits_for=F("waits_for") + count)


def _free_among(
    failed: QuerySet[TaskRecord], ids: Collection[UUID], wanted: Mapping[UUID, TaskRecord]
) -> list[TaskRecord]:
    """Return which of these tasks may wait again: no parent has failed for them. They say for how many they wait.

    A parent that was deleted is not waited for.
    """
    parents = locked_parents(ids)
    free = []
    for record in [
        row for part in batched(sorted(ids), IDS_PER_STATEMENT) for row in lock_rows(failed.filter(id__in=part))
    ]:
        if record.id not in wanted and record.reason != FailureReason.PARENT_FAILED:
            continue
        record.waits_for = parents.count_open(record.id)
        if not any(_has_failed(parent) and not runs_anyway for parent, runs_anyway in parents.of(record.id)):
            free.append(record)
    return free


def _has_failed(record: TaskRecord) -> bool:
    return record.is_final and record.state == TaskState.FAILED


def _take_slots(failed: QuerySet[TaskRecord], records: Sequence[TaskRecord]) -> list[TaskRecord]:
    """Have tasks take their unique slots again; return those whose slots no other task has."""
    free = without(records, already_taken(records))
    return without(free, take_again(failed, free))


def _write(failed: QuerySet[TaskRecord], records: Sequence[TaskRecord]) -> None:
    counts: dict[int | None, list[TaskRecord]] = defaultdict(list)
    for record in records:
        counts[record.waits_for].append(record)
    for count, group in counts.items():
        changes = {**REVIVED, **FORGOTTEN, "waits_for": count}
        for part in batched(group, IDS_PER_STATEMENT):
            failed.filter(id__in=[record.id for record in part]).update(**changes)
        for record in group:
            for name, value in changes.items():
                setattr(record, name, value)
