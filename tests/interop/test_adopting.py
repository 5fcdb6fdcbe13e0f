"""Messages of other programs that a task has declared: they get a row at their first claim, and run."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import redis
from django.db import connections

from django_asyncq import interop, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.foreign import read_rejected
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import TaskNotRunnable
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop import adopt
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage import database_clock

from .. import go_client, wire_tasks

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "mail"
WORKER = "w-1"


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process that has run nothing."""
    wire_tasks.heard.clear()
    monkeypatch.setattr(adopt, "_logged", set())


def claim(worker_id: str = WORKER, count: int = 10) -> list[lifecycle.Run]:
    return interop.claim(Broker(), QUEUE, worker_id, count, "default").runs


def run(claimed: lifecycle.Run, worker_id: str = WORKER) -> None:
    """Do what a worker does with a run, in this thread."""
    record = claimed.record
    task = registered(record.name)
    lifecycle.begin(claimed, worker_id, database_clock.now())
    call = lifecycle.wire_call_of(record, task)
    assert call is not None
    try:
        lifecycle.succeed(claimed, task.func(*call.args, **call.kwargs), database_clock.now())
    except ValueError as error:
        due = database_clock.now() - timedelta(seconds=5)
        lifecycle.fail(claimed, error, "", due, retry_at=due if record.attempt < record.max_attempts else None)
    assert lifecycle.record_runs([claimed]) == []
    lifecycle.acknowledge(Broker(), worker_id, [claimed])


def state_of(client: redis.Redis, id: str = "go-1") -> str:
    found: Any = client.hget(QueueKeys(QUEUE).task(id), "state")
    return "" if found is None else str(found.decode())


def payload(**values: Any) -> bytes:
    return json.dumps(values).encode()


def test_a_message_gets_a_row_and_runs(redis_client: redis.Redis) -> None:
    """asynq's options travel; the entry goes as asynq's own does."""
    deadline = int(time.time()) + 3600
    go_client.enqueue(
        redis_client,
        QUEUE,
        "email:deliver",
        payload(to="a@example.org", copies=2),
        retry=4,
        retried=1,
        timeout=7,
        deadline=deadline,
        headers={"trace": "1"},
    )
    (claimed,) = claim()
    record = TaskRecord.objects.get()
    assert (record.name, record.wire_id, record.queue_name) == ("tests.wire_tasks.deliver", "go-1", QUEUE)
    assert (record.args, record.kwargs) == ([], {"to": "a@example.org", "copies": 2})
    assert (record.max_attempts, record.attempt, record.timeout_seconds) == (5, 1, 7)
    assert record.deadline is not None and record.deadline.timestamp() == deadline
    assert record.headers == {"trace": "1"}
    run(claimed)
    record.refresh_from_db()
    assert (record.state, record.return_value, record.attempt) == (TaskState.SUCCEEDED, {"sent": 2}, 2)
    assert wire_tasks.heard == [("deliver", ("a@example.org", "", 2))]
    assert not redis_client.exists(QueueKeys(QUEUE).task("go-1"))
    assert redis_client.llen(QueueKeys(QUEUE).active) == 0


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ((), {})),
        (b'{"a": 1}', ((), {"a": 1})),
        (b"[1, 2]", ((1, 2), {})),
        (b'"text"', (("text",), {})),
        (b"null", ((None,), {})),
        (b'{"args": [1], "kwargs": {"b": 2}}', ((1,), {"b": 2})),
        (b'{"args": [1], "kwargs": {}, "c": 3}', ((), {"args": [1], "kwargs": {}, "c": 3})),
        (b'{"args": 1, "kwargs": {}}', ((), {"args": 1, "kwargs": {}})),
    ],
)
def test_json_becomes_arguments(data: bytes, expected: Any, redis_client: redis.Redis) -> None:
    go_client.enqueue(redis_client, QUEUE, "any:value", data)
    (claimed,) = claim()
    run(claimed)
    assert wire_tasks.heard == [("any_value", expected)]


