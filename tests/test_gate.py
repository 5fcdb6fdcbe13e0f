"""The gate: never more than its limit queued or running, whoever enqueues and whatever crashes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from django_asyncq import GateUnavailable, QueueFull, conf, gates, lifecycle
from django_asyncq.broker import Broker, clients, scripts
from django_asyncq.exceptions import UnknownGate
from django_asyncq.maintenance.forwarder import forward_due
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changed, task_state_changing

from . import tasks
from .workers import environment, run_workers, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def holders(name: str) -> set[str]:
    """Ids that hold a slot."""
    return {slot.id for slot in gates.slots(name)}


def fill(name: str, count: int) -> list[Any]:
    """Enqueue tasks at a gate."""
    return [tasks.gated.enqueue(name) for _ in range(count)]


def test_admits_up_to_the_limit_and_says_why_not_more() -> None:
    """The sixth is refused with gate, limit, occupancy and a time; nothing of it is written."""
    results = fill("g", 5)
    with pytest.raises(QueueFull) as caught:
        tasks.gated.enqueue("g")
    refusal = caught.value
    assert (refusal.gate, refusal.limit, refusal.occupancy, refusal.retry_after) == ("g", 5, 5, 1)
    assert TaskRecord.objects.count() == 5
    assert holders("g") == {result.id for result in results}
    tasks.gated.enqueue("another")


def test_the_limit_of_a_gate_row_wins_and_takes_effect_at_once() -> None:
    """Raised, lowered below the occupancy, opened and closed again, without a restart."""
    fill("g", 5)
    row = Gate.objects.create(name="g", limit=6, expected_seconds=30)
    fill("g", 1)
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert (caught.value.limit, caught.value.retry_after) == (6, 5)
    row.limit = 2
    row.save()
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert (caught.value.limit, caught.value.occupancy) == (2, 6)
    row.limit = 0
    row.save()
    fill("g", 3)
    row.limit = 9
    row.save()
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert caught.value.occupancy == 9
    row.delete()
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert caught.value.limit == 5


def test_renaming_a_gate_ends_the_limit_of_its_old_name() -> None:
    """The old name falls back to the task's own limit at once."""
    row = Gate.objects.create(name="g", limit=1)
    fill("g", 1)
    row.name = "renamed"
    row.save()
    assert len(fill("g", 4)) == 4
    fill("renamed", 1)
    with pytest.raises(QueueFull) as caught:
        fill("renamed", 1)
    assert caught.value.limit == 1


def test_gate_may_be_named_outright_by_callable_and_by_using() -> None:
    """Four ways to say which gate."""
    named = tasks.gated.using(gate="fixed", queue_limit=1)
    named.enqueue("x")
    with pytest.raises(QueueFull, match="fixed"):
        named.enqueue("y")
    tasks.add.using(gate=lambda a, b=0: f"made-{a}", queue_limit=1).enqueue(7)
    assert TaskRecord.objects.filter(gate="made-7").count() == 1


def test_slot_is_released_by_every_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success, failure for good and between tries: no slot is left."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    options = {"gate": "ends", "queue_limit": 3}
    tasks.add.using(**options).enqueue(1)
    tasks.fail_until.using(**options).enqueue(2)
    tasks.fail_until.using(**options).enqueue(9, fatal=True)
    assert len(holders("ends")) == 3
    run_workers()
    assert holders("ends") == set()
    assert TaskRecord.objects.succeeded().count() == 2


def test_deleting_a_row_releases_its_slot() -> None:
    """Deleted in the admin, one by one or by queryset."""
    fill("g", 5)
    with transaction.atomic():
        for record in TaskRecord.objects.all()[:2]:
            record.delete()
        assert len(holders("g")) == 5
    assert len(holders("g")) == 3
    TaskRecord.objects.all().delete()
    assert holders("g") == set()


def test_rollback_gives_the_slot_back_after_its_provisional_time(settings: Any, redis_client: Any) -> None:
    """A slot taken in a transaction lasts for a minute, not for an hour, until the commit."""
    settings.ASYNCQ = {**settings.ASYNCQ, "PROVISIONAL_SECONDS": 1}
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        fill("g", 5)
        raise ZeroDivisionError
    assert all(slot.expires_at <= time.time() + 2 for slot in gates.slots("g"))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            fill("g", 1)
            break
        except QueueFull:
            time.sleep(0.05)
    assert TaskRecord.objects.count() == 1


