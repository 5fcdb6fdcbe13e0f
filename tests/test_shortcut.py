"""Calls past redis-py's client: as safe as through it, and through it for whoever has put something around it."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError, ResponseError

from django_asyncq.broker import shortcut
from django_asyncq.testing import EmbeddedRedis

from .proxy import Proxy
from .workers import wait_until

ECHO = "return ARGV[1]"
# Until a reply that is held back is given up.
PATIENCE_SECONDS = 0.1


@pytest.fixture
def client(own_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A client of a server of its own, as `clients` makes them."""
    made = redis.Redis.from_url(own_redis.url, protocol=2, socket_timeout=5)
    yield made
    made.close()


@pytest.fixture
def proxy(own_redis: EmbeddedRedis) -> Iterator[Proxy]:
    """A relay before the same server, for clients whose replies are lost or held back."""
    with Proxy(("127.0.0.1", own_redis.port)) as made:
        yield made


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client on the other side of the relay."""
    made = redis.Redis.from_url(proxy.url(), protocol=2, socket_timeout=5)
    yield made
    made.close()


def load(client: redis.Redis, text: str = ECHO) -> str:
    digest: str = client.script_load(text)
    return digest


def names(client: redis.Redis) -> list[int]:
    """The ids of the connections that the server has."""
    return [int(each["id"]) for each in client.client_list()]


def kept(client: redis.Redis) -> list[Any]:
    found = shortcut._shortcuts[client]
    assert found is not None
    return found._idle


def test_reply_is_that_of_the_client(client: redis.Redis) -> None:
    """Whatever its kind, and whatever the words' kinds."""
    for text in ("return {KEYS[1], ARGV[1], ARGV[2]}", "return redis.call('GET', KEYS[1])", "return 7"):
        digest = load(client, text)
        assert shortcut.evalsha(client, digest, ["k"], [1.5, b"\xff\0"]) == client.evalsha(
            digest, 1, "k", 1.5, b"\xff\0"
        )


def test_calls_that_follow_each_other_use_one_connection(client: redis.Redis) -> None:
    """Kept between them, and the pool is asked once."""
    digest = load(client)
    before = set(names(client))
    for number in range(20):
        assert shortcut.evalsha(client, digest, [], [number]) == str(number).encode()
    assert len(set(names(client)) - before) == 1
    assert len(kept(client)) == 1


def test_error_of_a_script_leaves_the_connection_as_it_is(client: redis.Redis) -> None:
    """Its reply was read: the next call has its own."""
    with pytest.raises(NoScriptError):
        shortcut.evalsha(client, "0" * 40, [], [])
    connected = set(names(client))
    with pytest.raises(ResponseError, match="unknown"):
        shortcut.evalsha(client, load(client, "return redis.error_reply('ERR unknown')"), [], [])
    assert shortcut.evalsha(client, load(client), [], ["next"]) == b"next"
    assert set(names(client)) == connected


def test_connection_that_was_closed_while_nobody_used_it_is_not_noticed(client: redis.Redis) -> None:
    """By the server's `timeout`, by a restart, by a firewall that says so."""
    digest = load(client)
    shortcut.evalsha(client, digest, [], ["one"])
    client.client_kill_filter(_type="normal", skipme=True)
    assert shortcut.evalsha(client, digest, [], ["two"]) == b"two"