def test_bytes_are_one_argument_and_the_longest_prefix_wins(redis_client: redis.Redis) -> None:
    """The row's arguments stay empty, because JSON cannot hold bytes; the message is in the row."""
    go_client.enqueue(redis_client, QUEUE, "image:resize", b"\x00\xff", headers={"k": "v"})
    (claimed,) = claim()
    assert (claimed.record.args, claimed.record.kwargs) == ([], {})
    call = lifecycle.wire_call_of(claimed.record, wire_tasks.image)
    assert call == ("image:resize", [b"\x00\xff"], {})


@pytest.mark.parametrize(
    ("type", "data", "reason"),
    [
        ("email:deliver", b"{", "not JSON"),
        ("email:deliver", b"\xff", "not JSON"),
        ("email:deliver", b'{"nobody": 1}', "cannot be called"),
        ("email:deliver", b'{"to": "\\u0000"}', "NUL"),
        ("email:deliver", b"[" * 300 + b"]" * 300, "nested"),
        ("email:deliver", b'{"to": "' + b"x" * 300_000 + b'"}', "MAX_ARGUMENTS_BYTES"),
        ("image:x", b"x" * 300_000, "MAX_ARGUMENTS_BYTES"),
    ],
)
def test_what_cannot_be_called_is_a_failed_row(type: str, data: bytes, reason: str, redis_client: redis.Redis) -> None:
    """Its row says why, its entry is archived with the bytes, and a person's retry fails for the same reason."""
    go_client.enqueue(redis_client, QUEUE, type, data)
    assert claim() == []
    record = TaskRecord.objects.get()
    assert (record.state, record.reason, record.retry_at) == (TaskState.FAILED, FailureReason.EXCEPTION, None)
    assert record.last_exception.endswith("InvalidArguments") and reason in record.errors[0]["message"]
    assert state_of(redis_client) == "archived"
    assert go_client.stored(redis_client, QUEUE, "go-1").payload == data
    lifecycle.retry([record.id], by_person=True)
    (claimed,) = claim()
    with pytest.raises(TaskNotRunnable, match=reason):
        lifecycle.wire_call_of(claimed.record, registered(record.name))


@pytest.mark.parametrize(
    ("id", "more", "reason"),
    [
        ("go-1", {"id": "other"}, "the id in its message"),
        ("go-1", {"queue": "other"}, "the queue in its message"),
        ("a\x00b", {}, "NUL"),
    ],
)
def test_what_can_be_no_task_is_rejected(id: str, more: Any, reason: str, redis_client: redis.Redis) -> None:
    keys = QueueKeys(QUEUE)
    go_client.enqueue(redis_client, QUEUE, "email:deliver", b"{}", id=id)
    message = go_client.stored(redis_client, QUEUE, id)._replace(**more).encode()
    redis_client.hset(keys.task(id), "msg", message)
    assert claim() == [] and not TaskRecord.objects.exists()
    (kept,) = read_rejected(Broker(), QUEUE)
    assert kept.data == message and reason in kept.reason and kept.source == "queue"
    assert not redis_client.exists(keys.task(id)) and redis_client.llen(keys.active) == 0


def test_broken_bytes_are_rejected_with_one_warning(redis_client: redis.Redis, caplog: Any) -> None:
    """An id that is not UTF-8, and a message that is no protobuf."""
    keys = QueueKeys(QUEUE)
    for id, message in ((b"\xff\xfe", b"\x0a\x01x"), (b"fine", b"\xff\xff\xff")):
        redis_client.hset(keys.task_prefix.encode() + id, mapping={"msg": message, "state": "pending"})
        redis_client.lpush(keys.pending, id)
    assert claim() == []
    assert {kept.data for kept in read_rejected(Broker(), QUEUE)} == {b"\x0a\x01x", b"\xff\xff\xff"}
    assert len([line for line in caplog.records if "rejected" in line.message]) == 1
    assert 0 < redis_client.ttl(keys.rejected) <= 7 * 86_400


