"""Members that other programs have put into groups: those that a task with `batch` runs get rows, and run together."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
import redis
from django.db import connection, connections, transaction

from django_asyncq import interop, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.registry import registered
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop import adopt
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.testing import failpoints
from django_asyncq.testing.faults import ProcessDied, fail_at
from django_asyncq.worker import outcomes
from django_asyncq.worker.complete import arguments_of, storable
from django_asyncq.worker.job import Job, Outcome

from .. import batch_tasks, go_client, tasks, wire_tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

QUEUE = "mail"
QUEUED, RUNNING, SUCCEEDED, FAILED = TaskState


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process that has run nothing."""
    wire_tasks.heard.clear()
    monkeypatch.setattr(adopt, "_logged", set())


@pytest.fixture
def keys() -> QueueKeys:
    return QueueKeys(QUEUE)


def add(client: redis.Redis, *ids: str, type: str = "event:add", group: str = "g", queue: str = QUEUE) -> None:
    for id in ids:
        go_client.add_to_group(client, queue, group, type, json.dumps({"name": id}).encode(), id=id)


def form(queue: str = QUEUE) -> list[TaskRecord]:
    interop.form_batches(Broker(), queue)
    return list(TaskRecord.objects.filter(batch_size__isnull=False).order_by("id"))


def rows() -> dict[str, TaskRecord]:
    return {row.redis_id: row for row in TaskRecord.objects.filter(batch_size=None)}


def test_a_full_group_of_another_program_becomes_a_batch(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """The rules are those of the task; each member has a row, with what its message says."""
    add(redis_client, "a", "b")
    assert form() == []
    assert rows() == {}
    add(redis_client, "c")
    (batch,) = form()
    assert (batch.name, batch.queue_name, batch.group, batch.batch_size) == (
        wire_tasks.events.module_path,
        QUEUE,
        "g",
        3,
    )
    found = rows()
    assert set(found) == {"a", "b", "c"}
    assert {(row.state, row.batch_id, row.group, row.max_attempts) for row in found.values()} == {
        (QUEUED, batch.id, "g", 26)
    }
    assert not redis_client.exists(keys.group("g"), keys.groups, keys.aggregation_sets, keys.task("a"), keys.group_due)
    assert redis_client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]


def test_a_group_is_ripe_when_its_first_member_has_waited(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """By the times that the other program has written."""
    add(redis_client, "a", "b")
    go_client.age_group(redis_client, QUEUE, "g", 61)
    assert [batch.batch_size for batch in form()] == [2]


@pytest.mark.parametrize("point", ["adopt.row_inserted", "batch.rows_written"])
def test_a_sweep_leaves_members_alone_that_are_being_adopted(redis_client: redis.Redis, point: str) -> None:
    """They are in the taken set still, and nothing is broken; who comes next drops them."""
    add(redis_client, "a", "b", "c")
    with pytest.raises(ProcessDied), fail_at(point):
        form()
    assert len(rows()) == 3
    Broker().mark_alive()
    reconciler = Reconciler(Broker())
    assert [reconciler.sweep().orphans for _ in range(2)] == [0, 0]


def test_members_run_and_are_retried_together(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """A retry joins the group again; an emptied Redis gets it again from the rows."""
    add(redis_client, "a", "b", "c", type="event:bytes")
    form()
    run = interop.claim(Broker(), QUEUE, "w", 1, "default").runs[0]
    assert len(run.members) == 2
    lifecycle.begin(run, "w", database_clock.now())
    lifecycle.mark_running([run])
    job = Job(run, registered(run.record.name), 0.0)
    (items,), _, _ = arguments_of(job)
    assert [item.args for item in items] == [[b'{"name": "a"}'], [b'{"name": "b"}']]
    error = {items[0].id: ValueError("no"), items[1].id: 5}
    outcomes.apply(Outcome(job, database_clock.now(), storable(job, error), None))
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    found = rows()
    assert (found["b"].state, found["b"].return_value) == (SUCCEEDED, 5)
    assert (found["a"].state, found["a"].retry_at is None, found["a"].group) == (FAILED, False, "g")
    assert lifecycle.retry([found["a"].id], by_person=True).retried
    assert set(redis_client.zrange(keys.group("g"), 0, -1)) <= {b"a", b"c"}
    form()
    (again,) = interop.claim(Broker(), QUEUE, "w", 1, "default").runs
    assert {member.record.redis_id for member in again.members} == {"a", "c"}


def test_an_emptied_redis_gets_adopted_members_again(
    redis_client: redis.Redis, keys: QueueKeys, key_prefix: str
) -> None:
    """From the rows: the batch, and whoever waits for the next one. What had no row is gone, as asynq's own."""
    add(redis_client, "a", "b", "c")
    (batch,) = form()
    TaskRecord.objects.filter(wire_id="c").update(batch_id=None)
    for key in redis_client.scan_iter(f"*{key_prefix}*"):
        redis_client.delete(key)
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(minutes=1))
    Broker().mark_alive()
    Reconciler(Broker()).sweep()
    assert redis_client.zrange(keys.group("g"), 0, -1) == [b"c"]
    assert redis_client.hget(keys.task("c"), "row") == str(rows()["c"].id).encode()
    assert redis_client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]


