"""The reconciler's repairs, each by itself, and a fleet after Redis was emptied."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

from django_asyncq import conf, gates, lifecycle
from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, alive_key, own_queues_key, reachability_key
from django_asyncq.core.names import uuid7
from django_asyncq.exceptions import BrokerUnavailable, GateUnavailable
from django_asyncq.fleet.reconciler import PAUSE_FACTOR, Reconciler
from django_asyncq.fleet.repairs import Repairs
from django_asyncq.models import FailureReason, Gate, Suspicion, TaskRecord, TaskState
from django_asyncq.storage.routing import rows_of
from django_asyncq.storage.walking import EVERY, QUEUED, TO_RETRY, Way, pages

from .. import tasks
from ..clock import uuid7_at
from ..redis_state import unknown
from ..runs import claimed, taken_by
from ..workers import history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def reconciler() -> Reconciler:
    """A reconciler over this test's keys."""
    return Reconciler(Broker())


def old(*, minutes: float = 1, **fields: Any) -> TaskRecord:
    """A row that was enqueued some minutes ago and never pushed."""
    then = timezone.now() - timedelta(minutes=minutes)
    return TaskRecord.objects.create(id=uuid7_at(then), name="tests.tasks.add", args=[1], enqueued_at=then, **fields)


def test_pushes_rows_that_were_never_pushed(reconciler: Reconciler) -> None:
    """A process crashed between commit and push. A row that Redis knows already is not pushed again."""
    lost, there = old(), old()
    lifecycle.dispatch([there])
    assert reconciler.push_missing(young=True) == 1
    assert unknown([str(lost.id), str(there.id)]) == []
    assert reconciler.push_missing(young=False) == 0


def test_rows_of_the_last_seconds_are_left_to_the_process_that_enqueued_them(reconciler: Reconciler) -> None:
    """That process may still be pushing them."""
    TaskRecord.objects.create(name="tests.tasks.add")
    assert reconciler.push_missing(young=True) == 0


def test_rows_of_the_last_seconds_are_pushed_after_redis_lost_its_memory(reconciler: Reconciler) -> None:
    """The first round afterwards pushes even a row that was pushed just before the loss."""
    reconciler.tick(1000.0)
    result = tasks.add.enqueue(1)
    reconciler.broker.client.flushdb()
    assert reconciler.tick(2000.0) == Repairs(pushed=1)
    assert unknown([result.id]) == []


def test_pushing_a_gated_row_acquires_its_slot(reconciler: Reconciler) -> None:
    """The gate counts a task that the reconciler pushed like any other."""
    record = old(gate="g", queue_limit=1)
    reconciler.push_missing(young=False)
    assert [slot.id for slot in gates.slots("g")] == [str(record.id)]


def test_tasks_of_a_lost_host_are_requeued(reconciler: Reconciler, settings: Any) -> None:
    """The lease expired: RUNNING to QUEUED, no crash and no attempt counted. The lost worker is refused."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    run = claimed()
    wait_until(lambda: Broker().expired("default"), "an expired lease")
    assert reconciler.recover_expired() == 1
    record = TaskRecord.objects.get()
    assert (record.state, record.attempt, record.crash_count) == (TaskState.QUEUED, 0, 0)
    assert record.suspicion == Suspicion.LOST
    assert record.errors[0]["exception"].endswith("WorkerLost")
    lifecycle.succeed(run, "late", timezone.now())
    assert lifecycle.record_runs([run]) == [run]
    assert Broker().done("default", "w", [run.lease]) == ["stale"]
    again = taken_by("other")
    assert again.lease.fence > run.lease.fence


def test_all_tasks_of_a_lost_host_are_requeued_in_one_round(reconciler: Reconciler, settings: Any) -> None:
    """Even if it held more tasks than one script call lists."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    tasks.add.enqueue_many([(number,) for number in range(250)])
    for _ in range(2):
        lifecycle.claim(Broker(), "default", "w", 200, "default")
    wait_until(lambda: len(Broker().expired("default", 300)) == 250, "expired leases")
    assert reconciler.recover_expired() == 250
    assert Broker().held("default", "w") == []


