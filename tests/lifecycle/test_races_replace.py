"""Races of the ways to be unique, with real workers: calls beside the start and the end of their task.

Each task returns its arguments, so a SUCCEEDED row shows what its body got. `python runtests.py -m long
tests/lifecycle/test_races_replace.py` runs 300 trials of each kind on PostgreSQL and MySQL, 100 on SQLite.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_asyncq.models import TaskRecord, TaskState

from .. import unique_tasks
from ..workers import wait_until, workers

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.django_db(transaction=True)]

TRIALS = 100 if connection.vendor == "sqlite" else 300
# Trials at a time. SQLite has one writer.
AT_ONCE = 2 if connection.vendor == "sqlite" else 5
SECONDS = 300


@pytest.fixture(autouse=True)
def _workers(tmp_path: Path) -> Iterator[None]:
    with workers(tmp_path, "--processes", "1", "--concurrency", "8"):
        yield


def race(trial: Callable[[int, random.Random], None]) -> None:
    """Do a trial so many times, some at once, then wait until all tasks have finished."""

    def one(number: int) -> None:
        try:
            trial(number, random.Random(number))
        finally:
            connection.close()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(TRIALS)))
    live = TaskRecord.objects.exclude(state=TaskState.SUCCEEDED)
    try:
        wait_until(lambda: not live.exists(), "end of all tasks", SECONDS)
    finally:
        print(f"{TRIALS} trials, {TaskRecord.objects.count()} rows, {live.count()} not SUCCEEDED")
        for row in live[:10]:
            print(f"  {row.id} {row.args}: state {row.state}, reason {row.reason}, {row.errors[-1:]}")


def rows_that_lie() -> list[Any]:
    """Return the rows that have succeeded with other arguments than those that the body got."""
    return [row for row in TaskRecord.objects.all() if row.return_value != row.args]


def superseded(declared: Any, number: int, chance: random.Random) -> None:
    """Call one key eleven times from three threads around the start and the end of its task, then once more."""

    def calls(first: int) -> None:
        try:
            for each in range(first, 11, 3):
                declared.enqueue(number, each)
                time.sleep(chance.random() * 0.1)
        finally:
            connection.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(calls, range(3)))
    declared.enqueue(number, 11)


@pytest.mark.parametrize("on_duplicate", ["replace", "follow"], ids=["replace and start", "follow and finish"])
def test_the_newest_arguments_run(on_duplicate: Any) -> None:
    """The last call began after all others had returned. No row shows other arguments than its body got."""
    declared = unique_tasks.echo.using(on_duplicate=on_duplicate)
    race(lambda number, chance: superseded(declared, number, chance))
    newest = {row.args[0] for row in TaskRecord.objects.all() if row.return_value == row.args and row.args[1] == 11}
    missing = set(range(TRIALS)) - newest
    lies = rows_that_lie()
    print(f"{on_duplicate}: {len(missing)} keys without a run of their newest arguments, {len(lies)} rows that lie")
    assert (missing, lies) == (set(), [])


def test_the_newest_arguments_run_though_redis_is_emptied_beside_open_transactions(
    redis_client: Any, key_prefix: str
) -> None:
    """The leader pushes rows again whose replacement is not committed yet, and workers run them."""
    declared = unique_tasks.echo.using(on_duplicate="replace")
    is_over = threading.Event()

    def empty() -> None:
        while not is_over.wait(1.5):
            # At one instant, as FLUSHALL does it.
            script = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"
            redis_client.eval(script, 0, f"{key_prefix}*")

    def trial(number: int, chance: random.Random) -> None:
        for each in range(4):
            with transaction.atomic() if connection.vendor != "sqlite" else nullcontext():
                declared.using(run_after=timedelta(seconds=chance.random() / 2)).enqueue(number, each)
                time.sleep(chance.random() * 0.5)
        declared.enqueue(number, 11)

    with ThreadPoolExecutor(1) as pool:
        emptying = pool.submit(empty)
        try:
            race(trial)
        finally:
            is_over.set()
        emptying.result()
    newest = {row.args[0] for row in TaskRecord.objects.all() if row.return_value == row.args and row.args[1] == 11}
    missing, lies = set(range(TRIALS)) - newest, rows_that_lie()
    print(f"emptied: {len(missing)} keys without a run of their newest arguments, {len(lies)} rows that lie")
    assert (missing, lies) == (set(), [])


def test_a_wait_that_begins_beside_the_end_of_its_task_returns_its_result() -> None:
    """Soon, whichever comes first."""
    slow: list[float] = []

    def trial(number: int, chance: random.Random) -> None:
        result = unique_tasks.echo.using(unique=False).enqueue(number, 0)
        time.sleep(chance.random() * 0.05)
        began = time.monotonic()
        assert result.wait(timeout=60) == [number, 0]
        slow.append(time.monotonic() - began)

    race(trial)
    print(f"wait and finish: the longest wait took {max(slow):.2f} s")
    assert rows_that_lie() == []
