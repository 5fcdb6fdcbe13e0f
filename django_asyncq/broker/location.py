"""Read from the settings where Redis is and how to connect: an address, or an alias in CACHES of one of two backends.

Nothing is validated here: `configuration` does that. A text of this module may have a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from django.conf import settings

from .. import conf
from . import redis_py

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
