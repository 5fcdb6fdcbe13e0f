"""Workers run tasks that wait for others: of each kind, with their values, and whoever waits is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_asyncq import chain, group, previous
from django_asyncq.models import TaskRecord, TaskState

from .. import workflow_tasks as tasks
from ..workers import workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def test_workers_run_a_workflow_of_every_kind_of_step(tmp_path: Path) -> None:
    """A `def`, an `async def`, an isolated and an atomic one; and a graph that grows."""
    collect = tasks.total.using(after={"rows": previous}).step(factor=2)
    doubles: list[Any] = [tasks.double.using(after={"value": previous}).step() for _ in range(20)]
    workflow = chain(
        tasks.load.step(3),
        group(doubles, then=collect),
        tasks.awaited.using(after={"value": previous}).step(),
        tasks.apart.using(after={"value": previous}).step(),
    )
    with workers(tmp_path):
        result = workflow.enqueue()
        assert result.wait(timeout=60) == 242
        grown = tasks.grows_atomically.enqueue()
        assert grown.wait(timeout=60) == "grown"
        behind = tasks.note.using(after=[grown]).enqueue("end")
        assert behind.wait(timeout=60) == "end"
        failed = chain(tasks.load.step(-1), tasks.note.step()).enqueue()
        with pytest.raises(Exception, match="A task that it waited for failed"):
            failed.wait(timeout=60)
    assert not TaskRecord.objects.filter(state__in=(TaskState.QUEUED, TaskState.RUNNING)).exists()
