"""The work of the waiting measures without any queue: what remains of them when all that is ours is taken away.

Two processes of sixteen threads, or coroutines, that do nothing but sleep; and a row that is inserted, an id that is
pushed, a process that blocks for it and reads the row. Each side uses psycopg and redis-py alone, or, to tell what
Django's connections add, those and a script call between, as whoever leases a task has to make.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple
from uuid import UUID

from .figures import percentile

START_SECONDS = 60.0
END_SECONDS = 120.0
PROCESSES, THREADS = 2, 16
NAPS, NAP_SECONDS = 2_000, 0.01
# Coroutines that begin together keep step, and wake together; those of a queue do not.
APART_SECONDS = 0.0003
PICKUPS, PICKUPS_PER_SECOND = 500, 50.0
PENDING, LEASES = "bare:pending", "bare:leases"
LEASE = "return redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + 30, ARGV[1])"


class PickUp(NamedTuple):
    """Milliseconds: from before the INSERT to the row in the other process, and of the two calls that enqueue."""

    p50: float
    p99: float
    call: float


def naps() -> float:
    """Return how many times the ideal threads take that only sleep: all sleep divided by all threads is 1."""
    return _times_ideal(_nap)


def async_naps() -> float:
    """Return the same of coroutines, as many, that begin one after the other."""
    return _times_ideal(_nap_in_loop)


def _times_ideal(nap: Callable[[Barrier, Connection], None]) -> float:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES)
    ours, theirs = context.Pipe(duplex=False)
    started = [context.Process(target=nap, args=(barrier, theirs), daemon=True) for _ in range(PROCESSES)]
    for process in started:
        process.start()
    spans = [received(ours) for _ in started]
    for process in started:
        process.join(END_SECONDS)
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return seconds / (NAPS * NAP_SECONDS / PROCESSES / THREADS)


def _nap(barrier: Barrier, answer: Connection) -> None:
    line: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(NAPS // PROCESSES):
        line.put(None)

    def work() -> None:
        try:
            while True:
                line.get_nowait()
                time.sleep(NAP_SECONDS)
        except queue.Empty:
            return

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    barrier.wait(START_SECONDS)
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.send((begin, time.monotonic()))


def _nap_in_loop(barrier: Barrier, answer: Connection) -> None:
    left = NAPS // PROCESSES

    async def work(number: int) -> None:
        nonlocal left
        await asyncio.sleep(number * APART_SECONDS)
        while left:
            left -= 1
            await asyncio.sleep(NAP_SECONDS)

    async def work_all() -> None:
        await asyncio.gather(*map(work, range(THREADS)))

    barrier.wait(START_SECONDS)
    begin = time.monotonic()
    asyncio.run(work_all())
    answer.send((begin, time.monotonic()))


def pick_up(
    dsn: str, redis_url: str, insert: Callable[[UUID], tuple[str, Any]], select: str, *, through_django: bool = False
) -> PickUp:
    """Insert a row, push its id, wait for who takes it and reads the row, fifty times a second.

    insert: makes the statement and its parameters for an id. select: reads the row of one. through_django: by the
    connections of Django on both sides, after its setup, and with a script call before the row is read.
    """
    import redis

    from django_asyncq.definitions.names import uuid7

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    taker = context.Process(target=_take, args=(dsn, redis_url, select, through_django, theirs), daemon=True)
    taker.start()
    received(ours)
    client = redis.Redis.from_url(redis_url, protocol=2)
    waits, calls = [], []
    with _executing(dsn, through_django=through_django) as execute:
        due = time.monotonic()
        for number in range(PICKUPS + 1):
            due += 1 / PICKUPS_PER_SECOND
            time.sleep(max(0.0, due - time.monotonic()))
            id = uuid7()
            begun = time.monotonic()
            execute(*insert(id))
            client.lpush(PENDING, str(id))
            called = time.monotonic()
            waits.append(received(ours) - begun)
            calls.append(called - begun)
            if number == 0:  # it connected
                waits.clear()
                calls.clear()
    taker.terminate()
    taker.join(END_SECONDS)
    return PickUp(percentile(waits, 0.5) * 1e3, percentile(waits, 0.99) * 1e3, percentile(calls, 0.5) * 1e3)


def _take(dsn: str, redis_url: str, select: str, through_django: bool, answer: Connection) -> None:
    """Block, read the row, say when: CLOCK_MONOTONIC is one for all processes of a Linux host."""
    import redis

    client = redis.Redis.from_url(redis_url, protocol=2)
    lease = client.script_load(LEASE)
    with _executing(dsn, through_django=through_django) as execute:
        client.ping()
        answer.send(0.0)
        while True:
            found = client.brpop(PENDING, timeout=int(END_SECONDS))
            if found is None:
                return
            if through_django:
                client.evalsha(lease, 1, LEASES, found[1])
            execute(select, [found[1].decode()]).fetchall()
            answer.send(time.monotonic())


@contextmanager
def _executing(dsn: str, *, through_django: bool) -> Iterator[Callable[[str, Any], Any]]:
    """Yield what executes a statement and returns the cursor; each makes one, as Django's users do, or keeps one."""
    if through_django:
        import django

        django.setup()
        from django.db import connection

        def execute(sql: str, parameters: Any) -> Any:
            cursor = connection.cursor()
            cursor.execute(sql, parameters)
            return cursor

        yield execute
        connection.close()
        return
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as own:
        yield own.cursor().execute


def received(pipe: Connection) -> Any:
    """Return what another process says. Raises: TimeoutError."""
    if not pipe.poll(START_SECONDS):
        raise TimeoutError(f"a bare process said nothing for {START_SECONDS:g} s")
    return pipe.recv()
