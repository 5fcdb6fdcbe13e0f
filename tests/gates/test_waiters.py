"""Waiters: retries that found their gate full get in when it has a free slot, in order, before new tasks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction
from django.utils import timezone

from django_asyncq import QueueFull, conf, gates, lifecycle
from django_asyncq.broker import Broker, keys, scripts
from django_asyncq.broker.waits import SupervisorListener
from django_asyncq.core.django_internals import delete_rows
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.fleet.forwarder import LOOK_SECONDS, WaiterService, forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.gates.auditor import Look
from django_asyncq.gates.members import KEPT_SECONDS
from django_asyncq.leadership.coordinator import key_of
from django_asyncq.leadership.lock_files import Owner
from django_asyncq.lifecycle import retrying
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage.isolation import set_aside
from django_asyncq.testing import EmbeddedRedis

from .. import script_mutants, tasks
from ..workers import Workers, history, wait_until, workers
from .test_gate import fill, holders, most_at_once

pytestmark = pytest.mark.django_db(transaction=True)


def failed(name: str, *, queue: str = "default", is_due: bool = True, limit: int = 5) -> TaskRecord:
    """Return a FAILED task of a gate, by default one whose retry is due."""
    now = timezone.now()
    return TaskRecord.objects.create(
        name=tasks.gated.module_path,
        args=[name],
        gate=name,
        queue_limit=limit,
        queue_name=queue,
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        retry_at=now - timedelta(seconds=1) if is_due else None,
        finished_at=None if is_due else now,
    )


def wait_at(name: str, count: int = 1, **options: Any) -> list[str]:
    """Let tasks wait at a full gate, one after the other; return their ids."""
    ids = []
    for _ in range(count):
        record = failed(name, **options)
        assert lifecycle.retry_due(Broker(), record.queue_name, [str(record.id)]) == 0
        ids.append(str(record.id))
    return ids


def leave(*results: Any) -> None:
    """Delete tasks, so that their slots are free."""
    for result in results:
        TaskRecord.objects.get(id=result.id).delete()


def look(name: str = "g") -> None:
    """Do what the leader does when a slot of the gate is released."""
    WaiterService(Broker("worker")).admit(name)


def set_kept(name: str, seconds_ago: float) -> None:
    """Let the last look at the waiters have been so long ago."""
    Broker().client.hset(gates.keys(name)[1], "kept", int(time.time() - seconds_ago))


def queued(ids: list[str]) -> list[str]:
    """Return those of the tasks that are QUEUED, in the given order."""
    found = {str(id) for id in TaskRecord.objects.queued().values_list("id", flat=True)}
    return [id for id in ids if id in found]


# --- the order


def test_a_retry_at_a_full_gate_waits() -> None:
    """Its row says so, it keeps the text of its last error, and no attempt is used."""
    fill("g", 5)
    (id,) = wait_at("g")
    row = TaskRecord.objects.get(id=id)
    assert (row.state, row.reason, row.attempt) == (TaskState.FAILED, FailureReason.GATE_FULL, 0)
    assert row.retry_at is not None and row.retry_at > timezone.now() + timedelta(seconds=20)
    assert gates.waiters("g") == [id]
    assert gates.waiting_gates() == {"g"}


def test_waiters_get_in_in_the_order_in_which_they_began_to_wait() -> None:
    """As many as there are free slots, whichever queue they are in."""
    filled = fill("g", 5)
    first = failed("g")
    ids = [*wait_at("g", queue="other"), *wait_at("g", 2), *wait_at("g", queue="other")]
    assert lifecycle.retry_due(Broker(), "default", [str(first.id)]) == 0
    ids.append(str(first.id))
    assert gates.waiters("g") == ids
    leave(*filled[:2])
    look()
    assert queued(ids) == ids[:2]
    assert gates.waiters("g") == ids[2:]
    assert len(holders("g")) == 5
    leave(*filled[2:])
    look()
    assert queued(ids) == ids
    assert gates.waiters("g") == []
    assert len(Broker().dequeue("other", "w", 9, 9).leases) == 2


def test_a_waiter_that_is_refused_again_keeps_its_place() -> None:
    """At its `retry_at` it asks once more."""
    fill("g", 5)
    ids = wait_at("g", 3)
    assert lifecycle.retry_due(Broker(), "default", [ids[1], ids[0]]) == 0
    assert gates.waiters("g") == ids


def test_a_waiter_does_not_overtake_an_older_one() -> None:
    """Whose retry is due is retried, but the free slot is another's."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    leave(filled[0])
    assert lifecycle.retry_due(Broker(), "default", [ids[1]]) == 0
    assert lifecycle.retry_due(Broker(), "default", [ids[0]]) == 1
    assert gates.waiters("g") == [ids[1]]


