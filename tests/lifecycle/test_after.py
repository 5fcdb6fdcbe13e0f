"""Tasks that wait for others: each way in which a task ends counts it out of those that wait for it, or fails them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_asyncq import chain, gates, group, lifecycle, previous
from django_asyncq.broker import Broker
from django_asyncq.core.registry import find
from django_asyncq.exceptions import AsyncqError, DuplicateTask, InvalidOption
from django_asyncq.fleet import reconciler, repairs
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import children
from django_asyncq.models import FailureReason, Gate, TaskEdge, TaskRecord, TaskState
from django_asyncq.observe.backlog import live_rows
from django_asyncq.observe.fleet import Fleet
from django_asyncq.observe.why import Keeper, why_not_running
from django_asyncq.signals import task_state_changed

from .. import workflow_tasks as tasks
from ..redis_state import unknown

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

HOUR = timedelta(hours=1)
QUEUED, SUCCEEDED, FAILED = TaskState.QUEUED, TaskState.SUCCEEDED, TaskState.FAILED
PARENT_FAILED = FailureReason.PARENT_FAILED


def row_of(result: Any) -> TaskRecord:
    return TaskRecord.objects.get(id=result.id)


def is_pushed(result: Any) -> bool:
    return unknown([str(result.id)]) == []


def claimed(count: int = 100) -> list[lifecycle.Run]:
    runs = lifecycle.claim(Broker(), "default", "w", count, "default").runs
    for run in runs:
        lifecycle.begin(run, "w", timezone.now())
    return runs


def report(runs: list[lifecycle.Run]) -> list[lifecycle.Run]:
    lost = lifecycle.record_runs(runs)
    lifecycle.acknowledge(Broker(), "w", runs, lost)
    return lost


def work(most: int = 1000) -> list[str]:
    """Run what is pending until nothing is, as a worker would; return the names in their order."""
    names = []
    while runs := claimed():
        for run in runs:
            names.append(run.record.name.rpartition(".")[2])
            assert len(names) <= most
            try:
                if run.unfit is not None:
                    raise run.unfit
                lifecycle.succeed(
                    run, find(run.record.name).call(*run.record.args, **run.record.kwargs), timezone.now()
                )
            except (AsyncqError, ValueError) as error:
                lifecycle.fail(run, error, "", timezone.now(), retry_at=None)
        assert not report(runs)
    return names


# --- every way to end

Ending = Callable[[Any], object]


def succeeds(result: Any) -> None:
    (run,) = claimed()
    lifecycle.succeed(run, None, timezone.now())
    report([run])


def fails(result: Any) -> None:
    (run,) = claimed()
    lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=None)
    report([run])


def completes(result: Any) -> None:
    (run,) = claimed()
    with transaction.atomic():
        completed = lifecycle.complete(run, None, timezone.now())
    assert completed is not None
    lifecycle.acknowledge(Broker(), "w", [completed], [])


def is_spilled(result: Any) -> None:
    (run,) = claimed()
    lifecycle.succeed(run, None, timezone.now())
    lifecycle.spill_outcomes(Broker(), "w", [run])
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone")


def is_refused(result: Any) -> None:
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.refuse(Broker(), run, ValueError("no code"))


def is_cancelled(result: Any) -> None:
    assert lifecycle.cancel([row_of(result).id]).cancelled == 1


def is_cancelled_while_it_runs(result: Any) -> None:
    (run,) = claimed()
    lifecycle.cancel([run.record.id])
    lifecycle.requeue(Broker(), "w", [run])
    lifecycle.close_cancelled()


def expires(result: Any) -> None:
    TaskRecord.objects.filter(id=result.id).update(expires_at=timezone.now() - HOUR)
    assert lifecycle.expire() == 1


def expires_at_its_claim(result: Any) -> None:
    TaskRecord.objects.filter(id=result.id).update(expires_at=timezone.now() - HOUR)
    assert claimed() == []


def takes_its_worker_down(result: Any) -> None:
    for _ in range(3):
        TaskRecord.objects.filter(id=result.id).update(suspicion=0)
        (run,) = claimed()
        blame = lifecycle.Blame(named=frozenset({str(result.id)}))
        lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died", blame=blame)
        suspect = lifecycle.claim_suspect(Broker(), "default", "w-alone", "default").runs
        lifecycle.requeue(Broker(), "w-alone", suspect)
        if suspect:
            TaskRecord.objects.filter(id=result.id).update(suspicion=0)
            lifecycle.dispatch([row_of(result)], again=True)
        if row_of(result).is_final:
            return


def is_abandoned(result: Any) -> None:
    (run,) = claimed()
    lifecycle.mark_running([run])
    TaskRecord.objects.filter(id=result.id).update(cancel_requested_at=timezone.now())
    assert lifecycle.abandon(row_of(result), "nobody knows it")


def is_deleted(result: Any) -> None:
    row_of(result).delete()


def is_deleted_with_others(result: Any) -> None:
    TaskRecord.objects.filter(id=result.id).delete()


def is_deleted_as_it_was_read_before(result: Any) -> None:
    row = row_of(result)
    row.workflow_id = None
    row.delete()


def is_deleted_as_it_was_read_in_part(result: Any) -> None:
    TaskRecord.objects.only("id", "name").get(id=result.id).delete()


SUCCESSES = [succeeds, completes, is_spilled]
FAILURES = [
    fails,
    is_refused,
    is_cancelled,
    is_cancelled_while_it_runs,
    expires,
    expires_at_its_claim,
    is_abandoned,
    is_deleted,
    is_deleted_with_others,
    is_deleted_as_it_was_read_before,
    is_deleted_as_it_was_read_in_part,
]


@pytest.mark.parametrize("end", SUCCESSES)
def test_a_success_counts_the_task_out_of_those_that_wait_for_it(end: Ending) -> None:
    """One that waits for it alone is pushed; one that waits for another too waits for one fewer."""
    parent = tasks.load.enqueue(1)
    other = tasks.load.using(run_after=HOUR).enqueue(2)
    child = tasks.note.using(after=[parent]).enqueue()
    both = tasks.note.using(after=[parent, other]).enqueue()
    assert not is_pushed(child)
    end(parent)
    assert (row_of(child).waits_for, row_of(both).waits_for) == (0, 1)
    assert is_pushed(child)
    assert not is_pushed(both)


@pytest.mark.parametrize("end", FAILURES)
def test_a_failure_fails_what_waits_for_it_and_what_waits_for_that(end: Ending) -> None:
    """In one transaction, with a reason and an error that names the task; one that runs anyway is pushed."""
    parent = tasks.load.enqueue(1)
    child = tasks.note.using(after=[parent]).enqueue()
    grandchild = tasks.note.using(after=[child]).enqueue()
    anyway = tasks.note.using(after=[parent], after_failure="run").enqueue()
    behind = tasks.note.using(after=[grandchild], after_failure="run").enqueue()
    seen: list[tuple[str, Any, Any]] = []

    def note(records: list[TaskRecord], old: Any, new: Any, **kwargs: Any) -> None:
        seen.extend((str(record.id), old, new) for record in records)

    task_state_changed.connect(note)
    try:
        end(parent)
    finally:
        task_state_changed.disconnect(note)
    for result, before in ((child, parent), (grandchild, child)):
        row = row_of(result)
        assert (row.state, row.reason, row.is_final) == (FAILED, PARENT_FAILED, True)
        assert str(before.id) in row.errors[-1]["message"]
        assert row.last_exception == "django_asyncq.exceptions.ParentFailed"
        assert seen.count((str(result.id), QUEUED, FAILED)) == 1
        assert not is_pushed(result)
    for result in (anyway, behind):
        assert (row_of(result).state, row_of(result).waits_for) == (QUEUED, 0)
        assert is_pushed(result)


def test_a_retry_is_no_end() -> None:
    """RETRYING is waited for; so is a task that was parked, or requeued."""
    parent = tasks.load.using(max_attempts=2).enqueue(1)
    child = tasks.note.using(after=[parent]).enqueue()
    (run,) = claimed()
    lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=timezone.now() + HOUR)
    report([run])
    assert (row_of(child).state, row_of(child).waits_for) == (QUEUED, 1)
    assert not is_pushed(child)


def test_a_discarded_task_has_failed_for_those_that_wait() -> None:
    """It has made nothing that they could use."""
    result = chain(tasks.discards.step(), tasks.note.step()).enqueue()
    work()
    assert row_of(result).reason == PARENT_FAILED


@pytest.mark.parametrize("times", [1, 2])
def test_an_outcome_that_is_written_twice_counts_once(times: int) -> None:
    """As after a commit whose reply was lost."""
    parent, other = tasks.load.enqueue(1), tasks.load.enqueue(2)
    child = tasks.note.using(after=[parent, other]).enqueue()
    run = next(run for run in claimed() if str(run.record.id) == parent.id)
    lifecycle.succeed(run, None, timezone.now())
    for _ in range(times):
        assert lifecycle.record_runs([run]) == []
    assert row_of(child).waits_for == 1


def test_a_worker_that_claimed_the_parent_before_has_a_child_counts_it() -> None:
    """Its record says that nothing hangs on the task; the row refuses that, and is read again."""
    parent, plain = tasks.load.enqueue(1), tasks.load.enqueue(2)
    runs = claimed()
    child = tasks.note.using(after=[parent]).enqueue()
    for run in runs:
        lifecycle.succeed(run, None, timezone.now())
    assert lifecycle.record_runs(runs) == []
    assert (row_of(parent).state, row_of(plain).state) == (SUCCEEDED, SUCCEEDED)
    assert is_pushed(child)


def test_a_run_that_lost_its_lease_counts_nothing() -> None:
    """Also where its row has children since."""
    parent = tasks.load.enqueue(1)
    (run,) = claimed()
    child = tasks.note.using(after=[parent]).enqueue()
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone")
    lifecycle.succeed(run, None, timezone.now())
    assert lifecycle.record_runs([run]) == [run]
    assert row_of(child).waits_for == 1


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize("commits", [True, False])
def test_the_outcome_of_a_parent_waits_for_a_child_that_is_being_enqueued(commits: bool) -> None:
    """Whichever is first, the other one sees it."""
    parent = tasks.load.enqueue(1)
    (run,) = claimed()
    lifecycle.succeed(run, None, timezone.now())
    made, may_end, found = threading.Event(), threading.Event(), []

    def enqueue() -> None:
        try:
            with transaction.atomic():
                found.append(tasks.note.using(after=[parent]).enqueue())
                made.set()
                assert may_end.wait(20)
                transaction.set_rollback(not commits)
        finally:
            made.set()
            connection.close()

    thread = threading.Thread(target=enqueue)
    thread.start()
    assert made.wait(20)
    writer = threading.Thread(target=lambda: (report([run]), connection.close()))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    may_end.set()
    for each in (thread, writer):
        each.join(20)
    assert row_of(parent).state == SUCCEEDED
    if commits:
        assert row_of(found[0]).waits_for == 0
        assert is_pushed(found[0])


# --- the parent, when the child is enqueued


def test_a_parent_that_has_succeeded_is_not_waited_for() -> None:
    """The child is pushed like any other, and gets the value."""
    parent = tasks.load.enqueue(3)
    work()
    child = tasks.double.using(after={"value": parent}).enqueue()
    assert row_of(child).waits_for == 0
    assert is_pushed(child)
    assert work() == ["double"]
    assert row_of(child).return_value == 6


@pytest.mark.parametrize("after_failure", ["fail", "run"])
def test_a_parent_that_has_failed_fails_the_child_at_once(after_failure: Any) -> None:
    """Or it runs, without the value."""
    parent = tasks.load.enqueue(-1)
    work()
    child = tasks.double.using(after={"value": parent}, after_failure=after_failure).enqueue()
    behind = tasks.note.using(after=[child]).enqueue()
    work()
    rows = [row_of(each) for each in (child, behind)]
    if after_failure == "fail":
        assert {(row.state, row.reason) for row in rows} == {(FAILED, PARENT_FAILED)}
    else:
        assert [(row.state, row.return_value) for row in rows] == [(SUCCEEDED, -1), (SUCCEEDED, "")]


def test_nothing_is_left_of_a_workflow_that_is_rolled_back() -> None:
    """No row, no edge, and the parent is plain."""
    parent = tasks.load.enqueue(1)
    with transaction.atomic():
        tasks.note.using(after=[parent]).enqueue()
        transaction.set_rollback(True)
    assert TaskRecord.objects.count() == 1
    assert not TaskEdge.objects.exists()
    assert row_of(parent).workflow_id is None


def test_tasks_that_hang_together_have_one_workflow() -> None:
    """Two that get together become one; a plain task has none."""
    first, second, plain = (tasks.load.enqueue(number) for number in range(3))
    one = tasks.note.using(after=[first]).enqueue()
    other = tasks.note.using(after=[second]).enqueue()
    assert row_of(one).workflow_id != row_of(other).workflow_id
    last = tasks.note.using(after=[one, other]).enqueue()
    assert len({row_of(each).workflow_id for each in (first, second, one, other, last)}) == 1
    assert row_of(plain).workflow_id is None


def test_a_parent_without_a_row_is_refused() -> None:
    """Nothing is written."""
    parent = tasks.load.enqueue(1)
    TaskRecord.objects.all()._raw_delete("default")
    with pytest.raises(InvalidOption, match=rf"cannot wait for task {parent.id}, which has no row here"):
        tasks.note.using(after=[parent]).enqueue()
    assert not TaskRecord.objects.exists()


# --- values


def test_the_values_of_parents_are_arguments() -> None:
    """One, and a list in its order; the row keeps what stands for them."""
    parts = [tasks.load.enqueue(number) for number in (5, 7)]
    factor = tasks.load.enqueue(10)
    result = tasks.total.using(after={"rows": parts, "factor": factor}).enqueue()
    assert row_of(result).kwargs == {"rows": [], "factor": None}
    work()
    assert row_of(result).return_value == 120
    assert row_of(result).kwargs == {"rows": [], "factor": None}


def test_a_list_of_no_results_is_an_empty_list() -> None:
    """And the task waits for nobody."""
    result = tasks.total.using(after={"rows": []}).enqueue()
    work()
    assert row_of(result).return_value == 0


def test_the_value_of_a_parent_that_failed_is_none() -> None:
    """In a list too, if the task runs anyway."""
    parts = [tasks.load.enqueue(number) for number in (5, -1)]
    result = tasks.total.using(after={"rows": parts}, after_failure="run").enqueue()
    work()
    assert row_of(result).return_value == 5


def test_a_value_whose_row_was_deleted_fails_the_run() -> None:
    """The error says which argument is missing."""
    parent, other = tasks.load.enqueue(3), tasks.load.using(run_after=HOUR).enqueue(4)
    result = tasks.double.using(after={"value": parent}).enqueue()
    late = tasks.double.using(after={"value": parent}, run_after=HOUR).enqueue()
    assert work() == ["load", "double"]
    row_of(parent).delete()
    lifecycle.hurry([row_of(late).id])
    work()
    assert row_of(result).return_value == 6
    assert "its argument 'value', is gone" in row_of(late).errors[-1]["message"]
    assert row_of(other).state == QUEUED


# --- what else a task may have


def test_a_gate_is_asked_when_the_task_is_ready() -> None:
    """It holds no slot while it waits; at a full gate it then waits in the line, whatever `on_full` says."""
    parent = tasks.load.enqueue(1)
    child = tasks.gated.using(after=[parent]).enqueue()
    assert gates.slots("narrow") == []
    holder = tasks.gated.enqueue()
    assert [slot.id for slot in gates.slots("narrow")] == [holder.id]
    run = next(run for run in claimed() if str(run.record.id) == parent.id)
    lifecycle.succeed(run, None, timezone.now())
    report([run])
    assert row_of(child).waits_for_slot
    assert gates.waiters("narrow") == [child.id]


def test_a_free_gate_lets_a_ready_task_in_at_once() -> None:
    """Nobody has to look."""
    child = chain(tasks.load.step(1), tasks.gated.step()).enqueue()
    assert work() == ["load", "gated"]
    assert row_of(child).state == SUCCEEDED


def test_a_delay_counts_from_when_the_task_is_ready() -> None:
    """A moment stays as it is."""
    parent = tasks.load.enqueue(1)
    moment = timezone.now() + 5 * HOUR
    delayed = tasks.note.using(after=[parent], run_after=HOUR).enqueue()
    named = tasks.note.using(after=[parent], run_after=moment).enqueue()
    TaskRecord.objects.filter(id=delayed.id).update(run_after=timezone.now() - HOUR)
    before = timezone.now()
    work()
    run_after = row_of(delayed).run_after
    assert run_after is not None
    assert before + HOUR - timedelta(seconds=1) <= run_after <= timezone.now() + HOUR + timedelta(seconds=1)
    assert row_of(named).run_after == moment
    assert is_pushed(delayed)


def test_a_unique_task_holds_its_key_while_it_waits() -> None:
    """And frees it when it fails for its parent."""
    parent = tasks.load.enqueue(-1)
    tasks.keyed.using(after=[parent]).enqueue("a")
    with pytest.raises(DuplicateTask):
        tasks.keyed.enqueue("a")
    same = tasks.keyed.using(on_duplicate="return", after=[parent]).enqueue("a")
    assert TaskEdge.objects.filter(child_id=same.id).count() == 1
    work()
    assert row_of(tasks.keyed.enqueue("a")).state == QUEUED


def test_a_waiting_task_expires_as_any_other() -> None:
    """It is no wait without an end."""
    parent = tasks.load.using(run_after=5 * HOUR).enqueue(1)
    child = tasks.note.using(after=[parent], expires=HOUR).enqueue()
    behind = tasks.note.using(after=[child]).enqueue()
    TaskRecord.objects.filter(id=child.id).update(expires_at=timezone.now() - HOUR)
    assert lifecycle.expire() == 1
    assert (row_of(child).reason, row_of(behind).reason) == (FailureReason.EXPIRED, PARENT_FAILED)


def test_a_cancel_of_a_waiting_task_is_a_failure_of_a_parent() -> None:
    """No worker has it, so it is cancelled at once."""
    child = chain(tasks.load.step(1), tasks.note.step()).enqueue()
    behind = tasks.note.using(after=[child]).enqueue()
    assert child.cancel() == "cancelled"
    assert row_of(behind).reason == PARENT_FAILED
    assert work() == ["load"]
    assert row_of(child).reason == FailureReason.CANCELLED


# --- a workflow that grows


def test_a_child_of_the_running_task_commits_with_its_success() -> None:
    """In one transaction, of which nothing is left when it fails."""
    for fails in (True, False):
        tasks.grows_atomically.enqueue(fails=fails)
        (run,) = claimed()
        with transaction.atomic():
            tasks.note.using(after=[_result(run)]).enqueue("behind")
            completed = None if fails else lifecycle.complete(run, None, timezone.now())
            transaction.set_rollback(fails)
        if completed is not None:
            lifecycle.acknowledge(Broker(), "w", [completed], [])
            assert work() == ["note"]
        else:
            assert TaskRecord.objects.count() == 1
            TaskRecord.objects.all()._raw_delete("default")


def _result(run: lifecycle.Run) -> Any:
    from django_asyncq.results import result_of

    return result_of(run.record)


# --- retries


def test_a_retry_of_a_failed_parent_brings_back_what_failed_for_it() -> None:
    """All of it, and it runs; what was cancelled stays so."""
    parent = tasks.load.enqueue(-1)
    child = tasks.double.using(after={"value": parent}).enqueue()
    cancelled = tasks.note.using(after=[parent]).enqueue()
    cancelled.cancel()
    last = tasks.note.using(after=[child]).enqueue()
    of_cancelled = tasks.note.using(after=[cancelled]).enqueue()
    work()
    assert {row_of(each).reason for each in (child, last)} == {PARENT_FAILED}
    TaskRecord.objects.filter(id=parent.id).update(args=[1])
    assert [str(row.id) for row in lifecycle.retry([row_of(parent).id], by_person=True).retried] == [parent.id]
    assert [(row_of(each).state, row_of(each).waits_for) for each in (child, last)] == [(QUEUED, 1)] * 2
    assert not is_pushed(child)
    assert work() == ["load", "double", "note"]
    assert row_of(child).return_value == 2
    assert (row_of(cancelled).state, row_of(of_cancelled).reason) == (FAILED, PARENT_FAILED)


def test_what_waits_for_another_failed_task_too_stays_failed() -> None:
    """It would wait for ever; the retry of the other brings it back."""
    parents = [tasks.load.enqueue(-1), tasks.load.enqueue(-2)]
    child = tasks.total.using(after={"rows": parents}).enqueue()
    work()
    ids = [row_of(each).id for each in parents]
    TaskRecord.objects.filter(id__in=ids).update(args=[1])
    lifecycle.retry(ids[:1], by_person=True)
    assert row_of(child).state == FAILED
    work()
    lifecycle.retry(ids[1:], by_person=True)
    assert (row_of(child).state, row_of(child).waits_for) == (QUEUED, 1)
    work()
    assert row_of(child).return_value == 2


def test_a_task_is_not_retried_before_its_parent() -> None:
    """The answer names it; together with the parent it is retried."""
    parent = tasks.load.enqueue(-1)
    child = tasks.note.using(after=[parent]).enqueue()
    work()
    done = lifecycle.retry([row_of(child).id], by_person=True)
    assert ([row.id for row in done.blocked], done.retried) == ([row_of(child).id], [])
    done = lifecycle.retry([row_of(child).id, row_of(parent).id], by_person=True)
    assert {row.id for row in done.retried} == {row_of(child).id, row_of(parent).id}
    assert row_of(child).waits_for == 1


def test_a_cancelled_task_that_a_person_retries_waits_again() -> None:
    """Until its parents have finished; at once, if they have."""
    parent = tasks.load.enqueue(1)
    child = tasks.note.using(after=[parent]).enqueue()
    child.cancel()
    lifecycle.retry([row_of(child).id], by_person=True)
    assert (row_of(child).state, row_of(child).waits_for) == (QUEUED, 1)
    child.cancel()
    work()
    lifecycle.retry([row_of(child).id], by_person=True)
    assert (row_of(child).state, row_of(child).waits_for) == (QUEUED, 0)
    assert work() == ["note"]


def test_what_runs_anyway_waits_again_for_a_retried_parent() -> None:
    """While it waits for another one; else the retried parent would be counted twice."""
    parent, other = tasks.load.enqueue(-1), tasks.load.using(run_after=HOUR).enqueue(1)
    child = tasks.note.using(after=[parent, other], after_failure="run").enqueue()
    work()
    assert row_of(child).waits_for == 1
    lifecycle.retry([row_of(parent).id], by_person=True)
    assert row_of(child).waits_for == 2
    work()
    assert row_of(child).waits_for == 1
    lifecycle.hurry([row_of(other).id])
    assert work() == ["load", "note"]


def test_a_unique_task_does_not_come_back_while_another_has_its_key() -> None:
    """It stays FAILED."""
    parent = tasks.load.enqueue(-1)
    child = tasks.keyed.using(after=[parent]).enqueue("a")
    work()
    tasks.keyed.enqueue("a")
    lifecycle.retry([row_of(parent).id], by_person=True)
    assert (row_of(child).state, row_of(child).unique_slot) == (FAILED, None)


# --- Redis, the reconciler, and what looks at queued rows


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reconciler, repairs):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0)


@pytest.mark.usefixtures("no_grace")
def test_a_task_that_waits_is_never_pushed() -> None:
    """Not by a sweep, nor by a rebuild after Redis lost its memory, nor by its own dispatch."""
    child = chain(tasks.load.using(run_after=HOUR).step(1), tasks.note.step()).enqueue()
    lifecycle.dispatch([row_of(child)])
    found = Reconciler(Broker())
    found.quick_repairs()
    found.sweep()
    found.rebuild()
    assert not is_pushed(child)


@pytest.mark.usefixtures("no_grace")
def test_the_reconciler_pushes_what_is_ready_and_was_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a death between the commit and the push."""
    child = chain(tasks.load.step(1), tasks.note.step()).enqueue()
    with monkeypatch.context() as patch:
        patch.setattr(children.Settled, "follow_up", lambda hook: None)
        work()
    assert row_of(child).waits_for == 0
    assert not is_pushed(child)
    assert Reconciler(Broker()).quick_repairs().pushed == 1
    assert work() == ["note"]


