"""Why a task failed: `errors`, `reason` and `last_exception` agree after every change of state."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_asyncq import gates, interop, lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.core.names import ALONE
from django_asyncq.exceptions import RetryRequested, TaskNotRegistered, TaskNotRunnable, TaskTimeout, WorkerLost
from django_asyncq.lifecycle.base import append_error, reason_of
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector

from .. import tasks
from ..runs import claimed, taken_by

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_keys")]

EXCEPTION, WORKER_LOST = FailureReason.EXCEPTION, FailureReason.WORKER_LOST


class Unstorable(Exception):
    """Its class path holds characters that databases refuse, and is longer than the column."""


Unstorable.__qualname__ = "Bad\x00\ud800" + "x" * 300


def why() -> tuple[int, int, str, list[str]]:
    """Return state, reason, last error and all errors of the only row."""
    row = TaskRecord.objects.get()
    return row.state, row.reason, row.last_exception, [error["exception"] for error in row.errors]


def failed(exception: BaseException, *, retry_in: float | None = None, counted: bool = True) -> lifecycle.Run:
    """Return a run that has failed and is recorded and acknowledged. retry_in: seconds."""
    run, now = claimed(max_attempts=3), timezone.now()
    retry_at = None if retry_in is None else now + timedelta(seconds=retry_in)
    lifecycle.fail(run, exception, "", now, retry_at=retry_at, counted=counted)
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    return run


@pytest.mark.parametrize(
    ("exception", "reason"),
    [
        (ValueError("no"), EXCEPTION),
        (SystemExit(1), EXCEPTION),
        (TaskNotRunnable("no list"), EXCEPTION),
        (TaskTimeout("slow"), FailureReason.TIMEOUT),
        (WorkerLost("killed"), WORKER_LOST),
        (TaskNotRegistered("gone"), FailureReason.NOT_REGISTERED),
    ],
)
@pytest.mark.parametrize("retry_in", [None, 3600])
def test_a_failed_run_has_a_reason(exception: BaseException, reason: FailureReason, retry_in: float | None) -> None:
    """FAILED or RETRYING; the class path of the last error stands in a column of its own."""
    failed(exception, retry_in=retry_in)
    path = f"{type(exception).__module__}.{type(exception).__qualname__}"
    assert why() == (TaskState.FAILED, reason, path, [path])


def test_a_retry_that_uses_no_attempt_has_a_reason_but_no_error() -> None:
    """`context.retry(counted=False)` raises in the function, and nothing is added to the errors."""
    failed(RetryRequested(delay_seconds=3600, counted=False), retry_in=3600, counted=False)
    assert why() == (TaskState.FAILED, EXCEPTION, "", [])


@pytest.mark.parametrize("by_person", [True, False])
def test_a_retried_task_has_no_reason_and_keeps_its_last_error(by_person: bool) -> None:
    """`last_exception` is that of the last entry of `errors`, also when the task has succeeded in the end."""
    run = failed(ValueError("no"), retry_in=-1)
    assert len(lifecycle.retry([run.record.id], by_person=by_person).retried) == 1
    assert why() == (TaskState.QUEUED, FailureReason.NONE, "builtins.ValueError", ["builtins.ValueError"])
    (again,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(again, "w", timezone.now())
    lifecycle.succeed(again, 1, timezone.now())
    assert lifecycle.record_runs([again]) == []
    assert why() == (TaskState.SUCCEEDED, FailureReason.NONE, "builtins.ValueError", ["builtins.ValueError"])


def lost_to_reconciler(run: lifecycle.Run) -> None:
    lifecycle.abandon(run.record, "no worker has a lease on it")


def lost_to_supervisor(run: lifecycle.Run) -> None:
    lifecycle.recover(Broker(), "default", run.record.worker_ids[-1], [run.lease], reason="killed")


def lost_to_another_worker(run: lifecycle.Run) -> None:
    again = Lease(run.lease.id, run.lease.fence + 1)
    interop.classify(Broker(), "default", "v", [again], "default")


LOSSES = pytest.mark.parametrize("lose", [lost_to_reconciler, lost_to_supervisor, lost_to_another_worker])
LOST = "django_asyncq.exceptions.WorkerLost"


@LOSSES
def test_a_task_that_is_queued_again_after_its_worker_was_lost_has_no_reason(
    lose: Callable[[lifecycle.Run], None],
) -> None:
    """It has the error."""
    lose(claimed())
    assert why() == (TaskState.QUEUED, FailureReason.NONE, LOST, [LOST])


@LOSSES
def test_a_lost_worker_is_the_reason_once_the_task_has_failed(
    lose: Callable[[lifecycle.Run], None], settings: Any
) -> None:
    """Two losses make it a suspect, and the loss of the worker that ran it alone is the last that is allowed."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_CRASHES": 1}
    lost_to_supervisor(claimed())
    lost_to_supervisor(taken_by("w"))
    lose(taken_by(f"w{ALONE}"))
    assert why() == (TaskState.FAILED, WORKER_LOST, LOST, [LOST, LOST, LOST])


