"""`manage.py asyncq` on a terminal of its own, and behind a pipe: real processes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest

from django_asyncq.models import TaskRecord
from django_asyncq.testing import EmbeddedRedis

from . import tasks
from .workers import ROOT, environment

pytestmark = pytest.mark.django_db(transaction=True)


def begin(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """Begin the command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "django", "asyncq", *arguments], env=environment(), cwd=ROOT, **more)


def read_until(terminal: int, wanted: bytes, seconds: float = 60.0) -> bytes:
    """Read what a process writes to its terminal until a text is there, or the process has closed it."""
    found, until = b"", time.monotonic() + seconds
    while wanted not in found and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                found += os.read(terminal, 65_536)
            except OSError:
                break
    assert wanted in found, found[-2000:]
    return found


@pytest.mark.parametrize(("plain", "number"), [(True, signal.SIGINT), (False, signal.SIGTERM)])
def test_dash_restores_its_terminal(own_redis: EmbeddedRedis, own_keys: None, plain: bool, number: int) -> None:
    """With rich and without, by Ctrl-C and SIGTERM: the former screen and cursor are back. 80 columns do."""
    tasks.add.enqueue(1)
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = begin(
        "dash", *(["--plain"] if plain else []), stdin=there, stdout=there, stderr=there, start_new_session=True
    )
    os.close(there)
    try:
        shown = read_until(here, b"Ctrl-C ends it.")
        assert b"\x1b[?1049h" in shown
        assert b"default " in shown
        assert b"archived" in shown
        process.send_signal(number)
        rest = read_until(here, b"\x1b[?1049l")
        assert b"\x1b[?25h" in rest + read_rest(here)
        assert process.wait(10) == 0
        assert b"Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        os.close(here)


def read_rest(terminal: int) -> bytes:
    """Read what is left, until the process has closed its terminal."""
    found = b""
    while select.select([terminal], [], [], 5)[0]:
        try:
            part = os.read(terminal, 65_536)
        except OSError:
            break
        if not part:
            break
        found += part
    return found


def test_a_reader_that_stops_is_no_error(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """As `head` does."""
    TaskRecord.objects.bulk_create(TaskRecord(name="tests.tasks.add", headers={"a": "x" * 50}) for _ in range(1000))
    process = begin("tasks", "list", "--limit", "1000", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    text = process.stderr.read()
    process.wait(20)
    process.stderr.close()
    assert b"Traceback" not in text
