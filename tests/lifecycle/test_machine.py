"""Broker, gate and rows against a small model, by a state machine that also repeats calls; and its mutants.

The long form: `python runtests.py -m long tests/lifecycle/test_machine.py`; ASYNCQ_TEST_EXAMPLES is its number of
sequences.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import Phase
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.exceptions import QueueFull
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import claiming, closing, holding, recovery, retrying
from django_asyncq.models import Gate, TaskRecord, TaskState
from django_asyncq.storage import batches

from .. import script_mutants, tasks
from ..machine import stores
from ..machine.crowded import Crowded
from ..machine.machine import Machine
from ..machine.settings import profile as profile_of

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = int(os.environ.get("ASYNCQ_TEST_EXAMPLES", "5000"))
# Without a mutant the first of these sequences are run too, and the long form runs 5,000: what they find is the mutant.
# They are derandomized, and yet others after a change of the package: Hypothesis draws on the literals of its modules.
SHORT_EXAMPLES = 160
# The same sequences take another course from run to run, because times of real servers decide. A mutant that is found
# costs no more for the others that would have been made.
MUTANT_EXAMPLES = 1500


profile = partial(profile_of, steps=40)


@pytest.fixture(autouse=True)
def still_time(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leases, slots and retries do not expire: they wait until the machine lets their time come."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1200}
    monkeypatch.setattr("django_asyncq.conf.PROVISIONAL_SECONDS", 1200)
    # Crashes are part of the machine: their log lines would hide a failing sequence.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# A failing sequence is not made shorter here, which may take many minutes; the long form does it.
@pytest.mark.timeout(600)
def test_stores_agree_with_the_model() -> None:
    """After any sequence of calls, repeats, crashes and repairs, both stores are as the model says."""
    run_state_machine_as_test(Machine, settings=profile(SHORT_EXAMPLES, derandomize=True, phases=[Phase.generate]))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_stores_agree_with_the_model_long() -> None:
    """The same, with random sequences and for long."""
    run_state_machine_as_test(Machine, settings=profile(EXAMPLES, print_blob=True))


# --- mutants: with a guard removed the machine must fail, or it proves nothing

# One of each kind, found within seconds; the others are for the long form. Which sequences are made depends on the
# literals of the package, so a mutant may be found later after a change that has nothing to do with it.
QUICK = {
    "gate without the membership test",
    "without_the_guard",
    "done that leaves the task held",
    "dequeue without a new fence",
    "enqueue that pushes twice",
    "recovery_keeps_the_fence",
}


def quick_or_long(name: str, mutant: Any) -> Any:
    return pytest.param(mutant, id=name, marks=[] if name in QUICK else [pytest.mark.long])


def examples_for(name: str) -> int:
    return MUTANT_EXAMPLES if name in QUICK else EXAMPLES


def assert_found(examples: int, machine: type[Machine] = Machine) -> None:
    """The machine fails; the sequence is not made shorter, because nobody reads it."""
    with pytest.raises(Exception) as caught:
        run_state_machine_as_test(machine, settings=profile(examples, derandomize=True, phases=[Phase.generate]))
    # A time-out, which Hypothesis reports as differing data, is not a find.
    assert not isinstance(caught.value, FileNotFoundError | HypothesisException)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", [quick_or_long(name, name) for name in script_mutants.MACHINE])
def test_finds_a_script_without_its_guard(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard of the scripts is needed by some sequence of the machine."""
    monkeypatch.setattr(scripts, "script", script_mutants.without(script_mutants.MACHINE[mutant]))
    assert_found(examples_for(mutant))


# The order of waiters, by a machine that has many of them; the mutants of what only time shows are not for a machine.
CROWDED_EXAMPLES = 80
OF_ORDER = [
    "gate that lets new tasks come before waiters",
    "gate whose waiters overtake each other",
    "gate that keeps its waiters",
]


