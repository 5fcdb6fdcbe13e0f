"""`make_context` and `run_schedules` of the test kit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from django.utils import timezone

from django_asyncq import TaskCancelled, every
from django_asyncq.core.schedules import Declaration
from django_asyncq.exceptions import InvalidOption, RetryRequested, SoftTimeout, TaskTimeout
from django_asyncq.models import Occurrence, Schedule
from django_asyncq.scheduling import scheduler
from django_asyncq.testing import make_context, run_schedules, run_tasks, running, travel

from .. import kit_tasks as tasks


class WithoutDatabase(SimpleTestCase):
    """A body is called as a plain function."""

    def test_context_is_as_in_a_worker(self) -> None:
        """Attempt, flag and result are those that were asked for."""
        context = make_context(tasks.run, attempt=3, args=["x"], should_stop=True)
        assert (context.attempt, context.should_stop, context.task_result.attempts) == (3, True, 3)
        assert (context.task_result.task, context.task_result.args) == (tasks.run, ["x"])
        assert not make_context().should_stop
        context.check()
        make_context().check()
        cancelled = make_context(cancelled=True)
        assert cancelled.should_stop
        with pytest.raises(TaskCancelled):
            cancelled.check()
        tasks.BODIES["given"] = lambda context, *args: (context.attempt, *args)
        assert tasks.run.func(make_context(attempt=2), "given", 7) == (2, 7)

    def test_stops_are_those_of_a_worker(self) -> None:
        """A shutdown lets the body finish, a cancel does not; the task's own times count from the call."""
        make_context(should_stop=True).check()
        context = make_context(tasks.run.using(timeout=60, soft_timeout=10))
        assert context.deadline is not None
        with travel(seconds=11):
            assert context.should_stop
            with pytest.raises(SoftTimeout):
                context.check()
            context.check()
        with travel(seconds=61), pytest.raises(TaskTimeout):
            context.check()
        assert not context.should_stop
        assert make_context(tasks.run).deadline is None

    def test_retry_raises_what_it_raises_in_a_worker(self) -> None:
        """So a test can look at the time and whether it counts."""
        with pytest.raises(RetryRequested) as caught:
            make_context().retry(in_=timedelta(minutes=1), counted=False)
        assert (caught.value.delay_seconds, caught.value.counted) == (60, False)

    def test_wrong_attempts_are_refused(self) -> None:
        """They count from 1, and no more than there are."""
        for options in ({"attempt": 0}, {"attempt": True}, {"attempt": 3, "max_attempts": 2}):
            with pytest.raises(InvalidOption, match="make_context"):
                make_context(**options)  # type: ignore[arg-type]


class WithDatabase(TestCase):
    """`complete_on_commit` of a body that is called alone."""

    def test_complete_on_commit_is_a_transaction(self) -> None:
        """What the block writes is kept, or rolled back with its error; one success is all there is."""
        context = make_context()
        with pytest.raises(ZeroDivisionError), context.complete_on_commit():
            Group.objects.create(name="no")
            raise ZeroDivisionError
        with context.complete_on_commit("value") as ending:
            Group.objects.create(name="yes")
        assert ending.result == "value"
        assert list(Group.objects.values_list("name", flat=True)) == ["yes"]
        with pytest.raises(InvalidOption, match="before"), context.complete_on_commit():
            pass


class Schedules:
    """What holds within the transaction of a test and in autocommit."""

    @pytest.fixture(autouse=True)
    def _declared(self, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """One schedule in code; a Redis that does not answer."""
        settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
        settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1"}}
        declaration: Declaration = every(hours=1, name="hourly", args=(1,))
        for module in (scheduler, running):
            monkeypatch.setattr(module, "declared_schedules", lambda: [("hourly", (tasks.add, declaration))])
        yield

    def test_each_occurrence_fires_at_its_time(self) -> None:
        """None is missed, however far the clock was moved."""
        with travel() as clock:
            assert run_schedules() == []
            clock.move(hours=2, minutes=59)
            results = run_schedules()
            assert len(results) == Occurrence.objects.count()
            assert 2 <= len(results) <= 3
            assert run_schedules() == []
            assert [each.return_value for each in run_tasks()] == [1] * len(results)

    def test_who_waits_for_a_schedule_in_run_tasks_is_told_what_fires_it(self) -> None:
        """Only where no task was enqueued; without `until` nothing is waited for."""
        with pytest.warns(UserWarning, match=r"schedules \['hourly'\] call run_schedules\(\)"):
            assert run_tasks(until=timedelta(days=1)) == []
        assert run_tasks() == []
        tasks.add.enqueue(1)
        assert len(run_tasks(until=timedelta(days=1))) == 1

    def test_the_clock_takes_a_timedelta(self) -> None:
        """In place of the units, or added to them; what is neither is refused with what to give."""
        start = timezone.now()
        with travel(timedelta(days=1)) as clock:
            clock.move(timedelta(hours=-2), hours=1)
            assert timedelta(hours=23) <= clock.now() - start < timedelta(hours=24)
        for wrong in (5, timezone.now()):
            with pytest.raises(InvalidOption, match=r"give a timedelta, or days="), travel(wrong):  # type: ignore[arg-type]
                pass

    def test_too_many_are_refused(self) -> None:
        """The error has the remedy."""
        with travel() as clock:
            run_schedules()
            clock.move(hours=5)
            with pytest.raises(InvalidOption, match="move the clock by less"):
                run_schedules(most=2)
        assert Schedule.objects.filter(name="hourly").exists()


class SchedulesInTestCase(Schedules, TestCase):
    """Within the transaction of the test."""


class SchedulesInTransactionTestCase(Schedules, TransactionTestCase):
    """In autocommit."""
