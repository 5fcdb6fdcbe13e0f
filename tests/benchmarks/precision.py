"""How late delayed tasks and ticks start on an idle system: `python -m tests.benchmarks.precision --help`.

Starts a Valkey of its own and `runworkers --processes 1`; the database is a file of SQLite unless DATABASE_URL names
another (an empty one: it is migrated, and its tasks and schedules are deleted). Lateness is from the due time to
the first line of the task's body, both by this host's clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import django

QUIET_SECONDS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=70, help="how long; more than 60 covers every second")
    parser.add_argument("--rate", type=float, default=3, help="delayed tasks a second")
    options = parser.parse_args()
    from django_asyncq.testing import EmbeddedRedis

    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        os.environ["ASYNCQ_TEST_REDIS_URL"] = server.url
        os.environ["ASYNCQ_TEST_HISTORY"] = f"{folder}/history"
        os.environ["ASYNCQ_TEST_LOCK_DIR"] = f"{folder}/locks"
        # The default, not what the tests use: nothing may be in time only because somebody looks often.
        os.environ["ASYNCQ_TEST_FORWARD"] = "1"
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/rows.sqlite3")
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        measure(Path(folder), options.seconds, options.rate)


def measure(folder: Path, seconds: int, rate: float) -> None:
    """Run the workers, let tasks become due, print how late they were."""
    import redis
    from django.core.management import call_command
    from django.db import connection
    from django.utils import timezone

    from django_asyncq.models import Occurrence, Schedule, TaskRecord
    from tests import tasks

    call_command("migrate", verbosity=0)
    Schedule.objects.all().delete()
    TaskRecord.objects.all().delete()
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "django", "runworkers", "--processes", "1"]
        workers = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            tasks.stamp.enqueue()
            wait_for(lambda: read_history(folder), "the workers")
            row = Schedule(name="precision", task="tests.tasks.stamp", interval_seconds=1)
            row.plan_next(timezone.now())
            row.save()
            due = enqueue_delayed(tasks.stamp, int(seconds * rate), seconds)
            wait_for(lambda: time.time() > max(due.values()) + QUIET_SECONDS, "the last one", seconds + 60)
        finally:
            workers.terminate()
            workers.wait(60)
    started = read_history(folder)
    ticks = {str(tick.task_id): tick.occurs_at.timestamp() for tick in Occurrence.objects.all()}
    server = redis.Redis.from_url(os.environ["ASYNCQ_TEST_REDIS_URL"]).info("server")
    redis_version = f"Valkey {server['valkey_version']}" if "valkey_version" in server else server["redis_version"]
    versions = [f"Python {platform.python_version()}", f"Django {django.__version__}", connection.vendor, redis_version]
    print(", ".join([*versions, f"{os.cpu_count()} cores"]))
    print("| what | starts | never started | p50 ms | p95 ms | max ms | earliest ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, times in (("delayed tasks", due), ("ticks", ticks)):
        late = [(started[id] - at) * 1000 for id, at in times.items() if id in started]
        quantiles = statistics.quantiles(late, n=100)
        print(
            f"| {name} | {len(late)} | {len(times) - len(late)} | {quantiles[49]:.1f} | {quantiles[94]:.1f} "
            f"| {max(late):.1f} | {min(late):.1f} |"
        )


def enqueue_delayed(task: object, count: int, seconds: int) -> dict[str, float]:
    """Enqueue tasks that become due at random moments; return these by id."""
    from django.utils import timezone

    spread = random.Random(1)
    start = timezone.now() + timedelta(seconds=QUIET_SECONDS)
    due: dict[str, float] = {}
    for _ in range(count):
        at = start + timedelta(seconds=spread.uniform(0, seconds))
        due[str(task.using(run_after=at).enqueue().id)] = at.timestamp()  # type: ignore[attr-defined]
    return due


def read_history(folder: Path) -> dict[str, float]:
    """Return when each task began, by id."""
    from tests.workers import history

    return {line["id"]: line["wall"] for line in history(folder / "history")}


def wait_for(condition: object, what: str, seconds: float = 60) -> None:
    """Wait until something holds."""
    from tests.workers import wait_until

    wait_until(condition, what, seconds)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
