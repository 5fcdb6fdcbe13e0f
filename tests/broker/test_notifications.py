"""The listener on a real server. The tests wait on events; none sleeps for a fixed time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, waits
from django_asyncq.broker.keys import pauses_channel
from django_asyncq.broker.waits import WorkerListener
from django_asyncq.testing import EmbeddedRedis

PATIENCE_SECONDS = 10.0


def announce_pause() -> None:
    """Announce what pauses and resumes announce."""
    Broker().client.publish(pauses_channel(), "1")


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; check often."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        pause.wait(0.01)


class Started:
    """A listener that is subscribed, and its event, which is clear."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.listener = WorkerListener(self.event)
        self.listener.start()
        # Set when the subscription is made.
        assert self.event.wait(PATIENCE_SECONDS)
        self.event.clear()


@pytest.fixture
def client(own_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A plain client of a private server, whose other clients it may disconnect."""
    found = redis.Redis.from_url(own_redis.url, protocol=2)
    yield found
    found.close()


@pytest.fixture
def start(own_redis: EmbeddedRedis, own_keys: None) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def build() -> Started:
        made.append(Started())
        return made[-1]

    yield build
    for each in made:
        each.listener.stop()


def test_a_new_queue_name_wakes_the_worker(start: Any) -> None:
    """A worker that serves all queues learns of it at once, and once."""
    started = start()
    assert not started.listener.take_new_names()
    Broker().register_queue("b")
    assert started.event.wait(PATIENCE_SECONDS)
    assert [started.listener.take_new_names() for _ in range(2)] == [True, False]
    started.event.clear()
    Broker.forget_registered()
    Broker().register_queue("b")
    announce_pause()
    assert started.event.wait(PATIENCE_SECONDS)
    assert not started.listener.take_new_names()
    assert [started.listener.take_new_pauses() for _ in range(2)] == [True, False]


def test_the_listener_makes_its_own_event(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """When it is given none."""
    listener = WorkerListener()
    assert isinstance(listener.event, threading.Event)
    listener.start()
    assert listener.event.wait(PATIENCE_SECONDS)
    listener.stop()


def test_stop_stops_the_thread_at_once(start: Any) -> None:
    """Though it blocks on the channel."""
    started = start()
    begun = time.monotonic()
    started.listener.stop()
    assert time.monotonic() - begun < 2
    assert "listener" not in [thread.name for thread in threading.enumerate()]
    started.listener.stop()


def test_an_outage_is_logged_once_and_survived(
    start: Any, client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when Redis is lost and one when it is back; what is announced afterwards wakes."""
    monkeypatch.setattr(waits.clients, "LONGEST_PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger="django_asyncq.broker")
    started = start()

    class Unreachable:
        """A client of a stopped server."""

        def __getattr__(self, name: str) -> Any:
            raise redis.ConnectionError("unreachable")

    attempts: list[str] = []

    def unreachable(role: str) -> Unreachable:
        attempts.append(role)
        return Unreachable()

    with monkeypatch.context() as outage:
        outage.setattr(waits.clients, "client", unreachable)
        client.client_kill_filter(_type="pubsub", skipme=True)
        until(lambda: len(attempts) > 4)
        assert not started.event.is_set()
    assert started.event.wait(PATIENCE_SECONDS)
    words = [record.getMessage().split(" ")[:3] for record in caplog.records if record.name == "django_asyncq.broker"]
    assert [" ".join(each[:2]) for each in words] == ["cannot listen", "listening to"]
    started.event.clear()
    announce_pause()
    assert started.event.wait(PATIENCE_SECONDS)


def test_cancelled_task_is_heard_of_and_wakes_nobody(own_redis: EmbeddedRedis, own_keys: None, key_prefix: str) -> None:
    """Whatever was sent is passed on as text; the thread that waits for work sleeps on."""
    heard: list[str] = []
    event = threading.Event()
    listener = WorkerListener(event, on_cancel=heard.extend)
    listener.start()
    assert event.wait(PATIENCE_SECONDS)
    event.clear()
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    for message in (b"an id", b"", b"\xff\x00", b"x" * 100_000):
        client.publish(f"{key_prefix}:cancel", message)
    until(lambda: len(heard) == 4)
    listener.stop()
    client.close()
    assert heard[:2] == ["an id", ""]
    assert not event.is_set()