def test_an_entry_of_a_task_that_waits_is_taken_out_at_its_claim() -> None:
    """As one of an older copy of Redis."""
    child = chain(tasks.load.using(run_after=HOUR).step(1), tasks.note.step()).enqueue()
    TaskRecord.objects.filter(id=child.id).update(waits_for=0)
    lifecycle.dispatch([row_of(child)])
    TaskRecord.objects.filter(id=child.id).update(waits_for=1)
    assert claimed() == []
    assert not is_pushed(child)


def test_a_task_that_waits_is_no_backlog() -> None:
    """Nor old because no worker comes; its page says for how many it waits."""
    parents = [tasks.load.using(run_after=HOUR).enqueue(number) for number in range(3)]
    child = tasks.note.using(after=parents).enqueue()
    found = live_rows(timezone.now())["default", "default"]
    assert (found.due, found.since, found.queued) == (0, None, 4)
    why = why_not_running(row_of(child), Fleet(timezone.now(), needs_redis=False))
    assert why is not None
    assert (why.keeper, why.text(timezone.now())) == (
        Keeper.PARENTS,
        "it waits for tasks that must finish before it: 3",
    )
    assert lifecycle.hurry([row_of(child).id]) == []
    assert lifecycle.reschedule(row_of(child).id, run_after=None, priority=1) is None


