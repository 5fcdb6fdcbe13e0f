"""What a worker is handed while it stands by, on a server of one's own: it counts clients that wait."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry, Lease, clients, handoff, scripts
from django_asyncq.broker.handoff import Handoff, Heard
from django_asyncq.broker.keys import QueueKeys, standby_key
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.testing import EmbeddedRedis

from .workers import wait_until

PATIENCE_SECONDS = 10.0
LEASE_SECONDS = 60
WORKER = "w-1"


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
def start(client: redis.Redis) -> Iterator[Callable[..., Handoff]]:
    """A function that makes the standby of a worker."""
    made: list[Handoff] = []

    def build(worker: str = WORKER, lease_seconds: int = LEASE_SECONDS) -> Handoff:
        made.append(Handoff(worker, lease_seconds))
        return made[-1]

    yield build
    for each in made:
        each.close()


def stand_by(standby: Handoff, queue: str) -> None:
    """Wait for a push to a queue, and be handed a task."""
    standby.stand_by(may_be_handed=True)
    standby.wait_for(queue)


def waiting(client: redis.Redis, count: int) -> None:
    """Wait until so many clients block."""
    wait_until(lambda: int(client.info("clients")["blocked_clients"]) == count, "clients that block")


def is_woken(standby: Handoff, seconds: float = PATIENCE_SECONDS) -> bool:
    return bool(select.select(list(standby.sockets), [], [], seconds)[0])


def hear(standby: Handoff) -> tuple[str, Heard]:
    """Sleep until a wait ends; return its queue and what was heard."""
    ready, _, _ = select.select(list(standby.sockets), [], [], PATIENCE_SECONDS)
    queue = standby.sockets[ready[0]]
    heard = standby.hear(queue)
    assert heard is not None
    return queue, heard


def push(broker: Broker, *ids: str, queue: str = "a", **options: Any) -> None:
    assert broker.enqueue(queue, [Entry(id, b"m", **options) for id in ids]) == ["queued"] * len(ids)


def pending(client: redis.Redis, queue: str = "a") -> list[bytes]:
    """The ids that wait, the next to run first."""
    return client.lrange(QueueKeys(queue).pending, 0, -1)[::-1]


def leases(heard: Heard) -> list[Lease]:
    assert heard.taken is not None
    return heard.taken.leases


# --- what is handed


def test_what_is_pushed_is_handed_as_if_it_were_taken(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Active, leased, held, fenced; in no list that is ours alone."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    before = time.monotonic()
    push(broker, "x")
    queue, heard = hear(standby)
    assert (queue, heard.is_told, leases(heard)) == ("a", False, [Lease("x", 1)])
    assert heard.since < before
    keys = QueueKeys("a")
    assert client.hmget(keys.task("x"), "state", "worker") == [b"active", WORKER.encode()]
    assert client.zscore(keys.lease, "x") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
    assert broker.held("a", WORKER) == [Lease("x", 1)]
    assert not client.exists(keys.pending, keys.handed(WORKER))
    assert broker.done("a", WORKER, leases(heard)) == ["done"]


def test_a_go_producers_push_is_handed_too(start: Any, client: redis.Redis) -> None:
    """It writes the hash and the list, as asynq does."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    keys = QueueKeys("a")
    client.hset(keys.task("x"), mapping={"msg": b"m", "state": b"pending", "pending_since": b"1"})
    client.lpush(keys.pending, "x")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


