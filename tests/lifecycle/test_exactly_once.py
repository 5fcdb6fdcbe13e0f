"""What a task writes and that it has succeeded are one commit: its effects are there once, whatever is killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from django_asyncq import lifecycle, task
from django_asyncq.broker import Lease
from django_asyncq.context import TaskContext
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState

from .. import tasks
from ..workers import history, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

MOMENTS = ["end of body", "before commit", "after commit"]


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@pytest.fixture(autouse=True)
def counter() -> None:
    """The row that tasks count in."""
    Gate.objects.create(name="counter", limit=0)


def counted() -> int:
    """How often the effect is there."""
    return Gate.objects.get(name="counter").limit


def record_of(result: Any) -> TaskRecord:
    """The row of a result."""
    return TaskRecord.objects.get(id=result.id)


def test_effects_and_success_are_committed_together(redis_client: Any, key_prefix: str) -> None:
    """Effect, result, what was queued in the body, and an empty Redis after it."""
    result = tasks.counts_once.enqueue(result=[1, "two"])
    run_workers()
    record = record_of(result)
    assert (record.state, record.return_value, record.attempt) == (TaskState.SUCCEEDED, [1, "two"], 1)
    assert counted() == 1
    assert TaskRecord.objects.get(name="tests.tasks.add").state == TaskState.SUCCEEDED
    left = {key.decode().split("}:")[-1].split(":")[0] for key in redis_client.scan_iter(f"{key_prefix}:{{*")}
    assert left == {"processed", "minutes", "runs"}


def test_result_that_json_cannot_hold_undoes_the_effects() -> None:
    """It is read before the commit, and the error says that nothing was committed."""
    result = tasks.counts_once.enqueue(result="a set")
    run_workers()
    record = record_of(result)
    assert (record.state, record.reason, record.retry_at) == (TaskState.FAILED, FailureReason.EXCEPTION, None)
    assert record.last_exception == "builtins.TypeError"
    assert re.search(
        r"function had finished.*builtins.set.*nothing that it wrote.*committed", record.errors[0]["message"]
    )
    assert counted() == 0


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite refuses no text")
def test_result_that_the_database_refuses_does_not_undo_the_effects() -> None:
    """The refusal is kept within a savepoint."""
    record = TaskRecord.objects.create(name="tests.tasks.add")
    run = lifecycle.Run(record, Lease(str(record.id), 1))
    lifecycle.begin(run, "w", timezone.now())
    with transaction.atomic():
        tasks.count()
        completed = lifecycle.complete(run, "\x00", timezone.now())
    record.refresh_from_db()
    assert completed is not None
    assert (record.state, list(record.return_value)) == (TaskState.SUCCEEDED, ["result_not_stored"])
    assert counted() == 1


def test_commit_that_gave_no_answer_is_looked_up() -> None:
    """`already_recorded` tells a run whose row was committed from one that was rolled back."""
    record = TaskRecord.objects.create(name="tests.tasks.add")
    run = lifecycle.Run(record, Lease(str(record.id), 1))
    lifecycle.begin(run, "w", timezone.now())
    with transaction.atomic():
        completed = lifecycle.complete(run, None, timezone.now())
        transaction.set_rollback(True)
    assert completed is not None
    assert run.record.state == TaskState.RUNNING
    assert lifecycle.already_recorded([completed]) == []
    with transaction.atomic():
        assert lifecycle.complete(run, None, timezone.now()) is not None
    assert lifecycle.already_recorded([completed]) == [completed]


def test_failure_rolls_effects_back_and_is_recorded(history_path: Path) -> None:
    """The first attempt leaves its error and nothing else; the second has the effect."""
    result = tasks.counts_once.enqueue(fails=1)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, len(record.errors)) == (TaskState.SUCCEEDED, 2, 1)
    assert record.errors[0]["message"] == "after the effect"
    assert len([line for line in history(history_path) if line["event"] == "counts_once"]) == 2
    assert counted() == 1
    assert TaskRecord.objects.filter(name="tests.tasks.add").count() == 1


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["counts_once", "completes"])
def test_killed_at_any_moment_the_effect_is_there_once(name: str, moment: str, history_path: Path) -> None:
    """kill -9 before the commit: run again; after it: not, although it was not acknowledged."""
    result = getattr(tasks, name).enqueue(moment=moment)
    run_workers()
    record = record_of(result)
    ran = len([line for line in history(history_path) if line["event"] == name])
    assert record.state == TaskState.SUCCEEDED
    assert counted() == 1
    # The first loss is not counted, so the body, which asks for the count, kills its process once more.
    assert (ran, record.crash_count) == ((1, 0) if moment == "after commit" else (3, 1))


@pytest.mark.parametrize(("moment", "runs"), [("answer lost", 1), ("answer: no", 2)])
@pytest.mark.parametrize("name", ["counts_once", "completes"])
def test_commit_without_an_answer_is_looked_up_in_the_row(
    name: str, moment: str, runs: int, history_path: Path
) -> None:
    """If it was a commit, the task has succeeded, for the framework's signals too; if not, it is retried."""
    result = getattr(tasks, name).enqueue(moment=moment)
    run_workers(ASYNCQ_TEST_SIGNALS="1")
    record = record_of(result)
    lines = [line for line in history(history_path) if line.get("id") == result.id]
    assert (record.state, record.attempt, len(record.errors)) == (TaskState.SUCCEEDED, runs, runs - 1)
    assert [line["event"] for line in lines].count(name) == runs
    assert [(line["status"], line["handling"]) for line in lines if line["event"] == "finished"] == [
        ("SUCCESSFUL", None)
    ]
    assert counted() == 1