def test_a_copy_of_a_database_closes_what_waits() -> None:
    """As all else."""
    chain(tasks.load.step(1), tasks.note.step()).enqueue()
    assert sum(lifecycle.close_copied("ann")) == 2


# --- retention


def test_the_tasks_of_a_workflow_are_pruned_together() -> None:
    """None while one is live, nor while the last has finished too short a time ago; edges go with their children."""
    parent = tasks.keyed.enqueue("a")
    child = tasks.note.using(after=[parent]).enqueue()
    plain = tasks.keyed.enqueue("b")
    (first, second) = claimed()
    for run in (first, second):
        lifecycle.succeed(run, None, timezone.now())
    report([first, second])
    old = timezone.now() - timedelta(days=2000)
    ids = [parent.id, plain.id]
    TaskRecord.objects.filter(id__in=ids).update(finished_at=old)

    def prune() -> set[str]:
        condition = _over()
        list(Pruner(Broker()).prune_matching(condition))
        return {str(id) for id in TaskRecord.objects.values_list("id", flat=True)}

    assert prune() == {parent.id, child.id}
    work()
    assert prune() == {parent.id, child.id}
    TaskRecord.objects.filter(id=child.id).update(finished_at=old)
    assert TaskEdge.objects.count() == 1
    assert prune() == set()
    assert not TaskEdge.objects.exists()


