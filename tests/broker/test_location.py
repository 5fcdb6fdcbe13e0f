"""However the settings name Redis, by address or by an alias of one of two backends, the client is the same."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.sentinel
from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.management import call_command
from django.core.management.base import CommandError

from django_asyncq import checks
from django_asyncq.broker import Broker, clients
from django_asyncq.exceptions import BrokerMisconfigured, BrokerUnavailable
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.testing.redis_server import free_port

from .. import acl, tasks
from ..redis_settings import POOL, SECRET, cache, django_cache, named
from ..topologies import cluster

pytestmark = pytest.mark.django_db(transaction=True)

QUOTED = SECRET.replace("/", "%2F")
WAYS = {
    "address": named,
    "list": lambda url: named([url, "redis://10.0.0.9:6379/7"]),
    "django-redis": lambda url: (cache(url), {}),
    "django": lambda url: (django_cache(url), {}),
}
every_way = pytest.mark.parametrize("way", sorted(WAYS))


def use(settings: Any, caches: dict[str, Any], asyncq: dict[str, Any]) -> None:
    """Set CACHES, and ASYNCQ beside the keys of the suite."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "CLIENT_FACTORY": "", **asyncq}
    settings.CACHES = caches


# (address, what a connection has of it, how errors name the server)
ADDRESSES: list[tuple[str, dict[str, Any], str]] = [
    ("redis://", {"host": None, "db": None}, "Redis at localhost:6379/0"),
    ("redis://localhost", {"host": "localhost", "port": None, "db": None}, "Redis at localhost:6379/0"),
    ("redis://10.0.0.1:6380/3", {"host": "10.0.0.1", "port": 6380, "db": 3}, "Redis at 10.0.0.1:6380/3"),
    ("redis://10.0.0.1?db=3&socket_keepalive=true", {"db": 3, "socket_keepalive": True}, "Redis at 10.0.0.1:6379/3"),
    (f"redis://ann:{QUOTED}@h:1/2", {"username": "ann", "password": SECRET}, "Redis at h:1/2"),
    (f"redis://:{QUOTED}@h", {"username": None, "password": SECRET}, "Redis at h:6379/0"),
    (f"redis://h/1?username=ann&password={QUOTED}", {"username": "ann", "password": SECRET}, "Redis at h:6379/1"),
    ("redis://[::1]:6379/1", {"host": "::1", "port": 6379}, "Redis at [::1]:6379/1"),
    ("rediss://h:6380/1?ssl_cert_reqs=none", {"host": "h", "ssl_cert_reqs": "none"}, "Redis at h:6380/1"),
    (f"unix://:{QUOTED}@/run/redis.sock?db=3", {"path": "/run/redis.sock", "db": 3}, "Redis at /run/redis.sock/3"),
    (
        "redis://h?protocol=3&socket_timeout=90&socket_connect_timeout=90&retry_on_timeout=true&max_connections=1",
        {"protocol": 2},
        "Redis at h:6379/0",
    ),
]


@every_way
@pytest.mark.parametrize(("url", "has", "server"), ADDRESSES, ids=[address[0][:30] for address in ADDRESSES])
@pytest.mark.parametrize("role", ["producer", "worker", "blocking"])
def test_every_way_of_naming_redis_gives_the_same_connections(
    way: str, url: str, has: dict[str, Any], server: str, role: clients.Role, settings: Any
) -> None:
    """Address and credentials are those of the first address; time-outs, protocol and retries those of the role."""
    use(settings, *WAYS[way](url))
    found = clients.client(role)
    options = found.connection_pool.connection_kwargs
    assert {name: options.get(name) for name in has} == has
    ours = clients.connection_options(role)
    assert {name: options[name] for name in ours if name != "retry"} == {
        name: value for name, value in ours.items() if name != "retry"
    }
    assert options["retry"].get_retries() == 0
    assert found.connection_pool.max_connections == clients.MOST_CONNECTIONS
    assert clients.server_name(found) == server
    kinds = {"rediss": redis.SSLConnection, "unix": redis.UnixDomainSocketConnection, "redis": redis.Connection}
    assert found.connection_pool.connection_class is kinds[url.partition(":")[0]]


def test_client_of_sentinels_without_a_host_is_not_called_local() -> None:
    """Its server is known only when a sentinel has been asked."""
    found = redis.sentinel.Sentinel([("10.0.0.1", 26379)]).master_for("main")
    assert clients.server_name(found) == "Redis"
    assert clients.server_name(redis.Redis(connection_pool=redis.ConnectionPool())) == "Redis at localhost:6379/0"


SAME = [
    [
        named("redis://ann:one@10.0.0.1:6379/3"),
        named(["redis://10.0.0.1/3", "redis://10.0.0.2/3"]),
        named("rediss://10.0.0.1?db=3"),
        (cache("redis://10.0.0.1/3"), {}),
        (cache("redis://10.0.0.1", **{POOL: {"db": 3}}), {}),
        (cache("redis://", **{POOL: {"host": "10.0.0.1", "db": 3}}), {}),
        (django_cache("redis://10.0.0.1", db=3, password=SECRET), {}),
        (django_cache(["redis://10.0.0.1:6379/3"], db=5), {}),
        ({"queues": django_cache("redis://10.0.0.1/3")["default"]}, {"REDIS": "queues"}),
    ],
    [named("unix:///run/redis.sock"), (django_cache("unix:///run/redis.sock?db=0"), {})],
    [named("redis://[::1]"), (cache("redis://[::1]:6379/0"), {})],
    [named("redis://"), named("redis://localhost:6379/0"), (django_cache("redis://localhost"), {})],
]


