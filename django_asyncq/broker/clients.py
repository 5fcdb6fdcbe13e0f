"""Redis clients, built in one place from a django-redis alias, one per role.

Pools are our own: django-redis caches pools by URL alone, so ours would get the cache's options. No client repeats a
command blindly; RESP2, because the default of redis-py 8 skips the check for unread replies before a connection is lent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import redis
from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string
from django_redis.pool import get_connection_factory
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from .. import conf
from ..exceptions import BrokerUnavailable

Client = Any  # redis.Redis, or what CLIENT_FACTORY gives
Role = Literal["producer", "worker", "blocking"]

BLOCK_SECONDS = 5
# (connect, read) seconds. A request waits for the producer's; a blocked pop must outlive its own time-out.
TIMEOUTS: dict[Role, tuple[float, float]] = {
    "producer": (0.25, 0.5),
    "worker": (1.0, 5.0),
    "blocking": (1.0, BLOCK_SECONDS + 5.0),
}
# How Redis says that it will not write now; to a caller that is the same as being away.
REFUSALS = ("OOM", "MISCONF", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "NOREPLICAS", "TRYAGAIN")

_clients: dict[Role, Client] = {}
_lock = threading.Lock()


def client(role: Role) -> Client:
    """Return this process's client for a role; thread-safe, its pool re-opens after a fork."""
    found = _clients.get(role)
    if found is None:
        with _lock:
            found = _clients.get(role) or _build(role)
            _clients[role] = found
    return found


def reset_clients(**kwargs: Any) -> None:
    """Close and forget every client."""
    if kwargs.get("setting", "CACHES") not in ("CACHES", conf.NAME):
        return
    with _lock:
        for found in _clients.values():
            found.close()
            pool = getattr(found, "connection_pool", None)
            if pool is not None:
                pool.disconnect()
        _clients.clear()


setting_changed.connect(reset_clients, dispatch_uid="django_asyncq.clients")


def _build(role: Role) -> Client:
    configured = conf.current()
    if configured.client_factory:
        return import_string(configured.client_factory)(role)
    cache = settings.CACHES[configured.redis]
    location = cache["LOCATION"]
    if isinstance(location, str):
        location = location.split(",")
    connect_seconds, read_seconds = TIMEOUTS[role]
    options = {
        name: value
        for name, value in cache.get("OPTIONS", {}).items()
        if name not in ("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT")
    }
    options["CONNECTION_POOL_KWARGS"] = {
        **options.get("CONNECTION_POOL_KWARGS", {}),
        "protocol": 2,
        "socket_connect_timeout": connect_seconds,
        "socket_timeout": read_seconds,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 1000,
    }
    factory: Any = get_connection_factory(options=options)
    # Not factory.connect(): that looks in the pools shared by URL.
    pool = factory.get_connection_pool(factory.make_connection_params(location[0].strip()))
    return factory.redis_client_cls(connection_pool=pool, **factory.redis_client_cls_kwargs)


@contextmanager
def broker_errors() -> Iterator[None]:
    """Turn what redis-py raises when the server is away or refuses into BrokerUnavailable."""
    try:
        yield
    except ReadOnlyError as error:
        # The server has become a replica: the next connection may reach the new primary.
        reset_pools()
        raise BrokerUnavailable("Redis refuses to write: it is a read-only replica") from error
    except (ConnectionError, TimeoutError, BusyLoadingError) as error:
        raise BrokerUnavailable(f"Redis cannot be reached ({type(error).__name__})") from error
    except ResponseError as error:
        word = str(error).split(" ", 1)[0]
        if word not in REFUSALS and not any(f"-{refusal} " in str(error) for refusal in REFUSALS):
            raise
        raise BrokerUnavailable(f"Redis refuses the command: {str(error)[:200]}") from error


def reset_pools() -> None:
    """Close every connection; they are opened anew when needed."""
    with _lock:
        for found in _clients.values():
            pool = getattr(found, "connection_pool", None)
            if pool is not None:
                pool.disconnect()


__all__ = ["BLOCK_SECONDS", "Client", "Role", "broker_errors", "client", "redis", "reset_clients", "reset_pools"]
