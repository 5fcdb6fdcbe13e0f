"""Faults in the test's own process: `fail_at`, `lose_redis` and `lose_lease`, in a TestCase and outside of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings

from django_asyncq import conf
from django_asyncq.core import compat
from django_asyncq.exceptions import GateUnavailable
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import ProcessDied, crash_at, fail_at, failpoints, lose_lease, lose_redis, run_tasks

from .. import equality_tasks
from .. import kit_tasks as tasks
from ..core.test_equality import KIT, WORKERS, columns
from ..workers import run_workers
from .test_run_tasks import IMMEDIATE, Kit, body, row


def writes(context: Any) -> int:
    """Leave one group for each run."""
    Group.objects.create(name=f"run {Group.objects.count()}")
    return int(context.attempt)


def groups() -> int:
    """How many runs have left an effect."""
    return Group.objects.count()


class Behaviour(Kit):
    """What holds within the transaction of a TestCase and in autocommit."""

    def test_run_that_dies_after_its_function_runs_again(self) -> None:
        """What it had committed is there twice; the row stays as it was until the task is recovered."""
        result = tasks.run.enqueue(body(writes))
        with fail_at("run.function_returned"):
            assert run_tasks() == []
        record = row(result)
        assert (record.state, record.attempt, record.crash_count, record.errors) == (TaskState.QUEUED, 0, 0, [])
        assert groups() == 1
        (found,) = run_tasks()
        record = row(result)
        assert (found.id, found.return_value, groups()) == (result.id, 1, 2)
        assert (record.crash_count, record.is_suspect, len(record.worker_ids)) == (0, False, 2)
        assert record.errors[0]["exception"] == "django_asyncq.exceptions.WorkerLost"
        assert record.last_exception == "django_asyncq.exceptions.WorkerLost"

    def test_atomic_task_that_dies_has_no_effect(self) -> None:
        """Before the commit; after it the task has succeeded, and does not run again."""
        result = tasks.run_atomic.enqueue(body(writes))
        with fail_at("complete.row_written"):
            run_tasks()
        assert (row(result).state, groups()) == (TaskState.RUNNING, 0)
        run_tasks()
        assert (row(result).state, groups()) == (TaskState.SUCCEEDED, 1)
        result = tasks.run_atomic.enqueue("writes")
        with fail_at("complete.committed"):
            run_tasks()
        assert (row(result).state, groups()) == (TaskState.SUCCEEDED, 2)
        assert run_tasks() == []
        assert groups() == 2

    def test_complete_on_commit_that_dies(self) -> None:
        """Its block is rolled back, what the function wrote before it is not."""

        def completes(context: Any) -> None:
            Group.objects.create(name=f"before {Group.objects.count()}")
            with context.complete_on_commit("done"):
                Group.objects.create(name="within")

        result = tasks.run.enqueue(body(completes))
        with fail_at("complete.row_written"):
            run_tasks()
        assert list(Group.objects.values_list("name", flat=True)) == ["before 0"]
        run_tasks()
        assert row(result).return_value == "done"
        assert groups() == 3

    def test_recorded_outcome_is_kept(self) -> None:
        """The row says it: the task does not run again, and a retry waits for its time."""
        result = tasks.run.enqueue(body(writes))
        with fail_at("report.row_written"):
            assert run_tasks() == []
        assert row(result).state == TaskState.SUCCEEDED
        assert run_tasks() == []

        def fails(context: Any) -> None:
            raise ValueError

        result = tasks.run.enqueue(body(fails))
        with fail_at("report.row_written"):
            run_tasks()
        assert row(result).retry_at is not None
        assert run_tasks() == []
        run_tasks(until=timedelta(hours=1))
        assert (row(result).attempt, row(result).crash_count) == (3, 0)

    def test_task_that_has_not_begun_is_innocent(self) -> None:
        """It died at a retry: no crash is counted."""

        def fails_once(context: Any) -> None:
            if context.attempt == 1:
                raise ValueError

        for point in ("retry.slot_acquired", "retry.committed"):
            result = tasks.run.enqueue(body(fails_once))
            with fail_at(point):
                run_tasks(until=timedelta(hours=1))
            assert row(result).attempt == 1
            run_tasks(until=timedelta(hours=1))
            assert (row(result).state, row(result).crash_count) == (TaskState.SUCCEEDED, 0)

    def test_too_many_crashes_fail_the_task(self) -> None:
        """As many as MAX_CRASHES in a row, after a loss that is nobody's fault."""
        result = tasks.run.enqueue(body(writes))
        for _ in range(conf.current().max_crashes + 1):
            with fail_at("run.function_returned"):
                run_tasks()
        assert run_tasks() == []
        record = row(result)
        assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.WORKER_LOST)
        assert groups() == conf.current().max_crashes + 1

    def test_other_tasks_wait_for_the_next_process(self) -> None:
        """What ran before is done, what comes after is not begun; `nth` counts."""
        results = [tasks.add.enqueue(number) for number in range(3)]
        with fail_at("begin.counted", nth=2):
            assert [each.id for each in run_tasks()] == [results[0].id]
        assert [row(each).state for each in results] == [TaskState.SUCCEEDED, TaskState.QUEUED, TaskState.QUEUED]
        assert {each.id for each in run_tasks()} == {results[1].id, results[2].id}

    def test_death_that_the_function_swallows(self) -> None:
        """Code after it cannot make the run succeed."""

        def swallows(context: Any) -> str:
            if not TaskRecord.objects.filter(name="tests.kit_tasks.add").exists():
                try:
                    tasks.add.enqueue(1)
                except BaseException:  # noqa: BLE001 - as a project may
                    return "swallowed"
            return "second run"

        result = tasks.run.enqueue(body(swallows))
        with fail_at("enqueue.row_inserted"):
            run_tasks()
        assert row(result).state == TaskState.QUEUED
        assert row(result).return_value is None
        run_tasks()
        assert row(result).return_value == "second run"

    def test_coroutine_that_dies(self) -> None:
        """Its synchronous code runs in the thread of the test."""

        def enqueues_first(context: Any) -> None:
            writes(context)
            tasks.add.enqueue(1)

        result = tasks.arun.enqueue(body(enqueues_first))
        with fail_at("enqueue.row_inserted"):
            run_tasks()
        assert (row(result).state, groups()) == (TaskState.QUEUED, 1)
        run_tasks()
        assert (row(result).state, row(result).crash_count, groups()) == (TaskState.SUCCEEDED, 0, 2)

    def test_task_without_code_that_dies(self) -> None:
        """Its row says FAILED, and that is final."""
        result = tasks.add.enqueue(1)
        TaskRecord.objects.update(name="tests.missing.task")
        with fail_at("refuse.row_written"):
            run_tasks()
        assert run_tasks() == []
        assert (row(result).reason, row(result).crash_count) == (FailureReason.NOT_REGISTERED, 0)

    def test_enqueue_that_dies(self) -> None:
        """The caller gets the error; a transaction of its own is rolled back, what it has committed runs."""
        with fail_at("enqueue.row_inserted"), pytest.raises(ProcessDied) as caught, transaction.atomic():
            tasks.add.enqueue(1)
        assert caught.value.point == "enqueue.row_inserted"
        assert not TaskRecord.objects.exists()
        with fail_at("enqueue.committed"), pytest.raises(ProcessDied), self.committed():
            tasks.add.enqueue(2)
        assert [each.return_value for each in run_tasks()] == [2]

    def test_wrong_use(self) -> None:
        """A point that there is not, and one that the block does not reach."""
        with pytest.raises(ValueError, match="is not a failpoint"), fail_at("enqueue.comitted"):
            pass
        with pytest.raises(ValueError, match="n counts from 1"), fail_at("enqueue.committed", nth=0):
            pass
        with pytest.raises(AssertionError, match="reached this point 0 times"), fail_at("report.row_written"):
            run_tasks()
        tasks.add.enqueue(1)
        with pytest.raises(AssertionError, match="reached this point once"), fail_at("report.row_written", nth=2):
            run_tasks()
        with pytest.raises(ZeroDivisionError), fail_at("report.row_written"):
            raise ZeroDivisionError
        assert failpoints.arm(None) is None

    def test_nested_faults(self) -> None:
        """Each counts; the inner block's end leaves the outer one armed."""
        result = tasks.run.enqueue(body(writes))
        with fail_at("begin.counted", nth=2):
            with fail_at("run.function_returned"):
                run_tasks()
            run_tasks()
        run_tasks()
        assert (row(result).state, row(result).crash_count) == (TaskState.SUCCEEDED, 1)

    # --- Redis

    def test_redis_is_lost(self) -> None:
        """Plain tasks wait in their rows, gates refuse, nothing runs; afterwards everything does."""
        before = tasks.add.enqueue(1)
        gated = tasks.gated.enqueue()
        with lose_redis():
            within = tasks.add.enqueue(2)
            with pytest.raises(GateUnavailable, match="'kit' cannot be asked"):
                tasks.gated.enqueue()
            with pytest.raises(GateUnavailable):
                tasks.gated.enqueue_many([()], partial=True)
            assert run_tasks(until=timedelta(hours=1)) == []
        assert [each.id for each in run_tasks()] == [before.id, gated.id, within.id]
        tasks.gated.enqueue()

    @override_settings(TASKS=IMMEDIATE)
    def test_redis_is_lost_in_the_mode_immediate(self) -> None:
        """No worker gets the task, and the kit is none."""
        with lose_redis():
            result = tasks.add.enqueue(1)
        assert result.status == compat.TaskResultStatus.READY
        assert len(run_tasks()) == 1

    # --- leases

    def test_lease_is_lost(self) -> None:
        """The outcome of the first run is refused; the task runs again, and what it wrote is there twice."""
        result = tasks.run.enqueue(body(writes))
        with lose_lease(result):
            (found,) = run_tasks()
        record = row(result)
        assert (found.id, found.return_value, groups()) == (result.id, 1, 2)
        assert (record.attempt, record.crash_count, len(record.errors), record.fence) == (1, 0, 1, 3)
        assert "its lease expired" in record.errors[0]["message"]

    def test_lease_of_an_atomic_task_is_lost(self) -> None:
        """What the first run wrote is rolled back."""
        result = tasks.run_atomic.enqueue(body(writes))
        with lose_lease(result):
            run_tasks()
        assert (row(result).state, row(result).return_value, groups()) == (TaskState.SUCCEEDED, 1, 1)

    def test_lease_is_lost_in_complete_on_commit(self) -> None:
        """The function sees LeaseLost when it leaves the block."""
        seen: list[str] = []

        def completes(context: Any) -> None:
            try:
                with context.complete_on_commit():
                    writes(context)
                    seen.append("within")
            except BaseException as error:
                seen.append(type(error).__name__)
                raise

        result = tasks.run.enqueue(body(completes))
        with lose_lease(result):
            run_tasks()
        assert seen == ["within", "LeaseLost", "within"]
        assert (row(result).state, groups()) == (TaskState.SUCCEEDED, 1)

    def test_lease_that_is_not_lost(self) -> None:
        """The task has not run."""
        result = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
        with pytest.raises(AssertionError, match=f"did not run the task {result.id}"), lose_lease(result):
            run_tasks()


