"""What another program does to our tasks reaches their rows; what only looks like it does not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from django_asyncq import gates, interop, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import alive_key
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.testing.faults import ProcessDied, fail_at

from .. import tasks, wire_tasks
from ..go_peer import GoPeer, Taken
from ..runs import taken_by

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]


@pytest.fixture
def peer(redis_client: redis.Redis, key_prefix: str) -> GoPeer:
    """A Go server on the queue that Django enqueues to."""
    return GoPeer(redis_client, "default", key_prefix)


@pytest.fixture
def reconciler() -> Iterator[Reconciler]:
    broker = Broker()
    broker.mark_alive()
    return Reconciler(broker)


def taken(peer: GoPeer) -> Taken:
    found = peer.take()
    assert found is not None
    return found


def slots(gate: str) -> int:
    """How many slots of a gate are taken."""
    return int(Broker().client.zcard(gates.members.keys(gate).members))


def grown() -> None:
    """Have all rows be older than the seconds for which the process that enqueued them may still push them."""
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(minutes=10))


def row() -> TaskRecord:
    return TaskRecord.objects.get()


def fail_here() -> None:
    """Have a worker of ours run the next task, and fail for good."""
    run = taken_by("w")
    finish_failed(run, None)


def finish_failed(run: lifecycle.Run, retry_at: Any) -> None:
    lifecycle.fail(run, ValueError("no"), "", database_clock.now(), retry_at=retry_at)
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)


def retrying_here(seconds: float = 3600) -> None:
    """Have a worker of ours run the next task, and fail for now."""
    finish_failed(taken_by("w"), database_clock.now() + timedelta(seconds=seconds))


# --- W1: another server runs a task of ours


def test_a_task_that_another_program_has_run_succeeds_and_never_runs_again(
    peer: GoPeer, reconciler: Reconciler
) -> None:
    """The message asks to be kept, so `done` leaves the result. Its gate slot is free again."""
    tasks.gated.enqueue("g")
    task = taken(peer)
    assert task.message.retention == 86_400
    peer.succeed(task, b'{"sent": 1}')
    assert reconciler.quick_repairs().settled == 1
    found = row()
    assert (found.state, found.return_value, found.attempt) == (TaskState.SUCCEEDED, {"sent": 1}, 1)
    assert (peer.state(task.id), peer.ids("completed"), peer.ids("pending")) == ("", [], [])
    assert slots("g") == 0
    assert not any(reconciler.sweep())


@pytest.mark.parametrize(
    ("written", "stored"), [(b"", None), (b"plain", "plain"), (b"\xff", {"base64": "/w=="}), (b"NaN", "NaN")]
)
def test_a_result_is_json_or_text_or_base64(
    peer: GoPeer, reconciler: Reconciler, written: bytes, stored: object
) -> None:
    """Another program may write any bytes."""
    tasks.add.enqueue(1)
    peer.succeed(taken(peer), written)
    reconciler.quick_repairs()
    assert row().return_value == stored


def test_a_result_beyond_the_limit_is_a_note(peer: GoPeer, reconciler: Reconciler, settings: Any) -> None:
    """It is never read into memory."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_RESULT_BYTES": 100}
    tasks.add.enqueue(1)
    peer.succeed(taken(peer), b"x" * 101)
    reconciler.quick_repairs()
    assert "101 bytes" in row().return_value["result_not_stored"]


def test_a_failure_elsewhere_is_final_with_its_text(peer: GoPeer, reconciler: Reconciler) -> None:
    """The message allows no retry, so the server archives it."""
    tasks.gated.enqueue("g")
    peer.fail(taken(peer), "smtp: \xe9")
    assert reconciler.quick_repairs().settled == 1
    found = row()
    assert (found.state, found.reason, found.attempt) == (TaskState.FAILED, FailureReason.EXCEPTION, 1)
    assert (found.errors[0]["message"], found.last_exception) == (
        "smtp: \xe9",
        "django_asyncq.exceptions.RemoteFailure",
    )
    assert slots("g") == 0
    assert peer.ids("archived") == [str(found.id)]
    assert reconciler.quick_repairs().settled == 0