def test_running_task_that_redis_does_not_know_is_requeued(reconciler: Reconciler) -> None:
    """Neither Redis nor a worker knows the run: after a while the row is QUEUED again, with a higher fence."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    TaskRecord.objects.update(last_attempted_at=timezone.now() - timedelta(minutes=5))
    assert reconciler.sweep().requeued == 0  # Redis may have been emptied a moment ago
    Broker().client.set(f"{conf.current().key_prefix}:alive", int(time.time()) - 3600)
    assert reconciler.sweep().requeued == 1
    again = taken_by("other")
    assert again.lease.fence > run.lease.fence
    assert (again.record.crash_count, again.record.suspicion) == (0, Suspicion.LOST)


def test_retrying_rows_return_to_the_retry_set(reconciler: Reconciler) -> None:
    """A RETRYING row is retried although Redis forgot it."""
    record = old(state=TaskState.FAILED, reason=FailureReason.EXCEPTION, retry_at=timezone.now() - timedelta(seconds=1))
    assert reconciler.sweep().parked == 1
    assert Broker().client.zrange(QueueKeys("default").retry, 0, -1) == [str(record.id).encode()]
    assert lifecycle.retry_due(Broker(), "default", [str(record.id)]) == 1
    record.refresh_from_db()
    assert (record.state, record.retry_at) == (TaskState.QUEUED, None)


def test_a_finished_row_is_acknowledged_and_not_run_again() -> None:
    """Its worker died after it recorded the outcome and before it acknowledged it."""
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone") == 0
    assert unknown([run.lease.id]) == [run.lease.id]
    assert lifecycle.claim(Broker(), "default", "other", 1, "default").runs == []


def test_an_outcome_that_is_recorded_twice_is_accepted() -> None:
    """A reply may be lost, so the same outcome again is no conflict. An outcome with a stale fence is."""
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert lifecycle.record_runs([run]) == []
    stale = lifecycle.Run(TaskRecord.objects.get(), Lease(run.lease.id, run.lease.fence - 1))
    stale.record.fence -= 1
    assert lifecycle.record_runs([stale]) == [stale]


def test_task_of_another_alias_is_postponed(settings: Any) -> None:
    """A worker of one TASKS alias never runs another alias's tasks, where both have one prefix."""
    backend, prefix = settings.TASKS["default"], settings.ASYNCQ["KEY_PREFIX"]
    settings.TASKS = {"default": backend, "other": {**backend, "OPTIONS": {"prefix": prefix}}}
    tasks.add.enqueue(1)
    TaskRecord.objects.update(backend="other")
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert Broker().client.zcard(QueueKeys("default").scheduled) == 1


def test_a_running_task_whose_lease_was_evicted_goes_on(reconciler: Reconciler) -> None:
    """It gets a new lease. The live worker's outcome is accepted, and nothing runs twice."""
    run = claimed()
    Broker().client.delete(QueueKeys("default").lease, QueueKeys("default").held("w"))
    assert reconciler.sweep() == Repairs(leased=1)
    assert reconciler.sweep() == Repairs()
    assert Broker().extend("default", ["w"], 5)[0].kept == 1
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert Broker().done("default", "w", [run.lease]) == ["done"]


