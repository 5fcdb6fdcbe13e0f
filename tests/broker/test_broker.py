"""Every operation of the broker on a real server: reply words, no write on refusal, repeats, order, fences."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from django_asyncq.broker import Broker, Entry, Expired, Extended, Lease, clients, scripts
from django_asyncq.broker.entries import id_bytes
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys, alive_key, due_channel, own_queues_key, reachability_key
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.testing import EmbeddedRedis

from .. import acl, script_mutants
from ..redis_state import unknown
from ..workers import wait_until

QUEUE = "q"
WORKER = "w-1"
LEASE_SECONDS = 30


@pytest.fixture
def broker(own_keys: None) -> Broker:
    return Broker()


@pytest.fixture
def keys(own_keys: None) -> QueueKeys:
    return QueueKeys(QUEUE)


@pytest.fixture
def dump(redis_client: redis.Redis, key_prefix: str) -> Callable[[], dict[bytes, bytes]]:
    """A function that returns all keys of this test with their contents, for comparison."""

    def take() -> dict[bytes, bytes]:
        return {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")}

    return take


def entry(id: str, **options: Any) -> Entry:
    return Entry(id, f"message of {id}".encode(), **options)


def take(broker: Broker, count: int = 1, worker: str = WORKER) -> list[Lease]:
    return broker.dequeue(QUEUE, worker, count, LEASE_SECONDS).leases


def taken(broker: Broker, *ids: str, **options: Any) -> list[Lease]:
    """Enqueue and dequeue these ids."""
    assert broker.enqueue(QUEUE, [entry(id, **options) for id in ids]) == ["queued"] * len(ids)
    leases = take(broker, len(ids))
    assert [lease.id for lease in leases] == list(ids)
    return leases


# --- queue names, and the state of Redis


def test_a_queue_is_registered_once_a_minute(broker: Broker, redis_client: redis.Redis) -> None:
    """The process remembers the name until `forget_registered` says that Redis may have lost it."""
    broker.register_queue(QUEUE)
    assert broker.queues() == {QUEUE}
    redis_client.delete(own_queues_key())
    broker.register_queue(QUEUE)
    assert broker.queues() == set()
    Broker.forget_registered()
    broker.register_queue(QUEUE)
    assert broker.queues() == {QUEUE}


def test_a_queue_name_that_is_not_utf8_is_skipped(broker: Broker, redis_client: redis.Redis) -> None:
    """A foreign producer's broken name must not stop our workers."""
    redis_client.sadd(own_queues_key(), b"\xff", "fine")
    assert broker.queues() == {"fine"}


def test_an_existing_alive_mark_stays(broker: Broker, redis_client: redis.Redis) -> None:
    """It says since when Redis remembers, so marking again changes nothing."""
    assert broker.alive_since() is None
    broker.mark_alive()
    assert broker.alive_since() == pytest.approx(time.time(), abs=5)
    redis_client.set(alive_key(), 12)
    broker.mark_alive()
    assert broker.alive_since() == 12


def test_ping_and_eviction_policy(broker: Broker) -> None:
    """Valkey never evicts by default."""
    broker.ping()
    assert broker.eviction_policy() == "noeviction"


def test_a_user_that_may_not_ask_for_the_policy_gets_none(own_redis: EmbeddedRedis, settings: Any) -> None:
    """Nothing needs it except a warning, so its right may be missing."""
    with redis.Redis.from_url(own_redis.url, protocol=2) as admin:
        admin.execute_command("ACL", "SETUSER", "few", "reset", "on", f">{acl.PASSWORD}", "+get")
    settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": acl.url_as("few", own_redis.url)}}
    assert Broker("worker").eviction_policy() == ""


# --- enqueue


def test_a_plain_task_has_asynqs_fields_only(broker: Broker, keys: QueueKeys, redis_client: redis.Redis) -> None:
    """Fence 0 and priority 0 write no field of ours; `pending_since` is whole nanoseconds."""
    assert broker.enqueue(QUEUE, [entry("a")]) == ["queued"]
    found = redis_client.hgetall(keys.task("a"))
    assert set(found) == {b"msg", b"state", b"pending_since"}
    assert found[b"msg"] == b"message of a"
    assert int(found[b"pending_since"]) == pytest.approx(time.time_ns(), abs=5e9)
    assert redis_client.lrange(keys.pending, 0, -1) == [b"a"]


@pytest.mark.parametrize("again", [False, True])
def test_a_pending_or_active_task_is_not_enqueued_again(broker: Broker, dump: Any, again: bool) -> None:
    """A repeat after a lost reply says "exists" and changes nothing, with and without `again`."""
    taken(broker, "active")
    broker.enqueue(QUEUE, [entry("pending")])
    before = dump()
    entries = [Entry("active", b"other", fence=99), Entry("pending", b"other", priority=5)]
    assert broker.enqueue(QUEUE, entries, again=again) == ["exists", "exists"]
    assert dump() == before


def waiting(broker: Broker, state: str) -> None:
    """Bring task "a" into a state in which it waits."""
    if state == "scheduled":
        broker.schedule(QUEUE, [entry("a", due_at=9_999_999_999)])
    elif state == "retry":
        broker.retry(QUEUE, WORKER, [(taken(broker, "a")[0], b"m", 9_999_999_999)])
    elif state == "archived":
        broker.archive(QUEUE, WORKER, [(taken(broker, "a")[0], b"m")])
    else:
        # Written by Go: none of our operations puts a task here.
        keys = QueueKeys(QUEUE)
        broker.client.hset(keys.task("a"), mapping={"msg": "m", "state": "completed"})
        broker.client.zadd(keys.completed, {"a": 9_999_999_999})


@pytest.mark.parametrize("state", ["scheduled", "retry", "archived", "completed"])
def test_a_waiting_task_is_moved_to_pending_only_with_again(
    broker: Broker, keys: QueueKeys, dump: Any, state: str
) -> None:
    """Without `again`: "exists" and no change. With it, the task leaves its zset, and its fence never falls."""
    waiting(broker, state)
    before = dump()
    assert broker.enqueue(QUEUE, [Entry("a", b"new")]) == ["exists"]
    assert dump() == before
    assert broker.enqueue(QUEUE, [Entry("a", b"new", fence=7)], again=True) == ["queued"]
    client = broker.client
    assert client.zcard(getattr(keys, state)) == 0
    found = client.hgetall(keys.task("a"))
    assert (found[b"msg"], found[b"state"], found[b"fence"]) == (b"new", b"pending", b"7")
    assert broker.enqueue(QUEUE, [Entry("a", b"newer", fence=9)], again=True) == ["exists"]
    assert take(broker) == [Lease("a", 8)]
    broker.archive(QUEUE, WORKER, [(Lease("a", 8), b"")])
    assert broker.enqueue(QUEUE, [Entry("a", b"new", fence=3)], again=True) == ["queued"]
    assert take(broker) == [Lease("a", 9)]


