"""Build the Redis clients from what the settings say, one per role; no other module builds one.

The pools are private: django-redis caches pools by URL alone, so ours would get the cache's options. No client
repeats a command by itself. RESP2, because with the default of redis-py 8 a connection is not checked for unread
replies before it is lent.
"""

from __future__ import annotations

import random
import re
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .. import conf
from ..core.aliases import client_factory_of
from ..core.test_run import embedded_ports, is_test_run
from ..exceptions import BrokerMisconfigured, BrokerPermissionDenied, BrokerUnavailable, RedisNotForTests
from . import redis_py

# --- Read from the settings where Redis is and how to connect: an address, or an alias in CACHES of one of two
# backends.
#
# Nothing is validated here: the next part does that. A text of this module may have a password in it.

DEFAULT_PORT = 6379
DJANGO_BACKEND = "django.core.cache.backends.redis.RedisCache"
# What Django's backend does not pass to redis-py's connections.
DJANGO_OPTIONS = ("serializer", "pool_class", "parser_class")


class Kind(Enum):
    """How the settings name Redis. OTHER: an alias of a cache that does not say how to connect. NO_ALIAS: none."""

    ADDRESS = "address"
    DJANGO_REDIS = "django-redis"
    DJANGO = "Django's RedisCache"
    OTHER = "other"
    NO_ALIAS = "no alias"


class Location(NamedTuple):
    """What the settings say, as it is written.

    setting: the name of the setting that has the addresses; options_setting: of the one that has `options`.
    urls: the addresses, of which any may be wrong. connection: keyword arguments for redis-py's connections, over
    which an address has precedence.
    """

    kind: Kind
    setting: str
    options_setting: str
    urls: Sequence[Any]
    options: Mapping[str, Any]
    connection: Mapping[str, Any]
    backend: str = ""


def location() -> Location:
    """Return what the settings in force say."""
    name = conf.current().redis
    own = f"{conf.NAME}['REDIS']"
    if not _is_alias(name):
        return Location(Kind.ADDRESS, own, own, _split(name, ","), {}, {})
    cache: Any = settings.CACHES.get(str(name))
    if cache is None:
        return Location(Kind.NO_ALIAS, own, own, (), {}, {})
    kind = _kind(str(cache.get("BACKEND", "")))
    where, options = f"CACHES[{name!r}]", cache.get("OPTIONS") or {}
    return Location(
        kind,
        f"{where}['LOCATION']",
        f"{where}['OPTIONS']",
        # Each backend splits a text in its own way.
        _split(cache.get("LOCATION"), "[;,]" if kind is Kind.DJANGO else ","),
        options,
        _connection(kind, options),
        str(cache.get("BACKEND", "")),
    )


def _is_alias(name: Any) -> bool:
    """Whether ASYNCQ['REDIS'] is meant as an alias. An address without a scheme is none: it may have a password."""
    return isinstance(name, str) and (name in settings.CACHES or not re.search("[:/@]", name))


def _kind(backend: str) -> Kind:
    if backend == DJANGO_BACKEND:
        return Kind.DJANGO
    return Kind.DJANGO_REDIS if backend.startswith("django_redis.") else Kind.OTHER


def _split(written: Any, separator: str) -> Sequence[Any]:
    if isinstance(written, str):
        return [part.strip() for part in re.split(separator, written)] if written else []
    return list(written) if isinstance(written, list | tuple) else [written] if written else []