def test_retries_that_become_due_together_wait_in_the_order_of_their_ids() -> None:
    """The oldest tasks get the free slots, and are next."""
    filled = fill("g", 5)
    records = [failed("g") for _ in range(4)]
    leave(filled[0])
    ids = [str(record.id) for record in records]
    assert lifecycle.retry_due(Broker(), "default", ids[::-1]) == 1
    assert queued(ids) == ids[:1]
    assert gates.waiters("g") == ids[1:]


def test_a_new_task_is_behind_all_waiters() -> None:
    """It is refused while the free slots are theirs, and told how many wait and when to come back."""
    filled = fill("g", 5)
    wait_at("g", 2)
    leave(*filled[:2])
    with pytest.raises(QueueFull, match="3 of 5 queued or running, 2 waiting to be retried") as caught:
        fill("g", 1)
    assert (caught.value.occupancy, caught.value.waiting, caught.value.retry_after) == (3, 2, 1)
    leave(filled[2])
    fill("g", 1)
    with pytest.raises(QueueFull):
        fill("g", 1)
    look()
    assert len(holders("g")) == 5


def test_the_time_to_come_back_counts_the_waiters() -> None:
    """Of two slots one is released every ten seconds, and three tasks are before the new one."""
    Gate.objects.create(name="g", limit=2, expected_seconds=20)
    fill("g", 2)
    wait_at("g", 3)
    with pytest.raises(QueueFull) as caught:
        fill("g", 1)
    assert caught.value.retry_after == 40


def test_enqueue_many_takes_only_the_slots_that_no_waiter_has() -> None:
    """All or nothing, or as many as possible."""
    filled = fill("g", 5)
    wait_at("g")
    leave(*filled[:3])
    with pytest.raises(QueueFull):
        tasks.gated.enqueue_many([("g",)] * 3)
    results = tasks.gated.enqueue_many([("g",)] * 3, partial=True)
    assert [result is not None for result in results] == [True, True, False]
    look()
    assert len(holders("g")) == 5