def test_enqueueing_again_without_a_priority_removes_the_old_one(broker: Broker, keys: QueueKeys) -> None:
    """The task is in pending only, and can be removed from there."""
    broker.archive(QUEUE, WORKER, [(taken(broker, "a", priority=5)[0], b"")])
    assert broker.enqueue(QUEUE, [entry("a")], again=True) == ["queued"]
    assert broker.client.hget(keys.task("a"), "priority") is None
    assert broker.remove(QUEUE, ["a"]) == 1
    assert broker.client.llen(keys.pending) == 0


def test_a_hash_without_a_message_does_not_block_an_id(broker: Broker, keys: QueueKeys) -> None:
    """asynq's result writer can leave a hash with nothing but a result; it is not a task."""
    broker.client.hset(keys.task("a"), "result", "x")
    assert unknown(["a"], QUEUE) == ["a"]
    assert broker.enqueue(QUEUE, [entry("a")]) == ["queued"]


Way = Callable[[Broker, list[Entry]], list[str]]
WAYS: dict[str, Way] = {
    "queued": lambda broker, entries: broker.enqueue(QUEUE, entries),
    "scheduled": lambda broker, entries: broker.schedule(QUEUE, entries),
    "grouped": lambda broker, entries: Groups().add(QUEUE, "g", entries, rules=""),
}


@pytest.mark.parametrize("word", WAYS)
def test_a_unique_lock_refuses_other_ids_without_any_write(
    broker: Broker, keys: QueueKeys, dump: Any, word: str
) -> None:
    """Another id: "duplicate". The same id: "exists", and the lock keeps its TTL. A refused task takes no lock."""
    lock = keys.unique("type", "digest")
    unique = {"unique_key": lock, "unique_seconds": 60, "due_at": 9_999_999_999}
    assert WAYS[word](broker, [entry("a", **unique)]) == [word]
    assert broker.client.get(lock) == b"a"
    assert 55 < broker.client.ttl(lock) <= 60
    before = dump()
    assert WAYS[word](broker, [entry("b", **unique)]) == ["duplicate"]
    assert WAYS[word](broker, [entry("a", **{**unique, "unique_seconds": 900})]) == ["exists"]
    assert broker.client.ttl(lock) <= 60
    other = keys.unique("type", "other")
    assert WAYS[word](broker, [entry("a", **{**unique, "unique_key": other})]) == ["exists"]
    assert dump() == before


@pytest.mark.parametrize("word", WAYS)
def test_a_task_keeps_its_own_lock(broker: Broker, keys: QueueKeys, word: str) -> None:
    """The task was lost but not its lock: the same id is enqueued."""
    lock = keys.unique("type", "digest")
    broker.client.set(lock, "a", ex=5)
    unique = {"unique_key": lock, "unique_seconds": 60, "due_at": 9_999_999_999}
    assert WAYS[word](broker, [entry("a", **unique)]) == [word]
    assert broker.client.ttl(lock) > 55


@pytest.mark.parametrize("word", WAYS)
def test_fence_and_priority_are_written_only_when_set(broker: Broker, keys: QueueKeys, word: str) -> None:
    """Each only if it is not 0."""
    WAYS[word](broker, [entry("a", due_at=1), entry("b", due_at=1, fence=4, priority=-3)])
    assert not {b"fence", b"priority"} & set(broker.client.hkeys(keys.task("a")))
    assert broker.client.hmget(keys.task("b"), "fence", "priority") == [b"4", b"-3"]


def test_a_batch_may_be_longer_than_a_call(broker: Broker) -> None:
    """501 tasks are three calls, and the order is kept."""
    ids = [f"{number:03}" for number in range(501)]
    assert broker.enqueue(QUEUE, [entry(id) for id in ids]) == ["queued"] * 501
    found = take(broker, 1000) + take(broker, 1000) + take(broker, 1000)
    assert [lease.id for lease in found] == ids
    assert unknown([*ids, "x"], QUEUE) == ["x"]
    assert broker.requeue(QUEUE, WORKER, found) == ["requeued"] * 501
    assert [lease.id for lease in take(broker, 3)] == ids[:3]
    assert broker.remove(QUEUE, ids) == 501


# --- schedule and park


@pytest.mark.parametrize("state", ["pending", "active", "scheduled", "retry", "archived"])
def test_an_existing_task_is_not_scheduled(broker: Broker, dump: Any, state: str) -> None:
    """ "exists", and nothing changes."""
    if state == "pending":
        broker.enqueue(QUEUE, [entry("a")])
    elif state == "active":
        taken(broker, "a")
    else:
        waiting(broker, state)
    before = dump()
    assert broker.schedule(QUEUE, [Entry("a", b"new", due_at=5)]) == ["exists"]
    assert Groups().add(QUEUE, "g", [Entry("a", b"new")], rules="") == ["exists"]
    assert dump() == before


@pytest.mark.parametrize("state", ["", "scheduled", "retry", "archived"])
def test_a_task_is_parked_from_wherever_it_waits(broker: Broker, keys: QueueKeys, state: str) -> None:
    """It is in retry only, with a fence that marks it as ours; a repeat says the same."""
    if state:
        waiting(broker, state)
    for due_at in (5000, 6000):
        assert broker.park(QUEUE, [Entry("a", b"new", due_at=due_at, priority=2)]) == ["parked"]
        assert broker.client.zscore(keys.retry, "a") == due_at
    assert broker.client.zcard(keys.scheduled) == broker.client.zcard(keys.archived) == 0
    found = broker.client.hgetall(keys.task("a"))
    assert (found[b"msg"], found[b"state"], found[b"priority"]) == (b"new", b"retry", b"2")
    assert int(found[b"fence"]) == (1 if state in ("retry", "archived") else 0)


def test_a_pending_or_active_task_is_not_parked(broker: Broker, dump: Any) -> None:
    """ "exists", and nothing changes."""
    taken(broker, "a")
    broker.enqueue(QUEUE, [entry("p")])
    Groups().add(QUEUE, "g", [entry("g")], rules="")
    before = dump()
    assert broker.park(QUEUE, [Entry(id, b"new", due_at=5) for id in "apg"]) == ["exists"] * 3
    assert dump() == before


