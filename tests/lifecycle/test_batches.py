"""Batches: calls of a task wait in a group until they run together, and each has an outcome of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.utils import timezone

from django_asyncq import Batch, gates, interop, lifecycle, remote, task
from django_asyncq.broker import Broker, Lease
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core import batches
from django_asyncq.core.batches import batch_of, group_of
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import DuplicateTask, InvalidArguments, InvalidOption, QueueFull
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.fleet.repairs import repair_groups
from django_asyncq.lifecycle import members
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import run_tasks
from django_asyncq.worker import outcomes
from django_asyncq.worker.complete import arguments_of, storable
from django_asyncq.worker.job import Job, Outcome

from .. import batch_tasks, tasks
from ..redis_state import unknown
from ..workers import history, run_workers, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

KIT = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
QUEUED, RUNNING, SUCCEEDED, FAILED = TaskState
GROUP = "tests.batch_tasks.collect"


@pytest.fixture(autouse=True)
def no_answers() -> Iterator[None]:
    """No answer and no item is left from another test."""
    batch_tasks.ANSWERS.clear()
    batch_tasks.SEEN.clear()
    yield


@pytest.fixture
def keys() -> QueueKeys:
    return QueueKeys("default")


def enqueued(count: int, of: Any = batch_tasks.collect) -> list[TaskRecord]:
    """Enqueue some calls; return their rows."""
    ids = [UUID(result.id) for result in of.enqueue_many([{"number": number} for number in range(count)])]
    found = TaskRecord.objects.in_bulk(ids)
    return [found[id] for id in ids]


def formed() -> list[TaskRecord]:
    """Make batches of all groups that are ripe; return the rows of the new ones."""
    before = set(TaskRecord.objects.values_list("id", flat=True))
    lifecycle.form_batches(Broker(), "default")
    return list(TaskRecord.objects.exclude(id__in=before).order_by("id"))


def states(records: list[TaskRecord]) -> list[int]:
    found = TaskRecord.objects.in_bulk([record.id for record in records])
    return [found[record.id].state for record in records]


def members_of(batch: TaskRecord) -> list[TaskRecord]:
    return list(TaskRecord.objects.filter(batch_id=batch.id).order_by("id"))


def claimed(worker_id: str = "w", *, marked: bool = True) -> lifecycle.Run:
    """Claim the next batch as a worker does, and begin it. marked: it is written as RUNNING."""
    (run,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    lifecycle.begin(run, worker_id, timezone.now())
    if marked:
        lifecycle.mark_running([run])
    return run


def finished(run: lifecycle.Run, value: Any = None, exception: BaseException | None = None) -> Job:
    """Record how a run of a batch has finished, as the reporter does."""
    job = Job(run, registered(run.record.name), 0.0)
    if exception is None:
        value = storable(job, value)
    outcomes.apply(Outcome(job, timezone.now(), value, exception))
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run], lost)
    outcomes.announce([] if lost else [Outcome(job, timezone.now(), value, exception)])
    return job


# --- declaration


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": Batch(), "priority": 1}, "priority"),
        ({"batch": Batch(), "isolated": True}, "isolated"),
        ({"batch": 3}, "Batch"),
    ],
)
def test_options_that_no_batch_can_have(options: dict[str, Any], text: str) -> None:
    """The error names the option."""
    with pytest.raises(InvalidOption, match=text):
        task(**options)(batch_tasks.one_call)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"size": 1001}, {"within": 0}, {"within": 10**8}, {"quiet": -1}, {"per": 3}, {"call": 1}]
)
def test_values_that_no_batch_can_have(options: dict[str, Any]) -> None:
    """Refused when the task is declared."""
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Batch(**options)


def test_a_call_with_other_arguments_is_refused() -> None:
    """`call` says what one call takes; without it a call may take anything. Nothing is written."""
    with pytest.raises(InvalidArguments, match="numbers"):
        batch_tasks.collect.enqueue(numbers=1)
    assert not TaskRecord.objects.exists()
    batch_tasks.with_context.enqueue(anything=1)
    with pytest.raises(InvalidOption, match="priority"):
        batch_tasks.collect.using(priority=3)


def test_the_group_of_a_call_is_its_task_and_what_it_is_per() -> None:
    """A long text, or one that cannot be printed, stands in it as a digest."""
    of = batch_tasks.per_account
    assert group_of(of, [1, "a"], {}) == "tests.batch_tasks.per_account:a"
    assert group_of(of, [], {}) == "tests.batch_tasks.per_account:"
    digests = {group_of(of, [], {"account": text}) for text in ("x" * 300, "y" * 300, "a\x00b", "z" * 171)}
    assert len(digests) == 4
    assert all(len(each) <= 200 and each.isprintable() for each in digests)
    assert batch_of("tests.tasks.add") is None


# --- the group in Redis


def test_calls_wait_in_asynqs_group(keys: QueueKeys) -> None:
    """Not in pending: the hash, the group's zset and the set of names are those of asynq."""
    (record,) = enqueued(1)
    client = Broker().client
    assert client.smembers(keys.groups) == {GROUP.encode()}
    assert client.zrange(keys.group(GROUP), 0, -1) == [str(record.id).encode()]
    assert client.hmget(keys.task(str(record.id)), "state", "group") == [b"aggregating", GROUP.encode()]
    assert not client.exists(keys.pending)
    assert formed() == []


