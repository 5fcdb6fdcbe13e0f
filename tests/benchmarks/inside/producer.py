"""The producer of every measure: `python producer.py APPLICATION`, then one JSON order a line, one JSON answer a line.

The application is a module of this folder with
    enqueue(kind, number)        one task, as a user would
    enqueue_many(kind, numbers)  optional: the bulk call
    transaction()                optional: a context manager
    fill(kind, numbers)          optional: any fast way, never timed
    settle()                     optional: wait until the servers have all of it; timed
    open(), close()              optional
Kinds: noop, stamp, nap, anap, short, long, fail_once, gated. With ASYNC = True they are coroutine functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import resource
import statistics
import sys
import time
from typing import Any

import probe

BULK = 1000


async def done(outcome: Any) -> None:
    """Await what an application of either kind has returned."""
    if inspect.isawaitable(outcome):
        await outcome


async def one_by_one(app: Any, kind: str, first: int, count: int, per_transaction: int = 0) -> None:
    """Enqueue one by one, in autocommit or in transactions of so many."""
    enqueue = app.enqueue
    numbers = range(first, first + count)
    if getattr(app, "ASYNC", False):
        for number in numbers:
            await enqueue(kind, number)
    elif per_transaction:
        for begin in range(first, first + count, per_transaction):
            with app.transaction():
                for number in range(begin, min(begin + per_transaction, first + count)):
                    enqueue(kind, number)
    else:
        for number in numbers:
            enqueue(kind, number)


async def bulk(app: Any, kind: str, first: int, count: int) -> None:
    """Enqueue with the bulk call."""
    for begin in range(first, first + count, BULK):
        await done(app.enqueue_many(kind, range(begin, min(begin + BULK, first + count))))


async def fill(app: Any, kind: str, first: int, count: int) -> None:
    """Enqueue by whatever is fast."""
    if hasattr(app, "fill"):
        for begin in range(first, first + count, 10 * BULK):
            await done(app.fill(kind, range(begin, min(begin + 10 * BULK, first + count))))
    elif hasattr(app, "enqueue_many"):
        await bulk(app, kind, first, count)
    else:
        await one_by_one(app, kind, first, count)


async def paced(app: Any, kind: str, first: int, count: int, per_second: float) -> dict[str, float]:
    """Enqueue at a steady rate, noting when each call began; return how long the middle one of all calls took.

    Sleeps without an event loop, as nothing else runs.
    """
    start, took = time.perf_counter(), []
    for index in range(count):
        time.sleep(max(0.0, start + index / per_second - time.perf_counter()))
        probe.enqueued(first + index)
        began = time.perf_counter()
        await done(app.enqueue(kind, first + index))
        took.append(time.perf_counter() - began)
    return {"call_seconds": statistics.median(took)}


async def bursts(app: Any, first: int, count: int, shorts: int, pause_seconds: float) -> None:
    """Enqueue bursts of one long task and many short ones; the long one has the burst's first number."""
    start = time.perf_counter()
    for index in range(count):
        time.sleep(max(0.0, start + index * pause_seconds - time.perf_counter()))
        begin = first + index * (shorts + 1)
        for number in range(begin, begin + shorts + 1):
            probe.enqueued(number)
            await done(app.enqueue("long" if number == begin else "short", number))


ORDERS: dict[str, Any] = {"one_by_one": one_by_one, "bulk": bulk, "fill": fill, "paced": paced, "bursts": bursts}


def cpu_seconds() -> float:
    """What this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def obey(app: Any, answers: Any) -> None:
    """Carry out the orders until there are no more."""
    if hasattr(app, "open"):
        await done(app.open())
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        act = ORDERS[order.pop("order")]
        used, begun = cpu_seconds(), time.perf_counter()
        found = await act(app, **order)
        if hasattr(app, "settle"):
            await done(app.settle())
        answer = {"seconds": time.perf_counter() - begun, "cpu_seconds": cpu_seconds() - used, **(found or {})}
        print(json.dumps(answer), file=answers, flush=True)
    if hasattr(app, "close"):
        await done(app.close())


def main() -> None:
    """Serve."""
    # What an application prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    app = importlib.import_module(sys.argv[1])
    obeying = obey(app, answers)
    if getattr(app, "ASYNC", False):
        asyncio.run(obeying)
        return
    # Driven by hand: inside a running event loop Django forbids its ORM.
    with contextlib.suppress(StopIteration):
        obeying.send(None)
        raise RuntimeError(f"{sys.argv[1]} awaits, but does not say ASYNC = True")


if __name__ == "__main__":
    main()
