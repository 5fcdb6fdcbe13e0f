"""Gates: never more tasks QUEUED or RUNNING than the limit, for any number of producers and after any crash."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.utils import timezone

from django_asyncq import GateUnavailable, QueueFull, conf, gates, lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.core.django_internals import delete_rows
from django_asyncq.exceptions import UnknownGate
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import retrying
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changed, task_state_changing
from django_asyncq.storage.routing import transaction_of, writing_database

from .. import acl, tasks
from ..workers import environment, run_workers, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def holders(name: str) -> set[str]:
    """Return the ids that hold a slot."""
    return {slot.id for slot in gates.slots(name)}


def fill(name: str, count: int) -> list[Any]:
    """Enqueue tasks at a gate."""
    return [tasks.gated.enqueue(name) for _ in range(count)]


def test_gate_admits_up_to_its_limit() -> None:
    """The sixth task is refused with gate, limit, occupancy and a time to retry; nothing of it is written."""
    results = fill("g", 5)
    with pytest.raises(QueueFull) as caught:
        tasks.gated.enqueue("g")
    refusal = caught.value
    assert (refusal.gate, refusal.limit, refusal.occupancy, refusal.retry_after) == ("g", 5, 5, 1)
    assert TaskRecord.objects.count() == 5
    assert holders("g") == {result.id for result in results}
    tasks.gated.enqueue("another")


def test_limit_of_a_gate_row_takes_precedence_and_takes_effect_at_once() -> None:
    """Raised, lowered below the occupancy, opened and closed again, all without a restart."""
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


def test_renaming_a_gate_row_removes_the_limit_of_the_old_name() -> None:
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


def test_gate_may_be_a_name_or_a_callable() -> None:
    """Both can be given with `using`."""
    named = tasks.gated.using(gate="fixed", queue_limit=1)
    named.enqueue("x")
    with pytest.raises(QueueFull, match="fixed"):
        named.enqueue("y")
    tasks.add.using(gate=lambda a, b=0: f"made-{a}", queue_limit=1).enqueue(7)
    assert TaskRecord.objects.filter(gate="made-7").count() == 1


def test_slot_is_released_by_every_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success, final failure, and failure with a retry to come all release it."""
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
    """After the commit, for single rows and for a queryset."""
    fill("g", 5)
    with transaction_of(TaskRecord):
        for record in TaskRecord.objects.all()[:2]:
            record.delete()
        assert len(holders("g")) == 5
    assert len(holders("g")) == 3
    TaskRecord.objects.all().delete()
    assert holders("g") == set()


def test_slot_of_a_dead_producer_expires_after_its_provisional_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the commit a slot lasts PROVISIONAL_SECONDS, not an hour."""
    monkeypatch.setattr(conf, "PROVISIONAL_SECONDS", 1)
    gates.acquire([TaskRecord(name="tests.tasks.gated", args=["g"], gate="g", queue_limit=5) for _ in range(5)])
    assert len(holders("g")) == 5
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
    """A confirmed slot lasts ten times the expected time, at least an hour."""
    with transaction_of(TaskRecord):
        fill("g", 1)
        (slot,) = gates.slots("g")
        assert slot.expires_at <= time.time() + 60
    (slot,) = gates.slots("g")
    assert 3500 < slot.expires_at - time.time() <= 3601


def test_task_that_lost_its_slot_at_a_full_gate_is_parked() -> None:
    """The task is RETRYING, and the gate never exceeds its limit."""
    with transaction_of(TaskRecord):
        result = fill("g", 1)[0]
        gates.release_ids("g", [result.id])
        others = [TaskRecord(name="tests.tasks.gated", args=["g"], gate="g", queue_limit=5) for _ in range(5)]
        gates.acquire(others)
    record = TaskRecord.objects.get(id=result.id)
    assert record.state == TaskState.FAILED
    assert record.retry_at is not None
    assert result.id not in holders("g")


def test_slot_that_a_retry_acquired_is_not_released_by_the_run_before() -> None:
    """An outcome may be announced late and more than once; only the run after the retry releases the slot."""
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
    assert acl.unrestricted(Broker().client).hlen(gates.keys("g")[2]) == 0


def test_due_retry_at_a_gate_without_a_limit_is_admitted(redis_client: Any, caplog: Any) -> None:
    """The Gate row was deleted; such a task must not block other due retries."""
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
    assert "1 task admitted without a slot" in caplog.text
    with pytest.raises(UnknownGate):
        tasks.fail_until.using(gate="g").enqueue(9)


def test_limit_changed_during_a_build_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that has read the old limit writes nothing, and the next one reads the new limit."""
    row = Gate.objects.create(name="g", limit=5)
    run, changed = scripts.run, []

    def change_and_run(name: str, *arguments: Any) -> Any:
        if name == "gate_build" and not changed:
            changed.append(name)
            row.limit = 1
            row.save()
        return run(name, *arguments)

    monkeypatch.setattr(scripts, "run", change_and_run)
    gates.build("g")
    assert changed
    assert Broker().client.hget(gates.keys("g")[1], "built") is None
    fill("g", 1)
    with pytest.raises(QueueFull, match="1 of 1"):
        fill("g", 1)