def test_a_full_group_becomes_a_batch(keys: QueueKeys) -> None:
    """As many as its size, those that came first; the others wait on, and the name of the group stays."""
    records = enqueued(4)
    (batch,) = formed()
    assert (batch.name, batch.state, batch.batch_size, batch.is_batch) == (GROUP, QUEUED, 3, True)
    assert members_of(batch) == records[:3]
    client = Broker().client
    assert client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]
    assert client.zrange(keys.group(GROUP), 0, -1) == [str(records[3].id).encode()]
    assert client.smembers(keys.groups) == {GROUP.encode()}
    assert not client.exists(keys.aggregation_sets, keys.task(str(records[0].id)))
    assert formed() == []


def test_two_batches_of_a_backlog_are_made_at_once(keys: QueueKeys) -> None:
    """An emptied group leaves nothing in Redis."""
    enqueued(6)
    assert [batch.batch_size for batch in formed()] == [3, 3]
    assert not Broker().client.exists(keys.groups, keys.group_due, keys.group_rules, keys.aggregation_sets)


def test_a_group_is_ripe_when_its_first_call_has_waited(keys: QueueKeys) -> None:
    """`within` counts from the first call, `quiet` from the last; the reply says how long it is until then."""
    enqueued(1)
    _, seconds = lifecycle.form_batches(Broker(), "default")
    assert seconds is not None
    assert 55 < seconds <= 60
    batch_tasks.per_account.enqueue(account="a")
    _, seconds = lifecycle.form_batches(Broker(), "default")
    assert seconds is not None
    assert seconds <= 0.05
    wait_until(formed, "a batch")
    (batch,) = TaskRecord.objects.filter(batch_size__isnull=False)
    assert (batch.group, batch.batch_size) == ("tests.batch_tasks.per_account:a", 1)


def test_only_calls_of_one_account_run_together() -> None:
    """`per` decides."""
    of = batch_tasks.per_account
    of.enqueue_many([{"account": "a"}, {"account": "b"}, {"account": "a"}])
    wait_until(lambda: formed() or TaskRecord.objects.filter(batch_size__isnull=False).count() == 2, "two batches")
    found = TaskRecord.objects.filter(batch_size__isnull=False).values_list("group", "batch_size")
    assert sorted(found) == [(f"{of.module_path}:a", 2), (f"{of.module_path}:b", 1)]