def _over() -> Any:
    from django_asyncq.fleet.pruner import finished_long_ago

    return finished_long_ago([SUCCEEDED, FAILED], timezone.now(), timedelta(days=100))


def test_a_deletion_takes_the_edges_of_the_task() -> None:
    """Those to it; those from it go with its children."""
    parent = tasks.load.enqueue(1)
    child = tasks.note.using(after=[parent]).enqueue()
    row_of(child).delete()
    assert not TaskEdge.objects.exists()
    assert work() == ["load"]


def test_edges_of_rows_that_were_deleted_with_sql_go_too() -> None:
    """No signal was sent, so nobody knows but the pruner."""
    child = chain(tasks.load.step(1), tasks.note.step(), tasks.note.step()).enqueue()
    assert sum(Pruner(Broker()).prune_leftovers(TaskEdge, "child_id")) == 0
    TaskRecord.objects.filter(id=child.id)._raw_delete("default")
    assert sum(Pruner(Broker()).prune_leftovers(TaskEdge, "child_id")) == 1
    assert TaskEdge.objects.count() == 1


# --- chains and groups


def test_a_group_of_chains_runs_in_its_order() -> None:
    """The last gets the values of all ends, in the order of the parts."""
    parts = [
        chain(tasks.load.step(number), tasks.double.using(after={"value": previous}).step()) for number in (1, 2, 3)
    ]
    result = group(parts, then=tasks.total.using(after={"rows": previous}).step(factor=10)).enqueue()
    assert row_of(result).waits_for == 3
    assert sorted(work()) == ["double"] * 3 + ["load"] * 3 + ["total"]
    assert row_of(result).return_value == 120


