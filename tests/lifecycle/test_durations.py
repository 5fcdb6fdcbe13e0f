"""A duration of a call counts from the moment of its row: the database adds it, and no process's clock decides."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import DuplicateTask, lifecycle
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import TaskRecord
from django_asyncq.storage import database_clock
from django_asyncq.tasks import Arguments

from .. import tasks, unique_tasks
from ..redis_state import scheduled

pytestmark = pytest.mark.django_db(transaction=True)

ODD = timedelta(days=40, seconds=7, microseconds=1)
YEARS = timedelta(days=36_500, microseconds=3)
COLUMNS = ("run_after", "expires_at", "deadline", "unique_until")


def row(result: Any) -> TaskRecord:
    """Return the row of a result."""
    return TaskRecord.objects.get(id=result.id)


def waits(record: TaskRecord) -> list[timedelta | None]:
    """Return how long after `enqueued_at` each time of a row is."""
    times = [getattr(record, name) for name in COLUMNS]
    return [None if time is None else time - record.enqueued_at for time in times]


@pytest.fixture(autouse=True, params=["right", "wrong"])
def estimate(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process believes about the database's time: it is right, or wrong by a minute."""
    if request.param == "wrong" and connection.vendor != "sqlite":
        real = database_clock._now
        monkeypatch.setattr(database_clock, "_now", lambda *args: real(*args) - timedelta(minutes=1))


@pytest.mark.parametrize("count", [1, 3])
def test_every_duration_is_added_to_the_moment_of_the_row(count: int) -> None:
    """To the microsecond, for one row and for many; the last column is that of a throttle."""
    task = unique_tasks.import_file.using(run_after=ODD, expires=2 * ODD, deadline=YEARS, unique_until=ODD)
    results = task.enqueue_many([Arguments((number,), {}) for number in range(count)])
    assert [waits(row(each)) for each in results] == [[ODD, 3 * ODD, YEARS, ODD]] * count
    results = tasks.add.using(run_after=ODD, expires=2 * ODD, deadline=YEARS).enqueue_many([(1, 2)] * count)
    assert [waits(row(each)) for each in results] == [[ODD, 3 * ODD, YEARS, None]] * count


def test_the_earlier_of_a_duration_and_a_moment_is_the_limit() -> None:
    """A moment stays what it is."""
    soon, late = timezone.now() + ODD, timezone.now() + 5 * ODD
    found = row(tasks.add.using(expires=2 * ODD, deadline=soon).enqueue(1))
    assert (found.expires_at, found.deadline) == (soon, soon)
    found = row(tasks.add.using(expires=2 * ODD, deadline=late).enqueue(1))
    assert (waits(found)[1], found.deadline) == (2 * ODD, late)
    found = row(tasks.add.using(expires=ODD, run_after=soon).enqueue(1))
    assert (found.expires_at, found.run_after) == (soon + ODD, soon)
    found = row(tasks.add.using(expires=ODD, run_after=timezone.now() - ODD).enqueue(1))
    assert waits(found)[1] == ODD


def test_rows_of_one_statement_may_count_differently() -> None:
    """As the tasks of several schedules: a duration, a moment and neither, side by side."""
    at = timezone.now() + ODD
    used = [tasks.add.using(run_after=ODD), tasks.add.using(run_after=at), tasks.add, tasks.add.using(expires=ODD)]
    backend: Any = tasks.add.get_backend()
    records = [backend.new_rows(each, [Arguments((1, 2), {})])[0] for each in used]
    with transaction.atomic():
        backend.enqueue_rows(records, used)
    counted, named, plain, limited = (TaskRecord.objects.get(id=each.id) for each in records)
    assert (waits(counted)[0], named.run_after, waits(plain)[:2]) == (ODD, at, [None, None])
    assert waits(limited)[:2] == [None, ODD]
    assert len({each.enqueued_at for each in (counted, named, plain, limited)}) == (
        4 if connection.vendor == "sqlite" else 1
    )


