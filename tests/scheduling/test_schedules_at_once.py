"""Many schedules that are due in one second: each fires once, and the time that takes is printed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connections
from django.utils import timezone

from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import Occurrence, OccurrenceOutcome, Schedule, TaskRecord

from .. import tasks
from ..redis_state import pending

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.timeout(600)]


@contextmanager
def leading() -> Iterator[MaintenanceService]:
    """A leader that renews its lock in a thread, as a supervisor's does."""
    service, is_over = MaintenanceService([], single_instance=True), threading.Event()
    service.seek_leadership()

    def renew() -> None:
        while not is_over.wait(1):
            service.seek_leadership()
        connections.close_all()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield service
    finally:
        is_over.set()
        thread.join(10)
        service.coordinator.release(service.lock_name)


@pytest.mark.parametrize("count", [500, 13_000])
def test_all_that_is_due_in_one_second_fires_once(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """By a leader, with its fence and the events for asynq's tools. None is lost, none is missed, none fires twice."""
    at = timezone.now().replace(microsecond=0) - timedelta(seconds=1)
    Schedule.objects.bulk_create(
        Schedule(
            name=f"report {number}",
            task=tasks.tally.module_path,
            args=[f"region {number}"],
            interval_seconds=86_400,
            starts_at=at,
            next_occurrence_at=at,
        )
        for number in range(count)
    )
    with leading() as service:
        begun_at = time.monotonic()
        result = service.scheduler.fire_due()
        fired_after = time.monotonic() - begun_at
        service.scheduler_entries.add_events(result.fired)
        events_after = time.monotonic() - begun_at
        service.fire_schedules()
    with capsys.disabled():
        print(f"\n{count:,} schedules: fired after {fired_after:.2f} s, events after {events_after:.2f} s")
    occurrences = list(Occurrence.objects.values_list("schedule_id", "occurs_at", "outcome", "task_id"))
    assert {row[1:3] for row in occurrences} == {(at, OccurrenceOutcome.QUEUED)}
    assert set(Counter(row[0] for row in occurrences).values()) == {1} and len(occurrences) == count
    assert {row[3] for row in occurrences} == set(TaskRecord.objects.values_list("id", flat=True))
    regions = Counter(args[0] for args in TaskRecord.objects.values_list("args", flat=True))
    assert regions == Counter(f"region {number}" for number in range(count))
    assert Counter(pending("default")) == Counter(str(row[3]) for row in occurrences)
