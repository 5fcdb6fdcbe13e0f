"""What a fork server must not have when it forks: its processes would share connections, and miss threads."""

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

REMEDY = "or set ASYNCQ['START_METHOD'] = 'spawn'"
STANDARD_STREAMS = (0, 1, 2)


def require_forkable() -> None:
    """Close what Django has opened while the project was loaded; log what else is open.

    Raises: RuntimeError for threads. One that a process does not have may have held a lock when it was forked.
    """
    for connection in connections.all(initialized_only=True):
        connection.close()
        # Of PostgreSQL, since Django 5.1: it ends the threads of a pool.
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()
    others = sorted(each.name for each in threading.enumerate() if each is not threading.current_thread())
    if others:
        raise RuntimeError(
            f"the project has started threads while it was loaded ({', '.join(others)}), and forked processes would "
            f"lack them. Start them when they are first used, {REMEDY}."
        )
    if peers := sorted(_peers()):
        text = "worker processes share connections that the project has opened while it was loaded: %s; close them, %s"
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
