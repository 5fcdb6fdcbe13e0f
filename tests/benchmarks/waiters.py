"""How soon `result.wait()` returns after its row is final: `python -m tests.benchmarks waiters --help`.

One process waits for many tasks at once; another one finishes them one by one, as a worker does: it records the row,
then acknowledges the task in Redis. Timed is from the commit of the row until the wait returns. Starts a Valkey of its
own. The database is a file of SQLite unless DATABASE_URL names another (an empty one: it is migrated, and its tasks are
deleted). Needs Linux, whose monotonic clock is the same in all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import django

from .figures import percentile

PATIENCE_SECONDS = 300.0
ROOT = Path(__file__).parent.parent.parent


def main(arguments: Sequence[str]) -> None:
    """Wait, finish, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks waiters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--waiters", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS, default="coroutines")
    parser.add_argument("--per-second", type=float, default=100.0, help="tasks that finish in a second")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--finish", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.finish:
        django.setup()
        finish(options.finish, options.per_second)
        return
    from django_asyncq.testing import EmbeddedRedis

    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        os.environ["ASYNCQ_TEST_REDIS_URL"] = server.url
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/rows.sqlite3")
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        for _ in range(options.repeat):
            measure(options.waiters, options.kind, options.per_second)


def measure(count: int, kind: str, per_second: float) -> None:
    """Take the times once, and print them."""
    from django.db import connection

    from django_asyncq.broker import Broker
    from django_asyncq.models import TaskRecord
    from tests import tasks

    TaskRecord.objects.all()._raw_delete("default")  # type: ignore[attr-defined]
    results = tasks.add.enqueue_many([(number,) for number in range(count)])
    woken: dict[str, int] = {}
    client = Broker().client
    with subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks", "waiters", "--finish", str(count), "--per-second", str(per_second)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as finisher:
        assert finisher.stdin is not None and finisher.stdout is not None

        def start() -> None:
            keys = Broker().keys("default")
            until(lambda: all(client.hget(keys.task(result.id), "waited") for result in results))
            print(f"{count} {kind} wait: {client.info('clients')['pubsub_clients']} connection listens", end="; ")
            finisher.stdin.write("go\n")
            finisher.stdin.close()

        starter = threading.Thread(target=start)
        starter.start()
        KINDS[kind](results, woken)
        starter.join()
        final = dict(line.split() for line in finisher.stdout)
    waits = [(woken[id] - int(at)) / 1e6 for id, at in final.items()]
    p50, p95, p99 = (percentile(waits, share) for share in (0.5, 0.95, 0.99))
    print(f"woken after p50 {p50:.2f} ms, p95 {p95:.2f} ms, p99 {p99:.2f} ms, {connection.vendor}", flush=True)


def until(holds: Callable[[], bool]) -> None:
    """Sleep until something holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            sys.exit("not all tasks are marked as waited for")
        time.sleep(0.1)


def wait_in_threads(results: Sequence[Any], woken: dict[str, int]) -> None:
    """Wait in one thread for each task, each with a database connection of its own."""
    from django.db import connections

    def wait(result: Any) -> None:
        result.wait(PATIENCE_SECONDS)
        woken[result.id] = time.monotonic_ns()
        connections.close_all()

    threads = [threading.Thread(target=wait, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_in_coroutines(results: Sequence[Any], woken: dict[str, int]) -> None:
    """Wait in one coroutine for each task, all in one event loop."""

    async def wait(result: Any) -> None:
        await result.await_(PATIENCE_SECONDS)
        woken[result.id] = time.monotonic_ns()

    async def main() -> None:
        await asyncio.gather(*map(wait, results))

    asyncio.run(main())


KINDS: dict[str, Callable[[Sequence[Any], dict[str, int]], None]] = {
    "coroutines": wait_in_coroutines,
    "threads": wait_in_threads,
}


def finish(count: int, per_second: float) -> None:
    """Claim all tasks, and finish them one by one once asked to; print the id of each, and when its row was final."""
    from django.utils import timezone

    from django_asyncq import lifecycle
    from django_asyncq.broker import Broker
    from django_asyncq.core.registry import load_task_modules

    load_task_modules()
    sys.stdin.readline()
    broker, runs = Broker(), []
    while len(runs) < count:
        runs += lifecycle.claim(broker, "default", "w", 200, "default").runs
    for run in runs:
        now = timezone.now()
        lifecycle.begin(run, "w", now)
        lifecycle.succeed(run, run.record.args[0], now)
        lifecycle.record_runs([run])
        print(run.record.id, time.monotonic_ns())
        lifecycle.acknowledge(broker, "w", [run])
        time.sleep(1 / per_second)