def test_retention_keeps_the_entry_with_its_result(redis_client: redis.Redis) -> None:
    """As asynq does; and the unique lock is released when this task holds it."""
    lock = QueueKeys(QUEUE).unique("email:deliver", "x")
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a"), id="kept", retention=600, unique_key=lock)
    (claimed,) = claim()
    run(claimed)
    keys = QueueKeys(QUEUE)
    assert state_of(redis_client, "kept") == "completed" and not redis_client.exists(lock)
    assert redis_client.zscore(keys.completed, "kept") == pytest.approx(time.time() + 600, abs=5)
    assert redis_client.hget(keys.task("kept"), "result") == b'{"sent":1}'
    assert go_client.stored(redis_client, QUEUE, "kept").completed_at == pytest.approx(time.time(), abs=5)


def test_a_failure_leaves_the_lock_and_is_retried(redis_client: redis.Redis) -> None:
    """The retry keeps type, payload and id; the message counts it."""
    lock = QueueKeys(QUEUE).unique("email:deliver", "x")
    body = payload(to="a", subject="fail")
    go_client.enqueue(redis_client, QUEUE, "email:deliver", body, retry=1, unique_key=lock)
    run(claim()[0])
    assert state_of(redis_client) == "retry"
    stored = go_client.stored(redis_client, QUEUE, "go-1")
    assert (stored.type, stored.payload, stored.retried, stored.retry) == ("email:deliver", body, 1, 1)
    forward_due(Broker(), [QUEUE])
    run(claim()[0])
    assert TaskRecord.objects.get().attempt == 2
    assert state_of(redis_client) == "archived" and redis_client.exists(lock)


def test_no_retry_of_go_is_one_attempt(redis_client: redis.Redis) -> None:
    """Retry may be negative on the wire; the declaration's own number counts for tasks of ours only."""
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a"), retry=-1, timeout=0)
    record = claim()[0].record
    assert (record.max_attempts, record.timeout_seconds) == (1, None)


def test_attempts_of_another_program_count(redis_client: redis.Redis) -> None:
    """Go took the task between two of our runs, and failed it."""
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a", subject="fail"), retry=9)
    run(claim()[0])
    forward_due(Broker(), [QUEUE])
    assert go_client.take(redis_client, QUEUE) == "go-1"
    message = go_client.stored(redis_client, QUEUE, "go-1")
    redis_client.hset(QueueKeys(QUEUE).task("go-1"), "msg", message._replace(retried=5).encode())
    Broker().client.lrem(QueueKeys(QUEUE).active, 0, "go-1")
    redis_client.hset(QueueKeys(QUEUE).task("go-1"), "state", "pending")
    redis_client.lpush(QueueKeys(QUEUE).pending, "go-1")
    assert claim()[0].record.attempt == 5


def test_one_id_three_times_in_a_row(redis_client: redis.Redis) -> None:
    """Go programs reuse ids when the first task has finished; each message is a task of its own."""
    for number in range(3):
        assert go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to=str(number)), id="report")
        run(claim()[0])
    assert [what for _, (what, _, _) in wire_tasks.heard] == ["0", "1", "2"]
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED, wire_id="report").count() == 3


def test_ids_of_any_kind(redis_client: redis.Redis) -> None:
    """Long ones, and ones that differ in case: MariaDB folds it."""
    ids = ["x" * 2000, "Case", "case", "CASE", "ä\u200b"]
    for id in ids:
        go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to=id), id=id)
    for claimed in claim():
        run(claimed)
    assert [to for _, (to, _, _) in wire_tasks.heard] == ids
    assert sorted(row.wire_id or "" for row in TaskRecord.objects.all()) == sorted(ids)


def test_one_id_in_two_queues(redis_client: redis.Redis) -> None:
    for queue in (QUEUE, "mail2"):
        go_client.enqueue(redis_client, queue, "email:deliver", payload(to=queue), id="same")
    for queue in (QUEUE, "mail2"):
        (claimed,) = interop.claim(Broker(), queue, WORKER, 5, "default").runs
        run(claimed)
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED, wire_id="same").count() == 2