def test_a_timeout_that_the_supervisor_finds_is_the_reason() -> None:
    """The function did not return, so its process was replaced."""
    run = claimed()
    timed_out = {run.lease.id: (TaskTimeout("slow"), None)}
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="replaced", timed_out=timed_out)
    path = "django_asyncq.exceptions.TaskTimeout"
    assert why() == (TaskState.FAILED, FailureReason.TIMEOUT, path, [path])


def test_a_refused_task_has_a_reason() -> None:
    """It was postponed for as long as that is allowed, and the code still has no such task."""
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.refuse(Broker(), run, TaskNotRegistered("gone"))
    assert why()[:2] == (TaskState.FAILED, FailureReason.NOT_REGISTERED)


def test_a_full_gate_is_the_reason_of_a_parked_task() -> None:
    """It has lost its slot before it was pushed; it has not failed, so it has no error."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    record = TaskRecord.objects.get()
    gates.release([record])
    gates.acquire([TaskRecord(name="other", gate="g", queue_limit=1)])
    assert lifecycle.dispatch([record], again=True) == 0
    assert why() == (TaskState.FAILED, FailureReason.GATE_FULL, "", [])


@pytest.mark.parametrize(
    ("exception", "reason"), [(ValueError("no"), EXCEPTION), (TaskTimeout("slow"), FailureReason.TIMEOUT)]
)
def test_a_spilled_outcome_brings_its_reason(exception: BaseException, reason: FailureReason) -> None:
    """The database was unreachable when the run failed, and the reconciler records it later."""
    run, now = claimed(), timezone.now()
    lifecycle.fail(run, exception, "", now, retry_at=None)
    assert lifecycle.spill_outcomes(Broker(), "w", [run]) == 1
    assert lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone") == 1
    path = f"{type(exception).__module__}.{type(exception).__qualname__}"
    assert why() == (TaskState.FAILED, reason, path, [path])


def test_a_class_path_is_stored_whatever_it_holds() -> None:
    """In `errors` nearly whole, in the column cut; without NUL and surrogates, or the outcome would be refused."""
    failed(Unstorable("no"))
    state, reason, path, (whole,) = why()
    assert (state, reason, len(path)) == (TaskState.FAILED, EXCEPTION, 200)
    assert whole.startswith(path)
    assert whole.endswith("x" * 300)


def test_an_error_of_a_subclass_has_the_reason_of_its_class() -> None:
    """A project may raise an error of its own kind."""

    class Slow(TaskTimeout):
        """Slower than allowed."""

    assert reason_of(Slow("slow")) == FailureReason.TIMEOUT


def test_the_reason_follows_the_state() -> None:
    """An error that is appended to a QUEUED row leaves no reason."""
    record = TaskRecord(name="x")
    append_error(record, WorkerLost("killed"), "", timezone.now())
    assert (record.reason, record.last_exception) == (FailureReason.NONE, "django_asyncq.exceptions.WorkerLost")


@pytest.mark.parametrize(
    "values",
    [
        {"state": TaskState.FAILED, "finished_at": timezone.now()},
        {"state": TaskState.FAILED, "retry_at": timezone.now()},
        {"state": TaskState.QUEUED, "reason": EXCEPTION},
        {"state": TaskState.RUNNING, "reason": WORKER_LOST},
        {"state": TaskState.SUCCEEDED, "reason": EXCEPTION, "finished_at": timezone.now()},
    ],
)
def test_the_database_refuses_a_reason_that_contradicts_the_state(values: dict[str, Any]) -> None:
    """FAILED and RETRYING have one, the other states have none."""
    with pytest.raises(IntegrityError), transaction.atomic():
        TaskRecord.objects.create(name="x", **values)


@pytest.mark.parametrize("retry_in", [None, 60.0], ids=["archived", "retried"])
def test_secrets_in_the_text_of_an_error_are_masked_in_redis(retry_in: float | None) -> None:
    """Whoever reads Redis sees of it what the admin shows; the row has the text as it was."""
    run = failed(ValueError("refused: password=hunter22"), retry_in=retry_in)
    (entry,) = Inspector().queues.entries("default", states=["retry" if retry_in else "archived"])
    assert entry.id == run.lease.id
    assert entry.error.startswith("refused: password=") and "hunter22" not in entry.error
    assert "hunter22" in TaskRecord.objects.get().errors[0]["message"]
