"""A task goes on where it stopped: after a retry, a requeue, a lost worker and an emptied Redis."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Group
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import call_command
from django.db import transaction
from django.test import TestCase
from django.urls import reverse
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.context import RowlessContext
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import InvalidOption, LeaseLost
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import make_context, run_tasks
from django_asyncq.worker.checkpoints import keep
from django_asyncq.worker.job import Job, JobPhase

from .. import checkpoint_tasks as tasks
from ..workers import Workers, run_workers, wait_until, workers

WORKER = "here:1"
IN_THE_KIT = {"TASKS": {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}}
BAD = {
    "what JSON cannot hold": {1, 2},
    "a date": timezone.now(),
    "nan": float("nan"),
    "beyond 64 bits": 2**70,
    "NUL": "a\x00b",
    "half a character": "\ud800",
    "a key that is no text": {1: 2},
    "too deep": [[[[[[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]]]]],
    "too large": ["x" * 4_100],
    "too large in UTF-8": "é" * 2_100,
}


def row() -> TaskRecord:
    """The only row."""
    return TaskRecord.objects.get()


# --- the body


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoint_is_refused_before_anything_is_written(name: str) -> None:
    """The error names what is wrong, and the checkpoint before stays."""
    written: list[Any] = []
    context = replace(make_context(checkpointed={"step": 1}), keep=written.append)
    with pytest.raises(InvalidOption, match="checkpoint"):
        context.checkpoint(BAD[name])
    assert (written, context.checkpointed) == ([], {"step": 1})


def test_error_of_a_large_checkpoint_names_the_remedy() -> None:
    """The limit, and what to do instead; what just fits is taken."""
    with pytest.raises(InvalidOption, match=r"4,1\d\d bytes .*4,096.*store the data in a table"):
        make_context().checkpoint("x" * 4_100)
    context = make_context()
    context.checkpoint("x" * 4_094)
    assert context.checkpointed == "x" * 4_094


def test_context_of_a_test_has_checkpoints() -> None:
    """None at first, or what the test says; nobody's later change of a value changes it."""
    assert make_context().checkpointed is None
    context, value = make_context(checkpointed={"row": 40}), {"rows": [1]}
    assert context.checkpointed == {"row": 40}
    context.checkpoint(value)
    value["rows"].append(2)
    context.checkpointed["rows"].append(3)
    assert context.checkpointed == {"rows": [1]}
    with pytest.raises(InvalidOption, match="checkpoint"):
        make_context(checkpointed={1, 2})


def test_context_without_a_row_checks_only() -> None:
    """Django's immediate backend stores no rows."""
    context = RowlessContext(task_result=None)
    context.checkpoint(1)
    assert context.checkpointed is None
    with pytest.raises(InvalidOption):
        context.checkpoint({1})


# --- the test kit


class InTheKit(TestCase):
    """Under `run_tasks`, which does what a worker does."""

    def test_a_retry_goes_on(self) -> None:
        """And the success clears the checkpoint."""
        self.assertEqual(self.ran("fails once"), ("SUCCESSFUL", {"step": 1}, None))

    def test_a_task_that_failed_keeps_it_for_the_person_who_retries_it(self) -> None:
        """All attempts are used up; the row still says where to go on."""
        self.assertEqual(self.ran("fails"), ("FAILED", None, {"step": 1}))

    def test_a_rollback_leaves_the_one_before(self) -> None:
        """That of the body's own transaction, and of its completion."""
        self.assertEqual(self.ran("rolled back"), ("SUCCESSFUL", {"step": 1}, None))
        self.assertEqual(self.ran("rolled back with its completion"), ("SUCCESSFUL", {"step": 1}, None))

    def test_a_body_goes_on_after_its_completion_was_rolled_back(self) -> None:
        """What it then keeps is kept."""
        found = self.ran("goes on after a completion that was rolled back")
        self.assertEqual(found, ("SUCCESSFUL", {"step": 3}, None))

    def test_a_completion_clears_it(self) -> None:
        """Neither what is kept in the block nor what is kept after it remains."""
        self.assertEqual(self.ran("completed"), ("SUCCESSFUL", None, None))

    def test_none_forgets_it_and_zero_does_not(self) -> None:
        """As zero says that nothing is done yet."""
        self.assertEqual(self.ran("forgotten"), ("SUCCESSFUL", None, None))
        self.assertEqual(self.ran("falsy"), ("SUCCESSFUL", 0, None))

    def test_an_atomic_task_keeps_none(self) -> None:
        """It is part of the transaction that is rolled back."""
        result = tasks.keeps_in_transaction.enqueue()
        self.assertEqual(self.outcome(result), ("SUCCESSFUL", None, None))

    def test_a_coroutine_awaits(self) -> None:
        """What it awaits is stored."""
        with self.settings(**IN_THE_KIT):
            path = Path(self.enterContext(TemporaryDirectory())) / "steps"
            result = tasks.aimports.enqueue(str(path), 4, 2)
            run_tasks()
        self.assertEqual(path.read_text().split(), ["1", "2", "3", "4"])
        result.refresh()
        self.assertEqual((result.status, result.return_value), ("SUCCESSFUL", 0))

    def test_a_coroutine_that_does_not_await_learns_what_to_write(self) -> None:
        """And nothing is written."""
        result = tasks.keeps_in_the_event_loop.enqueue()
        self.assertEqual(self.outcome(result), ("FAILED", None, None))
        result.refresh()
        (error,) = result.errors
        self.assertIs(error.exception_class, SynchronousOnlyOperation)
        self.assertIn("await context.acheckpoint", error.traceback)

    def ran(self, how: str) -> tuple[Any, Any, Any]:
        """Run `keeps`; return its status, what its last run began with, and the checkpoint in the row."""
        return self.outcome(tasks.keeps.enqueue(how))

    def outcome(self, result: Any) -> tuple[Any, Any, Any]:
        """Run what is due; return the status of a task, what its last run began with, and the checkpoint in the row."""
        with self.settings(**IN_THE_KIT):
            run_tasks()
        result.refresh()
        is_over = result.status == "SUCCESSFUL"
        value = result.return_value if is_over else None
        return str(result.status), value, TaskRecord.objects.get(id=result.id).checkpoint