def test_the_id_of_another_row(redis_client: redis.Redis) -> None:
    """Of a finished task of ours, in its own queue: the message runs, and the row stays as it is."""
    ours = wire_tasks.deliver.enqueue("ours")
    plain = claim()[0]
    lifecycle.begin(plain, WORKER, database_clock.now())
    lifecycle.succeed(plain, 1, database_clock.now())
    lifecycle.acknowledge(Broker(), WORKER, [plain], lifecycle.record_runs([plain]))
    assert go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="theirs"), id=ours.id)
    for _ in Reconciler(Broker()).repair_lists():
        pass
    (claimed,) = claim()
    assert str(claimed.record.id) != ours.id
    run(claimed)
    assert [to for _, (to, _, _) in wire_tasks.heard] == ["theirs"]
    assert TaskRecord.objects.get(id=ours.id).return_value == 1


def test_a_field_that_names_another_row(redis_client: redis.Redis) -> None:
    """Nothing from Redis is trusted: the field is written anew."""
    ours = wire_tasks.deliver.enqueue("ours")
    TaskRecord.objects.filter(id=ours.id).update(state=TaskState.SUCCEEDED, finished_at=database_clock.now())
    Broker().remove(QUEUE, [ours.id])
    for number, named in enumerate((ours.id, "nonsense")):
        go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="x"), id=f"go-{number}")
        redis_client.hset(QueueKeys(QUEUE).task(f"go-{number}"), "row", named)
    assert len(claim()) == 2
    assert TaskRecord.objects.filter(wire_id__isnull=False).count() == 2


@pytest.mark.parametrize("point", ["adopt.row_named", "adopt.row_inserted"])
def test_a_redelivery_finds_its_row(point: str, redis_client: redis.Redis) -> None:
    """The worker died before or after the INSERT: one row, one run, by the worker that recovers it."""
    from django_asyncq.testing import failpoints

    class Died(BaseException):
        pass

    def die(name: str) -> None:
        if name == point:
            raise Died

    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a"))
    failpoints.arm(die)
    try:
        with pytest.raises(Died):
            claim()
    finally:
        failpoints.disarm()
    held = Broker().held(QUEUE, WORKER)
    assert lifecycle.recover(Broker(), QUEUE, WORKER, held, reason="it died", blame=lifecycle.Blame()) == 1
    forward_due(Broker(), [QUEUE])
    (claimed,) = claim("w-2")
    run(claimed, "w-2")
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert len(wire_tasks.heard) == 1


def test_of_two_workers_with_one_lease_one_adopts(redis_client: redis.Redis) -> None:
    """The lease of a frozen worker expired, and the task went back, which forgets its fence."""
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a"))
    frozen = Broker().dequeue(QUEUE, "frozen", 1, 30).leases
    lifecycle.recover(Broker(), QUEUE, "frozen", frozen, reason="lease expired")
    forward_due(Broker(), [QUEUE])
    mine = Broker().dequeue(QUEUE, WORKER, 1, 30).leases
    assert mine == frozen
    assert interop.classify(Broker(), QUEUE, "frozen", frozen, "default") == []
    assert len(interop.classify(Broker(), QUEUE, WORKER, mine, "default")) == 1


def test_redis_is_emptied(redis_client: redis.Redis, key_prefix: str) -> None:
    """The entry is made again from the row, with its id and the field that names the row."""
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="a"), headers={"h": "1"})
    claim()
    record = TaskRecord.objects.get()
    for key in redis_client.scan_iter(f"{key_prefix}*"):
        redis_client.delete(key)
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(seconds=60))
    assert Reconciler(Broker()).push_missing(young=False) == 1
    assert redis_client.hget(QueueKeys(QUEUE).task("go-1"), "row") == str(record.id).encode()
    assert go_client.stored(redis_client, QUEUE, "go-1").headers == {"h": "1"}
    run(claim("w-2")[0], "w-2")
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED


