"""Followers: rows that wait behind the task that holds their key, and move up when it holds the key no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import following
from django_asyncq.lifecycle.following import follower_slot
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.observe.counts import queue_stats

from .. import tasks
from ..clock import uuid7_at
from ..redis_state import unknown
from ..runs import taken_by

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

KEY = "k" * 64


def pushed_holder(key: str = KEY, **fields: Any) -> TaskRecord:
    """A holder that Redis knows."""
    values = {"name": "tests.tasks.add", "args": [1], "unique_key": key, "unique_slot": key, **fields}
    record = TaskRecord.objects.create(**values)
    lifecycle.dispatch([record])
    return record


def follower_of(holder: TaskRecord, **fields: Any) -> TaskRecord:
    key = holder.unique_key
    values = {"name": "tests.tasks.add", "args": [2], "unique_key": key, "unique_slot": follower_slot(key), **fields}
    return TaskRecord.objects.create(after_id=holder.id, **values)


def has_moved_up(record: TaskRecord) -> bool:
    record.refresh_from_db()
    return (record.unique_slot, record.after_id, record.state) == (record.unique_key, None, TaskState.QUEUED)


def is_pushed(record: TaskRecord) -> bool:
    return unknown([str(record.id)]) == []


def run_once(end: Callable[[lifecycle.Run], None]) -> None:
    run = taken_by("w")
    end(run)
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run], lost)


def succeeds(run: lifecycle.Run) -> None:
    lifecycle.succeed(run, None, timezone.now())


def fails(run: lifecycle.Run) -> None:
    lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=None)


def fails_and_is_retried(run: lifecycle.Run) -> None:
    lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=timezone.now() + timedelta(hours=1))


@pytest.mark.parametrize("end", [succeeds, fails])
def test_a_follower_moves_up_with_the_write_that_finishes_its_holder(end: Any) -> None:
    """And is pushed after it: nobody else has to look."""
    follower = follower_of(pushed_holder())
    run_once(end)
    assert has_moved_up(follower)
    assert is_pushed(follower)
    assert taken_by("v").record.id == follower.id


def test_a_follower_waits_for_the_retries_of_its_holder() -> None:
    """RETRYING holds the slot."""
    follower = follower_of(pushed_holder())
    run_once(fails_and_is_retried)
    assert not has_moved_up(follower)
    assert not is_pushed(follower)


def test_a_follower_is_never_pushed_while_it_waits() -> None:
    """Not by its own commit, by a sweep, or by a rebuild after Redis lost its memory."""
    then = timezone.now() - timedelta(minutes=1)
    follower = follower_of(pushed_holder(), id=uuid7_at(then), enqueued_at=then)
    lifecycle.dispatch([follower])
    reconciler = Reconciler(Broker())
    reconciler.quick_repairs()
    reconciler.sweep()
    reconciler.rebuild()
    assert not is_pushed(follower)
    assert not has_moved_up(follower)


def test_a_follower_that_has_lost_its_slot_gets_none_above_the_limit() -> None:
    """The auditor would give it one at a full gate; it asks when it moves up, and then waits at its gate."""
    Gate.objects.create(name="g", limit=2)
    holder = pushed_holder(gate="g")
    follower = follower_of(holder, gate="g")
    assert {slot.id for slot in gates.slots("g")} == {str(holder.id)}
    gates.confirm([follower])
    assert gates.audit("g") == (0, 0)
    # As after a commit a minute late: its slot has expired, and another task has it.
    gates.release_ids("g", [str(follower.id)])
    other = tasks.gated.enqueue("g")
    assert gates.audit("g") == (0, 0)
    assert {slot.id for slot in gates.slots("g")} == {str(holder.id), other.id}
    TaskRecord.objects.filter(id=holder.id).update(unique_slot=None)
    assert lifecycle.move_up_waiting() == 1
    follower.refresh_from_db()
    assert (follower.state, follower.reason) == (TaskState.FAILED, FailureReason.GATE_FULL)
    assert gates.waiters("g") == [str(follower.id)]


def test_the_holders_deletion_lets_its_follower_move_up() -> None:
    """After the commit of the deletion."""
    holder = pushed_holder()
    follower = follower_of(holder)
    with transaction.atomic():
        holder.delete()
        assert not is_pushed(follower)
    assert has_moved_up(follower)
    assert is_pushed(follower)


def test_the_reconciler_finds_a_follower_whose_holder_is_gone() -> None:
    """Deleted by SQL, or by a process that died before it could look."""
    holder = pushed_holder()
    follower, other = follower_of(holder), follower_of(pushed_holder("l" * 64))
    TaskRecord.objects.filter(id=holder.id)._raw_delete("default")
    Reconciler(Broker()).quick_repairs()
    assert has_moved_up(follower)
    assert is_pushed(follower)
    assert not has_moved_up(other)


def test_a_recovered_holder_keeps_its_follower_waiting_and_one_that_is_closed_does_not(settings: Any) -> None:
    """A crash requeues the holder, which holds its key; after too many it is FAILED."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_CRASHES": 2}
    follower = follower_of(pushed_holder())
    for worker_id, moved in (("w", False), ("v-alone", True)):
        run = taken_by(worker_id)
        blame = lifecycle.Blame(named=frozenset({run.lease.id}))
        lifecycle.recover(Broker(), "default", worker_id, [run.lease], reason="it died", blame=blame)
        assert has_moved_up(follower) is moved
    assert is_pushed(follower)


