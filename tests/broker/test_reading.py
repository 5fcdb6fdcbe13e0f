"""Readers: what several need is sent together, and each gets what it would get alone."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_asyncq.broker import clients, keys, servers
from django_asyncq.broker.reading import Command, Reader, asking, read, side_by_side
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.testing import EmbeddedRedis

from ..proxy import Proxy


def steps(key: str, count: int, seen: list[str]) -> Reader[list[Any]]:
    """Ask for one key so many times."""
    found = []
    for _ in range(count):
        (reply,) = yield [Command("get", [key])]
        seen.append(key)
        found.append(reply)
    return found


class Plain:
    """A client that is no `redis.Redis`, as one for a cluster: its commands are sent one by one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        assert name != "pipeline"
        return getattr(self._client, name)


@pytest.fixture(params=["together", "one by one"])
def client(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client of producers, and a plain variant."""
    found = clients.client("producer")
    if request.param != "together":
        monkeypatch.setattr(clients, "client", lambda *arguments: Plain(found))
    return found


def test_readers_go_on_beside_each_other(client: Any, key_prefix: str) -> None:
    """Each gets its own replies, as many steps as it takes; one that asks for nothing has no step."""
    one, two = f"{key_prefix}:one", f"{key_prefix}:two"
    client.mset({one: 1, two: 2})
    seen: list[str] = []
    inner = side_by_side(steps(two, 2, seen), asking())
    assert read("producer", side_by_side(steps(one, 3, seen), inner, asking(), steps(one, 1, seen))) == [
        [b"1"] * 3,
        [[b"2"] * 2, []],
        [],
        [b"1"],
    ]
    assert seen == [one, two, one, one, two, one]
    assert read("producer", side_by_side()) == []


def test_one_odd_key_does_not_spoil_the_others(client: Any, key_prefix: str) -> None:
    """Ours of a wrong type is set aside; one of another program is left alone, and nothing is known of it."""
    ours, theirs, good = (f"{key_prefix}:{name}" for name in ("ours", "theirs", "good"))
    client.mset({ours: "x", theirs: "y", good: "z"})
    found = read(
        "producer",
        asking(Command("smembers", [ours]), Command("llen", [theirs], may_fail=True), Command("get", [good])),
    )
    assert found == [set(), None, b"z"]
    assert client.get(theirs) == b"y" and not client.exists(ours)


def test_a_script_that_the_server_has_forgotten_is_sent(own_redis: EmbeddedRedis) -> None:
    """All of them at once, with the second round trip."""
    redis.Redis.from_url(own_redis.url).script_flush()
    commands = [Command("time", [keys.alive_key()])] * 3
    assert [len(reply) for reply in read("producer", asking(*commands, Command("get", ["x"])))[:3]] == [2, 2, 2]


def test_an_unreachable_redis_is_said(own_redis: EmbeddedRedis) -> None:
    """As for every other call."""
    own_redis.kill()
    with pytest.raises(BrokerUnavailable, match="unreachable"):
        servers.workers()


def test_a_silent_redis_is_given_up(redis_proxy: Proxy, settings: Any) -> None:
    """After the time of the role."""
    settings.ASYNCQ = {**settings.ASYNCQ, "REDIS": redis_proxy.url()}
    redis_proxy.hold()
    with pytest.raises(BrokerUnavailable, match="Timeout"):
        read("producer", asking(Command("get", ["x"])))
    redis_proxy.resume()
