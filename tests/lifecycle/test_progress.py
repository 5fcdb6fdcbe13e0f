"""What a task reports of its progress: checked in the body, in Redis within a second, in the row, and in the result."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.broker.keys import keys_of
from django_asyncq.broker.task_entries import ProgressNotes
from django_asyncq.context import RowlessContext
from django_asyncq.core.payload import CLEARED, progress_value, shown_progress
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import make_context, run_tasks
from django_asyncq.worker import report as progress
from django_asyncq.worker.job import Job, JobPhase
from django_asyncq.worker.report import ProgressLook, ProgressWriter

from .. import observed_tasks as tasks
from ..workers import run_workers, wait_until, workers

WORKER = "here:1"
LARGE = {"rows": ["x" * 5_000]}
BAD = {
    "done above total": {"done": 11, "total": 10},
    "negative": {"done": -1},
    "negative total": {"done": 0, "total": -1},
    "not a number": {"done": "7"},
    "nan": {"done": float("nan")},
    "infinite total": {"done": 1, "total": float("inf")},
    "truth": {"done": True},
    "beyond 64 bits": {"done": 2**70},
    "message that is no text": {"done": 1, "message": 7},
    "message with NUL": {"done": 1, "message": "a\x00b"},
    "half a character": {"done": 1, "message": "\ud800"},
    "data that JSON cannot hold": {"done": 1, "found": {1, 2}},
    "too large": {"done": 1, **LARGE},
    "long message": {"done": 1, "message": "é" * 5_000},
}


def value(done: float, total: float | None = None, message: str = "", **data: Any) -> dict[str, Any]:
    """The progress as a result shows it."""
    return {"done": done, "total": total, "message": message, "data": data}


# --- the body


@pytest.mark.parametrize("name", BAD)
def test_bad_progress_is_refused_and_changes_nothing(name: str) -> None:
    """The error names what is wrong, and the value before stays."""
    context = make_context()
    context.progress(1, 2)
    with pytest.raises(InvalidOption, match="progress"):
        context.progress(**BAD[name])
    assert context.record.progress == value(1, 2)


def test_error_of_a_large_value_names_the_remedy() -> None:
    """The limit, and what to do instead."""
    with pytest.raises(InvalidOption, match=r"5,0\d\d bytes .*4,096.*report its key"):
        make_context().progress(1, **LARGE)


def test_context_of_a_test_records_progress() -> None:
    """So a test can call the body alone and look."""
    context = make_context()
    context.progress(0.5, 1.5, "half", files=["a"], nested={"deep": [1]})
    assert context.record.progress == value(0.5, 1.5, "half", files=["a"], nested={"deep": [1]})


def test_context_without_a_row_checks_only() -> None:
    """Django's immediate backend stores no rows."""
    context = RowlessContext(task_result=None)
    context.progress(1, 2)
    with pytest.raises(InvalidOption):
        context.progress(3, 2)


def test_what_is_no_progress_is_shown_as_none() -> None:
    """Rows and Redis may hold anything."""
    for odd in (None, [], "text", 7, {}, CLEARED, {"total": 3}):
        assert shown_progress(odd) is None
    assert shown_progress({"done": 1, "more": 2}) == value(1)


# --- the test kit