def test_redis_has_the_time_of_the_row() -> None:
    """In whole seconds, rounded up; not what the producer expected."""
    result = tasks.add.using(run_after=ODD).enqueue(1)
    ((id, due),) = scheduled().items()
    found = row(result)
    assert found.run_after is not None
    assert (id, due) == (result.id, math.ceil(found.run_after.timestamp()))


def test_time_runs_from_the_call_and_not_from_using() -> None:
    """A task with other options may be kept, and called later."""
    later = tasks.add.using(run_after=ODD, deadline=YEARS)
    assert (later.run_after, later.deadline) == (ODD, YEARS)
    result = later.enqueue(1)
    assert isinstance(result.task.run_after, datetime)
    assert waits(row(result)) == [ODD, YEARS, YEARS, None]
    assert tasks.add.get_result(result.id).task.run_after == row(result).run_after
    assert waits(row(tasks.add.using(run_after=-ODD).enqueue(1)))[0] == timedelta()
    with pytest.raises(InvalidOption, match="run_after"):
        tasks.add.using(run_after=timedelta.max)


def test_plain_task_sends_the_same_statement() -> None:
    """Nothing is read back, and the clock is not asked."""
    with CaptureQueriesContext(connection) as captured:
        tasks.add.enqueue(1)
    (sql,) = (each["sql"] for each in captured if "INSERT" in each["sql"])
    assert "RETURNING" not in sql
    assert "TIMESTAMP" not in sql
    with CaptureQueriesContext(connection) as captured:
        tasks.add.using(run_after=ODD).enqueue(1)
    # What MySQL wrote has to be read.
    assert len(captured) == (2 if connection.vendor == "mysql" else 1)


def test_replacement_counts_from_its_own_moment() -> None:
    """The row keeps the time at which it was first enqueued; its times count from the UPDATE."""
    task = unique_tasks.report.using(on_duplicate="replace")
    first = row(task.enqueue(1))
    TaskRecord.objects.filter(id=first.id).update(enqueued_at=first.enqueued_at - ODD)
    before = database_clock.measure()
    task.using(run_after=ODD, expires=ODD, deadline=YEARS).enqueue(1, "newer")
    after = database_clock.measure()
    found = TaskRecord.objects.get()
    for name, wait in (("run_after", ODD), ("expires_at", 2 * ODD), ("deadline", YEARS)):
        assert before - 0.001 <= (getattr(found, name) - wait).timestamp() <= after + 0.001, name
    assert scheduled() == {str(found.id): math.ceil(found.run_after.timestamp())}  # type: ignore[union-attr]


@pytest.mark.parametrize("is_over", [True, False])
def test_a_throttle_is_judged_by_the_database(is_over: bool) -> None:
    """At the moment of the call; no estimate frees the slot sooner, or keeps it longer."""
    throttled = unique_tasks.report.using(unique_until=3600)
    first = row(throttled.enqueue(1))
    shift = timedelta(seconds=-1 if is_over else 30)
    until = datetime.fromtimestamp(database_clock.measure(), first.enqueued_at.tzinfo) + shift
    TaskRecord.objects.filter(id=first.id).update(unique_until=until)
    if is_over:
        throttled.enqueue(1)
    else:
        with pytest.raises(DuplicateTask):
            throttled.enqueue(1)
    assert TaskRecord.objects.count() == 1 + is_over


def test_time_of_a_follower_counts_from_when_it_moves_up() -> None:
    """It is the duration of its own call, from the moment at which the database lets it hold the key."""
    task = unique_tasks.report.using(on_duplicate="follow", unique_until=ODD)
    first, second = task.enqueue(1), task.enqueue(1, "later")
    TaskRecord.objects.filter(id=first.id).update(unique_until=timezone.now() - ODD)
    before = database_clock.measure()
    assert lifecycle.move_up_waiting() == 1
    after = database_clock.measure()
    until = row(second).unique_until
    assert until is not None
    assert before - 0.001 <= (until - ODD).timestamp() <= after + 0.001
