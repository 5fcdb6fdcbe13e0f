"""Cancel in the stores: what waits is closed, what runs is asked to stop, and a void run changes nothing."""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.models import F
from django.test import override_settings
from django.utils import timezone

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker, Lease, task_entries
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import cancel_channel, keys_of
from django_asyncq.core import compat
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption, QueueFull, TaskCancelled
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle.holding import Hold
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.observe.values import CancelCounts
from django_asyncq.signals import task_state_changed
from django_asyncq.storage.routing import transaction_of
from django_asyncq.testing import failpoints
from django_asyncq.worker.job import Job, JobPhase, Jobs
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.slot_table import SlotTable
from django_asyncq.worker.stopping import RunStopper
from django_asyncq.worker.wakeup import Wakeup

from .. import acl, tasks
from ..redis_state import pending, unknown
from ..runs import claimed, taken_by
from ..workers import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]


def row(result: Any) -> TaskRecord:
    """Return the row of a result, or of a run."""
    return TaskRecord.objects.get(id=getattr(result, "id", None) or result.lease.id)


def taken(worker_id: str = "w") -> lifecycle.Run:
    """Return the next task, claimed; its row still says QUEUED."""
    (run,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    lifecycle.begin(run, worker_id, timezone.now())
    return run


def finish(run: lifecycle.Run, worker_id: str = "w") -> list[lifecycle.Run]:
    """Report a success, as the reporter does; return the run if the row refused it."""
    lifecycle.succeed(run, "done", timezone.now())
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), worker_id, [run], lost)
    lifecycle.settle_lost(Broker(), lost)
    if not lost:
        lifecycle.announce([run.record], TaskState.RUNNING, TaskState.SUCCEEDED)
    return lost


@pytest.fixture
def announced() -> Any:
    """The changes that were announced: (id, old, new)."""
    found: list[tuple[str, Any, Any]] = []

    def note(*, records: list[TaskRecord], old: Any, new: Any, **kwargs: Any) -> None:
        found.extend((str(record.id), old, new) for record in records)

    task_state_changed.connect(note)
    yield found
    task_state_changed.disconnect(note)


@pytest.fixture
def requests(redis_client: redis.Redis) -> Any:
    """Return a function that returns the ids for which a request to stop was published since the last call."""
    listener = redis_client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(cancel_channel())
    listener.get_message(timeout=5)

    def published() -> list[str]:
        found = []
        while message := listener.get_message(timeout=0.1):
            # Without the fence that a worker of ours compares.
            found.append(message["data"].decode().split()[0])
        return found

    yield published
    listener.close()


# --- what waits


def test_a_task_that_waits_is_closed(announced: Any) -> None:
    """It is FAILED as cancelled, its row says why, when and by whom; Redis has nothing of it, and no run begins."""
    result = tasks.add.enqueue(1)
    announced.clear()
    assert result.cancel("wrong file") == "cancelled"
    found = row(result)
    assert (found.state, found.reason, found.attempt) == (TaskState.FAILED, FailureReason.CANCELLED, 0)
    assert found.finished_at == found.cancel_requested_at
    assert found.cancelled_by == "wrong file"
    assert found.last_exception == "django_asyncq.exceptions.TaskCancelled"
    assert found.errors[0]["message"] == "wrong file"
    assert pending() == []
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert announced == [(result.id, TaskState.QUEUED, TaskState.FAILED)]
    assert result.cancel() == "over"


@pytest.mark.parametrize("place", ["scheduled", "priority", "retry"])
def test_it_is_removed_from_wherever_it_waits(place: str, redis_client: redis.Redis) -> None:
    """Nothing of it is left in any key of its queue; a token names no task."""
    options: dict[str, Any] = {"scheduled": {"run_after": timedelta(hours=1)}, "priority": {"priority": 5}}.get(
        place, {}
    )
    result = tasks.add.using(**options).enqueue(1)
    if place == "retry":
        run = taken()
        retry_at = timezone.now() + timedelta(hours=1)
        lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=retry_at)
        assert lifecycle.record_runs([run]) == []
        lifecycle.acknowledge(Broker(), "w", [run])
        assert row(result).retry_at is not None
    assert result.cancel() == "cancelled"
    assert row(result).retry_at is None
    assert row(result).is_final
    left = acl.unrestricted(redis_client).keys(f"{keys_of('default').base}*")
    others = (b"processed", b"failed", b":minutes:", b":runs", b":wake")
    assert not [key for key in left if not any(word in key for word in others)]


