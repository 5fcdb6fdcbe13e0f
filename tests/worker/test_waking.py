"""How a push wakes an idle worker, on the test's own server, which counts the clients that block."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry, Lease, clients, waits
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.waits import PushWait
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.testing import EmbeddedRedis

from ..workers import wait_until

PATIENCE_SECONDS = 10.0
LEASE_SECONDS = 60
WORKER = "w-1"
# As in `lua/waking.lua`.
MOST_TOKENS = 32


@pytest.fixture
def client(own_redis: EmbeddedRedis, own_keys: None) -> Iterator[redis.Redis]:
    """A plain client of the server."""
    found = redis.Redis.from_url(own_redis.url, protocol=2)
    yield found
    found.close()


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    return Broker()


@pytest.fixture
def start(client: redis.Redis) -> Iterator[Callable[..., PushWait]]:
    """A function that makes the wait of a worker, and begins it."""
    made: list[PushWait] = []

    def build(*queues: str) -> PushWait:
        made.append(PushWait(Broker(), queues or ("a",)))
        made[-1].begin()
        blocked(client, sum(each.since is not None for each in made))
        return made[-1]

    yield build
    for each in made:
        each.close()


def blocked(client: redis.Redis, count: int) -> None:
    """Wait until so many clients block."""
    wait_until(lambda: int(client.info("clients")["blocked_clients"]) == count, "blocked clients")


def woken_for(wait: PushWait, seconds: float = PATIENCE_SECONDS) -> str | None:
    """Sleep until a wait ends; return what it says; None when it goes on."""
    return wait.read() if select.select([wait.socket], [], [], seconds)[0] else None


def push(broker: Broker, *ids: str, queue: str = "a", **options: Any) -> None:
    assert broker.enqueue(queue, [Entry(id, b"m", **options) for id in ids]) == ["queued"] * len(ids)


def tokens(client: redis.Redis, queue: str = "a") -> int:
    """How many tokens a queue has."""
    return int(client.llen(QueueKeys(queue).wake))


def take(broker: Broker, count: int = 1, queue: str = "a") -> list[Lease]:
    return broker.dequeue(queue, WORKER, count, LEASE_SECONDS).leases


# --- what wakes


@pytest.mark.parametrize("priority", [0, 7, -7])
def test_a_push_wakes_the_worker_that_has_waited_longest(
    start: Any, client: redis.Redis, broker: Broker, priority: int
) -> None:
    """And no other, whatever the priority; the next push wakes the next."""
    first, second = start(), start()
    push(broker, "x", priority=priority)
    assert woken_for(first) == "a"
    assert woken_for(second, 0.1) is None
    assert (take(broker), tokens(client)) == ([Lease("x", 1)], 0)
    push(broker, "y", priority=priority)
    assert woken_for(second) == "a"


def test_a_worker_waits_for_all_its_queues_on_one_connection(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Of 200, too; it learns which one has work."""
    names = [f"q{number}" for number in range(200)]
    before = len(client.client_list())
    wait = start(*names)
    assert len(client.client_list()) == before + 1
    push(broker, "x", queue=names[150])
    assert woken_for(wait) == names[150]


def test_tasks_that_are_pushed_together_wake_as_many_workers(start: Any, broker: Broker) -> None:
    """Each gets a token; the others sleep on."""
    fleet = [start() for _ in range(4)]
    push(broker, "x", "y", "z")
    assert [woken_for(each, 0.1) for each in fleet] == ["a", "a", "a", None]


def test_a_queue_has_few_tokens_and_they_expire(client: redis.Redis, broker: Broker) -> None:
    """However much is pushed while nobody waits."""
    push(broker, "first")
    assert tokens(client) == 1
    assert 0 < client.ttl(QueueKeys("a").wake) <= 300
    for number in range(3):
        push(broker, *(f"{number}-{each}" for each in range(20)))
    assert tokens(client) == MOST_TOKENS
    push(broker, *map(str, range(100)), queue="b")
    assert tokens(client, "b") == MOST_TOKENS
    assert 0 < client.ttl(QueueKeys("b").wake) <= 300


