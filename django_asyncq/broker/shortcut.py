"""One command by the shortest way: on a kept connection, past redis-py's client and pool.

After a pause what is seldom run runs slowly, and the client's way is long: retries that we do not use, locks, metrics.
Who wraps the client's commands to trace them, or has a client of his own, sees every command as before.
"""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis.client
import redis.connection
from redis.exceptions import RedisError, ResponseError

from ..wrapping import are_unwrapped

try:
    from redis.observability.recorder import is_enabled as has_metrics
except ImportError:  # redis-py before 7.2

    def has_metrics() -> bool:
        """Whether redis-py takes times and counts connections."""
        return False


# What redis-py itself packs commands with where it is installed, and the class of its own that does.
HIREDIS: Any = getattr(redis.connection, "hiredis", None)
HIREDIS_PACKER: Any = getattr(redis.connection, "HiredisRespSerializer", None)

# Where redis-py defines what a command comes through.
HOMES = ("redis.client", "redis.commands.core")
CONNECTION_HOMES = ("redis.connection",)

UNKNOWN: Any = object()
_shortcuts: weakref.WeakKeyDictionary[Any, Shortcut | None] = weakref.WeakKeyDictionary()


def evalsha(client: Any, digest: str, keys: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Run a script that the server has; return its reply as it came, text as bytes. Raises: what redis-py raises."""
    shortcut = _shortcut_of(client)
    if shortcut is None or not _is_unchanged(client):
        return client.evalsha(digest, len(keys), *keys, *arguments)
    return shortcut.execute("EVALSHA", digest, len(keys), *keys, *arguments)


def drop_idle(client: Any) -> None:
    """Give the client's pool the connections back that nobody is using now, closed."""
    if shortcut := _shortcut_of(client):
        shortcut.drop_idle()


def renew(connection: Any) -> None:
    """Have a connection that was closed while nobody used it connect anew at its next command."""
    if _is_quiet(connection):
        return
    has_ended = True
    with suppress(RedisError):
        has_ended = connection.can_read()  # nothing is expected: what there is to read is its end
    if has_ended:
        connection.disconnect()


def _is_quiet(connection: Any) -> bool:
    """Whether a plain socket has nothing to read, not even its end; of any other redis-py knows more."""
    found = getattr(connection, "_sock", None)
    if type(found) is not socket.socket or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(found, select.POLLIN)
    return not poll.poll(0)


def _send(connection: Any, words: tuple[Any, ...]) -> None:
    """Send a command as redis-py does, which first copies every word twice where it then has hiredis pack them."""
    is_packed_by_hiredis = type(getattr(connection, "_command_packer", None)) is HIREDIS_PACKER
    if is_packed_by_hiredis and are_unwrapped((type(connection).send_command,), CONNECTION_HOMES):
        connection.send_packed_command([HIREDIS.pack_command(words)])
    else:
        connection.send_command(*words)


class Shortcut:
    """The kept connections of one client, each used by one thread at a time; as many as there were calls at once."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: list[Any] = []
        self._pid = os.getpid()

    def execute(self, *words: Any) -> Any:
        """Send a command and return its reply."""
        connection = self._take()
        try:
            _send(connection, words)
            reply = connection.read_response()
        except ResponseError:
            self._idle.append(connection)  # it was read
            raise
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        self._idle.append(connection)
        return reply

    def drop_idle(self) -> None:
        """Give back to the pool what nobody is using now, closed."""
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                connection.disconnect()
                self._pool.release(connection)

    def _take(self) -> Any:
        if self._pid != os.getpid():
            # A fork, of which not every server tells Python: the connections are the parent's.
            self._idle, self._pid = [], os.getpid()
        # The last one: a signal handler or another thread that calls meanwhile has another, or a new one.
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._pool.get_connection()
        renew(connection)
        return connection


def _shortcut_of(client: Any) -> Shortcut | None:
    if not isinstance(client, redis.client.Redis):
        return None  # a cluster's, or whatever CLIENT_FACTORY gives
    found: Shortcut | None = _shortcuts.get(client, UNKNOWN)
    if found is UNKNOWN:
        # Whoever comes first: of two threads both then use the same.
        found = _shortcuts.setdefault(client, Shortcut(client.connection_pool) if _may_be_passed(client) else None)
    return found


def _may_be_passed(client: redis.client.Redis) -> bool:
    """Whether any connection of its pool does for it: not where tokens are renewed or times taken."""
    has_tokens = bool(client.connection_pool.connection_kwargs.get("credential_provider"))
    return client.connection is None and not has_tokens and not has_metrics()


def _is_unchanged(client: redis.client.Redis) -> bool:
    """Whether a command's way through the client is redis-py's own: no tool has put itself around it."""
    if "execute_command" in vars(client) or "evalsha" in vars(client):
        return False
    kind = type(client)
    return are_unwrapped((kind.execute_command, kind.evalsha), HOMES)