def test_rollback_means_that_it_never_happened(announced: Any) -> None:
    """The row, the entry and the gate slot are as before."""
    result = tasks.gated.enqueue("g")
    announced.clear()
    with pytest.raises(ZeroDivisionError), transaction_of(TaskRecord):
        assert result.cancel() == "cancelled"
        raise ZeroDivisionError
    assert row(result).state == TaskState.QUEUED
    assert row(result).cancel_requested_at is None
    wait_until(pending, "task that is pending again")
    assert pending() == [result.id]
    assert [slot.id for slot in gates.slots("g")] == [result.id]
    assert announced == []


def test_enqueued_and_cancelled_in_one_transaction() -> None:
    """Nothing of it reaches a worker."""
    with transaction_of(TaskRecord):
        result = tasks.gated.enqueue("g")
        assert result.cancel() == "cancelled"
    assert pending() == []
    assert gates.slots("g") == []
    assert row(result).reason == FailureReason.CANCELLED


def test_many_are_counted_by_what_became_of_them() -> None:
    """In pages, of a filter or a slice; a user or a text says who it was."""
    done = claimed()
    finish(done)
    running = claimed()
    waiting = [tasks.add.enqueue(number) for number in range(3)]
    user = get_user_model()(username="ada")
    counts = TaskRecord.objects.order_by("-id").cancel(by=user, reason="too many")
    assert counts == (3, 1, 1)
    assert counts._asdict() == {"cancelled": 3, "asked": 1, "over": 1}
    assert {row(result).cancelled_by for result in [*waiting, running]} == {"ada: too many"}
    assert row(waiting[0]).errors[0]["message"] == "ada: too many"
    assert row(done).cancel_requested_at is None
    more = [tasks.add.enqueue(number) for number in range(3)]
    assert TaskRecord.objects.filter(id__in=[result.id for result in more])[:2].cancel() == (2, 0, 0)
    assert TaskRecord.objects.none().cancel() == (0, 0, 0)


def test_more_than_a_page_of_rows_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a step of its own, in the caller's transaction if there is one."""
    monkeypatch.setattr("django_asyncq.lifecycle.closing.ROWS_PER_PAGE", 3)
    tasks.add.enqueue_many([(number,) for number in range(8)])
    with transaction_of(TaskRecord):
        assert TaskRecord.objects.all().cancel(by="ops") == (8, 0, 0)
        assert lifecycle.claim(Broker(), "default", "w", 9, "default").runs == []
    assert unknown(TaskRecord.objects.values_list("id", flat=True)) == list(
        map(str, TaskRecord.objects.values_list("id", flat=True))
    )


def test_odd_text_is_stored_and_cut() -> None:
    """No reason can make the UPDATE fail."""
    result = tasks.add.enqueue(1)
    assert result.cancel("\x00\ud800" + "ä" * 10_000) == "cancelled"
    assert len(row(result).cancelled_by) == 150
    assert len(row(result).errors[0]["message"]) > 4_000


def test_what_cannot_be_cancelled_is_an_error() -> None:
    """An unknown id, a row of another alias, another type than text; nothing is written."""
    result = tasks.add.enqueue(1)
    TaskRecord.objects.filter(id=result.id).update(backend="other")
    for id in (result.id, str(uuid.uuid4()), "no id"):
        object.__setattr__(result, "id", id)
        with pytest.raises(compat.TaskResultDoesNotExist):
            result.cancel()
    for wrong in ({"by": 5}, {"reason": None}):
        with pytest.raises(InvalidOption, match="takes a text"):
            TaskRecord.objects.all().cancel(**wrong)
    assert not TaskRecord.objects.filter(cancel_requested_at__isnull=False).exists()


def test_person_may_retry_a_cancelled_task() -> None:
    """The cancel is forgotten, and the task runs."""
    result = tasks.add.enqueue(1)
    result.cancel("by mistake")
    lifecycle.retry([row(result).id], by_person=True)
    assert (row(result).cancel_requested_at, row(result).cancelled_by) == (None, "")
    assert finish(taken()) == []
    assert row(result).state == TaskState.SUCCEEDED


def test_acancel_does_the_same() -> None:
    """From an event loop."""
    result = tasks.add.enqueue(1)
    assert async_to_sync(result.acancel)("x") == "cancelled"
    assert row(result).cancelled_by == "x"


# --- what a worker has claimed: the row says QUEUED, and its body may run


def test_a_claimed_task_is_asked_to_stop_as_a_running_one(announced: Any, requests: Any) -> None:
    """Nobody can say whether its body has begun, so the row is not closed; what it makes of it counts."""
    result = tasks.gated.enqueue("g")
    run = taken()
    announced.clear()
    assert result.cancel("late") == "asked"
    assert requests() == [result.id]
    assert (row(result).state, row(result).cancelled_by) == (TaskState.QUEUED, "late")
    assert [slot.id for slot in gates.slots("g")] == [result.id]
    assert Reconciler(Broker()).quick_repairs().closed == 0
    assert announced == []
    assert finish(run) == []
    assert (row(result).state, row(result).attempt) == (TaskState.SUCCEEDED, 1)
    assert gates.slots("g") == []
    assert announced == [(result.id, TaskState.RUNNING, TaskState.SUCCEEDED)]


