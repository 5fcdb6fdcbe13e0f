"""A wait in Redis: a command blocks on a connection of its own, whose owner sleeps on the socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..exceptions import BrokerUnavailable
from . import clients, redis_py, scripts
from .clients import broker_errors
from .commands import is_wrong_type
from .redis_internals import socket_of

# A wait that lasts longer than it should by this much has lost its connection without notice.
PATIENCE_SECONDS = 5.0

Commands = list[tuple[Any, ...]]


def descriptors(sockets: Mapping[str, Any]) -> dict[int, str]:
    """Return what to sleep on: file descriptor → name. sockets: by name; those that are None or closed are skipped."""
    return {each.fileno(): name for name, each in sockets.items() if each is not None and each.fileno() >= 0}


class BlockingWait:
    """Wait again and again on one connection. Used by one thread.

    key: the server is the one that has it. what: is waited for, as errors name it. block_seconds: after which the
    commands return without anything.
    """

    def __init__(self, key: str, what: str, block_seconds: float = clients.BLOCK_SECONDS) -> None:
        self.key = key
        self.block_seconds = block_seconds
        # Monotonic seconds at which the wait in progress began; None when there is none.
        self.since: float | None = None
        self._what = what
        self._pool: Any = None
        self._connection: Any = None
        self._is_new = True

    @property
    def socket(self) -> Any:
        """What to sleep on; None when nothing waits."""
        return None if self.since is None else socket_of(self._connection)

    def begin(self, commands: Callable[[bool], Commands]) -> bool:
        """Send commands, of which the first blocks, unless this is waiting; return whether they were sent.

        commands: makes them; its argument says whether they are the first on this connection.
        Raises: BrokerUnavailable; nothing waits then.
        """
        if self.since is not None and time.monotonic() - self.since < self.block_seconds + PATIENCE_SECONDS:
            return False
        try:
            if self.since is not None:
                raise TimeoutError("no reply")
            self._connect()
            since = time.monotonic()
            # In one write: what runs behind the first command must not depend on this process.
            packed = self._connection.pack_commands(commands(self._is_new))
            self._connection.send_packed_command(packed)
        except Exception as error:
            raise self._give_up(error) from error
        self.since, self._is_new = since, False
        return True

    def read(self, count: int = 1) -> list[Any] | None:
        """Read the replies that have ended the wait; return None if it goes on. count: how many there are.

        Raises: BrokerUnavailable; the wait is over then, and what came is lost.
        """
        try:
            if not self._is_readable():
                return None
            found = [self._connection.read_response() for _ in range(count)]
        except Exception as error:
            raise self._give_up(error) from error
        self.since = None
        return found

    def can_read(self, seconds: float) -> bool:
        """Return whether a reply comes within some seconds. Raises: redis-py's errors."""
        return bool(self._connection.can_read(seconds))

    def close(self) -> None:
        """Wait no longer: disconnect, and return the connection to its pool."""
        self.since = None
        if self._connection is not None:
            connection, self._connection, self._is_new = self._connection, None, True
            connection.disconnect()
            self._pool.release(connection)

    def _connect(self) -> None:
        """Have a connection that is open, or one that opens when something is sent."""
        if self._connection is not None:
            is_closed = True
            with suppress(redis_py.RedisError):
                is_closed = self._connection.can_read()  # no reply is due: what can be read is the end of the stream
            if not is_closed and socket_of(self._connection) is not None:
                return
            self.close()
        self._pool = clients.pool_for(clients.client("blocking"), self.key)
        self._connection = self._pool.get_connection()

    def _is_readable(self) -> bool:
        # TLS has things to read that are no reply.
        return type(socket_of(self._connection)) is socket.socket or bool(self._connection.can_read())

    def _give_up(self, error: Exception) -> Exception:
        """Close the connection, which may hold more replies; return the error to raise."""
        self.close()
        if isinstance(error, redis_py.ResponseError) and is_wrong_type(error):
            with suppress(BrokerUnavailable):
                scripts.run("check_type", clients.client("worker"), [self.key], ["list"])
        if not isinstance(error, redis_py.RedisError | OSError):
            return error
        try:
            with broker_errors(clients.client("blocking")):
                raise error
        except BrokerUnavailable as unavailable:
            return unavailable
        except (redis_py.RedisError, OSError):
            return BrokerUnavailable(f"cannot wait for {self._what} in Redis: {str(error)[:200]}")
