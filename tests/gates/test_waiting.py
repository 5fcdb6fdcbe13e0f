"""New calls that wait at a full gate: accepted, in order, bounded, and without a slot until one is theirs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_asyncq import QueueFull, gates, lifecycle
from django_asyncq.broker import Broker, keys, scripts
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption
from django_asyncq.fleet.forwarder import WaiterService, forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import FailureReason, Gate, Pause, PauseKind, TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage import database_clock
from django_asyncq.storage.rollbacks import release_rolled_back
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..workers import history, wait_until, workers
from .test_gate import fill, holders, most_at_once
from .test_waiters import failed, leave, look, runs, strike

pytestmark = pytest.mark.django_db(transaction=True)

waiting = tasks.gated.using(on_full="wait")
# One at a time, in order.
lane = tasks.gated_and_fails_once.using(queue_limit=1, on_full="wait", ordered=True)


def row_of(result: Any) -> TaskRecord:
    """Return the row of a result."""
    return TaskRecord.objects.get(id=result.id)


def wait_here(count: int = 1, task: Any = waiting, **options: Any) -> list[Any]:
    """Enqueue calls that may wait at the gate "g"."""
    task = task.using(**options) if options else task
    return [task.enqueue("g") for _ in range(count)]


def waits(result: Any) -> bool:
    """Whether the row says that it waits for a slot."""
    return row_of(result).waits_for_slot


def ids(results: Any) -> list[str]:
    """Return the ids of results."""
    return [result.id for result in results]


def claimed(queue: str = "default") -> list[str]:
    """Claim all that workers could take; return the ids of the runs that would begin."""
    broker = Broker("worker")
    return sorted(str(run.record.id) for run in lifecycle.claim(broker, queue, "w", 99, "default").runs)


# --- a call at a full gate


def test_a_call_at_a_full_gate_is_accepted_and_waits() -> None:
    """It has a row and a place in line, but no slot and no entry; a free slot makes it due at once."""
    filled = fill("g", 5)
    (result,) = wait_here()
    assert result.status.name == "READY"
    row = row_of(result)
    assert (row.state, row.reason, row.retry_at, row.max_waiting) == (
        TaskState.QUEUED,
        FailureReason.GATE_FULL,
        None,
        1000,
    )
    assert gates.waiters("g") == [result.id]
    assert holders("g") == set(ids(filled))
    assert not Broker().client.exists(Broker().keys("default").task_prefix + result.id)
    assert result.id not in claimed()
    leave(filled[0])
    look()
    assert not waits(result)
    assert row_of(result).reason == FailureReason.NONE
    assert claimed() == [result.id]
    assert gates.waiters("g") == []


def test_a_call_at_a_gate_with_room_does_not_wait() -> None:
    """It has its slot at once, as without the option."""
    (result,) = wait_here()
    assert not waits(result)
    assert holders("g") == {result.id}


def test_the_line_is_bounded() -> None:
    """One more is refused, and says how many wait; nothing of it is written."""
    fill("g", 5)
    wait_here(2, max_waiting=2)
    with pytest.raises(QueueFull) as caught:
        wait_here(1, max_waiting=2)
    assert (caught.value.limit, caught.value.waiting) == (5, 2)
    assert TaskRecord.objects.count() == 7
    assert len(gates.waiters("g")) == 2


def test_enqueue_many_takes_free_slots_then_places_then_none() -> None:
    """All or none; with `partial` those beyond the line are refused alone."""
    fill("g", 3)
    task = waiting.using(max_waiting=3)
    with pytest.raises(QueueFull):
        task.enqueue_many([("g",)] * 6)
    assert (TaskRecord.objects.count(), gates.waiters("g"), len(holders("g"))) == (3, [], 3)
    results = task.enqueue_many([("g",)] * 7, partial=True)
    assert [None if result is None else waits(result) for result in results] == [False] * 2 + [True] * 3 + [None] * 2
    assert gates.waiters("g") == ids(results[2:5])


def test_ten_thousand_calls_at_one_gate_wait() -> None:
    """Each script call takes 200 of them, each statement a thousand or more; no call of its own for a task."""
    client = Broker().client
    client.config_resetstat()
    task = waiting.using(max_waiting=20_000)
    counted = Statements()
    with connection.execute_wrapper(counted):
        results = task.enqueue_many([("g",)] * 10_000)
    scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert sum(map(waits, results[:3])) == 0
    assert len(gates.waiters("g")) == 9_995
    assert TaskRecord.objects.waiting_at_gate("g").count() == 9_995
    # 50 ask, 50 give places after the commit, one pushes those that have slots, a few begin.
    assert scripts <= 110
    assert counted.inserts <= 10_000 / 200 + 1


class Statements:
    """Counts INSERT statements."""

    def __init__(self) -> None:
        self.inserts = 0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Count, and go on."""
        self.inserts += sql.startswith("INSERT")
        return execute(sql, params, many, context)


