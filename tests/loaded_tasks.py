"""Tasks of a project that does something while it is loaded, as ASYNCQ_TEST_LOADING says, except in a command."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from django.db import connections

from django_asyncq import task

# How Python starts what multiprocessing starts: worker processes and fork servers.
IS_CHILD = "-c" in sys.orig_argv

opened: list[socket.socket] = []


@task(max_attempts=1)
def is_connected() -> bool:
    """Return whether this thread has a connection to the database before it uses one."""
    return connections["default"].connection is not None


def load(what: str) -> None:
    """Start a thread, or one of a library; connect to an address or a database; sleep; die unless a file is there."""
    kind, _, value = what.partition("=")
    if kind == "thread":
        threading.Thread(target=threading.Event().wait, name=value, daemon=True).start()
    elif kind == "library":
        # As a thread that no Python code has started: `threading` does not know it.
        lock = _thread.allocate_lock()
        lock.acquire()
        _thread.start_new_thread(lock.acquire, ())
    elif kind == "socket":
        host, port = value.split(":")
        opened.append(socket.create_connection((host, int(port))))
    elif kind == "sleep":
        time.sleep(float(value))
    elif kind == "database":
        connections["default"].ensure_connection()
    elif kind == "dies" and not Path(value).exists():
        Path(value).touch()
        os.kill(os.getpid(), signal.SIGKILL)


if IS_CHILD and (found := os.environ.get("ASYNCQ_TEST_LOADING")):
    load(found)