def test_the_task_of_a_lost_worker_whose_lease_was_evicted_is_requeued(reconciler: Reconciler, settings: Any) -> None:
    """It gets a lease, which expires, and is recovered."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    claimed()
    Broker().client.delete(QueueKeys("default").lease, QueueKeys("default").held("w"))
    assert reconciler.sweep().leased == 1
    # As the remaining supervisors do; otherwise it would count as an outage.
    wait_until(lambda: Broker().reachability(9) and Broker().expired("default"), "an expired lease")
    assert reconciler.quick_repairs().recovered == 1
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_tasks_whose_hash_was_evicted_run_once(reconciler: Reconciler) -> None:
    """The id is removed from the list before the row is pushed again, so the list does not have it twice."""
    tasks.add.enqueue_many([(number,) for number in range(3)])
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(hours=1))
    keys = QueueKeys("default")
    for id in TaskRecord.objects.values_list("id", flat=True):
        Broker().client.delete(keys.task(str(id)))
    assert reconciler.sweep() == Repairs(strays=3, pushed=3)
    assert Broker().client.llen(keys.pending) == 3
    assert len(lifecycle.claim(Broker(), "default", "w", 9, "default").runs) == 3


def test_tasks_whose_list_was_evicted_return_to_their_places(reconciler: Reconciler) -> None:
    """Pending, with a priority, delayed or RETRYING: all are back where they were."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=7).enqueue(2)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(3)
    waits = old(state=TaskState.FAILED, reason=FailureReason.EXCEPTION, retry_at=timezone.now() + timedelta(hours=1))
    reconciler.sweep()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(hours=1))
    keys = QueueKeys("default")
    Broker().client.delete(keys.pending, keys.priority, keys.scheduled, keys.retry)
    assert reconciler.sweep() == Repairs(orphans=4, pushed=1, parked=1)
    assert reconciler.sweep() == Repairs()
    sizes = Inspection().sizes("default")
    assert sizes == {"pending": 2, "active": 0, "scheduled": 1, "retry": 1, "archived": 0}
    assert Broker().client.zrange(keys.retry, 0, -1) == [str(waits.id).encode()]
    (first, _) = lifecycle.claim(Broker(), "default", "w", 9, "default").runs
    assert first.record.priority == 7


def test_tasks_of_go_programs_are_not_changed(reconciler: Reconciler) -> None:
    """No repair removes a task without a row, whatever list it is in. Only an id without a hash is removed."""
    broker, keys = Broker(), QueueKeys("default")
    broker.enqueue("default", [Entry("go-pending", b"m"), Entry("go-astray", b"m")])
    broker.schedule("default", [Entry(str(uuid7()), b"m", due_at=2e9)])
    broker.register_queue("default")
    client = broker.client
    client.lrem(keys.pending, 0, "go-astray")
    client.hset(keys.task("go-active"), mapping={"msg": "m", "state": "active"})
    client.hset(keys.task("go-trimmed"), mapping={"msg": "m", "state": "archived"})
    client.hset(keys.task("go-result"), "result", "r")
    client.lpush(keys.active, "go-active")
    client.lpush(keys.pending, "no-task")
    everything = set(client.scan_iter(f"{keys.base}t:*"))
    assert reconciler.sweep() == Repairs(strays=1)
    assert set(client.scan_iter(f"{keys.base}t:*")) == everything
    assert client.lrange(keys.pending, 0, -1) == [b"go-pending"]
    assert client.lrange(keys.active, 0, -1) == [b"go-active"]
    assert client.zcard(keys.scheduled) == 1


