"""`run_tasks` and the mode "immediate" run tasks that wait for others, as workers do, without Redis."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.test import TestCase, override_settings

from django_asyncq import chain, group, previous
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.testing import (
    ProcessDied,
    assert_enqueued,
    assert_enqueues,
    assert_not_enqueued,
    fail_at,
    run_tasks,
)

from .. import workflow_tasks as tasks


def on(mode: str = "store") -> Any:
    options = {"OPTIONS": {"mode": mode}} if mode == "immediate" else {}
    backend = {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": [], **options}
    return override_settings(TASKS={"default": backend})


def row_of(result: Any) -> TaskRecord:
    return TaskRecord.objects.get(id=result.id)


@on()
class RunTasksTests(TestCase):
    """In the transaction of a TestCase."""

    def test_a_workflow_runs_in_its_order(self) -> None:
        """Each step after those before it, with their values."""
        steps = [
            chain(tasks.load.step(number), tasks.double.using(after={"value": previous}).step()) for number in (1, 2)
        ]
        result = group(steps, then=tasks.total.using(after={"rows": previous}).step()).enqueue()
        assert_enqueued(tasks.total, rows=[])
        names = [each.task.name for each in run_tasks()]
        assert sorted(names[:4]) == ["double", "double", "load", "load"]
        assert names[4:] == ["total"]
        assert row_of(result).return_value == 6

    def test_an_assertion_asks_what_a_call_waits_for(self) -> None:
        """All of it and nothing else; with names, which parameter gets which values."""
        one, two = tasks.load.enqueue(1), tasks.load.enqueue(2)
        joined = tasks.total.using(after={"rows": [one, two]}).enqueue()
        assert_enqueued(tasks.total, after=[two, one])
        assert_enqueued(tasks.total, after={"rows": [one, two]})
        assert_enqueued(tasks.load, count=2, after=[])
        with assert_enqueues(tasks.note, after=[joined]):
            tasks.note.using(after=[joined]).enqueue()
        for wrong in ([], [one], [one, two, joined], {"rows": [two, one]}, {"rows": one}):
            assert_not_enqueued(tasks.total, after=wrong)
        with pytest.raises(AssertionError, match=rf"total\(…\) with after=\['{one.id}'\] was enqueued 0 times"):
            assert_enqueued(tasks.total, after=[one])
        with pytest.raises(InvalidOption, match="which is no result"):
            assert_enqueued(tasks.total, after=[one.id])
        run_tasks()
        assert_enqueued(tasks.total, after=[one, two])

    def test_a_failure_is_that_of_those_behind(self) -> None:
        """A retry of the first brings them back."""
        result = chain(tasks.load.step(-1), tasks.note.step(), tasks.note.step()).enqueue()
        run_tasks()
        assert row_of(result).reason == FailureReason.PARENT_FAILED
        first = TaskRecord.objects.get(name="tests.workflow_tasks.load")
        TaskRecord.objects.filter(id=first.id).update(args=[1])
        from django_asyncq import lifecycle

        lifecycle.retry([first.id], by_person=True)
        assert len(run_tasks()) == 3
        assert row_of(result).state == TaskState.SUCCEEDED

    def test_a_delay_counts_from_the_end_of_the_task_before(self) -> None:
        """The clock of the test is moved on for it."""
        hour = timedelta(hours=1)
        result = chain(tasks.load.using(run_after=hour).step(1), tasks.note.using(run_after=hour).step()).enqueue()
        assert run_tasks() == []
        assert len(run_tasks(until=timedelta(minutes=90))) == 1
        assert row_of(result).state == TaskState.QUEUED
        assert len(run_tasks(until=timedelta(hours=3))) == 1

    def test_a_gate_lets_steps_run_one_after_the_other(self) -> None:
        """They ask when they are ready."""
        group([chain(tasks.load.step(number), tasks.gated.step(number)) for number in range(3)]).enqueue()
        assert len(run_tasks()) == 6

    def test_a_step_may_need_slots_of_several_gates(self) -> None:
        """It asks all of them when it is ready, and waits at the one that is full."""
        for name, limit in (("wide", 5), ("tight", 1)):
            Gate.objects.create(name=name, limit=limit)
        step = tasks.note.using(gate=("wide", "tight")).step
        group([chain(tasks.load.step(number), step()) for number in range(3)]).enqueue()
        assert len(run_tasks()) == 6

    def test_tasks_that_a_body_enqueues_behind_others_run_too(self) -> None:
        """With an atomic body, and behind the running task itself."""
        tasks.grows.enqueue(3)
        tasks.grows_atomically.enqueue()
        assert len(run_tasks()) == 5 + 4
        assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()

    def test_nothing_is_left_of_what_a_failed_atomic_body_enqueued(self) -> None:
        """Its children are part of its transaction."""
        tasks.grows_atomically.enqueue(fails=True)
        run_tasks()
        assert TaskRecord.objects.count() == 1

    def test_calls_that_run_together_wait_each_for_its_own(self) -> None:
        """They join their group when they are ready; what waits for one of them gets its value."""
        steps = [
            chain(
                tasks.load.step(number),
                tasks.stored.using(after={"row": previous}).step(),
                tasks.double.using(after={"value": previous}).step(),
            )
            for number in (4, 5)
        ]
        results = group(steps).enqueue()
        run_tasks()
        assert [row_of(each).return_value for each in results] == [8, 10]
        assert TaskRecord.objects.get(batch_size=2).state == TaskState.SUCCEEDED

    def test_a_call_that_fails_in_its_batch_fails_those_behind(self) -> None:
        """Only those behind that call."""
        failing = chain(tasks.load.step(1), tasks.choosy.using(after={"row": previous}).step(), tasks.note.step())
        fine = chain(tasks.load.step(2), tasks.choosy.using(after={"row": previous}).step(), tasks.note.step())
        results = group([failing, fine]).enqueue()
        run_tasks()
        assert [row_of(each).state for each in results] == [TaskState.FAILED, TaskState.SUCCEEDED]

    def test_an_async_task_gets_a_value(self) -> None:
        """It is read before the body is called."""
        result = chain(tasks.load.step(1), tasks.awaited.using(after={"value": previous}).step()).enqueue()
        run_tasks()
        assert row_of(result).return_value == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "point",
    ["after.rows_inserted", "enqueue.committed", "settle.rows_counted", "settle.committed", "report.row_written"],
)
def test_a_workflow_goes_on_after_a_death(point: str) -> None:
    """Whatever was not committed is done again."""
    with on():
        with fail_at(point), suppress(ProcessDied):
            chain(tasks.load.step(1), tasks.note.step("end")).enqueue()
            run_tasks()
        run_tasks()
        states = set(TaskRecord.objects.values_list("state", flat=True))
        assert states in ({TaskState.SUCCEEDED}, set())
        assert bool(states) is (point != "after.rows_inserted")


@pytest.mark.django_db(transaction=True)
def test_immediate_runs_a_workflow_at_the_enqueue() -> None:
    """All of it, also what its bodies enqueue; a result that has finished is a parent too."""
    with on("immediate"):
        parent = tasks.load.enqueue(4)
        child = tasks.double.using(after={"value": parent}).enqueue()
        assert row_of(child).return_value == 8
        result = chain(tasks.load.step(3), tasks.double.using(after={"value": previous}).step()).enqueue()
        assert row_of(result).return_value == 6
        tasks.grows_atomically.enqueue()
    assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()