def test_parking_takes_a_free_lock_and_leaves_that_of_another_id(broker: Broker, keys: QueueKeys) -> None:
    """A lock that another id holds stays with it."""
    free, held = keys.unique("t", "free"), keys.unique("t", "held")
    broker.client.set(held, "other")
    entries = [
        entry("a", due_at=5, unique_key=free, unique_seconds=60),
        entry("b", due_at=5, unique_key=held, unique_seconds=60),
    ]
    assert broker.park(QUEUE, entries) == ["parked", "parked"]
    assert acl.unrestricted(broker.client).mget(free, held) == [b"a", b"other"]


# --- dequeue


def test_a_dequeued_task_is_active_leased_held_and_fenced(broker: Broker, keys: QueueKeys) -> None:
    """And not pending any more."""
    assert taken(broker, "a") == [Lease("a", 1)]
    client = broker.client
    assert client.hgetall(keys.task("a")) == {
        b"msg": b"message of a",
        b"state": b"active",
        b"fence": b"1",
        b"worker": WORKER.encode(),
    }
    assert client.lrange(keys.active, 0, -1) == [b"a"]
    assert client.llen(keys.pending) == 0
    assert client.zscore(keys.lease, "a") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
    assert broker.held(QUEUE, WORKER) == [Lease("a", 1)]
    assert broker.held(QUEUE, "w-2") == []


def test_a_paused_queue_gives_out_no_task(broker: Broker, keys: QueueKeys, dump: Any) -> None:
    """And says so; an empty one does not."""
    assert broker.dequeue(QUEUE, WORKER, 5, LEASE_SECONDS) == ([], False, True)
    broker.enqueue(QUEUE, [entry("a"), entry("b", priority=1)])
    broker.client.set(keys.paused, 1)
    before = dump()
    # It wakes nobody until it is resumed.
    del before[keys.wake.encode()]
    assert broker.dequeue(QUEUE, WORKER, 5, LEASE_SECONDS) == ([], True, False)
    assert dump() == before
    broker.client.delete(keys.paused)
    assert len(take(broker, 5)) == 2


def test_a_count_of_zero_or_less_dequeues_nothing(broker: Broker) -> None:
    """A worker without free slots may ask for 0, or by mistake for less."""
    broker.enqueue(QUEUE, [entry("a"), entry("b", priority=1)])
    assert take(broker, 0) == take(broker, -1) == []
    assert len(take(broker, 5)) == 2


@pytest.mark.parametrize("batch", [1, 3, 200])
def test_tasks_are_dequeued_by_priority_then_by_id(broker: Broker, batch: int) -> None:
    """From 100 to -100; tasks without a priority come between 1 and -1, the oldest first."""
    levels = [100, 99, 10, 5, 2, 1, 0, -1, -2, -9, -10, -99, -100]
    entries = [entry(f"{index:02}-{number}", priority=level) for index, level in enumerate(levels) for number in "123"]
    shuffled = [each for each in entries if each.priority]
    random.Random(7).shuffle(shuffled)
    broker.enqueue(QUEUE, shuffled + [each for each in entries if not each.priority])
    found: list[str] = []
    while leases := take(broker, batch):
        found += [lease.id for lease in leases]
    assert found == [each.id for each in entries]


def test_an_id_without_a_task_is_dropped(broker: Broker, keys: QueueKeys) -> None:
    """Unlike asynq, which would keep it in active for ever; a hash without a message is not a task either."""
    broker.client.lpush(keys.pending, "lost", "hollow")
    broker.client.zadd(keys.priority, {"gone": -1})
    broker.client.hset(keys.task("hollow"), "state", "pending")
    broker.enqueue(QUEUE, [entry("a")])
    assert take(broker, 5) == [Lease("a", 1)]
    assert broker.client.lrange(keys.active, 0, -1) == [b"a"]
    assert broker.client.exists(keys.pending, keys.priority) == 0


def test_an_id_that_is_not_utf8_can_be_dequeued_and_finished(broker: Broker, keys: QueueKeys) -> None:
    """A foreign producer's id in broken UTF-8 is handled like any other."""
    id = b"\xffid".decode("utf-8", "surrogateescape")
    assert id_bytes(id) == b"\xffid"
    assert broker.enqueue(QUEUE, [Entry(id, b"m")]) == ["queued"]
    assert broker.client.lrange(keys.pending, 0, -1) == [b"\xffid"]
    leases = take(broker)
    assert leases == broker.held(QUEUE, WORKER) == [Lease(id, 1)]
    assert broker.done(QUEUE, WORKER, leases) == ["done"]


# --- finishing tasks

Ending = Callable[[Broker, Lease], list[Any]]
ENDINGS: dict[str, Ending] = {
    "done": lambda broker, lease: broker.done(QUEUE, WORKER, [lease]),
    "retried": lambda broker, lease: broker.retry(QUEUE, WORKER, [(lease, b"new", 5000)]),
    "archived": lambda broker, lease: broker.archive(QUEUE, WORKER, [(lease, b"new")]),
    "requeued": lambda broker, lease: broker.requeue(QUEUE, WORKER, [lease]),
    "postponed": lambda broker, lease: broker.postpone(QUEUE, WORKER, [lease], 60),
}


def answer(word: str, name: str) -> list[Any]:
    if name == "postponed":
        return [0] if word == name else [-1]
    return [word]


@pytest.mark.parametrize("name", ENDINGS)
def test_another_fence_is_stale_and_writes_nothing(broker: Broker, dump: Any, name: str) -> None:
    """A frozen worker that wakes up changes nothing, before and after the task was requeued."""
    lease = taken(broker, "a")[0]
    before = dump()
    for fence in (0, 2, 99):
        assert ENDINGS[name](broker, Lease("a", fence)) == answer("stale", name)
    assert dump() == before
    broker.requeue(QUEUE, WORKER, [lease], raise_fence=True)
    take(broker, worker="w-2")
    before = dump()
    assert ENDINGS[name](broker, lease) == answer("stale", name)
    assert dump() == before


@pytest.mark.parametrize("name", ENDINGS)
def test_an_unknown_task_is_missing(broker: Broker, keys: QueueKeys, name: str) -> None:
    """No hash is created, nothing is counted, and what was left of the id is removed."""
    lease = taken(broker, "a")[0]
    broker.client.delete(keys.task("a"))
    assert ENDINGS[name](broker, lease) == answer("missing", name)
    assert acl.unrestricted(broker.client).keys(f"{keys.base}*") == []


@pytest.mark.parametrize("name", ENDINGS)
def test_a_finished_run_leaves_nothing_behind(broker: Broker, keys: QueueKeys, name: str) -> None:
    """Not active, leased or held, and no worker in the hash; other tasks stay as they are."""
    lease, other = taken(broker, "a", "b")
    assert ENDINGS[name](broker, lease) == answer(name, name)
    client = broker.client
    assert client.lrange(keys.active, 0, -1) == [b"b"]
    assert client.zrange(keys.lease, 0, -1) == [b"b"]
    assert broker.held(QUEUE, WORKER) == [other]
    assert client.hget(keys.task("a"), "worker") is None