def test_a_retry_by_a_person_is_behind_all_waiters_unless_it_waits_itself() -> None:
    """A failed task has no place; the task that is next has one, whoever retries it."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    stranger = failed("g", is_due=False)
    leave(filled[0])
    refused = lifecycle.retry([stranger.id], by_person=True).full
    assert [record.id for record in refused] == [stranger.id]
    rows = {str(row.id): row.id for row in TaskRecord.objects.filter(id__in=ids)}
    assert len(lifecycle.retry([rows[ids[1]]], by_person=True).full) == 1
    assert len(lifecycle.retry([rows[ids[0]]], by_person=True).retried) == 1
    assert gates.waiters("g") == [ids[1]]


def test_a_task_that_lost_its_slot_waits_like_a_retry() -> None:
    """Its slot was lost before the push, and other tasks have all slots by then."""
    with transaction.atomic():
        (result,) = tasks.gated.using(queue_limit=1).enqueue_many([("g",)])
        gates.release_ids("g", [str(result.id)])
        gates.acquire([stranger := TaskRecord(name="x", gate="g", queue_limit=1)])
    assert gates.waiters("g") == [str(result.id)]
    gates.release_ids("g", [str(stranger.id)])
    with pytest.raises(QueueFull):
        tasks.gated.using(queue_limit=1).enqueue("g")
    look()
    assert holders("g") == {str(result.id)}


# --- events, and the looks that need none


@pytest.fixture
def free_slots() -> Iterator[tuple[SupervisorListener, threading.Event]]:
    """Listen as a supervisor does; return the listener and the event of its free slots."""
    event = threading.Event()
    listener = SupervisorListener(free_slot=event)
    listener.start()
    wait_until(listener.event.is_set, "the subscription")
    listener.event.clear()
    yield listener, event
    listener.stop()


def test_a_released_slot_is_announced_where_tasks_wait(free_slots: Any) -> None:
    """With the name of the gate, to the loop of the waiters only. Other gates announce nothing."""
    listener, event = free_slots
    filled, others = fill("g", 5), fill("nobody-waits", 2)
    wait_at("g")
    wait_until(listener.event.is_set, "the message that a retry is due before all others")
    listener.event.clear()
    leave(*others)
    leave(filled[0])
    wait_until(event.is_set, "the message")
    assert listener.take_gates() == {"g"}
    assert listener.take_gates() == set()
    assert not listener.event.is_set()


def test_only_the_announced_gates_are_looked_at_between_two_looks_at_all() -> None:
    """A look at all gates comes at once, then every second."""
    filled = {name: fill(name, 5) for name in ("a", "b")}
    ids = {name: wait_at(name)[0] for name in ("a", "b")}
    service = WaiterService(Broker("worker"))
    assert service.tick([], 100.0) == LOOK_SECONDS
    for name in ("a", "b"):
        leave(filled[name][0])
    assert service.tick(["a"], 100.25) == LOOK_SECONDS - 0.25
    assert queued([ids["a"], ids["b"]]) == [ids["a"]]
    service.tick([], 100.0 + LOOK_SECONDS)
    assert queued([ids["b"]]) == [ids["b"]]
    service.tick([], 100.0 + 2 * LOOK_SECONDS)
    assert gates.waiting_gates() == set()


@pytest.mark.parametrize("change", ["slot expires", "limit raised", "no limit", "row deleted, no other limit"])
def test_a_look_finds_free_slots_that_nobody_announced(change: str) -> None:
    """A slot expired, or a person edited the gate."""
    row = Gate.objects.create(name="g", limit=1)
    own = tasks.gated.using(queue_limit=None)
    filled = own.enqueue("g")
    (id,) = wait_at("g", limit=None)
    if change == "slot expires":
        delete_rows(TaskRecord.objects.filter(id=filled.id), "default")
        Broker().client.zadd(gates.keys("g")[0], {str(filled.id): int(time.time()) - 1})
    elif change == "limit raised":
        row.limit = 2
        row.save()
    elif change == "no limit":
        row.limit = 0
        row.save()
    else:
        row.delete()
    WaiterService(Broker("worker")).tick([], 100.0)
    assert queued([id]) == [id]
    assert gates.waiters("g") == []


def test_more_waiters_than_one_call_takes_get_in_in_one_look() -> None:
    """A person has removed the limit."""
    row = Gate.objects.create(name="g", limit=1)
    fill("g", 1)
    records = [failed("g") for _ in range(230)]
    for start in (0, 115):
        lifecycle.retry_due(Broker(), "default", [str(record.id) for record in records[start : start + 115]])
    assert len(gates.waiters("g")) == 230
    row.limit = 0
    row.save()
    look()
    assert gates.waiters("g") == []
    assert TaskRecord.objects.queued().count() == 231


def test_a_gate_at_which_a_task_begins_to_wait_during_a_look_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look that found nobody and the note that nobody waits."""
    fill("g", 5)
    real, begun = gates.look, []

    def look_and_wait(name: str, most: int) -> Look:
        found = real(name, most)
        if not begun:
            begun.extend(wait_at("g"))
        return found

    monkeypatch.setattr(gates, "look", look_and_wait)
    look()
    assert gates.waiters("g") == begun
    assert gates.waiting_gates() == {"g"}


# --- what must never close a gate


@pytest.mark.parametrize("end", ["deleted", "succeeded", "no id"])
def test_a_waiter_that_exists_only_in_redis_is_forgotten_at_its_turn(end: str) -> None:
    """Its row is gone or finished, or some program wrote anything there; the next one gets in with the same look."""
    filled = fill("g", 5)
    if end == "no id":
        Broker().client.zadd(gates.keys("g")[3], {b"\xffno id": "-inf"})
    else:
        (dead,) = wait_at("g")
        rows = TaskRecord.objects.filter(id=dead)
        if end == "deleted":
            delete_rows(rows, "default")
        else:
            rows.update(state=TaskState.SUCCEEDED, reason=0, retry_at=None, finished_at=timezone.now())
    (id,) = wait_at("g")
    leave(filled[0])
    look()
    assert queued([id]) == [id]
    assert gates.waiters("g") == []
    assert gates.waiting_gates() == set()
    leave(filled[1])
    fill("g", 1)