def _connection(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    if kind is Kind.DJANGO:
        return {name: value for name, value in options.items() if name not in DJANGO_OPTIONS}
    credentials = {name: options[name.upper()] for name in ("username", "password") if options.get(name.upper())}
    return {**credentials, **(options.get("CONNECTION_POOL_KWARGS") or {})}


def place(options: Mapping[str, Any]) -> str:
    """Return host, port and database, or path and database, of the options of a connection; "" without either."""
    database = options.get("db") or 0
    if "path" in options:
        return f"{options['path']}/{database}"
    if "host" not in options:
        return ""
    host = f"[{options['host']}]" if ":" in str(options["host"]) else options["host"]
    return f"{host}:{options.get('port') or DEFAULT_PORT}/{database}"


def identity(*, any_order: bool) -> str:
    """Return a text that is the same for all processes that use one server and database, however they name it.

    It has the addresses, the database and the sentinels, and neither user name nor password. any_order: whether the
    addresses are those of one cluster; otherwise only the first one is used.
    """
    found = location()
    servers = []
    for url in found.urls:
        parsed: dict[str, Any] = redis_py.parse_url(str(url))  # type: ignore[no-untyped-call]
        servers.append(place({"host": "localhost", **found.connection, **parsed}))
    sentinels = [f"{host}:{port}" for host, port in found.options.get("SENTINELS") or ()]
    return ", ".join([*(sorted(servers) if any_order else servers[:1]), *sorted(sentinels)])


# --- Check the settings that name Redis without a connection, and say which setting an error of Redis comes from.
#
# No text of this module has a user name or a password in it.

SCHEMES = ("redis", "rediss", "unix")
CLUSTER_FACTORY = "django_asyncq.broker.cluster.client"
ENCODING_HINT = (
    "In a user name or password write @ : / ? # % and a comma in percent-encoding, as "
    "urllib.parse.quote(text, safe='') does."
)
ADDRESS_HINT = f"Write redis://host:port/database, rediss:// for TLS, or unix:///path?db=0. {ENCODING_HINT}"
NODE_HINT = f"Write an address such as redis://10.0.0.1:6379, or rediss:// for TLS. {ENCODING_HINT}"
OPTIONS_HINT = "Correct the OPTIONS of this cache; docs/guides/redis.md has examples of each kind."
HIGHEST_PORT = 65_535
LONGEST_TEXT = 200
LEAST_MASKED_ANYWHERE = 4
# In redis-py these have no class of their own.
WRONG_PASSWORD = re.compile(r"without any password configured|no password is set")
WRONG_DATABASE = re.compile(r"DB index is out of range|invalid DB index|Invalid Database|SELECT is not allowed")
# A handshake that is too slow, and a server that gives up or is cut in the middle of a record.
TLS_OUTAGE = re.compile(r"timed out|INTERNAL_ERROR|USER_CANCELLED|BAD_RECORD_MAC|CLOSE_NOTIFY", re.IGNORECASE)
# What may be a secret of any address or options, also of those that a factory of the project has.
SECRETS_OF_ANY = (
    re.compile(r"(?<=://)\S*@"),
    re.compile(r"\b\w*(?:password|passwd|secret|token)(?:=|['\"]: ?)['\"]?[^\s'\"&,;)]+", re.IGNORECASE),
)
SECRET_OPTIONS = ("username", "password", "ssl_password")
# A connection that is cut in the middle is an outage, with TLS as without.
CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Fault(NamedTuple):
    """One thing that is wrong with the settings.

    kind: "alias", "cache", "LOCATION", "OPTIONS" or "CLIENT_FACTORY". text: a sentence that names the setting.
    """

    kind: str
    text: str
    hint: str


def faults(make_connection: Callable[[], object]) -> Iterator[Fault]:
    """Yield what is wrong with ASYNCQ['CLIENT_FACTORY'], with ASYNCQ['REDIS'], or with the alias that it names.

    make_connection: builds a client and a connection that is not connected; called when nothing else is wrong.
    """
    factory, found = conf.current().client_factory, location()
    if factory:
        yield from _factory_faults(factory)
        if factory != CLUSTER_FACTORY:
            return
    if found.kind is Kind.NO_ALIAS:
        yield Fault(
            "alias",
            f"{conf.NAME}['REDIS'] = {conf.current().redis!r} is not an alias in CACHES.",
            f"Set {conf.NAME}['REDIS'] to the alias of a django-redis cache, or to an address such as "
            "redis://127.0.0.1:6379/1.",
        )
        return
    if not factory and found.kind is Kind.OTHER:
        yield Fault(
            "cache",
            f"CACHES[{conf.current().redis!r}] is a {found.backend}, which is not a django-redis cache and does not "
            "say how to connect to Redis.",
            f"Set {conf.NAME}['REDIS'] to an address such as redis://127.0.0.1:6379/1, use BACKEND "
            f"'django_redis.cache.RedisCache' or {DJANGO_BACKEND!r}, or set {conf.NAME}['CLIENT_FACTORY'].",
        )
        return
    wrong = [*_address_faults(found, is_cluster=bool(factory)), *_sentinel_faults(found)]
    yield from wrong
    if not wrong and not factory:
        yield from _building_faults(found, make_connection)


def _factory_faults(path: str) -> Iterator[Fault]:
    hint = "Give the dotted path of a callable `(role) -> redis client`, or '' for what REDIS names."
    where = f"{conf.NAME}['CLIENT_FACTORY'] = {path!r}"
    try:
        found = import_string(path)
    except Exception as error:  # noqa: BLE001 - a module of the project may raise anything
        yield Fault("CLIENT_FACTORY", f"{where} cannot be imported ({safe_text(error)}).", hint)
        return
    if not callable(found):
        yield Fault("CLIENT_FACTORY", f"{where} is not callable.", hint)


def _address_faults(found: Location, *, is_cluster: bool) -> Iterator[Fault]:
    hint = NODE_HINT if is_cluster else ADDRESS_HINT
    if not found.urls:
        yield Fault("LOCATION", f"{found.setting} is missing.", hint)
    for number, url in enumerate(found.urls, 1):
        if reason := _address_fault(url, is_cluster=is_cluster):
            which = "" if len(found.urls) == 1 else f", address {number}"
            yield Fault("LOCATION", f"{found.setting}{which}: {reason}.", hint)
    if is_cluster and found.connection.get("db"):
        yield Fault("OPTIONS", f"{found.options_setting}: a cluster has no database except 0.", OPTIONS_HINT)


def _address_fault(url: Any, *, is_cluster: bool) -> str:
    """Return what is wrong with an address, "" for nothing; never a part of it that may be of the password."""
    if not isinstance(url, str):
        return f"an address is a text, not {type(url).__qualname__}"
    scheme, colon, _rest = url.strip().partition("://")
    if not colon:
        return "the address has no scheme"
    if scheme not in SCHEMES:
        # The scheme may be the beginning of anything, such as a password before an address.
        return f"the scheme is none of {', '.join(SCHEMES)}"
    parts = None
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        return "the port is not a number" if parts is not None else "the address cannot be read"
    if port == 0:
        return f"the port is not a number from 1 to {HIGHEST_PORT}"
    if parts.fragment:
        return "the address has a '#', behind which nothing is read"
    path = unquote(parts.path).strip("/")
    if scheme != "unix" and "db" not in parse_qs(parts.query) and path and not re.fullmatch(r"\d+", path):
        return "the database is not a number"
    try:
        found: dict[str, Any] = redis_py.parse_url(url.strip())  # type: ignore[no-untyped-call]
    except ValueError as error:
        # The text of redis-py names the option only.
        name = re.fullmatch(r"Invalid value for '(\w+)' in connection URL\.", str(error))
        return f"the value of {name[1]!r} behind the '?' is not valid" if name else "the address cannot be read"
    if found.get("db", 0) < 0:
        return "the database is not a number"
    if is_cluster and (found.get("db", 0) or "host" not in found):
        return "each address of a cluster must name a host, and no database except 0"
    return ""


def _sentinel_faults(found: Location) -> Iterator[Fault]:
    written = found.options.get("SENTINELS")
    if not written or found.kind is Kind.DJANGO:
        return
    try:
        pairs = [(host, int(port)) for host, port in written]
        is_valid = all(isinstance(host, str) and 0 < port <= HIGHEST_PORT for host, port in pairs)
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        where = f"{found.options_setting}['SENTINELS']"
        yield Fault("OPTIONS", f"{where} is not a list of (host, port).", OPTIONS_HINT)
    elif found.urls and not urlsplit(str(found.urls[0])).hostname:
        yield Fault(
            "LOCATION",
            f"{found.setting} names no service, which the sentinels need.",
            "Write the name of the service as the host: redis://mymaster/0.",
        )


def _building_faults(found: Location, make_connection: Callable[[], object]) -> Iterator[Fault]:
    try:
        make_connection()
    except Exception as error:  # noqa: BLE001 - classes named in OPTIONS may raise anything
        if found.kind is Kind.ADDRESS:
            text, hint = "no client can be built with the options behind the '?'", ADDRESS_HINT
        else:
            text, hint = "no client can be built with them", OPTIONS_HINT
        yield Fault("OPTIONS", f"{found.options_setting}: {text} ({safe_text(error)}).", hint)


# --- errors of Redis


def misconfigured(error: BaseException, *, is_cluster: bool = False) -> tuple[str, str] | None:
    """Return (what is wrong, the settings to correct) for an error that waiting does not cure; None for any other.

    is_cluster: the client is one for a cluster, which follows a slot that has moved, at the latest when it tries again.
    """
    if isinstance(error, redis_py.AuthenticationError | redis_py.AuthenticationWrongNumberOfArgsError) or _says(
        error, WRONG_PASSWORD
    ):
        return "refuses the user name or password", f"the user name and password in {setting()}"
    if _says(error, WRONG_DATABASE):
        return "has no such database", f"the database number in {setting()}"
    if isinstance(error, redis_py.AskError) and not is_cluster:
        path = f"{conf.NAME}['CLIENT_FACTORY'] to {CLUSTER_FACTORY!r}"
        return "is a node of a Redis Cluster, and the client is none for a cluster", path
    is_tls = any(isinstance(cause, ssl.SSLError) and not isinstance(cause, CUT) for cause in _causes(error))
    if is_tls and not TLS_OUTAGE.search(str(error)):
        settings_of_tls = f"the scheme (rediss:// is TLS) and the ssl options in {setting()}"
        return "and this client do not agree about TLS", settings_of_tls
    return None


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    # Redis's replies, and redis-py's errors about a reply while it connects; never the text of a script's error.
    return isinstance(error, redis_py.ResponseError | redis_py.ConnectionError) and bool(pattern.search(str(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 10:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def setting() -> str:
    """Return the name of the setting that says where Redis is."""
    configured = conf.current()
    if configured.client_factory and configured.client_factory != CLUSTER_FACTORY:
        return f"the client of {conf.NAME}['CLIENT_FACTORY'] ({configured.client_factory})"
    found = location()
    return found.setting if found.kind is Kind.ADDRESS else f"LOCATION or OPTIONS of CACHES[{configured.redis!r}]"


def safe_text(error: BaseException, options: Mapping[str, Any] | None = None) -> str:
    """Return the class and text of an error in one line, without user names and passwords.

    options: connection options of the client, for one that a project's factory has built.
    """
    text = " ".join(str(error).split())
    for secret in sorted(_secrets(options or {}), key=len, reverse=True):
        # A short one only as a word: it would be masked within other words.
        pattern = re.escape(secret)
        if len(secret) < LEAST_MASKED_ANYWHERE:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        text = re.sub(pattern, "***", text)
    text = SECRETS_OF_ANY[0].sub("***@", text)
    text = SECRETS_OF_ANY[1].sub(lambda found: re.split(r"(?<=[=:])", found[0])[0] + "***", text)
    return f"{type(error).__name__}: {text[:LONGEST_TEXT]}" if text else type(error).__name__


def _secrets(options: Mapping[str, Any]) -> set[str]:
    settled = location()
    found: set[str] = set()
    for url in settled.urls:
        # By hand, because an address that cannot be read has secrets too.
        user, _colon, password = str(url).partition("://")[2].rpartition("@")[0].partition(":")
        found |= {user, password, unquote(user), unquote(password)}
        for name, values in parse_qs(str(url).partition("?")[2]).items():
            found |= set(values) if name.lower() in SECRET_OPTIONS else set()
    sentinel: Any = settled.options.get("SENTINEL_KWARGS") or {}
    for part in (settled.options, settled.connection, sentinel, options):
        found |= {str(part[key]) for key in part if str(key).lower() in SECRET_OPTIONS}
    found = {secret for secret in found if secret not in ("", "None")}
    return found | {quote(secret, safe="") for secret in found}


# --- What this package uses of redis-py beyond its documented API, in one place. Nothing else here touches it.


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection, None while it is closed; can go when redis-py offers `fileno()`.

    A worker's main thread sleeps on the sockets of all its queues at once, which no method of redis-py allows.
    """
    return getattr(connection, "_sock", None)


def shut_down(connection: Any) -> None:
    """Make a blocked read in another thread return; can go when redis-py lets another thread cancel a read.

    Only the reading thread may close the connection: redis-py raises odd errors when another thread does.
    """
    found = socket_of(connection)
    if found is not None:
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)


def close_copy(connection: Any) -> None:
    """Close a forked child's copy of a connection's descriptor, and send nothing; can go when redis-py does so itself.

    `disconnect` would do it only when the child next uses the connection. Until then the child holds it open.
    """
    found = socket_of(connection)
    if found is not None:
        with suppress(OSError):
            found.close()


def set_connection_options(pool: Any, options: Mapping[str, Any]) -> None:
    """Set options of a pool's future connections; can go when a URL's query no longer wins over keyword arguments."""
    pool.connection_kwargs.update(options)


def unconnected(pool: Any) -> object:
    """Return a connection as the pool would make it, outside the pool; can go when a pool can check its options."""
    return pool.connection_class(**pool.connection_kwargs)


# --- Refuse, in a test run, a Redis that is not the tests' own: a test must not touch the tasks of development.
#
# Checked once, where a client is built.

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _require_server_of_tests() -> None:
    """Pass outside of a test run, with an embedded server that the tests have started, and with REDIS_IS_FOR_TESTS.

    Raises: RedisNotForTests, which names the server.
    """
    if is_test_run() and not (conf.current().redis_is_for_tests or _is_embedded()):
        raise RedisNotForTests(_name())


def _is_embedded() -> bool:
    found = location()
    if conf.current().client_factory or found.options.get("SENTINELS") or not found.urls:
        # Where these lead, only a connection would show.
        return False
    parsed: dict[str, Any] = redis_py.parse_url(str(found.urls[0]))  # type: ignore[no-untyped-call]
    options = {"host": "localhost", "port": DEFAULT_PORT, **found.connection, **parsed}
    return "path" not in options and options["host"] in LOOPBACK and int(options["port"]) in embedded_ports()


def _name() -> str:
    factory = conf.current().client_factory
    if factory in ("", CLUSTER_FACTORY):
        return f"Redis at {identity(any_order=bool(factory))}"
    return f"the Redis of {conf.NAME}['CLIENT_FACTORY'] ({factory})"


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


def client(role: Role, alias: str = "") -> Client:
    """Return this process's client for a role; it is thread-safe, and its pool reconnects after a fork.

    alias: in TASKS; its backend may bring clients of its own. "" for what belongs to no alias.
    Raises: ImproperlyConfigured when the settings cannot be right; RedisNotForTests in a test run; BrokerUnavailable
    when no node of a cluster answers.
    """
    if (factory := client_factory_of(alias)) is not None:
        return factory(role)
    configured = conf.current()
    key = (role, str(configured.redis), configured.client_factory)
    found = _clients.get(key)
    if found is None:
        with _lock:
            found = _clients.get(key)
            if found is None:
                require_valid_settings()
                _require_server_of_tests()
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


def setting_faults() -> Iterator[Fault]:
    """Yield what is wrong with the settings that name Redis. Opens no connection."""
    return faults(_unconnected)


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
    if factory in ("", CLUSTER_FACTORY):
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
        if conf.current().client_factory == CLUSTER_FACTORY:
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
        if wrong := misconfigured(error, is_cluster=self._is_cluster()):
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
        return safe_text(error, found.get_connection_kwargs() if isinstance(found, redis_py.Redis) else None)


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