@pytest.mark.parametrize("name", ENDINGS)
def test_repeating_a_finish_changes_nothing(broker: Broker, dump: Any, name: str) -> None:
    """After a lost reply: "missing" when the task is removed, else "stale"; the counters stay."""
    lease = taken(broker, "a")[0]
    ENDINGS[name](broker, lease)
    before = dump()
    assert ENDINGS[name](broker, lease) == answer("missing" if name == "done" else "stale", name)
    assert dump() == before


def counters(keys: QueueKeys, client: redis.Redis) -> list[int]:
    """Processed today, failed today, processed, failed."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return [int(n or 0) for n in client.mget(keys.processed_on(day), keys.failed_on(day), keys.processed, keys.failed)]


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("done", [1, 0, 1, 0]),
        ("retried", [1] * 4),
        ("archived", [1] * 4),
        ("requeued", [0] * 4),
        ("postponed", [0] * 4),
    ],
)
def test_finished_tasks_are_counted_as_asynq_counts_them(
    broker: Broker, keys: QueueKeys, name: str, counted: list[int]
) -> None:
    """Once per task; the day's counters last 90 days."""
    ENDINGS[name](broker, taken(broker, "a")[0])
    assert counters(keys, acl.unrestricted(broker.client)) == counted
    day = time.strftime("%Y-%m-%d", time.gmtime())
    for total, key in zip(counted[:2], (keys.processed_on(day), keys.failed_on(day)), strict=True):
        if total:
            assert broker.client.ttl(key) == pytest.approx(90 * 86_400, abs=10)


def test_a_batch_counts_each_finished_task(broker: Broker, keys: QueueKeys) -> None:
    """And no other."""
    leases = taken(broker, "a", "b", "c", "d")
    words = broker.done(QUEUE, WORKER, [leases[0], Lease("b", 9), Lease("x", 1), leases[2]])
    assert words == ["done", "stale", "missing", "done"]
    assert counters(keys, acl.unrestricted(broker.client)) == [2, 0, 2, 0]
    assert broker.retry(QUEUE, WORKER, [(leases[1], b"m", 5)], counted=False) == ["retried"]
    assert counters(keys, acl.unrestricted(broker.client)) == [2, 0, 2, 0]


@pytest.mark.parametrize("name", ["done", "retried", "archived"])
@pytest.mark.parametrize("total", [2**63 - 1, 2**63 - 2])
def test_a_counter_at_its_maximum_starts_again(broker: Broker, keys: QueueKeys, name: str, total: int) -> None:
    """As in asynq; an overflow would be an error in the middle of the script."""
    broker.client.set(keys.processed, total)
    assert ENDINGS[name](broker, taken(broker, "a")[0]) == [name]
    assert int(broker.client.get(keys.processed)) == 1


def test_done_releases_only_the_tasks_own_lock(broker: Broker, keys: QueueKeys) -> None:
    """The lock may have expired and belong to another id by now. A retry keeps it."""
    mine, other = keys.unique("t", "mine"), keys.unique("t", "other")
    leases = taken(broker, "a", unique_key=mine, unique_seconds=60)
    leases += taken(broker, "b", unique_key=other, unique_seconds=60)
    broker.client.set(other, "c")
    broker.retry(QUEUE, WORKER, [(leases[0], b"m", 5)])
    assert broker.client.get(mine) == b"a"
    broker.enqueue(QUEUE, [entry("a")], again=True)
    assert broker.done(QUEUE, WORKER, [*take(broker), leases[1]]) == ["done", "done"]
    assert acl.unrestricted(broker.client).mget(mine, other) == [None, b"c"]


def test_a_retry_is_due_at_the_given_time(broker: Broker, keys: QueueKeys) -> None:
    """With its new message."""
    broker.retry(QUEUE, WORKER, [(taken(broker, "a")[0], b"new", 1_700_000_000)])
    assert broker.client.zscore(keys.retry, "a") == 1_700_000_000
    assert broker.client.hmget(keys.task("a"), "msg", "state") == [b"new", b"retry"]


def test_the_archive_keeps_a_message_unless_given_one(broker: Broker, keys: QueueKeys) -> None:
    """An empty one keeps the old message."""
    first, second = taken(broker, "a", "b")
    assert broker.archive(QUEUE, WORKER, [(first, b""), (second, b"new")]) == ["archived", "archived"]
    assert broker.client.hget(keys.task("a"), "msg") == b"message of a"
    assert broker.client.hget(keys.task("b"), "msg") == b"new"
    assert broker.client.zscore(keys.archived, "a") == pytest.approx(time.time(), abs=5)


def fill_archive(broker: Broker, keys: QueueKeys, count: int, score: int) -> None:
    pipeline = acl.unrestricted(broker.client).pipeline()
    for number in range(count):
        pipeline.zadd(keys.archived, {f"old-{number:05}": score})
        pipeline.hset(keys.task(f"old-{number:05}"), mapping={"msg": "m", "state": "archived"})
    pipeline.execute()


def test_the_archive_drops_tasks_older_than_90_days(broker: Broker, keys: QueueKeys) -> None:
    """With their hashes, at most 100 a call; asynq's script fails on some thousands."""
    fill_archive(broker, keys, 150, int(time.time()) - 90 * 86_400 - 5)
    broker.archive(QUEUE, WORKER, [(taken(broker, "a")[0], b"")])
    assert broker.client.zcard(keys.archived) == 51
    assert len(acl.unrestricted(broker.client).keys(f"{keys.task_prefix}*")) == 51
    broker.archive(QUEUE, WORKER, [(taken(broker, "b")[0], b"")])
    assert broker.client.zrange(keys.archived, 0, -1) == [b"a", b"b"]


def test_the_archive_keeps_9999_tasks(broker: Broker, keys: QueueKeys) -> None:
    """The oldest are removed with their hashes, at most 100 a call; newly archived tasks stay."""
    fill_archive(broker, keys, 10_150, int(time.time()) - 60)
    broker.archive(QUEUE, WORKER, [(taken(broker, "a")[0], b"")])
    assert broker.client.zcard(keys.archived) == 10_151 - 100
    assert broker.client.exists(keys.task("old-00099"), keys.task("old-00100"), keys.task("a")) == 2
    broker.archive(QUEUE, WORKER, [(taken(broker, "b")[0], b"")])
    assert broker.client.zcard(keys.archived) == 9_999
    leases = taken(broker, *(f"n-{number:03}" for number in range(150)))
    broker.archive(QUEUE, WORKER, [(lease, b"") for lease in leases])
    assert broker.client.zcard(keys.archived) == 9_999
    assert len(acl.unrestricted(broker.client).keys(f"{keys.task_prefix}*")) == 9_999