def test_an_abandoned_holder_that_is_closed_lets_its_follower_move_up(settings: Any) -> None:
    """Nobody runs it, and it has crashed too often."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_CRASHES": 1}
    now = timezone.now()
    holder = pushed_holder(state=TaskState.RUNNING, fence=1, worker_ids=["w-alone"], started_at=now, suspicion=1)
    follower = follower_of(holder)
    assert lifecycle.abandon(holder, "gone")
    holder.refresh_from_db()
    assert holder.is_final
    assert has_moved_up(follower)


def test_a_task_that_is_unique_until_it_starts_lets_its_follower_move_up_then() -> None:
    """With the write of RUNNING."""
    follower = follower_of(pushed_holder(unique_until_start=True))
    taken_by("w")
    assert has_moved_up(follower)
    assert is_pushed(follower)


def test_a_refused_write_moves_nobody_up() -> None:
    """The outcome of a run that lost its lease changes nothing."""
    holder = pushed_holder()
    follower = follower_of(holder)
    run = taken_by("w")
    TaskRecord.objects.filter(id=holder.id).update(fence=run.lease.fence + 5)
    succeeds(run)
    assert lifecycle.record_runs([run]) == [run]
    assert not has_moved_up(follower)


def test_a_repeated_write_does_not_take_the_key_from_who_holds_it_now() -> None:
    """The first reply was lost: the follower holds the key already, and another task follows it."""
    follower = follower_of(pushed_holder())
    run = taken_by("w")
    succeeds(run)
    assert lifecycle.record_runs([run]) == []
    assert has_moved_up(follower)
    second = follower_of(follower)
    assert lifecycle.record_runs([run]) == []
    assert not has_moved_up(second)
    assert has_moved_up(follower)


def test_a_rolled_back_completion_moves_nobody_up() -> None:
    """Freeing the key and moving up are one commit with the effects of the task."""
    follower = follower_of(pushed_holder())
    run = taken_by("w")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert lifecycle.complete(run, None, timezone.now())
        raise ZeroDivisionError
    assert not has_moved_up(follower)
    assert not is_pushed(follower)
    with transaction.atomic():
        assert lifecycle.complete(run, None, timezone.now())
    assert has_moved_up(follower)
    assert is_pushed(follower)


def test_a_throttled_holder_is_followed_when_its_time_is_over() -> None:
    """The reconciler frees it; the follower's own time counts from then on."""
    now = timezone.now()
    holder = pushed_holder(unique_until=now + timedelta(hours=1))
    follower = follower_of(holder, unique_until=now + timedelta(hours=1), enqueued_at=now)
    run_once(succeeds)
    assert lifecycle.move_up_waiting() == 0
    TaskRecord.objects.filter(id=holder.id).update(unique_until=timezone.now() - timedelta(seconds=1))
    Reconciler(Broker()).quick_repairs()
    assert has_moved_up(follower)
    assert is_pushed(follower)
    assert follower.unique_until is not None
    assert follower.unique_until - timezone.now() > timedelta(minutes=59)
    holder.refresh_from_db()
    assert holder.unique_slot is None


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
def test_a_producer_that_changes_the_follower_does_not_hold_up_the_report_of_its_holder() -> None:
    """The follower is left alone; the producer's commit, or after its rollback the reconciler, moves it up."""
    follower = follower_of(pushed_holder())
    is_locked, may_end = threading.Event(), threading.Event()

    def change() -> None:
        try:
            with transaction.atomic():
                TaskRecord.objects.filter(id=follower.id).update(args=[3])
                is_locked.set()
                assert may_end.wait(20)
        finally:
            connection.close()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert is_locked.wait(20)
        run_once(succeeds)
        assert not has_moved_up(follower)
    finally:
        may_end.set()
        thread.join()
    assert lifecycle.move_up_waiting() == 1
    assert has_moved_up(follower)
    assert is_pushed(follower)


def test_plain_and_unique_tasks_without_a_follower_cost_little(django_assert_num_queries: Any) -> None:
    """A batch that frees no slot is one UPDATE; one that frees some looks for followers once."""
    TaskRecord.objects.create(name="tests.tasks.add")
    lifecycle.dispatch(TaskRecord.objects.all())
    run = claimed_run()
    # MySQL cannot return what an UPDATE changed.
    more = connection.vendor == "mysql"
    with django_assert_num_queries(1 + more):
        assert lifecycle.record_runs([run]) == []
    pushed_holder()
    run = claimed_run()
    # BEGIN, UPDATE, SELECT, COMMIT.
    with django_assert_num_queries(4 + more):
        assert lifecycle.record_runs([run]) == []


def claimed_run() -> lifecycle.Run:
    run = taken_by("w")
    succeeds(run)
    return run


def test_the_slot_of_a_follower_is_none_that_a_key_can_have() -> None:
    """It is a digest of its own, of the length of the others."""
    assert len(follower_slot(KEY)) == 64
    assert follower_slot(KEY) != follower_slot("l" * 64)
    assert following.follower_slot(follower_slot(KEY)) != KEY


def test_a_follower_is_no_work_that_a_burst_of_workers_waits_for() -> None:
    """Its holder is; and a throttle may last for days. Nor does it make its queue look slow."""
    holder = pushed_holder(unique_until=timezone.now() + timedelta(days=1))
    then = timezone.now() - timedelta(hours=1)
    follower_of(holder, id=uuid7_at(then), enqueued_at=then)
    service = MaintenanceService([], single_instance=False)
    assert not service.has_no_work("default")
    run_once(succeeds)
    assert service.has_no_work("default")
    (stats,) = queue_stats()
    assert (stats.queued, stats.oldest_waiting_seconds) == (1, None)
