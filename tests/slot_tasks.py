"""Tasks that say when they run, for the tests of slots per queue. `tests.tasks` imports them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from django_asyncq import task

from .observed_tasks import wait_for


def note(path: str, event: str, queue: str) -> None:
    """Append a line, whole. at: seconds, the same in all processes."""
    line = json.dumps({"event": event, "queue": queue, "pid": os.getpid(), "at": time.monotonic()}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@task
def occupy(path: str, queue: str, seconds: float = 0.0, go: str = "") -> None:
    """Occupy a slot for a while, or until a file is there."""
    note(path, "begin", queue)
    time.sleep(seconds)
    wait_for(go)
    note(path, "end", queue)


@task(isolated=True)
def occupy_isolated(path: str, queue: str, go: str = "") -> None:
    """Do so in a process, until a file is there."""
    note(path, "begin", queue)
    wait_for(go)
    note(path, "end", queue)


@task
async def aoccupy(path: str, queue: str, seconds: float = 0.0, go: str = "") -> None:
    """Do so in the event loop."""
    note(path, "begin", queue)
    await asyncio.sleep(seconds)
    while go and not Path(go).exists():
        await asyncio.sleep(0.02)
    note(path, "end", queue)