@pytest.mark.parametrize("way", ["lost worker", "requeued"])
def test_a_claimed_task_that_was_asked_never_runs_again(way: str) -> None:
    """Whatever becomes of its worker: the row says that it was cancelled, and its slot is free."""
    result = tasks.gated.enqueue("g")
    run = taken()
    assert result.cancel() == "asked"
    if way == "lost worker":
        lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed")
    else:
        lifecycle.requeue(Broker(), "w", [run])
    assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    assert gates.slots("g") == []
    assert row(result).reason == FailureReason.CANCELLED
    assert pending() == []


def test_no_body_begins_while_the_transaction_of_the_cancel_is_open(requests: Any) -> None:
    """It was answered "cancelled", so nothing that pushes it brings it to a worker before the commit."""
    result = tasks.add.enqueue(1)
    with transaction_of(TaskRecord):
        assert result.cancel() == "cancelled"
        # The reconciler, or a slow producer: another connection sees a row that waits.
        waiting = row(result)
        waiting.state, waiting.finished_at, waiting.reason = TaskState.QUEUED, None, FailureReason.NONE
        lifecycle.push(Broker(), [waiting], again=True)
        lifecycle.push(Broker(), [waiting])
        assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
        expire_holds()
        assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
    assert unknown([result.id]) == [result.id]
    assert requests() == []


def expire_holds() -> int:
    """Have the leader look at holds that have expired; return how many there were."""
    client, lease = acl.unrestricted(Broker().client), keys_of("default").lease
    for id in client.zrange(lease, 0, -1):
        client.zadd(lease, {id: 1})
    found = Broker().expired("default")
    for each in found:
        lifecycle.recover(Broker(), "default", each.worker, [Lease(each.id, each.fence)], reason="expired")
    return len(found)


def test_what_a_dead_canceller_held_is_given_back(redis_client: redis.Redis) -> None:
    """Its process was killed before the commit: the leader finds that nobody has locked the row."""
    results = [tasks.add.enqueue(1), tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)]
    ids = [result.id for result in results]
    words = task_entries.hold(Broker(), "default", ids, f"{task_entries.HOLDER}dead")
    assert words == ["1", "1"]
    assert task_entries.hold(Broker(), "default", ids, f"{task_entries.HOLDER}next") == ["2", "2"]
    assert task_entries.take_out(Broker(), "default", [(ids[0], 9)], holder=f"{task_entries.HOLDER}dead") == ["active"]
    assert expire_holds() == 2
    assert {each.id: each.state for each in Inspection("worker").entry_states("default", ids)} == {
        ids[0]: "pending",
        ids[1]: "scheduled",
    }


def test_what_a_lost_reply_has_taken_out_is_given_back(requests: Any) -> None:
    """The client repeats the call, whose second reply says that nothing is there; the task waits again."""
    result = tasks.add.enqueue(1)
    record = TaskRecord.objects.get(id=result.id)
    hold = Hold()
    for _ in range(2):
        assert task_entries.hold(Broker(), "default", [result.id], hold.name) == ["1"]
    assert task_entries.take_out(Broker(), "default", [(result.id, None)], holder=hold.name) == ["removed"]
    assert task_entries.take_out(Broker(), "default", [(result.id, None)], holder=hold.name) == ["missing"]
    assert hold.give_back([record])
    assert [each.state for each in Inspection("worker").entry_states("default", [result.id])] == ["pending"]
    assert requests() == []


