"""Whose an entry is: what has no row goes back, is archived with a text, or is kept; it is never removed by us."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_asyncq import interop, lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.foreign import read_rejected
from django_asyncq.broker.keys import QueueKeys, queues_key
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop import adopt
from django_asyncq.lifecycle import messages, retrying
from django_asyncq.models import TaskRecord
from django_asyncq.worker.fetch import QueueOrder

from .. import go_client, script_mutants, tasks, wire_tasks  # noqa: F401 - its tasks are registered

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

QUEUE = "mail"
WORKER = "w-1"


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process that has logged nothing."""
    monkeypatch.setattr(adopt, "_logged", set())


def claim(worker_id: str = WORKER) -> list[lifecycle.Run]:
    return interop.claim(Broker(), QUEUE, worker_id, 10, "default").runs


def fields_of(client: redis.Redis, id: str = "go-1") -> dict[str, str]:
    found: Any = client.hgetall(QueueKeys(QUEUE).task(id))
    return {name.decode(): value.decode("utf-8", "replace") for name, value in found.items() if name != b"msg"}


def make_due(client: redis.Redis, id: str = "go-1") -> None:
    client.zadd(QueueKeys(QUEUE).scheduled, {id: 1})
    client.hdel(QueueKeys(QUEUE).task(id), "left_until")
    forward_due(Broker(), [QUEUE])


def test_a_foreign_message_goes_back(redis_client: redis.Redis, caplog: Any) -> None:
    """Others can take it some seconds later, with all its bytes and no field of ours that changes what it is."""
    go_client.enqueue(redis_client, QUEUE, "nobody:knows", b"\x00")
    before = redis_client.hget(QueueKeys(QUEUE).task("go-1"), "msg")
    assert claim() == []
    assert set(fields_of(redis_client)) == {"state", "parked_at", "parked_retried", "left_until"}
    assert fields_of(redis_client)["state"] == "scheduled"
    assert redis_client.hget(QueueKeys(QUEUE).task("go-1"), "msg") == before
    assert not redis_client.hlen(QueueKeys(QUEUE).held(WORKER)) and not redis_client.zcard(QueueKeys(QUEUE).lease)
    make_due(redis_client)
    assert claim() == []
    assert not TaskRecord.objects.exists()
    assert len([line for line in caplog.records if "nobody:knows" in line.message]) == 1


def test_what_is_left_to_others_hides_no_task_of_ours(redis_client: redis.Redis) -> None:
    """It is passed over while its time runs, however much of it there is, and goes to the end of the queue."""
    for number in range(150):
        go_client.enqueue(redis_client, QUEUE, "nobody:knows", id=f"go-{number}")
    for _ in range(15):
        assert claim() == []
    keys = QueueKeys(QUEUE)
    assert redis_client.zcard(keys.scheduled) == 150 and not redis_client.llen(keys.pending)
    for number in range(150):
        redis_client.zadd(keys.scheduled, {f"go-{number}": 1})
    forward_due(Broker(), [QUEUE])
    ours = tasks.stamp.using(queue_name=QUEUE).enqueue()
    claimed = interop.claim(Broker(), QUEUE, WORKER, 10, "default")
    assert [str(run.record.id) for run in claimed.runs] == [ours.id]
    assert not claimed.is_drained and not claimed.paused
    nothing = interop.claim(Broker(), QUEUE, WORKER, 10, "default")
    assert nothing.runs == [] and nothing.paused and not nothing.is_drained
    assert redis_client.llen(keys.pending) == 150
    redis_client.hset(keys.task("go-7"), "left_until", "99999999999")
    assert claim() == [] and redis_client.llen(keys.pending) == 149, "nobody of ours has written such a time"


def test_after_the_patience_it_is_archived_with_a_text(redis_client: redis.Redis, settings: Any) -> None:
    go_client.enqueue(redis_client, QUEUE, "nobody:knows", b"p")
    claim()
    redis_client.hincrby(QueueKeys(QUEUE).task("go-1"), "parked_at", -601)
    make_due(redis_client)
    assert claim() == []
    assert fields_of(redis_client)["state"] == "archived"
    stored = go_client.stored(redis_client, QUEUE, "go-1")
    assert "nobody:knows" in stored.error_msg and "wire_name" in stored.error_msg and stored.payload == b"p"
    assert redis_client.zscore(QueueKeys(QUEUE).archived, "go-1") is not None


