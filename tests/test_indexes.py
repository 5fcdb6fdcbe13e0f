"""The indexes of the task table: a query by state, by gate or by time need not read the whole table."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.models import QuerySet

from django_asyncq import gates
from django_asyncq.models import TaskRecord

pytestmark = pytest.mark.django_db

ROWS = TaskRecord.objects.order_by()
LOOKS = {
    "queued": (ROWS.queued(), "asyncq_state_queue"),
    "running": (ROWS.running(), "asyncq_state_queue"),
    "failed": (ROWS.failed(), "asyncq_state_queue"),
    "retrying": (ROWS.retrying(), "asyncq_state_queue"),
    "live at a gate": (ROWS.filter(gate="a", state__in=gates.LIVE_STATES), "asyncq_gate_state"),
    "live at any gate": (ROWS.filter(state__in=gates.LIVE_STATES).exclude(gate=""), "asyncq_"),
    "enqueued lately": (ROWS.filter(enqueued_at__gt="2026-01-01T00:00Z"), "asyncq_enqueued_at"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_query_can_use_an_index(look: str) -> None:
    """On every database, for every common query."""
    rows, index = LOOKS[look]
    assert index in plan_of(rows)


def plan_of(rows: QuerySet[TaskRecord]) -> str:
    """Return the plan of the database; PostgreSQL is kept from scanning a table that is small."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
    return rows.explain()