def test_what_an_open_transaction_holds_is_not_given_back() -> None:
    """However long it lasts: the lock of the row says that it is open."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("the leader waits for the transaction, as every writer on SQLite does")
    result = tasks.add.enqueue(1)
    held, over = threading.Event(), threading.Event()

    def cancel() -> None:
        with transaction_of(TaskRecord):
            assert result.cancel() == "cancelled"
            held.set()
            assert over.wait(20)
        connection.close()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    assert held.wait(20)
    try:
        for _ in range(2):
            assert expire_holds() == 1
            assert lifecycle.push(Broker(), [row(result)], again=True) == 0
            assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
    finally:
        over.set()
        canceller.join()
    assert row(result).reason == FailureReason.CANCELLED
    assert unknown([result.id]) == [result.id]


def test_row_that_redis_does_not_know_is_noted_only() -> None:
    """It is being pushed at this moment, or Redis was emptied and a worker runs it: the leader closes it."""
    result = tasks.gated.enqueue("g")
    Broker().remove("default", [result.id])
    assert result.cancel() == "asked"
    assert row(result).state == TaskState.QUEUED
    assert Reconciler(Broker()).quick_repairs().closed == 1
    assert row(result).reason == FailureReason.CANCELLED
    assert gates.slots("g") == []


@pytest.mark.parametrize("place", ["scheduled", "retry"])
def test_rollback_brings_it_back_where_it_waited(place: str) -> None:
    """A delayed task is not due, and one that is retried waits for its time."""
    if place == "scheduled":
        result: Any = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
    else:
        run = taken_for_retry()
        result = tasks.add.get_backend().get_result(run.lease.id)
    before = row(result)
    with pytest.raises(ZeroDivisionError), transaction_of(TaskRecord):
        assert result.cancel() == "cancelled"
        raise ZeroDivisionError
    state = {"scheduled": "scheduled", "retry": "retry"}[place]
    inspection = Inspection("worker")
    wait_until(lambda: inspection.entry_states("default", [result.id])[0].state == state, "entry that waits")
    assert (row(result).state, row(result).retry_at) == (before.state, before.retry_at)
    assert row(result).cancel_requested_at is None


def taken_for_retry() -> lifecycle.Run:
    """Return a run that has failed, and whose task waits for its retry."""
    tasks.add.enqueue(1)
    run = taken()
    lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=timezone.now() + timedelta(hours=1))
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    return run


# --- void runs: a body runs whose lease was lost, and the row was closed


def closed_though_claimed(result: Any) -> None:
    """Close a task whose entry Redis forgot when it was asked, and knows again."""
    TaskRecord.objects.filter(id=result.id).update(cancel_requested_at=timezone.now())
    assert lifecycle.close_cancelled([row(result).id]) == 1


@pytest.mark.parametrize("outcome", ["ran to its end", "then failed or was stopped"])
def test_void_run_writes_what_it_knows(outcome: str) -> None:
    """Its lease was lost, the task went back and was cancelled, while the body went on."""
    result = tasks.add.enqueue(1)
    run = taken()
    Broker().requeue("default", "w", [run.lease], raise_fence=True)
    assert result.cancel("late") == "cancelled"
    assert row(result).attempt == 0
    if outcome == "ran to its end":
        assert finish(run) == [run]
    else:
        lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=None)
        lost = lifecycle.record_runs([run])
        lifecycle.settle_lost(Broker(), lost)
    for _ in range(2):
        found = row(result)
        assert (found.state, found.reason, found.return_value) == (TaskState.FAILED, FailureReason.CANCELLED, None)
        assert (found.attempt, found.worker_ids) == (1, ["w"])
        assert found.started_at is not None
        assert [each["message"] for each in found.errors] == ["late", f"had begun when it was cancelled; {outcome}"]
        lifecycle.settle_lost(Broker(), [run])  # a repeated report


@pytest.mark.parametrize("is_run", [False, True])
def test_void_run_leaves_a_row_alone_that_was_retried_since(is_run: bool) -> None:
    """What it knows is not that of the row any more."""
    result = tasks.add.enqueue(1)
    run = taken()
    Broker().requeue("default", "w", [run.lease], raise_fence=True)
    result.cancel()
    lifecycle.retry([row(result).id], by_person=True)
    if is_run:
        finish(taken_by("v"), "v")
    before = row(result)
    assert finish(run) == [run]
    assert (row(result).worker_ids, row(result).errors) == (before.worker_ids, before.errors)
    assert row(result).attempt == int(is_run)


def test_outcome_of_a_void_run_is_dropped_and_its_slot_released_then(announced: Any, requests: Any) -> None:
    """Until its worker reports it, the gate slot stays: a second body would exceed the limit."""
    result = tasks.gated.enqueue("g")
    run = taken()
    announced.clear()
    closed_though_claimed(result)
    assert requests() == [result.id]
    assert [slot.id for slot in gates.slots("g")] == [result.id]
    assert Broker().held("default", "w") == [run.lease]
    assert announced == []
    assert finish(run) == [run]
    assert (row(result).state, row(result).return_value) == (TaskState.FAILED, None)
    assert gates.slots("g") == []
    assert Broker().held("default", "w") == []
    assert announced == [(result.id, TaskState.QUEUED, TaskState.FAILED)]


@pytest.mark.parametrize("way", ["lost worker", "requeued"])
def test_void_run_whose_worker_is_lost_or_stops_is_settled_too(way: str, announced: Any) -> None:
    """Its slot is released once, and nothing runs again."""
    result = tasks.gated.enqueue("g")
    run = taken()
    announced.clear()
    closed_though_claimed(result)
    if way == "lost worker":
        lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed")
    else:
        lifecycle.requeue(Broker(), "w", [run])
        assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    assert gates.slots("g") == []
    assert row(result).reason == FailureReason.CANCELLED
    assert announced == [(result.id, TaskState.QUEUED, TaskState.FAILED)]
    assert pending() == []


def test_slot_that_a_person_took_again_is_not_released_by_the_void_run() -> None:
    """Retried while the void body still runs: its report releases nothing, and the new run is dispatched."""
    result = tasks.gated.enqueue("g")
    run = taken()
    closed_though_claimed(result)
    lifecycle.retry([row(result).id], by_person=True)
    finish(run)
    assert row(result).state == TaskState.QUEUED
    assert [slot.id for slot in gates.slots("g")] == [result.id]
    assert finish(taken_by("w")) == []
    assert gates.slots("g") == []


@pytest.mark.parametrize("by", ["close", "replace"])
def test_void_run_is_asked_to_stop_though_the_request_is_lost(by: str) -> None:
    """Who closes it dies after the commit, or Redis is away: the worker sees it when it writes RUNNING."""

    def die(name: str) -> None:
        if name == "close.committed":
            raise Died

    result = tasks.add.enqueue(1)
    run = taken()
    if by == "close":
        failpoints.arm(die)
        with pytest.raises(Died):
            closed_though_claimed(result)
        failpoints.disarm()
    else:
        TaskRecord.objects.filter(id=result.id).update(fence=F("fence") + 9)
    jobs, table = Jobs(), SlotTable(1)
    stopper = RunStopper(jobs, table)
    reporter = Reporter(Broker("worker"), "w", Wakeup(), threading.Event(), on_void=stopper.stop_void)
    job = Job(run, registered(run.record.name), time.monotonic())
    jobs.add([job])
    job.phase = JobPhase.RUNNING
    reporter.mark([job])
    reporter.start()
    assert reporter.close(20)
    assert job.is_cancelled


def test_auditor_leaves_the_slot_of_a_void_run_alone_while_a_worker_has_it() -> None:
    """Its body may go on for TIMEOUT_GRACE_SECONDS and longer: a second one would exceed the limit."""
    Gate.objects.create(name="g", limit=1)
    result = tasks.gated.enqueue("g")
    run = taken()
    closed_though_claimed(result)
    auditor = Reconciler(Broker())
    for _ in range(4):
        auditor.audit_gates(["g"])
    assert gates.audit("g") == (0, 0)
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("g")
    # The canceller and the worker die, so nobody releases the slot when the entry is gone.
    Broker().remove("default", [run.lease.id])
    auditor.audit_gates(["g"])
    auditor.audit_gates(["g"])
    assert gates.slots("g") == []


def test_task_that_is_cancelled_while_it_waits_at_its_gate_keeps_nobody_out(announced: Any) -> None:
    """Also when no leader looks at those that wait."""
    Gate.objects.create(name="g", limit=1)
    waiting = claimed()
    holder = tasks.gated.enqueue("g")
    TaskRecord.objects.filter(id=waiting.record.id).update(
        gate="g", state=TaskState.FAILED, reason=FailureReason.GATE_FULL, retry_at=timezone.now()
    )
    Broker().done("default", "w", [waiting.lease])
    assert lifecycle.retry_waiting(Broker(), [waiting.lease.id]).left == [waiting.lease.id]
    assert gates.waiters("g") == [waiting.lease.id]
    assert gates.look("g", 9).ids == []
    assert TaskRecord.objects.filter(id=waiting.record.id).cancel().cancelled == 1
    assert gates.waiters("g") == []
    holder.cancel()
    tasks.gated.enqueue("g")


@pytest.mark.parametrize("is_claimed", [False, True])
def test_retry_by_a_person_survives_the_late_removal_of_the_cancel_before(is_claimed: bool, requests: Any) -> None:
    """The canceller's process is slow after its commit; a person retries the task meanwhile, and it may even run."""
    result = tasks.gated.enqueue("g")
    runs: list[lifecycle.Run] = []

    def retry_meanwhile(name: str) -> None:
        if name == "close.committed":
            failpoints.disarm()
            lifecycle.retry([row(result).id], by_person=True)
            if is_claimed:
                # It was so slow that the leader has looked at what it held.
                assert expire_holds() == 1
                runs.append(taken_by("v"))

    failpoints.arm(retry_meanwhile)
    assert result.cancel() == "cancelled"
    assert requests() == []
    assert pending() == ([] if is_claimed else [result.id])
    assert [slot.id for slot in gates.slots("g")] == [result.id]
    assert finish(runs[0] if runs else taken_by("v"), "v") == []
    assert row(result).state == TaskState.SUCCEEDED
    assert gates.slots("g") == []