def test_the_patience_begins_anew_when_another_program_has_run_it(redis_client: redis.Redis) -> None:
    """A Go server of the same queue fails it and tries again, for hours: it is being looked after."""
    go_client.enqueue(redis_client, QUEUE, "nobody:knows")
    claim()
    redis_client.hincrby(QueueKeys(QUEUE).task("go-1"), "parked_at", -601)
    make_due(redis_client)
    assert go_client.take(redis_client, QUEUE) == "go-1"
    go_client.fail(redis_client, QUEUE, "go-1", due_at=1)
    forward_due(Broker(), [QUEUE])
    assert claim() == []
    assert fields_of(redis_client)["state"] == "scheduled"


def test_a_due_retry_of_go_is_forwarded_as_go_does(redis_client: redis.Redis) -> None:
    """Seen: our worker had leased it and died, Go took it and failed it, and our forwarder deleted it for good."""
    go_client.enqueue(redis_client, QUEUE, "nobody:knows")
    taken = Broker().dequeue(QUEUE, WORKER, 1, 30).leases
    assert lifecycle.recover(Broker(), QUEUE, WORKER, taken, reason="it died") == 1
    assert "fence" not in fields_of(redis_client)
    forward_due(Broker(), [QUEUE])
    assert go_client.take(redis_client, QUEUE) == "go-1"
    # A fence of an older version of ours may still be there.
    redis_client.hset(QueueKeys(QUEUE).task("go-1"), "fence", 7)
    go_client.fail(redis_client, QUEUE, "go-1", due_at=1)
    for _ in range(3):
        forward_due(Broker(), [QUEUE])
    assert fields_of(redis_client)["state"] == "pending" and "fence" not in fields_of(redis_client)
    assert redis_client.lrange(QueueKeys(QUEUE).pending, 0, -1) == [b"go-1"]


def test_a_queue_that_only_go_knows_is_never_touched(redis_client: redis.Redis) -> None:
    """Seen: of 41 messages on such a queue 6 were archived unrun by a worker without QUEUES."""
    for number in range(41):
        go_client.enqueue(redis_client, "go-only", "some:type", id=f"go-{number}")
    for number in range(3):
        id = go_client.take(redis_client, "go-only")
        assert id is not None
        go_client.fail(redis_client, "go-only", id, due_at=1) if number else None
    before = go_client.contents(redis_client, "go-only")
    assert redis_client.sismember(queues_key(), "go-only")
    tasks.add.enqueue(1)
    order = QueueOrder(Broker(), {}, strict=False)
    assert "go-only" not in order.next() and {"default", "mail"} <= set(order.next())
    reconciler = Reconciler(Broker())
    for _ in range(2):
        reconciler.recover_expired()
        forward_due(Broker(), Broker().known_queues())
        for steps in (reconciler.repair_lists(), reconciler.repair_hashes(), reconciler.park_missing()):
            for _ in steps:
                pass
    assert go_client.contents(redis_client, "go-only") == before


def test_redis_that_was_emptied_learns_the_queues_again(redis_client: redis.Redis, key_prefix: str) -> None:
    """Those of declared tasks from the workers; those of rows from the reconciler."""
    tasks.add.using(queue_name="of-a-row").enqueue(1)
    for key in redis_client.scan_iter(f"{key_prefix}*"):
        redis_client.delete(key)
    Broker.forget_registered()
    assert "mail" in QueueOrder(Broker(), {}, strict=False).next()
    list(Reconciler(Broker()).rows_to_push(young=False, is_rebuild=True))
    assert {"mail", "of-a-row"} <= Broker().queues()


VERBS = st.lists(
    st.sampled_from(
        [
            "claim",
            "claim2",
            "forward",
            "recover",
            "sweep",
            "hashes",
            "expire",
            "go take",
            "go fail",
            "due",
            "old",
        ]
    ),
    min_size=4,
    max_size=12,
)
MESSAGES = st.lists(st.sampled_from(["nobody:knows", "broken", "other id", "large"]), min_size=1, max_size=4)


