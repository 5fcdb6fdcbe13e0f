"""Unique tasks: what makes two calls the same, who holds a key's slot, and when it is free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import DuplicateTask, QueueFull, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.calls import digest_of
from django_asyncq.core.policies import Retention, Rules
from django_asyncq.exceptions import InvalidOption
from django_asyncq.fleet.pruner import Pruner, retention_is_over
from django_asyncq.gates import slots
from django_asyncq.lifecycle import unique
from django_asyncq.models import Occurrence, OccurrenceOutcome, Schedule, TaskRecord, TaskState
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.storage import database_clock

from .. import tasks, unique_tasks
from ..redis_state import pending
from ..runs import taken_by

pytestmark = pytest.mark.django_db(transaction=True)


def slot_of(result: Any) -> str | None:
    """The unique slot of a task's row."""
    return TaskRecord.objects.get(id=result.id).unique_slot


def is_refused(task: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call is a duplicate now."""
    try:
        task.enqueue(*args, **kwargs)
    except DuplicateTask:
        return True
    return False


def finish(run: lifecycle.Run, error: BaseException | None = None) -> None:
    """Record the outcome of a run, final either way."""
    if error is None:
        lifecycle.succeed(run, None, timezone.now())
    else:
        lifecycle.fail(run, error, "", timezone.now(), retry_at=None)
    assert not lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])


# --- the key


def test_a_second_call_with_the_key_is_refused_and_names_the_first() -> None:
    """Before anything is written."""
    first = unique_tasks.report.enqueue(1)
    with pytest.raises(DuplicateTask, match=first.id) as caught:
        unique_tasks.report.enqueue(1, "tomorrow", fmt="csv")
    assert str(caught.value.existing_id) == first.id
    assert caught.value.task == "tests.unique_tasks.report"
    unique_tasks.report.enqueue(2)
    assert pending() == [first.id, str(TaskRecord.objects.latest("id").id)]


@pytest.mark.parametrize(
    ("first", "second", "are_same"),
    [
        (((1,), {}), ((), {"path": 1}), True),
        (((1,), {}), ((1, 100), {}), True),
        (((1,), {"marker": None}), ((1,), {}), True),
        ((({"a": 1, "b": 2},), {}), (({"b": 2, "a": 1},), {}), True),
        (((1,), {"x": 1, "y": 2}), ((1,), {"y": 2, "x": 1}), True),
        ((((1, 2),), {}), (([1, 2],), {}), True),
        (((1,), {}), (("1",), {}), False),
        (((1,), {}), ((1.0,), {}), False),
        (((1,), {}), ((True,), {}), False),
        (((1,), {}), ((1, 101), {}), False),
        (((1,), {"x": 1}), ((1,), {}), False),
        (((1,), {"kwargs": {"x": 1}}), ((1,), {"x": 1}), False),
    ],
)
def test_unique_by_all_arguments_compares_what_the_function_gets(
    first: tuple[Any, Any], second: tuple[Any, Any], are_same: bool
) -> None:
    """Positional or by name, with or without a default; values as JSON."""
    unique_tasks.import_file.enqueue(*first[0], **first[1])
    assert is_refused(unique_tasks.import_file, *second[0], **second[1]) is are_same


def test_the_context_and_decorators_are_seen_through() -> None:
    """The context is no argument; a decorator's own argument is one."""
    unique_tasks.with_context.enqueue("a")
    assert is_refused(unique_tasks.with_context, path="a")
    assert not is_refused(unique_tasks.with_context, "b")
    unique_tasks.decorated.enqueue(1, "a")  # type: ignore[call-arg]
    assert is_refused(unique_tasks.decorated, 1, "a")
    assert not is_refused(unique_tasks.decorated, 2, "a")


def test_a_callable_makes_the_key() -> None:
    """It gets the arguments of the call."""
    unique_tasks.of_callable.enqueue({"id": "a", "name": "x"})
    assert is_refused(unique_tasks.of_callable, {"id": "a"}, more=1)
    assert not is_refused(unique_tasks.of_callable, {"id": "é"})
    assert not is_refused(unique_tasks.of_callable.using(unique=lambda user, **more: "\ud800"), {"id": "a"})


@pytest.mark.parametrize(
    "key", [lambda **k: None, lambda **k: 7, lambda **k: "", lambda: "x", "{nobody}", "{", "{day:d}"]
)
def test_what_gives_no_key_is_refused_with_the_remedy(key: Any) -> None:
    """The error names the task and the option; nothing is written."""
    with pytest.raises(InvalidOption, match=r"task tests\.unique_tasks\.report: unique="):
        unique_tasks.report.using(unique=key).enqueue(user_id=1)
    assert not TaskRecord.objects.exists()


def test_a_callable_cannot_change_what_the_task_is_run_with() -> None:
    """It gets copies."""
    task = tasks.add.using(unique=lambda user, **more: str(user.pop("id")))
    assert task.enqueue({"id": 1, "name": "Ada"}).args == [{"id": 1, "name": "Ada"}]


def test_a_key_that_raises_is_named_as_the_cause() -> None:
    """The callable's own error is the cause."""
    with pytest.raises(InvalidOption, match=r"KeyError\('id'\).*unique=False") as caught:
        unique_tasks.of_callable.enqueue({})
    assert isinstance(caught.value.__cause__, KeyError)


def test_one_call_need_not_be_unique() -> None:
    """`using(unique=False)` has no key, whatever the task declares."""
    unique_tasks.report.enqueue(1)
    result = unique_tasks.report.using(unique=False).enqueue(1)
    assert slot_of(result) is None


def test_keys_of_other_tasks_and_aliases_are_others() -> None:
    """The digest is that of alias, name and key, with their lengths."""
    unique_tasks.report.enqueue(1)
    unique_tasks.shared.enqueue(1)
    assert digest_of("a", "bc") != digest_of("ab", "c") != digest_of("abc")
    assert digest_of("default", "t", "1") != digest_of("other", "t", "1")
    assert len(digest_of("x")) == 64


def test_a_plain_enqueue_pays_nothing() -> None:
    """One INSERT without the columns of unique tasks."""
    with CaptureQueriesContext(connection) as queries:
        tasks.add.enqueue(1)
    assert [query["sql"].split()[0] for query in queries] == ["INSERT"]
    assert "unique" not in queries[0]["sql"]


def test_the_look_uses_the_index_of_slots() -> None:
    """One row is read, however many there are."""
    unique_tasks.report.enqueue(1)
    rows = TaskRecord.objects.filter(unique_slot__in=[digest_of("x")])
    plan = rows.explain()
    assert "asyncq_unique_slot" in plan or connection.vendor == "mysql" or "Seq Scan" in plan
    assert connection.vendor != "sqlite" or "asyncq_unique_slot" in plan


# --- until when


def test_it_holds_its_slot_while_it_is_queued_running_and_retrying() -> None:
    """And not once it has succeeded."""
    unique_tasks.report.enqueue(1)
    run = taken_by("w")
    assert is_refused(unique_tasks.report, 1)
    lifecycle.fail(run, ValueError(), "", timezone.now(), retry_at=timezone.now())
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])
    assert is_refused(unique_tasks.report, 1)
    assert lifecycle.retry_due(Broker(), "default", [run.lease.id]) == 1
    run = taken_by("w")
    assert is_refused(unique_tasks.report, 1)
    finish(run)
    assert not is_refused(unique_tasks.report, 1)