def test_commit_makes_the_slot_last() -> None:
    """Confirmed for ten times the expected time, at least an hour."""
    with transaction.atomic():
        fill("g", 1)
        (slot,) = gates.slots("g")
        assert slot.expires_at <= time.time() + 60
    (slot,) = gates.slots("g")
    assert 3500 < slot.expires_at - time.time() <= 3601


def test_confirm_that_finds_its_slot_gone_and_the_gate_full_parks_the_task() -> None:
    """The task waits in 3 with `retry_at`; the gate is never over its limit."""
    with transaction.atomic():
        result = fill("g", 1)[0]
        gates.release_ids("g", [result.id])
        others = [TaskRecord(name="tests.tasks.gated", args=["g"], gate="g", queue_limit=5) for _ in range(5)]
        gates.acquire(others)
    record = TaskRecord.objects.get(id=result.id)
    assert record.state == TaskState.FAILED
    assert record.retry_at is not None
    assert result.id not in holders("g")


def test_slot_that_a_retry_has_taken_is_not_given_back_by_the_run_before() -> None:
    """Its end may be announced late, and more than once; the end of the run after the retry gives the slot back."""
    tasks.gated.using(queue_limit=1).enqueue("g")
    for number in (1, 2):
        (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
        lifecycle.begin(run, "w", timezone.now())
        lifecycle.fail(run, ZeroDivisionError(), "", timezone.now(), retry_at=None)
        lifecycle.record_runs([run])
        lifecycle.acknowledge(Broker(), "w", [run])
        late = copy.copy(run.record)
        if number == 1:
            assert len(lifecycle.retry([run.record.id], by_person=True).retried) == 1
            for _ in range(2):
                lifecycle.announce([late], TaskState.RUNNING, TaskState.FAILED)
                assert holders("g") == {str(late.id)}
    lifecycle.announce([late], TaskState.RUNNING, TaskState.FAILED)
    assert holders("g") == set()
    assert Broker().client.hlen(gates.keys("g")[2]) == 0


def test_retry_at_a_gate_that_has_lost_its_limit_goes_on(redis_client: Any, caplog: Any) -> None:
    """Its row was deleted; one such task must not hold up the others that are due."""
    Gate.objects.create(name="g", limit=1)
    tasks.fail_until.using(gate="g").enqueue(9)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(run, "w", timezone.now())
    lifecycle.fail(run, ZeroDivisionError(), "", timezone.now(), retry_at=timezone.now())
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])
    Gate.objects.all().delete()
    wait_until(lambda: forward_due(Broker(), ["default"]).retried == 1, "the retry")
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert "go on without a slot" in caplog.text
    with pytest.raises(UnknownGate):
        tasks.fail_until.using(gate="g").enqueue(9)


