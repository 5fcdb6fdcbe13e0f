"""Runs of real worker processes are asked to stop: by asynq's own message, by the beat, by time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group
from django.utils import timezone

from django_asyncq.broker import Broker
from django_asyncq.models import FailureReason, TaskRecord, TaskState

from .. import stop_tasks as tasks
from .. import tasks as other_tasks
from ..benchmarks.figures import percentile
from ..workers import Workers, history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

CANCELLED = "django_asyncq.exceptions.TaskCancelled"


def row(result: Any) -> TaskRecord:
    """The row of a result."""
    return TaskRecord.objects.get(pk=result.id)


def wait_for(state: str, *results: Any) -> None:
    """Wait until the tasks run, or are over."""

    def holds() -> bool:
        rows = TaskRecord.objects.filter(pk__in=[result.id for result in results])
        return all(each.state == TaskState.RUNNING if state == "running" else each.is_final for each in rows)

    try:
        wait_until(holds, f"{len(results)} tasks that are {state}")
    except AssertionError as error:
        rows = TaskRecord.objects.filter(pk__in=[result.id for result in results])
        raise AssertionError(f"{error}: {[(each.short_name, each.state, each.errors) for each in rows]}") from None


def publish(*messages: Any) -> None:
    """Do what asynq's tools do to cancel a task."""
    broker = Broker()
    channel = f"{broker.prefix}:cancel"
    # A process begins to run tasks before it listens.
    wait_until(lambda: broker.client.pubsub_numsub(channel)[0][1] > 0, "a process that listens")
    for message in messages:
        broker.client.publish(channel, message)


@pytest.fixture
def fleet(own_keys: None, tmp_path: Path) -> Iterator[Workers]:
    """One worker process with eight slots of each kind, and a short grace."""
    with workers(tmp_path, "--concurrency", "8", ASYNCQ_TEST_TIMEOUT_GRACE="0.5") as found:
        yield found


def test_running_tasks_stop_when_they_are_cancelled(fleet: Workers) -> None:
    """Each in its way, for good, whatever is left of its attempts; neighbours and the process go on."""
    ways = [tasks.checks.enqueue(then) for then in ("", "raises", "retries", "returns")]
    checks, raises, retries, returns = ways
    awaits, neighbour = tasks.awaits.enqueue(), tasks.checks.enqueue()
    wait_for("running", *ways, awaits, neighbour)
    process = fleet.children()
    publish("", b"\xff", "x" * 100_000, str(uuid4()), *(result.id for result in (*ways, awaits)))
    wait_for("over", *ways, awaits)
    # On SQLite nobody else writes while it runs.
    atomic = tasks.atomic.enqueue("rolled back")
    wait_for("running", atomic)
    publish(atomic.id)
    wait_for("over", atomic)
    for result in (checks, raises, retries, awaits, atomic):
        record = row(result)
        assert (record.state, record.reason, record.attempt) == (TaskState.FAILED, FailureReason.CANCELLED, 1)
        assert record.last_exception == ("builtins.ValueError" if result is raises else CANCELLED)
        assert len(record.errors) == 1
    assert (row(returns).state, row(returns).return_value) == (TaskState.SUCCEEDED, "all the same")
    assert not Group.objects.exists()
    assert row(neighbour).state == TaskState.RUNNING
    assert fleet.children() == process
    publish(neighbour.id)
    wait_for("over", neighbour)


def test_task_that_does_not_stop_has_its_process_replaced(fleet: Workers) -> None:
    """A `def` that never looks and a coroutine that swallows its cancellation; a neighbour loses no attempt."""
    stubborn = [tasks.ignores.enqueue(), tasks.swallows.enqueue()]
    neighbour = other_tasks.nap.enqueue(3)
    wait_for("running", *stubborn, neighbour)
    publish(*(result.id for result in stubborn))
    wait_for("over", *stubborn, neighbour)
    for result in stubborn:
        record = row(result)
        assert (record.state, record.reason, record.last_exception) == (
            TaskState.FAILED,
            FailureReason.CANCELLED,
            CANCELLED,
        )
        assert "did not stop when asked; its process was killed" in record.errors[0]["message"]
    record = row(neighbour)
    assert (record.state, record.attempt, record.crash_count, record.errors) == (TaskState.SUCCEEDED, 1, 0, [])
    assert "was cancelled and did not stop" in fleet.output()
    # The supervisor has killed it, so its death is no accident.
    assert "has been stopped: its process was killed by signal 9 (SIGKILL)" in fleet.output()
    assert "exited unexpectedly" not in fleet.output()


def test_cancel_whose_message_is_lost_costs_a_beat(fleet: Workers) -> None:
    """The field in the task's hash is enough, also while the process drains, when nobody listens any more."""
    first, second = tasks.awaits.enqueue(), tasks.checks.enqueue()
    wait_for("running", first, second)
    broker = Broker()
    broker.client.hset(broker.keys("default").task(first.id), "cancel", 1)
    wait_for("over", first)
    assert row(first).reason == FailureReason.CANCELLED
    os.kill(fleet.process.pid, signal.SIGTERM)
    channel = f"{broker.prefix}:cancel"
    wait_until(lambda: broker.client.pubsub_numsub(channel)[0][1] == 0, "a process that drains")
    broker.client.hset(broker.keys("default").task(second.id), "cancel", 1)
    wait_for("over", second)
    assert row(second).reason == FailureReason.CANCELLED
    assert fleet.stop() == 0


def test_times_stop_a_run(fleet: Workers) -> None:
    """The soft timeout lets it finish; a deadline ends it as a timeout does, and no attempt follows."""
    early, early_async = tasks.finishes_early.enqueue(), tasks.finishes_early_async.enqueue()
    wait_for("over", early, early_async)
    # Only now: a worker on a busy machine may start after the deadline.
    deadline = timezone.now() + timedelta(seconds=5)
    bounded = [each.using(deadline=deadline, max_attempts=1).enqueue() for each in (tasks.awaits, tasks.ignores)]
    wait_for("over", *bounded)
    assert (row(early).return_value, row(early_async).return_value) == ("early: True", "early")
    for result in bounded:
        record = row(result)
        assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.TIMEOUT)
        assert "ran on after its deadline, " in record.errors[0]["message"]


@pytest.mark.faults
def test_coroutine_stops_soon_after_its_cancel(own_keys: None, tmp_path: Path) -> None:
    """All of 100 cancels; it prints how long they take from the call of `cancel` to the `finally` of the coroutine."""
    path = tmp_path / "stopped"
    seconds = []
    with workers(tmp_path, "--processes", "2", "--concurrency", "8", ASYNCQ_TEST_HISTORY=str(path)):
        for _ in range(10):
            results = [tasks.notes_its_stop.enqueue() for _ in range(10)]
            wait_for("running", *results)
            cancelled_at = {}
            for result in results:
                cancelled_at[result.id] = time.monotonic()
                assert result.cancel() == "asked"
            wait_for("over", *results)
            assert {row(result).reason for result in results} == {FailureReason.CANCELLED}
            stopped_at = {line["id"]: line["at"] for line in history(path)}
            seconds += [stopped_at[id] - at for id, at in cancelled_at.items()]
    middle, most = percentile(seconds, 0.5), percentile(seconds, 0.95)
    print(f"from the call of cancel to the stop: p50 {middle:.4f} s, p95 {most:.4f} s")
