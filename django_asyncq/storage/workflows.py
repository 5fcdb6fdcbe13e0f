"""The ids of workflows, the newest first: a loose scan of the index of workflows, one look into it for each.

However many tasks a workflow has, each is passed in one step. One statement says of each whether a filter chooses it,
which asks at most `MOST_LOOKED_AT` workflows; the caller's next page looks further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections

from ..models import TaskEdge, TaskRecord
from .routing import rows_of, writing_database

MOST_LOOKED_AT = 500
# A task of the workflow `found.id`; with LIMIT, because MariaDB and PostgreSQL may make of an EXISTS a list of all
# workflows, for which they read all of the table.
TASK_OF_IT = "(SELECT 1 FROM {{table}} AS one WHERE one.workflow_id = found.id AND {condition} LIMIT 1)"
OPEN, ENDED_FAILED = "finished_at IS NULL", "finished_at IS NOT NULL AND state = 3"
STATES = {
    "running": TASK_OF_IT.format(condition=OPEN) + " IS NOT NULL",
    "failed": TASK_OF_IT.format(condition=ENDED_FAILED) + " IS NOT NULL",
    "finished": TASK_OF_IT.format(condition=OPEN) + " IS NULL",
}
WALK = """
    WITH RECURSIVE found (id, number) AS (
        SELECT (SELECT workflow_id FROM {{table}} WHERE workflow_id < %s ORDER BY workflow_id DESC LIMIT 1), 1
        UNION ALL
        SELECT (
            SELECT workflow_id FROM {{table}} WHERE workflow_id < found.id ORDER BY workflow_id DESC LIMIT 1
        ), number + 1
        FROM found WHERE found.id >= %s AND number < %s
    )
"""
# MariaDB begins each step of such a walk at the end of the index: 1 s for 500 workflows of 20 tasks. Here it reads each
# entry of the workflows of a page once: 40 ms.
WALK_OF_MYSQL = """
    WITH found AS (
        SELECT DISTINCT workflow_id AS id FROM {{table}} WHERE workflow_id < %s AND workflow_id >= %s
        ORDER BY workflow_id DESC LIMIT %s
    )
"""
LOOK = "SELECT id, CASE WHEN {condition} THEN 1 ELSE 0 END FROM found WHERE id >= %s ORDER BY id DESC"


class FoundWorkflows(NamedTuple):
    """The ids of a page, the newest first. next: what to give as `before` for those that follow; None at the end."""

    ids: list[UUID]
    next: UUID | None


def ids_of_workflows(
    *, before: UUID, since: UUID, most: int, state: str = "", name: str = "", backend: str = ""
) -> FoundWorkflows:
    """Return the workflows with ids below `before`, and from `since` on, that meet all that is given.

    state: of STATES. name: the whole path of a task that it has, or its last part. backend: of its tasks.
    """
    connection: Any = connections[writing_database(TaskRecord)]
    conditions, values = [STATES[state]] if state else [], list[str]()
    if backend:
        # All tasks of one are of the same alias.
        conditions.append("(SELECT backend FROM {table} AS one WHERE one.workflow_id = found.id LIMIT 1) = %s")
        values.append(backend)
    if name:
        is_path = "." in name
        test = "= %s" if is_path else connection.operators["endswith"]
        # A check, which no other index leads to.
        check = f"CASE WHEN name {test} THEN 1 ELSE 0 END = 1"
        conditions.append(TASK_OF_IT.format(condition=check) + " IS NOT NULL")
        values.append(name if is_path else f"%.{connection.ops.prep_for_like_query(name)}")
    looked_at = MOST_LOOKED_AT if conditions else most + 1
    field, table = TaskRecord._meta.get_field("workflow_id"), connection.ops.quote_name(TaskRecord._meta.db_table)
    lowest, highest = (field.get_db_prep_value(id, connection) for id in (since, before))
    walk = WALK_OF_MYSQL if connection.vendor == "mysql" else WALK
    statement = (walk + LOOK).format(condition=" AND ".join(conditions) or "1 = 1").format(table=table)
    with connection.cursor() as cursor:
        cursor.execute(statement, [highest, lowest, looked_at, *values, lowest])
        found = [(UUID(str(id)), bool(is_chosen)) for id, is_chosen in cursor.fetchall()]
    ids = [id for id, is_chosen in found if is_chosen]
    if len(ids) > most:
        return FoundWorkflows(ids[:most], ids[most - 1])
    return FoundWorkflows(ids, found[-1][0] if conditions and len(found) == looked_at else None)


def edges_of_workflow(id: UUID, most: int) -> list[tuple[UUID, UUID, str, bool]]:
    """Return parent, child, name and whether the child runs anyway, for each edge of a workflow, at most so many.

    A value that is one of a list has an edge for each place in it; these are one here, as no position is read.
    """
    children = rows_of(TaskRecord).filter(workflow_id=id).order_by().values("id")
    edges = rows_of(TaskEdge).filter(child_id__in=children).order_by()
    return list(edges.values_list("parent_id", "child_id", "name", "runs_anyway").distinct()[:most])


def edges_at(ids: Sequence[UUID], column: str, most: int) -> list[tuple[UUID, UUID, str]]:
    """Return parent, child and name of the edges of some tasks. column: "parent_id" or "child_id", which these are."""
    edges = rows_of(TaskEdge).filter(**{f"{column}__in": ids}).order_by()
    return list(edges.values_list("parent_id", "child_id", "name").distinct()[:most])