def test_a_task_that_failed_for_good_frees_its_slot() -> None:
    """By its own outcome, and when it can never run."""
    unique_tasks.report.enqueue(1)
    finish(taken_by("w"), ValueError())
    assert not is_refused(unique_tasks.report, 1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.refuse(Broker(), run, ValueError())
    assert not is_refused(unique_tasks.report, 1)


def test_a_completion_frees_it_in_its_own_transaction() -> None:
    """With the effects of the task; a rollback of it keeps the slot."""
    unique_tasks.report.enqueue(1)
    run = taken_by("w")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert lifecycle.complete(run, None, timezone.now())
        raise ZeroDivisionError
    assert is_refused(unique_tasks.report, 1)
    with transaction.atomic():
        assert lifecycle.complete(run, None, timezone.now())
    assert not is_refused(unique_tasks.report, 1)


def test_a_lost_worker_keeps_the_slot_until_the_task_is_given_up(settings: Any) -> None:
    """Requeued it holds it still; FAILED after too many crashes it does not."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_CRASHES": 1}
    unique_tasks.report.enqueue(1)
    run = taken_by("w")
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died")
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert is_refused(unique_tasks.report, 1)
    second = unique_tasks.report.enqueue(2)
    taken_by("other")  # the first, at the head again
    run = taken_by("w")
    blame = lifecycle.Blame(named=frozenset({second.id}))
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died", blame=blame)
    assert TaskRecord.objects.get(id=second.id).state == TaskState.FAILED
    assert is_refused(unique_tasks.report, 1)
    assert not is_refused(unique_tasks.report, 2)


def test_an_emptied_redis_frees_nothing_and_a_deleted_row_frees_it(redis_client: Any, key_prefix: str) -> None:
    """The row decides."""
    unique_tasks.report.enqueue(1)
    redis_client.delete(*redis_client.scan_iter(f"{key_prefix}*"))
    assert is_refused(unique_tasks.report, 1)
    TaskRecord.objects.all().delete()
    assert not is_refused(unique_tasks.report, 1)


def test_a_rollback_frees_it() -> None:
    """Of a transaction and of a savepoint."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        unique_tasks.report.enqueue(1)
        raise ZeroDivisionError
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            unique_tasks.report.enqueue(1)
            raise ZeroDivisionError
        assert not is_refused(unique_tasks.report, 1)


def test_until_start_another_may_follow_once_it_is_written_as_running() -> None:
    """The slot is freed there, and a retry does not take it again."""
    unique_tasks.until_start.enqueue(1)
    assert is_refused(unique_tasks.until_start, 1)
    run = taken_by("w")
    second = unique_tasks.until_start.enqueue(1)
    lifecycle.fail(run, ValueError(), "", timezone.now(), retry_at=timezone.now())
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])
    assert lifecycle.retry_due(Broker(), "default", [run.lease.id]) == 1
    assert slot_of(second) is not None
    assert TaskRecord.objects.get(id=run.record.id).unique_slot is None


