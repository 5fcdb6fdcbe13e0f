"""What `runworkers` does with tasks, seen from outside."""

from __future__ import annotations

import pytest

from django_asyncq.models import TaskRecord, TaskState

from . import tasks
from .workers import run_workers

pytestmark = pytest.mark.django_db(transaction=True)


def test_runs_sync_and_async_tasks_and_stores_results() -> None:
    """A burst runs what waits and leaves the results on the rows."""
    first, second = tasks.add.enqueue(1, b=2), tasks.add_async.enqueue(3, 4)
    run_workers()
    first.refresh()
    second.refresh()
    assert (first.return_value, second.return_value) == (3, 7)
    assert set(TaskRecord.objects.values_list("state", flat=True)) == {TaskState.SUCCEEDED}