def test_without_a_leader_waiters_hold_up_new_tasks_for_a_bounded_time_only() -> None:
    """Nobody looks at them; each still gets in at its `retry_at`, wherever there is a supervisor."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    leave(*filled[:2])
    set_kept("g", KEPT_SECONDS - 2)
    with pytest.raises(QueueFull):
        fill("g", 1)
    set_kept("g", KEPT_SECONDS + 2)
    fill("g", 1)
    assert lifecycle.retry_due(Broker(), "default", [ids[1]]) == 1
    with pytest.raises(QueueFull, match="5 of 5 queued or running;"):
        fill("g", 1)


def test_waiters_that_join_others_do_not_prolong_the_order() -> None:
    """Only looks do. The first waiter of a gate is in time for the next look."""
    filled = fill("g", 5)
    wait_at("g")
    set_kept("g", KEPT_SECONDS + 2)
    wait_at("g")
    leave(filled[0])
    fill("g", 1)


def test_a_look_keeps_the_order() -> None:
    """Whether it finds a free slot or not."""
    filled = fill("g", 5)
    wait_at("g", 2)
    set_kept("g", KEPT_SECONDS + 2)
    look()
    leave(filled[0])
    with pytest.raises(QueueFull):
        fill("g", 1)
    set_kept("g", KEPT_SECONDS + 2)
    look()
    leave(filled[1])
    with pytest.raises(QueueFull):
        fill("g", 1)


def test_a_look_that_fails_does_not_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or waiters that the leader cannot retry would close their gate for ever."""
    filled = fill("g", 5)
    wait_at("g")
    leave(filled[0])
    set_kept("g", KEPT_SECONDS + 2)
    monkeypatch.setattr(lifecycle, "retry_waiting", mock.Mock(side_effect=BrokerUnavailable("the database is away")))
    with pytest.raises(BrokerUnavailable):
        look()
    fill("g", 1)


@contextmanager
def vetoed(id: str) -> Iterator[None]:
    """A receiver of the project refuses each change that this task is part of."""

    def veto(*, records: list[TaskRecord], **kwargs: Any) -> None:
        if any(str(record.id) == id for record in records):
            raise PermissionError("not this one")

    task_state_changing.connect(veto)
    try:
        yield
    finally:
        task_state_changing.disconnect(veto)


def test_a_waiter_whose_retry_is_vetoed_holds_no_slot() -> None:
    """It is retried some seconds later, and then waits again behind the others."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    leave(filled[0])
    with vetoed(ids[0]):
        look()
    assert queued(ids) == ids[1:]
    row = TaskRecord.objects.get(id=ids[0])
    assert row.retry_at is not None
    assert row.retry_at < timezone.now() + timedelta(seconds=retrying.VETO_RETRY_SECONDS + 1)


def test_a_waiter_whose_row_the_database_refuses_holds_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set aside as any odd row; the next one gets in with the same look."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    leave(*filled[:2])
    real = lifecycle.retry_waiting

    def refuse(broker: Broker, some: list[str]) -> list[str]:
        if ids[0] in some:
            raise IntegrityError("a constraint of the project")
        return real(broker, some)

    monkeypatch.setattr(lifecycle, "retry_waiting", refuse)
    try:
        look()
    finally:
        set_aside.clear()
    assert queued(ids) == ids[1:]
    assert gates.waiters("g") == []


def test_a_deleted_waiter_waits_no_longer() -> None:
    """After the commit."""
    fill("g", 5)
    ids = wait_at("g", 2)
    TaskRecord.objects.get(id=ids[0]).delete()
    assert gates.waiters("g") == ids[1:]


# --- a place that is kept


def test_a_veto_costs_no_other_waiter_its_place() -> None:
    """All that got a slot with the vetoed one give it back, and are next again."""
    filled = fill("g", 5)
    ids = wait_at("g", 5)
    leave(*filled[:2])
    with vetoed(ids[0]):
        look()
    assert queued(ids) == ids[1:3]
    assert gates.waiters("g") == ids[3:]


def test_a_retry_that_the_database_refuses_costs_no_slot_and_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look finds the same; not only the one at its `retry_at`."""
    filled = fill("g", 5)
    ids = wait_at("g", 3)
    leave(*filled[:2])
    with monkeypatch.context() as patched:
        refuse = mock.Mock(side_effect=OperationalError("deadlock"))
        patched.setattr("django.db.models.query.QuerySet.update", refuse)
        with pytest.raises(OperationalError):
            look()
    assert len(holders("g")) == 3
    assert gates.waiters("g") == ids
    look()
    assert queued(ids) == ids[:2]


