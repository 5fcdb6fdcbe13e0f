"""The workflows, for an `Inspector`: lists of them, one with what holds it up, its graph, its retry and its cancel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Max, Min, Q, QuerySet

from ..core.names import lowest_uuid7_at, time_of_uuid7
from ..core.time import Duration
from ..exceptions import InvalidOption
from ..models import FailureReason, TaskRecord, TaskState
from ..storage.routing import rows_of
from ..storage.workflows import STATES, edges_of_workflow, ids_of_workflows
from .of_tasks import EVERYTHING, HIGHEST_ID, MOST_PER_PAGE, SHOWN, Tasks, info_of, reason_word, state_word
from .of_tasks import STATES as TASK_STATES
from .values import (
    CancelCounts,
    Outcome,
    TaskInfo,
    WorkflowDetails,
    WorkflowEdge,
    WorkflowGraph,
    WorkflowInfo,
    WorkflowNode,
    WorkflowPage,
    WorkflowTask,
)

LOWEST_ID = UUID(int=0)
# Of the tasks that hold a workflow up.
MOST_HOLDING_UP = 20
# Larger graphs are not read as a whole: a page asks for one every five seconds.
MOST_NODES, MOST_EDGES = 20_000, 100_000
COUNTS = {state: Count("id", filter=condition) for state, condition in TASK_STATES.items()}
# The same from the index of workflows alone, which has no `retry_at`.
ENDED_FAILED = Q(state=TaskState.FAILED, finished_at__isnull=False)
RETRYING = Q(state=TaskState.FAILED, finished_at__isnull=True)
INDEXED_COUNTS = {**COUNTS, "failed": Count("id", filter=ENDED_FAILED), "retrying": Count("id", filter=RETRYING)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowFilter:
    """Which workflows: those that meet all that is given.

    state: "running", "failed" (a task of it has, whether or not others go on), or "finished". name: the whole path of a
    task that it has, or its last part. since, until: when its first task was enqueued, to the millisecond.
    Raises: InvalidOption.
    """

    state: str = ""
    name: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if self.state and self.state not in STATES:
            raise InvalidOption(f"no workflow is {self.state!r}: use {', '.join(STATES)}")


EVERY = WorkflowFilter()


class Workflows:
    """List, show, retry and cancel workflows. Of an `Inspector` with a backend, only those of that alias."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self._tasks = Tasks(backend)

    def page(self, matching: WorkflowFilter = EVERY, *, before: UUID | None = None, most: int = 50) -> WorkflowPage:
        """Return the newest workflows that match. before: `WorkflowPage.next` of the page before. most: at most 1,000.

        Two workflows that got together have become one, with the lower id. Raises: InvalidOption.
        """
        if not 1 <= most <= MOST_PER_PAGE:
            raise InvalidOption(f"a page has 1 to {MOST_PER_PAGE:,} workflows, not {most}")
        ends = [before or HIGHEST_ID, HIGHEST_ID if matching.until is None else lowest_uuid7_at(matching.until)]
        since = LOWEST_ID if matching.since is None else lowest_uuid7_at(matching.since)
        found = ids_of_workflows(
            before=min(ends),
            since=since,
            most=most,
            state=matching.state,
            name=matching.name,
            backend=self._backend or "",
        )
        rows = rows_of(TaskRecord).filter(workflow_id__in=found.ids).order_by().values("workflow_id")
        counted = {row["workflow_id"]: row for row in rows.annotate(**INDEXED_COUNTS, latest=Max("finished_at"))}
        first = rows_of(TaskRecord).filter(id__in=found.ids).values_list("id", "name", "backend")
        names = {id: (name, backend) for id, name, backend in first}
        infos = [_info(id, counted[id], *names.get(id, ("", ""))) for id in found.ids if id in counted]
        return WorkflowPage(infos, found.next)

    def get(self, id: UUID) -> WorkflowDetails | None:
        """Return a workflow, and what holds it up; None when no task of it has a row. Costs four statements."""
        rows = self._rows(id)
        by_name: Any = rows.order_by().values("name", "backend")
        by_name = by_name.annotate(**COUNTS, latest=Max("finished_at"), first=Min("enqueued_at"))
        groups: list[dict[str, Any]] = list(by_name.order_by("first"))
        if not groups:
            return None
        failed = rows.filter(TASK_STATES["failed"]).exclude(reason=FailureReason.PARENT_FAILED)
        ready = rows.filter(Q(waits_for=None) | Q(waits_for=0), finished_at=None)
        total: dict[str, Any] = {state: sum(group[state] for group in groups) for state in TASK_STATES}
        total["latest"] = max((group["latest"] for group in groups if group["latest"]), default=None)
        first = rows_of(TaskRecord).filter(id=id).values_list("name", flat=True).first()
        info = _info(id, total, first or "", groups[0]["backend"])
        return WorkflowDetails(
            **{each.name: getattr(info, each.name) for each in fields(WorkflowInfo)},
            tasks=[_of_name(group) for group in groups],
            failed=_first_of(failed),
            open=_first_of(ready),
        )

    def of_task(self, id: UUID) -> UUID | None:
        """Return the id of the workflow that a task belongs to; None for one that waits for none, and none for it."""
        return self._tasks_rows().filter(id=id).values_list("workflow_id", flat=True).first()

    def graph(self, id: UUID) -> WorkflowGraph | None:
        """Return the whole graph of a workflow; None for one of more than 20,000 tasks or 100,000 edges.

        A task that was deleted is not in it. Costs two statements.
        """
        columns = ("id", "name", "state", "retry_at", "reason", "waits_for")
        rows = list(self._rows(id).order_by("id").values_list(*columns)[: MOST_NODES + 1])
        edges = edges_of_workflow(id, MOST_EDGES + 1) if len(rows) <= MOST_NODES else []
        if len(rows) > MOST_NODES or len(edges) > MOST_EDGES:
            return None
        places = {row[0]: place for place, row in enumerate(rows)}
        known = [WorkflowEdge(*edge) for edge in edges if edge[0] in places and edge[1] in places]
        depths = _depths(len(rows), {(places[edge.parent], places[edge.child]) for edge in known})
        nodes = [
            WorkflowNode(id, name, state_word(state, retry_at), reason_word(reason), waits_for or 0, depth)
            for (id, name, state, retry_at, reason, waits_for), depth in zip(rows, depths, strict=True)
        ]
        return WorkflowGraph(nodes, known)

    def retry(self, id: UUID) -> Outcome:
        """Queue the failed tasks of a workflow again, now. Raises: as `Inspector.tasks.retry`.

        First those that have failed themselves: what had failed for them waits again with them.
        """
        outcome = Outcome()
        for ids in self.pages_to_retry(id):
            found = self._tasks.retry(ids)
            outcome.done.extend(found.done)
            outcome.refused.update(found.refused)
        return outcome

    def pages_to_retry(self, id: UUID) -> Iterator[list[UUID]]:
        """Yield the ids of the failed tasks, and then those that have not come back with them."""
        failed = self._rows(id).filter(TASK_STATES["failed"]).order_by("id").values_list("id", flat=True)
        tried: set[UUID] = set()
        for reasons in (~Q(reason=FailureReason.PARENT_FAILED), Q(reason=FailureReason.PARENT_FAILED)):
            ids = [each for each in failed.filter(reasons) if each not in tried]
            tried.update(ids)
            if ids:
                yield ids

    def cancel(self, id: UUID, *, by: str = "", reason: str = "", wait: Duration | None = None) -> CancelCounts:
        """Cancel the tasks of a workflow that have not finished. The values are those of `Inspector.tasks.cancel`."""
        return self._tasks.cancel(self.ids_to_cancel(id), by=by, reason=reason, wait=wait)

    def ids_to_cancel(self, id: UUID) -> list[UUID]:
        """Return the ids of the tasks that have not finished, the last ones first.

        What waits for a cancelled task would fail for it, and was meant itself.
        """
        return list(self._rows(id).filter(finished_at=None).order_by("-id").values_list("id", flat=True))

    def _rows(self, id: UUID) -> QuerySet[TaskRecord]:
        return self._tasks_rows().filter(workflow_id=id)

    def _tasks_rows(self) -> QuerySet[TaskRecord]:
        rows = EVERYTHING.rows()
        return rows if self._backend is None else rows.filter(backend=self._backend)