def test_a_delayed_call_joins_its_group_when_it_is_due(keys: QueueKeys) -> None:
    """Its rules travel with it: nobody needs the code of the task to move it."""
    batch_tasks.collect.using(run_after=timedelta(hours=1)).enqueue()
    client = Broker().client
    (id,) = client.zrange(keys.scheduled, 0, -1)
    client.zadd(keys.scheduled, {id: 1})
    client.delete(keys.due)
    assert Broker().forward("default", "scheduled").moved == 1
    assert client.zrange(keys.group(GROUP), 0, -1) == [id]
    assert client.zscore(keys.group_due, GROUP) is not None


def test_a_group_of_another_program_is_left_alone(keys: QueueKeys) -> None:
    """It has no rules, and no row; nothing of it changes."""
    from django_asyncq.broker import Entry

    Groups().add("default", "theirs", [Entry("a", b"m"), Entry("b", b"m")], rules="")
    assert formed() == []
    assert Broker().client.zcard(keys.group("theirs")) == 2


def test_a_rowless_member_of_our_group_goes_back(keys: QueueKeys) -> None:
    """Another program may add to any group; only what has a row is dropped."""
    from django_asyncq.broker import Entry

    Groups().add("default", GROUP, [Entry("of Go", b"m")], rules="")
    enqueued(2)
    (batch,) = formed()
    assert batch.batch_size == 2
    client = Broker().client
    assert client.zrange(keys.group(GROUP), 0, -1) == [b"of Go"]
    assert client.hget(keys.task("of Go"), "state") == b"aggregating"
    assert client.smembers(keys.groups) == {GROUP.encode()}
    assert formed() == []
    enqueued(3)
    # Three of the four; the one of Go may be among them, and makes nobody's turn come sooner.
    (batch,) = formed()
    assert batch.batch_size in (2, 3)
    assert b"of Go" in client.zrange(keys.group(GROUP), 0, -1)
    assert formed() == []


def test_a_stale_set_goes_back_with_the_name_of_its_group(keys: QueueKeys) -> None:
    """Its taker has died before the commit. asynq's recoverer would forget the name."""
    records = enqueued(3)
    taken = Groups().take("default")
    assert taken.ids == [str(record.id) for record in records]
    client = Broker().client
    assert not client.exists(keys.groups, keys.group(GROUP))
    assert formed() == []
    (key,) = client.zrange(keys.aggregation_sets, 0, -1)
    client.zadd(keys.aggregation_sets, {key: 1})
    (batch,) = formed()
    assert members_of(batch) == records
    assert not client.exists(keys.aggregation_sets, key)


def test_members_whose_batch_was_committed_are_dropped_when_they_are_taken_again(keys: QueueKeys) -> None:
    """The taker has died after the commit; the reconciler pushes the batch."""
    records = enqueued(3)
    Groups().take("default")
    (batch,) = lifecycle.make_batches(records)
    client = Broker().client
    (key,) = client.zrange(keys.aggregation_sets, 0, -1)
    client.zadd(keys.aggregation_sets, {key: 1})
    assert formed() == []
    assert not client.exists(keys.aggregation_sets, keys.group(GROUP), keys.task(str(records[0].id)))
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    assert Reconciler(Broker()).push_missing(young=True) == 1
    assert client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]


@pytest.mark.skipif("sqlite" in connection.vendor, reason="SQLite locks no rows")
def test_a_member_whose_row_is_locked_waits_on(keys: QueueKeys) -> None:
    """Somebody's transaction may last; the batch begins without it."""
    import threading

    records = enqueued(3)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            list(TaskRecord.objects.select_for_update().filter(id=records[0].id))
            locked.set()
            done.wait(20)
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(20)
    try:
        (batch,) = formed()
    finally:
        done.set()
        thread.join()
    assert members_of(batch) == records[1:]
    assert Broker().client.zrange(keys.group(GROUP), 0, -1) == [str(records[0].id).encode()]
    assert Broker().client.zscore(keys.group_due, GROUP) is not None


