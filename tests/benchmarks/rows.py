"""What the columns and indexes of the row cost on PostgreSQL: `python -m tests.benchmarks.rows --help`.

DATABASE_URL names an empty database; its tasks are deleted. Each turn inserts plain rows, writes them as RUNNING and as
SUCCEEDED with the statements that the package itself uses, and does so for one tree after the other. The trees share
the database: before each turn its tables are made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROWS_PER_INSERT = 1000
ROWS_PER_UPDATE = 500
HERE = Path(__file__).parents[2]


def main() -> None:
    """Measure each tree in turns, and print the medians and the ratios to the first tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--trees", nargs="*", type=Path, default=[], help="other checkouts; the first is the standard")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_turn(options.rows)))
        return
    trees = [tree.resolve() for tree in options.trees] + [HERE]
    turns = [{tree: turn_of(tree, options.rows) for tree in trees} for _ in range(options.turns)]
    for name in turns[0][trees[0]]:
        first = median(turn[trees[0]][name] for turn in turns)
        for tree in trees:
            figure = median(turn[tree][name] for turn in turns)
            print(f"{name:15} {tree!s:30} {figure:15,.3f}  {figure / first:.2f}")


def turn_of(tree: Path, rows: int) -> dict[str, float]:
    """Run this file, with the package of a tree, in a process of its own; return its figures."""
    command = [sys.executable, __file__, "--one", "--rows", str(rows)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def one_turn(rows: int) -> dict[str, float]:
    """Return the seconds of each step, and the bytes of the indexes and of the table afterwards."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection, connections
    from django.utils import timezone

    from django_asyncq.models import TaskRecord
    from django_asyncq.storage.batches import FencedWrite, write_fenced
    from django_asyncq.storage.inserting import insert

    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA public CASCADE")
        cursor.execute("CREATE SCHEMA public")
    call_command("migrate", verbosity=0)
    records = [TaskRecord(name="tests.tasks.add", args=[number], kwargs={"b": 1}) for number in range(rows)]

    def write(start: int) -> None:
        write_fenced([FencedWrite(record, 1, 0) for record in records[start : start + ROWS_PER_UPDATE]], "default")

    proxy = connections["default"]
    seconds = {"insert": timed(lambda at: insert(records[at : at + ROWS_PER_INSERT], proxy), rows, ROWS_PER_INSERT)}
    now = timezone.now()
    for record in records:
        record.state, record.fence, record.attempt, record.worker_ids = 1, 1, 1, ["host:1:2"]
        record.started_at = record.last_attempted_at = now
    seconds["update, running"] = timed(write, rows, ROWS_PER_UPDATE)
    for record in records:
        record.state, record.finished_at, record.return_value = 2, now, 3
    seconds["update, final"] = timed(write, rows, ROWS_PER_UPDATE)
    with connection.cursor() as cursor:
        table = TaskRecord._meta.db_table
        cursor.execute("SELECT pg_indexes_size(%s::regclass), pg_table_size(%s::regclass)", [table, table])
        index_bytes, table_bytes = cursor.fetchone()
    return {**seconds, "all three": sum(seconds.values()), "index bytes": index_bytes, "table bytes": table_bytes}


def timed(step: Callable[[int], None], rows: int, size: int) -> float:
    """Take a step for each batch of the rows; return the seconds."""
    begun_at = time.perf_counter()
    for start in range(0, rows, size):
        step(start)
    return time.perf_counter() - begun_at


if __name__ == "__main__":
    main()