@pytest.mark.parametrize("type", ["nobody:knows", "email:deliver"])
def test_groups_of_nobody_are_left_alone(type: str, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """Also those of a task without `batch`: not a byte changes."""
    add(redis_client, "a", "b", "c", "d", type=type)
    go_client.age_group(redis_client, QUEUE, "g", 10_000)
    before = go_client.contents(redis_client, QUEUE)
    assert form() == []
    assert go_client.contents(redis_client, QUEUE) == before
    assert not TaskRecord.objects.exists()


def test_a_member_that_cannot_be_run_has_a_failed_row(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """It leaves the group, and the others run."""
    add(redis_client, "a", "b")
    go_client.add_to_group(redis_client, QUEUE, "g", "event:add", b"{not json", id="bad")
    (batch,) = form()
    found = rows()
    assert batch.batch_size == 2
    assert (found["bad"].state, found["bad"].retry_at, found["bad"].batch_id) == (FAILED, None, None)
    assert "JSON" in found["bad"].errors[-1]["message"]
    assert not redis_client.exists(keys.task("bad"), keys.group("g"))


def test_strangers_in_a_group_keep_nobody_waiting(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """They stay with their bytes, behind the others; nobody takes them again and again."""
    add(redis_client, "x", "y", "z", type="nobody:knows")
    go_client.age_group(redis_client, QUEUE, "g", 100)
    add(redis_client, "a", "b", "c")
    Groups("worker", "default").ensure(QUEUE, {"g": "3 60000 0"})
    strangers = [redis_client.hgetall(keys.task(id)) for id in "xyz"]
    formed, seconds = interop.form_batches(Broker(), QUEUE)
    assert formed == 0
    assert seconds is not None and seconds > 1
    redis_client.zadd(keys.group_due, {"g": 0})
    assert [batch.batch_size for batch in form()] == [3]
    assert set(rows()) == {"a", "b", "c"}
    assert [redis_client.hgetall(keys.task(id)) for id in "xyz"] == strangers
    assert redis_client.zcard(keys.group("g")) == 3


def test_a_full_gate_leaves_members_in_the_group(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """They get no row, and are looked at again later."""
    add(redis_client, "a", "b", "c", type="event:gated")
    (batch,) = form()
    assert (batch.batch_size, len(rows())) == (1, 1)
    assert redis_client.zcard(keys.group("g")) == 2
    _, seconds = interop.form_batches(Broker(), QUEUE)
    assert seconds is None or seconds > 1


@pytest.mark.parametrize("point", ["adopt.row_named", "adopt.row_inserted", "batch.rows_written", "batch.dropped"])
def test_a_death_at_each_step_loses_and_repeats_nothing(point: str, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """Whoever takes the members next finds their rows; the reconciler pushes a batch that nobody has pushed."""

    class Death(Exception):
        pass

    def die(reached: str) -> None:
        if reached == point:
            raise Death

    add(redis_client, "a", "b", "c")
    failpoints.arm(die, point)
    try:
        with pytest.raises(Death):
            form()
    finally:
        failpoints.disarm()
    for set_key, _ in redis_client.zscan_iter(keys.aggregation_sets):
        redis_client.zadd(keys.aggregation_sets, {set_key: 0})
    form()
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(minutes=1))
    Broker().mark_alive()
    Reconciler(Broker()).sweep()
    (batch,) = form()
    found = rows()
    assert set(found) == {"a", "b", "c"}
    assert {row.batch_id for row in found.values()} == {batch.id}
    assert redis_client.lrange(keys.pending, 0, -1) == [str(batch.id).encode()]
    assert not redis_client.exists(keys.group("g"), keys.aggregation_sets, keys.task("a"))


def test_a_name_too_long_for_a_row_is_a_digest_there(redis_client: redis.Redis, keys: QueueKeys) -> None:
    """And ids and names of any bytes are taken."""
    group = "ü\n:{x}:" * 60
    add(redis_client, "a", "b:c", "{d}", group=group)
    (batch,) = form()
    assert batch.batch_size == 3
    assert len(batch.group) <= 200
    assert not redis_client.exists(keys.group(group))


def test_what_runs_no_groups_of_others_looks_at_none(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project without such a task sends no command for it."""
    monkeypatch.setattr(adopt.names, "tasks_of", lambda alias: [tasks.nap])
    monkeypatch.setattr(Groups, "look", None)
    add(redis_client, "a", "b", "c")
    assert form() == []


def test_a_locked_row_is_not_taken_again_and_again(keys: QueueKeys) -> None:
    """The group is put off while another transaction holds a member, so that no process spins."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("only where locked rows are skipped")
    for number in range(3):
        batch_tasks.collect.enqueue(number=number)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            list(TaskRecord.objects.select_for_update())
            held.set()
            over.wait(10)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(5)
        formed, seconds = interop.form_batches(Broker(), "default")
    finally:
        over.set()
        thread.join()
    assert (formed, seconds) != (0, 0.0)
    assert seconds is not None and seconds > 1
