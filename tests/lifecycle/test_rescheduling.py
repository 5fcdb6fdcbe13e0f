"""Another time and priority for a task that waits."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..admin_cases import LIST, client_with, make, said
from ..redis_state import pending
from ..workers import history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


def row_of(result: object) -> TaskRecord:
    return TaskRecord.objects.get(pk=result.id)  # type: ignore[attr-defined]


def test_a_task_that_is_due_is_postponed() -> None:
    """Its entry waits with the delayed ones; the fence voids a run that has begun in between."""
    row = row_of(tasks.add.enqueue(1, 2))
    lifecycle.flush_pushes()
    assert pending() == [str(row.pk)]
    moment = timezone.now() + timedelta(hours=1)
    changed = lifecycle.reschedule(row.pk, run_after=moment, priority=7)
    assert changed is not None and (changed.run_after, changed.priority) == (moment, 7) and changed.fence > row.fence
    keys = Broker().keys("default")
    assert pending() == [] and Broker().client.zscore(keys.scheduled, str(row.pk)) == pytest.approx(
        moment.timestamp(), abs=1
    )


def test_a_delayed_task_is_due_at_once() -> None:
    """With a priority before the others."""
    row = row_of(tasks.add.using(run_after=timedelta(hours=1)).enqueue(1, 2))
    lifecycle.flush_pushes()
    lifecycle.reschedule(row.pk, run_after=None, priority=9)
    keys, client = Broker().keys("default"), Broker().client
    assert client.zscore(keys.priority, str(row.pk)) == -9 and client.zcard(keys.scheduled) == 0


def test_what_a_worker_has_taken_stays_as_it_is() -> None:
    """Its row still says QUEUED; a second run at another time would be one too many."""
    row = row_of(tasks.add.enqueue(1, 2))
    lifecycle.flush_pushes()
    assert Broker().dequeue("default", "worker", 1, 30).leases
    assert lifecycle.reschedule(row.pk, run_after=None, priority=5) is None
    assert row_of(row).priority == 0 and row_of(row).fence == row.fence


@pytest.mark.parametrize(
    "values", [{"state": state} for state in TaskState if state] + [{"group": "g"}, {"is_remote": True}]
)
def test_what_does_not_wait_by_itself_stays_as_it_is(values: dict[str, object]) -> None:
    """Nothing is written."""
    row = make(**{"state": TaskState.QUEUED, **values})  # type: ignore[arg-type]
    assert lifecycle.reschedule(row.pk, run_after=None, priority=5) is None
    assert row_of(row).priority == 0


def test_without_redis_nothing_is_changed(own_redis: EmbeddedRedis) -> None:
    """It is not known whether a worker has it."""
    row = make(TaskState.QUEUED)
    own_redis.kill()
    with pytest.raises(BrokerUnavailable):
        lifecycle.reschedule(row.pk, run_after=None, priority=5)
    assert row_of(row).priority == 0


def test_a_person_reschedules_on_the_page_of_a_task() -> None:
    """Whoever may retry; a bad value is said beside its field."""
    row = row_of(tasks.add.enqueue(1, 2))
    client = client_with("view_taskrecord", "retry_task")
    address = f"{LIST}{row.pk}/reschedule/"
    assert address in client.get(f"{LIST}{row.pk}/change/").content.decode()
    assert "errorlist" in client.post(address, {"priority": "101"}).content.decode() and row_of(row).priority == 0
    response = client.post(address, {"priority": "3", "delay_seconds": "60"})
    assert said(response) == [("success", "Done.")] and row_of(row).priority == 3
    assert "Rescheduled: delay 60 s, priority 3." in LogEntry.objects.get().change_message
    TaskRecord.objects.filter(pk=row.pk).update(state=TaskState.RUNNING)
    assert said(client.post(address, {"priority": "4"}))[-1][0] == "warning"
    assert address not in client.get(f"{LIST}{row.pk}/change/").content.decode()
    assert client_with("view_taskrecord", name="viewer").get(address).status_code == 403


@pytest.mark.slow
def test_a_postponed_task_runs_once_at_its_new_time(tmp_path: Path) -> None:
    """By real workers, however often it was postponed."""
    results = [tasks.add.enqueue(number) for number in range(20)]
    moment = timezone.now() + timedelta(seconds=2)
    for result in results[::2]:
        lifecycle.reschedule(row_of(result).pk, run_after=moment, priority=0)
    file = tmp_path / "history"
    with workers(tmp_path, ASYNCQ_TEST_HISTORY=str(file)):
        wait_until(lambda: not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists(), "the end of all")
    late = TaskRecord.objects.filter(pk__in=[result.id for result in results[::2]])
    assert all(row.started_at is not None and row.started_at >= moment for row in late)
    assert sorted(each["a"] for each in history(file)) == list(range(20))
