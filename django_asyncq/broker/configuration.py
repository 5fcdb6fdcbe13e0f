"""Check the settings that name Redis without a connection, and say which setting an error of Redis comes from.

No text of this module has a user name or a password in it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from django.utils.module_loading import import_string

from .. import conf
from . import redis_py
from .location import DJANGO_BACKEND, Kind, Location, location

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