def test_an_emptied_redis_gets_the_groups_and_the_batches_again(keys: QueueKeys) -> None:
    """A member of a batch is not pushed: it has no entry. The others join their group."""
    records = enqueued(4)
    (batch,) = formed()
    client = Broker().client
    client.delete(*client.keys(f"{keys.base}*"))
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    Reconciler(Broker()).sweep()
    assert client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]
    assert client.zrange(keys.group(GROUP), 0, -1) == [str(records[3].id).encode()]
    assert set(unknown([str(record.id) for record in records])) == {str(record.id) for record in records[:3]}


def test_a_sweep_finds_nothing_to_repair_in_a_group(keys: QueueKeys) -> None:
    """Neither while its members wait, nor while they are taken."""
    enqueued(4)
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    assert not any(Reconciler(Broker()).sweep())
    Groups().take("default")
    assert not any(Reconciler(Broker()).sweep())


def test_a_group_whose_name_was_forgotten_is_found(keys: QueueKeys) -> None:
    """A Go server returns members of a stale set to their group without its name."""
    enqueued(1)
    client = Broker().client
    client.delete(keys.groups, keys.group_due, keys.group_rules)
    assert repair_groups(Broker()) == 1
    assert repair_groups(Broker()) == 0
    assert client.smembers(keys.groups) == {GROUP.encode()}


def test_members_of_a_deleted_batch_join_their_group_again(keys: QueueKeys) -> None:
    """A person has deleted the row of the batch."""
    records = enqueued(3)
    (batch,) = formed()
    TaskRecord.objects.filter(id=batch.id).delete()
    assert repair_groups(Broker()) == 3
    assert Broker().client.zcard(keys.group(GROUP)) == 3
    assert {record.batch_id for record in TaskRecord.objects.filter(id__in=[each.id for each in records])} == {None}


