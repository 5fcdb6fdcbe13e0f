"""What idle workers are handed or woken for, on the test's own server, which counts the clients that block.

Tests with `variant` hold for both: with handoff, and for the plain variant, in which pushes only wake.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry, Lease, blocking, clients, scripts
from django_asyncq.broker.handoff import Handoff, WaitResult
from django_asyncq.broker.keys import QueueKeys, handoff_key
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


@pytest.fixture(params=["handoff", "plain"])
def variant(request: pytest.FixtureRequest, client: redis.Redis, settings: Any) -> Iterator[str]:
    """The variant under test. In the plain one, no key of a handoff may be left at the end."""
    settings.ASYNCQ = {**settings.ASYNCQ, "HANDOFF": request.param == "handoff"}
    yield request.param
    if request.param == "plain":
        try:
            left = [key for key in client.scan_iter() if b":handoff:" in key or b":handed:" in key]
        except redis.ConnectionError:
            return  # the test has killed the server
        assert left == []


@pytest.fixture
def plain(settings: Any) -> None:
    """The plain variant."""
    settings.ASYNCQ = {**settings.ASYNCQ, "HANDOFF": False}


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    return Broker()


@pytest.fixture
def start(client: redis.Redis) -> Iterator[Callable[..., Handoff]]:
    """A function that makes the waits of a worker."""
    made: list[Handoff] = []

    def build(worker: str = WORKER, lease_seconds: int = LEASE_SECONDS) -> Handoff:
        made.append(Handoff(Broker(), worker, lease_seconds))
        return made[-1]

    yield build
    for each in made:
        each.close()


def wait_ready(worker: Handoff, queue: str) -> None:
    """Wait for a push to a queue, ready to be handed a task."""
    worker.report_ready(ready=True)
    worker.wait_for(queue)


def blocked(client: redis.Redis, count: int) -> None:
    """Wait until so many clients block."""
    wait_until(lambda: int(client.info("clients")["blocked_clients"]) == count, "blocked clients")


def is_woken(worker: Handoff, seconds: float = PATIENCE_SECONDS) -> bool:
    return bool(select.select(list(worker.sockets), [], [], seconds)[0])


def next_result(worker: Handoff) -> tuple[str, WaitResult]:
    """Sleep until a wait ends; return its queue and its result."""
    ready, _, _ = select.select(list(worker.sockets), [], [], PATIENCE_SECONDS)
    queue = worker.sockets[ready[0]]
    result = worker.read(queue)
    assert result is not None
    return queue, result


def next_lease(worker: Handoff, broker: Broker) -> Lease:
    """Sleep until a wait ends; return the one task that the worker gets, in whichever way."""
    queue, result = next_result(worker)
    if result.handed is None:
        assert result.may_have_work
        (lease,) = broker.dequeue(queue, worker.worker_id, 1, LEASE_SECONDS).leases
    else:
        (lease,) = result.handed.leases
    return lease


def push(broker: Broker, *ids: str, queue: str = "a", **options: Any) -> None:
    assert broker.enqueue(queue, [Entry(id, b"m", **options) for id in ids]) == ["queued"] * len(ids)


def pending(client: redis.Redis, queue: str = "a") -> list[bytes]:
    """The ids that wait, the next to run first."""
    return client.lrange(QueueKeys(queue).pending, 0, -1)[::-1]


def leases(result: WaitResult) -> list[Lease]:
    assert result.handed is not None
    return result.handed.leases


# --- both variants: how a wait begins and ends


@pytest.mark.usefixtures("variant")
class TestBothVariants:
    """What holds with handoff and without."""

    def test_a_pushed_task_is_leased_to_the_waiting_worker(
        self, start: Any, client: redis.Redis, broker: Broker
    ) -> None:
        """Active, leased, held and fenced, and in no list that is ours alone."""
        worker = start()
        wait_ready(worker, "a")
        blocked(client, 1)
        push(broker, "x")
        assert next_lease(worker, broker) == Lease("x", 1)
        keys = QueueKeys("a")
        assert client.hmget(keys.task("x"), "state", "worker") == [b"active", WORKER.encode()]
        assert client.zscore(keys.lease, "x") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
        assert broker.held("a", WORKER) == [Lease("x", 1)]
        assert not client.exists(keys.pending, keys.handed(WORKER))
        assert broker.done("a", WORKER, [Lease("x", 1)]) == ["done"]

    def test_a_go_producers_push_too(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """It writes the hash and the list, as asynq does."""
        worker = start()
        wait_ready(worker, "a")
        blocked(client, 1)
        keys = QueueKeys("a")
        client.hset(keys.task("x"), mapping={"msg": b"m", "state": b"pending", "pending_since": b"1"})
        client.lpush(keys.pending, "x")
        assert next_lease(worker, broker) == Lease("x", 1)

    def test_several_queues_are_waited_for_at_once(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """Each on its own connection."""
        worker = start()
        for queue in ("a", "b"):
            wait_ready(worker, queue)
        blocked(client, 2)
        push(broker, "x", queue="b")
        assert next_lease(worker, broker) == Lease("x", 1)
        assert list(worker.sockets.values()) == ["a"]

    def test_what_has_a_priority_comes_first(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """The pushed id keeps its place."""
        worker = start()
        wait_ready(worker, "a")
        blocked(client, 1)
        push(broker, "first", priority=1)
        push(broker, "x")
        assert next_lease(worker, broker) == Lease("first", 1)
        assert pending(client) == [b"x"]

    def test_a_paused_queue_gives_nothing(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """What was pushed waits in its place."""
        worker = start()
        wait_ready(worker, "a")
        blocked(client, 1)
        client.set(QueueKeys("a").paused, 1)
        push(broker, "x", "y")
        _, result = next_result(worker)
        found = broker.dequeue("a", WORKER, 1, LEASE_SECONDS) if result.handed is None else result.handed
        assert (found.paused, found.leases) == (True, [])
        assert pending(client) == [b"x", b"y"]

    def test_a_wait_ends_by_itself_and_brings_nothing(self, start: Any, client: redis.Redis) -> None:
        """So a connection that was lost without notice is noticed; the shorter the lease, the sooner."""
        worker = start(lease_seconds=2)
        assert worker.block_seconds == 0.5
        wait_ready(worker, "a")
        begun = time.monotonic()
        _, result = next_result(worker)
        assert 0.4 < time.monotonic() - begun < PATIENCE_SECONDS / 2
        assert not result.may_have_work
        assert result.handed is None or not result.handed.leases

    def test_a_wait_that_is_cut_off_is_over(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """The worker wakes, and gets an error; the next wait has a new connection."""
        worker = start()
        for _ in range(2):
            wait_ready(worker, "a")
            blocked(client, 1)
            client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(BrokerUnavailable):
                next_result(worker)
            assert not worker.sockets
        wait_ready(worker, "a")
        push(broker, "x")
        assert next_lease(worker, broker) == Lease("x", 1)

    def test_a_connection_closed_while_nobody_waited_is_no_failure(
        self, start: Any, client: redis.Redis, broker: Broker
    ) -> None:
        """Servers close idle clients."""
        worker = start()
        wait_ready(worker, "a")
        push(broker, "x")
        next_lease(worker, broker)
        client.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: len(client.client_list()) == 1, "end of all other clients")
        wait_ready(worker, "a")
        push(broker, "y")
        assert next_lease(worker, broker) == Lease("y", 1)

    def test_a_wait_that_lasts_too_long_is_given_up(
        self, start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its connection must have been lost without notice; one that lasts as long as it should goes on."""
        worker = start()
        wait_ready(worker, "a")
        (socket,) = worker.sockets
        wait_ready(worker, "a")
        assert list(worker.sockets) == [socket]
        monkeypatch.setattr(blocking, "PATIENCE_SECONDS", -worker.block_seconds)
        with pytest.raises(BrokerUnavailable):
            worker.wait_for("a")
        assert not worker.sockets
        blocked(client, 0)

    def test_being_woken_costs_no_new_connection(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """An idle worker that is woken fifty times a second must not connect fifty times a second."""
        worker = start()
        connections = []
        for number in range(5):
            worker.report_ready(ready=number % 2 == 0)
            worker.wait_for("a")
            blocked(client, 1)
            push(broker, f"id-{number}")
            next_result(worker)
            client.delete(QueueKeys("a").pending)
            connections.append(client.info("stats")["total_connections_received"])
        assert connections[-1] == connections[0]

    def test_a_server_that_refuses_says_why(self, start: Any, client: redis.Redis) -> None:
        """The connection is given up, since more replies may follow."""
        client.set(QueueKeys("a").pending, "no list")
        worker = start()
        wait_ready(worker, "a")
        with pytest.raises(BrokerUnavailable, match="wrong kind"):
            next_result(worker)
        assert not worker.sockets

    def test_an_unreachable_redis_is_an_error_at_once(self, start: Any, own_redis: EmbeddedRedis) -> None:
        """And again until it is back; then the worker waits as before."""
        worker = start()
        own_redis.kill()
        for _ in range(2):
            with pytest.raises(BrokerUnavailable):
                wait_ready(worker, "a")
        own_redis.restart()
        wait_ready(worker, "a")
        with redis.Redis.from_url(own_redis.url, protocol=2) as again:
            blocked(again, 1)

    def test_a_queue_no_longer_waited_for_has_no_connection(
        self, start: Any, client: redis.Redis, broker: Broker
    ) -> None:
        """Nor a wait; another may begin."""
        worker = start()
        before = len(client.client_list())
        worker.wait_for("a")
        blocked(client, 1)
        assert worker.queues == ["a"]
        worker.stop_waiting("a")
        wait_until(lambda: len(client.client_list()) == before, "end of its connection")
        assert (worker.sockets, worker.queues) == ({}, [])
        worker.stop_waiting("a")
        wait_ready(worker, "a")
        push(broker, "x")
        assert next_lease(worker, broker) == Lease("x", 1)

    def test_a_stopped_worker_gets_nothing_any_more(self, start: Any, client: redis.Redis, broker: Broker) -> None:
        """Nothing of it is left in Redis."""
        worker = start()
        for queue in ("a", "b"):
            wait_ready(worker, queue)
        blocked(client, 2)
        assert worker.close() == {}
        blocked(client, 0)
        push(broker, "x")
        assert pending(client) == [b"x"]
        assert not client.exists(handoff_key(WORKER))
        assert worker.close() == {}

    def test_a_worker_that_stops_while_redis_is_unreachable_goes_on_stopping(
        self, start: Any, own_redis: EmbeddedRedis
    ) -> None:
        """Its supervisor recovers what it may have been handed."""
        worker = start()
        wait_ready(worker, "a")
        own_redis.kill()
        assert worker.close() == {}
        assert not worker.sockets


# --- the plain variant alone


@pytest.mark.usefixtures("plain")
def test_without_handoff_a_push_wakes_every_idle_worker(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Nobody is handed anything; the list is as it was pushed."""
    fleet = [start(f"w-{number}") for number in range(3)]
    for number, worker in enumerate(fleet):
        wait_ready(worker, "a")
        blocked(client, number + 1)
        assert not worker.could_be_ready
    push(broker, "x")
    for worker in fleet:
        _, result = next_result(worker)
        assert (result.may_have_work, result.handed) == (True, None)
    assert pending(client) == [b"x"]


@pytest.mark.usefixtures("plain")
def test_without_handoff_no_script_touches_its_keys(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Neither the worker's own, nor those of its supervisor; a key that is there stays as it is."""
    client.hset(handoff_key(WORKER), "", "")
    client.rpush(QueueKeys("a").handed(WORKER), "x")
    push(broker, "y")
    assert broker.dequeue("a", WORKER, 1, LEASE_SECONDS).leases == [Lease("y", 1)]
    assert broker.extend("a", [WORKER], LEASE_SECONDS, begun=["y"])[0].kept == 1
    assert not broker.stop_handoff(WORKER)
    assert broker.requeue_moved("a", WORKER) == 0
    worker = start()
    wait_ready(worker, "a")
    worker.close()
    assert client.hgetall(handoff_key(WORKER)) == {b"": b""}
    assert client.lrange(QueueKeys("a").handed(WORKER), 0, -1) == [b"x"]


def test_in_a_cluster_the_plain_variant_runs(
    start: Any, client: redis.Redis, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's handoff and its queues live apart there."""
    worker = start()
    assert worker.is_on
    with monkeypatch.context() as in_cluster:
        in_cluster.setattr(clients, "is_cluster", lambda found: True)
        in_cluster.setattr(clients, "pool_for", lambda found, key: found.connection_pool)
        assert not worker.is_on
        wait_ready(worker, "a")
        assert not worker.could_be_ready
        blocked(client, 1)
        push(broker, "x")
        _, result = next_result(worker)
        assert (result.may_have_work, result.handed) == (True, None)
        (lease,) = broker.dequeue("a", WORKER, 1, LEASE_SECONDS).leases
        assert broker.extend("a", [WORKER], LEASE_SECONDS, begun=[lease.id])[0].kept == 1
    assert not client.exists(handoff_key(WORKER))


# --- handoff: what is handed


def test_one_push_wakes_one_worker_of_a_fleet(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The one that has waited longest; the others sleep on, and are handed what comes next."""
    fleet = [start(f"w-{number}") for number in range(3)]
    for number, worker in enumerate(fleet):
        wait_ready(worker, "a")
        blocked(client, number + 1)
    for number, id in enumerate(["x", "y"]):
        push(broker, id)
        assert leases(next_result(fleet[number])[1]) == [Lease(id, 1)]
    assert not is_woken(fleet[2], 0.2)
    blocked(client, 1)


def test_of_many_tasks_each_worker_is_handed_one_and_learns_of_the_rest(
    start: Any, client: redis.Redis, broker: Broker
) -> None:
    """In the order of their waits; they ask for what is left."""
    fleet = [start(f"w-{number}") for number in range(2)]
    for number, worker in enumerate(fleet):
        wait_ready(worker, "a")
        blocked(client, number + 1)
    push(broker, "x", "y", "z")
    found = [next_result(worker)[1] for worker in fleet]
    assert sorted(lease.id for result in found for lease in leases(result)) == ["x", "y"]
    assert [result.may_have_work for result in found] == [True, True]
    assert pending(client) == [b"z"]


def test_an_id_without_a_message_is_dropped(start: Any, client: redis.Redis) -> None:
    """And nobody takes it for work."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    client.lpush(QueueKeys("a").pending, "stray")
    _, result = next_result(worker)
    assert (leases(result), result.may_have_work) == ([], False)
    assert pending(client) == []


def test_a_paused_queue_says_so(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Nothing is handed, and the worker need not ask."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    client.set(QueueKeys("a").paused, 1)
    push(broker, "x", "y")
    _, result = next_result(worker)
    assert result.handed is not None
    assert (result.handed.paused, leases(result), result.may_have_work) == (True, [], False)
    assert pending(client) == [b"x", b"y"]


def test_a_worker_whose_wait_ended_by_itself_is_still_ready(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Until it dequeues tasks itself; then its next wait says nothing."""
    worker = start(lease_seconds=1)
    wait_ready(worker, "a")
    _, result = next_result(worker)
    assert (leases(result), result.may_have_work) == ([], False)
    assert not worker.could_be_ready
    worker.note_dequeue()
    broker.stop_handoff(WORKER)
    worker.wait_for("a")
    assert next_result(worker)[1][:2] == (False, None)


# --- handoff: which worker is handed nothing


def test_a_worker_that_is_not_ready_is_only_woken(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The list is as it was pushed."""
    worker = start()
    worker.report_ready(ready=False)
    worker.wait_for("a")
    blocked(client, 1)
    push(broker, "x", "y")
    _, result = next_result(worker)
    assert (result.may_have_work, result.handed) == (True, None)
    assert pending(client) == [b"x", b"y"]


def test_a_waiting_worker_may_be_ready_later(start: Any, client: redis.Redis, broker: Broker) -> None:
    """When it has finished what it ran; nothing is reported twice."""
    worker = start()
    assert not worker.could_be_ready
    worker.wait_for("a")
    blocked(client, 1)
    assert worker.could_be_ready
    for _ in range(2):
        worker.report_ready(ready=True)
    assert not worker.could_be_ready
    push(broker, "x")
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]
    assert client.info("commandstats")["cmdstat_expire"]["calls"] == 1


def test_a_worker_that_has_dequeued_a_task_is_handed_nothing(start: Any, client: redis.Redis, broker: Broker) -> None:
    """From another queue, say, which keeps the interpreter: the next ready worker gets it."""
    busy, idle = start("busy"), start("idle")
    wait_ready(busy, "a")
    blocked(client, 1)
    wait_ready(idle, "a")
    blocked(client, 2)
    push(broker, "other", queue="b")
    assert broker.dequeue("b", "busy", 1, LEASE_SECONDS).leases
    push(broker, "x")
    assert leases(next_result(idle)[1]) == [Lease("x", 1)]
    _, result = next_result(busy)
    assert (result.handed, result.may_have_work) == (None, True)


def test_a_worker_that_asked_in_vain_is_still_ready(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Every idle worker looks from time to time."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    assert not broker.dequeue("a", WORKER, 5, LEASE_SECONDS).leases
    push(broker, "x")
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]


def test_one_task_is_handed_of_all_queues(start: Any, client: redis.Redis, broker: Broker) -> None:
    """Until it reports that it is ready again: each queue's next task returns to its place, or goes to others."""
    worker = start()
    for queue in ("a", "b"):
        wait_ready(worker, queue)
    blocked(client, 2)
    push(broker, "x", queue="a")
    push(broker, "y", queue="b")
    result = dict(next_result(worker) for _ in range(2))
    assert leases(result["a"]) == [Lease("x", 1)]
    assert (result["b"].handed, result["b"].may_have_work) == (None, True)
    assert pending(client, "b") == [b"y"]
    # It waits for b anew, but it has not reported that it has read the task of a.
    worker.wait_for("b")
    assert next_result(worker)[1].handed is None
    wait_ready(worker, "a")
    worker.wait_for("b")
    queue, again = next_result(worker)
    assert (queue, leases(again)) == ("b", [Lease("y", 1)])


def test_a_redis_that_lost_its_memory_hands_nothing(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The worker learns that there may be work, and is ready again the next time."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    client.flushall()
    push(broker, "x")
    _, result = next_result(worker)
    assert (result.handed, result.may_have_work) == (None, True)
    assert pending(client) == [b"x"]
    wait_ready(worker, "a")
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]


# --- handoff: leases


def score(client: redis.Redis, id: str) -> float | None:
    return client.zscore(QueueKeys("a").lease, id)


def test_the_lease_of_a_handed_task_is_not_renewed_until_it_is_read_or_begun(
    start: Any, client: redis.Redis, broker: Broker
) -> None:
    """A worker that is frozen, or whose host is lost, may never read it; what it dequeued itself is renewed."""
    push(broker, "mine")
    assert broker.dequeue("a", WORKER, 1, LEASE_SECONDS).leases
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    push(broker, "x")
    wait_until(lambda: score(client, "x"), "a lease")
    client.zadd(QueueKeys("a").lease, {"mine": 5, "x": 5})
    (extended,) = broker.extend("a", [WORKER], LEASE_SECONDS)
    assert (extended.kept, extended.lost) == (1, [])
    assert score(client, "x") == 5
    assert score(client, "mine") > 5
    # Begun: the worker may not come to report so, because a task can hold the interpreter.
    assert broker.extend("a", [WORKER, "w-2"], LEASE_SECONDS, begun=["x"])[0].kept == 2
    assert score(client, "x") == pytest.approx(time.time() + LEASE_SECONDS, abs=5)
    client.zadd(QueueKeys("a").lease, {"x": 5})
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]
    assert broker.extend("a", [WORKER], LEASE_SECONDS)[0].kept == 1
    # Read, whether or not it is ready for the next.
    worker.report_ready(ready=False)
    assert broker.extend("a", [WORKER], LEASE_SECONDS)[0].kept == 2
    assert score(client, "x") > 5
    assert not client.exists(handoff_key(WORKER))


# --- handoff: when a connection breaks


def test_what_was_moved_and_not_dequeued_is_requeued(client: redis.Redis, broker: Broker) -> None:
    """In front of all others."""
    keys = QueueKeys("a")
    client.rpush(keys.pending, "y")
    client.rpush(keys.handed(WORKER), "second", "first")
    assert broker.requeue_moved("a", WORKER) == 2
    assert not client.exists(keys.handed(WORKER))
    assert set(pending(client)[:2]) == {b"first", b"second"}
    assert broker.requeue_moved("a", WORKER) == 0


def test_a_server_that_lost_the_script_gets_it_anew(start: Any, client: redis.Redis, broker: Broker) -> None:
    """What was moved meanwhile is requeued by the worker, which looks for what it holds."""
    worker = start()
    wait_ready(worker, "a")
    push(broker, "w")
    next_result(worker)
    wait_ready(worker, "a")
    blocked(client, 1)
    client.script_flush()
    push(broker, "x")
    with pytest.raises(BrokerUnavailable):
        next_result(worker)
    assert not worker.sockets
    assert pending(client) == []
    assert broker.requeue_moved("a", WORKER) == 1
    wait_ready(worker, "a")
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]


def test_a_worker_whose_wait_was_cut_off_is_handed_tasks_again(start: Any, client: redis.Redis, broker: Broker) -> None:
    """What it may have been handed in the lost reply is adopted, and no longer unread."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(BrokerUnavailable):
        next_result(worker)
    client.hset(handoff_key(WORKER), "a", "lost")
    wait_ready(worker, "a")
    push(broker, "x")
    assert leases(next_result(worker)[1]) == [Lease("x", 1)]


def test_an_error_that_is_not_of_redis_is_raised_as_it_is(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is given up all the same."""

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(scripts, "script", broken)
    worker = start()
    with pytest.raises(ZeroDivisionError):
        worker.wait_for("a")
    assert not worker.sockets


# --- handoff: when a worker stops


def test_what_was_handed_at_the_last_moment_is_returned(start: Any, client: redis.Redis, broker: Broker) -> None:
    """The worker requeues it."""
    worker = start()
    for queue in ("a", "b"):
        wait_ready(worker, queue)
    blocked(client, 2)
    push(broker, "x", queue="b")
    (result,) = worker.close().values()
    assert leases(result) == [Lease("x", 1)]
    assert broker.requeue("b", WORKER, leases(result)) == ["requeued"]


def test_nothing_is_handed_once_the_supervisor_stopped_it(start: Any, client: redis.Redis, broker: Broker) -> None:
    """It does that for a dead worker, since Redis may not have noticed."""
    worker = start()
    wait_ready(worker, "a")
    blocked(client, 1)
    assert broker.stop_handoff(WORKER)
    assert not broker.stop_handoff(WORKER)
    push(broker, "x")
    assert next_result(worker)[1].handed is None
    assert pending(client) == [b"x"]
