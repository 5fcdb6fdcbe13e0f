"""What the reconciler mends: each repair by itself, then a fleet after Redis was emptied."""

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
from django.utils import timezone

from django_asyncq import conf, gates, lifecycle
from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, alive_key, queues_key, reachability_key
from django_asyncq.definitions.names import uuid7
from django_asyncq.exceptions import BrokerUnavailable, GateUnavailable
from django_asyncq.maintenance.reconciler import LEAST_REST, Reconciler
from django_asyncq.maintenance.sweep import Repairs
from django_asyncq.models import Gate, TaskRecord, TaskState

from . import tasks
from .redis_state import unknown
from .runs import claimed
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


def test_pushes_rows_that_were_never_pushed(reconciler: Reconciler) -> None:
    """A crash between COMMIT and push; a row that is there already is left alone."""
    lost, there = old(), old()
    lifecycle.dispatch([there])
    assert reconciler.push_missing(young=True) == 1
    assert unknown([str(lost.id), str(there.id)]) == []
    assert reconciler.push_missing(young=False) == 0


def test_leaves_rows_of_the_last_seconds_to_their_process(reconciler: Reconciler) -> None:
    """A fresh row is still being pushed by who enqueued it."""
    TaskRecord.objects.create(name="tests.tasks.add")
    assert reconciler.push_missing(young=True) == 0


def test_a_memory_that_was_lost_lost_rows_of_the_last_seconds_too(reconciler: Reconciler) -> None:
    """What was pushed just before waits for nobody: the first pass afterwards puts it back."""
    reconciler.tick(1000.0)
    result = tasks.add.enqueue(1)
    reconciler.broker.client.flushdb()
    assert reconciler.tick(2000.0) == Repairs(pushed=1)
    assert unknown([result.id]) == []


def test_pushing_a_gated_row_takes_its_slot(reconciler: Reconciler) -> None:
    """A pushed task is counted by its gate like any other."""
    record = old(gate="g", queue_limit=1)
    reconciler.push_missing(young=False)
    assert [slot.id for slot in gates.slots("g")] == [str(record.id)]


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
    assert reconciler.sweep().unleased == 0  # Redis may have been emptied a moment ago
    Broker().client.set(f"{conf.current().key_prefix}:alive", int(time.time()) - 3600)
    assert reconciler.sweep().unleased == 1
    (again,) = lifecycle.claim(Broker(), "default", "other", 1, "default").runs
    assert again.lease.fence > run.lease.fence
    assert TaskRecord.objects.get().crash_count == 1


def test_waiting_retries_return_to_the_retry_set(reconciler: Reconciler) -> None:
    """A row in 3 with `retry_at` is tried again although Redis forgot it."""
    record = old(state=TaskState.FAILED, retry_at=timezone.now() - timedelta(seconds=1))
    assert reconciler.sweep().parked == 1
    assert Broker().client.zrange(QueueKeys("default").retry, 0, -1) == [str(record.id).encode()]
    assert lifecycle.retry_due(Broker(), "default", [str(record.id)]) == 1
    record.refresh_from_db()
    assert (record.state, record.retry_at) == (TaskState.QUEUED, None)


def test_final_row_is_only_acknowledged_by_its_next_taker() -> None:
    """A worker that died between the outcome and the acknowledgement: nothing runs again."""
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone") == 0
    assert unknown([run.lease.id]) == [run.lease.id]
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


def test_a_running_task_whose_lease_was_evicted_keeps_its_run(reconciler: Reconciler) -> None:
    """It has a lease again; the live worker's answer is accepted, and nothing runs twice."""
    run = claimed()
    Broker().client.delete(QueueKeys("default").lease, QueueKeys("default").held("w"))
    assert reconciler.sweep() == Repairs(leased=1)
    assert reconciler.sweep() == Repairs()
    assert Broker().extend("default", ["w"], 5)[0].kept == 1
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert Broker().done("default", "w", [run.lease]) == ["done"]