def test_rows_can_be_cancelled_and_deleted(redis_client: redis.Redis) -> None:
    """Their entries go with them, by the id in Redis."""
    for id in ("a", "b"):
        go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="x"), id=id)
    lifecycle.requeue(Broker(), WORKER, claim())
    first, second = TaskRecord.objects.order_by("wire_id")
    assert lifecycle.cancel([first.id]).cancelled == 1
    second.delete()
    assert not redis_client.exists(QueueKeys(QUEUE).task("a"), QueueKeys(QUEUE).task("b"))
    assert redis_client.llen(QueueKeys(QUEUE).pending) == 0


@pytest.mark.parametrize(("gate", "limit"), [("wire-gate", 1), (("wire-gate", "wire-second"), (2, 1))])
def test_a_full_gate_sends_the_message_back(redis_client: redis.Redis, gate: Any, limit: Any, request: Any) -> None:
    """A gate cannot refuse a Go client: the message waits without a row, and others can take it."""
    before = wire_tasks.gated.gate, wire_tasks.gated.queue_limit
    for name, value, old in zip(("gate", "queue_limit"), (gate, limit), before, strict=True):
        # A task is frozen.
        object.__setattr__(wire_tasks.gated, name, value)
        request.addfinalizer(partial(object.__setattr__, wire_tasks.gated, name, old))
    for id in ("a", "b"):
        go_client.enqueue(redis_client, QUEUE, "gated", id=id)
    (claimed,) = claim()
    assert TaskRecord.objects.count() == 1
    assert state_of(redis_client, "b") == "scheduled"
    assert not redis_client.hexists(QueueKeys(QUEUE).task("b"), "fence")
    run(claimed)
    lifecycle.announce([claimed.record], TaskState.RUNNING, TaskState.SUCCEEDED)
    redis_client.zadd(QueueKeys(QUEUE).scheduled, {"b": 1})
    forward_due(Broker(), [QUEUE])
    assert len(claim()) == 1


def test_many_messages_cost_few_statements(redis_client: redis.Redis, django_assert_max_num_queries: Any) -> None:
    """A batch of messages is one INSERT."""
    for number in range(50):
        go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="x"), id=f"go-{number}")
    with django_assert_max_num_queries(8):
        assert len(claim(count=50)) == 50
    assert connections["default"].in_atomic_block is False


def test_a_receiver_that_refuses_messages_does_not_flood_the_log(redis_client: redis.Redis, caplog: Any) -> None:
    """They come again every few seconds, for as long as it refuses; one line says so."""

    def refuse(sender: Any, **more: Any) -> None:
        raise RuntimeError("closed for today")

    for number in range(3):
        go_client.enqueue(redis_client, QUEUE, "any:value", id=f"go-{number}")
    task_state_changing.connect(refuse)
    try:
        for _ in range(3):
            assert claim() == []
            for number in range(3):
                redis_client.zadd(QueueKeys(QUEUE).scheduled, {f"go-{number}": 1})
            forward_due(Broker(), [QUEUE])
    finally:
        task_state_changing.disconnect(refuse)
    assert len([line for line in caplog.records if "closed for today" in line.getMessage()]) == 1
    assert len(claim()) == 3


@pytest.mark.parametrize("seconds", [2**62, 250_000_000_000])
def test_times_that_no_thread_can_wait_for(seconds: int, redis_client: redis.Redis) -> None:
    """asynq has 64 bits for them; Python's waits raise OverflowError for more than threading.TIMEOUT_MAX."""
    go_client.enqueue(redis_client, QUEUE, "any:value", timeout=seconds, deadline=int(time.time()) + seconds)
    record = claim()[0].record
    assert record.timeout_seconds is not None and record.timeout_seconds < threading.TIMEOUT_MAX
    assert record.deadline is None