def test_members_of_a_deleted_batch_are_found_behind_many_of_others(
    keys: QueueKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look takes so many batches that are over, not so many members, the newest first."""
    enqueued(3)
    (batch,) = formed()
    TaskRecord.objects.filter(id=batch.id).delete()
    enqueued(6)
    assert len(formed()) >= 1
    monkeypatch.setattr(members, "MOST_BATCHES", 1)
    assert repair_groups(Broker()) == 3
    assert repair_groups(Broker()) == 0


def test_a_plain_task_pays_nothing(django_assert_num_queries: Any) -> None:
    """Neither its claim nor its outcome asks for members."""
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(run, "w", timezone.now())
    lifecycle.succeed(run, 1, timezone.now())
    # MariaDB's UPDATE returns no rows, so what it has changed is read.
    with django_assert_num_queries(2 if connection.vendor == "mysql" else 1):
        assert lifecycle.record_runs([run]) == []


# --- outcomes


def test_all_members_succeed_with_their_batch() -> None:
    """None for each, or what the function returned for it; RUNNING and the end are written for all at once."""
    records = enqueued(3)
    (batch,) = formed()
    run = claimed()
    assert states([batch, *records]) == [RUNNING] * 4
    finished(run, {str(records[1].id): 7})
    assert states([batch, *records]) == [SUCCEEDED] * 4
    found = [TaskRecord.objects.get(id=record.id) for record in records]
    assert [(row.return_value, row.attempt, row.worker_ids) for row in found] == [
        (None, 1, ["w"]),
        (7, 1, ["w"]),
        (None, 1, ["w"]),
    ]


def test_a_member_that_failed_is_retried_by_itself(keys: QueueKeys) -> None:
    """With the backoff of the task; when it is due it joins its group again. The others have succeeded."""
    records = enqueued(3)
    (batch,) = formed()
    finished(claimed(), {str(records[0].id): batch_tasks.Glitch("no"), str(records[1].id): 1})
    assert states([batch, *records]) == [SUCCEEDED, FAILED, SUCCEEDED, SUCCEEDED]
    row = TaskRecord.objects.get(id=records[0].id)
    assert row.retry_at is not None
    assert row.errors[0]["message"] == "no"
    client = Broker().client
    assert client.zrange(keys.retry, 0, -1) == [str(row.id).encode()]
    assert lifecycle.retry_due(Broker(), "default", [str(row.id)]) == 1
    assert client.zrange(keys.group(GROUP), 0, -1) == [str(row.id).encode()]
    assert not client.exists(keys.retry)
    row.refresh_from_db()
    assert (row.state, row.batch_id) == (QUEUED, None)


def test_an_error_of_the_function_fails_all_members() -> None:
    """Each is retried as its task says; the batch itself is over."""
    records = enqueued(3)
    TaskRecord.objects.filter(id=records[0].id).update(max_attempts=1)
    (batch,) = formed()
    finished(claimed(), exception=batch_tasks.Glitch("all"))
    batch.refresh_from_db()
    assert (batch.state, batch.retry_at, batch.errors[0]["message"]) == (FAILED, None, "all")
    rows = [TaskRecord.objects.get(id=record.id) for record in records]
    assert [(row.state, row.retry_at is not None) for row in rows] == [(FAILED, False), (FAILED, True), (FAILED, True)]


@pytest.mark.parametrize("value", [3, [1, 2], "text"])
def test_a_result_that_is_no_mapping_fails_all_members(value: Any) -> None:
    """As a result that JSON cannot hold does: it is not retried, because the function had finished."""
    from django_asyncq.exceptions import InvalidResult

    enqueued(3)
    formed()
    job = Job(claimed(), registered(GROUP), 0.0)
    with pytest.raises(InvalidResult, match="mapping"):
        storable(job, value)


def test_a_value_that_json_cannot_hold_fails_its_member_alone() -> None:
    """And an id that the batch did not have is logged."""
    records = enqueued(3)
    formed()
    finished(claimed(), {str(records[0].id): {1}, "another": 1})
    assert states(records) == [FAILED, SUCCEEDED, SUCCEEDED]
    row = TaskRecord.objects.get(id=records[0].id)
    assert (row.retry_at, row.last_exception) == (None, "builtins.TypeError")


def test_an_outcome_of_a_lost_batch_changes_no_member() -> None:
    """The fence of the batch guards them all."""
    records = enqueued(3)
    formed()
    run = claimed()
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died")
    assert states(records) == [QUEUED] * 3
    finished(run)
    assert states([run.record, *records]) == [QUEUED] * 4


# --- cancel, expire, replace, gates


def test_a_cancelled_member_is_taken_out_of_its_batch() -> None:
    """Before the batch begins; the others run."""
    records = enqueued(3)
    formed()
    assert lifecycle.cancel([records[0].id]).cancelled == 1
    run = claimed()
    assert [member.record.id for member in run.members] == [record.id for record in records[1:]]
    finished(run)
    assert states(records) == [FAILED, SUCCEEDED, SUCCEEDED]


def test_a_cancel_in_the_first_moments_of_a_run_holds() -> None:
    """The rows still say QUEUED; as when they say RUNNING, it is noted, and a body that succeeds has succeeded."""
    records = enqueued(3)
    (batch,) = formed()
    run = claimed(marked=False)
    assert lifecycle.cancel([records[0].id]) == (0, 1, 0)
    batch.refresh_from_db()
    assert batch.cancel_requested_at is None
    assert lifecycle.cancel([batch.id]) == (0, 4, 0)
    batch.refresh_from_db()
    assert batch.cancel_requested_at is not None
    finished(run)
    assert states(records) == [SUCCEEDED] * 3
    assert TaskRecord.objects.get(id=records[0].id).cancel_requested_at is not None


def test_a_batch_goes_on_without_a_member_whose_cancel_was_rolled_back_or_not() -> None:
    """While the cancel of a member is open no worker gets the batch; afterwards it waits again, with the others."""
    records = enqueued(3)
    (batch,) = formed()
    with transaction.atomic():
        assert lifecycle.cancel([records[0].id]) == (1, 0, 0)
        assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert lifecycle.cancel([records[1].id]) == (1, 0, 0)
        raise ZeroDivisionError
    wait_until(lambda: Broker().has_pending("default"), "batch that waits again")
    run = claimed()
    assert run.record.id == batch.id
    assert [member.record.id for member in run.members] == [records[1].id, records[2].id]


def test_a_batch_is_asked_to_stop_once_all_its_members_are_cancelled() -> None:
    """A cancel of one is noted only."""
    records = enqueued(3)
    (batch,) = formed()
    claimed()
    lifecycle.cancel([records[0].id, records[1].id])
    batch.refresh_from_db()
    assert batch.cancel_requested_at is None
    assert lifecycle.cancel([records[2].id]).asked == 1
    batch.refresh_from_db()
    assert batch.cancel_requested_at is not None
    assert Broker().client.hget(QueueKeys("default").task(str(batch.id)), "cancel") == b"1"


def test_a_batch_is_cancelled_with_its_members() -> None:
    """While it waits."""
    records = enqueued(3)
    (batch,) = formed()
    lifecycle.cancel([batch.id])
    assert states([batch, *records]) == [FAILED] * 4
    assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []


def test_a_batch_all_of_whose_members_are_cancelled_succeeds_without_a_run() -> None:
    """Its function is not called."""
    records = enqueued(3)
    (batch,) = formed()
    lifecycle.cancel([record.id for record in records])
    assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
    assert states([batch]) == [SUCCEEDED]


def test_a_member_that_has_expired_does_not_begin() -> None:
    """It is closed when its batch is claimed."""
    records = enqueued(3)
    formed()
    TaskRecord.objects.filter(id=records[0].id).update(expires_at=timezone.now() - timedelta(seconds=1))
    run = claimed()
    assert len(run.members) == 2
    assert TaskRecord.objects.get(id=records[0].id).reason == FailureReason.EXPIRED


def test_members_hold_their_gate_slots_until_the_end() -> None:
    """A gate of two admits no third call while a batch of two waits or runs."""
    records = enqueued(2, batch_tasks.gated)
    formed()
    run = claimed()
    with pytest.raises(QueueFull):
        batch_tasks.gated.enqueue()
    finished(run)
    assert states(records) == [SUCCEEDED] * 2
    assert gates.occupied() == set()
    batch_tasks.gated.enqueue()


def test_a_unique_member_holds_its_key_until_the_end() -> None:
    """A replacement takes it out of its batch, and it joins its group with the new arguments."""
    of = batch_tasks.unique
    first, _ = of.enqueue(number=1), of.enqueue(number=2)
    formed()
    with pytest.raises(DuplicateTask):
        of.enqueue(number=1)
    replaced = of.using(on_duplicate="replace").enqueue(number=1, account="new")
    assert replaced.id == first.id
    run = claimed()
    assert len(run.members) == 1
    finished(run)
    row = TaskRecord.objects.get(id=first.id)
    assert (row.state, row.batch_id, row.kwargs["account"]) == (QUEUED, None, "new")
    assert of.enqueue(number=2).id


# --- lost workers


def test_a_batch_whose_worker_died_comes_again_whole_then_one_by_one(keys: QueueKeys) -> None:
    """At first as any other, then as a suspect; after its death in quarantine each member runs alone."""
    records = enqueued(3)
    (batch,) = formed()
    run = claimed()
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died")
    batch.refresh_from_db()
    assert (batch.state, batch.is_suspect) == (QUEUED, False)
    lifecycle.recover(Broker(), "default", "w", [claimed().lease], reason="it died")
    batch.refresh_from_db()
    assert (batch.state, batch.is_suspect) == (QUEUED, True)
    worker = "w-alone"
    lease = lifecycle.claim_suspect(Broker(), "default", worker, "default")
    (again,) = lease.runs
    assert [member.record.id for member in again.members] == [record.id for record in records]
    lifecycle.begin(again, worker, timezone.now())
    lifecycle.mark_running([again])
    lifecycle.recover(Broker(), "default", worker, [again.lease], reason="it died again")
    batch.refresh_from_db()
    assert (batch.state, batch.reason) == (FAILED, FailureReason.WORKER_LOST)
    rows = [TaskRecord.objects.get(id=record.id) for record in records]
    assert [(row.state, row.group, row.batch_id, row.attempt, row.is_suspect) for row in rows] == [
        (QUEUED, "", None, 0, False)
    ] * 3
    assert Broker().client.llen(keys.pending) == 3
    (alone,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    job = Job(alone, registered(GROUP), 0.0)
    (items,), _, _ = arguments_of(job)
    assert [item.id for item in items] == [str(alone.record.id)]


def test_a_batch_that_is_requeued_keeps_its_members() -> None:
    """As at a shutdown: no attempt is used."""
    records = enqueued(3)
    (batch,) = formed()
    run = claimed()
    lifecycle.requeue(Broker(), "w", [run])
    assert states([batch, *records]) == [QUEUED] * 4
    assert {row.attempt for row in TaskRecord.objects.all()} == {0}
    finished(claimed())
    assert states([batch, *records]) == [SUCCEEDED] * 4


def test_a_batch_without_code_leaves_its_members_to_themselves() -> None:
    """Each then fails with the reason, after the same patience."""
    records = enqueued(3)
    formed()
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.refuse(Broker(), run, ValueError("no code"))
    assert states([run.record, *records]) == [FAILED, QUEUED, QUEUED, QUEUED]
    assert len(lifecycle.claim(Broker(), "default", "w", 9, "default").runs) == 3


def test_a_member_that_a_tool_has_made_pending_runs_alone(keys: QueueKeys) -> None:
    """asynq's `task run` moves it out of its group. One that is in a batch meanwhile does not run twice."""
    (record,) = enqueued(1)
    client, id = Broker().client, str(record.id)
    client.zrem(keys.group(GROUP), id)
    client.hset(keys.task(id), "state", "pending")
    client.lpush(keys.pending, id)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    assert (run.record.id, run.members) == (record.id, [])
    lifecycle.requeue(Broker(), "w", [run])
    lifecycle.make_batches([record])
    assert lifecycle.claim(Broker(), "default", "w", 1, "default").runs == []
    assert not client.exists(keys.task(id))


def test_the_admin_shows_a_batch_and_its_members(admin_client: Any) -> None:
    """The page of each names the other: by the number of calls, and by the id of the batch."""
    record, *_ = enqueued(3)
    (batch,) = formed()
    page = "/admin/django_asyncq/taskrecord/{}/change/"
    assert "Calls in the batch" in admin_client.get(page.format(batch.id), follow=True).content.decode()
    assert str(batch.id) in admin_client.get(page.format(record.id), follow=True).content.decode()


# --- with workers, and in the test kit


def test_batches_run_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full ones at once, others when they are ripe; `def`, `async def` and atomic ones."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history.jsonl"))
    results = batch_tasks.collect.enqueue_many([{"number": number} for number in range(6)])
    results += [batch_tasks.per_account.enqueue(account="a"), batch_tasks.per_account.enqueue(account="b")]
    doubled = [batch_tasks.coroutine.enqueue(number=number) for number in (1, 2)]
    written = [batch_tasks.atomic.enqueue(name=name) for name in "xy"]
    told = [batch_tasks.with_context.enqueue() for _ in range(2)]
    run_workers()
    for result in (*results, *doubled, *written, *told):
        result.refresh()
        assert result.status == "SUCCESSFUL", result.errors
    assert [result.return_value for result in doubled] == [2, 4]
    assert [result.return_value for result in told] == [[1, 1]] * 2
    assert Group.objects.filter(name__startswith="batch ").count() == 2
    sizes = [len(line["kwargs"]) for line in history(tmp_path / "history.jsonl")]
    assert sorted(sizes) == [1, 1, 2, 3, 3]


