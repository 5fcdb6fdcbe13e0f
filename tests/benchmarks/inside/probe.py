"""What a task body notes, the same few lines for every peer: about half a microsecond, no Redis command, no statement.

The file is mapped shared, so it survives a killed process. Times are CLOCK_MONOTONIC, one clock for all processes of a
Linux host. It also counts what redis-py sends, which the server cannot tell from commands inside scripts.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
import time
from time import monotonic_ns
from typing import Any

from layout import (
    ATTEMPTS,
    BEGUN,
    COMMANDS,
    COUNT,
    ENDED,
    ENQUEUED,
    FIRST,
    LAST,
    ROUND_TRIPS,
    SIZE_BYTES,
    SLOT_WORDS,
    SLOTS,
    SLOTS_AT,
    TIMES_AT,
    TIMES_WORDS,
)

SHORT_SECONDS, NAP_SECONDS, LONG_SECONDS = 0.001, 0.01, 1.0

_file = os.open(os.environ["BENCH_PROBE"], os.O_RDWR)
_words = memoryview(mmap.mmap(_file, SIZE_BYTES)).cast("q")
_lock = threading.Lock()
_own = threading.local()


class FirstAttempt(Exception):
    """Raised by the first attempt of a task that is to run twice."""


def _forget() -> None:
    global _lock, _own
    _lock, _own = threading.Lock(), threading.local()


os.register_at_fork(after_in_child=_forget)


def _new_slot() -> memoryview:
    with _lock:
        # Record locks belong to the process, so the lock above keeps its threads apart, this one the processes.
        fcntl.lockf(_file, fcntl.LOCK_EX, 8, 0)
        try:
            number = _words[0]
            if number >= SLOTS:
                raise RuntimeError("more threads than the probe has slots")
            _words[0] = number + 1
        finally:
            fcntl.lockf(_file, fcntl.LOCK_UN, 8, 0)
    begin = SLOTS_AT + number * SLOT_WORDS
    _own.slot = _words[begin : begin + SLOT_WORDS]
    return _own.slot


def _slot() -> memoryview:
    try:
        return _own.slot
    except AttributeError:
        return _new_slot()


def hit() -> None:
    """Count a task that does nothing: it begins and ends here."""
    slot = _slot()
    now = monotonic_ns()
    if not slot[FIRST]:
        slot[FIRST] = now
    slot[LAST] = now
    slot[COUNT] += 1


def begin(number: int) -> None:
    """Note that a numbered task has begun."""
    slot = _slot()
    now = monotonic_ns()
    if not slot[FIRST]:
        slot[FIRST] = now
    _words[TIMES_AT + number * TIMES_WORDS + BEGUN] = now


def finish(number: int) -> None:
    """Note that a numbered task ends, and count it."""
    slot = _slot()
    now = monotonic_ns()
    _words[TIMES_AT + number * TIMES_WORDS + ENDED] = now
    slot[LAST] = now
    slot[COUNT] += 1


def enqueued(number: int) -> None:
    """Note, in the producer, that the call that enqueues a numbered task begins."""
    _words[TIMES_AT + number * TIMES_WORDS + ENQUEUED] = monotonic_ns()


# --- bodies


def stamp(number: int) -> None:
    """Only note the times."""
    begin(number)
    finish(number)


def sleep(number: int, seconds: float) -> None:
    """Take so long, as a `def`."""
    begin(number)
    time.sleep(seconds)
    finish(number)


async def asleep(number: int, seconds: float) -> None:
    """Take so long, as an `async def`."""
    begin(number)
    await asyncio.sleep(seconds)
    finish(number)


def fail_once(number: int) -> None:
    """Fail at the first attempt. Raises: FirstAttempt."""
    begin(number)
    at = TIMES_AT + number * TIMES_WORDS + ATTEMPTS
    _words[at] += 1
    if _words[at] == 1:
        raise FirstAttempt
    finish(number)


# --- Redis commands of this process


def _count(commands: int, round_trips: int) -> None:
    slot = _slot()
    slot[COMMANDS] += commands
    slot[ROUND_TRIPS] += round_trips


def _watch(connection: Any) -> None:
    """Count what connections of this class send; a pipeline packs many commands and sends once."""
    send, send_packed, pack = connection.send_command, connection.send_packed_command, connection.pack_commands
    is_async = asyncio.iscoroutinefunction(send)

    def counted_pack(self: Any, commands: Any) -> Any:
        commands = list(commands)
        _count(len(commands), 0)
        return pack(self, commands)

    if is_async:

        async def counted_send(self: Any, *words: Any, **options: Any) -> Any:
            _count(1, 0)
            return await send(self, *words, **options)

        async def counted_packed(self: Any, command: Any, *more: Any, **options: Any) -> Any:
            _count(0, 1)
            return await send_packed(self, command, *more, **options)

    else:

        def counted_send(self: Any, *words: Any, **options: Any) -> Any:
            _count(1, 0)
            return send(self, *words, **options)

        def counted_packed(self: Any, command: Any, *more: Any, **options: Any) -> Any:
            _count(0, 1)
            return send_packed(self, command, *more, **options)

    connection.send_command, connection.send_packed_command = counted_send, counted_packed
    connection.pack_commands = counted_pack


try:
    import redis.asyncio.connection
    import redis.connection
except ImportError:
    pass
else:
    _watch(redis.connection.AbstractConnection)
    _watch(redis.asyncio.connection.AbstractConnection)