# --- what runs


def test_a_running_task_is_asked_to_stop_after_the_commit(requests: Any, redis_client: redis.Redis) -> None:
    """The row notes it in the transaction; then a field of its hash and a message on asynq's channel."""
    run = claimed()
    result = tasks.add.get_backend().get_result(run.lease.id)
    key = keys_of("default").task(run.lease.id)
    with transaction_of(TaskRecord):
        assert result.cancel("late") == "asked"
        assert requests() == []
    assert requests() == [run.lease.id]
    assert acl.unrestricted(redis_client).hget(key, "cancel") == b"1"
    first = row(run).cancel_requested_at
    assert (row(run).state, row(run).cancelled_by, row(run).fence) == (TaskState.RUNNING, "late", run.lease.fence)
    assert result.cancel("again") == "asked"
    assert (row(run).cancel_requested_at, row(run).cancelled_by) == (first, "late")
    assert requests() == [run.lease.id]
    assert finish(run) == []
    assert row(run).state == TaskState.SUCCEEDED
    assert row(run).cancel_requested_at == first


def test_no_hash_is_made_for_a_task_that_redis_does_not_know(redis_client: redis.Redis) -> None:
    """A hash without a message would be an odd entry."""
    assert task_entries.ask_to_stop(Broker(), "default", ["x"]) == ["missing"]
    assert task_entries.take_out(Broker(), "default", [("x", 1)]) == ["missing"]
    assert acl.unrestricted(redis_client).keys(f"{keys_of('default').base}*") == []


