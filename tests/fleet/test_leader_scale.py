"""What each statement of the leader takes beside millions of finished and failed rows that are kept. Prints it.

`DATABASE_URL=postgres://… ASYNCQ_TEST_ROWS=5000000 python runtests.py -n 0 -s -m long tests/fleet/test_leader_scale.py`
The figures are in docs/explanation/large-tables.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q

from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import TaskState
from django_asyncq.storage.walking import EVERY, TO_RETRY, Way, pages

from ..storage.test_stale_plans import TABLE, Kind, insert

pytestmark = [
    pytest.mark.long,
    pytest.mark.django_db,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="its rows are made by PostgreSQL's generate_series"),
]

ROWS = int(os.environ.get("ASYNCQ_TEST_ROWS", 1_000_000))
# One row of twenty has failed.
SUCCEEDED = Kind(0, {"state": "2", "finished_at": "now()"}, ROWS - ROWS // 20)
FAILED = Kind(1, {"state": "3", "reason": "1", "finished_at": "now()", "last_exception": "'a.B'"}, ROWS // 20)
RETRYING = Kind(2, {"state": "3", "reason": "1", "retry_at": "now() + n * interval '1 ms'"}, 100_000)
ROUNDS = 3
# To read the failed rows of a million takes 40 ms, to read all of them 100 ms and more.
MOST_SECONDS = 0.03


def one_round(service: MaintenanceService) -> None:
    """Do once what the leader does each few seconds and each minute."""
    # While the table was filled the lock may have expired, which the first call finds.
    service.seek_leadership()
    service.seek_leadership()
    assert service.has_no_work("default")
    service.forward()
    service.form_batches()
    service.admit_waiters()
    service.fire_schedules()
    service.keep_pauses()
    service.run_bulk_actions()
    service.repair_and_prune()
    service.reconciler.sweep()
    list(service.pruner.prune_in_batches())


def means(act: Callable[[], Any]) -> dict[str, float]:
    """Return the statements on tasks that a function sends, without their values, and what each took in the mean."""
    seconds: dict[str, list[float]] = {}

    def time_it(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            shape = re.sub(r"SELECT .*? FROM", "SELECT … FROM", sql).replace(f'"{TABLE}".', "").replace('"', "")
            seconds.setdefault(shape, []).append(time.perf_counter() - began)

    with connection.execute_wrapper(time_it):
        act()
    return {sql: sum(taken) / len(taken) for sql, taken in seconds.items() if TABLE in sql}


def measure(service: MaintenanceService) -> dict[str, float]:
    """Return the least of some rounds for each statement: other programs make single ones slow."""
    rounds = [means(lambda: one_round(service)) for _ in range(ROUNDS)]
    return {sql: min(each[sql] for each in rounds if sql in each) for sql in set().union(*rounds)}


def test_no_statement_of_the_leader_grows_with_what_is_kept() -> None:
    """Each stays below the time in which even the failed rows could be read."""
    service = MaintenanceService([], single_instance=True)
    try:
        none = measure(service)
        began = time.perf_counter()
        insert(SUCCEEDED)
        insert(FAILED)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {TABLE}")
        print(f"\n{ROWS:,} rows in {time.perf_counter() - began:.0f} s; milliseconds at 0, and beside them:")
        found = measure(service)
    finally:
        service.coordinator.release(service.lock_name)
    assert found
    for sql, taken in sorted(found.items(), key=lambda each: -each[1]):
        # Some are not sent while the table is empty.
        before = f"{none[sql] * 1000:.2f}" if sql in none else "-"
        print(f"{before:>8} {taken * 1000:8.2f}  {sql[:260]}")
    assert {sql: taken for sql, taken in found.items() if taken > MOST_SECONDS} == {}


def test_walk_over_what_waits_for_a_retry() -> None:
    """In the order of `retry_at` it reads no failed row, whatever the statistics say; by id it passes over them."""
    insert(SUCCEEDED)
    insert(FAILED)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {TABLE}")
    insert(RETRYING)
    check, seconds = Q(state=TaskState.FAILED, retry_at__isnull=False, is_remote=False), dict[Way, float]()
    for way in (EVERY, TO_RETRY):
        began = time.perf_counter()
        found = pages(way, "backend", "queue_name", "wire_id", size=1000, check=check)
        assert sum(map(len, found)) == RETRYING.count
        seconds[way] = time.perf_counter() - began
        print(f"\n{RETRYING.count:,} in the order of {way.by or 'id'}, beside {ROWS:,}: {seconds[way]:.2f} s")
    assert seconds[TO_RETRY] < seconds[EVERY]