def test_run_whose_task_was_recovered_has_no_effect(history_path: Path, tmp_path: Path) -> None:
    """The fence on the row is raised while the task runs: its block is rolled back, and the log says so."""
    go = tmp_path / "go"
    result = tasks.completes_when_told.enqueue(str(go))
    with workers(tmp_path) as fleet:
        wait_until(lambda: record_of(result).state == TaskState.RUNNING, "a running task")
        TaskRecord.objects.filter(id=result.id).update(fence=F("fence") + 100)
        go.touch()
        wait_until(lambda: "lost its lease" in fleet.output(), "the lost lease in the log")
    assert counted() == 0


@pytest.mark.skipif(connection.vendor == "sqlite", reason="nobody else can write during a transaction of SQLite")
def test_atomic_run_whose_task_was_recovered_in_its_transaction_has_no_effect(
    history_path: Path, tmp_path: Path
) -> None:
    """The same for a task whose whole body is the transaction."""
    go = tmp_path / "go"
    result = tasks.counts_and_waits.enqueue(str(go))
    with workers(tmp_path) as fleet:
        wait_until(lambda: history(history_path), "the effect in the open transaction")
        assert record_of(result).state == TaskState.RUNNING
        TaskRecord.objects.filter(id=result.id).update(fence=F("fence") + 100)
        go.touch()
        wait_until(lambda: "lost its lease" in fleet.output(), "the lost lease in the log")
    assert counted() == 0


def test_run_past_its_timeout_is_not_committed() -> None:
    """It has failed with TaskTimeout, and its effects are rolled back."""
    result = tasks.counts_too_late.enqueue()
    run_workers()
    assert record_of(result).errors[0]["exception"] == "django_asyncq.exceptions.TaskTimeout"
    assert counted() == 0


def test_shutdown_during_the_transaction_rolls_it_back_and_uses_no_attempt(history_path: Path, tmp_path: Path) -> None:
    """What is open when the grace is over is rolled back with the process, and the task is queued again."""
    result = tasks.counts_and_waits.enqueue(str(tmp_path / "never"))
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="1") as fleet:
        wait_until(lambda: history(history_path), "the effect in the open transaction")
        assert fleet.stop() == 0
    record = record_of(result)
    assert (record.state, record.attempt, record.crash_count) == (TaskState.QUEUED, 0, 0)
    assert counted() == 0


def test_task_has_succeeded_after_its_block(history_path: Path) -> None:
    """The block gives the result; what comes after it runs and counts for nothing."""
    fine, failing = tasks.completes.enqueue(), tasks.completes.enqueue(then="raise")
    log = run_workers().stderr
    for result in (fine, failing):
        record = record_of(result)
        assert (record.state, record.return_value, record.attempt) == (TaskState.SUCCEEDED, "set within", 1)
        assert record.errors == []
    assert counted() == 2
    assert [line["id"] for line in history(history_path) if line["event"] == "after"] == [fine.id]
    assert f"task {failing.id}: raised after completing; the task stays SUCCEEDED" in log


@pytest.mark.parametrize("then", ["twice", "hook fails"])
def test_second_block_and_failing_hooks_change_nothing(then: str) -> None:
    """A second use is refused and has no effect; a hook that raises after the commit comes too late to undo it."""
    result = tasks.completes.enqueue(then=then)
    log = run_workers().stderr
    assert record_of(result).state == TaskState.SUCCEEDED
    assert counted() == 1
    assert "raised after completing" in log


def test_block_that_raised_may_be_followed_by_another() -> None:
    """Only one of them is committed."""
    result = tasks.completes_after_all.enqueue()
    run_workers()
    assert (record_of(result).state, record_of(result).return_value) == (TaskState.SUCCEEDED, "second")
    assert counted() == 1


def test_async_task_completes_within_a_block_in_a_thread() -> None:
    """`sync_to_async` brings the block to a thread that may use the database."""
    result = tasks.completes_in_a_thread.enqueue()
    run_workers()
    assert (record_of(result).state, record_of(result).return_value) == (TaskState.SUCCEEDED, "from a thread")
    assert counted() == 1


def test_frameworks_signals_come_once_after_the_commit(history_path: Path) -> None:
    """`task_finished` of a task that raised after completing tells of a success."""
    result = tasks.completes.enqueue(then="raise")
    run_workers(ASYNCQ_TEST_SIGNALS="1")
    sent = [line for line in history(history_path) if line["event"] in ("started", "finished")]
    assert [(line["event"], line["status"], line["handling"]) for line in sent] == [
        ("started", "RUNNING", None),
        ("finished", "SUCCESSFUL", None),
    ]
    assert {line["id"] for line in sent} == {result.id}


async def _never() -> None:
    """An `async def` function of this module."""


def _atomic_by_word() -> None:
    """A function of this module."""


def test_async_function_cannot_be_atomic() -> None:
    """The declaration is refused, with the reason."""
    with pytest.raises(InvalidOption, match="make the function a `def`"):
        task(atomic=True)(_never)
    with pytest.raises(InvalidOption, match="True or False"):
        task(atomic="yes")(_atomic_by_word)  # type: ignore[call-overload]


def test_block_outside_a_worker_is_refused() -> None:
    """A context made by hand completes no run."""
    record = TaskRecord(name="tests.tasks.completes")
    context = TaskContext(task_result=None, record=record)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="worker"):
        context.complete_on_commit()