def test_a_lost_worker_without_lease_is_found_all_the_same(reconciler: Reconciler, settings: Any) -> None:
    """The lease it is given runs out, and the task goes on."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1}
    claimed()
    Broker().client.delete(QueueKeys("default").lease, QueueKeys("default").held("w"))
    assert reconciler.sweep().leased == 1
    # As the supervisors that are left do, else it would count as an outage.
    wait_until(lambda: Broker().reachability(9) and Broker().expired("default"), "an expired lease")
    assert reconciler.quick().recovered == 1
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_tasks_whose_hash_was_evicted_run_once(reconciler: Reconciler) -> None:
    """The id in the list goes before the row is pushed again, so it is not there twice."""
    tasks.add.enqueue_many([(number,) for number in range(3)])
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(hours=1))
    keys = QueueKeys("default")
    for id in TaskRecord.objects.values_list("id", flat=True):
        Broker().client.delete(keys.task(str(id)))
    assert reconciler.sweep() == Repairs(strays=3, pushed=3)
    assert Broker().client.llen(keys.pending) == 3
    assert len(lifecycle.claim(Broker(), "default", "w", 9, "default").runs) == 3


def test_tasks_whose_list_was_evicted_are_pushed_from_their_rows(reconciler: Reconciler) -> None:
    """Pending, by priority, delayed, waiting for a retry: all are back where they belong."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=7).enqueue(2)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(3)
    waits = old(state=TaskState.FAILED, retry_at=timezone.now() + timedelta(hours=1))
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


def test_tasks_of_go_programs_are_left_as_they_stand(reconciler: Reconciler) -> None:
    """No repair removes a task without a row, wherever it stands or does not; only an id that is no task goes."""
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


def test_entries_of_rows_that_have_ended_are_removed(reconciler: Reconciler) -> None:
    """Pending, by priority, delayed; not those of the last seconds, whose process is still at it."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=7).enqueue(2)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(3)
    tasks.add.enqueue(4)
    ended = {"state": TaskState.SUCCEEDED, "finished_at": timezone.now()}
    TaskRecord.objects.exclude(args=[4]).update(**ended)
    assert reconciler.sweep() == Repairs()
    TaskRecord.objects.exclude(args=[4]).update(finished_at=timezone.now() - timedelta(minutes=1))
    assert reconciler.sweep() == Repairs(ended=3)
    assert Inspection().sizes("default") == {"pending": 1, "active": 0, "scheduled": 0, "retry": 0, "archived": 0}
    assert len(list(Broker().client.scan_iter(f"{QueueKeys('default').task_prefix}*"))) == 1


@pytest.mark.parametrize("place", ["retry", "archived"])
def test_running_row_that_a_foreign_recoverer_set_aside_is_queued_again(reconciler: Reconciler, place: str) -> None:
    """A Go server moves what has lost its lease to retry or archived; the row said 1 for ever."""
    run = claimed()
    broker, keys = Broker(), QueueKeys("default")
    broker.client.delete(keys.active, keys.lease, keys.held("w"))
    broker.client.hset(keys.task(run.lease.id), "state", place)
    broker.client.zadd(getattr(keys, place), {run.lease.id: 2e9})
    broker.mark_alive()
    broker.client.set(f"{conf.current().key_prefix}:alive", int(time.time()) - 3600)
    assert reconciler.sweep() == Repairs()
    TaskRecord.objects.update(last_attempted_at=timezone.now() - timedelta(minutes=5))
    assert reconciler.sweep() == Repairs(unleased=1)
    (again,) = lifecycle.claim(broker, "default", "other", 1, "default").runs
    assert again.lease.fence > run.lease.fence


def test_of_two_who_abandon_a_run_one_does(reconciler: Reconciler) -> None:
    """Both have read the row; its crash is counted once."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    first, second = TaskRecord.objects.get(), TaskRecord.objects.get()
    assert lifecycle.abandon(first, "gone")
    assert not lifecycle.abandon(second, "gone")
    assert TaskRecord.objects.get().crash_count == 1
    assert Broker().client.llen(QueueKeys("default").pending) == 1