def test_the_highest_priority_is_next_then_the_oldest() -> None:
    """Retries and new calls are in one line."""
    filled = fill("g", 5)
    low, plain = wait_here(1, priority=-5)[0], wait_here()[0]
    retry = failed("g")
    assert lifecycle.retry_due(Broker(), "default", [str(retry.id)]) == 0
    high, last = wait_here(1, priority=7)[0], wait_here()[0]
    assert gates.waiters("g") == [high.id, plain.id, str(retry.id), last.id, low.id]
    leave(*filled[:3])
    look()
    assert [waits(each) for each in (high, plain, last, low)] == [False, False, True, True]
    assert TaskRecord.objects.get(id=retry.id).state == TaskState.QUEUED


def test_a_call_that_may_wait_does_not_overtake_though_nobody_looks() -> None:
    """One that may not takes a free slot when no leader has looked for a while; one that may is accepted anyway."""
    filled = fill("g", 5)
    wait_here()
    leave(filled[0])
    Broker().client.hset(gates.keys("g").meta, "kept", 1)
    (second,) = wait_here()
    assert waits(second)
    assert len(fill("g", 1)) == 1


def test_a_delayed_call_holds_no_slot_until_its_time() -> None:
    """It asks when it is due, and is then in the line like any other."""
    later = waiting.using(run_after=timedelta(hours=1)).enqueue("g")
    row = row_of(later)
    assert (row.waits_for_slot, row.retry_at) == (True, row.run_after)
    assert (holders("g"), gates.waiters("g")) == (set(), [])
    assert Broker().client.zscore(Broker().keys("default").retry, later.id) is not None
    filled = fill("g", 5)
    now = database_clock.now()
    TaskRecord.objects.filter(id=later.id).update(run_after=now, retry_at=now)
    Broker().client.zadd(Broker().keys("default").retry, {later.id: 1})
    forward_due(Broker("worker"), ["default"])
    row = row_of(later)
    assert (row.waits_for_slot, row.retry_at, gates.waiters("g")) == (True, None, [later.id])
    leave(filled[0])
    look()
    assert not waits(later)
    assert later.id in holders("g")
    assert later.id in claimed()


def test_a_delayed_call_that_is_due_at_a_free_gate_runs_at_once() -> None:
    """The forwarder asks the gate and pushes it."""
    later = waiting.using(run_after=timedelta(hours=1)).enqueue("g")
    lifecycle.hurry([row_of(later).id])
    look()
    assert not waits(later)
    assert claimed() == [later.id]


def test_a_paused_gate_lets_calls_wait() -> None:
    """Until it is resumed."""
    Pause.objects.create(kind=PauseKind.GATE, name="g")
    gates.forget_built("g")
    (result,) = wait_here()
    assert waits(result)
    look()
    assert waits(result)
    Pause.objects.all().delete()
    gates.forget_built("g")
    look()
    assert not waits(result)


def test_a_raised_limit_lets_those_in_that_wait() -> None:
    """The limit is that of the row, at once."""
    row = Gate.objects.create(name="g", limit=1)
    results = wait_here(4)
    assert list(map(waits, results)) == [False, True, True, True]
    row.limit = 3
    row.save()
    look()
    assert list(map(waits, results)) == [False, False, False, True]
    row.limit = 0
    row.save()
    look()
    assert not waits(results[3])