def test_limit_changed_while_the_gate_is_built_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the read of the old limit and the build: who dies after it leaves no old limit behind."""
    row = Gate.objects.create(name="g", limit=5)
    read, changed = gates._live, []

    def read_and_change(name: str) -> QuerySet[TaskRecord]:
        if not changed:
            changed.append(name)
            row.limit = 1
            row.save()
        return read(name)

    monkeypatch.setattr(gates, "_live", read_and_change)
    gates.build("g")
    assert Broker().client.hget(gates.keys("g")[1], "built") is None
    fill("g", 1)
    with pytest.raises(QueueFull, match="1 of 1"):
        fill("g", 1)


def test_gate_that_nobody_asked_for_long_is_built_anew(settings: Any) -> None:
    """Redis was away for so long that the slots of committed rows ran out before they could be confirmed."""
    result = fill("g", 4)[0]
    gates.release_ids("g", [result.id])
    meta = gates.keys("g")[1]
    fill("g", 1)
    assert result.id not in holders("g")
    Broker().client.hset(meta, "asked", int(time.time()) - conf.current().unasked_seconds - 1)
    with pytest.raises(QueueFull):
        fill("g", 1)
    assert len(holders("g")) == 5


def test_retry_acquires_again_and_stays_when_full() -> None:
    """3 → 0 needs a slot; without room the task stays 3 and the caller is told which."""
    failed = TaskRecord.objects.create(
        name="tests.tasks.gated",
        args=["g"],
        gate="g",
        queue_limit=5,
        state=TaskState.FAILED,
        finished_at=timezone.now(),
    )
    fill("g", 5)
    outcome = lifecycle.retry([failed.id], by_person=True)
    assert [record.id for record in outcome.full] == [failed.id]
    TaskRecord.objects.queued().first().delete()  # type: ignore[union-attr]
    assert [record.id for record in lifecycle.retry([failed.id], by_person=True).retried] == [failed.id]
    assert str(failed.id) in holders("g")
    assert lifecycle.retry([failed.id], by_person=True).not_failed == [failed.id]


def test_is_rebuilt_from_rows_after_redis_lost_its_memory(own_redis: Any) -> None:
    """The limit holds across a kill of Redis: what is queued or running counts."""
    fill("g", 5)
    own_redis.kill()
    with pytest.raises(GateUnavailable):
        fill("g", 1)
    own_redis.restart()
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert caught.value.occupancy == 5
    assert TaskRecord.objects.count() == 5


def test_many_are_all_or_nothing_or_partial() -> None:
    """`enqueue_many` at a gate with room for some."""
    fill("g", 2)
    with pytest.raises(QueueFull):
        tasks.gated.enqueue_many([("g",)] * 4)
    assert TaskRecord.objects.count() == 2
    results = tasks.gated.enqueue_many([("g",), ("free",), ("g",), ("g",), ("g",)], partial=True)
    assert [result is not None for result in results] == [True, True, True, True, False]
    assert len(holders("g")) == 5


def test_larger_than_one_call_is_still_all_or_nothing() -> None:
    """Chunks of one gate that do not all fit leave no slot behind."""
    with pytest.raises(QueueFull):
        tasks.gated.using(queue_limit=300).enqueue_many([("big",)] * 450)
    assert holders("big") == set()
    assert len(tasks.gated.using(queue_limit=450).enqueue_many([("big",)] * 450)) == 450


def test_acquiring_twice_is_a_yes_and_never_shortens() -> None:
    """A repeated call after a lost reply keeps the slot and its time, also when full."""
    records = [TaskRecord(name="x", gate="g", queue_limit=1) for _ in range(1)]
    assert gates.acquire(records) == gates.confirm(records) == set()
    before = gates.slots("g")
    assert gates.acquire(records) == set()
    assert gates.slots("g")[0].expires_at >= before[0].expires_at


def test_one_call_tells_apart_who_has_a_slot_who_gets_one_and_who_is_refused() -> None:
    """Each by its place in the call, whatever stands around it; a retry's fence is kept for those admitted alone."""
    records = [TaskRecord(name="x", gate="g", queue_limit=3, fence=number) for number in range(1, 6)]
    gates.acquire([records[1], records[3]])
    assert gates.acquire(records, partial=True, again=True) == {records[2].id, records[4].id}
    assert holders("g") == {str(records[place].id) for place in (0, 1, 3)}
    kept = Broker().client.hgetall(gates.keys("g")[2])
    assert kept == {str(records[place].id).encode(): str(place + 1).encode() for place in (0, 1, 3)}


def test_one_push_of_several_gates_extends_each_slot_at_its_own() -> None:
    """One gate open, one that cannot be relied on and is asked apart, two with limits; a task at none between them."""
    Gate.objects.create(name="open", limit=0)
    with transaction.atomic():
        results = [tasks.gated.enqueue(name) for name in ("one", "open", "two", "lost", "one")]
        free = tasks.add.enqueue(1, 2)
        Broker().client.delete(gates.keys("lost")[1])
    assert {name: len(holders(name)) for name in ("one", "open", "two", "lost")} == {
        "one": 2,
        "open": 0,
        "two": 1,
        "lost": 1,
    }
    assert all(slot.expires_at - time.time() > 3000 for name in ("one", "two", "lost") for slot in gates.slots(name))
    taken = {lease.id for lease in Broker().dequeue("default", "w", 9, 9).leases}
    assert taken == {result.id for result in [*results, free]}