@pytest.mark.parametrize("ways", SAME, ids=range(len(SAME)))
def test_one_redis_has_one_identity_however_it_is_named(ways: list[Any], settings: Any) -> None:
    """Processes that name it differently share their locks; no user name or password is in the text."""
    seen = set()
    for way in ways:
        use(settings, *way)
        seen.add(clients.server_identity())
    assert len(seen) == 1
    assert not [part for part in ("ann", "one", "s3cret") if part in min(seen)]


@every_way
def test_task_runs_with_each_way_of_naming_a_server_that_has_a_password(way: str, settings: Any) -> None:
    """A row is pushed and the queue read with the password; a wrong one is named with the setting, never shown."""
    with EmbeddedRedis() as server:
        redis.Redis(port=server.port).config_set("requirepass", SECRET)
        use(settings, *WAYS[way](f"redis://:{QUOTED}@127.0.0.1:{server.port}/2"))
        result = tasks.add.enqueue(1, 2)
        assert TaskRecord.objects.get(id=result.id).state == TaskState.QUEUED
        assert Broker("worker").eviction_policy() == "noeviction"
        assert redis.Redis(port=server.port, db=2, password=SECRET).keys("*:pending")
        use(settings, *WAYS[way](f"redis://:wr0ng@127.0.0.1:{server.port}/2"))
        with pytest.raises(BrokerMisconfigured) as raised:
            Broker("worker").eviction_policy()
        message = str(raised.value)
        assert message.startswith(f"Redis at 127.0.0.1:{server.port}/2 refuses the user name or password")
        assert "wr0ng" not in message
        setting = "CACHES['default']" if "django" in way else "ASYNCQ['REDIS']"
        assert f"{setting}." in message, message
        with pytest.raises(CommandError, match="refuses the user name or password"):
            call_command("runworkers", burst=True)


@every_way
def test_unreachable_server_is_named_and_the_password_is_masked(way: str, settings: Any) -> None:
    """Host, port and database are in the message, in whichever way they were written."""
    free = free_port()
    use(settings, *WAYS[way](f"redis://ann:{QUOTED}@127.0.0.1:{free}"))
    with pytest.raises(BrokerUnavailable, match=rf"^Redis at 127\.0\.0\.1:{free}/0 is unreachable \(ConnectionError"):
        Broker("producer").eviction_policy()
    for secret in (SECRET, QUOTED, "ann"):
        assert clients.safe_text(ValueError(f"no way to reach {secret}")).endswith("reach ***")


def test_tls_on_one_side_only_names_the_setting_with_the_address(redis_client: redis.Redis, settings: Any) -> None:
    """The remedy names what the project has written."""
    port = redis_client.connection_pool.connection_kwargs["port"]
    use(settings, *named(f"rediss://127.0.0.1:{port}/0"))
    with pytest.raises(CommandError, match=r"correct the scheme in ASYNCQ\['REDIS'\]: write redis://"):
        call_command("runworkers", burst=True)


@pytest.mark.parametrize("kind", ["address", "django"])
def test_cluster_may_be_named_by_its_addresses(kind: str, settings: Any) -> None:
    """The factory for a cluster takes the nodes from wherever the settings have them."""
    with cluster() as nodes:
        urls = [node.url for node in nodes.nodes]
        found = named(urls) if kind == "address" else (django_cache(urls, db=0), {})
        use(settings, found[0], {**found[1], "CLIENT_FACTORY": clients.CLUSTER_FACTORY})
        assert list(checks.check_redis_alias()) == []
        tasks.add.enqueue(1, 2)
        assert Broker("worker").eviction_policy() == "noeviction"
        first, second = clients.server_identity(), named(urls[::-1])
        use(settings, second[0], {**second[1], "CLIENT_FACTORY": clients.CLUSTER_FACTORY})
        assert clients.server_identity() == first


def test_own_client_leaves_the_cache_of_django_as_it_is(settings: Any) -> None:
    """The cache keeps its own pool and options, on the same server."""
    with EmbeddedRedis(*acl.server_settings()) as server:
        use(settings, django_cache(acl.package_url(server.url), socket_timeout=7), {})
        assert Broker("worker").eviction_policy() == "noeviction"
        options = caches["default"]._cache.get_client(write=True).connection_pool.connection_kwargs
        assert options["socket_timeout"] == 7
        assert clients.client("worker").connection_pool.connection_kwargs["socket_timeout"] == 5.0


@pytest.mark.parametrize("value", [{"url": "redis://:s3cret@h"}, 7, None, b"redis://:s3cret@h"])
def test_value_that_is_neither_address_nor_alias_is_not_shown(value: Any, settings: Any) -> None:
    """It may have a password in it, so the message names its type only."""
    use(settings, {}, {"REDIS": value})
    (found,) = checks.check_settings()
    assert (found.id, found.msg) == ("asyncq.E101", f"ASYNCQ['REDIS'] is a {type(value).__qualname__}.")
    assert list(checks.check_redis_alias()) == []
