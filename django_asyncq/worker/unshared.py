"""What a fork server should not have when it forks: its processes would share connections, and lack threads."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from django.db import connections

from ..guard import get_logger

logger = get_logger("django_asyncq.supervisor")

REMEDY = "when they are first used, or set ASYNCQ['START_METHOD'] = 'spawn'"
STANDARD_STREAMS = (0, 1, 2)


def close_connections() -> None:
    """Close the connections to databases that were opened while the project was loaded."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        # Of PostgreSQL, since Django 5.1: it ends the threads of a pool.
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()


def warn_of_others() -> None:
    """Log what else the project has started and opened. Whether it survives a fork, only the project can know."""
    threads = sorted(each.name for each in threading.enumerate() if each is not threading.current_thread())
    if threads:
        text = "worker processes lack the threads that the project has started while it was loaded: %s; start them %s"
        logger.warning(text, ", ".join(threads), REMEDY)
    if peers := sorted(_peers()):
        text = "worker processes share connections that the project has opened while it was loaded: %s; open them %s"
        logger.warning(text, ", ".join(peers), REMEDY)


def _peers() -> Iterator[str]:
    """Yield to what this process is connected; its standard streams may be sockets of systemd, which all may share."""
    folder = Path("/proc/self/fd")
    for number in [int(each.name) for each in folder.iterdir()] if folder.is_dir() else ():
        try:
            if number in STANDARD_STREAMS or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                peer = found.getpeername()
        except OSError:
            continue  # closed meanwhile, or not connected
        yield f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else os.fsdecode(peer) or "a local socket"