def test_socket_that_is_more_than_one_is_looked_at_by_redis_py(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as TLS: what was decrypted already is not to be seen from outside. A plain one is looked at here."""

    class Other(socket.socket):
        pass

    asked: list[Any] = []
    real = redis.Connection.can_read
    monkeypatch.setattr(redis.Connection, "can_read", lambda self, *args: (asked.append(self), real(self, *args))[1])
    digest = load(client)
    shortcut.evalsha(client, digest, [], ["one"])
    (connection,) = kept(client)
    asked.clear()  # the pool has looked, too, when it lent the connection
    shortcut.renew(connection)
    assert not asked
    plain = connection._sock
    connection._sock = connection._parser._sock = Other(fileno=plain.detach())
    shortcut.renew(connection)
    assert asked == [connection]
    client.client_kill_filter(_type="normal", skipme=True)
    assert shortcut.evalsha(client, digest, [], ["two"]) == b"two"


def test_lost_reply_is_an_error_and_nobody_elses_reply(client: redis.Redis, through: redis.Redis, proxy: Proxy) -> None:
    """Once: the next call connects anew."""
    digest = load(client)
    shortcut.evalsha(through, digest, [], ["one"])
    proxy.drop = 1
    with pytest.raises(redis.ConnectionError):
        shortcut.evalsha(through, digest, [], ["two"])
    assert shortcut.evalsha(through, digest, [], ["three"]) == b"three"


def test_server_that_is_away_is_looked_for_once_a_call(
    client: redis.Redis, own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for one time-out, not for two; and what cannot be reached is not kept."""
    digest, looked_for = load(client), list[int]()
    shortcut.evalsha(client, digest, [], ["there"])
    own_redis.stop()
    real = redis.Connection._connect
    monkeypatch.setattr(redis.Connection, "_connect", lambda self: (looked_for.append(1), real(self))[1])
    for calls in (1, 2, 3):
        with pytest.raises(redis.ConnectionError):
            shortcut.evalsha(client, digest, [], ["away"])
        assert len(looked_for) == calls
    assert kept(client) == []
    assert not client.connection_pool._in_use_connections


def test_silent_server_is_a_time_out_and_its_late_reply_is_nobodys(client: redis.Redis, proxy: Proxy) -> None:
    """The connection on which it would come is closed."""
    impatient = redis.Redis.from_url(proxy.url(), protocol=2, socket_timeout=PATIENCE_SECONDS)
    digest = load(client)
    shortcut.evalsha(impatient, digest, [], ["in time"])
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        shortcut.evalsha(impatient, digest, [], ["late"])
    proxy.resume()
    assert shortcut.evalsha(impatient, digest, [], ["own"]) == b"own"
    impatient.close()


class Stopped(BaseException):
    """What a signal handler may raise anywhere, as Ctrl-C does."""


def stop() -> None:
    raise Stopped


class on_alarm:
    """Has a function called by a signal's handler, while the next reply is held back."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, lambda number, frame: self.function())
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)

    def __exit__(self, *caught: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def test_reply_that_nobody_waited_for_is_nobodys(client: redis.Redis, through: redis.Redis, proxy: Proxy) -> None:
    """A signal's handler raised between a command and its reply."""
    digest = load(client)
    shortcut.evalsha(through, digest, [], ["in time"])
    proxy.hold()
    with on_alarm(stop), pytest.raises(Stopped):
        shortcut.evalsha(through, digest, [], ["late"])
    proxy.resume()
    assert shortcut.evalsha(through, digest, [], ["own"]) == b"own"


def test_reply_is_nobodys_that_was_not_even_waited_for(
    client: redis.Redis, through: redis.Redis, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raised right after the command was sent, and the reply comes after the next command."""
    digest = load(client)
    shortcut.evalsha(through, digest, [], ["in time"])
    (connection,) = kept(through)
    proxy.hold()
    with monkeypatch.context() as patched:
        patched.setattr(connection, "read_response", stop)
        with pytest.raises(Stopped):
            shortcut.evalsha(through, digest, [], ["late"])
    with on_alarm(proxy.resume):
        assert shortcut.evalsha(through, digest, [], ["own"]) == b"own"


def test_handler_that_calls_in_the_middle_of_a_call_has_a_connection_of_its_own(
    client: redis.Redis, through: redis.Redis, proxy: Proxy
) -> None:
    """So that neither gets the other's reply."""
    digest, replies = load(client), []

    def call() -> None:
        proxy.resume()
        replies.append(shortcut.evalsha(through, digest, [], ["inner"]))

    shortcut.evalsha(through, digest, [], ["in time"])
    proxy.hold()
    with on_alarm(call):
        replies.append(shortcut.evalsha(through, digest, [], ["outer"]))
    assert replies == [b"inner", b"outer"]
    assert len(kept(through)) == 2


def test_threads_get_their_own_replies(client: redis.Redis) -> None:
    """And no more connections are opened than threads call at once."""
    digest, wrong = load(client), []

    def call(thread: int) -> None:
        for number in range(200):
            word = f"{thread}-{number}".encode()
            if shortcut.evalsha(client, digest, [], [word]) != word:
                wrong.append(word)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert 1 <= len(kept(client)) <= 8
    assert len(set(map(id, kept(client)))) == len(kept(client))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_of_a_fork_has_connections_of_its_own(client: redis.Redis) -> None:
    """What its parent keeps stays its parent's, which goes on with it."""
    digest = load(client)
    shortcut.evalsha(client, digest, [], ["parent"])
    mine = set(names(client))
    child = os.fork()
    if child == 0:
        try:
            for number in range(50):
                assert shortcut.evalsha(client, digest, [], [f"child-{number}"]) == f"child-{number}".encode()
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    for number in range(50):
        assert shortcut.evalsha(client, digest, [], [f"parent-{number}"]) == f"parent-{number}".encode()
    assert os.waitpid(child, 0)[1] == 0
    wait_until(lambda: set(names(client)) == mine, "the child's are closed, the parent's are not")


def test_idle_connections_are_dropped_with_the_pools(client: redis.Redis, through: redis.Redis) -> None:
    """As when a server says that it has become a replica: the next call looks for the primary anew."""
    digest, before = load(client), set(names(client))
    shortcut.evalsha(through, digest, [], ["one"])
    (opened,) = set(names(client)) - before
    shortcut.drop_idle(through)
    assert kept(through) == []
    assert not through.connection_pool._in_use_connections
    wait_until(lambda: opened not in names(client), "it is closed")
    assert shortcut.evalsha(through, digest, [], ["two"]) == b"two"


# --- who has put something around the client


def around(function: Any, seen: list[str], *, looks_alike: bool) -> Any:
    """What a tracing tool puts in a method's place; with `functools.wraps` it has its module's name."""

    def traced(self: Any, *words: Any, **options: Any) -> Any:
        seen.append(str(words[0]))
        return function(self, *words, **options)

    return functools.wraps(function)(traced) if looks_alike else traced


@pytest.mark.parametrize("looks_alike", [True, False])
@pytest.mark.parametrize("method", ["execute_command", "evalsha"])
def test_tracing_tool_sees_each_call(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, method: str, looks_alike: bool
) -> None:
    """Whichever method it has put itself around, and whether calls had been made before."""
    digest, seen = load(client), list[str]()
    shortcut.evalsha(client, digest, [], ["untraced"])
    with monkeypatch.context() as patched:
        patched.setattr(redis.Redis, method, around(getattr(redis.Redis, method), seen, looks_alike=looks_alike))
        assert shortcut.evalsha(client, digest, [], ["traced"]) == b"traced"
    assert len(seen) == 1
    assert shortcut.evalsha(client, digest, [], ["untraced"]) == b"untraced"
    assert len(seen) == 1


def test_tool_around_one_client_sees_its_calls(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put on the object, not on its class."""
    digest, seen = load(client), list[Any]()
    real = client.execute_command
    monkeypatch.setattr(client, "execute_command", lambda *words, **options: (seen.append(words), real(*words))[1])
    assert shortcut.evalsha(client, digest, [], ["traced"]) == b"traced"
    assert len(seen) == 1


def test_connection_that_sends_in_its_own_way_sends_each_command(own_redis: EmbeddedRedis) -> None:
    """One that the project made, or a tool around `send_command`: with hiredis or without."""
    sent: list[Any] = []

    class Own(redis.Connection):
        def send_command(self, *words: Any, **options: Any) -> None:
            sent.append(words[0])
            super().send_command(*words, **options)

    pool = redis.ConnectionPool.from_url(own_redis.url, connection_class=Own, protocol=2, socket_timeout=5)
    with redis.Redis(connection_pool=pool) as client:
        digest = load(client)
        sent.clear()
        for number in range(3):
            assert shortcut.evalsha(client, digest, [], [number]) == str(number).encode()
        assert sent == ["EVALSHA"] * 3
    pool.disconnect()


def test_client_of_ones_own_is_asked_itself(own_redis: EmbeddedRedis) -> None:
    """A class that does more than redis-py's, one without a pool, one that has a single connection."""

    class Counting(redis.Redis):
        calls = 0

        def execute_command(self, *words: Any, **options: Any) -> Any:
            Counting.calls += 1
            return super().execute_command(*words, **options)

    class Stub:
        __slots__ = ()

        def evalsha(self, *words: Any) -> Any:
            return words

    counting = Counting.from_url(own_redis.url, protocol=2)
    digest = load(counting)
    before = Counting.calls
    assert shortcut.evalsha(counting, digest, [], ["x"]) == b"x"
    assert Counting.calls == before + 1
    assert shortcut.evalsha(Stub(), "d", ["k"], ["x"]) == ("d", 1, "k", "x")
    single = redis.Redis.from_url(own_redis.url, protocol=2, single_connection_client=True)
    assert shortcut.evalsha(single, digest, [], ["x"]) == b"x"
    assert shortcut._shortcuts[single] is None
    for each in (counting, single):
        each.close()


def test_client_whose_tokens_are_renewed_is_asked_itself(own_redis: EmbeddedRedis) -> None:
    """Its pool renews them when a connection comes back."""
    provider = redis.UsernamePasswordCredentialProvider(username="default", password="")
    renewed = redis.Redis.from_url(own_redis.url, protocol=2, credential_provider=provider)
    assert not shortcut._may_be_passed(renewed)
    renewed.close()


def test_client_whose_times_are_taken_is_asked_itself(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py's own metrics are taken in the client."""
    assert shortcut._may_be_passed(client)
    monkeypatch.setattr(shortcut, "has_metrics", lambda: True)
    assert not shortcut._may_be_passed(client)