def test_a_throttled_task_is_accepted_again_after_its_time_however_it_went(moved: Callable[[float], None]) -> None:
    """It counts from the enqueueing; that the first has finished, or still runs, changes nothing."""
    unique_tasks.throttled.enqueue(1)
    finish(taken_by("w"))
    assert is_refused(unique_tasks.throttled, 1)
    moved(599)
    assert is_refused(unique_tasks.throttled, 1)
    moved(2)
    second = unique_tasks.throttled.enqueue(1)
    moved(601)
    third = unique_tasks.throttled.enqueue(1)
    assert (slot_of(second) is None, slot_of(third) is None) == (True, False)
    assert TaskRecord.objects.exclude(unique_slot=None).count() == 1


@pytest.fixture
def moved() -> Iterator[Callable[[float], None]]:
    """Moves the clock of rows by so many seconds."""
    from django_asyncq.testing.contexts import travel

    with travel() as clock:
        yield lambda seconds: clock.move(seconds=seconds)


# --- retries by a person


def failed(*args: Any) -> TaskRecord:
    """A unique task that has failed for good."""
    unique_tasks.report.enqueue(*args)
    finish(run := taken_by("w"), ValueError())
    return TaskRecord.objects.get(id=run.record.id)


def test_a_persons_retry_takes_the_slot_again() -> None:
    """And a rollback frees it."""
    record = failed(1)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        lifecycle.retry([record.id], by_person=True)
        raise ZeroDivisionError
    assert not is_refused(unique_tasks.report, 1)
    TaskRecord.objects.exclude(id=record.id).delete()
    assert [each.id for each in lifecycle.retry([record.id], by_person=True).retried] == [record.id]
    assert is_refused(unique_tasks.report, 1)


def test_a_task_whose_slot_is_taken_stays_failed_and_the_holder_is_named() -> None:
    """The others are retried; of two with one key, the older one."""
    old, young, free = failed(1), failed(2), failed(2)
    holder = unique_tasks.report.enqueue(1)
    done = lifecycle.retry([old.id, young.id, free.id], by_person=True)
    assert [record.id for record in done.retried] == [young.id]
    assert {each.record.id: each.holder for each in done.taken} == {old.id: UUID(holder.id), free.id: young.id}
    assert (done.full, done.not_failed) == ([], [])
    states = dict(TaskRecord.objects.values_list("id", "state"))
    assert states[old.id] == states[free.id] == TaskState.FAILED


