"""The watch that wakes an idle worker, on a real server. Waits are on events; no bare sleep."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry
from django_asyncq.broker import watch as watch_module
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.watch import QueueWatch
from django_asyncq.testing import EmbeddedRedis

PATIENCE_SECONDS = 10.0


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, looking often."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        pause.wait(0.01)


def is_blocked(client: redis.Redis, count: int = 1) -> bool:
    return int(client.info("clients")["blocked_clients"]) >= count


class Started:
    """A watch that listens already, and its event, which is clear."""

    def __init__(self, *queues: str) -> None:
        self.event = threading.Event()
        self.watch = QueueWatch(queues, self.event)
        self.watch.start()
        # Set once the subscription stands.
        assert self.event.wait(PATIENCE_SECONDS)
        self.event.clear()


@pytest.fixture
def client(own_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A plain client of a server of one's own: it counts blocked clients."""
    found = redis.Redis.from_url(own_redis.url, protocol=2)
    yield found
    found.close()


@pytest.fixture
def start(own_redis: EmbeddedRedis, own_keys: None) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def build(*queues: str) -> Started:
        made.append(Started(*queues))
        return made[-1]

    yield build
    for each in made:
        each.watch.stop()


def test_any_push_to_an_armed_queue_wakes(start: Any, client: redis.Redis) -> None:
    """Ours and a Go producer's alike; the list is as it was pushed."""
    started = start("a", "b")
    keys = QueueKeys("a")
    started.watch.arm(["a", "unknown"])
    until(lambda: is_blocked(client))
    client.lpush(keys.pending, "id-1", "id-2")
    assert started.event.wait(PATIENCE_SECONDS)
    assert client.lrange(keys.pending, 0, -1) == [b"id-2", b"id-1"]


def test_a_hit_disarms(start: Any, client: redis.Redis) -> None:
    """What lies in the queue wakes once, not again and again; armed again, it wakes again."""
    started = start("a")
    client.lpush(QueueKeys("a").pending, "id")
    for _ in range(2):
        started.watch.arm(["a"])
        assert started.event.wait(PATIENCE_SECONDS)
        assert not started.watch._armed["a"].is_set()
        started.event.clear()
        assert not started.event.wait(0.2)


def test_a_connection_closed_while_nobody_waited_is_no_failure(start: Any, client: redis.Redis) -> None:
    """Servers close idle clients; the next push is told as soon as any other."""
    started = start("a")
    pending = QueueKeys("a").pending
    client.lpush(pending, "id")
    started.watch.arm(["a"])
    assert started.event.wait(PATIENCE_SECONDS)
    (idle,) = [each for each in client.client_list() if each["cmd"] == "blmove"]
    client.client_kill_filter(_id=idle["id"])
    until(lambda: idle["id"] not in {each["id"] for each in client.client_list()})
    started.event.clear()
    started.watch._failed = pytest.fail
    started.watch.arm(["a"])
    assert started.event.wait(PATIENCE_SECONDS)


