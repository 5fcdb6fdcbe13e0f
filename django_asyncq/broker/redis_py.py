"""The names of redis-py and django-redis that the broker uses, imported at the first use of each.

A web process imports the broker with the app and with the admin, and may never ask Redis. redis-py alone takes longer
to import than this package. So modules that the app or the admin imports write `redis_py.RedisError`; those that only
a process with Redis imports (`cluster`, `startup_checks`) import redis-py itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_redis.pool import get_connection_factory
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.connection import BlockingConnectionPool, ConnectionPool, parse_url
    from redis.exceptions import (
        AskError,
        AuthenticationError,
        AuthenticationWrongNumberOfArgsError,
        ClusterDownError,
        ClusterError,
        ConnectionError,
        NoPermissionError,
        NoScriptError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisClusterException,
        RedisError,
        ResponseError,
        TimeoutError,
        TryAgainError,
    )
    from redis.retry import Retry
    from redis.sentinel import SentinelConnectionPool

# Names in other modules than `redis.exceptions`.
_HOMES = {
    "get_connection_factory": "django_redis.pool",
    "Redis": "redis",
    "NoBackoff": "redis.backoff",
    "RedisCluster": "redis.cluster",
    "BlockingConnectionPool": "redis.connection",
    "ConnectionPool": "redis.connection",
    "parse_url": "redis.connection",
    "Retry": "redis.retry",
    "SentinelConnectionPool": "redis.sentinel",
}

__all__ = [
    "AskError",
    "AuthenticationError",
    "AuthenticationWrongNumberOfArgsError",
    "BlockingConnectionPool",
    "ClusterDownError",
    "ClusterError",
    "ConnectionError",
    "ConnectionPool",
    "NoBackoff",
    "NoPermissionError",
    "NoScriptError",
    "OutOfMemoryError",
    "ReadOnlyError",
    "Redis",
    "RedisCluster",
    "RedisClusterException",
    "RedisError",
    "ResponseError",
    "Retry",
    "SentinelConnectionPool",
    "TimeoutError",
    "TryAgainError",
    "get_connection_factory",
    "parse_url",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, and keep it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "redis.exceptions")), name)
    return value


def import_all() -> None:
    """Import all of them now, for processes that will be forked."""
    for name in __all__:
        __getattr__(name)