# --- what becomes of a checkpoint, row by row


def begun(*, marked: bool = True) -> Job:
    """Claim the task that waits, and begin it, as a worker does."""
    (run,) = lifecycle.claim(Broker("worker"), "default", WORKER, 1, "default").runs
    job = Job(run, registered(run.record.name), 0.0)
    job.note_begin(run.record.enqueued_at)
    job.phase = JobPhase.RUNNING
    lifecycle.begin(run, WORKER, run.record.enqueued_at)
    if marked:
        mark(job)
    return job


def mark(job: Job) -> None:
    """Write RUNNING."""
    assert lifecycle.mark_running([job.run]) == []


@pytest.fixture
def job() -> Job:
    """A run that has begun."""
    tasks.keeps.enqueue("plainly")
    return begun()


@pytest.mark.django_db(transaction=True)
def test_a_run_that_lost_its_task_is_refused(job: Job) -> None:
    """A worker that was frozen wakes up; the task waits again by then, or runs elsewhere."""
    keep(mark, job, 1)
    lifecycle.recover(Broker("worker"), "default", WORKER, [job.run.lease], reason="test", blame=lifecycle.Blame())
    with pytest.raises(LeaseLost, match="not stored"):
        keep(mark, job, 2)
    again = begun()
    assert again.run.record.checkpoint == 1
    keep(mark, again, 7)
    with pytest.raises(LeaseLost):
        keep(mark, job, 2)
    assert row().checkpoint == 7


@pytest.mark.django_db(transaction=True)
def test_a_run_that_is_over_is_refused(job: Job) -> None:
    """A thread that it has left behind comes too late."""
    keep(mark, job, 1)
    job.phase = JobPhase.REPORTED
    with pytest.raises(LeaseLost, match="its run is over"):
        keep(mark, job, 2)
    job.phase = JobPhase.RUNNING
    # Its outcome is noted in memory, but not written yet.
    now = timezone.now()
    lifecycle.fail(job.run, OSError("no"), "", now, retry_at=None)
    with pytest.raises(LeaseLost):
        keep(mark, job, 2)
    assert (row().state, row().checkpoint) == (TaskState.RUNNING, 1)


@pytest.mark.django_db(transaction=True)
def test_the_first_checkpoint_writes_running() -> None:
    """So that whatever takes the task from this run finds a row that says so; in a transaction, after its commit."""
    marked: list[Job] = []

    def note(job: Job) -> None:
        marked.append(job)
        mark(job)

    for within in (False, True):
        TaskRecord.objects.all().delete()
        tasks.keeps.enqueue("plainly")
        job = begun(marked=False)
        assert row().state == TaskState.QUEUED
        if within:
            with transaction.atomic():
                keep(note, job, 1)
                keep(note, job, 2)
                assert not marked
        else:
            keep(note, job, 1)
            keep(note, job, 2)
        assert marked == [job]
        assert (row().state, row().fence, row().checkpoint) == (TaskState.RUNNING, job.run.lease.fence, 2)
        assert (row().attempt, row().worker_ids) == (1, [WORKER])
        marked.clear()