def test_entries_of_finished_rows_are_removed(reconciler: Reconciler) -> None:
    """Pending, with a priority or delayed. Not those of the last seconds, which their own process may still remove."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=7).enqueue(2)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(3)
    tasks.add.enqueue(4)
    ended = {"state": TaskState.SUCCEEDED, "finished_at": timezone.now()}
    TaskRecord.objects.exclude(args=[4]).update(**ended)
    assert reconciler.sweep() == Repairs()
    TaskRecord.objects.exclude(args=[4]).update(finished_at=timezone.now() - timedelta(minutes=1))
    assert reconciler.sweep() == Repairs(discarded=3)
    assert Inspection().sizes("default") == {"pending": 1, "active": 0, "scheduled": 0, "retry": 0, "archived": 0}
    assert len(list(Broker().client.scan_iter(f"{QueueKeys('default').task_prefix}*"))) == 1


@pytest.mark.parametrize("place", ["retry", "archived"])
def test_running_row_that_a_go_recoverer_set_aside_is_requeued(reconciler: Reconciler, place: str) -> None:
    """A Go server moves tasks without a lease to retry or archived; the row would stay RUNNING for ever."""
    run = claimed()
    broker, keys = Broker(), QueueKeys("default")
    broker.client.delete(keys.active, keys.lease, keys.held("w"))
    broker.client.hset(keys.task(run.lease.id), "state", place)
    broker.client.zadd(getattr(keys, place), {run.lease.id: 2e9})
    broker.mark_alive()
    broker.client.set(f"{conf.current().key_prefix}:alive", int(time.time()) - 3600)
    assert reconciler.sweep() == Repairs()
    TaskRecord.objects.update(last_attempted_at=timezone.now() - timedelta(minutes=5))
    assert reconciler.sweep() == Repairs(requeued=1)
    assert taken_by("other").lease.fence > run.lease.fence


def test_of_two_processes_that_abandon_a_run_one_succeeds(reconciler: Reconciler) -> None:
    """Both have read the row. The loss is recorded once."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    first, second = TaskRecord.objects.get(), TaskRecord.objects.get()
    assert lifecycle.abandon(first, "gone")
    assert not lifecycle.abandon(second, "gone")
    assert [error["message"] for error in TaskRecord.objects.get().errors] == ["gone"]
    assert Broker().client.llen(QueueKeys("default").pending) == 1


def test_stale_claims_of_dead_workers_are_removed(reconciler: Reconciler) -> None:
    """Another process has recovered the task without removing the claim."""
    run = claimed()
    Broker().client.hset(QueueKeys("default").held("gone"), run.lease.id, run.lease.fence - 1)
    assert reconciler.sweep() == Repairs(released=1)
    assert Broker().held("default", "w") == [run.lease]


def test_slots_without_a_task_are_removed_when_they_are_seen_twice(reconciler: Reconciler, caplog: Any) -> None:
    """A worker releases its slot a moment after it recorded the outcome. The drift of each gate is logged."""
    stranger = TaskRecord(name="x", gate="g", queue_limit=5)
    Gate.objects.create(name="g", limit=5)
    gates.acquire([stranger])
    gates.confirm([stranger])
    assert reconciler.sweep() == Repairs()
    assert reconciler.quick_repairs() == Repairs(slots_removed=1)
    assert reconciler.quick_repairs() == Repairs()
    assert "gate g: slots added: 0, slots removed: 1" in caplog.text


def test_a_task_whose_gate_has_no_limit_any_more_is_pushed(reconciler: Reconciler) -> None:
    """It needs no slot, and does not stop the others."""
    for gate_name in ("nowhere", ""):
        old(gate=gate_name)
    assert reconciler.push_missing(young=False) == 2