def test_gate_that_was_not_asked_for_long_is_rebuilt(settings: Any) -> None:
    """Redis may have been unreachable until the slots of committed rows expired before they were confirmed."""
    result = fill("g", 4)[0]
    gates.release_ids("g", [result.id])
    meta = gates.keys("g")[1]
    fill("g", 1)
    assert result.id not in holders("g")
    Broker().client.hset(meta, "asked", int(time.time()) - conf.unasked_seconds() - 1)
    with pytest.raises(QueueFull):
        fill("g", 1)
    assert len(holders("g")) == 5


def test_retry_acquires_a_slot_again() -> None:
    """At a full gate the task stays FAILED and is returned as such; with a free slot it is queued."""
    failed = TaskRecord.objects.create(
        name="tests.tasks.gated",
        args=["g"],
        gate="g",
        queue_limit=5,
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        finished_at=timezone.now(),
    )
    fill("g", 5)
    outcome = lifecycle.retry([failed.id], by_person=True)
    assert [record.id for record in outcome.full] == [failed.id]
    TaskRecord.objects.queued().first().delete()  # type: ignore[union-attr]
    assert [record.id for record in lifecycle.retry([failed.id], by_person=True).retried] == [failed.id]
    assert str(failed.id) in holders("g")
    assert lifecycle.retry([failed.id], by_person=True).not_failed == [failed.id]


def failed_at(gate: str, **more: Any) -> TaskRecord:
    """Create a FAILED task of a gate for one task."""
    return TaskRecord.objects.create(
        name="tests.tasks.gated",
        args=[gate],
        gate=gate,
        queue_limit=1,
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        finished_at=None if "retry_at" in more else timezone.now(),
        **more,
    )


def test_slot_of_a_retry_lasts_before_its_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a push is late, no other task gets the slot of a retry that was committed."""
    monkeypatch.setattr(conf, "PROVISIONAL_SECONDS", 1)
    failed = failed_at("g")
    with transaction_of(TaskRecord):
        assert lifecycle.retry([failed.id], by_person=True).retried
        (slot,) = gates.slots("g")
        assert slot.expires_at - time.time() > 3500


def test_rollback_of_a_retry_releases_its_slot() -> None:
    """Though it does not expire by itself."""
    failed = failed_at("g")
    with pytest.raises(ZeroDivisionError), transaction_of(TaskRecord):
        assert lifecycle.retry([failed.id], by_person=True).retried
        raise ZeroDivisionError
    fill("g", 1)
    assert str(failed.id) not in holders("g")


def test_slot_of_a_retry_whose_process_died_is_released_by_the_audit() -> None:
    """The commit never came, and nobody released the slot."""
    failed = failed_at("g")
    gates.acquire([failed], again=True)
    assert holders("g") == {str(failed.id)}
    assert gates.audit("g") == (0, 1)
    assert holders("g") == set()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
def test_audit_leaves_the_slot_of_a_retry_in_an_open_transaction() -> None:
    """Its row says FAILED to everybody else."""
    failed = failed_at("g")
    with ThreadPoolExecutor(1) as thread, transaction_of(TaskRecord):
        assert lifecycle.retry([failed.id], by_person=True).retried
        assert thread.submit(gates.audit, "g").result(timeout=60) == (0, 0)
        thread.submit(connections.close_all).result()
        assert holders("g") == {str(failed.id)}
    assert lifecycle.retry([failed.id], by_person=True).not_failed == [failed.id]


def test_due_retry_whose_push_was_lost_is_pushed_by_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died after the commit: the entry waits in retry still, and is due."""
    failed = failed_at("g", retry_at=timezone.now() - timedelta(seconds=1))
    broker = Broker()
    Reconciler(broker).sweep()
    with monkeypatch.context() as patched:
        patched.setattr(retrying.Redispatch, "follow_up", lambda hook: None)
        assert forward_due(broker, ["default"]).retried == 1
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert lifecycle.claim(broker, "default", "w", 1, "default").runs == []
    assert forward_due(broker, ["default"]).retried == 0
    (run,) = lifecycle.claim(broker, "default", "w", 1, "default").runs
    assert run.record.id == failed.id
    assert holders("g") == {str(failed.id)}