def test_requeued_tasks_run_next_in_their_old_order(broker: Broker) -> None:
    """At the head of pending, or by their priority."""
    leases = taken(broker, "a", "b", "c")
    broker.enqueue(QUEUE, [entry("d")])
    high = taken(broker, "high", priority=3)
    assert broker.requeue(QUEUE, WORKER, [*leases, *high]) == ["requeued"] * 4
    assert take(broker, 9) == [Lease("high", 2), Lease("a", 2), Lease("b", 2), Lease("c", 2), Lease("d", 1)]


def test_the_words_of_a_requeue_are_in_the_order_given(broker: Broker) -> None:
    """Though the script works from the last to the first."""
    leases = taken(broker, "a", "b")
    words = broker.requeue(QUEUE, WORKER, [Lease("x", 1), leases[0], Lease("b", 5)])
    assert words == ["missing", "requeued", "stale"]


@pytest.mark.parametrize("fence", [time.time_ns() // 1_000, 9 * 10**15 - 3], ids=["now", "the largest"])
def test_fences_of_sixteen_digits_stay_exact(broker: Broker, keys: QueueKeys, fence: int) -> None:
    """Lua's numbers are doubles, and its default format has fourteen digits."""
    broker.enqueue(QUEUE, [entry("a", fence=fence)])
    for taken_before in range(2):
        (lease,) = broker.dequeue(QUEUE, WORKER, 1, 30).leases
        assert lease == Lease("a", fence + 1 + taken_before)
        assert broker.held(QUEUE, WORKER) == [lease]
        assert broker.client.hget(keys.task("a"), "fence") == str(lease.fence).encode()
        broker.requeue(QUEUE, WORKER, [lease])


def test_a_raised_fence_refuses_the_former_holder(broker: Broker, keys: QueueKeys) -> None:
    """Even before another worker has dequeued the task."""
    lease = taken(broker, "a")[0]
    assert broker.requeue(QUEUE, WORKER, [lease], raise_fence=True) == ["requeued"]
    assert broker.client.hget(keys.task("a"), "fence") == b"2"
    assert broker.done(QUEUE, WORKER, [lease]) == ["stale"]
    assert take(broker) == [Lease("a", 3)]


def test_a_postponed_task_counts_from_the_first_time(broker: Broker, keys: QueueKeys) -> None:
    """Until a run of it finishes in another way."""
    lease = taken(broker, "a")[0]
    assert broker.postpone(QUEUE, WORKER, [lease], 60, labels=["a.b"]) == [0]
    assert broker.client.hget(keys.task("a"), "state") == b"scheduled"
    assert broker.client.zscore(keys.scheduled, "a") == pytest.approx(time.time() + 60, abs=5)
    broker.client.hincrby(keys.task("a"), "parked_at", -500)
    broker.client.zadd(keys.scheduled, {"a": 5})
    broker.forward(QUEUE, "scheduled")
    for _ in range(2):
        assert broker.postpone(QUEUE, WORKER, take(broker), 0, labels=["a.b"])[0] == pytest.approx(500, abs=3)
        broker.forward(QUEUE, "scheduled")
    broker.retry(QUEUE, WORKER, [(take(broker)[0], b"m", 5)])
    assert broker.client.hget(keys.task("a"), "parked_at") is None


# --- maintenance


def test_due_tasks_become_pending_in_order(broker: Broker, keys: QueueKeys) -> None:
    """Later tasks stay, and the nearest is reported; a second call moves nothing."""
    coming = int(time.time()) + 1000
    broker.schedule(QUEUE, [entry("b", due_at=20), entry("a", due_at=10), entry("c", due_at=coming)])
    assert broker.forward(QUEUE, "scheduled") == (2, [], pytest.approx(1000, abs=5))
    assert broker.forward(QUEUE, "scheduled") == (0, [], pytest.approx(1000, abs=5))
    found = broker.client.hgetall(keys.task("a"))
    assert found[b"state"] == b"pending"
    assert int(found[b"pending_since"]) == pytest.approx(time.time_ns(), abs=5e9)
    assert [lease.id for lease in take(broker, 9)] == ["a", "b"]


def test_a_forward_at_its_limit_reports_that_more_is_due(broker: Broker) -> None:
    """The time until the nearest is then negative."""
    broker.schedule(QUEUE, [entry(f"t-{number}", due_at=10 + number) for number in range(5)])
    assert broker.forward(QUEUE, "scheduled", limit=3) == (3, [], pytest.approx(13 - time.time(), abs=5))
    assert broker.forward(QUEUE, "scheduled", limit=3) == (2, [], None)


def test_a_fraction_of_a_second_is_kept_to_the_millisecond(broker: Broker, keys: QueueKeys) -> None:
    """asynq's set has the next whole second, so that a Go server never runs it early."""
    now = broker.client.time()
    at = now[0] + now[1] / 1e6
    broker.schedule(QUEUE, [entry("past", due_at=at - 0.001), entry("later", due_at=now[0] + 1000.25)])
    assert broker.client.zscore(keys.scheduled, "later") == now[0] + 1001
    assert broker.client.zscore(keys.due, "later") == (now[0] + 1000) * 1000 + 250
    assert broker.forward(QUEUE, "scheduled") == (1, [], pytest.approx(1000.25 - now[1] / 1e6, abs=0.5))
    assert [lease.id for lease in take(broker, 9)] == ["past"]
    assert broker.client.zrange(keys.due, 0, -1) == [b"later"]


@pytest.mark.parametrize("way", ["remove", "again", "park", "forward"])
def test_a_task_that_leaves_the_scheduled_set_leaves_the_due_set(broker: Broker, keys: QueueKeys, way: str) -> None:
    """Otherwise it would start early when it is scheduled again."""
    broker.schedule(QUEUE, [entry("a", due_at=time.time() + (0.0001 if way == "forward" else 100.5))])
    if way == "forward":
        wait_until(lambda: broker.forward(QUEUE, "scheduled").moved, "its time")
    elif way == "remove":
        broker.remove(QUEUE, ["a"])
    elif way == "again":
        broker.enqueue(QUEUE, [entry("a")], again=True)
    else:
        broker.park(QUEUE, [entry("a", due_at=7)])
    assert not broker.client.exists(keys.due)
    assert not broker.client.zcard(keys.scheduled)


def test_a_due_time_without_a_task_is_dropped(broker: Broker, keys: QueueKeys) -> None:
    """asynq's tools remove a task from its set and do not know the due set."""
    broker.client.zadd(keys.due, {"gone": 5})
    assert broker.forward(QUEUE, "scheduled") == (0, [], None)
    assert not broker.client.exists(keys.due)


def test_only_a_nearer_due_time_notifies_the_sleepers(broker: Broker) -> None:
    """One message per call, none for a task that is due later than another."""
    with broker.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(due_channel())
        heard.get_message(timeout=5)
        for at, id in ((2000, "a"), (3000, "b"), (1000, "c"), (2500.5, "d"), (2600.5, "e")):
            broker.schedule(QUEUE, [entry(id, due_at=9_999_990_000 + at)])
        broker.notify_due()
        told = [message for _ in range(8) if (message := heard.get_message(timeout=0.2))]
    # "d" is the nearest in the due set: one useless wake-up is cheaper than comparing both sets.
    assert len(told) == len("acd") + 1


def test_due_tasks_go_to_their_priority_or_group(broker: Broker, keys: QueueKeys) -> None:
    """A group's name is added to the groups set, which asynq forgets."""
    broker.schedule(QUEUE, [entry("p", due_at=5, priority=4), entry("g", due_at=5)])
    broker.client.hset(keys.task("g"), "group", "letters")
    assert broker.forward(QUEUE, "scheduled").moved == 2
    assert broker.client.zrange(keys.priority, 0, -1, withscores=True) == [(b"p", -4)]
    assert broker.client.zrange(keys.group("letters"), 0, -1) == [b"g"]
    assert broker.client.smembers(keys.groups) == {b"letters"}
    assert broker.client.hget(keys.task("g"), "state") == b"aggregating"


def test_our_retries_are_returned_and_foreign_ones_moved(broker: Broker, keys: QueueKeys) -> None:
    """The row of ours must change first. An id without a task is dropped."""
    coming = int(time.time()) + 1000
    broker.park(QUEUE, [entry("mine", due_at=5), entry("later", due_at=coming)])
    broker.client.zadd(keys.retry, {"go": 6, "lost": 7})
    broker.client.hset(keys.task("go"), mapping={"msg": "m", "state": "retry"})
    assert broker.forward(QUEUE, "retry") == (1, ["mine"], pytest.approx(1000, abs=5))
    assert broker.client.zrange(keys.retry, 0, -1) == [b"mine", b"later"]
    assert [lease.id for lease in take(broker, 9)] == ["go"]
    assert broker.forward(QUEUE, "retry") == (0, ["mine"], pytest.approx(1000, abs=5))


def test_leases_are_renewed_and_lost_ones_returned(broker: Broker, keys: QueueKeys) -> None:
    """A task that another worker runs, that is removed or whose lease is lost is not held any more, and stays so."""
    taken(broker, "kept", "stolen", "gone", "unleased")
    client = broker.client
    client.zadd(keys.lease, {"kept": 5, "stolen": 6})
    client.hincrby(keys.task("stolen"), "fence", 1)
    client.delete(keys.task("gone"))
    client.zrem(keys.lease, "gone", "unleased")
    kept, lost, *_ = broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0]
    assert (kept, sorted(lost)) == (1, ["gone", "stolen", "unleased"])
    assert client.zscore(keys.lease, "kept") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
    assert client.zscore(keys.lease, "stolen") == 6
    assert client.zcard(keys.lease) == 2
    assert broker.held(QUEUE, WORKER) == [Lease("kept", 1)]
    assert broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0] == Extended(1, [], [])
    assert broker.extend(QUEUE, ["nobody"], LEASE_SECONDS)[0] == Extended(0, [], [])