def test_new_run_does_not_inherit_the_request(redis_client: redis.Redis) -> None:
    """The archive keeps the hash of a cancelled task; a person retries it."""
    run = claimed()
    result = tasks.add.get_backend().get_result(run.lease.id)
    result.cancel()
    lifecycle.fail(run, ValueError("stopped"), "", timezone.now(), retry_at=None)
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])
    lifecycle.retry([row(run).id], by_person=True)
    again = taken_by("w")
    assert acl.unrestricted(redis_client).hget(keys_of("default").task(again.lease.id), "cancel") is None


def cut(run: lifecycle.Run) -> None:
    """Its process requeues it at its stop."""
    lifecycle.requeue(Broker(), "w", [run])


def lose(run: lifecycle.Run) -> None:
    """Its worker is killed."""
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed")


def blame(run: lifecycle.Run) -> None:
    """Its worker is killed, because of it."""
    guilty = lifecycle.Blame(named=frozenset({run.lease.id}))
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed", blame=guilty)


def forget(run: lifecycle.Run) -> None:
    """Neither Redis nor a worker knows it."""
    acl.unrestricted(Broker().client).flushdb()
    lifecycle.abandon(row(run), "no worker has a lease on it")


def fail(run: lifecycle.Run) -> None:
    """It fails before it notices the request, and would be retried."""
    lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=timezone.now())
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])


@pytest.mark.parametrize("act", [cut, lose, blame, fail], ids=lambda act: act.__name__)
def test_cancelled_task_is_never_retried_by_itself(act: Any) -> None:
    """Whatever ends its run: the next one that would begin, or bring it back, closes it instead."""
    run = claimed(gate="g", queue_limit=1)
    row(run)
    tasks.add.get_backend().get_result(run.lease.id).cancel("no more")
    act(run)
    lifecycle.retry_due(Broker(), "default", [run.lease.id])
    assert lifecycle.claim(Broker(), "default", "v", 5, "default").runs == []
    assert lifecycle.claim_suspect(Broker(), "default", "v:alone", "default").runs == []
    found = row(run)
    assert (found.state, found.reason, found.retry_at) == (TaskState.FAILED, FailureReason.CANCELLED, None)
    assert found.errors[-1]["message"] == "no more"
    assert gates.slots("g") == []
    assert pending() == []


def test_cancel_survives_a_redis_that_forgets_everything(own_redis: Any) -> None:
    """The row decides; neither the field nor the message is needed."""
    run = claimed()
    tasks.add.get_backend().get_result(run.lease.id).cancel()
    forget(run)
    assert row(run).reason == FailureReason.CANCELLED


def test_reconciler_asks_again_and_closes_what_waits(requests: Any) -> None:
    """A message may be lost, and Redis may forget everything: the row says what was asked for."""
    run = claimed()
    failed = claimed(gate="g", queue_limit=1)
    for each in (run, failed):
        tasks.add.get_backend().get_result(each.lease.id).cancel()
    fail(failed)
    late = tasks.add.using(expires=60).enqueue(1)
    TaskRecord.objects.filter(id=late.id).update(expires_at=timezone.now())
    requests()
    assert Reconciler(Broker()).quick_repairs().closed == 2
    assert requests() == [run.lease.id]
    assert (row(failed).reason, row(late).reason) == (FailureReason.CANCELLED, FailureReason.EXPIRED)
    assert Reconciler(Broker()).quick_repairs().closed == 0


class Died(BaseException):
    """Stands in for the death of a process at a failpoint."""