class InTestCase(Behaviour, TestCase):
    """Within the transaction of the test."""

    databases = "__all__"


class InTransactionTestCase(Behaviour, TransactionTestCase):
    """In autocommit, as a worker."""

    databases = "__all__"


POINTS: dict[str, Callable[[], Any]] = {
    "begin.counted": lambda: equality_tasks.retried.enqueue("writes"),
    "complete.row_written": lambda: equality_tasks.atomic.enqueue("writes"),
    "report.row_written": lambda: equality_tasks.retried.enqueue("writes"),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("point", POINTS)
def test_recovery_is_that_of_a_killed_worker(point: str, settings: Any, tmp_path: Path) -> None:
    """The same columns as when SIGKILL ends the worker process there, and the next one runs the task."""

    def left() -> dict[str, Any]:
        found = columns(TaskRecord.objects.get())
        errors = [(kind, message.partition("; it had used")[0], *rest) for kind, message, *rest in found["errors"]]
        effects = list(Group.objects.values_list("name", flat=True))
        TaskRecord.objects.all().delete()
        Group.objects.all().delete()
        return {**found, "errors": errors, "effects": effects}

    settings.TASKS = WORKERS
    POINTS[point]()
    mark = tmp_path / "died"
    crash = {key: value for key, value in crash_at(point, mark=mark).items() if os.environ.get(key) != value}
    run_workers("--concurrency", "1", **crash)
    assert mark.exists()
    expected = left()
    settings.TASKS = KIT
    POINTS[point]()
    with fail_at(point):
        run_tasks()
    run_tasks()
    assert left() == expected