class InTheKit(TestCase):
    """Under `run_tasks` the newest value is in the row."""

    def test_newest_value_is_in_the_result(self) -> None:
        """And stays when the task has finished."""
        result = tasks.reports.enqueue([{"done": 1}, {"done": 2, "total": 3, "message": "two"}])
        self.assertIsNone(result.progress)
        self.run_kit()
        self.assertIsNone(result.progress)
        result.refresh()
        self.assertEqual(result.progress, value(2, 3, "two"))
        async_to_sync(result.arefresh)()
        self.assertEqual(result.progress, value(2, 3, "two"))

    def test_retry_begins_with_none(self) -> None:
        """What an earlier attempt has reported is gone, although the second one reports nothing."""
        result = tasks.reports.enqueue([{"done": 1}], fails=1)
        self.run_kit()
        result.refresh()
        self.assertEqual((result.status, result.attempts, result.return_value), ("SUCCESSFUL", 2, CLEARED))
        self.assertIsNone(result.progress)

    def test_task_that_failed_keeps_its_progress(self) -> None:
        """It says how far the last attempt came."""
        result = tasks.reports.using(max_attempts=1).enqueue([{"done": 1}, {"done": 2}], fails=1)
        self.run_kit()
        result.refresh()
        self.assertEqual((result.status, result.progress), ("FAILED", value(2)))

    def test_atomic_task_commits_its_progress(self) -> None:
        """With its effects."""
        result = tasks.reports_in_transaction.enqueue(4)
        self.run_kit()
        result.refresh()
        self.assertEqual(result.progress, value(4, 10, "in the transaction"))

    def run_kit(self) -> None:
        """Run what is due under the backend of tests."""
        with self.settings(TASKS={"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}):
            run_tasks()


# --- the worker


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file that lets the body go on; made at the end, whatever happens."""
    path = tmp_path / "go"
    yield path
    path.touch()


@pytest.mark.django_db(transaction=True)
def test_progress_of_a_running_task_is_in_row_and_result(go: Path, tmp_path: Path) -> None:
    """The first value comes to the row at the first look, and the outcome brings the last one."""
    result = tasks.areports.enqueue(str(go))
    with workers(tmp_path, "--concurrency", "2"):
        wait_until(lambda: TaskRecord.objects.get().progress, "progress in the row")
        result.refresh()
        assert (result.status, result.progress) == ("RUNNING", value(1, 2, "coroutine", step="one"))
        go.touch()
        wait_until(lambda: TaskRecord.objects.get().is_final, "outcome")
    result.refresh()
    assert (result.status, result.progress) == ("SUCCESSFUL", value(1, 2, "coroutine", step="one"))


@pytest.mark.django_db(transaction=True)
def test_progress_of_a_transaction_is_read_from_redis(go: Path, tmp_path: Path) -> None:
    """Nobody else writes its row while it runs; the entry in Redis shows it."""
    result = tasks.reports_in_transaction.enqueue(4, str(go))
    with workers(tmp_path, "--concurrency", "2"):

        def shown() -> Any:
            result.refresh()
            return result.progress

        wait_until(shown, "progress in Redis")
        assert TaskRecord.objects.get().progress is None
        go.touch()
        wait_until(lambda: TaskRecord.objects.get().is_final, "outcome")
    assert TaskRecord.objects.get().progress == value(4, 10, "in the transaction")


@pytest.mark.django_db(transaction=True)
def test_many_reports_of_a_short_run_are_one_write(redis_client: redis.Redis) -> None:
    """The last one is in the row with the outcome."""
    tasks.reports_often.enqueue(50_000)
    run_workers()
    record = TaskRecord.objects.get()
    assert record.state == TaskState.SUCCEEDED
    assert record.progress == value(49_999, 50_000, "row by row")


# --- the writer of a worker


def claimed(task: Any, *args: Any) -> Job:
    """Enqueue one call, and begin it."""
    task.enqueue(*args)
    return begun()


def begun() -> Job:
    """Claim the task that waits, begin it, and write RUNNING, as a worker does."""
    (run,) = lifecycle.claim(Broker("worker"), "default", WORKER, 1, "default").runs
    job = Job(run, registered(run.record.name), time.monotonic())
    job.phase, job.begun_at = JobPhase.RUNNING, time.monotonic()
    lifecycle.begin(run, WORKER, run.record.enqueued_at)
    assert lifecycle.mark_running([run]) == []
    return job


def report(job: Job, done: int) -> None:
    """Report progress as the body does."""
    job.run.record.progress = progress_value(done, None, "", {})


def write(job: Job, writer: ProgressWriter | None = None) -> None:
    """Write what is new, as the reporter does."""
    writer = writer or ProgressWriter(Broker("worker"), threading.Lock())
    writer.write([job], is_abandoned=lambda job: False)


def in_redis(job: Job) -> Any:
    """What the entry of the run's task holds, with the fence of the run."""
    fence = job.run.lease.fence
    found = ProgressNotes().read("default", job.run.lease.id, fence, largest_bytes=10_000)
    return None if found is None else json.loads(found)


def in_row() -> Any:
    """What the only row holds."""
    return TaskRecord.objects.get().progress


@pytest.mark.django_db(transaction=True)
def test_plain_batch_names_no_progress() -> None:
    """The statement that writes plain outcomes has no column for it."""
    job = claimed(tasks.reports, [])
    lifecycle.succeed(job.run, None, job.run.record.enqueued_at)
    with CaptureQueriesContext(connection) as found:
        assert lifecycle.record_runs([job.run]) == []
    assert "return_value" in found[0]["sql"]
    assert not [query for query in found if "progress" in query["sql"]]


@pytest.mark.django_db(transaction=True)
def test_redis_gets_each_look_and_the_row_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first value is written to both."""
    job, now = claimed(tasks.reports, []), time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    look = ProgressLook()
    assert look.new([job], now) == []
    report(job, 1)
    assert look.new([job], now + 0.9) == []
    assert look.new([job], now + 1) == [job]
    write(job)
    assert (in_redis(job), in_row()) == (value(1), value(1))
    assert look.new([job], now + 3) == []
    report(job, 2)
    assert look.new([job], now + 4) == [job]
    now += 4
    write(job)
    assert (in_redis(job), in_row()) == (value(2), value(1))
    # Nothing new is reported, and the row follows all the same.
    assert look.new([job], now + 1.5) == [job]
    now += 1.5
    write(job)
    assert in_row() == value(2)
    assert look.new([job], now + 60) == []


@pytest.mark.django_db(transaction=True)
def test_newer_value_of_redis_is_shown_while_it_runs() -> None:
    """That of another fence, or odd bytes, never is."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    write(job)
    report(job, 2)
    write(job)
    result = tasks.reports.get_result(job.run.lease.id)
    assert (in_row(), result.progress) == (value(1), value(2))
    key = keys_of("default").task(job.run.lease.id)
    client = Broker("worker").client
    for odd in (b"", b"nonsense", b"0 {}", f"{job.run.lease.fence + 1} {json.dumps(value(9))}".encode(), b"\xff" * 9):
        client.hset(key, "progress", odd)
        result.refresh()
        assert result.progress == value(1)
    client.hset(key, "progress", f"{job.run.lease.fence} [1, 2".encode())
    result.refresh()
    assert result.progress == value(1)
    client.delete(key)
    result.refresh()
    assert result.progress == value(1)


@pytest.mark.django_db(transaction=True)
def test_run_that_lost_its_task_writes_no_progress() -> None:
    """Neither to the entry that another run holds, nor to the row."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    lifecycle.recover(Broker("worker"), "default", WORKER, [job.run.lease], reason="test", blame=lifecycle.Blame())
    again = begun()
    report(again, 7)
    write(again)
    write(job)
    assert (in_redis(again), in_redis(job), in_row()) == (value(7), None, value(7))
    lifecycle.succeed(job.run, None, job.run.record.enqueued_at)
    assert lifecycle.record_runs([job.run]) == [job.run]
    assert in_row() == value(7)


@pytest.mark.django_db(transaction=True)
def test_task_without_an_entry_gets_no_hash(redis_client: redis.Redis) -> None:
    """After FLUSHALL a hash with nothing but progress would block the id."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    key = keys_of("default").task(job.run.lease.id)
    redis_client.delete(key)
    write(job)
    assert not redis_client.exists(key)
    assert in_row() == value(1)


@pytest.mark.django_db(transaction=True)
def test_unreachable_redis_leaves_the_row(settings: Any) -> None:
    """The writer goes on, and asks Redis again later; a reader gets the value of the row."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    caches = settings.CACHES
    settings.CACHES = {"default": {**caches["default"], "LOCATION": "redis://127.0.0.1:1/0"}}
    writer = ProgressWriter(Broker("worker"), threading.Lock())
    write(job, writer)
    assert in_row() == value(1)
    assert tasks.reports.get_result(job.run.lease.id).progress == value(1)
    settings.CACHES = caches
    write(job, writer)
    assert in_redis(job) is None
    writer._redis_from = 0.0
    write(job, writer)
    assert in_redis(job) == value(1)


@pytest.mark.django_db(transaction=True)
def test_row_is_left_to_a_slot_that_writes_it() -> None:
    """An UPDATE beside its transaction would wait for it, or make it fail."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    job.phase = JobPhase.COMPLETING
    write(job)
    assert (in_redis(job), in_row()) == (value(1), None)
    job.phase = JobPhase.REPORTED
    report(job, 2)
    write(job)
    assert (in_redis(job), in_row()) == (value(1), None)


@pytest.mark.django_db(transaction=True)
def test_attempt_that_is_retried_leaves_its_progress_in_the_row() -> None:
    """Until the next attempt begins."""
    job = claimed(tasks.reports, [])
    report(job, 1)
    now = job.run.record.enqueued_at
    lifecycle.fail(job.run, OSError("no"), "", now, retry_at=now)
    assert lifecycle.record_runs([job.run]) == []
    record = TaskRecord.objects.get()
    assert (record.state, record.progress) == (TaskState.FAILED, value(1))
    lifecycle.begin(lifecycle.Run(record, Lease(str(record.id), record.fence + 1)), WORKER, now)
    assert record.progress == CLEARED