def test_a_retry_elsewhere_is_retrying_and_then_ours_to_retry(peer: GoPeer, reconciler: Reconciler) -> None:
    """The attempt counts. When it is due, a worker of ours may run it, once."""
    tasks.add.using(max_attempts=3).enqueue(1)
    task = taken(peer)
    peer.retry(task, "later", delay=-1)
    grown()
    reconciler.sweep()
    found = row()
    assert (found.state, found.attempt, found.retry_at is not None) == (TaskState.FAILED, 1, True)
    assert found.errors[0]["message"] == "later"
    forward_due(Broker(), ["default"])
    assert row().state == TaskState.QUEUED
    run = taken_by("w")
    assert (run.record.attempt, peer.message(task.id).retried) == (2, 1)


def test_each_failure_elsewhere_is_counted_before_it_is_due(peer: GoPeer, reconciler: Reconciler) -> None:
    """Also the second one, which is in `retry` like the first: else the task would run more often than it may."""
    tasks.add.using(max_attempts=3).enqueue(1)
    peer.retry(taken(peer), "one", delay=600)
    assert reconciler.quick_repairs().settled == 1
    assert reconciler.quick_repairs().settled == 0
    peer.forward(at=peer.now() + 601)
    peer.retry(taken(peer), "two", delay=700)
    assert reconciler.quick_repairs().settled == 1
    assert (row().attempt, [error["message"] for error in row().errors]) == (2, ["one", "two"])
    assert reconciler.quick_repairs().settled == 0


@pytest.mark.parametrize(("retention", "place"), [(3600, ["completed"]), (0, [])])
def test_a_task_of_another_program_that_succeeds_there_is_kept_as_it_asked(
    redis_client: redis.Redis, key_prefix: str, reconciler: Reconciler, retention: int, place: list[str]
) -> None:
    """It has failed here once. Without a trace of its success there, it would run again and again."""
    peer = GoPeer(redis_client, "mail", key_prefix)
    id = peer.enqueue(wire_tasks.deliver.wire_name, b'{"to": "x"}', retention=retention, retry=5)
    claim = interop.claim(Broker(), "mail", "w", 1, "default")
    finish_failed(claim.runs[0], database_clock.now() + timedelta(seconds=3600))
    peer.forward(at=peer.now() + 4000)
    peer.succeed(taken(peer), b"7")
    grown()
    reconciler.sweep()
    assert (row().state, row().return_value) == (TaskState.SUCCEEDED, 7)
    reconciler.quick_repairs()
    assert (peer.state(id), peer.ids("completed")) == ("".join(place), [id] if place else [])
    assert peer.ids("pending") == []