@pytest.mark.parametrize("value", ["1", "", "x" * 100])
def test_beat_learns_which_tasks_were_cancelled(broker: Broker, keys: QueueKeys, value: str) -> None:
    """Whatever the field holds; of a lease that another run holds, only that it is lost."""
    taken(broker, "running", "cancelled", "stolen")
    for id in ("cancelled", "stolen"):
        broker.client.hset(keys.task(id), "cancel", value)
    broker.client.hincrby(keys.task("stolen"), "fence", 1)
    assert broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0] == Extended(2, ["stolen"], ["cancelled"])


def test_running_tasks_are_reasserted_after_a_loss(broker: Broker, keys: QueueKeys, dump: Any) -> None:
    """An existing entry stays: with the same fence "exists", with another "stale"."""
    items = [Entry("a", b"m", fence=7, priority=5)]
    assert broker.reassert(QUEUE, WORKER, items, LEASE_SECONDS) == ["reasserted"]
    before = dump()
    assert broker.reassert(QUEUE, WORKER, items, LEASE_SECONDS) == ["exists"]
    assert broker.reassert(QUEUE, "w-2", [Entry("a", b"x", fence=6)], LEASE_SECONDS) == ["stale"]
    assert dump() == before
    assert broker.held(QUEUE, WORKER) == [Lease("a", 7)]
    assert broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0].kept == 1
    assert broker.done(QUEUE, WORKER, [Lease("a", 7)]) == ["done"]


def test_our_expired_leases_are_listed(broker: Broker, keys: QueueKeys) -> None:
    """Not live ones, nor those of a Go worker. An id that is not a running task of ours loses its lease."""
    taken(broker, "mine", "lasts", "ended")
    client = broker.client
    client.zadd(keys.lease, {"mine": 5, "go": 4, "lost": 3, "ended": 2})
    client.hset(keys.task("go"), mapping={"msg": "m", "state": "active"})
    client.hset(keys.task("ended"), "state", "archived")
    client.lpush(keys.active, "go", "lost")
    for _ in range(2):
        assert broker.expired(QUEUE) == [Expired("mine", 1, WORKER)]
    assert set(client.zrange(keys.lease, 0, -1)) == {b"go", b"mine", b"lasts"}
    assert set(client.lrange(keys.active, 0, -1)) == {b"go", b"mine", b"lasts"}


def test_foreign_leases_do_not_hide_ours(broker: Broker, keys: QueueKeys) -> None:
    """A dead Go worker may leave more expired leases than are asked for."""
    taken(broker, "mine")
    for number in range(50):
        broker.client.hset(keys.task(f"go-{number}"), mapping={"msg": "m", "state": "active"})
        broker.client.zadd(keys.lease, {f"go-{number}": 1})
    broker.client.zadd(keys.lease, {"mine": 5})
    assert broker.expired(QUEUE, limit=10) == [Expired("mine", 1, WORKER)]