def test_what_is_not_pushed_wakes_nobody(client: redis.Redis, broker: Broker) -> None:
    """An id that exists already."""
    push(broker, "x")
    client.delete(QueueKeys("a").wake)
    assert broker.enqueue("a", [Entry("x", b"m")]) == ["exists"]
    assert tokens(client) == 0


def forwards(broker: Broker, **options: Any) -> int:
    broker.schedule("a", [Entry(id, b"m", due_at=time.time() - 1, **options) for id in "xy"])
    assert broker.forward("a", "scheduled").moved == 2
    return 2


def requeues(broker: Broker, **options: Any) -> int:
    push(broker, "x", "y", "z", **options)
    leases = take(broker, 3)
    assert broker.requeue("a", WORKER, leases, suspects=["z"]) == ["requeued"] * 3
    return 2  # none for the suspect, which no worker of these takes


def repairs(broker: Broker, **options: Any) -> int:
    push(broker, "x", "y", **options)
    keys = QueueKeys("a")
    broker.client.delete(keys.pending, keys.priority, keys.wake)
    assert Inspection("worker", "default").repair_orphans("a", ["x", "y"]) == 2
    return 2


@pytest.mark.parametrize("priority", [0, 7])
@pytest.mark.parametrize("pushes", [forwards, requeues, repairs])
def test_every_script_that_makes_tasks_pending_wakes_workers(
    client: redis.Redis, broker: Broker, pushes: Callable[..., int], priority: int
) -> None:
    """One for each task."""
    assert pushes(broker, priority=priority) == tokens(client)


# --- what a dequeue does to the tokens


@pytest.mark.parametrize("count", [2, 5])
def test_an_empty_queue_has_no_tokens(client: redis.Redis, broker: Broker, count: int) -> None:
    """Whether it was emptied by just as many tasks as were wanted, or by fewer; and when it was empty before."""
    push(broker, "x", "y")
    assert len(take(broker, count)) == 2
    assert tokens(client) == 0
    client.rpush(QueueKeys("a").wake, "1")
    assert (take(broker), tokens(client)) == ([], 0)


