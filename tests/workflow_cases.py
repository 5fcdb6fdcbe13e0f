"""Workflows for tests: large ones, and a worker in this process that runs what is pending."""

from __future__ import annotations

from uuid import UUID

from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.names import uuid7
from django_asyncq.core.registry import find
from django_asyncq.models import TaskEdge, TaskRecord


def work(most: int = 1_000) -> None:
    """Run what is pending until nothing is."""
    count = 0
    while runs := lifecycle.claim(Broker(), "default", "w", 100, "default").runs:
        for run in runs:
            count += 1
            assert count <= most
            lifecycle.begin(run, "w", timezone.now())
            try:
                value = find(run.record.name).call(*run.record.args, **run.record.kwargs)
                lifecycle.succeed(run, value, timezone.now())
            except ValueError as error:
                lifecycle.fail(run, error, "", timezone.now(), retry_at=None)
        lost = lifecycle.record_runs(runs)
        assert not lost
        lifecycle.acknowledge(Broker(), "w", runs, lost)


def make_large(count: int, *, module: str = "tests.workflow_tasks") -> UUID:
    """Write rows of so many tasks and of one that waits for them all, without Redis; return the workflow's id."""
    rows = [TaskRecord(id=uuid7(), name=f"{module}.load", args=[number]) for number in range(count)]
    last = TaskRecord(id=uuid7(), name=f"{module}.total", waits_for=count)
    workflow_id = rows[0].id
    for row in (*rows, last):
        row.workflow_id = workflow_id
    TaskRecord.objects.bulk_create([*rows, last], batch_size=500)
    edges = [
        TaskEdge(parent_id=row.id, child_id=last.id, name="rows", position=number) for number, row in enumerate(rows)
    ]
    TaskEdge.objects.bulk_create(edges, batch_size=500)
    return workflow_id