def test_a_group_between_two_steps() -> None:
    """Each member gets the value before, and the step behind gets all of theirs."""
    doubles = [tasks.double.using(after={"value": previous}).step() for _ in range(2)]
    result = chain(
        tasks.load.step(5), group(doubles), tasks.total.using(after={"rows": previous}).step(), tasks.note.step("end")
    ).enqueue()
    assert work() == ["load", "double", "double", "total", "note"]
    assert row_of(result).return_value == "end"


def test_a_workflow_is_written_in_a_few_statements(django_assert_max_num_queries: Any) -> None:
    """However large it is."""
    workflow = group([tasks.load.step(number) for number in range(300)], then=tasks.note.step())
    with django_assert_max_num_queries(20):
        workflow.enqueue()
    assert TaskRecord.objects.count() == 301


def test_a_gate_that_is_full_refuses_the_whole_workflow() -> None:
    """Nothing is written; what waits needs no slot."""
    Gate.objects.create(name="narrow", limit=1)
    with pytest.raises(Exception, match="is full"):
        group([tasks.gated.step(), tasks.gated.step()], then=tasks.note.step()).enqueue()
    assert not TaskRecord.objects.exists()
    result = chain(tasks.gated.step(), tasks.gated.step()).enqueue()
    assert work() == ["gated"]
    # Its slot is released when that is announced; the leader then lets the next one in.
    lifecycle.announce(list(TaskRecord.objects.filter(state=SUCCEEDED)), TaskState.RUNNING, SUCCEEDED)
    assert lifecycle.retry_waiting(Broker(), [result.id]).admitted == {result.id}
    assert work() == ["gated"]