@given(verbs=VERBS, messages=MESSAGES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_verb_of_ours_loses_a_message_without_a_row(
    verbs: list[str], messages: list[str], redis_client: redis.Redis, key_prefix: str
) -> None:
    """Each stays in Redis with its bytes, or is kept with the rejected."""
    for key in redis_client.scan_iter(f"{key_prefix}*"):
        redis_client.delete(key)
    keys = QueueKeys(QUEUE)
    Broker.forget_registered()
    Broker().register_queue(QUEUE)
    for number, kind in enumerate(messages):
        id = f"m{number}"
        go_client.enqueue(redis_client, QUEUE, kind, b"x" * (4_200_000 if kind == "large" else 1), id=id)
        if kind == "broken":
            redis_client.hset(keys.task(id), "msg", b"\xff" + id.encode())
        if kind == "other id":
            message = go_client.stored(redis_client, QUEUE, id)._replace(id="another").encode()
            redis_client.hset(keys.task(id), "msg", message)
    reconciler = Reconciler(Broker())
    taken: list[str] = []
    for verb in verbs:
        _act(verb, redis_client, reconciler, taken)
    assert not TaskRecord.objects.exists()
    there = [id for number, _ in enumerate(messages) if redis_client.exists(keys.task(id := f"m{number}"))]
    assert len(there) + len(read_rejected(Broker(), QUEUE)) == len(messages)
    listed: list[bytes] = [*redis_client.lrange(keys.pending, 0, -1), *redis_client.lrange(keys.active, 0, -1)]
    for place in (keys.scheduled, keys.retry, keys.archived):
        listed += redis_client.zrange(place, 0, -1)
    assert sorted(listed) == sorted(id.encode() for id in there)


def _act(verb: str, client: redis.Redis, reconciler: Reconciler, taken: list[str]) -> None:
    keys, broker = QueueKeys(QUEUE), Broker()
    if verb in ("claim", "claim2"):
        assert claim(verb) == []
    elif verb == "forward":
        forward_due(broker, [QUEUE])
    elif verb == "recover":
        leases = broker.dequeue(QUEUE, "dead", 2, 30).leases
        lifecycle.recover(broker, QUEUE, "dead", leases, reason="it died")
    elif verb == "expire":
        broker.dequeue(QUEUE, "frozen", 1, 30)
        for id in client.zrange(keys.lease, 0, -1):
            client.zadd(keys.lease, {id: 1})
        reconciler._recover_queue(broker, QUEUE)
    elif verb in ("sweep", "hashes"):
        for _ in reconciler.repair_lists() if verb == "sweep" else reconciler.repair_hashes():
            pass
    elif verb == "go take":
        id = go_client.take(client, QUEUE)
        if id is not None:
            taken.append(id)
    elif verb == "go fail":
        while taken:
            id = taken.pop()
            # A lease of Go's that was made to expire above is recovered by Go alone.
            if client.hget(
                keys.task(id),
                "msg",
            ) and not client.hget(keys.task(id), "msg").startswith(b"\xff"):
                go_client.fail(client, QUEUE, id, due_at=1)
            else:
                taken.clear()
    elif verb in ("due", "old"):
        for id in client.zrange(keys.scheduled, 0, -1):
            client.zadd(keys.scheduled, {id: 1})
            if verb == "old":
                client.hincrby(keys.task(id.decode()), "parked_at", -700)


def test_a_plain_task_pays_nothing(redis_client: redis.Redis, django_assert_num_queries: Any) -> None:
    """One SELECT and no more commands than before for what has a row; wire names are not looked at."""
    broker = Broker()
    tasks.add.enqueue(1)
    # The identity of the database is read once in a process.
    assert len(interop.claim(broker, "default", "w-0", 5, "default").runs) == 1
    tasks.add.enqueue(1)
    before = _commands(redis_client)
    leases = broker.dequeue("default", WORKER, 5, 30).leases
    dequeued = _commands(redis_client) - before
    with django_assert_num_queries(1):
        assert len(interop.classify(broker, "default", WORKER, leases, "default")) == 1
    assert _commands(redis_client) - before - dequeued == 1, "INFO itself"


def _commands(client: redis.Redis) -> int:
    found: Any = client.info("stats")
    return int(found["total_commands_processed"])


def test_an_empty_message_does_not_go_round(redis_client: redis.Redis) -> None:
    """It is no message: it is kept among the rejected, and comes to no worker again."""
    keys = QueueKeys(QUEUE)
    redis_client.hset(keys.task("empty"), mapping={"msg": b"", "state": "pending"})
    redis_client.lpush(keys.pending, "empty")
    assert claim() == []
    assert [kept.id for kept in read_rejected(Broker(), QUEUE)] == ["empty"]
    assert not redis_client.exists(keys.task("empty"), keys.active, keys.scheduled)


@pytest.mark.parametrize("size", [70_000, 5_000_000])
def test_what_is_too_large_for_the_rejected_keeps_its_bytes(size: int, redis_client: redis.Redis) -> None:
    """The list has place for 64 KiB of each; a larger one is archived where it is."""
    keys = QueueKeys(QUEUE)
    data = b"\xff" * size
    id = b"bad" if size < 1_000_000 else b"\xff\xfe"
    key = keys.task_prefix.encode() + id
    redis_client.hset(key, mapping={"msg": data, "state": "pending"})
    redis_client.lpush(keys.pending, id)
    assert claim() == []
    assert redis_client.hget(key, "msg").startswith(data)
    assert redis_client.hget(key, "state") == b"archived" and redis_client.zcard(keys.archived) == 1


def test_a_stale_lease_restores_nothing(redis_client: redis.Redis) -> None:
    """A frozen worker awakes when another one has the message: the entry stays with that one."""
    go_client.enqueue(redis_client, QUEUE, "nobody:knows")
    (old,) = Broker().dequeue(QUEUE, "frozen", 1, 30).leases
    redis_client.hset(QueueKeys(QUEUE).task("go-1"), "fence", old.fence + 1)
    assert messages.restore(Broker(), QUEUE, "frozen", [old]) == ["stale"]
    assert fields_of(redis_client)["state"] == "active" and redis_client.llen(QueueKeys(QUEUE).active) == 1


def test_a_lease_of_go_is_recovered_by_go(redis_client: redis.Redis) -> None:
    """It has no fence, however long ago it expired; its attempt counts for asynq."""
    go_client.enqueue(redis_client, QUEUE, "nobody:knows")
    assert go_client.take(redis_client, QUEUE) == "go-1"
    redis_client.zadd(QueueKeys(QUEUE).lease, {"go-1": 1})
    assert Broker().expired(QUEUE, 10) == []
    Reconciler(Broker()).recover_expired()
    assert fields_of(redis_client)["state"] == "active" and redis_client.zcard(QueueKeys(QUEUE).lease) == 1


# --- mutants: without its guard the fleet fails the test that is named beside it

GUARDED_BY: dict[str, Callable[..., None]] = {
    "fence kept on a rowless id": test_a_foreign_message_goes_back,
    "restore without the fence": test_a_stale_lease_restores_nothing,
    "restore that removes what nobody took": test_after_the_patience_it_is_archived_with_a_text,
    "reject that keeps nothing": test_an_empty_message_does_not_go_round,
    "forwarder that removes": test_a_due_retry_of_go_is_forwarded_as_go_does,
}


def _removes(broker: Broker, queue: str, worker_id: str, ids: list[str]) -> list[str]:
    """Do what the forwarder did with due retries that have no row."""
    broker.remove(queue, ids)
    return []


@pytest.mark.parametrize("mutant", GUARDED_BY)
def test_finds_a_fleet_without_its_guard(mutant: str, request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    """test_mixed_fleet.py needs minutes and luck to find what these tests find at once."""
    test = GUARDED_BY[mutant]
    values = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters}
    test(**values)
    values["redis_client"].delete(*values["redis_client"].keys(f"{QueueKeys(QUEUE).base}*"))
    adopt._logged.clear()
    if "caplog" in values:
        values["caplog"].clear()
    if mutant == "forwarder that removes":
        monkeypatch.setattr(retrying, "restore", _removes)
    else:
        monkeypatch.setattr(scripts, "script", script_mutants.without(script_mutants.FLEET[mutant]))
    with pytest.raises((AssertionError, KeyError)):
        test(**values)


def test_every_mutant_of_the_fleet_has_its_test() -> None:
    assert set(script_mutants.FLEET) < set(GUARDED_BY)