def test_what_gone_workers_seem_to_hold_is_forgotten(reconciler: Reconciler) -> None:
    """Their tasks went to others by a way that did not tell them."""
    run = claimed()
    Broker().client.hset(QueueKeys("default").held("gone"), run.lease.id, run.lease.fence - 1)
    assert reconciler.sweep() == Repairs(held=1)
    assert Broker().held("default", "w") == [run.lease]


def test_slots_without_a_task_go_when_they_are_seen_again(reconciler: Reconciler, caplog: Any) -> None:
    """A worker that has written an end gives its slot back a moment later; each gate's drift is logged."""
    stranger = TaskRecord(name="x", gate="g", queue_limit=5)
    Gate.objects.create(name="g", limit=5)
    gates.acquire([stranger])
    gates.confirm([stranger])
    assert reconciler.sweep() == Repairs()
    assert reconciler.quick() == Repairs(slots_removed=1)
    assert reconciler.quick() == Repairs()
    assert "gate g: 0 slots added, 1 removed" in caplog.text


def test_a_task_whose_gate_lost_its_limit_does_not_hold_up_the_others(reconciler: Reconciler) -> None:
    """Nobody says how many may be there any more: it goes on without a slot."""
    for gate_name in ("nowhere", ""):
        old(gate=gate_name)
    assert reconciler.push_missing(young=False) == 2