@pytest.mark.parametrize("place", ["pending", "priority", "active", "scheduled", "retry", "archived", "group"])
def test_a_removed_task_leaves_nothing(broker: Broker, keys: QueueKeys, place: str) -> None:
    """Wherever it was, with its lock. Removing it twice is not an error."""
    lock = keys.unique("t", "d")
    unique = {"unique_key": lock, "unique_seconds": 60}
    if place == "group":
        Groups().add(QUEUE, "g", [entry("a")], rules="")
    elif place == "scheduled":
        broker.schedule(QUEUE, [entry("a", due_at=5, **unique)])
    else:
        broker.enqueue(QUEUE, [entry("a", priority=3 if place == "priority" else 0, **unique)])
    if place in ("active", "retry", "archived"):
        lease = take(broker)[0]
        if place == "retry":
            broker.retry(QUEUE, WORKER, [(lease, b"m", 5)], counted=False)
        elif place == "archived":
            broker.archive(QUEUE, WORKER, [(lease, b"m")])
    assert broker.remove(QUEUE, ["a", "x"]) == 1
    left = {
        key.decode().removeprefix(keys.base).split(":")[0]
        for key in acl.unrestricted(broker.client).keys(f"{keys.base}*")
    }
    # Its token wakes a worker, or expires.
    assert left <= {"processed", "failed", "minutes", "wake"}
    assert broker.remove(QUEUE, ["a"]) == 0


def test_removing_leaves_others_alone(broker: Broker, keys: QueueKeys) -> None:
    """The lock of another id and the rest of a group stay; a task that a tool put into pending is removed too."""
    lock = keys.unique("t", "d")
    broker.enqueue(QUEUE, [entry("a", unique_key=lock, unique_seconds=60)])
    broker.client.set(lock, "b")
    Groups().add(QUEUE, "g", [entry("g-1"), entry("g-2")], rules="")
    broker.archive(QUEUE, WORKER, [(taken(broker, "p", priority=3)[0], b"")])
    broker.client.zrem(keys.archived, "p")
    broker.client.lpush(keys.pending, "p")
    broker.client.hset(keys.task("p"), "state", "pending")
    assert broker.remove(QUEUE, ["a", "g-1", "p"]) == 3
    assert broker.client.get(lock) == b"b"
    assert broker.client.smembers(keys.groups) == {b"g"}
    assert broker.client.llen(keys.pending) == 0


def test_an_id_without_a_hash_is_removed_from_the_sets(broker: Broker, keys: QueueKeys) -> None:
    """Otherwise it would make asynq's tools fail on the whole queue."""
    for name in (keys.scheduled, keys.retry, keys.archived, keys.completed, keys.priority, keys.lease):
        broker.client.zadd(name, {"lost": 5})
    assert broker.remove(QUEUE, ["lost"]) == 0
    assert acl.unrestricted(broker.client).keys(f"{keys.base}*") == []


# --- scripts and clients


def test_a_server_without_the_scripts_is_sent_them(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """As after a restart or a failover."""
    broker = Broker()
    assert broker.enqueue(QUEUE, [entry("a")]) == ["queued"]
    acl.unrestricted(broker.client).script_flush()
    assert broker.enqueue(QUEUE, [entry("b")]) == ["queued"]
    acl.unrestricted(broker.client).script_flush()
    assert len(take(broker, 5)) == 2


def test_every_script_has_a_header() -> None:
    """Each script of the broker states KEYS, ARGV, Returns and Invariant."""
    names = "enqueue schedule park add_to_group dequeue done retry archive requeue postpone forward"
    for name in f"{names} extend reassert expired remove hold take_out ask_to_stop mark_alive reachability".split():
        text = resources.files("django_asyncq.broker").joinpath("lua", f"{name}.lua").read_text()
        assert all(word in text for word in ("KEYS:", "ARGV:", "Returns", "Invariant:")), name


CUTS = [*script_mutants.MACHINE.values(), *(cut for cuts in script_mutants.CHAOS.values() for cut in cuts)]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.script}: {cut.guard[:40]}")
def test_the_guard_that_a_mutant_removes_is_in_its_script(cut: script_mutants.Cut) -> None:
    """Checked here at once: the machine and the chaos suite, which must find each mutant, run for minutes."""
    changed = script_mutants.without(cut)
    assert changed(cut.script).text != scripts.script(cut.script).text
    assert changed("reachability") == scripts.script("reachability")


def test_an_id_that_is_pending_twice_is_dequeued_once(broker: Broker, keys: QueueKeys) -> None:
    """An evicting Redis lost its hash, and it was pushed again before a sweep."""
    broker.enqueue(QUEUE, [entry("a"), entry("b")])
    broker.client.lpush(keys.pending, "a")
    assert [lease.id for lease in take(broker, 5)] == ["a", "b"]
    assert broker.client.lrange(keys.active, 0, -1) == [b"b", b"a"]


def test_a_gap_between_two_calls_is_an_outage(broker: Broker) -> None:
    """The first call afterwards ends it for all processes; without a gap Redis has been reachable for ever."""
    broker.mark_alive()
    assert broker.reachability(5).reachable_seconds > 1e9
    assert broker.reachability(5).reachable_seconds > 1e9
    broker.client.hset(reachability_key(), "last", int((time.time() - 6) * 1000))
    assert [broker.reachability(5).reachable_seconds < 1 for _ in range(2)] == [True, True]
    assert broker.reachability(5).alive_since == broker.alive_since()


