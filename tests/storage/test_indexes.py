"""The indexes of the task table: a query by state, by gate or by time need not read the whole table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.core import checks
from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

from django_asyncq import gates
from django_asyncq.core.names import uuid7
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.models.tasks import HOLDS_SLOT
from django_asyncq.storage import batches

pytestmark = pytest.mark.django_db

# Enough that no plan reads the whole table, or another index in the order that is asked for.
FINISHED = 1000

# The name of its index: PostgreSQL, SQLite, MySQL.
PRIMARY_KEY = re.compile(r"taskrecord_pkey|autoindex_django_asyncq_taskrecord|PRIMARY")
ROWS = TaskRecord.objects.order_by()
LOOKS = {
    "queued": (ROWS.queued(), "asyncq_state_id"),
    "running": (ROWS.running(), "asyncq_state_id"),
    # The index of failed rows holds all of them too; PostgreSQL chooses by its statistics.
    "failed": (ROWS.failed(), "asyncq_state_id|asyncq_name_exception"),
    "retrying": (ROWS.retrying(), "asyncq_state_id|asyncq_name_exception|asyncq_retry_at"),
    "holds a slot of the gate where it stands": (ROWS.in_two_parts_at("a")[0].filter(HOLDS_SLOT), "asyncq_gate_state"),
    "holds a slot of another gate too": (ROWS.in_two_parts_at("a")[1].filter(HOLDS_SLOT), "asyncq_other_gates"),
    "waiting at a gate": (ROWS.waiting_at_gate("a"), "asyncq_gate_state"),
    "live at any gate": (ROWS.at_gate().filter(state__in=gates.LIVE_STATES), "asyncq_"),
    "failed, newest first": (ROWS.failed().order_by("-id"), "asyncq_state_id"),
    "queued, a page": (ROWS.queued().filter(id__gt=uuid7()).order_by("id"), "asyncq_state_id"),
    "queued lately": (ROWS.queued().enqueued_since(timezone.now()), "asyncq_state_id"),
    "enqueued lately": (ROWS.enqueued_since(timezone.now()), PRIMARY_KEY),
    "of one task": (ROWS.filter(name="a").order_by("-id"), "asyncq_name_id"),
    "of one task, with one error": (ROWS.failed().filter(name="a", last_exception="b.C"), "asyncq_name_exception"),
    "with one reason": (ROWS.filter(state=TaskState.FAILED, reason=2).order_by("-id"), "asyncq_reason_id"),
    "with one error": (ROWS.failed().filter(last_exception="b.C").order_by("-id"), "asyncq_exception_id"),
    "by what another program calls it": (ROWS.filter(wire_id="order-7"), "asyncq_wire_id"),
    "live ones of a workflow": (ROWS.filter(workflow_id=uuid7(), finished_at=None), "asyncq_workflow"),
    "younger ones of a workflow": (ROWS.filter(workflow_id=uuid7(), finished_at__gt=timezone.now()), "asyncq_workflow"),
    # MySQL has looked the row up in the unique index before it plans.
    "with a unique slot": (ROWS.filter(unique_slot="a"), "asyncq_unique_slot|reading const tables"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_query_can_use_an_index(look: str) -> None:
    """On every database, for every common query."""
    rows, index = LOOKS[look]
    now = timezone.now()
    if connection.vendor == "postgresql":
        # Other tests leave pages of rows behind that are no longer there, which each index is charged for.
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {TaskRecord._meta.db_table} CASCADE")
    fill = {"state": TaskState.SUCCEEDED, "finished_at": now}
    TaskRecord.objects.bulk_create(TaskRecord(name=f"task-{number % 100}", **fill) for number in range(FINISHED))
    fail = {"state": TaskState.FAILED, "finished_at": now, "reason": 1, "last_exception": "b.C"}
    TaskRecord.objects.bulk_create(TaskRecord(name=f"task-{number}", **fail) for number in range(20))
    assert re.search(index, plan_of(rows))


def test_no_check_complains_about_the_models() -> None:
    """On MySQL, Django warns of each index and constraint with a condition in every project's `check`."""
    assert checks.run_checks(tags=["models"], databases=["default"]) == []


@pytest.mark.skipif(connection.vendor == "mysql", reason="it has no partial indexes")
def test_rows_without_a_value_are_in_no_index_of_it() -> None:
    """A plain task has no gate and no unique slot, so its INSERT and its changes of state write neither index."""
    conditions = {
        "asyncq_gate_state": "gate",
        "asyncq_other_gates": "other_gates",
        "asyncq_unique_slot": "unique_slot",
        "asyncq_name_exception": "state",
        "asyncq_wire_id": "wire_id",
    }
    if connection.vendor == "postgresql":
        statement = "SELECT indexname, indexdef FROM pg_indexes"
    else:
        statement = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    with connection.cursor() as cursor:
        cursor.execute(statement)
        found = dict(cursor.fetchall())
    for name, column in conditions.items():
        assert re.search(rf"WHERE .*\b{column}\b", found[name]), name


def plan_of(rows: QuerySet[TaskRecord]) -> str:
    """Return the plan of the database; PostgreSQL is kept from scanning a table that is small."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")
        if connection.vendor != "mysql":
            cursor.execute("ANALYZE django_asyncq_taskrecord")
    return rows.explain()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL plans by statistics that may be old")
def test_outcomes_find_their_rows_by_id_whatever_the_statistics_say() -> None:
    """They say that hardly any row is queued, as they do of a backlog that has come since the last ANALYZE."""
    over = {"state": TaskState.SUCCEEDED, "finished_at": timezone.now()}
    TaskRecord.objects.bulk_create(TaskRecord(name="tests.tasks.add", **over) for _ in range(20_000))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_asyncq_taskrecord")
    queued = TaskRecord.objects.bulk_create(TaskRecord(name="tests.tasks.add") for _ in range(1_000))
    sent: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append((sql, params))
        return execute(sql, params, many, context)

    for record in queued[:100]:
        record.state, record.finished_at = TaskState.SUCCEEDED, timezone.now()
    with connection.execute_wrapper(keep):
        written = batches.write_fenced([batches.FencedWrite(record, 1, 0) for record in queued[:100]], "default")
    assert len(written) == 100
    (update,) = (each for each in sent if "UPDATE" in each[0])
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {update[0]}", update[1])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "taskrecord_pkey" in plan and "asyncq_state_id" not in plan, plan