def test_a_handler_not_found_is_no_outcome(
    peer: GoPeer, reconciler: Reconciler, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is pushed again, without an attempt, with one warning; after the patience it fails and says why."""
    tasks.add.enqueue(1)
    for _ in range(2):
        peer.fail_without_handler(taken(peer))
        assert reconciler.quick_repairs().settled == 1
        found = row()
        assert (found.state, found.attempt, found.errors) == (TaskState.QUEUED, 0, [])
        assert peer.ids("pending") == [str(found.id)]
    assert [record.message for record in caplog.records if "no handler" in record.message][1:] == []
    settings.ASYNCQ = {**settings.ASYNCQ, "UNREGISTERED_PATIENCE_SECONDS": 0}
    peer.fail_without_handler(taken(peer))
    reconciler.quick_repairs()
    assert (row().state, row().reason) == (TaskState.FAILED, FailureReason.NOT_REGISTERED)
    assert "no handler" in row().errors[-1]["message"]


def finished_there_after_a_loss_here(peer: GoPeer) -> None:
    """Our worker is lost; the recoverer of the other program retries the task there, and it succeeds."""
    tasks.add.using(max_attempts=2).enqueue(1)
    taken_by("w")
    peer.recover(at=peer.now() + 1000)
    peer.forward(at=peer.now() + 1000)
    peer.succeed(taken(peer), b"7")


def test_a_running_row_that_another_program_has_finished_succeeds(peer: GoPeer, reconciler: Reconciler) -> None:
    """Its row has the result from there."""
    finished_there_after_a_loss_here(peer)
    reconciler.quick_repairs()
    assert (row().state, row().return_value) == (TaskState.SUCCEEDED, 7)


@pytest.fixture
def refusing(settings: Any) -> None:
    """Settings that accept no outcome from another program."""
    settings.ASYNCQ = {**settings.ASYNCQ, "ACCEPT_OUTCOMES": False}


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "retrying", "archived"])
@pytest.mark.usefixtures("refusing")
def test_an_outcome_that_is_not_accepted_is_none(
    peer: GoPeer, reconciler: Reconciler, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is pushed again, uncounted, keeps its slot, and our worker runs it. One warning says so."""
    tasks.gated.using(max_attempts=3).enqueue("g")
    if outcome == "archived":
        peer.inspector_archive(str(row().id))
    elif outcome == "succeeded":
        peer.succeed(taken(peer), b"7")
    elif outcome == "failed":
        peer.archive(taken(peer), "no")
    else:
        peer.retry(taken(peer), "later")
    assert reconciler.quick_repairs().settled == 1
    found = row()
    assert (found.state, found.attempt, found.errors) == (TaskState.QUEUED, 0, [])
    assert (peer.ids("pending"), slots("g")) == ([str(found.id)], 1)
    assert sum("ACCEPT_OUTCOMES" in record.message for record in caplog.records) == 1
    run = taken_by("w")
    lifecycle.succeed(run, "ours", database_clock.now())
    assert lifecycle.record_runs([run]) == []
    assert (row().state, row().return_value, row().attempt) == (TaskState.SUCCEEDED, "ours", 1)


@pytest.mark.usefixtures("refusing")
def test_a_retry_is_still_due_when_an_outcome_is_not_accepted(peer: GoPeer, reconciler: Reconciler) -> None:
    """Archiving a RETRYING task cancels it elsewhere."""
    tasks.add.using(max_attempts=3).enqueue(1)
    retrying_here(-1)
    peer.inspector_archive(str(row().id))
    reconciler.quick_repairs()
    assert (row().state, row().is_final, peer.ids("retry")) == (TaskState.FAILED, False, [str(row().id)])
    forward_due(Broker(), ["default"])
    assert taken_by("w").record.attempt == 2


@pytest.mark.usefixtures("refusing")
def test_a_running_row_runs_again_when_an_outcome_is_not_accepted(peer: GoPeer, reconciler: Reconciler) -> None:
    """It was lost, and nobody of ours has run it since."""
    finished_there_after_a_loss_here(peer)
    reconciler.quick_repairs()
    TaskRecord.objects.update(last_attempted_at=database_clock.now() - timedelta(minutes=10))
    Broker().client.set(alive_key(), 1)
    reconciler.sweep()
    assert (row().state, row().return_value) == (TaskState.QUEUED, None)
    assert (peer.ids("completed"), peer.state(str(row().id))) == ([], "pending")


# --- W4: asynq's tools


def test_archiving_a_waiting_task_cancels_it(peer: GoPeer, reconciler: Reconciler) -> None:
    """Nobody has failed it since its message was written, so a person has archived it."""
    tasks.gated.enqueue("g")
    assert peer.inspector_archive(str(row().id)) == 1
    assert reconciler.quick_repairs().settled == 1
    found = row()
    assert (found.state, found.reason, found.attempt) == (TaskState.FAILED, FailureReason.CANCELLED, 0)
    assert found.errors[0]["message"] == "archived by another program"
    assert slots("g") == 0


def test_archiving_a_retrying_task_cancels_it(peer: GoPeer, reconciler: Reconciler) -> None:
    """Its own error does not look like another program's failure."""
    tasks.add.using(max_attempts=3).enqueue(1)
    retrying_here()
    assert peer.inspector_archive(str(row().id)) == 1
    reconciler.quick_repairs()
    assert (row().state, row().retry_at, row().reason) == (TaskState.FAILED, None, FailureReason.CANCELLED)


def test_running_a_retrying_task_retries_it_now(peer: GoPeer) -> None:
    """Before its time, and it counts as that attempt."""
    tasks.add.using(max_attempts=3).enqueue(1)
    retrying_here()
    assert peer.inspector_run(str(row().id)) == 1
    assert interop.claim(Broker(), "default", "w", 1, "default").runs == []
    assert row().state == TaskState.QUEUED
    assert taken_by("w").record.attempt == 2


@pytest.mark.parametrize("taker", ["worker", "recovery"])
def test_running_a_failed_task_retries_it_by_a_person(peer: GoPeer, taker: str) -> None:
    """Whoever meets the claimed entry: the worker, or what recovers the tasks of a worker that died at that moment."""
    tasks.add.enqueue(1)
    fail_here()
    assert peer.inspector_run(str(row().id)) == 1
    if taker == "worker":
        assert interop.claim(Broker(), "default", "w", 1, "default").runs == []
    else:
        leases = Broker().dequeue("default", "w", 1, 30).leases
        lifecycle.recover(Broker(), "default", "w", leases, reason="died")
    assert (row().state, row().reason) == (TaskState.QUEUED, FailureReason.NONE)
    run = taken_by("w")
    assert run.record.attempt == 2


def test_a_refused_retry_of_a_person_leaves_the_row_failed(peer: GoPeer, caplog: pytest.LogCaptureFixture) -> None:
    """The gate is full; the log says so, and no entry is left that would be claimed again and again."""
    tasks.gated.using(queue_limit=1).enqueue("g")
    fail_here()
    tasks.gated.using(queue_limit=1).enqueue("g")
    taken_by("w2")
    failed = TaskRecord.objects.get(state=TaskState.FAILED)
    assert peer.inspector_run(str(failed.id)) == 1
    assert interop.claim(Broker(), "default", "w", 1, "default").runs == []
    assert TaskRecord.objects.get(id=failed.id).is_final
    assert (peer.ids("pending"), "refused" in caplog.text) == ([], True)


# --- what only looks like another program's doing


def test_a_retry_whose_process_died_before_the_push_is_pushed(peer: GoPeer, reconciler: Reconciler) -> None:
    """The entry is archived still, by our own reporter: `settled` says so."""
    tasks.add.enqueue(1)
    fail_here()
    with pytest.raises(ProcessDied), fail_at("retry.committed"):
        lifecycle.retry([row().id], by_person=True)
    assert row().state == TaskState.QUEUED
    assert reconciler.quick_repairs().settled == 0
    grown()
    for _ in range(2):
        reconciler.sweep()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [str(row().id)])
    assert "settled" not in {field.decode() for field in peer.client.hkeys(peer.task_key(str(row().id)))}


