"""Moments that a database could not give back are refused before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any, NoReturn

import pytest
from django.utils import timezone as django_timezone

from django_asyncq.core.time import checked_moment, moment_after
from django_asyncq.core.timing import Cron, Interval
from django_asyncq.exceptions import InvalidOption, InvalidTiming, RetryRequested
from django_asyncq.models import TaskRecord
from django_asyncq.results import next_attempt_at

from .. import tasks

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class BrokenZone(tzinfo):
    """A time zone whose code fails."""

    def utcoffset(self, moment: datetime | None) -> NoReturn:
        """Fail."""
        raise LookupError("no zone data")


class WrongZone(tzinfo):
    """A time zone that answers what no zone may."""

    def utcoffset(self, moment: datetime | None) -> Any:
        """Return no timedelta."""
        return 3600


class OddZone(tzinfo):
    """A time zone with a fraction of a second, which PostgreSQL does not read."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        """Return an hour and a little."""
        return timedelta(hours=1, microseconds=7)


OUTSIDE = [
    datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-8))),
    datetime.max.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-23, minutes=-59))),
    datetime(9999, 12, 29, 0, 0, 0, 1, tzinfo=UTC),
    datetime.min.replace(tzinfo=UTC),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=23, minutes=59))),
    datetime(1000, 1, 2, 23, 59, tzinfo=UTC),
    datetime(2026, 1, 1, tzinfo=BrokenZone()),
    datetime(2026, 1, 1, tzinfo=WrongZone()),
]


@pytest.mark.parametrize("moment", OUTSIDE, ids=range(len(OUTSIDE)))
@pytest.mark.django_db
def test_enqueue_refuses_a_moment_outside(moment: datetime) -> None:
    """Nothing is written, by one call as by many."""
    for act in (
        lambda: tasks.add.using(run_after=moment).enqueue(1),
        lambda: tasks.add.using(run_after=moment).enqueue_many([(1,), (2,)]),
    ):
        with pytest.raises(InvalidOption, match="run_after"):
            act()
    assert not TaskRecord.objects.exists()


@pytest.mark.parametrize("wait", [timedelta.max, timedelta(days=9000 * 365)])
def test_enqueue_refuses_a_wait_that_ends_outside(wait: timedelta) -> None:
    """A timedelta counts from now."""
    with pytest.raises(InvalidOption, match="run_after"):
        tasks.add.using(run_after=wait)


@pytest.mark.parametrize("value", ["2026-01-01", 5, date(2026, 1, 1)])
def test_enqueue_refuses_what_is_no_moment(value: Any) -> None:
    """With an error that names the option."""
    with pytest.raises(InvalidOption, match="run_after"):
        tasks.add.using(run_after=value)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "moment",
    [
        datetime(9999, 12, 29, tzinfo=UTC),
        datetime(9999, 12, 29, 14, tzinfo=timezone(timedelta(hours=14))),
        datetime(1000, 1, 3, tzinfo=UTC),
        datetime(2026, 7, 1, 12, tzinfo=OddZone()),
    ],
    ids=["last", "last of the east", "first", "odd zone"],
)
def test_the_moments_inside_come_back(moment: datetime) -> None:
    """From the row, and through both ways to insert."""
    one = tasks.add.using(run_after=moment).enqueue(1)
    first, _ = tasks.add.using(run_after=moment).enqueue_many([(1,), (2,)])
    for result in (one, first):
        stored = TaskRecord.objects.get(id=result.id).run_after
        assert stored is not None
        assert stored.astimezone(UTC) == checked_moment("run_after", moment)


@pytest.mark.parametrize("moment", OUTSIDE[:7], ids=range(7))
@pytest.mark.parametrize("bound", ["starts_at", "ends_at"])
def test_schedules_refuse_bounds_outside(moment: datetime, bound: str) -> None:
    """Of both kinds of timing."""
    makers: list[Callable[..., Any]] = [
        lambda **bounds: Cron("0 0 * * *", "UTC", **bounds),
        lambda **bounds: Interval(60, NOW, **bounds),
    ]
    for make in makers:
        with pytest.raises(InvalidTiming, match=bound) as caught:
            make(**{bound: moment})
        assert caught.value.field == bound


@pytest.mark.parametrize("delay", [math.inf, math.nan, 1e300, timedelta.max, timedelta(days=9000 * 365), "5", True])
def test_a_wait_before_the_next_attempt_must_end_inside(delay: Any) -> None:
    """What `backoff` returns is refused like what it raises; the reporter records that."""
    with pytest.raises(InvalidOption, match="backoff"):
        moment_after("the result of backoff", NOW, delay)
    record = TaskRecord(name=tasks.add.module_path, attempt=1, max_attempts=3, enqueued_at=NOW)
    asked = RetryRequested(delay_seconds=math.inf, counted=True)
    with pytest.raises(InvalidOption, match="retry"):
        next_attempt_at(tasks.add, record, asked, django_timezone.now())


@pytest.mark.parametrize("delay", [-1, -5.5, timedelta.min, 0])
def test_a_wait_in_the_past_is_none(delay: Any) -> None:
    """The attempt follows at once."""
    assert moment_after("the result of backoff", NOW, delay) == NOW