def test_waiters_keep_their_places_while_their_gate_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look has failed; it postpones nobody and keeps no order."""
    filled = fill("g", 5)
    ids = wait_at("g", 2)
    leave(filled[0])
    before = list(TaskRecord.objects.filter(id__in=ids).order_by("id").values_list("retry_at", flat=True))
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.gates.admission._admit_some", mock.Mock(side_effect=BrokerUnavailable("away")))
        with pytest.raises(BrokerUnavailable):
            look()
    assert gates.waiters("g") == ids
    rows = TaskRecord.objects.filter(id__in=ids).order_by("id")
    assert list(rows.values_list("retry_at", flat=True)) == before
    look()
    assert queued(ids) == ids[:1]


def test_a_task_that_does_not_wait_is_not_retried_before_its_time() -> None:
    """It got in and failed again since; Redis still has it among the waiters, as after an audit at that moment."""
    filled = fill("g", 5)
    (id,) = wait_at("g")
    later = timezone.now() + timedelta(hours=1)
    TaskRecord.objects.filter(id=id).update(reason=FailureReason.EXCEPTION, retry_at=later)
    leave(filled[0])
    look()
    assert queued([id]) == []
    assert TaskRecord.objects.get(id=id).retry_at == later
    assert gates.waiters("g") == []


def test_a_refused_retry_is_postponed_before_anybody_else_can_retry_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is committed, the leader may let it in, and it may fail again: it then has another time."""
    fill("g", 5)
    record, later = failed("g"), timezone.now() + timedelta(hours=1)
    real = retrying.retry

    def retry_and_fail_again(*arguments: Any, **options: Any) -> lifecycle.Retried:
        result = real(*arguments, **options)
        row = TaskRecord.objects.get(id=record.id)
        assert (row.reason, row.retry_at > timezone.now() + timedelta(seconds=20)) == (FailureReason.GATE_FULL, True)
        TaskRecord.objects.filter(id=record.id).update(reason=FailureReason.EXCEPTION, retry_at=later)
        return result

    monkeypatch.setattr(retrying, "retry", retry_and_fail_again)
    assert lifecycle.retry_due(Broker(), "default", [str(record.id)]) == 0
    row = TaskRecord.objects.get(id=record.id)
    assert (row.reason, row.retry_at) == (FailureReason.EXCEPTION, later)


def test_each_task_is_admitted_by_the_limit_that_it_brings() -> None:
    """Without a Gate row; they are retried in one call."""
    fill("g", 2)
    wide, narrow = failed("g", limit=5), failed("g", limit=1)
    assert lifecycle.retry_due(Broker(), "default", [str(wide.id), str(narrow.id)]) == 1
    assert queued([str(wide.id), str(narrow.id)]) == [str(wide.id)]
    assert gates.waiters("g") == [str(narrow.id)]


