"""What one `enqueue` costs beside its own two round trips: `python -m tests.benchmarks.floor --help`.

Starts a Redis and a PostgreSQL (fsync on) of its own. Each line is a call repeated by one process, in microseconds of
the clock and of this process's CPU; the best of several rounds, which take turns; then the middle of calls that come
after a pause, in which all of the processor's caches went to other data. Below the bare INSERT with its COMMIT
no queue can get that has a row for every task, whatever it is written in. The waiting measures follow the same way,
without any queue (see `bare`).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from uuid import UUID

import django

from . import bare
from .servers import PostgresServer, RedisServer

PER_TRANSACTION = 100
# More than the caches of a processor hold; and longer than pushes are gathered, so that each is a lone one.
MUCH_BYTES = 64 << 20
PAUSE_SECONDS = 0.012
# Larger than any number of tasks that is tried.
OPEN_LIMIT = 10**9


class Cost(NamedTuple):
    """Microseconds a call."""

    wall: float
    cpu: float


def main() -> None:
    """Start the servers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis, PostgresServer() as postgres:
        os.environ["ASYNCQ_TEST_REDIS_URL"] = f"redis://127.0.0.1:{redis.port}/0"
        os.environ["ASYNCQ_TEST_LOCK_DIR"] = f"{folder}/locks"
        dsn = f"postgres://postgres@127.0.0.1:{postgres.port}/postgres"
        # Statements are prepared, as in `compare`; psycopg alone does so by itself.
        os.environ["DATABASE_URL"] = f"{dsn}?server_side_binding=true&prepare_threshold=5"
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        print(versions({**redis.version, **postgres.version}))
        print("\n| call | µs | of which CPU of the process |\n|---|---:|---:|")
        for name, cost in measure(options.calls, options.rounds).items():
            print(f"| {name} | {cost.wall:,.0f} | {cost.cpu:,.0f} |")
        print("\n| after a pause, the caches emptied | µs | of which CPU of the process |\n|---|---:|---:|")
        for name, cost in measure_cold(options.calls // 5).items():
            print(f"| {name} | {cost.wall:,.0f} | {cost.cpu:,.0f} |")
        print("\n| without a queue | |\n|---|---:|")
        for name, text in wait(dsn, os.environ["ASYNCQ_TEST_REDIS_URL"], options.rounds):
            print(f"| {name} | {text} |")


def versions(servers: dict[str, str]) -> str:
    """Return one line of what ran."""
    import psycopg
    import redis

    found = {"Python": platform.python_version(), "Django": django.__version__, "redis-py": redis.__version__}
    found |= {"psycopg": psycopg.__version__, **servers, "processors": str(os.cpu_count())}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def measure(calls: int, rounds: int) -> dict[str, Cost]:
    """Return the least each kind of call cost in any round."""
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    best: dict[str, Cost] = {}
    for _ in range(rounds):
        for name, (call, size) in kinds().items():
            with connection.cursor() as cursor:
                cursor.execute("TRUNCATE django_asyncq_taskrecord CASCADE")
            repeat(call, 3)
            cost = repeat(call, max(calls // size, 1))
            cost = Cost(cost.wall / size, cost.cpu / size)
            known = best.get(name, cost)
            best[name] = Cost(min(known.wall, cost.wall), min(known.cpu, cost.cpu))
    return best


def measure_cold(times: int) -> dict[str, Cost]:
    """Return the middle of such calls as a web process makes, that has done other things before."""
    much = os.urandom(1 << 20) * (MUCH_BYTES >> 20)
    found: dict[str, Cost] = {}
    for name, (call, size) in kinds().items():
        if size > 1:
            continue
        repeat(call, 10)
        walls, cpus = [], []
        for _ in range(times):
            much.count(b"\0\1\2")
            time.sleep(PAUSE_SECONDS)
            wall, cpu = time.perf_counter(), time.thread_time()
            call()
            cpus.append((time.thread_time() - cpu) * 1e6)
            walls.append((time.perf_counter() - wall) * 1e6)
        found[name] = Cost(statistics.median(walls), statistics.median(cpus))
    return found


def wait(dsn: str, redis_url: str, rounds: int) -> Iterator[tuple[str, str]]:
    """Yield what the waiting measures come to without a queue, the best of the rounds."""
    from django.db import connection

    from django_asyncq.models import TaskRecord

    sql, values = insertion()
    columns = ", ".join(connection.ops.quote_name(field.column) for field in TaskRecord._meta.concrete_fields)
    select = f"SELECT {columns} FROM {TaskRecord._meta.db_table} WHERE id = %s"  # names of the model's own
    connection.close()

    def made(id: UUID) -> tuple[str, list[Any]]:
        return sql, [id, *values]

    for through_django, what in (
        (False, "a row inserted, its id pushed, taken and the row read"),
        (True, "the same through Django's connections, a script call before the row is read"),
    ):
        found = [bare.pick_up(dsn, redis_url, made, select, through_django=through_django) for _ in range(rounds)]
        p50, p99, call = (min(each) for each in zip(*found, strict=True))
        yield f"{what}, at 50/s: p50, p99, ms", f"{p50:.1f}, {p99:.1f}"
        yield "of which the INSERT and the push: p50, ms", f"{call:.1f}"
    naps = min(bare.naps() for _ in range(rounds))
    yield "2,000 × 10 ms in 2 × 16 threads that only sleep: times the ideal", f"{naps:.2f}"
    naps = min(bare.async_naps() for _ in range(rounds))
    yield "the same in coroutines that begin 0.3 ms apart", f"{naps:.2f}"


def repeat(call: Callable[[], Any], times: int) -> Cost:
    """Return what one call costs, with all that it has left to be done behind its back."""
    from django_asyncq.lifecycle import flush_pushes

    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    flush_pushes()
    return Cost((time.perf_counter() - wall) / times * 1e6, (time.process_time() - cpu) / times * 1e6)


def kinds() -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the calls by name, each with the number of tasks (or statements) that one makes."""
    from django.db import connection, transaction

    from django_asyncq.broker import Broker, scripts
    from django_asyncq.definitions.names import uuid7
    from tests import tasks

    connection.ensure_connection()
    cursor = connection.connection.cursor()
    client = Broker("producer").client
    gated = tasks.add.using(gate="floor", queue_limit=OPEN_LIMIT)

    sql, values = insertion()

    def insert() -> None:
        cursor.execute(sql, [uuid7(), *values])

    def insert_through_django() -> None:
        with connection.cursor() as managed:
            managed.execute(sql, [uuid7(), *values])

    def least() -> None:
        insert_through_django()
        scripts.run("lock_release", client, ["floor"], ["nobody"])

    def ask_and_enqueue() -> None:
        client.ping()
        tasks.add.enqueue(1)

    def in_a_transaction(call: Callable[[], Any]) -> Callable[[], None]:
        def repeated() -> None:
            with transaction.atomic():
                for _ in range(PER_TRANSACTION):
                    call()

        return repeated

    many = [(1,)] * 1000
    return {
        "`SELECT 1` through psycopg": (lambda: cursor.execute("SELECT 1"), 1),
        "the row's INSERT and COMMIT through psycopg alone": (insert, 1),
        "the same INSERT, 100 in a transaction": (in_a_transaction(insert), PER_TRANSACTION),
        "the same through Django's cursor, 100 in a transaction": (
            in_a_transaction(insert_through_django),
            PER_TRANSACTION,
        ),
        "`PING` through redis-py": (client.ping, 1),
        "the INSERT through Django's cursor, and one script call that finds nothing to do": (least, 1),
        "`task.enqueue()`": (lambda: tasks.add.enqueue(1), 1),
        "`task.enqueue()`, 100 in a transaction": (in_a_transaction(lambda: tasks.add.enqueue(1)), PER_TRANSACTION),
        "`PING` through redis-py, then `task.enqueue()`": (ask_and_enqueue, 1),
        "`task.enqueue()` at a gate": (lambda: gated.enqueue(1), 1),
        "`task.enqueue_many()` of 1,000": (lambda: tasks.add.enqueue_many(many), 1000),
        "`task.enqueue_many()` of 1,000 at a gate": (lambda: gated.enqueue_many(many), 1000),
    }


def insertion() -> tuple[str, list[Any]]:
    """Return the INSERT of a row as `enqueue` makes it, and its parameters after the id."""
    from django.db import connection
    from django.utils import timezone

    from django_asyncq.models import TaskRecord
    from django_asyncq.storage.inserting import _statements

    row = TaskRecord(name="tests.tasks.add", args=[1], enqueued_at=timezone.now())
    sql, (_, *values) = next(iter(_statements([row], connection)))
    return sql, values


if __name__ == "__main__":
    main()
