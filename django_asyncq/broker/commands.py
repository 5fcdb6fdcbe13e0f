"""Send a plain command, one that is no script: a key of a wrong type is set aside first, as the scripts do it."""

from __future__ import annotations

from typing import Any

from ..exceptions import BrokerUnavailable
from . import redis_py, scripts
from .clients import Client, broker_errors

# The type of key that each command takes.
TYPES = {
    "get": "string",
    "getrange": "string",
    "lrange": "list",
    "llen": "list",
    "hget": "hash",
    "hmget": "hash",
    "hdel": "hash",
    "hexists": "hash",
    "hgetall": "hash",
    "sadd": "set",
    "smembers": "set",
    "srem": "set",
    "zrange": "zset",
    "zrangebyscore": "zset",
    "zcard": "zset",
    "zadd": "zset",
    "zrem": "zset",
}


def send(client: Client, command: str, key: str, *arguments: Any, **more: Any) -> Any:
    """Return the reply of a command that redis-py has as a method; if the key has another type, set it aside first.

    command: one of TYPES. Raises: BrokerUnavailable.
    """
    method = getattr(client, command)
    try:
        with broker_errors(client):
            return method(key, *arguments, **more)
    except redis_py.ResponseError as error:
        if not is_wrong_type(error):
            raise
    scripts.run("check_type", client, [key], [TYPES[command]])
    try:
        with broker_errors(client):
            return method(key, *arguments, **more)
    except redis_py.ResponseError as error:
        raise BrokerUnavailable(f"a key is given a wrong type again and again: {key!r}") from error


def is_wrong_type(error: redis_py.ResponseError) -> bool:
    """Return whether Redis says that the key has another type."""
    return "WRONGTYPE" in str(error)
