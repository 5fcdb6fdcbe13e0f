"""What the reconciler mends: each repair by itself, then a fleet after Redis was emptied."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import conf, gate, lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.reconciler import Reconciler

from . import tasks
from .workers import history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def reconciler() -> Reconciler:
    """A reconciler over this test's keys."""
    return Reconciler(Broker())


def old(**fields: Any) -> TaskRecord:
    """A row that was enqueued a minute ago and never pushed."""
    return TaskRecord.objects.create(
        name="tests.tasks.add", args=[1], enqueued_at=timezone.now() - timedelta(minutes=1), **fields
    )


def claimed(worker_id: str = "w") -> lifecycle.Run:
    """A task that a worker has taken and whose row says so."""
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    lifecycle.begin(run, worker_id, timezone.now())
    lifecycle.mark_running([run])
    return run


def test_pushes_rows_that_were_never_pushed(reconciler: Reconciler) -> None:
    """A crash between COMMIT and push; a row that is there already is left alone."""
    lost, there = old(), old()
    lifecycle.dispatch([there])
    assert reconciler.push_missing(young=True) == 1
    assert Broker().missing("default", [str(lost.id), str(there.id)]) == []
    assert reconciler.push_missing(young=False) == 0


def test_leaves_rows_of_the_last_seconds_to_their_process(reconciler: Reconciler) -> None:
    """A fresh row is still being pushed by who enqueued it."""
    TaskRecord.objects.create(name="tests.tasks.add")
    assert reconciler.push_missing(young=True) == 0


def test_pushing_a_gated_row_takes_its_slot(reconciler: Reconciler) -> None:
    """A pushed task is counted by its gate like any other."""
    record = old(gate="g", queue_limit=1)
    reconciler.push_missing(young=False)
    assert [slot.id for slot in gate.slots("g")] == [str(record.id)]


def test_hands_back_what_a_lost_host_held(reconciler: Reconciler, settings: Any) -> None:
    """The lease is over: 1 → 0 with a crash counted and no attempt used; the lost worker is refused afterwards."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    run = claimed()
    wait_until(lambda: Broker().expired("default"), "an expired lease")
    assert reconciler.recover_expired() == 1
    record = TaskRecord.objects.get()
    assert (record.state, record.attempt, record.crash_count) == (TaskState.QUEUED, 0, 1)
    assert record.errors[0]["exception"].endswith("WorkerLost")
    lifecycle.succeed(run, "late", timezone.now())
    assert lifecycle.record_runs([run]) == [run]
    assert Broker().done("default", "w", [run.lease]) == ["stale"]
    (again,) = lifecycle.claim(Broker(), "default", "other", 1, "default").runs
    assert again.lease.fence > run.lease.fence


def test_all_that_a_lost_host_held_comes_back_in_one_pass(reconciler: Reconciler, settings: Any) -> None:
    """More than one script call lists, so that a large host is not handed back bit by bit."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    tasks.add.enqueue_many([(number,) for number in range(250)])
    for _ in range(2):
        lifecycle.claim(Broker(), "default", "w", 200, "default")
    wait_until(lambda: len(Broker().expired("default", 300)) == 250, "expired leases")
    assert reconciler.recover_expired() == 250
    assert Broker().held("default", "w") == []


def test_running_task_without_lease_is_queued_again(reconciler: Reconciler) -> None:
    """Neither Redis nor a worker knows the run: after a while the row goes back to 0, with a higher fence."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    TaskRecord.objects.update(last_attempted_at=timezone.now() - timedelta(minutes=5))
    assert reconciler.recover_unleased() == 0  # Redis may have been emptied a moment ago
    Broker().client.set(f"{conf.current().key_prefix}:alive", int(time.time()) - 3600)
    assert reconciler.recover_unleased() == 1
    (again,) = lifecycle.claim(Broker(), "default", "other", 1, "default").runs
    assert again.lease.fence > run.lease.fence
    assert TaskRecord.objects.get().crash_count == 1


def test_waiting_retries_return_to_the_retry_set(reconciler: Reconciler) -> None:
    """A row in 3 with `retry_at` is tried again although Redis forgot it."""
    record = old(state=TaskState.FAILED, retry_at=timezone.now() - timedelta(seconds=1))
    assert reconciler.park_missing() == 1
    assert Broker().client.zrange(QueueKeys("default").retry, 0, -1) == [str(record.id).encode()]
    assert lifecycle.retry_due(Broker(), "default", [str(record.id)]) == 1
    record.refresh_from_db()
    assert (record.state, record.retry_at) == (TaskState.QUEUED, None)


def test_running_task_is_reasserted_by_its_supervisor(redis_client: Any) -> None:
    """After Redis was emptied the run keeps its row and its fence, and has its lease back."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 1
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 0
    assert Broker().held("default", "w") == [run.lease]
    assert Broker().extend("default", "w", 5).kept == 1


def test_final_row_is_only_acknowledged_by_its_next_taker() -> None:
    """A worker that died between the outcome and the acknowledgement: nothing runs again."""
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone") == 0
    assert Broker().missing("default", [run.lease.id]) == [run.lease.id]
    assert lifecycle.claim(Broker(), "default", "other", 1, "default").runs == []


def test_repeating_a_write_after_a_lost_reply_is_accepted_once() -> None:
    """The same outcome again is no conflict; that of a stale fence is."""
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert lifecycle.record_runs([run]) == []
    stale = lifecycle.Run(TaskRecord.objects.get(), Lease(run.lease.id, run.lease.fence - 1))
    stale.record.fence -= 1
    assert lifecycle.record_runs([stale]) == [stale]


def test_task_of_another_alias_is_put_off() -> None:
    """A worker of one TASKS alias never runs another alias's tasks."""
    tasks.add.enqueue(1)
    TaskRecord.objects.update(backend="other")
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert Broker().client.zcard(QueueKeys("default").scheduled) == 1


def test_rebuild_that_was_interrupted_is_taken_up_at_the_next_tick(
    reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis fails once more in the middle of the rebuild: the sweep is not put off by a whole interval."""
    reconciler.tick(1000.0)
    Broker().client.delete(f"{conf.current().key_prefix}:alive")
    lost = old()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(hours=1))

    def away() -> int:
        raise BrokerUnavailable("gone again")

    with monkeypatch.context() as patched:
        patched.setattr(reconciler, "recover_expired", away)
        with pytest.raises(BrokerUnavailable):
            reconciler.tick(1001.0)
    assert reconciler.tick(1002.0).pushed == 1
    assert Broker().missing("default", [str(lost.id)]) == []


def test_fleet_goes_on_after_redis_was_killed_and_emptied(
    own_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued, running, delayed and retrying tasks all end, and each ran once: no restart, nothing lost."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    running = [tasks.nap.enqueue(6.0) for _ in range(2)]
    with workers(tmp_path, "--concurrency", "2", "--queues", "default"):
        wait_until(lambda: TaskRecord.objects.running().count() == 2, "running tasks")
        tasks.nap.enqueue_many([(0.01,)] * 20)
        tasks.nap.using(run_after=timedelta(seconds=3)).enqueue(0.01)
        own_redis.kill()
        tasks.nap.enqueue(0.01)
        own_redis.restart()
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 24, "all succeeded", 60)
    begun = [line["id"] for line in history(path) if line["event"] == "begin"]
    assert len(begun) == len(set(begun)) == 24
    assert not TaskRecord.objects.filter(crash_count__gt=0).exists()
    assert {record.attempt for record in TaskRecord.objects.filter(id__in=[result.id for result in running])} == {1}
