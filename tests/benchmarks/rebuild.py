"""How long a rebuild takes after Redis was emptied: `python -m tests.benchmarks.rebuild --help`.

Starts a Valkey of its own. The database is a file of SQLite unless DATABASE_URL names another (an empty one: it is
migrated, and its tasks and gates are deleted). Of 100 rows 70 are pending, 10 scheduled, 10 RETRYING, and 10 hold slots
of ten gates.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import pstats
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import django

ROWS_PER_INSERT = 5000
GATES = 10


def main() -> None:
    """Fill, empty, rebuild, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time of the first rebuild went")
    options = parser.parse_args()
    from django_asyncq.testing import EmbeddedRedis

    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        os.environ["ASYNCQ_TEST_REDIS_URL"] = server.url
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/rows.sqlite3")
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        fill(options.rows)
        for number in range(options.repeat):
            rebuild(options.rows, profile=options.profile and not number)


def fill(rows: int) -> None:
    """Put the rows into the database, an hour old."""
    from django.core.management import call_command
    from django.db import connection
    from django.utils import timezone

    from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
    from tests.clock import uuid7_at

    call_command("migrate", verbosity=0)
    TaskRecord.objects.all()._raw_delete("default")  # type: ignore[attr-defined]
    Gate.objects.all().delete()
    Gate.objects.bulk_create(Gate(name=f"gate-{number}", limit=rows) for number in range(GATES))
    now = timezone.now()
    then = now - timedelta(hours=1)

    def row(number: int) -> TaskRecord:
        record = TaskRecord(id=uuid7_at(then), name="tests.tasks.add", args=[number], kwargs={"b": 1}, enqueued_at=then)
        kind = number % 10
        if kind == 7:
            record.run_after = now + timedelta(hours=1)
        elif kind == 8:
            record.state, record.reason = TaskState.FAILED, FailureReason.EXCEPTION
            record.retry_at = now + timedelta(hours=1)
        elif kind == 9:
            record.gate = f"gate-{number // 10 % GATES}"
        return record

    for start in range(0, rows, ROWS_PER_INSERT):
        TaskRecord.objects.bulk_create(row(number) for number in range(start, min(start + ROWS_PER_INSERT, rows)))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def rebuild(rows: int, *, profile: bool) -> None:
    """Empty Redis, rebuild it from the rows, print how long that took."""
    from django.db import connection

    from django_asyncq.broker import Broker
    from django_asyncq.broker.keys import QueueKeys
    from django_asyncq.fleet.reconciler import Reconciler

    broker, keys = Broker(), QueueKeys("default")
    broker.client.flushall()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    begun_at, cpu_at, server_at = time.monotonic(), time.process_time(), server_seconds(broker.client)
    reconciler = Reconciler(broker)
    repairs = reconciler.tick(begun_at)
    while reconciler.current_sweep:
        repairs = repairs.plus(reconciler.tick(time.monotonic()))
    seconds, cpu_seconds = time.monotonic() - begun_at, time.process_time() - cpu_at
    server_cpu_seconds = server_seconds(broker.client) - server_at
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(40)
    info = broker.client.info("server")
    found = {
        "pending": broker.client.llen(keys.pending),
        "scheduled": broker.client.zcard(keys.scheduled),
        "retry": broker.client.zcard(keys.retry),
    }
    print(
        f"{rows:,} rows in {seconds:.1f} s (CPU: {cpu_seconds:.1f} s here, {server_cpu_seconds:.1f} s of the server); "
        f"{repairs}; {found}; Python {platform.python_version()}, "
        f"Django {django.get_version()}, {connection.vendor} {'.'.join(map(str, connection.get_database_version()))}, "
        f"server {info.get('valkey_version') or info['redis_version']}"
    )
    begun_at, cpu_at = time.monotonic(), time.process_time()
    again = reconciler.sweep()
    seconds, cpu_seconds = time.monotonic() - begun_at, time.process_time() - cpu_at
    print(f"a sweep that finds {again}: {seconds:.1f} s (CPU: {cpu_seconds:.1f} s here)")
    if sum(found.values()) != rows:
        sys.exit("not all rows are in Redis")


def server_seconds(client: Any) -> float:
    """The CPU time the server has used until now."""
    info = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


if __name__ == "__main__":
    main()
