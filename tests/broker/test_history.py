"""What a queue has processed, by the minute and by the day, as its workers counted it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry
from django_asyncq.broker.entries import Lease
from django_asyncq.broker.inspection import LONGEST, MINUTE, Day, History, Minute
from django_asyncq.broker.keys import QueueKeys, alive_key

from .. import acl

QUEUE, WORKER = "q", "w"


@pytest.fixture
def broker() -> Broker:
    """A broker whose Redis remembers everything."""
    found = Broker()
    found.mark_alive()
    return found


@pytest.fixture
def client(broker: Broker) -> redis.Redis:
    """A client that may read all keys."""
    return acl.unrestricted(broker.client)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """The time by Redis's clock, later than the mark of the server; a test sets its one item."""
    moment = [(datetime.now(UTC) + timedelta(hours=1)).replace(minute=58, second=30, microsecond=0)]

    def reading_seconds(*_: str) -> Iterator[Any]:
        yield from ()
        return moment[0].timestamp()

    monkeypatch.setattr("django_asyncq.broker.redis_clock.seconds", lambda *_: moment[0].timestamp())
    monkeypatch.setattr("django_asyncq.broker.redis_clock.reading_seconds", reading_seconds)
    return moment


def leased(broker: Broker, *ids: str) -> list[Lease]:
    """Leases of new tasks."""
    broker.enqueue(QUEUE, [Entry(id, b"m") for id in ids])
    return broker.dequeue(QUEUE, WORKER, len(ids), 30).leases


def test_each_minute_counts_what_was_acknowledged_in_it(broker: Broker, at: list[datetime]) -> None:
    """Across an hour; failed attempts are processed too, as asynq counts them."""
    first = at[0].replace(second=0)
    leases = leased(broker, *"abcdef")
    broker.done(QUEUE, WORKER, leases[:2])
    at[0] += MINUTE
    broker.retry(QUEUE, WORKER, [(leases[2], b"m", 5)])
    broker.archive(QUEUE, WORKER, [(leases[3], b"")])
    broker.retry(QUEUE, WORKER, [(leases[4], b"m", 5)], counted=False)
    at[0] += 2 * MINUTE
    broker.done(QUEUE, WORKER, [leases[5], leases[5]])
    numbers = [(2, 0), (2, 2), (0, 0), (1, 0)]
    expected = [Minute(first + number * MINUTE, *each) for number, each in enumerate(numbers)]
    assert History().minutes(QUEUE, first + timedelta(seconds=20)) == expected
    assert History().minutes(QUEUE, first + 3 * MINUTE) == expected[3:]


def test_the_counters_of_an_hour_last_eight_days(broker: Broker, client: redis.Redis, at: list[datetime]) -> None:
    """From its last new minute on; no longer time can be asked for."""
    broker.done(QUEUE, WORKER, leased(broker, "a"))
    key = QueueKeys(QUEUE).minutes(f"{at[0]:%Y-%m-%dT%H}")
    assert client.hgetall(key) == {f"p{at[0]:%M}".encode(): b"1"}
    assert client.expiretime(key) == int(at[0].timestamp()) + 8 * 86_400
    minutes = History().minutes(QUEUE, at[0] - timedelta(days=100))
    assert len(minutes) == LONGEST / MINUTE + 1
    assert (minutes[-1].processed, minutes[0].processed) == (1, None)


def test_what_redis_has_forgotten_is_a_gap(broker: Broker, client: redis.Redis, at: list[datetime]) -> None:
    """From the minute on in which Redis was marked as alive, nothing counted means that nothing was done."""
    client.set(alive_key(), int(at[0].timestamp()) - 60)
    since = at[0] - 3 * MINUTE
    shown = [each[1:] for each in History().minutes(QUEUE, since)]
    assert shown == [(None, None), (None, None), (0, 0), (0, 0)]
    client.delete(alive_key())
    assert [each[1:] for each in History().minutes(QUEUE, since)] == [(None, None)] * 4