def test_a_worker_that_takes_some_of_many_wakes_the_next(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Though the tasks came without tokens, as those of other programs do; a token that is there is enough."""
    push(broker, *"vwxyz")
    client.delete(QueueKeys("a").wake)
    wait = start()
    assert len(take(broker, 2)) == 2
    assert woken_for(wait) == "a"
    take(broker, 1)
    take(broker, 1)
    assert tokens(client) == 1


def test_a_paused_queue_wakes_nobody(client: redis.Redis, broker: Broker) -> None:
    """What was pushed waits in its place."""
    push(broker, "x", "y")
    client.set(QueueKeys("a").paused, 1)
    found = broker.dequeue("a", WORKER, 1, LEASE_SECONDS)
    assert (found.paused, found.leases, tokens(client)) == (True, [], 0)
    broker.wake(["a"])
    assert tokens(client) == 0
    assert client.lrange(QueueKeys("a").pending, 0, -1) == [b"y", b"x"]


# --- tasks without tokens: `wake`, which the leader does each second


def test_tasks_of_other_programs_are_noticed(start: Any, client: redis.Redis, broker: Broker) -> None:
    """A push of asynq's: the hash and the list. One worker is woken, and none for an empty queue."""
    wait = start("a", "b")
    keys = QueueKeys("b")
    client.hset(keys.task("x"), mapping={"msg": b"m", "state": b"pending", "pending_since": b"1"})
    client.lpush(keys.pending, "x")
    broker.wake(["a", "b"])
    assert woken_for(wait) == "b"
    for _ in range(3):
        broker.wake(["a", "b", "c"])
    assert (tokens(client), tokens(client, "b")) == (0, 1)
    assert 0 < client.ttl(keys.wake) <= 300
    assert take(broker, 1, "b") == [Lease("x", 1)]


def test_a_full_redis_still_wakes_workers(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Otherwise nobody would take what fills it."""
    wait = start()
    push(broker, "x")
    assert woken_for(wait) == "a"
    client.config_set("maxmemory", 1)
    try:
        broker.wake(["a"])
    finally:
        client.config_set("maxmemory", 0)
    assert tokens(client) == 1


# --- how a wait begins and ends


def test_a_wait_ends_by_itself(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a connection that was lost without notice is noticed."""
    monkeypatch.setattr(clients, "BLOCK_SECONDS", 0.3)
    assert woken_for(start()) == ""


def test_a_wait_that_is_cut_off_is_over(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The worker wakes, and gets an error; the next wait has a new connection."""
    wait = start()
    for _ in range(2):
        wait.begin()
        blocked(client, 1)
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(BrokerUnavailable):
            woken_for(wait)
        assert wait.socket is None
    wait.begin()
    push(broker, "x")
    assert woken_for(wait) == "a"


def test_a_connection_closed_while_nobody_waited_is_no_failure(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Servers close idle clients."""
    wait = start()
    push(broker, "x")
    assert woken_for(wait) == "a"
    client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: len(client.client_list()) == 1, "end of all other clients")
    wait.begin()
    push(broker, "y")
    assert woken_for(wait) == "a"


def test_a_wait_that_lasts_too_long_is_given_up(
    start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection must have been lost without notice; one that lasts as long as it should goes on."""
    wait = start()
    connection = wait.socket
    wait.begin()
    assert wait.socket is connection
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", -clients.BLOCK_SECONDS)
    with pytest.raises(BrokerUnavailable):
        wait.begin()
    assert wait.socket is None
    blocked(client, 0)


def test_being_woken_costs_no_new_connection(start: Any, client: redis.Redis, broker: Broker) -> None:
    """An idle worker that is woken fifty times a second must not connect fifty times a second."""
    wait = start()
    connections = []
    for number in range(5):
        wait.begin()
        blocked(client, 1)
        push(broker, f"id-{number}")
        assert woken_for(wait) == "a"
        connections.append(client.info("stats")["total_connections_received"])
    assert connections[-1] == connections[0]


def test_tokens_of_another_type_are_set_aside(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The wait fails once, and says why; another program may have written them."""
    client.set(QueueKeys("b").wake, "no list")
    wait = PushWait(broker, ["a", "b"])
    wait.begin()
    with pytest.raises(BrokerUnavailable, match="wrong kind"):
        woken_for(wait)
    assert wait.socket is None
    wait.begin()
    push(broker, "x", queue="b")
    assert woken_for(wait) == "b"
    wait.close()


def test_an_unreachable_redis_is_an_error_at_once(client: redis.Redis, own_redis: EmbeddedRedis) -> None:
    """And again until it is back; then the worker waits as before."""
    wait = PushWait(Broker(), ["a"])
    own_redis.kill()
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            wait.begin()
    own_redis.restart()
    wait.begin()
    with redis.Redis.from_url(own_redis.url, protocol=2) as again:
        blocked(again, 1)
    wait.close()


def test_an_error_that_is_not_of_redis_is_raised_as_it_is(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is given up all the same."""
    wait = start()

    def broken(*arguments: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(wait._connection, "read_response", broken)
    push(Broker(), "x")
    with pytest.raises(RuntimeError, match="broken"):
        woken_for(wait)
    assert wait.socket is None


def test_a_wait_that_is_closed_takes_no_token(start: Any, client: redis.Redis, broker: Broker) -> None:
    """It may be closed twice, and also while Redis is unreachable."""
    wait = start()
    wait.close()
    blocked(client, 0)
    push(broker, "x")
    assert tokens(client) == 1
    wait.close()
    assert wait.socket is None
