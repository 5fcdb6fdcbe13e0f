"""When a worker begins to wait for pushes, on a server of one's own, which may be away."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import select
import time
from collections.abc import Iterator

import pytest
import redis

from django_asyncq.broker.clients import LONGEST_PAUSE_SECONDS
from django_asyncq.broker.handoff import Handoff
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.fetch.waiting import Waiting
from django_asyncq.worker.wakeup import FD_SETSIZE, readable

from .clock import Clock

PATIENCE_SECONDS = 10.0


@pytest.fixture
def clock() -> Clock:
    """The time by which waits are due."""
    return Clock()


@pytest.fixture
def waiting(own_redis: EmbeddedRedis, own_keys: None, clock: Clock) -> Iterator[Waiting]:
    found = Waiting(Handoff("w-1", 60), clock)
    yield found
    found.standby.close()


def never() -> bool:
    return False


def test_a_queue_is_waited_for_after_its_rest(waiting: Waiting, clock: Clock) -> None:
    """Until then the process sleeps so long; what is waited for already is left alone."""
    assert waiting.pause_seconds() is None
    waiting.add(["a", "b"], rest_seconds=0.5)
    assert waiting.pause_seconds() == pytest.approx(0.5)
    assert waiting.begin(never) is None
    assert not waiting.standby.sockets
    clock.now += 0.6
    assert waiting.pause_seconds() == 0
    assert waiting.begin(never) is None
    sockets = waiting.standby.sockets
    assert sorted(sockets.values()) == ["a", "b"]
    assert waiting.pause_seconds() is None
    waiting.add(["a"], rest_seconds=0.0)
    assert waiting.begin(never) is None
    assert waiting.standby.sockets == sockets


def test_it_is_asked_whether_it_may_stand_by_when_that_matters(waiting: Waiting) -> None:
    """When a wait begins, and as long as there are waits for which nothing would be handed."""
    asked: list[bool] = []

    def may_stand_by() -> bool:
        asked.append(len(asked) > 0)
        return asked[-1]

    waiting.begin(may_stand_by)
    assert asked == []
    waiting.add(["a"], rest_seconds=0.0)
    for _ in range(3):
        waiting.begin(may_stand_by)
    assert asked == [False, True]
    assert not waiting.standby.could_stand_by


def test_an_outage_is_told_once_and_survived(
    waiting: Waiting, own_redis: EmbeddedRedis, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when waits fail again, one when a push is heard; all waits that end at once are one failure."""
    caplog.set_level(logging.INFO, logger="django_asyncq.worker")
    waiting.add(["a", "b"], rest_seconds=0.0)
    assert waiting.begin(never) is None
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.client_kill_filter(_type="normal", skipme=True)
        for queue in ("a", "b"):
            with pytest.raises(BrokerUnavailable):
                waiting.hear(queue)
    assert waiting.failures == 1
    own_redis.kill()
    waiting.add(["a", "b"], rest_seconds=0.0)
    for failures in range(2, 8):
        assert waiting.begin(never) is None
        assert 0 < (waiting.pause_seconds() or 0) <= LONGEST_PAUSE_SECONDS
        clock.now += LONGEST_PAUSE_SECONDS
        waiting.begin(never)
        assert waiting.failures == failures
        assert not waiting.standby.sockets
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    own_redis.restart()
    clock.now += LONGEST_PAUSE_SECONDS
    assert waiting.begin(never) is None
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        client.lpush(QueueKeys("a").pending, "id")
    assert select.select(list(waiting.standby.sockets), [], [], PATIENCE_SECONDS)[0]
    heard = waiting.hear("a")
    assert heard is not None
    assert heard.is_told
    assert waiting.failures == 0
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_sockets_of_any_number_can_be_slept_on() -> None:
    """`select` cannot look at numbers above 1,023, which a process has that has opened so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= FD_SETSIZE + 10:
        pytest.skip("this system allows no such number")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FD_SETSIZE + 10), hard))
    read, write = os.pipe()
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD, FD_SETSIZE)
        begun = time.monotonic()
        assert readable([high], 0.05) == []
        assert time.monotonic() - begun >= 0.04
        os.write(write, b"x")
        assert readable([high, read], PATIENCE_SECONDS) == [high, read]
        assert readable([read], None) == [read]
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