@pytest.mark.django_db(transaction=True)
def test_a_rollback_of_the_first_checkpoint_leaves_a_row_that_waits() -> None:
    """The run goes on, and may be written as RUNNING later."""
    tasks.keeps.enqueue("plainly")
    job = begun(marked=False)
    with pytest.raises(OSError, match="no"), transaction.atomic():
        keep(mark, job, 1)
        raise OSError("no")
    assert (row().state, row().checkpoint, job.run.written) == (TaskState.QUEUED, None, False)
    mark(job)
    keep(mark, job, 2)
    assert (row().state, row().checkpoint) == (TaskState.RUNNING, 2)


@pytest.mark.django_db(transaction=True)
def test_every_other_write_keeps_it(job: Job) -> None:
    """A requeue, a retry, a final failure and its retry by a person; a success clears it, whatever the run has read."""
    broker = Broker("worker")
    keep(mark, job, {"step": 1})
    lifecycle.requeue(broker, WORKER, [job.run])
    assert (row().state, row().checkpoint) == (TaskState.QUEUED, {"step": 1})
    job = begun()
    lifecycle.fail(job.run, OSError("no"), "", timezone.now(), retry_at=None)
    assert lifecycle.record_runs([job.run]) == []
    lifecycle.acknowledge(broker, WORKER, [job.run])
    assert (row().state, row().checkpoint) == (TaskState.FAILED, {"step": 1})
    assert lifecycle.retry([job.run.record.id], by_person=True).retried
    job = begun()
    assert job.run.record.checkpoint == {"step": 1}
    job.run.record.checkpoint = None
    lifecycle.succeed(job.run, None, timezone.now())
    assert lifecycle.record_runs([job.run]) == []
    assert (row().state, row().checkpoint) == (TaskState.SUCCEEDED, None)


@pytest.mark.django_db(transaction=True)
def test_an_emptied_redis_forgets_none(job: Job, redis_client: redis.Redis) -> None:
    """The row alone holds it."""
    keep(mark, job, [1, "é"])
    for key in redis_client.scan_iter("*"):
        redis_client.delete(key)
    keep(mark, job, [2, "é"])
    assert row().checkpoint == [2, "é"]


@pytest.mark.django_db(transaction=True)
def test_new_arguments_begin_anew() -> None:
    """A call that replaces the one that waits has nothing to do with where the old arguments had come to."""
    unique = tasks.keeps.using(unique="keeps", on_duplicate="replace", run_after=timedelta(hours=1))
    unique.enqueue("fails")
    TaskRecord.objects.update(checkpoint={"step": 1})
    unique.enqueue("plainly")
    assert (row().args, row().checkpoint) == (["plainly"], None)


# --- real workers


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file that lets the body go on; made at the end, whatever happens."""
    path = tmp_path / "go"
    yield path
    path.touch()


def steps_of(path: Path) -> list[int]:
    """The steps that were done, in order."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def kill(fleet: Workers) -> None:
    """Kill all that runs tasks."""
    for pid in fleet.children():
        os.kill(pid, signal.SIGKILL)


STEPS, EVERY, PAUSE_AT = 100, 5, 48
KINDS = ("imports", "aimports", "imports_isolated")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_repeats_the_steps_since_the_last_checkpoint(kind: str, go: Path, tmp_path: Path) -> None:
    """All hundred are done; those from 46 on, which no checkpoint covers, are done twice, and no others."""
    path = tmp_path / "steps"
    result = getattr(tasks, kind).enqueue(str(path), STEPS, EVERY, PAUSE_AT, str(go))
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: len(steps_of(path)) == PAUSE_AT - 1, "the step before the pause")
        assert row().checkpoint == 45
        kill(fleet)
        go.touch()
        wait_until(lambda: row().is_final, "the outcome")
    result.refresh()
    assert (result.status, result.return_value, row().checkpoint) == ("SUCCESSFUL", 45, None)
    count = Counter(steps_of(path))
    assert sorted(count) == list(range(1, STEPS + 1))
    assert {step for step, times in count.items() if times > 1} == {46, 47}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_deploy_requeues_and_the_next_worker_goes_on(kind: str, go: Path, tmp_path: Path) -> None:
    """SIGTERM, and the import takes longer than the grace."""
    path = tmp_path / "steps"
    result = getattr(tasks, kind).enqueue(str(path), STEPS, EVERY, PAUSE_AT, str(go))
    with workers(tmp_path, "--concurrency", "2", ASYNCQ_TEST_SHUTDOWN_GRACE="0.5") as fleet:
        wait_until(lambda: len(steps_of(path)) == PAUSE_AT - 1, "the step before the pause")
        assert fleet.stop() == 0
    assert (row().state, row().attempt, row().checkpoint) == (TaskState.QUEUED, 0, 45)
    go.touch()
    run_workers()
    result.refresh()
    assert (result.status, result.attempts, result.return_value, row().checkpoint) == ("SUCCESSFUL", 1, 45, None)
    assert Counter(steps_of(path)).total() == STEPS + 2