@pytest.mark.timeout(600)
def test_stores_agree_with_the_model_at_a_crowded_gate() -> None:
    """The same while tasks wait at the gate."""
    run_state_machine_as_test(Crowded, settings=profile(CROWDED_EXAMPLES, derandomize=True, phases=[Phase.generate]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", OF_ORDER)
def test_finds_a_script_without_its_order(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard of the order is needed by some sequence."""
    monkeypatch.setattr(scripts, "script", script_mutants.without(script_mutants.WAITERS[mutant]))
    assert_found(CROWDED_EXAMPLES, Crowded)


def guard_is(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GUARD", guard)
    # Its cached SQL must not be used.
    monkeypatch.setattr(batches, "_update_from_json", batches._update_from_json.__wrapped__)


def without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_is("1 = 1", monkeypatch)


def without_the_fence_of_running_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_is(batches.GUARD.replace("t.fence = v.held_fence", "true"), monkeypatch)


def without_the_fence_of_queued_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_is(batches.GUARD.replace("t.fence = v.read_fence", "true"), monkeypatch)


def repeated_write_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_already_written", lambda writes, database: set())


def recovery_keeps_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = recovery._close_run

    def close(*arguments: Any) -> Any:
        write = real(*arguments)
        write.record.fence = write.held_fence
        return write

    monkeypatch.setattr(recovery, "_close_run", close)


def confirm_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "confirm", lambda records: set())


def final_rows_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskRecord, "is_final", property(lambda record: False))


def a_lost_run_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    from django_asyncq.lifecycle import running

    def accept(writes: Any, database: str) -> set[Any]:
        batches.write_fenced(writes, database)
        return {write.record.id for write in writes}

    monkeypatch.setattr(running, "write_fenced", accept)


def a_cancel_keeps_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = closing.close

    def close(records: Any, *arguments: Any, **changes: Any) -> None:
        fences = {record.id: record.fence for record in records}
        real(records, *arguments, **changes)
        for id, fence in fences.items():
            TaskRecord.objects.filter(id=id).update(fence=fence)

    for module in (closing, closing):
        monkeypatch.setattr(module, "close", close)


def a_cancel_does_not_ask_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Any, records: Any, *arguments: Any) -> Any:
        return {record.id: holding.OURS for record in records}, []

    monkeypatch.setattr(holding.Hold, "take", take)


def a_retry_ignores_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_without_closed", lambda rows: rows)


def a_worker_ignores_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "close_claimed", lambda broker, queue, worker_id, runs: runs)


def recovery_ignores_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "fail_cancelled", lambda record, now: None)


def a_void_run_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_announce_void", lambda found: None)


def a_rolled_back_cancel_takes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = closing.close

    def close(records: Any, *arguments: Any, **changes: Any) -> None:
        real(records, *arguments, **changes)
        *_, hook = arguments
        closing.take_out(records, holder=hook.hold.name)

    for module in (closing, closing):
        monkeypatch.setattr(module, "close", close)


PYTHON_MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    without_the_guard,
    without_the_fence_of_running_rows,
    without_the_fence_of_queued_rows,
    repeated_write_is_a_conflict,
    recovery_keeps_the_fence,
    confirm_asks_nobody,
    final_rows_run_again,
    a_lost_run_is_acknowledged,
    a_cancel_keeps_the_fence,
    a_cancel_does_not_ask_redis,
    a_retry_ignores_a_cancel,
    a_worker_ignores_a_cancel,
    recovery_ignores_a_cancel,
    a_void_run_keeps_its_slot,
    a_rolled_back_cancel_takes_out,
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", [quick_or_long(mutant.__name__, mutant) for mutant in PYTHON_MUTANTS])
def test_finds_python_without_its_guard(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the guards of the rows, and for the order of steps."""
    mutant(monkeypatch)
    assert_found(examples_for(mutant.__name__))


# --- errors that the machine has found


def record_of(number: int, **fields: Any) -> TaskRecord:
    """A row that was enqueued a minute ago and never pushed."""
    return TaskRecord.objects.create(
        name="tests.tasks.add", args=[number], enqueued_at=timezone.now() - timedelta(minutes=1), **fields
    )


def recorded(run: lifecycle.Run, *, retry_at: Any = None, fails: bool = True) -> lifecycle.Run:
    """Begin a run and record its outcome, without an acknowledgement."""
    lifecycle.begin(run, "w", timezone.now())
    if fails:
        lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=retry_at)
    else:
        lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    return run


def claimed() -> lifecycle.Run:
    """The next task of the default queue, claimed by worker "w"."""
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    return run


def repair() -> None:
    """Run every repair and the forwarder twice."""
    reconciler = Reconciler(Broker())
    for _ in range(2):
        forward_due(Broker(), ["default"])
        reconciler.sweep()


@pytest.mark.parametrize("retry_in", [None, timedelta(seconds=-1)], ids=["archived", "retry"])
def test_retry_that_died_before_its_push_is_pushed_by_the_reconciler(
    retry_in: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is QUEUED again, Redis does not know: the entry still waits in retry or archived."""
    tasks.add.enqueue(1)
    run = recorded(claimed(), retry_at=timezone.now() + retry_in if retry_in else None)
    lifecycle.acknowledge(Broker(), "w", [run])
    with monkeypatch.context() as patched:
        patched.setattr(retrying, "dispatch", lambda *arguments, **options: 0)
        lifecycle.retry([run.record.id], by_person=True)
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    repair()
    assert len(lifecycle.claim(Broker(), "default", "w", 1, "default").runs) == 1


def test_retry_between_the_outcome_and_its_acknowledgement_is_not_lost() -> None:
    """A person retries before the failure is acknowledged; the acknowledgement comes afterwards."""
    tasks.add.enqueue(1)
    run = recorded(claimed())
    assert len(lifecycle.retry([run.record.id], by_person=True).retried) == 1
    lifecycle.acknowledge(Broker(), "w", [run])
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    repair()
    assert len(lifecycle.claim(Broker(), "default", "w", 1, "default").runs) == 1


def test_an_outcome_announced_after_the_retry_keeps_the_slot() -> None:
    """Acknowledged, forwarded and queued again at once, as with backoff=0; then the former run is announced."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    run = recorded(claimed(), retry_at=timezone.now() - timedelta(seconds=1))
    lifecycle.acknowledge(Broker(), "w", [run])
    assert forward_due(Broker(), ["default"]).retried == 1
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)
    assert [slot.id for slot in gates.slots("g")] == [str(run.record.id)]


def test_a_task_that_another_worker_runs_by_now_is_not_adopted() -> None:
    """asynq's own recoverer requeued it, and its former worker reads what Redis says that it holds."""
    tasks.add.enqueue(1)
    first, keys = claimed(), QueueKeys("default")
    client = Broker().client
    client.lrem(keys.active, 0, first.lease.id)
    client.zrem(keys.lease, first.lease.id)
    client.hset(keys.task(first.lease.id), "state", "pending")
    client.lpush(keys.pending, first.lease.id)
    assert Broker().held("default", "w") == []
    (second,) = lifecycle.claim(Broker(), "default", "other", 1, "default").runs
    assert Broker().held("default", "w") == []
    assert Broker().held("default", "other") == [second.lease]


@pytest.mark.parametrize("fault", ["emptied", "opened"])
def test_an_outcome_announced_after_the_gate_was_rebuilt_keeps_the_slot(fault: str) -> None:
    """The gate forgets which runs were retried, and reads the rows: a finished run has no slot."""
    row = Gate.objects.create(name="g", limit=1, expected_seconds=1)
    tasks.add.using(gate="g").enqueue(1)
    run = recorded(claimed())
    lifecycle.acknowledge(Broker(), "w", [run])
    row.limit = 0 if fault == "opened" else 1
    row.save()
    lifecycle.retry([run.record.id], by_person=True)
    if fault == "emptied":
        stores.flush()
    row.limit = 1
    row.save()
    with pytest.raises(QueueFull):
        tasks.add.using(gate="g").enqueue(2)
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)
    assert [slot.id for slot in gates.slots("g")] == [str(run.record.id)]


def test_an_outcome_announced_after_the_gate_was_rebuilt_releases_its_own_slot() -> None:
    """The row was RUNNING when the gate was built; its run has the slot, and releases it."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    first = recorded(claimed())
    lifecycle.acknowledge(Broker(), "w", [first])
    lifecycle.retry([first.record.id], by_person=True)
    second = claimed()
    lifecycle.begin(second, "w", timezone.now())
    lifecycle.mark_running([second])
    gates.forget_built("g")
    with pytest.raises(QueueFull):
        tasks.add.using(gate="g", queue_limit=1).enqueue(2)
    lifecycle.announce([first.record], TaskState.RUNNING, TaskState.FAILED)
    assert len(gates.slots("g")) == 1
    lifecycle.succeed(second, 1, timezone.now())
    assert lifecycle.record_runs([second]) == []
    lifecycle.announce([second.record], TaskState.RUNNING, TaskState.SUCCEEDED)
    assert gates.slots("g") == []


def test_a_slot_leaked_at_a_gate_without_a_gate_row_is_audited() -> None:
    """A worker died between the outcome and the release; the gate's limit is the task's own."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    run = recorded(claimed(), fails=False)
    lifecycle.acknowledge(Broker(), "w", [run])
    reconciler = Reconciler(Broker())
    for _ in range(3):
        reconciler.sweep()
    assert gates.slots("g") == []


def test_a_sweep_does_not_exceed_the_limit_for_a_row_that_was_never_pushed() -> None:
    """Its provisional slot expired before the push, and others were admitted: `confirm` would park it."""
    late = record_of(1, gate="g", queue_limit=1)
    client = Broker().client
    client.hset(gates.keys("g")[1], mapping={"built": 1, "asked": int(time.time())})
    tasks.add.using(gate="g", queue_limit=1).enqueue(2)
    Reconciler(Broker()).sweep()
    late.refresh_from_db()
    assert (len(gates.slots("g")), late.state) == (1, TaskState.FAILED)


def test_a_task_that_needs_a_slot_is_pushed_after_the_others() -> None:
    """Redis was emptied: the push finds no gate, and acquires the first task's slot after the other push."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    tasks.add.enqueue(2)
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    stores.flush()
    Reconciler(Broker()).sweep()
    claimed = lifecycle.claim(Broker(), "default", "w", 2, "default").runs
    assert [run.record.args for run in claimed] == [[2], [1]]
    assert len(gates.slots("g")) == 1
