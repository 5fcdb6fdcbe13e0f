"""What a task waits for: its parents, when it is enqueued, and their values, when it is claimed.

A parent exists before its child, so no circle can be made. The parents that are not new themselves are locked until the
child is committed. So whichever is first, the child's INSERT or the write that makes a parent final, the other one sees
it: a parent that is final is not waited for, and one that is not counts the child when it is (`children`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from uuid import UUID

from django.db import connections

from ..core.after import MOST_PARENTS
from ..core.compat import batched
from ..exceptions import InvalidOption, TaskNotRunnable
from ..models import TaskEdge, TaskRecord, TaskState
from ..storage.inserting import insert_edges
from ..storage.routing import lock_rows, rows_of, transaction_of, writing_database
from .base import Run
from .children import IDS_PER_STATEMENT, Ended, ended, fail_new
from .following import move_up

Found = TypeVar("Found", bound=Sequence[TaskRecord | None])


def enqueue_after(records: Sequence[TaskRecord], enqueue: Callable[[], Found]) -> Found:
    """Enqueue tasks of which some wait for others; return what `enqueue` returns, which inserts their rows.

    records: with their `edges`; a parent that is among them stands before its children.

    | check    | each parent has a row; those that are not new are locked. A task that waits asks no gate        |
    | row      | INSERT as QUEUED, with `waits_for`, and of the edges; `workflow_id` of parents, all in one      |
    |          | transaction. A child of a parent that has failed becomes FAILED, PARENT_FAILED                  |
    | Redis    | after the commit, as `enqueue`, for those that wait for no task                                 |
    | announce | after the commit, as `enqueue`                                                                  |

    If we die after the commit, the reconciler pushes the rows that wait for no task.
    Raises: InvalidOption for a parent without a row; what `enqueue` raises; nothing was written then.
    """
    with transaction_of(TaskRecord):
        lost = _count_parents(records)
        found = enqueue()
        ids = {row.id for row in found if row is not None}
        # Not those of a call that an existing task stands for, or that was refused.
        new = [record for record in records if record.id in ids]
        insert_edges(new, connections[writing_database(TaskRecord)])
        failed = {record: lost[record.id] for record in new if record.id in lost}
        if failed:
            move_up(fail_new(failed))
    return found


def _count_parents(records: Sequence[TaskRecord]) -> dict[UUID, Ended]:
    """Have new tasks say for how many others they wait; return the ids of those that must fail, and for which parent.

    All that hang together get the same workflow.
    """
    new = {record.id for record in records}
    nodes = [record for record in records if record.edges]
    if not nodes:
        return {}
    wanted = {edge.parent.id for record in nodes for edge in record.edges}
    outside = _locked_parents(nodes, wanted - new)
    _give_workflow([record for record in records if record.edges or record.id in wanted], list(outside.values()))
    lost: dict[UUID, Ended] = {}
    for record in nodes:
        waits_for = set()
        for edge in record.edges:
            parent = outside.get(edge.parent.id)
            if parent is None or not parent.is_final:
                waits_for.add(edge.parent.id)
            elif parent.state == TaskState.FAILED and not edge.runs_anyway:
                waits_for.add(edge.parent.id)
                lost.setdefault(record.id, ended(parent))
        record.waits_for = len(waits_for)
    return lost


def _locked_parents(nodes: Sequence[TaskRecord], ids: Collection[UUID]) -> dict[UUID, TaskRecord]:
    """Lock the parents that have rows already; return them by their ids. Raises: InvalidOption for one without."""
    if len(ids) > MOST_PARENTS:
        raise InvalidOption(f"these calls wait for {len(ids):,} tasks, more than {MOST_PARENTS:,}: enqueue fewer")
    rows = rows_of(TaskRecord).only("id", "name", "backend", "state", "reason", "retry_at", "workflow_id")
    found = {
        row.id: row for part in batched(sorted(ids), IDS_PER_STATEMENT) for row in lock_rows(rows.filter(id__in=part))
    }
    for node in nodes:
        for edge in node.edges:
            if edge.parent.id in ids and edge.parent.id not in found:
                raise InvalidOption(
                    f"task {node.name} cannot wait for task {edge.parent.id}, which has no row here: it was deleted, "
                    f"or the transaction that has enqueued it is not committed, or it is in another database"
                )
    return found


def _give_workflow(new: Sequence[TaskRecord], parents: Sequence[TaskRecord]) -> None:
    """Give new tasks and their locked parents one workflow; those that get together here become one."""
    known = sorted({parent.workflow_id for parent in parents if parent.workflow_id is not None})
    workflow_id = known[0] if known else min([record.id for record in (*parents, *new)])
    for record in new:
        record.workflow_id = workflow_id
    rows = rows_of(TaskRecord)
    if others := known[1:]:
        ids = [row.id for row in lock_rows(rows.filter(workflow_id__in=others).only("id"))]
        for part in batched(ids, IDS_PER_STATEMENT):
            rows.filter(id__in=part).update(workflow_id=workflow_id)
    for part in batched([parent.id for parent in parents if parent.workflow_id is None], IDS_PER_STATEMENT):
        rows.filter(id__in=part).update(workflow_id=workflow_id)


# --- The values of parents, as keyword arguments of a claimed task. Its row keeps what stands for them.


def fill_values(runs: Sequence[Run]) -> None:
    """Give claimed tasks the return values of their parents, in memory. runs: of tasks that have waited for others.

    A parent that has failed has the value None. A run whose parent has no row any more is given an error in their
    place, with which it fails. Raises: django.db.Error.
    """
    by_child = {run.record.id: run for run in runs}
    edges: list[tuple[UUID, UUID, str, int]] = []
    for part in batched(list(by_child), IDS_PER_STATEMENT):
        found = rows_of(TaskEdge).filter(child_id__in=part).exclude(name="").order_by("child_id", "name", "position")
        edges += found.values_list("child_id", "parent_id", "name", "position")
    values: dict[UUID, Any] = {}
    for part in batched(sorted({parent for _, parent, _, _ in edges}), IDS_PER_STATEMENT):
        rows = rows_of(TaskRecord).filter(id__in=part).values_list("id", "state", "return_value")
        values |= {id: value if state == TaskState.SUCCEEDED else None for id, state, value in rows}
    given: dict[UUID, dict[str, Any]] = {}
    for child, parent, name, position in edges:
        arguments = given.setdefault(child, {})
        if parent not in values:
            by_child[child].unfit = TaskNotRunnable(
                f"the return value of task {parent}, which is its argument {name!r}, is gone: the row was deleted"
            )
        elif position < 0:
            arguments[name] = values[parent]
        else:
            arguments.setdefault(name, []).append(values[parent])
    for child, arguments in given.items():
        record = by_child[child].record
        record.kwargs = {**record.kwargs, **arguments}