@pytest.mark.parametrize("minutes", [1, 15, 60])
def test_parts_of_an_hour_are_the_sums_of_its_minutes(
    broker: Broker, client: redis.Redis, at: list[datetime], minutes: int
) -> None:
    """Across hours, with what is not known, and with the odd values of another program."""
    client.set(alive_key(), int(at[0].timestamp()) - 45 * 60)
    for ago in range(0, 130, 7):
        moment = at[0] - ago * MINUTE
        odd = {"x1": "5", "p61": "5", "p1x": "5", f"f{ago % 60}": "x"}
        client.hset(QueueKeys(QUEUE).minutes(f"{moment:%Y-%m-%dT%H}"), mapping={f"p{moment.minute}": ago + 1, **odd})
    since = at[0].replace(minute=0) - 2 * 60 * MINUTE
    found = History().parts(QUEUE, since, at[0], minutes)
    sums: dict[datetime, list[int]] = {}
    for each in History().minutes(QUEUE, since):
        part = sums.setdefault(each.at - each.at.minute % minutes * MINUTE, [])
        part += [] if each.processed is None else [each.processed]
    assert {each.at: each.processed for each in found} == {
        start: sum(counts) if counts else None for start, counts in sums.items()
    }
    assert all((each.failed is None) == (each.processed is None) for each in found)
    client.delete(QueueKeys(QUEUE).minutes(f"{at[0]:%Y-%m-%dT%H}"))
    client.set(QueueKeys(QUEUE).minutes(f"{at[0]:%Y-%m-%dT%H}"), "a text")
    assert History().parts(QUEUE, at[0], at[0], minutes)[-1].processed == 0


def test_hours_that_are_over_are_read_once(broker: Broker, client: redis.Redis, at: list[datetime]) -> None:
    """The one that is not over, one that ended a moment ago, and one without counts are read each time."""
    hours = [at[0].replace(minute=0, second=0) - ago * timedelta(hours=1) for ago in (0, 1, 2)]
    at[0] = hours[0] + timedelta(seconds=90)
    names = [QueueKeys(QUEUE).minutes(f"{hour:%Y-%m-%dT%H}") for hour in hours]

    def counted() -> list[int | None]:
        return [each.processed for each in History().parts(QUEUE, hours[-1], at[0], 60)][::-1]

    client.set(alive_key(), 1)
    assert counted() == [0, 0, 0]
    for round in (1, 2):
        for name in names:
            client.hset(name, "p0", round)
        assert counted() == [round, round, 1]


def test_odd_values_are_skipped(broker: Broker, client: redis.Redis, at: list[datetime]) -> None:
    """What another program has written is no count; a new count sets it aside."""
    key = QueueKeys(QUEUE).minutes(f"{at[0]:%Y-%m-%dT%H}")
    odd = {"p58": "x", "p57": "5", "p99": "1", "pp": "1", "\udcff".encode("utf-8", "surrogateescape"): "1", "": "1"}
    client.hset(key, mapping=odd)
    assert [each.processed for each in History().minutes(QUEUE, at[0] - MINUTE)] == [5, 0]
    broker.done(QUEUE, WORKER, leased(broker, "a"))
    assert client.hgetall(key) == {b"p58": b"1"}
    client.delete(key)
    client.set(key, "a text")
    assert [each.processed for each in History().minutes(QUEUE, at[0])] == [0]


def test_days_are_those_of_asynq(broker: Broker, client: redis.Redis, at: list[datetime]) -> None:
    """Another server's counts are among them."""
    today = at[0].date()
    keys = QueueKeys(QUEUE)
    client.set(keys.processed_on(str(today - timedelta(days=2))), 7)
    client.set(keys.failed_on(str(today - timedelta(days=2))), "odd")
    broker.archive(QUEUE, WORKER, [(lease, b"") for lease in leased(broker, "a")])
    days = [Day(today - timedelta(days=2), 7, 0), Day(today - timedelta(days=1), 0, 0), Day(today, 1, 1)]
    assert History().days(QUEUE, 3) == days
    assert len(History().days(QUEUE, 1000)) == 90
    assert History().days(QUEUE, 0) == []