def test_gate_is_rebuilt_from_rows_after_redis_lost_its_memory(own_redis: Any) -> None:
    """The limit holds after Redis was killed: tasks that are queued or running count."""
    fill("g", 5)
    own_redis.kill()
    with pytest.raises(GateUnavailable):
        fill("g", 1)
    own_redis.restart()
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert caught.value.occupancy == 5
    assert TaskRecord.objects.count() == 5


def test_enqueue_many_is_all_or_nothing_unless_partial() -> None:
    """At a gate that has free slots for some of the tasks."""
    fill("g", 2)
    with pytest.raises(QueueFull):
        tasks.gated.enqueue_many([("g",)] * 4)
    assert TaskRecord.objects.count() == 2
    results = tasks.gated.enqueue_many([("g",), ("free",), ("g",), ("g",), ("g",)], partial=True)
    assert [result is not None for result in results] == [True, True, True, True, False]
    assert len(holders("g")) == 5


def test_enqueue_many_in_several_script_calls_is_all_or_nothing() -> None:
    """When the last chunk of a gate is refused, the slots of the first chunks are released."""
    with pytest.raises(QueueFull):
        tasks.gated.using(queue_limit=300).enqueue_many([("big",)] * 450)
    assert holders("big") == set()
    assert len(tasks.gated.using(queue_limit=450).enqueue_many([("big",)] * 450)) == 450


def test_acquiring_twice_succeeds_and_never_shortens_the_slot() -> None:
    """A call that is repeated after a lost reply keeps the slot and its time, also at a full gate."""
    records = [TaskRecord(name="x", gate="g", queue_limit=1) for _ in range(1)]
    assert gates.acquire(records) == gates.confirm(records) == set()
    before = gates.slots("g")
    assert gates.acquire(records) == set()
    assert gates.slots("g")[0].expires_at >= before[0].expires_at


def test_one_call_keeps_grants_and_refuses_slots() -> None:
    """In any order within the call; the fence of a retry is stored only for tasks that are admitted."""
    records = [TaskRecord(name="x", gate="g", queue_limit=3, fence=number) for number in range(1, 6)]
    gates.acquire([records[1], records[3]])
    assert gates.acquire(records, partial=True, again=True) == {records[2].id, records[4].id}
    assert holders("g") == {str(records[index].id) for index in (0, 1, 3)}
    kept = Broker().client.hgetall(gates.keys("g")[2])
    assert kept == {str(records[index].id).encode(): str(index + 1).encode() for index in (0, 1, 3)}


def test_one_push_confirms_the_slots_of_several_gates() -> None:
    """Two gates with limits, an open one, one whose meta was lost and that needs a call of its own, and no gate."""
    Gate.objects.create(name="open", limit=0)
    with transaction_of(TaskRecord):
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


def test_limit_is_read_once_per_script_call(redis_client: Any) -> None:
    """By the script that admits and by the script that pushes, for fifty tasks as for one."""
    fill("warm", 1)
    counts = []
    for count in (1, 50):
        before = redis_client.info("commandstats")["cmdstat_hmget"]["calls"]
        tasks.gated.using(queue_limit=100).enqueue_many([("warm",)] * count)
        counts.append(redis_client.info("commandstats")["cmdstat_hmget"]["calls"] - before)
    assert counts == [2, 2]


def calls() -> int:
    """Return how many scripts Redis has run."""
    count: int = Broker().client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return count


def remaining(name: str) -> float:
    """Return how many seconds the only slot of a gate still lasts."""
    (slot,) = gates.slots(name)
    return slot.expires_at - time.time()


def test_push_confirms_the_slot() -> None:
    """Two script calls: the first acquires the slot, the second pushes and confirms. A delayed task takes three."""
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


