"""Build the Redis clients from what the settings say, one per role; no other module builds one.

The pools are private: django-redis caches pools by URL alone, so ours would get the cache's options. No client
repeats a command by itself. RESP2, because with the default of redis-py 8 a connection is not checked for unread
replies before it is lent.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .. import conf
from ..exceptions import BrokerMisconfigured, BrokerPermissionDenied, BrokerUnavailable
from . import configuration, redis_py
from .location import Kind, identity, location, place
from .redis_internals import set_connection_options, unconnected
from .server_of_tests import require_server_of_tests

Client = Any  # redis.Redis or redis.cluster.RedisCluster, or what is used like one of them
Role = Literal["producer", "worker", "blocking"]

BLOCK_SECONDS = 5
# (connect, read) seconds. A web request waits for the producer's; a blocking move needs longer than its own time-out.
TIMEOUTS: dict[Role, tuple[float, float]] = {
    "producer": (0.25, 0.5),
    "worker": (1.0, 5.0),
    "blocking": (1.0, BLOCK_SECONDS + 5.0),
}
LONGEST_PAUSE_SECONDS = 5.0
# Threads hold connections, not tasks; an exhausted pool would make an enqueue fail without need.
MOST_CONNECTIONS = 1000
# The words with which Redis refuses to write now; for a caller it is then as good as unreachable.
REFUSALS = (
    "OOM",
    "MISCONF",
    "READONLY",
    "LOADING",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "BUSY",
    "NOREPLICAS",
    "TRYAGAIN",
    "UNBLOCKED",
)
# Has no class in redis-py: a node of a cluster that has no connection left.
NO_CONNECTION_LEFT = "max number of clients"
# The same for a user without a right: of Redis 7 and Valkey, and of Redis 6.2, when a script's command is refused.
DENIED, RIGHTS = "refuses a command to its user", "the rights of the user in Redis: docs/guides/redis.md lists them"
DENIALS = ("ACL failure in script", "The user executing the script can't")

_clients: dict[tuple[Role, str, str], Client] = {}
# The settings that `require_valid_settings` has found to be right.
_valid_settings: conf.Settings | None = None
_lock = threading.Lock()


def client(role: Role) -> Client:
    """Return this process's client for a role; it is thread-safe, and its pool reconnects after a fork.

    Raises: ImproperlyConfigured when the settings cannot be right; RedisNotForTests in a test run; BrokerUnavailable
    when no node of a cluster answers.
    """
    configured = conf.current()
    key = (role, str(configured.redis), configured.client_factory)
    found = _clients.get(key)
    if found is None:
        with _lock:
            found = _clients.get(key)
            if found is None:
                require_valid_settings()
                require_server_of_tests()
                found = _clients[key] = _build(role)
    return found


def private_client(role: Role) -> Client:
    """Return a new client of a role that no other part uses, and that a change of the settings in a test leaves open.

    Raises: as `client`.
    """
    client(role)  # checks the settings
    return _build(role)


def require_valid_settings() -> None:
    """Check, once for the settings in force, what can be checked of them without a connection.

    Raises: ImproperlyConfigured with the setting's name and the remedy.
    """
    global _valid_settings
    configured = conf.current()
    if configured is _valid_settings:
        return
    for fault in setting_faults():
        raise ImproperlyConfigured(f"{fault.text} {fault.hint}")
    _valid_settings = configured


def setting_faults() -> Iterator[configuration.Fault]:
    """Yield what is wrong with the settings that name Redis. Opens no connection."""
    return configuration.faults(_unconnected)


def _unconnected() -> object:
    return unconnected(_located_client("worker").connection_pool)


def reset_clients(**kwargs: Any) -> None:
    """Close and forget every client; connected to `setting_changed`, which passes `setting`."""
    if kwargs.get("setting", "CACHES") not in ("CACHES", conf.NAME):
        return
    with _lock:
        found = list(_clients.values())
        _clients.clear()
    for each in found:
        each.close()
        _disconnect(each, in_use=True)


setting_changed.connect(reset_clients, dispatch_uid="django_asyncq.clients")


def connection_options(role: Role) -> dict[str, Any]:
    """Return the options that each connection of a role has, even if the alias has others."""
    connect_seconds, read_seconds = TIMEOUTS[role]
    return {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": connect_seconds,
        "socket_timeout": read_seconds,
        "retry": redis_py.Retry(redis_py.NoBackoff(), 0),
        "retry_on_timeout": False,
    }


def pool_options(role: Role) -> dict[str, Any]:
    """Return the options that the pool of a role has, even if the settings have others."""
    return {**connection_options(role), "max_connections": MOST_CONNECTIONS}


def _factory_options(written: Mapping[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the OPTIONS of a django-redis alias with the options of its connections replaced by `ours`."""
    options = {
        name: value for name, value in written.items() if name not in ("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT")
    }
    options["CONNECTION_POOL_KWARGS"] = {**(written.get("CONNECTION_POOL_KWARGS") or {}), **ours}
    if written.get("SENTINELS"):
        # A sentinel must answer within the same time as Redis.
        timeouts = {name: ours[name] for name in ("socket_connect_timeout", "socket_timeout")}
        options["SENTINEL_KWARGS"] = {**(written.get("SENTINEL_KWARGS") or {}), **timeouts}
    return options