@pytest.mark.django_db(transaction=True)
def test_steps_that_commit_with_their_checkpoint_are_done_once(go: Path, tmp_path: Path) -> None:
    """A worker that is killed within the transaction of step 48 leaves nothing of it."""
    result = tasks.imports_in_transactions.enqueue(STEPS, PAUSE_AT, str(go))
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: Group.objects.count() == PAUSE_AT - 1, "the step before the pause")
        kill(fleet)
        go.touch()
        wait_until(lambda: row().is_final, "the outcome")
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", PAUSE_AT - 1)
    # A second one of the same name would have failed: names are unique.
    assert Group.objects.count() == STEPS


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["imports", "imports_isolated"])
def test_a_retry_of_a_worker_goes_on(kind: str, tmp_path: Path) -> None:
    """In the same burst."""
    path = tmp_path / "steps"
    result = getattr(tasks, kind).enqueue(str(path), 10, 2, 6, fails=1)
    run_workers()
    result.refresh()
    assert (result.status, result.attempts, result.return_value) == ("SUCCESSFUL", 2, 4)
    assert steps_of(path) == [1, 2, 3, 4, 5, *range(5, 11)]


@pytest.mark.django_db(transaction=True)
def test_workers_keep_in_every_way_as_the_kit_does(tmp_path: Path) -> None:
    """Transactions, completions, batches, and a coroutine that does not await."""
    results = {
        how: tasks.keeps.enqueue(how)
        for how in (
            "fails",
            "fails once",
            "rolled back",
            "rolled back with its completion",
            "goes on after a completion that was rolled back",
            "completed",
            "forgotten",
            "falsy",
        )
    }
    in_transaction = tasks.keeps_in_transaction.enqueue()
    in_loop = tasks.keeps_in_the_event_loop.enqueue()
    batch = [tasks.keeps_in_batch.enqueue(number) for number in range(2)]
    run_workers("--concurrency", "2")
    found = {}
    for how, result in results.items():
        result.refresh()
        is_over = result.status == "SUCCESSFUL"
        checkpoint = TaskRecord.objects.get(id=result.id).checkpoint
        found[how] = (str(result.status), result.return_value if is_over else None, checkpoint)
    assert found == {
        "fails": ("FAILED", None, {"step": 1}),
        "fails once": ("SUCCESSFUL", {"step": 1}, None),
        "rolled back": ("SUCCESSFUL", {"step": 1}, None),
        "rolled back with its completion": ("SUCCESSFUL", {"step": 1}, None),
        "goes on after a completion that was rolled back": ("SUCCESSFUL", {"step": 3}, None),
        "completed": ("SUCCESSFUL", None, None),
        "forgotten": ("SUCCESSFUL", None, None),
        "falsy": ("SUCCESSFUL", 0, None),
    }
    for each in (in_transaction, in_loop, *batch):
        each.refresh()
    assert (in_transaction.status, in_transaction.return_value) == ("SUCCESSFUL", None)
    assert in_loop.errors[0].exception_class is SynchronousOnlyOperation
    assert [each.return_value for each in batch] == [None, None]
    assert TaskRecord.objects.filter(checkpoint__isnull=False).count() == 1


# --- where a person sees it


@pytest.mark.django_db(transaction=True)
def test_a_person_sees_it_masked(admin_client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On the task's page and on the command line; as it is only where all secret values are shown."""
    result = tasks.keeps.enqueue("plainly")
    page, address = "asyncq-checkpoint", reverse("admin:django_asyncq_taskrecord_change", args=[result.id])
    assert page not in admin_client.get(address).content.decode()
    TaskRecord.objects.update(checkpoint={"row": 40, "api_key": "k3y0fapi"})
    shown = admin_client.get(address).content.decode()
    assert page in shown
    assert "&quot;row&quot;: 40" in shown
    assert "k3y0fapi" not in shown
    call_command("asyncq", "tasks", "show", str(result.id))
    told = capsys.readouterr().out
    assert '"row": 40' in told
    assert "k3y0fapi" not in told
    call_command("asyncq", "tasks", "show", str(result.id), "--unmasked")
    assert "k3y0fapi" in capsys.readouterr().out


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("value", [0, "", [], False])
def test_a_checkpoint_that_is_false_is_seen(value: Any, admin_client: Any) -> None:
    """It is one."""
    result = tasks.keeps.enqueue("plainly")
    TaskRecord.objects.update(checkpoint=value)
    page = admin_client.get(reverse("admin:django_asyncq_taskrecord_change", args=[result.id]))
    assert "asyncq-checkpoint" in page.content.decode()
