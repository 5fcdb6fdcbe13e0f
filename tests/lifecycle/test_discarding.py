"""A task that discards itself has not failed: no retry, no error, no number of failures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.test import TestCase
from django.utils import timezone

from django_asyncq import Discard, TaskFailed
from django_asyncq.broker import Broker
from django_asyncq.core import compat
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.signals import run_ended, task_failed
from django_asyncq.testing import run_tasks

from .. import discard_tasks as tasks
from .. import kit_tasks
from ..admin_cases import LIST, client_with, error, make
from ..workers import run_workers

SINGLE = [tasks.plain, tasks.in_the_loop, tasks.atomic, tasks.isolated, tasks.in_a_block]
HOWS = ["discard", "missing"]


def assert_discarded(record: TaskRecord, how: str) -> None:
    """The row says so, at the first attempt."""
    assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.DISCARDED)
    assert (record.attempt, record.retry_at, record.is_final) == (1, None, True)
    (found,) = record.errors
    assert found["exception"] == record.last_exception == "django_asyncq.exceptions.Discard"
    expected = {"discard": tasks.TEXT, "gone": "Gone: gone"}.get(how, "Group.DoesNotExist: Group matching query")
    assert found["message"].startswith(expected)


@pytest.mark.django_db(transaction=True)
def test_discard_in_a_worker(redis_client: Any) -> None:
    """Of every kind: one INFO line without a traceback, no signal of a failure, and a success for Redis."""
    found = [(how, task.enqueue(how)) for task in SINGLE for how in HOWS]
    log = run_workers("--processes", "1", "--verbosity", "2", ASYNCQ_TEST_DISCARDS="1").stderr
    for how, result in found:
        record = TaskRecord.objects.get(id=result.id)
        assert_discarded(record, how)
        result.refresh()
        assert result.status == compat.TaskResultStatus.FAILED
        assert f"task {record.id} {record.name}: discarded: {record.errors[0]['message']}" in log
    assert "Traceback" not in log
    assert "task_failed" not in log
    # Of `plain`, `in_the_loop` and `isolated`: what was not in the transaction stays.
    assert Group.objects.count() == 6
    minutes = Inspector().queues.minutes("default")
    assert (sum(m.processed or 0 for m in minutes), sum(m.failed or 0 for m in minutes)) == (len(found), 0)
    assert Inspector().queues.get("default").archived == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("how", ["some", "all"])
def test_discard_in_a_batch(how: str) -> None:
    """One call of it, or all; the others are judged by themselves."""
    words = ["discard", "fine", "gone"] if how == "some" else ["all", "fine", "gone"]
    results = dict(zip(words, tasks.batched.enqueue_many([(word,) for word in words]), strict=True))
    log = run_workers("--processes", "1", "--verbosity", "2", ASYNCQ_TEST_DISCARDS="1").stderr
    assert ("Traceback" in log, "task_failed" in log) == (False, False)
    records = {word: TaskRecord.objects.get(id=result.id) for word, result in results.items()}
    for word, record in records.items():
        if how == "some" and word == "fine":
            assert record.state == TaskState.SUCCEEDED
        else:
            assert_discarded(record, "discard" if how == "all" else word)


@pytest.mark.django_db
def test_discarded_task_is_kept_as_long_as_a_success(settings: Any) -> None:
    """The pruner takes the time of successes for it, whatever the time of failures is."""
    settings.ASYNCQ = {**settings.ASYNCQ, "SUCCEEDED_RETENTION_SECONDS": 3600, "FAILED_RETENTION_SECONDS": None}
    then = timezone.now() - timedelta(hours=2)
    for reason in (FailureReason.DISCARDED, FailureReason.EXCEPTION):
        TaskRecord.objects.create(name="a.b", state=TaskState.FAILED, reason=reason, finished_at=then)
    TaskRecord.objects.update(enqueued_at=then)
    assert sum(Pruner(Broker("worker")).prune_matching(condition())) == 1
    assert TaskRecord.objects.get().reason == FailureReason.EXCEPTION


def condition() -> Any:
    """That of the pruner."""
    from django_asyncq.core.policies import current_rules
    from django_asyncq.fleet.pruner import retention_is_over

    return retention_is_over(current_rules({}), timezone.now())


@pytest.mark.django_db
def test_admin_shows_the_word_and_the_text() -> None:
    """In the list and on the page of the task; not among the failures."""
    kind = "django_asyncq.exceptions.Discard"
    record = make(reason=FailureReason.DISCARDED, errors=[error(tasks.TEXT, exception=kind)], last_exception=kind)
    client = client_with("view_taskrecord")
    for url in (LIST, f"{LIST}{record.pk}/change/"):
        text = client.get(url).content.decode()
        assert "discarded" in text
        assert tasks.TEXT in text
    assert tasks.TEXT not in client.get(f"{LIST}failures/").content.decode()
    assert "Discard" not in client.get(f"{LIST}failures/").content.decode()


class InTheTestKit(TestCase):
    """`run_tasks` does what a worker does."""

    @pytest.fixture(autouse=True)
    def _prepared(self, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
        settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
        self.caplog = caplog

    def test_discard(self) -> None:
        """It is no failure that `raise_failures` raises; an atomic task's effects are rolled back."""
        heard: list[Any] = []
        ended: list[Any] = []

        def on_failure(**kwargs: Any) -> None:
            heard.append(kwargs)

        def on_end(exception: Any, **kwargs: Any) -> None:
            ended.append(type(exception))

        task_failed.connect(on_failure)
        run_ended.connect(on_end)
        self.addCleanup(task_failed.disconnect, on_failure)
        self.addCleanup(run_ended.disconnect, on_end)
        for task in (tasks.plain, tasks.in_the_loop, tasks.atomic, tasks.in_a_block):
            for how in HOWS:
                Group.objects.all().delete()
                result = task.enqueue(how)
                with self.caplog.at_level("INFO", logger="django_asyncq.runs"):
                    run_tasks(raise_failures=True)
                assert_discarded(TaskRecord.objects.get(id=result.id), how)
                assert Group.objects.count() == (0 if task in (tasks.atomic, tasks.in_a_block) else 1)
        assert heard == []
        assert set(ended) == {Discard}
        lines = [line for line in self.caplog.records if line.name == "django_asyncq.runs"]
        assert {(line.levelname, line.exc_info) for line in lines} == {("INFO", None)}

    def test_others_fail_as_before(self) -> None:
        """An exception that `on_missing` does not name."""
        result = tasks.plain.using(max_attempts=1).enqueue("failure")
        run_tasks()
        assert TaskRecord.objects.get(id=result.id).reason == FailureReason.EXCEPTION

    def test_who_waits_is_told(self) -> None:
        """With the reason and the text."""
        result = tasks.plain.enqueue("discard")
        with pytest.raises(TaskFailed, match=f"discarded.*{tasks.TEXT}") as caught:
            result.wait(1)
        assert caught.value.reason == FailureReason.DISCARDED

    def test_cancelled_task_that_discards_itself_is_cancelled(self) -> None:
        """A person's wish counts more."""
        kit_tasks.BODIES["cancelled"] = self._cancel_and_discard
        self.result = kit_tasks.run.enqueue("cancelled")
        run_tasks()
        assert TaskRecord.objects.get(id=self.result.id).reason == FailureReason.CANCELLED

    def _cancel_and_discard(self, *args: Any) -> None:
        self.result.cancel()
        raise Discard("too late")
