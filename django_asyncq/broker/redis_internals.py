"""What this package uses of redis-py beyond its documented API, in one place. Nothing else here touches it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


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