def test_a_slot_that_is_taken_during_the_retry_releases_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look saw nothing; the UPDATE is refused, and the transaction goes on."""
    unique_tasks.clicked.enqueue(1)
    finish(run := taken_by("w"), ValueError())
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)
    holder = unique_tasks.clicked.enqueue(1)
    assert holders("clicks") == {holder.id}
    monkeypatch.setattr("django_asyncq.lifecycle.retrying.already_taken", lambda records: [])
    with transaction.atomic():
        done = lifecycle.retry([run.record.id], by_person=True)
        assert TaskRecord.objects.count() == 2
    assert [(each.record.id, str(each.holder)) for each in done.taken] == [(run.record.id, holder.id)]
    assert holders("clicks") == {holder.id}
    assert TaskRecord.objects.get(id=run.record.id).state == TaskState.FAILED


def test_a_persons_retry_of_a_started_or_throttled_task_takes_no_slot(moved: Callable[[float], None]) -> None:
    """The one has freed it for others; the other keeps its own until its time."""
    for task in (unique_tasks.until_start, unique_tasks.throttled):
        task.enqueue(1)
        finish(run := taken_by("w"), ValueError())
        assert lifecycle.retry([run.record.id], by_person=True).retried
    assert not is_refused(unique_tasks.until_start, 1)
    assert is_refused(unique_tasks.throttled, 1)
    moved(601)
    assert not is_refused(unique_tasks.throttled, 1)


# --- what becomes of a duplicate


def test_return_gives_the_existing_task() -> None:
    """As it is now; no signal of an enqueueing is sent for it."""
    first = unique_tasks.shared.enqueue(1)
    run = taken_by("w")
    again = unique_tasks.shared.enqueue(1)
    assert (again.id, again.status.name) == (first.id, "RUNNING")
    assert (first.is_new, again.is_new, unique_tasks.shared.get_result(first.id).is_new) == (True, False, None)
    finish(run)
    assert unique_tasks.shared.enqueue(1).id != first.id


def test_using_changes_what_becomes_of_a_duplicate() -> None:
    """For one call."""
    first = unique_tasks.report.enqueue(1)
    assert unique_tasks.report.using(on_duplicate="return").enqueue(1).id == first.id
    replaced = unique_tasks.report.using(on_duplicate="replace").enqueue(1, "tomorrow")
    assert (replaced.id, replaced.is_new) == (first.id, False)
    assert tasks.add.enqueue(1, 2).is_new is True


# --- many calls


def test_many_refuses_all_when_one_is_a_duplicate() -> None:
    """Also when two calls of the list have one key; nothing is written."""
    first = unique_tasks.report.enqueue(3)
    with pytest.raises(DuplicateTask, match=first.id):
        unique_tasks.report.enqueue_many([(1,), (2,), (3,)])
    with pytest.raises(DuplicateTask, match="two calls of the list"):
        unique_tasks.report.enqueue_many([(1,), (2,), (1,)])
    assert TaskRecord.objects.count() == 1
    assert pending() == [first.id]


def test_many_partial_refuses_only_the_duplicates_in_the_order_of_the_calls() -> None:
    """Of two calls with one key the first is enqueued."""
    unique_tasks.report.enqueue(3)
    results = unique_tasks.report.enqueue_many([(n,) for n in (5, 3, 4, 5, 1)], partial=True)
    assert [result and result.args[0] for result in results] == [5, None, 4, None, 1]
    assert TaskRecord.objects.count() == 4
    assert len(pending()) == 4


def test_many_with_return_gives_one_task_for_each_key() -> None:
    """The existing one, or the first of the list."""
    existing = unique_tasks.shared.enqueue(1)
    results = unique_tasks.shared.enqueue_many([(1,), (2,), (2,)])
    assert [result.id for result in results] == [existing.id, results[1].id, results[1].id]


def test_a_list_may_have_one_key_many_times() -> None:
    """All stand for one task, which is read once."""
    results = unique_tasks.shared.enqueue_many([(1,)] * 30 + [(2,)])
    assert [result.args for result in results] == [[1]] * 30 + [[2]]
    assert len({result.id for result in results}) == 2
    with CaptureQueriesContext(connection) as few:
        unique_tasks.shared.enqueue_many([(1,)] * 2)
    with CaptureQueriesContext(connection) as many:
        again = unique_tasks.shared.enqueue_many([(1,)] * 30 + [(2,)] * 30, partial=True)
    assert {result.id for result in again} == {result.id for result in results}
    assert len(many) == len(few)


def test_a_failed_list_within_a_transaction_leaves_the_transaction_usable() -> None:
    """Only its own rows are rolled back, with their gate slots."""
    unique_tasks.clicked.enqueue(7)
    with transaction.atomic():
        kept = unique_tasks.clicked.enqueue(1)
        with pytest.raises(DuplicateTask):
            unique_tasks.clicked.enqueue_many([(2,), (3,), (7,)])
    assert TaskRecord.objects.count() == 2
    assert kept.id in holders("clicks")
    assert len(holders("clicks")) == 2


# --- gates


def holders(gate: str) -> set[str]:
    """The ids that hold a slot of a gate."""
    return {slot.id for slot in slots(gate)}


def test_twenty_clicks_take_one_slot_of_the_gate() -> None:
    """A duplicate asks no gate."""
    unique_tasks.clicked.enqueue(1)
    for _ in range(19):
        assert is_refused(unique_tasks.clicked, 1)
    assert len(holders("clicks")) == 1
    unique_tasks.clicked.enqueue_many([(n,) for n in range(2, 21)])
    with pytest.raises(QueueFull):
        unique_tasks.clicked.enqueue(21)


def test_a_slot_of_the_gate_is_released_at_once_when_the_insert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the look saw no holder, because another had not committed."""
    unique_tasks.clicked.enqueue(1)
    real, looks = unique.live_holders, []

    def late(slots: Any, *, is_first: bool = True) -> Any:
        looks.append(is_first)
        return {} if is_first else real(slots, is_first=is_first)

    monkeypatch.setattr(unique, "live_holders", late)
    assert is_refused(unique_tasks.clicked, 1)
    assert looks == [True, False]
    assert len(holders("clicks")) == 1