def test_a_failed_push_ends_the_sweep(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep is due again at once, so no row waits for the next one."""
    reconciler.tick(1000.0)
    old(gate="g", queue_limit=1)

    def away(records: Any) -> None:
        raise GateUnavailable("g")

    with monkeypatch.context() as patched:
        patched.setattr(gates, "confirm", away)
        with pytest.raises(BrokerUnavailable):
            reconciler.tick(1000.0 + conf.SWEEP_SECONDS)
    assert reconciler.tick(1001.0 + conf.SWEEP_SECONDS).pushed == 1


def test_a_long_sweep_is_followed_by_a_longer_pause(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise sweeps over a long backlog would follow each other without a pause and slow the workers."""
    sweeps: list[float] = []
    clock = itertools.count(0.0, 2 * conf.SWEEP_SECONDS / PAUSE_FACTOR)  # later by this much at each call

    def sweep_steps(*, is_rebuild: bool = False) -> Iterator[Repairs]:
        sweeps.append(now)
        yield from ()

    monkeypatch.setattr(reconciler, "sweep_steps", sweep_steps)
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.fleet.repairs.time", SimpleNamespace(monotonic=lambda: next(clock)))
        for now in (1000.0, 1000.0 + 1.5 * conf.SWEEP_SECONDS, 1000.0 + 2 * conf.SWEEP_SECONDS):
            reconciler.tick(now)
    assert sweeps == [1000.0, 1000.0 + 2 * conf.SWEEP_SECONDS]


@pytest.mark.parametrize(
    ("known", "pages_by_tick"),
    [
        ("seen", [2] * 11),
        ("marked by another", [8, 8, 4, 2, 2]),
        ("no", [8, 8, 4, 2, 2]),
        ("lost since", [8, 8, 4, 2, 2]),
        ("failed once", [8, 8, 8, 4, 2]),
    ],
)
def test_a_long_sweep_leaves_most_of_the_time_to_others(
    reconciler: Reconciler,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    known: str,
    pages_by_tick: list[int],
) -> None:
    """Of 20 pages of one second it takes two in 8 seconds. Until a sweep has checked all of Redis, it never pauses.

    The next sweep begins after pauses of three times its work, within it and after it.
    """
    monkeypatch.setattr(conf, "RECONCILE_SECONDS", 8)
    monkeypatch.setattr(conf, "SWEEP_SECONDS", 1)
    if known in ("seen", "lost since"):
        reconciler.tick(0.0)
    if known == "lost since":
        Broker().client.delete(alive_key())
    if known == "marked by another":
        Broker().mark_alive()
    clock = SimpleNamespace(now=0.0)
    seen: list[float] = []

    def sweep_steps(*, is_rebuild: bool = False) -> Iterator[Repairs]:
        for _ in range(20):
            clock.now += 1
            seen.append(occurs_at)
            if known == "failed once" and len(seen) == 8:
                raise BrokerUnavailable("gone for a moment")
            yield Repairs()

    monkeypatch.setattr(reconciler, "sweep_steps", sweep_steps)
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.fleet.repairs.time", SimpleNamespace(monotonic=lambda: clock.now))
        for occurs_at in range(1000, 1089, 8):
            clock.now = occurs_at
            with suppress(BrokerUnavailable):
                reconciler.tick(occurs_at)
    assert list(Counter(seen).values()) == pages_by_tick


@pytest.fixture
def slow(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    """A reconciler at the start of a sweep that takes one page in each round; only the sweep finds the three rows."""
    monkeypatch.setattr(conf, "RECONCILE_SECONDS", 1e-9)
    monkeypatch.setattr("django_asyncq.fleet.reconciler.ROWS_PER_PAGE", 1)
    for _ in range(3):
        old(minutes=60)
    reconciler.tick(1000.0)
    assert reconciler.current_sweep
    return reconciler


def finish_sweep(reconciler: Reconciler, now: float) -> Repairs:
    """Call `tick` until the sweep is finished; return all repairs."""
    repairs = Repairs()
    for _ in range(100):
        now += 1
        repairs = repairs.plus(reconciler.tick(now))
        if not reconciler.current_sweep:
            return repairs
    raise AssertionError("a sweep of few rows does not finish")


def test_an_expired_lease_does_not_wait_for_a_long_sweep(slow: Reconciler) -> None:
    """With a million waiting rows a sweep takes minutes; the tasks of a lost host are recovered meanwhile."""
    run = claimed()
    Broker().client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    assert slow.tick(1001.0).recovered == 1
    assert slow.current_sweep


def test_a_sweep_in_many_rounds_makes_the_same_repairs_as_one_in_a_single_round(slow: Reconciler) -> None:
    """All three rows that Redis does not know are pushed, each once."""
    assert finish_sweep(slow, 1001.0) == Repairs(pushed=3)
    assert slow.sweep() == Repairs()


def empty_redis_within_a_sweep(slow: Reconciler, redis_client: Any) -> float:
    """Let a sweep push some rows, then empty Redis; return the time of the last round."""
    now = 1001.0
    while not slow.tick(now).pushed:
        now += 1
    for key in redis_client.scan_iter(f"{conf.current().key_prefix}:*"):
        redis_client.delete(key)
    return now


def test_a_sweep_starts_over_when_redis_loses_its_memory(slow: Reconciler, redis_client: Any) -> None:
    """Redis has also forgotten what the sweep had pushed."""
    now = empty_redis_within_a_sweep(slow, redis_client)
    assert finish_sweep(slow, now).pushed == 3


def test_a_sweep_starts_over_when_another_process_has_marked_redis(slow: Reconciler, redis_client: Any) -> None:
    """That process may have been the leader meanwhile, and may not have finished its rebuild."""
    now = empty_redis_within_a_sweep(slow, redis_client)
    redis_client.set(alive_key(), int(time.time()) + 1)
    assert finish_sweep(slow, now).pushed == 3


def test_a_failed_sweep_starts_over(slow: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot continue where it failed, and the rows it had not checked do not wait for the next sweep."""

    def away(*args: Any) -> None:
        raise BrokerUnavailable("gone for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(Inspection, "entry_states", away)
        with pytest.raises(BrokerUnavailable):
            finish_sweep(slow, 1001.0)
    assert not slow.current_sweep
    assert finish_sweep(slow, 1100.0).pushed == 3


def test_leases_that_expired_in_an_outage_are_left_to_their_supervisors(reconciler: Reconciler) -> None:
    """Redis was unreachable for longer than a lease. For a while no process requeues a task."""
    run = claimed()
    client, settings = Broker().client, conf.current()
    Broker().reachability(settings.outage_seconds)
    away = settings.outage_seconds + 1
    client.hset(reachability_key(), "last", int((time.time() - away) * 1000))
    client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    assert reconciler.recover_expired() == 0
    # Nor does another leader.
    assert Reconciler(Broker()).recover_expired() == 0
    assert Broker().extend("default", ["w"], 30)[0].kept == 1
    client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    client.hset(reachability_key(), "resumed", int((time.time() - settings.quiet_seconds) * 1000))
    assert reconciler.recover_expired() == 1


def test_many_expired_leases_of_finished_tasks_do_not_delay_the_others(reconciler: Reconciler) -> None:
    """More finished rows than one script call lists come before one unfinished row."""
    tasks.add.enqueue_many([(number,) for number in range(121)])
    runs = lifecycle.claim(Broker(), "default", "w", 200, "default").runs
    TaskRecord.objects.exclude(id=runs[-1].record.id).update(state=TaskState.SUCCEEDED, finished_at=timezone.now())
    leases = QueueKeys("default").lease
    Broker().client.zadd(leases, {run.lease.id: 1 for run in runs[:-1]} | {runs[-1].lease.id: 2})
    assert reconciler.recover_expired() == 1
    assert Broker().client.zcard(leases) == 0


def test_row_with_a_higher_fence_than_its_entry_is_requeued_with_a_higher_one(reconciler: Reconciler) -> None:
    """A process died between the two stores, or Redis came back with an older memory. No run is wasted."""
    tasks.add.enqueue(1)
    TaskRecord.objects.update(fence=7)
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    (run,) = lifecycle.claim(Broker(), "default", "w", 5, "default").runs
    assert run.lease.fence > 7
    lifecycle.begin(run, "w", timezone.now())
    assert lifecycle.mark_running([run]) == []
    # Likewise a row that another run owns by a later fence: it is left to that run.
    TaskRecord.objects.update(fence=run.lease.fence + 9)
    Broker().requeue("default", "w", [run.lease])
    assert lifecycle.claim(Broker(), "default", "other", 5, "default").runs == []
    assert TaskRecord.objects.get().state == TaskState.RUNNING


def test_a_queue_is_registered_again_after_redis_was_emptied(reconciler: Reconciler, redis_client: Any) -> None:
    """The producer assumes for a minute that it is registered; a worker that reads its queues there would miss it."""
    tasks.add.enqueue(1)
    redis_client.delete(own_queues_key())
    tasks.add.enqueue(2)
    assert Broker().queues() == set()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(seconds=10))
    # As in the process that rebuilds, which is not the producer.
    Broker.forget_registered()
    assert reconciler.push_missing(young=True) == 0
    assert Broker().queues() == {"default"}


def test_a_busy_healthy_fleet_needs_no_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 tasks of every kind run while one sweep follows another: no sweep, then or later, makes a repair.

    Sweeps are a second apart, as `tick` paces them, because a slot is released a moment after the row is finished.
    """
    monkeypatch.setattr(conf, "SWEEP_SECONDS", 1)
    reconciler = Reconciler(Broker())
    reconciler.tick(time.monotonic())
    found: list[Repairs] = []
    results = [tasks.gated.using(queue_limit=500).enqueue(f"g{number % 3}", 0.0) for number in range(60)]
    results += tasks.nap.enqueue_many([(0.001,)] * 60)
    results += [tasks.nap.using(priority=number % 3 - 1).enqueue(0.01) for number in range(30)]
    results += [tasks.fail_until.enqueue(2) for _ in range(30)]
    results += [tasks.add_async.using(run_after=timedelta(seconds=2)).enqueue(1) for _ in range(20)]
    with workers(tmp_path, "--processes", "2", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(tmp_path / "history")):

        def is_finished() -> bool:
            found.append(reconciler.tick(time.monotonic()))
            return TaskRecord.objects.succeeded().count() == 200

        wait_until(is_finished, "all 200")
        found.append(reconciler.sweep())
    found += [reconciler.sweep(), reconciler.quick_repairs()]
    assert len(results) == 200
    assert set(found) == {Repairs()}
    assert all(gates.slots(f"g{number}") == [] for number in range(3))


def test_an_interrupted_rebuild_starts_over_in_the_next_round(
    reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis fails again during the rebuild. The sweep does not wait for a whole interval."""
    reconciler.tick(1000.0)
    Broker().client.delete(f"{conf.current().key_prefix}:alive")
    lost = old(minutes=60)

    def away() -> int:
        raise BrokerUnavailable("gone again")

    with monkeypatch.context() as patched:
        patched.setattr(reconciler, "recover_expired", away)
        with pytest.raises(BrokerUnavailable):
            reconciler.tick(1001.0)
    assert reconciler.tick(1002.0).pushed == 1
    assert unknown([str(lost.id)]) == []


def test_a_fleet_finishes_every_task_after_redis_was_killed_and_emptied(
    own_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued, running, delayed and retrying tasks all finish, and each ran once, without a restart."""
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


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("way", [EVERY, TO_RETRY])
def test_pages_have_each_row_once(way: Way, size: int) -> None:
    """Also rows with the same time, as those that one statement has postponed, on both sides of the end of a page."""
    now = timezone.now()
    for seconds in (3, 1, 2, 2, 2, 2, 1):
        retry_at = now + timedelta(seconds=seconds)
        TaskRecord.objects.create(name="a", state=TaskState.FAILED, reason=1, retry_at=retry_at)
    found = [row for page in pages(way, "name", size=size) for row in page]
    wanted = rows_of(TaskRecord).order_by(*filter(None, [way.by, "id"])).values_list("id", flat=True)
    assert [row[0] for row in found] == list(wanted)
    assert {row[1] for row in found} == {"a"}


def test_pages_pass_over_what_fails_the_check_and_begin_behind_an_id() -> None:
    """A page without a row to return does not end the walk."""
    rows = [TaskRecord.objects.create(name=name) for name in "aaabba"]
    assert [[row[0] for row in page] for page in pages(QUEUED, size=2, check=Q(name="b"))] in (
        [[rows[3].pk], [rows[4].pk]],
        [[rows[3].pk, rows[4].pk]],
    )
    found = [row[0] for page in pages(QUEUED, size=2, behind=rows[3].pk) for row in page]
    assert found == [rows[4].pk, rows[5].pk]