def pause_after(failures: int) -> float:
    """Return the random, growing pause in seconds before the next attempt, after some failures in a row."""
    return random.uniform(0, min(LONGEST_PAUSE_SECONDS, 0.1 * 2 ** min(failures, 10)))  # noqa: S311


def _build(role: Role) -> Client:
    if path := conf.current().client_factory:
        factory = import_string(path)
        with broker_errors():  # a cluster client asks for its nodes
            return factory(role)
    return _located_client(role)


def _located_client(role: Role) -> Client:
    """Return a client of the server at the first address of the settings."""
    found, ours = location(), pool_options(role)
    url = _without_options(found.urls[0], ours)
    if found.kind is Kind.DJANGO_REDIS:
        maker: Any = redis_py.get_connection_factory(options=_factory_options(found.options, ours))
        # Not maker.connect(): it uses the pools that are shared by URL.
        pool = maker.get_connection_pool(maker.make_connection_params(url))
        # Set again, because a connection factory of the project's own may give the pool others.
        set_connection_options(pool, connection_options(role))
        return maker.redis_client_cls(connection_pool=pool, **maker.redis_client_cls_kwargs)
    classes = {name: _loaded(found.options[name]) for name in ("pool_class", "parser_class") if found.options.get(name)}
    pool_class: Any = classes.pop("pool_class", redis_py.ConnectionPool)
    return redis_py.Redis(connection_pool=pool_class.from_url(url, **{**found.connection, **classes, **ours}))


def _loaded(named: Any) -> Any:
    return import_string(named) if isinstance(named, str) else named


def _without_options(url: str, names: Collection[str]) -> str:
    """Return a URL without some options of its query, which in redis-py override keyword arguments.

    They must not reach the pool: from protocol 3 it concludes more than can be set right afterwards.
    """
    address, _, query = url.partition("?")
    kept = [option for option in query.split("&") if option and option.partition("=")[0] not in names]
    return "?".join([address, "&".join(kept)]) if kept else address


def is_cluster(found: Client) -> bool:
    """Whether a client is that of a cluster, which finds the node for each key by itself."""
    return _is_cluster_kind(found.__class__)


@cache
def _is_cluster_kind(kind: type) -> bool:
    # Cached: it is checked at each push, and the check is slow because redis-py's class implements a Protocol.
    return issubclass(kind, redis_py.RedisCluster)


def pool_for(found: Client, key: str) -> Any:
    """Return the connection pool of the server that has a key. Raises: redis-py's own errors."""
    if not is_cluster(found):
        return found.connection_pool
    found.exists(key)  # follows a moved slot, which the next line does not
    return found.get_redis_connection(found.get_node_from_key(key)).connection_pool


def server_identity() -> str:
    """Return a text that is the same in all processes with the settings of one Redis; no user name or password.

    Redis may be unreachable: a client is built only where a factory of the project knows the address, and no cluster's.
    Raises: ImproperlyConfigured.
    """
    require_valid_settings()
    factory = conf.current().client_factory
    if factory in ("", configuration.CLUSTER_FACTORY):
        return identity(any_order=bool(factory))
    try:
        found = client("worker")
    except BrokerUnavailable:
        return factory
    return server_name(found) if isinstance(found, redis_py.Redis) else factory


def server_name(found: Client | None) -> str:
    """Return "Redis" with the host, port and database of a client, or the nodes that the settings name for a cluster.

    It never has the password. found: None when no client could be built.
    """
    if found is None or not isinstance(found, redis_py.Redis):
        if conf.current().client_factory == configuration.CLUSTER_FACTORY:
            return f"the Redis cluster at {identity(any_order=True)}"
        return "the Redis cluster" if found is not None and is_cluster(found) else "Redis"
    # redis-py's default; the pool of a sentinel has no host until it has asked.
    default = {} if isinstance(found.connection_pool, redis_py.SentinelConnectionPool) else {"host": "localhost"}
    where = place({**default, **found.get_connection_kwargs()})
    return f"Redis at {where}" if where else "Redis"