def test_who_came_for_nothing_leaves_the_next_push_to_others_first(
    start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one task would wake a whole fleet, each time. What nobody has taken after a moment is told all the same."""
    monkeypatch.setattr(watch_module, "DEFERENCE_SECONDS", 1.0)
    pending = QueueKeys("a").pending
    quick, late = start("a"), start("a")
    for started in (quick, late):
        started.watch.arm(["a"])
    until(lambda: is_blocked(client, 2))
    client.lpush(pending, "first")
    assert quick.event.wait(PATIENCE_SECONDS)
    assert late.event.wait(PATIENCE_SECONDS)
    client.delete(pending)
    quick.event.clear()
    late.event.clear()
    quick.watch.arm(["a"])
    late.watch.arm(["a"], took=False)
    until(lambda: is_blocked(client, 2))
    client.lpush(pending, "second")
    assert quick.event.wait(PATIENCE_SECONDS)
    client.delete(pending)
    # It has looked, and waits again.
    until(lambda: "cmdstat_llen" in client.info("commandstats") and is_blocked(client))
    assert not late.event.is_set()
    client.lpush(pending, "third")
    assert late.event.wait(PATIENCE_SECONDS)
    # It has found something to do, and is as quick as any from now on.
    client.delete(pending)
    late.event.clear()
    late.watch.arm(["a"], took=True)
    until(lambda: is_blocked(client))
    monkeypatch.setattr(watch_module, "DEFERENCE_SECONDS", 1000.0)
    client.lpush(pending, "fourth")
    assert late.event.wait(PATIENCE_SECONDS)


def test_a_look_that_no_push_caused_makes_nobody_defer(
    start: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every idle process looks from time to time, and finds nothing."""
    monkeypatch.setattr(watch_module, "DEFERENCE_SECONDS", 1000.0)
    started = start("a")
    for _ in range(3):
        started.watch.arm(["a"], took=False)
    until(lambda: is_blocked(client))
    client.lpush(QueueKeys("a").pending, "id")
    assert started.event.wait(PATIENCE_SECONDS)


def test_being_woken_costs_no_new_connection(start: Any, client: redis.Redis) -> None:
    """An idle worker that is woken fifty times a second must not connect fifty times a second."""
    started = start("a")
    keys = QueueKeys("a")
    connections = []
    for number in range(5):
        started.event.clear()
        started.watch.arm(["a"])
        until(lambda: is_blocked(client))
        client.lpush(keys.pending, f"id-{number}")
        assert started.event.wait(PATIENCE_SECONDS)
        client.delete(keys.pending)
        connections.append(client.info("stats")["total_connections_received"])
    assert connections[-1] == connections[0]


def test_a_queue_that_is_not_armed_does_not_wake(start: Any, client: redis.Redis) -> None:
    """For instance a paused one."""
    started = start("a", "b")
    started.watch.arm(["a"])
    until(lambda: is_blocked(client))
    client.lpush(QueueKeys("b").pending, "id")
    assert not started.event.wait(0.3)


def test_a_push_by_priority_wakes(start: Any) -> None:
    """It goes to another key, and is told on a channel; armed or not."""
    started = start("a", "b")
    Broker("producer").enqueue("b", [Entry("id", b"m", priority=5)])
    assert started.event.wait(PATIENCE_SECONDS)


def test_a_queue_named_for_the_first_time_wakes(start: Any) -> None:
    """Whoever finds its queues by itself learns of it at once, and once."""
    started = start("a")
    assert not started.watch.take_new_names()
    Broker().register_queue("b")
    assert started.event.wait(PATIENCE_SECONDS)
    assert [started.watch.take_new_names() for _ in range(2)] == [True, False]
    started.event.clear()
    Broker.forget_registered()
    Broker().register_queue("b")
    Broker().enqueue("a", [Entry("1", b"m", priority=1)])
    assert started.event.wait(PATIENCE_SECONDS)
    assert not started.watch.take_new_names()


def test_the_watch_makes_an_event_of_its_own(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """When it is given none."""
    watch = QueueWatch(["b", "a"])
    assert watch.queues == ["a", "b"]
    assert isinstance(watch.event, threading.Event)
    watch.start()
    assert watch.event.wait(PATIENCE_SECONDS)
    watch.stop()


def test_stopping_ends_every_thread_at_once(start: Any, client: redis.Redis) -> None:
    """Those that block in Redis, those that wait to be armed, and the listener."""
    started = start("a", "b", "c")
    started.watch.arm(["a", "b"])
    until(lambda: is_blocked(client, 2))
    begun = time.monotonic()
    started.watch.stop()
    assert time.monotonic() - begun < 2
    assert not any(thread.is_alive() for thread in started.watch._threads)
    started.watch.stop()


def test_a_watch_without_queues_does_nothing(own_keys: None) -> None:
    """A worker may not know any queue yet."""
    watch = QueueWatch([])
    watch.start()
    watch.arm(["a"])
    watch.stop()


def test_an_outage_is_told_once_and_survived(
    own_redis: EmbeddedRedis, start: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when Redis goes and one when it is back, for all threads; then a push wakes as before."""
    monkeypatch.setattr(watch_module, "LONGEST_PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger="django_asyncq.broker")
    started = start("a", "b")
    started.watch.arm(["a", "b"])
    plain = redis.Redis.from_url(own_redis.url, protocol=2)
    until(lambda: is_blocked(plain, 2))
    away = redis.ConnectionError("away")

    class Away:
        """A client of a server that is gone."""

        def __getattr__(self, name: str) -> Any:
            raise away

    with monkeypatch.context() as outage:
        outage.setattr(watch_module.clients, "client", lambda role: Away())
        plain.client_kill_filter(_type="normal", skipme=True)
        plain.client_kill_filter(_type="pubsub", skipme=True)
        until(lambda: all(started.watch._failures.get(name, 0) > 3 for name in ("a", "b", "{wake}")))
    until(lambda: is_blocked(plain, 2) and len(caplog.records) >= 2)
    words = [record.getMessage().split(":")[0] for record in caplog.records if record.name == "django_asyncq.broker"]
    assert words == ["cannot watch a, b", "watching a, b again"]
    started.event.clear()
    plain.lpush(QueueKeys("b").pending, "id")
    assert started.event.wait(PATIENCE_SECONDS)
    plain.close()