def test_an_unreachable_server_is_unavailable(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """Each call raises our error at once, and works again when the server is back."""
    broker = Broker("producer")
    broker.ping()
    own_redis.stop()
    started = time.monotonic()
    for call in (broker.ping, broker.queues, broker.alive_since, broker.mark_alive, broker.eviction_policy):
        with pytest.raises(BrokerUnavailable):
            call()
    with pytest.raises(BrokerUnavailable):
        broker.enqueue(QUEUE, [entry("a")])
    assert time.monotonic() - started < 2


def test_a_full_server_is_unavailable(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """A refusal within a script, with Redis's real text."""
    broker = Broker()
    acl.unrestricted(broker.client).config_set("maxmemory", 1)
    with pytest.raises(BrokerUnavailable, match="OOM"):
        broker.enqueue(QUEUE, [entry("a")])
    acl.unrestricted(broker.client).config_set("maxmemory", 0)
    assert broker.enqueue(QUEUE, [entry("a")]) == ["queued"]


def test_a_replica_is_unavailable_until_it_is_primary(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """As an old primary after a failover."""
    broker = Broker()
    acl.unrestricted(broker.client).replicaof("127.0.0.1", 1)
    with pytest.raises(BrokerUnavailable, match=r"READONLY|MASTERDOWN"):
        broker.enqueue(QUEUE, [entry("a")])
    acl.unrestricted(broker.client).replicaof("NO", "ONE")
    assert broker.enqueue(QUEUE, [entry("a")]) == ["queued"]


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("Error 111 connecting to host:6379"),
        redis.TimeoutError("Timeout reading from host:6379"),
        BusyLoadingError("Redis is loading the dataset in memory"),
        ReadOnlyError("You can't write against a read only replica."),
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ClusterDownError("The cluster is down"),
        ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        ResponseError("BUSY Redis is busy running a script"),
        ResponseError("ERR Error running script (call to f_12): @user_script:12: -OOM command not allowed"),
    ],
)
def test_unreachable_and_refusing_servers_raise_one_error(error: Exception) -> None:
    """BrokerUnavailable, whatever redis-py raises; the cause is kept."""
    with pytest.raises(BrokerUnavailable) as caught, clients.broker_errors():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://somebody:secret@10.0.0.1:6380/3", "Redis at 10.0.0.1:6380/3"),
        ("rediss://:secret@redis.example", "Redis at redis.example:6379/0"),
        ("unix://:secret@/run/redis.sock?db=2", "Redis at /run/redis.sock/2"),
    ],
)
def test_errors_name_the_server_and_never_the_password(url: str, name: str) -> None:
    """Host, port and database, for an unreachable server and for a refusal."""
    errors = {"is unreachable": redis.ConnectionError("x"), "refuses the command": ReadOnlyError("x")}
    for words, error in errors.items():
        with pytest.raises(BrokerUnavailable) as caught, clients.broker_errors(redis.Redis.from_url(url)):
            raise error
        assert str(caught.value).startswith(f"{name} {words} (")
        assert "secret" not in str(caught.value)


UNREACHABLE = r"^Redis at 127\.0\.0\.1:1/5 is unreachable \(ConnectionError: Error 111 [^()]*refused\.\)$"


def test_an_unreachable_server_is_named_by_every_call(settings: Any) -> None:
    """Methods with and without a script."""
    with_options(settings, LOCATION="redis://:secret@127.0.0.1:1/5")
    broker = Broker()
    for call in (broker.ping, broker.mark_alive):
        with pytest.raises(BrokerUnavailable, match=UNREACHABLE):
            call()


@pytest.mark.parametrize("text", ["WRONGTYPE Operation against a key", "ERR unknown command", "BUSYKEY Target exists"])
def test_other_errors_of_a_reply_stay_as_they_are(text: str) -> None:
    """A bug in a script must not look like an outage."""
    with pytest.raises(ResponseError, match=text.split()[0]), clients.broker_errors():
        raise ResponseError(text)


def with_options(settings: Any, **cache: Any) -> None:
    settings.CACHES = {"default": {**django_settings.CACHES["default"], **cache}}


@pytest.mark.parametrize("role", ["producer", "worker", "blocking"])
def test_options_of_the_alias_do_not_override_ours(settings: Any, role: clients.Role) -> None:
    """Neither those in OPTIONS nor those in the URL; all other options are kept."""
    url = "redis://127.0.0.1:6379/0"
    options = {
        "SOCKET_TIMEOUT": 77,
        "SOCKET_CONNECT_TIMEOUT": 77,
        "CONNECTION_POOL_KWARGS": {
            "socket_timeout": 77,
            "protocol": 3,
            "decode_responses": True,
            "client_name": "x",
        },
        "USERNAME": "someone",
        "PASSWORD": "secret",
    }
    with_options(settings, LOCATION=f"{url}?socket_timeout=88&protocol=3&decode_responses=true", OPTIONS=options)
    found = clients.client(role).connection_pool.connection_kwargs
    assert (found["socket_connect_timeout"], found["socket_timeout"]) == clients.TIMEOUTS[role]
    assert (found["protocol"], found["decode_responses"], found["retry"].get_retries()) == (2, False, 0)
    assert (found["client_name"], found["username"], found["password"]) == ("x", "someone", "secret")
    # What redis-py adds to a pool with protocol 3, and refuses in a connection with 2 unless hiredis is installed.
    assert not [name for name in found if name.startswith("maint_notifications")]
    assert options["CONNECTION_POOL_KWARGS"]["socket_timeout"] == 77


@pytest.mark.parametrize("location", ["redis://one:1/0, redis://two:2/0", ["redis://one:1/0", "redis://two:2/0"]])
def test_the_first_address_is_the_primary(settings: Any, location: Any) -> None:
    """As in django-redis."""
    with_options(settings, LOCATION=location)
    assert clients.client("worker").connection_pool.connection_kwargs["host"] == "one"


def test_tls_and_sentinel_options_are_kept(settings: Any) -> None:
    """With our timeouts for the sentinels too."""
    with_options(settings, LOCATION="rediss://one:1/0?ssl_cert_reqs=none")
    assert clients.client("worker").connection_pool.connection_class is redis.SSLConnection
    options = {
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("one", 26379), ("two", 26379)],
        "SENTINEL_KWARGS": {"password": "secret", "socket_timeout": 77},
    }
    with_options(settings, LOCATION="redis://primary/0", OPTIONS=options)
    pool = clients.client("producer").connection_pool
    assert pool.service_name == "primary"
    sentinel = pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
    assert (sentinel["password"], sentinel["socket_timeout"]) == ("secret", 0.5)
    assert options["SENTINEL_KWARGS"]["socket_timeout"] == 77


def test_clients_are_cached_and_their_pools_are_private(settings: Any) -> None:
    """One client per role, never the cache's; a change of settings makes new ones."""
    first = clients.client("worker")
    assert clients.client("worker") is first
    assert clients.client("producer") is not first
    cache_pool = caches["default"].client.get_client(write=True).connection_pool
    assert first.connection_pool is not cache_pool
    with_options(settings, LOCATION="redis://elsewhere:1/0")
    assert clients.client("worker") is not first


def make_client(role: str) -> str:
    return f"client for {role}"


def test_a_client_factory_is_used_before_all_else(settings: Any) -> None:
    """For Redis Cluster, which django-redis does not build."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "CLIENT_FACTORY": f"{__name__}.make_client"}
    try:
        assert clients.client("blocking") == "client for blocking"
    finally:
        clients._clients.clear()


def test_a_missing_alias_is_named(settings: Any) -> None:
    """With what to do about it."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "REDIS": "nowhere"}
    with pytest.raises(ImproperlyConfigured, match="'nowhere'"):
        clients.client("worker")


def test_errors_never_show_the_password(settings: Any) -> None:
    """Neither our text nor that of the cause."""
    with_options(settings, LOCATION="redis://user:s3cret@127.0.0.1:1/0")
    with pytest.raises(BrokerUnavailable) as caught:
        Broker("producer").ping()
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"