def test_one_push_wakes_one_of_a_fleet(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Who has waited longest; the others sleep on, and are handed what comes next."""
    fleet = [start(f"w-{number}") for number in range(3)]
    for number, standby in enumerate(fleet):
        stand_by(standby, "a")
        waiting(client, number + 1)
    for number, id in enumerate(["x", "y"]):
        push(broker, id)
        assert leases(hear(fleet[number])[1]) == [Lease(id, 1)]
    assert not is_woken(fleet[2], 0.2)
    waiting(client, 1)


def test_of_many_each_is_handed_one_and_told_of_the_rest(start: Any, client: redis.Redis, broker: Broker) -> None:
    """In their order; what is left is asked for."""
    fleet = [start(f"w-{number}") for number in range(2)]
    for number, standby in enumerate(fleet):
        stand_by(standby, "a")
        waiting(client, number + 1)
    push(broker, "x", "y", "z")
    found = [hear(standby)[1] for standby in fleet]
    assert sorted(lease.id for heard in found for lease in leases(heard)) == ["x", "y"]
    assert [heard.is_told for heard in found] == [True, True]
    assert pending(client) == [b"z"]


def test_what_has_a_priority_comes_first(start: Any, client: redis.Redis, broker: Broker) -> None:
    """What BLMOVE has moved goes back to its place."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    push(broker, "first", priority=1)
    push(broker, "x")
    _, heard = hear(standby)
    assert (leases(heard), heard.is_told) == ([Lease("first", 1)], True)
    assert pending(client) == [b"x"]


def test_an_id_without_a_message_is_dropped(start: Any, client: redis.Redis) -> None:
    """And nobody is told of it."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    client.lpush(QueueKeys("a").pending, "stray")
    _, heard = hear(standby)
    assert (leases(heard), heard.is_told) == ([], False)
    assert pending(client) == []


def test_a_paused_queue_hands_nothing(start: Any, client: redis.Redis, broker: Broker) -> None:
    """It says so, and what was pushed waits in its place."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    client.set(QueueKeys("a").paused, 1)
    push(broker, "x", "y")
    _, heard = hear(standby)
    assert heard.taken is not None
    assert (heard.taken.paused, leases(heard), heard.is_told) == (True, [], False)
    assert pending(client) == [b"x", b"y"]


def test_a_wait_ends_by_itself_and_nothing_is_told(start: Any, client: redis.Redis, broker: Broker) -> None:
    """So that a connection that died without a word is noticed; the shorter the lease, the sooner."""
    standby = start(lease_seconds=2)
    assert standby.block_seconds == 0.5
    stand_by(standby, "a")
    begun = time.monotonic()
    _, heard = hear(standby)
    assert 0.4 < time.monotonic() - begun < PATIENCE_SECONDS / 2
    assert (leases(heard), heard.is_told) == ([], False)
    # It may still be handed a task.
    assert not standby.could_stand_by
    standby.took()
    broker.dismiss(WORKER)
    standby.wait_for("a")
    assert hear(standby)[1][:2] == (False, None)


# --- who is handed nothing


def test_who_does_not_stand_by_is_only_told(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The list is as it was pushed."""
    standby = start()
    standby.stand_by(may_be_handed=False)
    standby.wait_for("a")
    waiting(client, 1)
    push(broker, "x", "y")
    _, heard = hear(standby)
    assert (heard.is_told, heard.taken) == (True, None)
    assert pending(client) == [b"x", b"y"]


def test_who_waits_may_stand_by_later(start: Any, client: redis.Redis, broker: Broker) -> None:
    """When it has ended what it ran; nothing is said twice."""
    standby = start()
    assert not standby.could_stand_by
    standby.wait_for("a")
    waiting(client, 1)
    assert standby.could_stand_by
    for _ in range(2):
        standby.stand_by(may_be_handed=True)
    assert not standby.could_stand_by
    push(broker, "x")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]
    assert client.info("commandstats")["cmdstat_expire"]["calls"] == 1


def test_who_has_taken_something_is_handed_nothing(start: Any, client: redis.Redis, broker: Broker) -> None:
    """From another queue, say, which keeps the interpreter: the next of those who stand by has it."""
    busy, idle = start("busy"), start("idle")
    stand_by(busy, "a")
    waiting(client, 1)
    stand_by(idle, "a")
    waiting(client, 2)
    push(broker, "other", queue="b")
    assert broker.dequeue("b", "busy", 1, LEASE_SECONDS).leases
    push(broker, "x")
    assert leases(hear(idle)[1]) == [Lease("x", 1)]
    _, heard = hear(busy)
    assert (heard.taken, heard.is_told) == (None, True)


def test_who_asked_in_vain_stands_by_still(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Every idle worker looks from time to time."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    assert not broker.dequeue("a", WORKER, 5, LEASE_SECONDS).leases
    push(broker, "x")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


def test_one_task_is_handed_of_all_queues(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Until it says that it can take another: each queue's next goes back to its place, or to others."""
    standby = start()
    for queue in ("a", "b"):
        stand_by(standby, queue)
    waiting(client, 2)
    push(broker, "x", queue="a")
    push(broker, "y", queue="b")
    heard = dict(hear(standby) for _ in range(2))
    assert leases(heard["a"]) == [Lease("x", 1)]
    assert (heard["b"].taken, heard["b"].is_told) == (None, True)
    assert pending(client, "b") == [b"y"]
    # It waits for b anew, but what it was handed from a is still unread: nothing.
    standby.wait_for("b")
    assert hear(standby)[1].taken is None
    stand_by(standby, "a")
    standby.wait_for("b")
    queue, again = hear(standby)
    assert (queue, leases(again)) == ("b", [Lease("y", 1)])


def test_a_forgetful_redis_hands_nothing(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The worker is told, and stands by again the next time."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    client.flushall()
    push(broker, "x")
    _, heard = hear(standby)
    assert (heard.taken, heard.is_told) == (None, True)
    assert pending(client) == [b"x"]
    stand_by(standby, "a")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


# --- leases


def score(client: redis.Redis, id: str) -> float | None:
    return client.zscore(QueueKeys("a").lease, id)


def test_what_is_handed_is_not_renewed_until_it_is_read_or_begun(
    start: Any, client: redis.Redis, broker: Broker
) -> None:
    """A worker that is frozen, or whose host is gone, may never read it; what it asked for itself is renewed."""
    push(broker, "mine")
    assert broker.dequeue("a", WORKER, 1, LEASE_SECONDS).leases
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    push(broker, "x")
    wait_until(lambda: score(client, "x"), "a lease")
    client.zadd(QueueKeys("a").lease, {"mine": 5, "x": 5})
    (extended,) = broker.extend("a", [WORKER], LEASE_SECONDS)
    assert (extended.kept, extended.lost) == (1, [])
    assert score(client, "x") == 5
    assert score(client, "mine") > 5
    # Begun: the worker may not come to say so, for a task can keep the interpreter.
    assert broker.extend("a", [WORKER, "w-2"], LEASE_SECONDS, begun=["x"])[0].kept == 2
    assert score(client, "x") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
    client.zadd(QueueKeys("a").lease, {"x": 5})
    assert leases(hear(standby)[1]) == [Lease("x", 1)]
    assert broker.extend("a", [WORKER], LEASE_SECONDS)[0].kept == 1
    # Read, whether or not it may be handed the next.
    standby.stand_by(may_be_handed=False)
    assert broker.extend("a", [WORKER], LEASE_SECONDS)[0].kept == 2
    assert score(client, "x") > 5
    assert not client.exists(standby_key(WORKER))


# --- when a connection ends


def test_what_was_moved_and_not_taken_is_put_back(client: redis.Redis, broker: Broker) -> None:
    """Of several the oldest is again the next."""
    keys = QueueKeys("a")
    client.rpush(keys.pending, "y")
    client.rpush(keys.handed(WORKER), "second", "first")
    assert broker.put_back("a", WORKER) == 2
    assert not client.exists(keys.handed(WORKER))
    assert set(pending(client)[:2]) == {b"first", b"second"}
    assert broker.put_back("a", WORKER) == 0


def test_a_server_without_the_script_is_told_it_anew(start: Any, client: redis.Redis, broker: Broker) -> None:
    """What was moved meanwhile is put back by whoever looks for what it holds."""
    standby = start()
    stand_by(standby, "a")
    push(broker, "w")
    hear(standby)
    stand_by(standby, "a")
    waiting(client, 1)
    client.script_flush()
    push(broker, "x")
    with pytest.raises(BrokerUnavailable):
        hear(standby)
    assert not standby.sockets
    assert pending(client) == []
    assert broker.put_back("a", WORKER) == 1
    stand_by(standby, "a")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


def test_a_wait_that_is_cut_off_is_over(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Whoever waited is woken, and told; the next wait has a new connection."""
    standby = start()
    for _ in range(2):
        stand_by(standby, "a")
        waiting(client, 1)
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(BrokerUnavailable):
            hear(standby)
        assert not standby.sockets
    # As if it had been handed something: that is adopted, and no longer unread.
    client.hset(standby_key(WORKER), "a", "lost")
    stand_by(standby, "a")
    push(broker, "x")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


def test_a_connection_closed_while_nobody_waited_is_no_failure(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Servers close idle clients."""
    standby = start()
    stand_by(standby, "a")
    push(broker, "x")
    hear(standby)
    client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: len(client.client_list()) == 1, "the end of all others")
    stand_by(standby, "a")
    push(broker, "y")
    assert leases(hear(standby)[1]) == [Lease("y", 1)]


def test_a_wait_that_lasts_too_long_is_given_up(
    start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection must have been lost without a word; one that lasts as long as it should is left alone."""
    standby = start()
    stand_by(standby, "a")
    (socket,) = standby.sockets
    stand_by(standby, "a")
    assert list(standby.sockets) == [socket]
    monkeypatch.setattr(handoff, "PATIENCE_SECONDS", -standby.block_seconds)
    with pytest.raises(BrokerUnavailable):
        standby.wait_for("a")
    assert not standby.sockets
    waiting(client, 0)


def test_being_woken_costs_no_new_connection(start: Any, client: redis.Redis, broker: Broker) -> None:
    """An idle worker that is woken fifty times a second must not connect fifty times a second."""
    standby = start()
    connections = []
    for number in range(5):
        standby.stand_by(may_be_handed=number % 2 == 0)
        standby.wait_for("a")
        waiting(client, 1)
        push(broker, f"id-{number}")
        hear(standby)
        client.delete(QueueKeys("a").pending)
        connections.append(client.info("stats")["total_connections_received"])
    assert connections[-1] == connections[0]


def test_a_server_that_refuses_says_why(start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list where a list should be, say; the connection is given up, for more answers may follow."""
    client.set(QueueKeys("a").pending, "no list")
    standby = start()
    stand_by(standby, "a")
    with pytest.raises(BrokerUnavailable, match="wrong kind"):
        hear(standby)
    assert not standby.sockets

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scripts, "script", broken)
    with pytest.raises(ZeroDivisionError):
        standby.wait_for("b")
    assert not standby.sockets


def test_redis_that_is_away_is_said_to_be(start: Any, own_redis: EmbeddedRedis) -> None:
    """Whoever would wait is told at once."""
    standby = start()
    own_redis.kill()
    with pytest.raises(BrokerUnavailable):
        stand_by(standby, "a")


def test_a_queue_that_is_left_has_no_connection_any_more(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Nor a wait; another may begin."""
    standby = start()
    before = len(client.client_list())
    standby.wait_for("a")
    waiting(client, 1)
    standby.leave("a")
    wait_until(lambda: len(client.client_list()) == before, "the end of its connection")
    assert not standby.sockets
    standby.leave("a")
    stand_by(standby, "a")
    push(broker, "x")
    assert leases(hear(standby)[1]) == [Lease("x", 1)]


# --- the end


def test_who_stops_is_handed_nothing_any_more(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Nothing of it is left in Redis."""
    standby = start()
    for queue in ("a", "b"):
        stand_by(standby, queue)
    waiting(client, 2)
    assert standby.close() == {}
    waiting(client, 0)
    push(broker, "x")
    assert pending(client) == [b"x"]
    assert not client.exists(standby_key(WORKER))
    assert standby.close() == {}


def test_what_was_handed_at_the_last_moment_is_returned(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Whoever stops gives it back."""
    standby = start()
    for queue in ("a", "b"):
        stand_by(standby, queue)
    waiting(client, 2)
    push(broker, "x", queue="b")
    (heard,) = standby.close().values()
    assert leases(heard) == [Lease("x", 1)]
    assert broker.requeue("b", WORKER, leases(heard)) == ["requeued"]


def test_who_stops_while_redis_is_away_goes_on_stopping(start: Any, own_redis: EmbeddedRedis) -> None:
    """What it may have been handed is its supervisor's to give back."""
    standby = start()
    stand_by(standby, "a")
    own_redis.kill()
    assert standby.close() == {}
    assert not standby.sockets


def test_nothing_is_handed_to_who_was_dismissed(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Its supervisor does that when it is dead, for Redis may not have noticed."""
    standby = start()
    stand_by(standby, "a")
    waiting(client, 1)
    assert broker.dismiss(WORKER)
    assert not broker.dismiss(WORKER)
    push(broker, "x")
    assert hear(standby)[1].taken is None
    assert pending(client) == [b"x"]


def test_in_a_cluster_nobody_stands_by(
    start: Any, client: redis.Redis, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's standby and its queues live apart: it is woken, and nothing of the two is written."""
    standby = start()
    with monkeypatch.context() as in_cluster:
        in_cluster.setattr(clients, "is_cluster", lambda found: True)
        in_cluster.setattr(clients, "pool_for", lambda found, key: found.connection_pool)
        stand_by(standby, "a")
        assert not standby.could_stand_by
        waiting(client, 1)
        push(broker, "x")
        _, heard = hear(standby)
        assert (heard.is_told, heard.taken) == (True, None)
        assert pending(client) == [b"x"]
        (lease,) = broker.dequeue("a", WORKER, 1, LEASE_SECONDS).leases
        assert broker.extend("a", [WORKER], LEASE_SECONDS, begun=[lease.id])[0].kept == 1
    assert not client.exists(standby_key(WORKER))