def test_cluster_confirms_the_slot_with_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No script may name the keys of a queue and of a gate: acquire, confirm, push."""
    monkeypatch.setattr(Broker, "reaches_all", property(lambda broker: False))
    fill("warm", 1)
    before = calls()
    fill("warm", 1)
    assert calls() - before == 3
    assert {slot.expires_at - time.time() > 3000 for slot in gates.slots("warm")} == {True}


@pytest.mark.parametrize("lost", ["slot", "expired", "gate", "unasked"])
def test_push_acquires_another_slot_when_the_first_is_lost(lost: str) -> None:
    """Between slot and commit the slot was removed or expired, or Redis was emptied or unreachable."""
    members, meta, *_ = gates.keys("g")
    client = Broker().client
    with transaction_of(TaskRecord):
        (result,) = fill("g", 1)
        if lost == "slot":
            client.zrem(members, result.id)
        elif lost == "expired":
            client.zadd(members, {result.id: int(time.time()) - 1})
        elif lost == "gate":
            client.delete(members, meta)
        else:
            client.hset(meta, "asked", int(time.time()) - conf.unasked_seconds() - 2)
    assert holders("g") == {result.id}
    assert remaining("g") > 3000
    assert [lease.id for lease in Broker().dequeue("default", "w", 9, 9).leases] == [result.id]


def test_push_parks_a_task_whose_slot_another_task_holds() -> None:
    """The gate is full without it: the task waits for a retry, and no queue has it."""
    with transaction_of(TaskRecord):
        (result,) = tasks.gated.using(queue_limit=1).enqueue_many([("g",)])
        Broker().client.zrem(gates.keys("g")[0], result.id)
        gates.acquire([stranger := TaskRecord(name="x", gate="g", queue_limit=1)])
    assert holders("g") == {str(stranger.id)}
    assert TaskRecord.objects.get().state == TaskState.FAILED
    assert Broker().dequeue("default", "w", 9, 9).leases == []


def test_open_gate_and_gate_without_a_limit_delay_no_push(caplog: Any) -> None:
    """No task needs a slot there."""
    Gate.objects.create(name="open", limit=0)
    fill("open", 2)
    row = Gate.objects.create(name="gone", limit=5)
    with transaction_of(TaskRecord):
        lifecycle.enqueue([TaskRecord(name=tasks.gated.module_path, gate="gone", args=["gone"])])
        delete_rows(Gate.objects.filter(id=row.id), writing_database(Gate))
        gates.forget_built("gone")
    assert holders("open") == set()
    assert len(Broker().dequeue("default", "w", 9, 9).leases) == 3
    assert "1 task admitted without a slot" in caplog.text


def test_audit_finds_slots_of_a_gate_without_live_tasks() -> None:
    """The row of the task was deleted; the audit releases its slot and leaves gates of other programs alone."""
    (result,) = fill("left", 1)
    fill("busy", 1)
    Broker().client.zadd(gates.keys("theirs").members, {"a": int(time.time()) + 3600})
    delete_rows(TaskRecord.objects.filter(id=result.id), writing_database(TaskRecord))
    assert gates.occupied() == {"left", "busy"}
    reconciler = Reconciler(Broker())
    reconciler.sweep()
    reconciler.quick_repairs()
    assert gates.occupied() == {"busy"}
    assert holders("theirs") == {"a"}


def test_audit_adds_missing_slots_and_removes_stale_ones() -> None:
    """Provisional slots are left alone, and a second audit changes nothing."""
    result = fill("g", 1)[0]
    gates.release_ids("g", [result.id])
    stranger = TaskRecord(name="x", gate="g", queue_limit=5)
    gates.acquire([stranger])
    gates.confirm([stranger])
    uncommitted = TaskRecord(name="x", gate="g", queue_limit=5)
    gates.acquire([uncommitted])
    assert gates.audit("g") == (1, 1)
    assert holders("g") == {result.id, str(uncommitted.id)}
    assert gates.audit("g") == (0, 0)


def test_receivers_of_the_project_are_not_asked_about_a_task_that_a_gate_refuses() -> None:
    """The gates' own receiver comes first, though what it does is imported with the first task."""
    fill("g", 1)
    asked: list[Any] = []

    def ask(**kwargs: Any) -> None:
        asked.extend(kwargs["records"])

    task_state_changing.connect(ask)
    try:
        with pytest.raises(QueueFull):
            tasks.gated.using(queue_limit=1).enqueue("g")
    finally:
        task_state_changing.disconnect(ask)
    assert asked == []


def test_veto_of_a_receiver_releases_the_slot() -> None:
    """A receiver of the project that raises stops the enqueue; the slot acquired before is released."""

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


def test_error_in_a_receiver_of_task_state_changed_is_logged_and_changes_nothing(caplog: Any) -> None:
    """The change is committed before the signal is sent."""

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
    """Let twelve processes enqueue at one gate and finish each task after a moment; return the history in order."""
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
            cwd=Path(__file__).parent.parent.parent,
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
    """Replay a history; return the largest number of tasks that were QUEUED or RUNNING at one instant."""
    inside = most = 0
    for line in lines:
        inside += 1 if line["event"] == "in" else -1
        most = max(most, inside)
    return most


@pytest.mark.slow
def test_twelve_producers_never_exceed_the_limit(tmp_path: Path) -> None:
    """Never more than five at one instant; the gate is well used, and empty afterwards."""
    lines = produce(tmp_path, mutant=False)
    admitted = sum(line["event"] == "in" for line in lines)
    assert admitted > 100
    assert most_at_once(lines) <= LIMIT
    assert holders("load") == set()


@pytest.mark.faults
def test_naive_check_then_add_exceeds_the_limit(tmp_path: Path) -> None:
    """The same load without the guard must fail, or the test above proves nothing."""
    assert most_at_once(produce(tmp_path, mutant=True)) > LIMIT
