"""The test kit keeps rates by the clock of the test, without Redis."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import TestCase

from django_asyncq.models import Rate, TaskState
from django_asyncq.testing import run_tasks, travel

from ..rate_tasks import call_api, hourly, hourly_async, hourly_batch, hourly_isolated, rows


@pytest.fixture(autouse=True)
def kit(settings: Any) -> None:
    """The backend of tests."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


@pytest.mark.django_db
class TestKit:
    """In the transaction of a test case."""

    def test_what_must_wait_stays_queued_without_an_attempt(self) -> None:
        """Two at once, and then one for each hour that the clock of the test moves on."""
        for _ in range(4):
            hourly.enqueue()
        assert len(run_tasks()) == 2
        assert rows().filter(state=TaskState.QUEUED, attempt=0).count() == 2
        assert run_tasks() == []
        with travel(minutes=59):
            assert run_tasks() == []
        with travel(hours=1) as clock:
            assert len(run_tasks()) == 1
            clock.move(hours=1)
            assert len(run_tasks()) == 1

    def test_the_clock_is_moved_to_each_next_start(self) -> None:
        """With `until`, and back again."""
        for _ in range(5):
            hourly.enqueue()
        assert len(run_tasks(until=timedelta(hours=2, minutes=30))) == 4
        assert rows().filter(state=TaskState.QUEUED).count() == 1

    def test_tasks_of_all_kinds_share_a_rate_and_a_batch_is_one_start(self) -> None:
        """A coroutine, an isolated one, and a batch of three calls."""
        hourly_async.enqueue()
        for _ in range(3):
            hourly_batch.enqueue()
        run_tasks()
        hourly_isolated.enqueue()
        assert run_tasks() == []
        with travel(hours=1):
            assert len(run_tasks()) == 1

    def test_a_retry_takes_a_start(self) -> None:
        """The second attempt is the second start; the next task waits."""
        result = hourly.enqueue(fails=True)
        run_tasks(until=timedelta(seconds=5))
        result.refresh()
        assert result.attempts == 2
        hourly.enqueue()
        assert run_tasks() == []

    def test_each_name_has_its_own_and_a_row_overrides_the_declaration(self) -> None:
        """As in a worker."""
        for api in "aaabbb":
            call_api.enqueue(api)
        assert len(run_tasks()) == 4
        Rate.objects.create(name="api-a", starts=100, seconds=1, burst=100)
        assert len(run_tasks()) == 1
        assert rows().get(state=TaskState.QUEUED).args == ["b"]

    def test_one_that_waits_does_not_hold_up_others(self) -> None:
        """The line of one rate is no other's."""
        for _ in range(3):
            hourly.enqueue()
        call_api.enqueue("a")
        assert len(run_tasks()) == 3


class InUnittest(TestCase):
    """A project's own test case."""

    def test_it_works_there_too(self) -> None:
        """Nothing of another test counts."""
        hourly.enqueue()
        hourly.enqueue()
        self.assertEqual(len(run_tasks()), 2)