def test_a_gate_is_looked_at_once_a_call_not_once_a_task(redis_client: Any) -> None:
    """Its limit is read by the script that admits and by the one that pushes, for fifty tasks as for one."""
    fill("warm", 1)
    counts = []
    for count in (1, 50):
        before = redis_client.info("commandstats")["cmdstat_hmget"]["calls"]
        tasks.gated.using(queue_limit=100).enqueue_many([("warm",)] * count)
        counts.append(redis_client.info("commandstats")["cmdstat_hmget"]["calls"] - before)
    assert counts == [2, 2]


def calls() -> int:
    """How many scripts Redis was asked to run by now."""
    count: int = Broker().client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return count


def remaining(name: str) -> float:
    """Seconds that the slot of a gate's one member still lasts."""
    (slot,) = gates.slots(name)
    return slot.expires_at - time.time()


def test_push_makes_the_slot_last() -> None:
    """Two calls, slot and push, of which the second extends what the first has taken; for later it takes three."""
    fill("warm", 1)
    before = calls()
    (result,) = fill("g", 1)
    # The first use of a gate builds it: refused, built, admitted.
    assert calls() - before == 4
    assert remaining("g") > 3000
    Broker().client.zrem(gates.keys("g")[0], result.id)
    before = calls()
    fill("g", 1)
    assert calls() - before == 2
    before = calls()
    tasks.gated.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("warm")
    assert calls() - before == 3
    assert {slot.expires_at - time.time() > 3000 for slot in gates.slots("warm")} == {True}


def test_in_a_cluster_the_gate_is_asked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No script may name the keys of a queue and of a gate: slot, confirm, push."""
    monkeypatch.setattr(Broker, "reaches_all", property(lambda broker: False))
    fill("warm", 1)
    before = calls()
    fill("warm", 1)
    assert calls() - before == 3
    assert {slot.expires_at - time.time() > 3000 for slot in gates.slots("warm")} == {True}


@pytest.mark.parametrize("lost", ["slot", "expired", "gate", "unasked"])
def test_push_asks_the_gate_when_the_slot_cannot_be_relied_on(lost: str) -> None:
    """Its slot is gone or over, or Redis was emptied or away, between the slot and the commit: it takes another."""
    members, meta, _ = gates.keys("g")
    client = Broker().client
    with transaction.atomic():
        (result,) = fill("g", 1)
        if lost == "slot":
            client.zrem(members, result.id)
        elif lost == "expired":
            client.zadd(members, {result.id: int(time.time()) - 1})
        elif lost == "gate":
            client.delete(members, meta)
        else:
            client.hset(meta, "asked", int(time.time()) - conf.current().unasked_seconds - 2)
    assert holders("g") == {result.id}
    assert remaining("g") > 3000
    assert [lease.id for lease in Broker().dequeue("default", "w", 9, 9).leases] == [result.id]


def test_push_of_a_task_whose_slot_others_have_by_now_parks_it() -> None:
    """The gate is full without it: it waits for a retry, and Redis has it nowhere else."""
    with transaction.atomic():
        (result,) = tasks.gated.using(queue_limit=1).enqueue_many([("g",)])
        Broker().client.zrem(gates.keys("g")[0], result.id)
        gates.acquire([stranger := TaskRecord(name="x", gate="g", queue_limit=1)])
    assert holders("g") == {str(stranger.id)}
    assert TaskRecord.objects.get().state == TaskState.FAILED
    assert Broker().dequeue("default", "w", 9, 9).leases == []


def test_open_gate_and_gate_without_a_limit_hold_no_push_up(caplog: Any) -> None:
    """Nobody has a slot there, and nobody needs one."""
    Gate.objects.create(name="open", limit=0)
    fill("open", 2)
    row = Gate.objects.create(name="gone", limit=5)
    with transaction.atomic():
        lifecycle.enqueue([TaskRecord(name=tasks.gated.module_path, gate="gone", args=["gone"])])
        Gate.objects.filter(id=row.id)._raw_delete("default")
        gates.forget_built("gone")
    assert holders("open") == set()
    assert len(Broker().dequeue("default", "w", 9, 9).leases) == 3
    assert "go on without a slot" in caplog.text


def test_slots_of_a_gate_that_no_task_is_at_are_found() -> None:
    """Whose task's row is gone, or final: the auditor comes there too, but not to gates of other programs."""
    (result,) = fill("left", 1)
    fill("busy", 1)
    scripts.run("gate_renew", clients.client("producer"), gates.keys("theirs")[:1], [3600, "a"])
    TaskRecord.objects.filter(id=result.id)._raw_delete("default")
    assert gates.occupied() == {"left", "busy"}
    reconciler = Reconciler(Broker())
    reconciler.sweep()
    reconciler.quick_repairs()
    assert gates.occupied() == {"busy"}
    assert holders("theirs") == {"a"}