def test_a_redis_of_before_the_retry_says_nothing(peer: GoPeer, reconciler: Reconciler) -> None:
    """A person has retried what another program had failed; a Redis restored from before has the old entry."""
    tasks.add.enqueue(1)
    peer.fail(taken(peer), "no")
    id = str(row().id)
    copy, score = peer.client.hgetall(peer.task_key(id)), peer.client.zscore(peer.key("archived"), id)
    reconciler.quick_repairs()
    lifecycle.retry([row().id], by_person=True)
    Broker().remove("default", [id])
    peer.client.hset(peer.task_key(id), mapping=copy)
    peer.client.zadd(peer.key("archived"), {id: score})
    assert reconciler.quick_repairs().settled == 0
    assert row().state == TaskState.QUEUED
    grown()
    for _ in range(2):
        reconciler.sweep()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [id])


def test_a_crash_between_row_and_entry_is_repaired(peer: GoPeer, reconciler: Reconciler) -> None:
    """The row is final and its entry is left: the next pass removes it."""
    tasks.add.enqueue(1)
    peer.succeed(taken(peer), b"1")
    id = str(row().id)
    copy, score = peer.client.hgetall(peer.task_key(id)), peer.client.zscore(peer.key("completed"), id)
    reconciler.quick_repairs()
    peer.client.hset(peer.task_key(id), mapping=copy)
    peer.client.zadd(peer.key("completed"), {id: score})
    reconciler.quick_repairs()
    assert (peer.state(id), row().return_value) == ("", 1)


def test_tasks_of_other_programs_are_left_alone(peer: GoPeer, reconciler: Reconciler) -> None:
    """Completed or archived, they have no row."""
    done, failed = peer.enqueue("go", retention=86_400), peer.enqueue("go", retry=0)
    peer.succeed(taken(peer))
    peer.fail(taken(peer), "no")
    lifecycle.dispatch([])
    tasks.add.enqueue(1)
    reconciler.quick_repairs()
    reconciler.sweep()
    assert (peer.state(done), peer.state(failed)) == ("completed", "archived")


def test_a_plain_failure_is_read_by_nobody(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own reporter archived it; no evidence is read."""
    tasks.add.enqueue(1)
    fail_here()
    monkeypatch.setattr(interop, "settle_evidence", None)
    assert not any(reconciler.quick_repairs())