def test_the_leader_makes_batches_of_all_queues() -> None:
    """A step of its loop says when to look again."""
    service = MaintenanceService([], single_instance=None)
    enqueued(3)
    assert service.form_batches() <= 60
    assert TaskRecord.objects.filter(batch_size=3).count() == 1


def test_without_such_tasks_the_loop_looks_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often plain delayed tasks wake it; but in time for a group that it has seen, of code that is gone."""
    looks: list[str] = []
    form = interop.form_batches
    monkeypatch.setattr(interop, "form_batches", lambda broker, queue: looks.append(queue) or form(broker, queue))
    with monkeypatch.context() as here:
        here.setattr(batches, "_declared", {})
        service = MaintenanceService(["default"], single_instance=None)
        waits = [service.form_batches() for _ in range(3)]
        assert looks == ["default"] and waits[0] <= 5 and 50 < waits[2] <= 60
    batch_tasks.per_account.enqueue(number=1, account="a")
    monkeypatch.setattr(batches, "_declared", {})
    service = MaintenanceService(["default"], single_instance=None)
    # The first look has seen the group, whether or not it is ripe by then.
    assert service.form_batches() <= 0.2


def test_the_test_kit_runs_batches(settings: Any) -> None:
    """A full group at once; another when its time has come by the clock of the test."""
    settings.TASKS = KIT
    results = batch_tasks.collect.enqueue_many([{"number": number} for number in range(4)])
    batch_tasks.ANSWERS.append(lambda items: {items[0].id: batch_tasks.Glitch("no"), items[1].id: 5})
    run_tasks()
    for result in results:
        result.refresh()
    assert [str(result.status) for result in results] == ["READY", "SUCCESSFUL", "SUCCESSFUL", "READY"]
    assert [len(items) for items in batch_tasks.SEEN] == [3]
    run_tasks(until=timedelta(minutes=10))
    for result in results:
        result.refresh()
    assert {str(result.status) for result in results} == {"SUCCESSFUL"}
    assert results[1].return_value == 5


def test_the_test_kit_leaves_the_groups_of_other_programs_alone(settings: Any) -> None:
    """A remote task waits there for its program."""
    settings.TASKS = KIT
    deliver = remote("email:deliver-later", queue_name="go")
    result = deliver.using(group="newsletter").enqueue(to="a@example.com")
    assert run_tasks(until=timedelta(minutes=10)) == []
    result.refresh()
    assert str(result.status) == "READY"


def test_a_full_group_runs_at_once_in_the_mode_immediate(settings: Any) -> None:
    """The call that fills it runs it."""
    settings.TASKS = {"default": {**KIT["default"], "OPTIONS": {"mode": "immediate"}}}
    first = batch_tasks.atomic.enqueue(name="one")
    assert str(first.status) == "READY"
    second = batch_tasks.atomic.enqueue(name="two")
    first.refresh()
    assert [str(first.status), str(second.status)] == ["SUCCESSFUL"] * 2


def test_an_error_of_an_atomic_batch_rolls_all_of_it_back(settings: Any) -> None:
    """The effects of every call; all members have failed."""
    settings.TASKS = KIT
    batch_tasks.ANSWERS.append(batch_tasks.Glitch("no"))
    results = [batch_tasks.atomic.enqueue(name=name) for name in "xy"]
    run_tasks()
    for result in results:
        result.refresh()
    assert {str(result.status) for result in results} == {"FAILED"}
    assert not Group.objects.exists()


def test_lease_of_a_member_names_no_entry() -> None:
    """It is the fence of its row alone."""
    (record, *_) = enqueued(3)
    formed()
    assert claimed(marked=False).members[0].lease == Lease(str(record.id), 1)