def _info(id: UUID, counted: Any, name: str, backend: str) -> WorkflowInfo:
    counts = {state: counted[state] for state in TASK_STATES}
    total, is_open = sum(counts.values()), any(counts[state] for state in ("queued", "running", "retrying"))
    return WorkflowInfo(
        id=id,
        name=name,
        backend=backend,
        state="running" if is_open else "failed" if counts["failed"] else "succeeded",
        total=total,
        finished=counts["succeeded"] + counts["failed"],
        counts=counts,
        began_at=time_of_uuid7(id),
        finished_at=None if is_open else counted["latest"],
    )


def _of_name(group: Any) -> WorkflowTask:
    counts = {state: group[state] for state in TASK_STATES}
    return WorkflowTask(group["name"], sum(counts.values()), counts)


def _first_of(rows: QuerySet[TaskRecord]) -> list[TaskInfo]:
    return [info_of(row) for row in rows.order_by("id").only(*SHOWN)[:MOST_HOLDING_UP]]


def _depths(count: int, pairs: Collection[tuple[int, int]]) -> list[int]:
    """Return the depth of each task: 0 for one that waits for none, else one more than that of the deepest parent.

    pairs: of the places of parents and children. Numbers, because ids take five times as long.
    """
    children: dict[int, list[int]] = defaultdict(list)
    left, depths = [0] * count, [0] * count
    for parent, child in pairs:
        children[parent].append(child)
        left[child] += 1
    ready = [place for place in range(count) if not left[place]]
    for place in ready:
        # It grows while it is read: a child is added behind its last parent.
        for child in children.get(place, ()):
            depths[child] = max(depths[child], depths[place] + 1)
            left[child] -= 1
            if not left[child]:
                ready.append(child)
    return depths