def test_push_that_fails_ends_the_sweep(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is due again at once, in place of leaving rows out until the next one."""
    reconciler.tick(1000.0)
    old(gate="g", queue_limit=1)

    def away(records: Any) -> None:
        raise GateUnavailable("g")

    with monkeypatch.context() as patched:
        patched.setattr(gates, "confirm", away)
        with pytest.raises(BrokerUnavailable):
            reconciler.tick(1000.0 + conf.current().sweep_seconds)
    assert reconciler.tick(1001.0 + conf.current().sweep_seconds).pushed == 1


def test_long_sweep_is_followed_by_a_longer_rest(reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long backlog it would otherwise never end, beside those who work the backlog off."""
    settings = conf.current()
    sweeps: list[float] = []
    clock = itertools.count(0.0, 2 * settings.sweep_seconds / LEAST_REST)  # each look at it: so much later

    def pages(*, is_new: bool = False) -> Iterator[Repairs]:
        sweeps.append(now)
        yield from ()

    monkeypatch.setattr(reconciler, "pages", pages)
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.maintenance.sweep.time", SimpleNamespace(monotonic=lambda: next(clock)))
        for now in (1000.0, 1000.0 + 1.5 * settings.sweep_seconds, 1000.0 + 2 * settings.sweep_seconds):
            reconciler.tick(now)
    assert sweeps == [1000.0, 1000.0 + 2 * settings.sweep_seconds]


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
    """Of 20 pages, a second each, it sees two in 8 seconds; until one has seen all of this Redis, it sees all it can.

    The next one begins when three times as long was rested, in its midst or after it.
    """
    settings.ASYNCQ = {**settings.ASYNCQ, "RECONCILE_SECONDS": 8, "SWEEP_SECONDS": 1}
    if known in ("seen", "lost since"):
        reconciler.tick(0.0)
    if known == "lost since":
        Broker().client.delete(alive_key())
    if known == "marked by another":
        Broker().mark_alive()
    clock = SimpleNamespace(now=0.0)
    seen: list[float] = []

    def pages(*, is_new: bool = False) -> Iterator[Repairs]:
        for _ in range(20):
            clock.now += 1
            seen.append(occurs_at)
            if known == "failed once" and len(seen) == 8:
                raise BrokerUnavailable("gone for a moment")
            yield Repairs()

    monkeypatch.setattr(reconciler, "pages", pages)
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.maintenance.sweep.time", SimpleNamespace(monotonic=lambda: clock.now))
        for occurs_at in range(1000, 1089, 8):
            clock.now = occurs_at
            with suppress(BrokerUnavailable):
                reconciler.tick(occurs_at)
    assert list(Counter(seen).values()) == pages_by_tick


@pytest.fixture
def slow(reconciler: Reconciler, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    """A reconciler at the begin of a sweep of which an occurrence brings one page; only the sweep finds the three rows."""
    settings.ASYNCQ = {**settings.ASYNCQ, "RECONCILE_SECONDS": 1e-9}
    monkeypatch.setattr("django_asyncq.maintenance.reconciler.ROWS_PER_PAGE", 1)
    for _ in range(3):
        old()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(hours=1))
    reconciler.tick(1000.0)
    assert reconciler.under_way
    return reconciler


def to_the_end(reconciler: Reconciler, now: float) -> Repairs:
    """Occurrence until the sweep is over; return all that was mended."""
    repairs = Repairs()
    for _ in range(100):
        now += 1
        repairs = repairs.plus(reconciler.tick(now))
        if not reconciler.under_way:
            return repairs
    raise AssertionError("a sweep of few rows does not end")


def test_lapsed_lease_does_not_wait_for_the_end_of_a_long_sweep(slow: Reconciler) -> None:
    """Beside a million waiting rows a sweep takes minutes; the tasks of a lost host are taken up meanwhile."""
    run = claimed()
    Broker().client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    assert slow.tick(1001.0).recovered == 1
    assert slow.under_way


def test_a_sweep_in_parts_mends_what_one_in_one_go_does(slow: Reconciler) -> None:
    """All three rows that Redis lacks, each once."""
    assert to_the_end(slow, 1001.0) == Repairs(pushed=3)
    assert slow.sweep() == Repairs()


def forget_in_the_midst(slow: Reconciler, redis_client: Any) -> float:
    """Let a sweep push a part, then empty Redis; return the time by then."""
    now = 1001.0
    while not slow.tick(now).pushed:
        now += 1
    for key in redis_client.scan_iter(f"{conf.current().key_prefix}:*"):
        redis_client.delete(key)
    return now


def test_a_sweep_begins_anew_when_redis_loses_its_memory_in_the_midst(slow: Reconciler, redis_client: Any) -> None:
    """What it has pushed already is gone as well."""
    now = forget_in_the_midst(slow, redis_client)
    assert to_the_end(slow, now).pushed == 3


def test_a_sweep_begins_anew_when_somebody_else_has_rebuilt_redis(slow: Reconciler, redis_client: Any) -> None:
    """For instance one who led meanwhile and did not come to the end: there is a mark again, but another."""
    now = forget_in_the_midst(slow, redis_client)
    redis_client.set(alive_key(), int(time.time()) + 1)
    assert to_the_end(slow, now).pushed == 3


def test_a_sweep_that_failed_begins_anew(slow: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot go on where it broke off; what it had not come to is not left to the next one."""

    def away(*args: Any) -> None:
        raise BrokerUnavailable("gone for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(Inspection, "entry_states", away)
        with pytest.raises(BrokerUnavailable):
            to_the_end(slow, 1001.0)
    assert not slow.under_way
    assert to_the_end(slow, 1100.0).pushed == 3


def test_leases_that_ran_out_in_an_outage_are_left_to_their_supervisors(reconciler: Reconciler) -> None:
    """Redis was out of reach for longer than a lease: whoever asks first, nothing is handed back for a while."""
    run = claimed()
    client, settings = Broker().client, conf.current()
    Broker().reachability(settings.outage_seconds)
    away = settings.outage_seconds + 1
    client.hset(reachability_key(), "last", int((time.time() - away) * 1000))
    client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    assert reconciler.recover_expired() == 0
    # Another leader, for example.
    assert Reconciler(Broker()).recover_expired() == 0
    assert Broker().extend("default", ["w"], 30)[0].kept == 1
    client.zadd(QueueKeys("default").lease, {run.lease.id: int(time.time()) - 1})
    client.hset(reachability_key(), "resumed", int((time.time() - settings.quiet_seconds) * 1000))
    assert reconciler.recover_expired() == 1


def test_many_leases_of_ended_tasks_do_not_hold_up_the_others(reconciler: Reconciler) -> None:
    """More rows that are final than one look lists stand in front of one that has to go on."""
    tasks.add.enqueue_many([(number,) for number in range(121)])
    runs = lifecycle.claim(Broker(), "default", "w", 200, "default").runs
    TaskRecord.objects.exclude(id=runs[-1].record.id).update(state=TaskState.SUCCEEDED, finished_at=timezone.now())
    leases = QueueKeys("default").lease
    Broker().client.zadd(leases, {run.lease.id: 1 for run in runs[:-1]} | {runs[-1].lease.id: 2})
    assert reconciler.recover_expired() == 1
    assert Broker().client.zcard(leases) == 0


def test_row_whose_fence_is_ahead_of_redis_is_queued_with_a_higher_one(reconciler: Reconciler) -> None:
    """A recoverer died between the stores, or Redis is back with an older memory: no run is wasted on it."""
    tasks.add.enqueue(1)
    TaskRecord.objects.update(fence=7)
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    (run,) = lifecycle.claim(Broker(), "default", "w", 5, "default").runs
    assert run.lease.fence > 7
    lifecycle.begin(run, "w", timezone.now())
    assert lifecycle.mark_running([run]) == []
    # Likewise one that somebody runs by a later fence: it is left to that run's end.
    TaskRecord.objects.update(fence=run.lease.fence + 9)
    Broker().requeue("default", "w", [run.lease])
    assert lifecycle.claim(Broker(), "default", "other", 5, "default").runs == []
    assert TaskRecord.objects.get().state == TaskState.RUNNING


def test_queue_is_named_again_after_redis_was_emptied(reconciler: Reconciler, redis_client: Any) -> None:
    """The producer believes for a minute to have named it; a worker that finds its queues there would not see it."""
    tasks.add.enqueue(1)
    redis_client.delete(queues_key())
    tasks.add.enqueue(2)
    assert Broker().queues() == set()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(seconds=10))
    # As the process that rebuilds does; the producer is another.
    Broker.forget_registered()
    assert reconciler.push_missing(young=True) == 0
    assert Broker().queues() == {"default"}


def test_a_busy_healthy_fleet_needs_no_repair(tmp_path: Path, settings: Any) -> None:
    """200 tasks of every kind while one sweep follows the other, and after: nothing is ever mended.

    A second apart, as `tick` paces them: a slot may be given back a moment after the row has ended.
    """
    settings.ASYNCQ = {**settings.ASYNCQ, "RECONCILE_SECONDS": 1, "SWEEP_SECONDS": 1}
    reconciler = Reconciler(Broker())
    reconciler.tick(time.monotonic())
    found: list[Repairs] = []
    results = [tasks.gated.using(queue_limit=500).enqueue(f"g{number % 3}", 0.0) for number in range(60)]
    results += tasks.nap.enqueue_many([(0.001,)] * 60)
    results += [tasks.nap.using(priority=number % 3 - 1).enqueue(0.01) for number in range(30)]
    results += [tasks.fail_until.enqueue(2) for _ in range(30)]
    results += [tasks.add_async.using(run_after=timedelta(seconds=2)).enqueue(1) for _ in range(20)]
    with workers(tmp_path, "--processes", "2", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(tmp_path / "history")):

        def is_over() -> bool:
            found.append(reconciler.tick(time.monotonic()))
            return TaskRecord.objects.succeeded().count() == 200

        wait_until(is_over, "all 200")
        found.append(reconciler.sweep())
    found += [reconciler.sweep(), reconciler.quick()]
    assert len(results) == 200
    assert set(found) == {Repairs()}
    assert all(gates.slots(f"g{number}") == [] for number in range(3))


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
    assert unknown([str(lost.id)]) == []


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
