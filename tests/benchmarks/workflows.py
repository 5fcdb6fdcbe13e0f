"""How long a large workflow takes to write, and how soon its end begins: `python -m tests.benchmarks workflows --help`.

A group of tasks that do nothing, and one task behind all of them, which gets their values. Timed are the `enqueue`, in
its transaction, and with workers from the end of the last member until the task behind them begins, by their rows.
Starts a Valkey of its own. The database is a file of SQLite unless DATABASE_URL names another (an empty one: it is
migrated, and its tasks are deleted).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import django

ROOT = Path(__file__).parent.parent.parent
PATIENCE_SECONDS = 600.0


def main(arguments: Sequence[str]) -> None:
    """Write, run, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks workflows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    from django_asyncq.testing import EmbeddedRedis

    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        os.environ["ASYNCQ_TEST_REDIS_URL"] = server.url
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/rows.sqlite3")
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        for _ in range(options.repeat):
            measure(options.members, Path(folder))


def measure(members: int, folder: Path) -> None:
    """Do it once, and print the times."""
    from django.db import connection, transaction

    from django_asyncq import group, previous
    from django_asyncq.models import TaskEdge, TaskRecord
    from tests import workflow_tasks as tasks

    for model in (TaskRecord, TaskEdge):
        model.objects.all()._raw_delete("default")  # type: ignore[attr-defined]
    then = tasks.total.using(after={"rows": previous}).step()
    workflow = group([tasks.load.step(number) for number in range(members)], then=then)
    begun_at = time.perf_counter()
    with transaction.atomic():
        result = workflow.enqueue()
        written_at = time.perf_counter()
    pushed_at = time.perf_counter()
    connection.close()
    with (folder / "workers.log").open("w") as log:
        command = [sys.executable, "-m", "django", "runworkers", "--processes", "2"]
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ}) as workers:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (row := TaskRecord.objects.get(id=result.id)).is_final and time.monotonic() < deadline:
                time.sleep(0.2)
            workers.terminate()
    last = TaskRecord.objects.exclude(id=result.id).order_by("-finished_at").first()
    assert last is not None
    assert last.finished_at is not None
    assert row.started_at is not None, f"it did not begin within {PATIENCE_SECONDS:g} s"
    assert row.return_value == sum(range(members))
    print(
        f"{connection.vendor}: {members:,} members: written in {written_at - begun_at:.2f} s, "
        f"pushed in {pushed_at - written_at:.2f} s; the task behind them began "
        f"{(row.started_at - last.finished_at).total_seconds():.3f} s after the last"
    )