def test_different_limits_at_one_gate_do_not_keep_the_leader_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It retries a task only while there may be room by the limit that the last refused task brought."""
    fill("g", 3)
    ids = [*wait_at("g", limit=1), *wait_at("g", limit=2), *wait_at("g", limit=3)]
    asked = mock.Mock(side_effect=lifecycle.retry_waiting)
    monkeypatch.setattr(lifecycle, "retry_waiting", asked)
    for _ in range(5):
        look()
    assert asked.call_count == 0
    results = TaskRecord.objects.queued().order_by("id")
    leave(results[0])
    for _ in range(5):
        look()
    assert asked.call_count <= 1
    leave(*TaskRecord.objects.queued())
    for _ in range(5):
        look()
    assert queued(ids) == ids[:1]


# --- lost memory


def test_waiters_are_known_again_when_a_gate_is_built() -> None:
    """Redis was emptied; the first request builds the gate, and new tasks are behind those that wait, oldest first."""
    filled = fill("g", 5)
    ids = wait_at("g", 3)
    leave(filled[0])
    Broker().client.delete(*gates.keys("g"), keys.waiting_gates_key())
    with pytest.raises(QueueFull):
        fill("g", 1)
    assert gates.waiters("g") == ids
    assert gates.waiting_gates() == {"g"}
    look()
    assert queued(ids) == ids[:1]


def test_a_sweep_makes_the_waiters_agree_with_the_rows() -> None:
    """Those that Redis lacks are added, those without a row are removed when they are seen again."""
    fill("g", 5)
    ids = wait_at("g", 3)
    waiting = gates.keys("g")[3]
    Broker().client.zrem(waiting, ids[0])
    delete_rows(TaskRecord.objects.filter(id=ids[1]), "default")
    reconciler = Reconciler(Broker())
    reconciler.sweep()
    assert set(gates.waiters("g")) == set(ids)
    reconciler.sweep()
    assert set(gates.waiters("g")) == {ids[0], ids[2]}


def test_a_waiter_that_redis_has_forgotten_is_retried_at_its_time(redis_client: Any) -> None:
    """`retry_at` in the row is the backstop."""
    filled = fill("g", 5)
    (id,) = wait_at("g")
    Broker().client.delete(gates.keys("g")[3], keys.waiting_gates_key())
    leave(filled[0])
    look()
    assert queued([id]) == []
    redis_client.zadd(keys.keys_of("default").retry, {id: 1})
    assert forward_due(Broker(), ["default"]).retried == 1
    assert queued([id]) == [id]


# --- mutants: without its guard a script fails the test that is named beside it

GUARDED_BY: dict[str, Callable[[], None]] = {
    "gate that lets new tasks come before waiters": test_a_new_task_is_behind_all_waiters,
    "gate whose waiters overtake each other": test_a_waiter_does_not_overtake_an_older_one,
    "gate that keeps its waiters": test_a_retry_by_a_person_is_behind_all_waiters_unless_it_waits_itself,
    "gate whose waiters lose their place": test_a_waiter_that_is_refused_again_keeps_its_place,
    "look that leaves the order to lapse": test_a_look_keeps_the_order,
    "waiters that keep their order themselves": test_waiters_that_join_others_do_not_prolong_the_order,
}


@pytest.mark.parametrize("mutant", GUARDED_BY)
def test_finds_a_script_without_its_guard(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard of the order is needed by the test that says what it is for."""
    monkeypatch.setattr(scripts, "script", script_mutants.without(script_mutants.WAITERS[mutant]))
    with pytest.raises((AssertionError, QueueFull, pytest.fail.Exception)):
        GUARDED_BY[mutant]()


# --- with real workers


class Watch:
    """Look at the gate's rows from a thread, and remember the most that were QUEUED or RUNNING at once."""

    def __init__(self, name: str) -> None:
        self.most = 0
        self._name = name
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        rows = TaskRecord.objects.at_gate(self._name).filter(state__in=gates.LIVE_STATES)
        while not self._is_over.wait(0.01):
            self.most = max(self.most, rows.count())
        connections.close_all()