def test_auditor_mends_both_ways() -> None:
    """A slot without a task goes, a task without a slot gets one, and young slots are left alone."""
    result = fill("g", 1)[0]
    gates.release_ids("g", [result.id])
    stranger = TaskRecord(name="x", gate="g", queue_limit=5)
    gates.acquire([stranger])
    gates.confirm([stranger])
    uncommitted = TaskRecord(name="x", gate="g", queue_limit=5)
    gates.acquire([uncommitted])
    assert gates.audit("g", time.time()) == (1, 1)
    assert holders("g") == {result.id, str(uncommitted.id)}
    assert gates.audit("g", time.time()) == (0, 0)


def test_receivers_may_veto_and_their_veto_gives_slots_back() -> None:
    """A receiver of the user's that raises stops the enqueue; the slot the gate took is returned."""

    def veto(**kwargs: Any) -> None:
        raise PermissionError("not now")

    task_state_changing.connect(veto)
    try:
        with pytest.raises(PermissionError):
            fill("g", 1)
    finally:
        task_state_changing.disconnect(veto)
    assert holders("g") == set()
    assert TaskRecord.objects.count() == 0


def test_receiver_of_changed_that_raises_is_logged_and_changes_nothing(caplog: Any) -> None:
    """The outcome is settled before anybody is told."""

    def broken(**kwargs: Any) -> None:
        raise RuntimeError("receiver is broken")

    task_state_changed.connect(broken)
    try:
        fill("g", 1)
    finally:
        task_state_changed.disconnect(broken)
    assert TaskRecord.objects.queued().count() == 1
    assert any("failed" in record.message and record.exc_info for record in caplog.records)


# --- under load ----------------------------------------------------------------------------------------------------

PRODUCERS = 12
LOAD_SECONDS = 10
LIMIT = 5


def produce(folder: Path, mutant: bool) -> list[dict[str, Any]]:
    """Let twelve processes enqueue at one gate, ending each task after a moment; return the history, in order."""
    command = [
        sys.executable,
        "-m",
        "tests.gate_producer",
        str(LOAD_SECONDS),
        str(LIMIT),
        *(["--mutant"] if mutant else []),
    ]
    producers = [
        subprocess.Popen(
            command,
            env=environment(ASYNCQ_TEST_HISTORY=str(folder / f"{number}.jsonl")),
            cwd=Path(__file__).parent.parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PRODUCERS)
    ]
    for producer in producers:
        _, errors = producer.communicate(timeout=LOAD_SECONDS + 60)
        assert producer.returncode == 0, errors
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["at"])


def most_at_once(lines: list[dict[str, Any]]) -> int:
    """Replay a history: the most tasks that were in 0 or 1 at one instant."""
    inside = most = 0
    for line in lines:
        inside += 1 if line["event"] == "in" else -1
        most = max(most, inside)
    return most


def test_twelve_producers_never_pass_the_limit(tmp_path: Path) -> None:
    """At no instant more than five; the gate is used, and empty at the end."""
    lines = produce(tmp_path, mutant=False)
    admitted = sum(line["event"] == "in" for line in lines)
    assert admitted > 100
    assert most_at_once(lines) <= LIMIT
    assert holders("load") == set()


@pytest.mark.faults
def test_naive_check_then_add_passes_the_limit(tmp_path: Path) -> None:
    """The same load with the guard taken out must fail, or the test above proves nothing."""
    assert most_at_once(produce(tmp_path, mutant=True)) > LIMIT