@pytest.mark.parametrize("point", ["close.rows_written", "cancel.rows_written", "close.committed", "close.taken_out"])
@pytest.mark.parametrize("phase", ["queued", "claimed", "running"])
def test_process_that_cancels_may_die_at_any_point(point: str, phase: str) -> None:
    """Before the commit nothing has happened; after it the workers and the leader finish what it began."""
    result = tasks.gated.enqueue("g")
    run = None if phase == "queued" else taken()
    if phase == "running" and run is not None:
        lifecycle.mark_running([run])

    def die(name: str) -> None:
        if name == point:
            raise Died

    failpoints.arm(die)
    try:
        result.cancel()
    except Died:
        pass
    finally:
        failpoints.disarm()
    found, is_held = row(result), phase == "queued"
    is_committed = point.startswith("close.") and point != "close.rows_written"
    if is_held and is_committed:
        assert found.state == TaskState.FAILED
        assert lifecycle.claim(Broker(), "default", "v", 5, "default").runs == []
        assert expire_holds() == int(point == "close.committed")
    elif is_held:
        assert found.state == TaskState.QUEUED
        wait_until(pending, "task that was given back")
    else:
        # Nothing is closed, so the points of `close` are not reached, except that after the commit.
        assert (found.cancel_requested_at is None) is (point == "cancel.rows_written")
        assert Reconciler(Broker()).quick_repairs().closed == 0
    if run is not None:
        assert finish(run) == []
    for _ in range(2):
        for again in lifecycle.claim(Broker(), "default", "v", 5, "default").runs:
            lifecycle.begin(again, "v", timezone.now())
            assert finish(again, "v") == []
        Reconciler(Broker()).audit_gates(["g"])
    final = TaskState.FAILED if is_committed and is_held else TaskState.SUCCEEDED
    assert row(result).state == final
    auditor = Reconciler(Broker())
    auditor.audit_gates(["g"])
    auditor.audit_gates(["g"])
    assert gates.slots("g") == []
    assert pending() == []


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a block in which Redis is unreachable."""

    @contextmanager
    def block() -> Iterator[None]:
        away = "redis://127.0.0.1:1/0"
        with monkeypatch.context() as patch:
            patch.setenv("ASYNCQ_TEST_REDIS_URL", away)
            with override_settings(CACHES={"default": {**settings.CACHES["default"], "LOCATION": away}}):
                yield

    return block


@pytest.mark.parametrize("closer", ["worker", "leader"])
def test_without_redis_the_row_is_noted_and_closed_later(
    closer: str, no_redis: Any, announced: Any, caplog: Any
) -> None:
    """Nobody knows whether a worker has it: who claims it next closes it, or the leader; it is announced once."""
    results = [tasks.add.enqueue(1), tasks.gated.enqueue("g")]
    announced.clear()
    with no_redis():
        assert [result.cancel() for result in results] == ["asked", "asked"]
        with pytest.raises(BrokerUnavailable):
            lifecycle.close_cancelled()
    assert "Redis cannot say whether 1 task may be running" in caplog.text
    assert {row(result).state for result in results} == {TaskState.QUEUED}
    if closer == "leader":
        assert lifecycle.close_cancelled() == 2
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert {row(result).reason for result in results} == {FailureReason.CANCELLED}
    assert gates.slots("g") == []
    assert sorted(announced) == sorted((result.id, TaskState.QUEUED, TaskState.FAILED) for result in results)


def test_cancel_after_redis_was_emptied_is_announced(requests: Any) -> None:
    """The row says QUEUED, a worker runs it, and Redis knows no entry: nobody else would ask the worker to stop."""
    tasks.add.enqueue(1)
    run = taken()
    acl.unrestricted(Broker().client).flushdb()
    assert requests() == []
    assert TaskRecord.objects.filter(id=run.record.id).cancel().asked == 1
    assert requests() == [run.lease.id]


def test_without_redis_each_change_is_announced_once(monkeypatch: pytest.MonkeyPatch, announced: Any) -> None:
    """By the cancel, or by the worker that claims the entry later."""
    results = [tasks.add.enqueue(1), tasks.gated.enqueue("g")]
    announced.clear()
    with monkeypatch.context() as patch:
        patch.setenv("ASYNCQ_TEST_REDIS_URL", "redis://127.0.0.1:1/0")
        with override_settings(CACHES={"default": {**settings.CACHES["default"], "LOCATION": "redis://127.0.0.1:1/0"}}):
            for result in results:
                result.cancel()
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert sorted(announced) == sorted((result.id, TaskState.QUEUED, TaskState.FAILED) for result in results)


def test_auditor_leaves_the_slot_of_a_void_run_until_it_is_over() -> None:
    """Its row is final, but its body may go on for a while: another one would exceed the limit."""
    result = tasks.gated.enqueue("g")
    run = taken()
    closed_though_claimed(result)
    auditor = Reconciler(Broker())
    for _ in range(3):
        auditor.audit_gates(["g"])
    assert [slot.id for slot in gates.slots("g")] == [run.lease.id]
    # Its worker has reported it, and died before it announced that.
    Broker().done("default", "w", [run.lease])
    for _ in range(2):
        auditor.audit_gates(["g"])
    assert gates.slots("g") == []


# --- waiting for the end of what was asked


class Canceller(threading.Thread):
    """Cancels a task in a thread of its own, and waits."""

    def __init__(self, cancel: Any) -> None:
        super().__init__()
        self.cancel = cancel
        self.word: Any = None
        self.start()

    def run(self) -> None:
        """Note the answer."""
        try:
            self.word = self.cancel()
        finally:
            connections.close_all()


@pytest.mark.parametrize("way", ["cancel", "acancel", "queryset", "inspector"])
@pytest.mark.parametrize("outcome", ["stopped", "succeeded"])
def test_wait_comes_back_when_what_was_asked_has_finished(way: str, outcome: str) -> None:
    """And says how it ended."""
    run = claimed()
    result = tasks.add.get_backend().get_result(run.lease.id)
    ways: dict[str, Any] = {
        "cancel": lambda: result.cancel(wait=20),
        "acancel": lambda: async_to_sync(result.acancel)(wait=timedelta(seconds=20)),
        "queryset": lambda: TaskRecord.objects.filter(id=result.id).cancel(wait=20),
        "inspector": lambda: Inspector().tasks.cancel([run.record.id], wait=20),
    }
    canceller = Canceller(ways[way])
    wait_until(lambda: row(run).cancel_requested_at, "cancel in the row")
    assert canceller.is_alive()
    if outcome == "succeeded":
        assert finish(run) == []
    else:
        lifecycle.fail(run, TaskCancelled("stopped"), "", timezone.now(), retry_at=None, is_cancelled=True)
        assert lifecycle.record_runs([run]) == []
    canceller.join(30)
    counts = (0, 0, 1) if outcome == "succeeded" else (1, 0, 0)
    word = "over" if outcome == "succeeded" else "cancelled"
    wanted: dict[str, Any] = {"queryset": counts, "inspector": CancelCounts(*counts)}
    assert canceller.word == wanted.get(way, word)


def test_wait_that_ends_too_soon_says_that_it_still_runs() -> None:
    """Also on the command line, which names it."""
    run = claimed()
    result = tasks.add.get_backend().get_result(run.lease.id)
    assert result.cancel(wait=0) == "asked"
    assert async_to_sync(result.acancel)(wait=0.05) == "asked"
    with pytest.raises(CommandError, match=f"1 task still running or with a worker: {run.lease.id} tests.tasks.add"):
        call_command("asyncq", "tasks", "cancel", run.lease.id, "--wait", "0s", stdout=io.StringIO())
    assert finish(run) == []
    waiting = tasks.add.enqueue(1)
    call_command("asyncq", "tasks", "cancel", waiting.id, "--wait", "0s", stdout=io.StringIO())


def test_wait_that_cannot_end_is_refused_before_anything_is_written() -> None:
    """Workers see the cancel after the commit."""
    result = tasks.add.enqueue(1)
    with transaction_of(TaskRecord):
        for wait in (1, timedelta(0)):
            with pytest.raises(InvalidOption, match="in a transaction"):
                result.cancel(wait=wait)
    for wrong in (-1, "5", True):
        with pytest.raises(InvalidOption, match="wait="):
            result.cancel(wait=wrong)
    assert row(result).cancel_requested_at is None
    assert pending() == [result.id]


# --- deletion


def test_worker_of_a_deleted_row_is_asked_to_stop(requests: Any) -> None:
    """Nothing will record what its function makes of it."""
    run, done = claimed(), claimed()
    finish(done)
    TaskRecord.objects.all().delete()
    assert requests() == [run.lease.id]
    assert finish(run) == [run]
    assert unknown([run.lease.id]) == [run.lease.id]
    assert not TaskRecord.objects.exists()


def test_run_that_was_cancelled_before_its_function_was_called_is_no_attempt() -> None:
    """It was claimed, and waited for a slot."""
    run = claimed()
    error = Job(run, registered(run.record.name), time.monotonic()).cancelled(had_begun=False)
    lifecycle.fail(run, error, "", timezone.now(), retry_at=None, is_cancelled=True)
    assert lifecycle.record_runs([run]) == []
    found = row(run)
    assert (found.state, found.reason, found.attempt) == (TaskState.FAILED, FailureReason.CANCELLED, 0)
    assert (found.started_at, found.last_attempted_at, found.worker_ids) == (None, None, [])
    assert found.errors[0]["message"] == "the task was cancelled before it began"