class broker_errors:
    """Raise BrokerUnavailable in place of redis-py's errors for a server that is unreachable or refuses.

    found: the client that is used, to name its server. script, keys: what is run, to name it when a right is missing.
    The text says the cause, never a user name or password. What waiting does not cure is a BrokerMisconfigured. Other
    errors of a reply are bugs and stay as they are.
    """

    def __init__(self, found: Client | None = None, script: str = "", keys: Sequence[str] = ()) -> None:
        self._client = found
        self._script = script
        self._keys = keys

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise BrokerUnavailable for an error of the server; let other errors pass."""
        # redis-py's errors of a cluster are not all a RedisError.
        if error is None or not isinstance(error, redis_py.RedisError | redis_py.RedisClusterException):
            return
        if wrong := configuration.misconfigured(error, is_cluster=self._is_cluster()):
            raise BrokerMisconfigured(server_name(self._client), wrong[0], self._text(error), wrong[1]) from error
        is_of_cluster = isinstance(error, redis_py.ClusterError) and not isinstance(error, redis_py.ResponseError)
        if is_of_cluster or isinstance(
            error, redis_py.ConnectionError | redis_py.TimeoutError | redis_py.RedisClusterException | redis_py.AskError
        ):
            raise BrokerUnavailable(f"{server_name(self._client)} is unreachable ({self._text(error)})") from error
        if not isinstance(error, redis_py.ResponseError):
            return
        if is_denial(error):
            reason = f"{self._text(error)}{self._where()}"
            raise BrokerPermissionDenied(server_name(self._client), DENIED, reason, RIGHTS) from error
        word = _refusal(error)
        if word is None:
            return
        if word == "READONLY":
            # The server is a replica now: new connections may reach the new primary.
            drop_idle_connections()
        raise BrokerUnavailable(
            f"{server_name(self._client)} refuses the command ({word}): {str(error)[:200]}"
        ) from error

    def _is_cluster(self) -> bool:
        return self._client is not None and is_cluster(self._client)

    def _where(self) -> str:
        """Return the script and its keys, which Redis does not name; "" for a plain command."""
        return f"; script {self._script}, keys {', '.join(self._keys)[:300]}" if self._script else ""

    def _text(self, error: BaseException) -> str:
        found = self._client
        return configuration.safe_text(
            error, found.get_connection_kwargs() if isinstance(found, redis_py.Redis) else None
        )


def is_denial(error: redis_py.ResponseError) -> bool:
    """Return whether the user of Redis lacks a right: for a command, a key or a channel."""
    return isinstance(error, redis_py.NoPermissionError) or any(text in str(error) for text in DENIALS)


def _refusal(error: redis_py.ResponseError) -> str | None:
    """Return the word with which Redis refuses a command, or None for any other error."""
    if isinstance(error, redis_py.ReadOnlyError):
        return "READONLY"
    # redis-py removes the first word from the text of these, so only the class identifies them.
    if isinstance(error, redis_py.OutOfMemoryError | redis_py.ClusterDownError | redis_py.TryAgainError):
        return "OOM" if isinstance(error, redis_py.OutOfMemoryError) else type(error).__name__
    text = str(error)
    if text.startswith(NO_CONNECTION_LEFT):
        return NO_CONNECTION_LEFT
    first = text.split(" ", 1)[0]
    # In a script, Redis 6.2 puts the word later: "ERR Error running script …: @user_script:12: -OOM …".
    return next((word for word in REFUSALS if first == word or f" -{word} " in text), None)


def drop_idle_connections() -> None:
    """Close every connection that no thread is using now; new ones are opened when needed."""
    with _lock:
        found = list(_clients.values())
    for each in found:
        _disconnect(each, in_use=False)


def _disconnect(found: Client, *, in_use: bool) -> None:
    # A cluster client has one client for each node.
    servers = [node.redis_connection for node in found.get_nodes()] if is_cluster(found) else [found]
    for pool in [server.connection_pool for server in servers if server is not None]:
        if isinstance(pool, redis_py.BlockingConnectionPool):
            # In the oldest redis-py that is allowed, its `disconnect` takes no argument.
            pool.disconnect()
        else:
            pool.disconnect(inuse_connections=in_use)
