"""The watch that listens to channels, on a real server. Waits are on events; no bare sleep."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry, notifications
from django_asyncq.broker.notifications import QueueListener
from django_asyncq.testing import EmbeddedRedis

PATIENCE_SECONDS = 10.0


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, looking often."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        pause.wait(0.01)


class Started:
    """A watch that listens already, and its event, which is clear."""

    def __init__(self, *queues: str) -> None:
        self.event = threading.Event()
        self.watch = QueueListener(queues, self.event)
        self.watch.start()
        # Set once the subscription stands.
        assert self.event.wait(PATIENCE_SECONDS)
        self.event.clear()


@pytest.fixture
def client(own_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A plain client of a server of one's own, whose clients it may end."""
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


def test_a_push_by_priority_wakes(start: Any) -> None:
    """It goes to another key, and is told on a channel."""
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
    watch = QueueListener(["b", "a"])
    assert watch.queues == ["a", "b"]
    assert isinstance(watch.event, threading.Event)
    watch.start()
    assert watch.event.wait(PATIENCE_SECONDS)
    watch.stop()


def test_a_watch_without_queues_listens_to_new_names(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """A worker may not know any queue yet."""
    watch = QueueListener([])
    watch.start()
    assert watch.event.wait(PATIENCE_SECONDS)
    watch.stop()


def test_stopping_ends_the_thread_at_once(start: Any) -> None:
    """Though it listens."""
    started = start("a", "b")
    begun = time.monotonic()
    started.watch.stop()
    assert time.monotonic() - begun < 2
    assert not started.watch._thread.is_alive()
    started.watch.stop()


def test_an_outage_is_told_once_and_survived(
    start: Any, client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when Redis goes and one when it is back; what was pushed meanwhile is told, and what comes then."""
    monkeypatch.setattr(notifications.clients, "LONGEST_PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger="django_asyncq.broker")
    started = start("a", "b")

    class Away:
        """A client of a server that is gone."""

        def __getattr__(self, name: str) -> Any:
            raise redis.ConnectionError("away")

    with monkeypatch.context() as outage:
        outage.setattr(notifications.clients, "client", lambda role: Away())
        client.client_kill_filter(_type="pubsub", skipme=True)
        until(lambda: started.watch._failures > 3)
        assert not started.event.is_set()
    assert started.event.wait(PATIENCE_SECONDS)
    words = [record.getMessage().split(" ")[:3] for record in caplog.records if record.name == "django_asyncq.broker"]
    assert [" ".join(each[:2]) for each in words] == ["cannot listen", "listening to"]
    started.event.clear()
    Broker("producer").enqueue("b", [Entry("id", b"m", priority=5)])
    assert started.event.wait(PATIENCE_SECONDS)