def runs(path: Path) -> list[dict[str, Any]]:
    """Return begins and ends in order, with the words of `most_at_once`."""
    words = {"begin": "in", "end": "out"}
    lines = [{**line, "event": words[line["event"]]} for line in history(path) if line["event"] in words]
    return sorted(lines, key=lambda line: line["at"])


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let tasks write their history there."""
    path = tmp_path / "history"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def begin_with_twenty_waiters() -> None:
    """Enqueue twenty tasks that fail once, then give their gate a limit of one."""
    row = Gate.objects.create(name="g", limit=20, expected_seconds=1)
    tasks.gated_and_fails_once.enqueue_many([("g",)] * 20)
    row.limit = 1
    row.save()


@contextmanager
def twenty_that_wait(folder: Path, *options: str, limit: int) -> Iterator[Workers]:
    """Run workers at a gate where twenty tasks wait that have failed once; none is admitted before.

    Delayed tasks hold all its slots until then.
    """
    row = Gate.objects.create(name="g", limit=20 + limit, expected_seconds=1)
    delayed = tasks.gated.using(run_after=timedelta(hours=1))
    blocking = [delayed.enqueue("g") for _ in range(limit)]
    tasks.gated_and_fails_once.enqueue_many([("g",)] * 20)
    row.limit = limit
    row.save()
    with workers(folder, *options) as running:
        wait_until(lambda: len(gates.waiters("g")) == 20, "waiters")
        for each in blocking:
            assert each.cancel() == "cancelled"
        yield running


def has_begun_more(path: Path, count: int) -> bool:
    """Return whether runs have begun or ended since, or all have."""
    return len(runs(path)) > count or has_succeeded(20)


def has_succeeded(count: int) -> bool:
    """Return whether so many tasks that failed once have succeeded."""
    return TaskRecord.objects.succeeded().filter(name=tasks.gated_and_fails_once.module_path).count() == count


def test_twenty_retries_at_a_gate_of_one_follow_each_other(tmp_path: Path, history_path: Path) -> None:
    """Tasks of 10 ms that fail once: each free slot is announced; looks alone would take minutes."""
    begin_with_twenty_waiters()
    with workers(tmp_path):
        wait_until(lambda: len(runs(history_path)) >= 40, "the first attempts")
        wait_until(lambda: has_succeeded(20), "the end of all", 20)
    retries = runs(history_path)[40:]
    assert most_at_once(retries) == 1
    assert gates.waiters("g") == []


def test_a_producer_that_never_stops_does_not_starve_the_waiters(tmp_path: Path, history_path: Path) -> None:
    """It asks all the time, and gets in when nobody waits any more; the limit holds all the while."""
    admitted_while_waiting = refused = 0
    with twenty_that_wait(tmp_path, limit=1):
        with Watch("g") as watch:
            deadline = time.monotonic() + 30
            while not has_succeeded(20) and time.monotonic() < deadline:
                had_waiters = len(gates.waiters("g")) > 1
                try:
                    tasks.gated.using(queue_limit=1).enqueue("g", 0.01)
                    admitted_while_waiting += had_waiters
                except QueueFull:
                    refused += 1
            assert has_succeeded(20)
        wait_until(lambda: not holders("g"), "an empty gate")
        fill("g", 1)
    assert watch.most == 1
    assert refused > 20
    assert admitted_while_waiting <= 2


def strike(running: Workers, forgets: str) -> None:
    """Kill a worker process, and let Redis forget "nothing", "the gate" or "everything"."""
    for pid in running.children()[:1]:
        os.kill(pid, signal.SIGKILL)
    if forgets == "the gate":
        Broker().client.delete(*gates.keys("g"), keys.waiting_gates_key())
    elif forgets == "everything":
        Broker().client.flushall()


def test_the_limit_holds_and_all_get_in_through_kills_and_lost_memory(
    own_redis: EmbeddedRedis, own_keys: None, tmp_path: Path, history_path: Path
) -> None:
    """Worker processes die in the middle of runs. Redis forgets the gate, and then everything."""
    with twenty_that_wait(tmp_path, "--processes", "2", limit=2) as running:
        with Watch("g") as watch:
            for forgets in ("nothing", "the gate", "everything"):
                count = len(runs(history_path))
                wait_until(partial(has_begun_more, history_path, count), "a run")
                strike(running, forgets)
            wait_until(lambda: has_succeeded(20), "the end of all", 60)
        wait_until(lambda: not holders("g"), "an empty gate", 90)
    assert watch.most <= 2


def leader() -> int:
    """Return the pid of the supervisor that leads, or 0."""
    value = Broker().client.get(key_of(f"{conf.current().key_prefix}.maintenance"))
    owner = Owner.read(value.decode()) if value else None
    return owner.pid if owner else 0


def postpone(ids: list[str]) -> None:
    """Let the retries of waiting tasks be due in an hour, so that only a look of the leader lets them in."""
    later = timezone.now() + timedelta(hours=1)
    TaskRecord.objects.filter(id__in=ids).update(retry_at=later)
    Broker().client.zadd(keys.keys_of("default").retry, dict.fromkeys(ids, int(later.timestamp())), xx=True)


def test_the_next_leader_lets_the_waiters_in(
    tmp_path: Path, history_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is killed while tasks wait; the slot is released before there is another. All get in, in order."""
    monkeypatch.setenv("ASYNCQ_TEST_LOCK_TTL", "3")
    Gate.objects.create(name="g", limit=1)
    holder = tasks.gated.using(queue_name="other").enqueue("g")
    ids = wait_at("g", 6)
    postpone(ids)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        options = ("--queues", "default", "--processes", "1")
        running = [stack.enter_context(workers(folder, *options)) for folder in folders]
        by_pid = {each.process.pid: each for each in running}
        wait_until(lambda: all(each.children() for each in running), "workers of both supervisors")
        first = wait_until(leader, "a leader")
        orphans = by_pid[first].children()
        with Watch("g") as watch:
            os.kill(first, signal.SIGKILL)
            by_pid[first].process.wait()
            leave(holder)
            wait_until(lambda: TaskRecord.objects.succeeded().filter(id__in=ids).count() == 6, "the end of all", 25)
        assert leader() not in (0, first)
        for pid in orphans:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the end of a worker without supervisor")
    assert watch.most == 1
    assert [line["id"] for line in runs(history_path) if line["event"] == "in"] == ids
