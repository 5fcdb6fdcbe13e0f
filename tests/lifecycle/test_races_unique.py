"""Races of unique tasks, timed: hundreds of trials around the moment that decides, each judged by the database's clock.

They run with `python runtests.py -m long tests/lifecycle/test_races_unique.py`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from django.db import connection, connections

from django_asyncq import DuplicateTask
from django_asyncq.models import TaskRecord
from django_asyncq.storage import database_clock

from .. import unique_tasks

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True), pytest.mark.timeout(900)]

TRIALS = 100 if connection.vendor == "sqlite" else 300
CALLERS = 3
DURATION = timedelta(seconds=0.4)
AT_ONCE = 4
# How far around the end of the duration the later calls are made.
AROUND_SECONDS = 0.06


class Call(NamedTuple):
    """One call: the database's clock before and after it, and whether it was accepted."""

    before: datetime
    after: datetime
    is_accepted: bool


def clock() -> datetime:
    """Ask the database for its time, in this thread's connection."""
    return datetime.fromtimestamp(database_clock.measure(), UTC)


def call(key: int) -> Call:
    """Call the throttled task once."""
    before = clock()
    try:
        unique_tasks.report.using(unique_until=DURATION).enqueue(key)
    except DuplicateTask:
        return Call(before, clock(), is_accepted=False)
    return Call(before, clock(), is_accepted=True)


def run(trial: Callable[[int], None]) -> None:
    """Run the trials, a few side by side."""

    def closing(key: int) -> None:
        try:
            trial(key)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(closing, range(TRIALS)))


def in_threads(makers: list[Callable[[], Call]]) -> list[Call]:
    """Run each in a thread of its own, with its own connection."""

    def closing(make: Callable[[], Call]) -> Call:
        try:
            return make()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(makers)) as pool:
        return list(pool.map(closing, makers))


def violations(key: int, calls: list[Call]) -> list[str]:
    """Return what is wrong with the calls of one key: each is accepted if and only if no other holds it."""
    rows = list(TaskRecord.objects.filter(kwargs={}, args=[key]).order_by("enqueued_at"))
    found = [f"{row.unique_until} is not {DURATION} later" for row in rows if until(row) - row.enqueued_at != DURATION]
    found += [
        f"accepted {until(earlier) - later.enqueued_at} too soon"
        for earlier, later in pairwise(rows)
        if later.enqueued_at < until(earlier)
    ]
    found += [
        f"refused at {each.before} or later, when nothing held the key"
        for each in calls
        if not each.is_accepted and not any(row.enqueued_at <= each.after and each.before < until(row) for row in rows)
    ]
    if len(rows) != sum(each.is_accepted for each in calls):
        found.append(f"{len(rows)} rows for {calls}")
    return found


def until(row: TaskRecord) -> datetime:
    """Return when the row frees its key."""
    assert row.unique_until is not None
    return row.unique_until


@pytest.mark.parametrize("is_wrong", [False, True], ids=["unique/expiry", "unique/expiry, wrong estimate"])
def test_a_call_is_accepted_if_and_only_if_the_duration_is_over(is_wrong: bool, monkeypatch: Any) -> None:
    """At its moment on the database's clock; also where each process believes in another time than the database's."""
    if is_wrong:
        real, error = database_clock._now, threading.local()

        def wrong(*args: Any) -> datetime:
            if not hasattr(error, "seconds"):
                error.seconds = random.uniform(-0.3, 0.3)
            return real(*args) + timedelta(seconds=error.seconds)

        if connection.vendor != "sqlite":
            monkeypatch.setattr(database_clock, "_now", wrong)
    found: list[str] = []
    counts = {True: 0, False: 0}

    def trial(key: int) -> None:
        first = call(key)
        row = TaskRecord.objects.get(args=[key])

        def later() -> Call:
            # By the database's clock, so that about half of the calls come sooner.
            left = (until(row) - clock()).total_seconds() + random.uniform(-AROUND_SECONDS, AROUND_SECONDS)
            time.sleep(max(left, 0))
            return call(key)

        calls = [first, *in_threads([later] * CALLERS)]
        for each in calls[1:]:
            counts[each.is_accepted] += 1
        found.extend(f"{key}: {text}" for text in violations(key, calls))

    run(trial)
    print(f"{TRIALS} trials, {counts[True]} later calls accepted, {counts[False]} refused, {len(found)} violations")
    assert found == []
    assert min(counts.values()) > TRIALS // 10