@pytest.mark.parametrize(
    "options",
    [
        {"on_full": "later"},
        {"on_full": "wait", "max_waiting": 0},
        {"max_waiting": 5},
        {"ordered": True},
        {"on_full": "wait", "ordered": 1},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    """Each names the option."""
    with pytest.raises(InvalidOption, match=next(reversed(options))):
        tasks.gated.using(**options)


def test_waiting_needs_a_gate() -> None:
    """Without one there is no line."""
    with pytest.raises(InvalidOption, match="gate="):
        tasks.add.using(on_full="wait")


# --- what a transaction does


def test_a_rollback_leaves_nothing_in_the_line() -> None:
    """Of the transaction, and of a savepoint."""
    fill("g", 5)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        wait_here(2)
        assert len(gates.waiters("g")) == 2
        raise ZeroDivisionError
    release_rolled_back()
    assert gates.waiters("g") == []
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            wait_here(1)
            raise ZeroDivisionError
        (kept,) = wait_here()
    release_rolled_back()
    assert gates.waiters("g") == [kept.id]


def test_a_waiter_that_was_forgotten_before_its_commit_has_a_place_after_it() -> None:
    """The leader looks while the transaction is open, and finds no row."""
    filled = fill("g", 5)
    with transaction.atomic():
        (result,) = wait_here()
        Broker().client.zrem(gates.keys("g").waiters, result.id)
    assert gates.waiters("g") == [result.id]
    leave(filled[0])
    look()
    assert not waits(result)


def test_a_veto_leaves_nothing_in_the_line() -> None:
    """A receiver of the project's is asked after the gate."""

    def veto(**kwargs: Any) -> None:
        raise ZeroDivisionError

    fill("g", 5)
    task_state_changing.connect(veto)
    try:
        with pytest.raises(ZeroDivisionError):
            wait_here()
    finally:
        task_state_changing.disconnect(veto)
    assert gates.waiters("g") == []


# --- what befalls one that waits


@pytest.mark.parametrize("end", ["cancel", "expire", "delete"])
def test_one_that_is_closed_waits_no_longer(end: str) -> None:
    """It leaves the line; the next one gets the slot."""
    filled = fill("g", 5)
    first = waiting.using(expires=3600).enqueue("g")
    (second,) = wait_here()
    if end == "cancel":
        assert first.cancel() == "cancelled"
    elif end == "expire":
        TaskRecord.objects.filter(id=first.id).update(expires_at=database_clock.now() - timedelta(seconds=1))
        assert lifecycle.expire() == 1
    else:
        row_of(first).delete()
    assert gates.waiters("g") == [second.id]
    leave(filled[0])
    look()
    assert not waits(second)
    assert len(holders("g")) == 5


def test_an_entry_of_one_that_waits_starts_no_run() -> None:
    """A tool made it pending, or an old copy of Redis came back: its row decides."""
    fill("g", 5)
    (result,) = wait_here()
    record = row_of(result)
    record.reason = FailureReason.NONE
    Broker().enqueue("default", [lifecycle.messages.entry_of(record)])
    assert result.id not in claimed()
    assert waits(result)
    assert len(holders("g")) == 5


def test_a_retry_of_a_call_that_may_wait_is_queued_and_waits() -> None:
    """By itself, and by a person."""
    filled = fill("g", 5)
    own, persons = failed("g"), failed("g", is_due=False)
    TaskRecord.objects.filter(id__in=[own.id, persons.id]).update(max_waiting=9)
    lifecycle.retry_due(Broker(), "default", [str(own.id)])
    assert [row.id for row in lifecycle.retry([persons.id], by_person=True).retried] == [persons.id]
    for each in (own, persons):
        each.refresh_from_db()
        assert each.waits_for_slot
    assert gates.waiters("g") == [str(own.id), str(persons.id)]
    leave(*filled[:2])
    look()
    assert TaskRecord.objects.waiting_at_gate("g").count() == 0
    assert {str(own.id), str(persons.id)} < holders("g")


def test_a_late_release_by_an_earlier_run_leaves_the_new_slot_alone() -> None:
    """Its process stood still while Redis was emptied and the task came in again."""
    filled = fill("g", 5)
    row = failed("g")
    TaskRecord.objects.filter(id=row.id).update(max_waiting=9, fence=5)
    lifecycle.retry_due(Broker(), "default", [str(row.id)])
    leave(filled[0])
    look()
    assert str(row.id) in holders("g")
    row.fence = 5
    gates.release([row])
    assert str(row.id) in holders("g")
    row.fence = 6
    gates.release([row])
    assert str(row.id) not in holders("g")


def test_another_time_and_priority() -> None:
    """A task that waits can be put off, and brought forward."""
    fill("g", 5)
    first, second = wait_here(2)
    lifecycle.reschedule(row_of(second).id, run_after=None, priority=50)
    assert gates.waiters("g") == [second.id, first.id]
    at = database_clock.now() + timedelta(hours=1)
    lifecycle.reschedule(row_of(second).id, run_after=at, priority=50)
    assert gates.waiters("g") == [first.id]
    assert row_of(second).retry_at == at
    lifecycle.hurry([row_of(second).id])
    assert gates.waiters("g") == [second.id, first.id]


def test_a_newer_call_replaces_the_arguments_of_one_that_waits() -> None:
    """It keeps its place, and runs with the newest."""
    filled = fill("g", 5)
    task = waiting.using(unique="{gate}", on_duplicate="replace")
    result = task.enqueue("g", 1.0)
    assert task.enqueue("g", 2.0).id == result.id
    assert waits(result)
    leave(filled[0])
    look()
    assert row_of(result).args == ["g", 2.0]
    assert result.id in claimed()


# --- what Redis forgets


def test_the_line_is_made_again_from_the_rows(redis_client: Any) -> None:
    """By a sweep, in order; slots and places agree with the rows then."""
    fill("g", 5)
    low, first, second = wait_here(1, priority=-1)[0], *wait_here(2)
    later = waiting.using(run_after=timedelta(hours=1)).enqueue("g")
    redis_client.delete(*gates.keys("g"), keys.waiting_gates_key())
    redis_client.delete(Broker().keys("default").retry, *redis_client.keys(f"*{later.id}*"))
    Reconciler(Broker()).sweep()
    assert gates.waiters("g") == [first.id, second.id, low.id]
    assert gates.waiting_gates() == {"g"}
    assert len(holders("g")) == 5
    assert redis_client.zscore(Broker().keys("default").retry, later.id) is not None


def test_a_slot_that_was_given_before_a_crash_is_taken_back() -> None:
    """The leader dies between the gate and the row: two audits later the slot is free."""
    filled = fill("g", 5)
    (result,) = wait_here()
    leave(filled[0])
    gates.confirm([row_of(result)])
    assert result.id in holders("g")
    seen: set[str] = set()
    gates.audit("g", seen=seen)
    assert gates.audit("g", seen=seen).removed == 1
    gates.audit_waiters("g")
    look()
    assert not waits(result)
    assert result.id in holders("g")


def test_calls_are_accepted_while_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: a closed gate lets them wait, and the next look of a sweep gives them their places."""

    def away(*args: Any, **kwargs: Any) -> Any:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(scripts, "run", away)
        (result,) = wait_here()
    assert waits(result)
    Reconciler(Broker()).sweep()
    WaiterService(Broker("worker")).tick((), 0.0)
    assert not waits(result)


# --- lanes


def test_a_retry_in_a_lane_keeps_its_slot() -> None:
    """The next waits; an audit and a gate that is built anew leave the slot with it, until it is final."""
    first, second = lane.enqueue("g"), lane.enqueue("g")
    (run,) = lifecycle.claim(Broker("worker"), "default", "w", 9, "default").runs
    now = database_clock.now()
    lifecycle.begin(run, "w", now)
    lifecycle.fail(run, ValueError("once"), "", now, retry_at=now + timedelta(hours=1))
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker("worker"), "w", [run])
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)
    assert holders("g") == {first.id}
    for _ in range(2):
        Reconciler(Broker()).sweep()
    Broker().client.delete(*gates.keys("g"))
    Reconciler(Broker()).sweep()
    look()
    assert (holders("g"), waits(second)) == ({first.id}, True)
    TaskRecord.objects.filter(id=first.id).update(retry_at=now)
    assert lifecycle.retry_due(Broker(), "default", [first.id]) == 1
    assert (holders("g"), waits(second)) == ({first.id}, True)
    assert first.cancel() == "cancelled"
    look()
    assert not waits(second)


def test_a_lane_runs_its_calls_in_order_with_their_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten calls that fail once each, by four slots in two processes."""
    path = tmp_path / "history"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    results = [lane.enqueue("g") for _ in range(10)]
    with workers(tmp_path, "--processes", "2"):
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 10, "the end of all", 60)
    begun = [line["id"] for line in history(path) if line["event"] == "begin"]
    assert begun == [id for result in results for id in (result.id, result.id)]


def test_the_limit_holds_and_all_run_through_kills_and_lost_memory(
    own_redis: EmbeddedRedis, own_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty calls wait at a gate of two, counted from their own records."""
    path = tmp_path / "history"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    task = tasks.gated.using(queue_limit=2, on_full="wait", max_attempts=9)
    results = task.enqueue_many([("g", 0.02)] * 60)
    with workers(tmp_path, "--processes", "2") as running:
        for forgets in ("nothing", "the gate", "everything"):
            count = len(runs(path))
            wait_until(lambda count=count: len(runs(path)) > count, "a run", 60)  # type: ignore[misc]
            strike(running, forgets)
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 60, "the end of all", 90)
    assert {line["id"] for line in history(path)} == set(ids(results))
    ended = {line["id"] for line in history(path) if line["event"] == "end"}
    assert ended == set(ids(results))
    # A kill leaves the begins of a process without their ends.
    complete = [line for line in runs(path) if line["event"] == "out" or runs_once(path, line["id"])]
    assert most_at_once(complete) <= 2


def runs_once(path: Path, id: str) -> bool:
    """Whether a task has begun once only."""
    return sum(line["id"] == id and line["event"] == "begin" for line in history(path)) == 1