def test_a_holder_that_is_never_seen_is_looked_for_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the call is refused, and names nobody."""
    unique_tasks.clicked.enqueue(1)
    looks: list[bool] = []
    monkeypatch.setattr(unique, "live_holders", lambda slots, *, is_first: looks.append(is_first) or {})
    with pytest.raises(DuplicateTask, match="another task held its unique key") as caught:
        unique_tasks.clicked.enqueue(1)
    assert caught.value.existing_id is None
    assert looks == [True, False, False]
    assert len(holders("clicks")) == 1


# --- pruning, schedules, async callers


def test_a_throttled_row_is_kept_until_its_time_is_over(moved: Callable[[float], None]) -> None:
    """However short the retention is: without the row another would be accepted."""
    for task in (unique_tasks.throttled, unique_tasks.report):
        task.enqueue(1)
        finish(taken_by("w"))
    TaskRecord.objects.update(finished_at=timezone.now() - timedelta(days=1))
    rules = Rules({}, {}, Retention(succeeded=timedelta(0), failed=timedelta(0)))

    def prune() -> list[str]:
        list(Pruner(Broker()).prune_matching(retention_is_over(rules, database_clock.now())))
        return list(TaskRecord.objects.values_list("name", flat=True))

    assert prune() == ["tests.unique_tasks.throttled"]
    assert is_refused(unique_tasks.throttled, 1)
    moved(601)
    assert prune() == []


def test_many_can_be_awaited() -> None:
    """As `enqueue_many`."""
    results = async_to_sync(unique_tasks.shared.aenqueue_many)([(1,), (1,), (2,)])
    assert [result.args for result in results] == [[1], [1], [2]]
    assert TaskRecord.objects.count() == 2


@pytest.mark.parametrize("name", ["report", "shared"])
def test_an_occurrence_that_is_a_duplicate_is_skipped_or_names_the_existing_task(name: str) -> None:
    """As the task says; the schedule goes on."""
    task = getattr(unique_tasks, name)
    first = task.enqueue(1)
    now = timezone.now()
    row = Schedule(
        name="hourly", task=task.module_path, args=[1], is_declared=True, cron="0 * * * *", zone="UTC", missed="once"
    )
    row.plan_next(now - timedelta(hours=1))
    row.save()
    Scheduler().fire_due()
    occurrence = Occurrence.objects.get(schedule=row)
    row.refresh_from_db()
    assert row.next_occurrence_at is not None
    assert row.next_occurrence_at > now
    assert TaskRecord.objects.count() == 1
    if name == "report":
        assert occurrence.outcome == OccurrenceOutcome.SKIPPED
        assert first.id in occurrence.note
    else:
        assert (occurrence.outcome, str(occurrence.task_id)) == (OccurrenceOutcome.QUEUED, first.id)
