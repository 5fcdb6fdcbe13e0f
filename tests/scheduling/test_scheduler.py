"""Schedules: each occurrence becomes exactly one task, whichever process fires it and whatever the clock does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models.signals import pre_save
from django.utils import timezone

from django_asyncq import cron, every, task
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import due_channel
from django_asyncq.core import guard, registry
from django_asyncq.exceptions import (
    BrokerUnavailable,
    GateUnavailable,
    InvalidOption,
    LockLost,
    QueueFull,
    TaskNotRegistered,
)
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import (
    FailureReason,
    Missed,
    Occurrence,
    OccurrenceOutcome,
    Overlap,
    Schedule,
    TaskRecord,
    TaskState,
)
from django_asyncq.scheduling import occurrences as enqueueing
from django_asyncq.scheduling import scheduler as firing
from django_asyncq.scheduling import scheduler as scheduling
from django_asyncq.scheduling.occurrences import enqueue, run_now
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.signals import task_state_changing
from django_asyncq.storage.routing import rows_of, transaction_of, writing_database
from django_asyncq.testing import EmbeddedRedis

from .. import tasks

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


class Clock:
    """A clock that moves only when it is stepped."""

    def __init__(self, now: datetime = NOON) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def step(self, **by: float) -> datetime:
        self.now += timedelta(**by)
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> Scheduler:
    return Scheduler(clock=clock)


def schedule(**values: Any) -> Schedule:
    """A schedule of `tests.tasks.tally`, every five minutes from noon on, with other values."""
    row = Schedule(
        **{
            "name": "report",
            "task": "tests.tasks.tally",
            "args": ["north"],
            "kwargs": {"pages": 2},
            "cron": "*/5 * * * *",
            "zone": "UTC",
            **values,
        }
    )
    row.plan_next(NOON)
    row.save()
    return row


def occurrences(outcome: OccurrenceOutcome = OccurrenceOutcome.QUEUED) -> list[str]:
    """The times of the occurrences with this outcome, the oldest first."""
    found = Occurrence.objects.filter(outcome=outcome).order_by("occurs_at")
    return [occurrence.occurs_at.strftime("%H:%M") for occurrence in found]


def test_an_occurrence_becomes_one_task(clock: Clock, scheduler: Scheduler) -> None:
    """The row has the schedule's arguments. The next occurrence is planned, and the seconds until then returned."""
    row = schedule()
    assert scheduler.fire_due() == ([], 300)
    clock.step(minutes=5)
    fired, seconds = scheduler.fire_due()
    assert [(each.schedule.pk, each.occurs_at) for each in fired] == [(row.pk, clock.now)]
    assert seconds == 300
    record = TaskRecord.objects.get()
    assert (record.pk, record.name, record.args, record.kwargs) == (
        fired[0].task_id,
        "tests.tasks.tally",
        ["north"],
        {"pages": 2},
    )
    assert record.run_after is None
    assert Broker().dequeue("default", "w", 9, 30).leases[0].id == str(record.pk)
    assert scheduler.fire_due() == ([], 300)
    row.refresh_from_db()
    assert row.next_occurrence_at == NOON + timedelta(minutes=10)


def test_nothing_to_fire_has_no_next(scheduler: Scheduler) -> None:
    """Without schedules, and with schedules that are disabled, removed from the code, or past their last occurrence."""
    assert scheduler.fire_due() == ([], None)
    schedule(enabled=False, next_occurrence_at=NOON)
    schedule(name="gone", retired_at=NOON)
    schedule(name="over", ends_at=NOON - timedelta(days=1))
    assert scheduler.fire_due() == ([], None)


def test_many_schedulers_at_once_fire_each_occurrence_once() -> None:
    """Eight threads without a lock between them: forty schedules, forty tasks."""
    for number in range(40):
        schedule(name=f"report {number}")
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def fire(minutes: int) -> None:
        scheduler = Scheduler(clock=Clock(NOON + timedelta(minutes=minutes)))
        barrier.wait(10)
        try:
            for _ in range(3):
                scheduler.fire_due()
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=fire, args=(5,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert TaskRecord.objects.count() == Occurrence.objects.count() == 40


def test_an_occurrence_that_is_written_is_never_fired_again(clock: Clock, scheduler: Scheduler) -> None:
    """Not even when the schedule is set back."""
    row = schedule()
    for _ in range(3):
        clock.step(minutes=5)
        scheduler.fire_due()
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=NOON + timedelta(minutes=5), missed=Missed.ALL)
    assert scheduler.fire_due().fired == []
    assert TaskRecord.objects.count() == 3
    assert occurrences() == ["12:05", "12:10", "12:15"]


@pytest.mark.parametrize(
    ("missed", "late", "queued", "recorded_as_missed"),
    [
        (Missed.SKIP, timedelta(seconds=59), ["13:00"], ["12:55"]),
        (Missed.SKIP, timedelta(seconds=61), [], ["13:00"]),
        (Missed.ONCE, timedelta(seconds=1), ["13:00"], ["12:55"]),
        (Missed.ONCE, timedelta(minutes=4), ["13:00"], ["12:55"]),
        (Missed.ALL, timedelta(minutes=4), ["12:50", "12:55", "13:00"], ["12:45"]),
    ],
)
def test_missed_occurrences_follow_the_policy(
    clock: Clock,
    scheduler: Scheduler,
    missed: Missed,
    late: timedelta,
    queued: list[str],
    recorded_as_missed: list[str],
) -> None:
    """Twelve occurrences without a scheduler. One row records those that are skipped."""
    schedule(missed=missed, missed_cap=3)
    clock.now = NOON + timedelta(hours=1) + late
    fired = scheduler.fire_due().fired
    assert [each.occurs_at.strftime("%H:%M") for each in fired] == occurrences() == queued
    assert occurrences(OccurrenceOutcome.MISSED) == recorded_as_missed
    assert "back to 2026-11-21 12:05:00 UTC" in Occurrence.objects.get(outcome=OccurrenceOutcome.MISSED).note
    assert scheduler.fire_due().fired == []
    clock.now = NOON + timedelta(minutes=65)
    assert [each.occurs_at for each in scheduler.fire_due().fired] == [clock.now]


def test_a_late_occurrence_fires_within_twice_the_ttl_of_the_lock(
    clock: Clock, scheduler: Scheduler, settings: Any
) -> None:
    """The lock of a dead leader lasts its TTL; an occurrence is on time for twice as long."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LOCK_TTL_SECONDS": 100}
    schedule()
    clock.step(minutes=5, seconds=199)
    assert len(scheduler.fire_due().fired) == 1
    assert occurrences(OccurrenceOutcome.MISSED) == []


def test_overlapping_occurrences_are_skipped_if_the_schedule_says_so(clock: Clock, scheduler: Scheduler) -> None:
    """While one of its tasks is QUEUED, RUNNING or RETRYING, but not after it has failed for good."""
    schedule(overlap=Overlap.SKIP)
    schedule(name="allows")
    states: list[dict[str, Any]] = [
        {"state": TaskState.QUEUED},
        {"state": TaskState.RUNNING},
        {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "retry_at": NOON},
        {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": NOON},
    ]
    clock.step(minutes=5)
    scheduler.fire_due()
    first = Occurrence.objects.get(schedule__name="report").task_id
    for state in states:
        TaskRecord.objects.filter(pk=first).update(**{"retry_at": None, "finished_at": None, **state})
        clock.step(minutes=5)
        scheduler.fire_due()
    outcomes = (
        Occurrence.objects.filter(schedule__name="report").order_by("occurs_at").values_list("outcome", flat=True)
    )
    assert list(outcomes) == ["queued", "skipped", "skipped", "skipped", "queued"]
    assert Occurrence.objects.filter(schedule__name="allows", outcome="queued").count() == 5


def test_jitter_delays_the_task_and_is_the_same_everywhere(clock: Clock, scheduler: Scheduler) -> None:
    """The occurrence keeps its time. Each has a delay of its own within the limit."""
    schedule(jitter_seconds=60, missed=Missed.ALL)
    schedule(name="other", jitter_seconds=60, missed=Missed.ALL)
    clock.step(minutes=50)
    scheduler.fire_due()
    starts = dict(TaskRecord.objects.values_list("run_after", "pk"))
    times = {pk: start for start, pk in starts.items()}
    delays = [
        (times[occurrence.task_id] - occurrence.occurs_at).total_seconds() for occurrence in Occurrence.objects.all()
    ]
    assert len(delays) == len(set(delays)) == 20
    assert all(0 <= delay < 60 for delay in delays)
    assert max(delays) - min(delays) > 20
    TaskRecord.objects.all().delete()
    Occurrence.objects.all().delete()
    Schedule.objects.update(next_occurrence_at=NOON + timedelta(minutes=5))
    Scheduler(clock=clock).fire_due()
    again = Occurrence.objects.filter(schedule__name="report").latest("occurs_at")
    assert TaskRecord.objects.get(pk=again.task_id).run_after in starts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": "tests.tasks.gone"}, "no task named 'tests.tasks.gone'"),
        ({"task": "tests.tasks.add", "args": [1, 2], "kwargs": {}}, "schedulable=True"),
        ({"kwargs": {"colour": "red"}}, "colour"),
        ({"kwargs": {}, "args": []}, "region"),
        ({"kwargs": ["pages"]}, "a list and a mapping"),
        ({"args": {"region": 1}}, "a list and a mapping"),
        ({"task": "tests.tasks.badly_gated"}, "KeyError: 'no such model'"),
    ],
)
def test_an_occurrence_that_cannot_be_queued_says_why_and_the_schedule_goes_on(
    clock: Clock, scheduler: Scheduler, values: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The task was removed, may not be scheduled by people, or takes other arguments now."""
    schedule(**values)
    schedule(name="well")
    clock.step(minutes=5)
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["well"]
    occurrence = Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED)
    assert words in occurrence.note
    assert words in caplog.text
    assert occurrence.task_id is None
    assert Schedule.objects.get(name="report").next_occurrence_at == NOON + timedelta(minutes=10)


@pytest.mark.parametrize("kind", tasks.SPITE)
def test_a_gate_callable_that_raises_anything_stops_no_other_schedule(
    clock: Clock, scheduler: Scheduler, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SystemExit too, and an error without a text: the occurrence is refused and says why."""
    monkeypatch.setattr(guard, "_is_own_process", True)
    schedule(task="tests.tasks.spitefully_gated", args=[kind], kwargs={})
    schedule(name="well")
    clock.step(minutes=5)
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["well"]
    assert tasks.SPITE[kind].__name__ in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task `tests.tasks.tally` with options that stop it or keep it single."""
    changed = tasks.tally.using(expires=60, timeout=5, unique=True)
    monkeypatch.setattr(enqueueing, "registered", lambda name: changed)


@pytest.mark.parametrize("jitter", [0, 600])
def test_an_occurrence_has_the_options_of_its_task(
    clock: Clock, scheduler: Scheduler, limited: None, jitter: int
) -> None:
    """A time to begin counts from now where the jitter has set one that is over, as after a gap."""
    schedule(jitter_seconds=jitter)
    clock.step(minutes=5)
    scheduler.fire_due()
    row = TaskRecord.objects.get()
    assert (row.timeout_seconds, row.unique_slot) == (5, row.unique_key)
    assert row.unique_key and row.expires_at is not None
    assert 59 < (row.expires_at - row.enqueued_at).total_seconds() < 90


def test_a_unique_task_skips_occurrences_while_another_holds_its_key(
    clock: Clock, scheduler: Scheduler, limited: None, caplog: pytest.LogCaptureFixture
) -> None:
    """That is no error. The note names the other one; when that has finished, the next occurrence fires."""
    caplog.set_level("INFO", "django_asyncq")
    schedule()
    clock.step(minutes=5)
    (first,) = scheduler.fire_due().fired
    clock.step(minutes=5)
    assert scheduler.fire_due().fired == []
    skipped = Occurrence.objects.get(outcome=OccurrenceOutcome.SKIPPED)
    assert skipped.task_id is None and f"task {first.task_id} holds its unique key" in skipped.note
    assert "its occurrence of 2026-11-21 12:10:00 UTC was skipped" in caplog.text
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    TaskRecord.objects.get().delete()
    clock.step(minutes=5)
    assert len(scheduler.fire_due().fired) == 1


def test_an_occurrence_of_a_unique_task_may_get_the_existing_task(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `on_duplicate` says."""
    changed = tasks.tally.using(unique=True, on_duplicate="return")
    monkeypatch.setattr(enqueueing, "registered", lambda name: changed)
    schedule()
    for _ in range(2):
        clock.step(minutes=5)
        scheduler.fire_due()
    assert {each.task_id for each in Occurrence.objects.all()} == {TaskRecord.objects.get().id}


def test_a_full_gate_refuses_the_occurrence(clock: Clock, scheduler: Scheduler) -> None:
    """The occurrence is not fired later: the limit is strict for schedules too."""
    schedule(task="tests.tasks.gated_tally", args=[], kwargs={})
    clock.step(minutes=5)
    scheduler.fire_due()
    clock.step(minutes=5)
    assert scheduler.fire_due().fired == []
    assert "is full: 1 of 1" in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note


def test_an_unreachable_gate_postpones_the_occurrence(
    clock: Clock, scheduler: Scheduler, own_redis: EmbeddedRedis
) -> None:
    """Redis is unreachable: the occurrence stays due, and a task without a gate is accepted. Later it fires."""
    schedule(name="a", task="tests.tasks.gated_tally", args=[], kwargs={})
    schedule(name="b")
    clock.step(minutes=5)
    own_redis.kill()
    result = scheduler.fire_due()
    assert [each.schedule.name for each in result.fired] == ["b"]
    assert result.next_seconds == 1
    own_redis.start()
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["a"]
    assert occurrences() == ["12:05", "12:05"]


# --- one schedule's error


@contextmanager
def locked_row(row: Schedule) -> Iterator[None]:
    """Another transaction holds the row, as a person's who edits it does."""
    is_locked, may_finish = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction_of(Schedule):
            rows_of(Schedule).select_for_update().get(pk=row.pk)
            is_locked.set()
            may_finish.wait(30)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_locked.wait(10)
    try:
        yield
    finally:
        may_finish.set()
        thread.join(10)


LOCKS_ROWS = pytest.mark.skipif(
    "not __import__('django.db').db.connection.features.has_select_for_update_skip_locked",
    reason="the database locks no single rows",
)


@LOCKS_ROWS
def test_a_locked_row_stops_no_other_schedule(
    clock: Clock, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not waited for. The log names it once, and it fires when the lock is gone."""
    row = schedule(name="a")
    schedule(name="b")
    clock.step(minutes=5)
    with locked_row(row):
        result = scheduler.fire_due()
        assert ([each.schedule.name for each in result.fired], result.next_seconds) == (["b"], 1)
        assert scheduler.fire_due().fired == []
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["a"]
    assert caplog.text.count("schedule a is postponed") == 1
    assert "another transaction has locked its row" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("odd"),
        OSError("no such file"),
        DatabaseError("a code that nobody knows"),
        BrokerUnavailable("Redis is unreachable"),
        GateUnavailable(gate="g", reason="Redis is unreachable"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_one_schedule_stops_another(
    clock: Clock,
    scheduler: Scheduler,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it is, and whether it comes first. The log says it once; the occurrence fires when the error is gone."""
    schedule(name="a")
    schedule(name="b")
    clock.step(minutes=5)
    real = firing.due_occurrences

    def due(row: Schedule, now: datetime, in_time_since: datetime) -> Any:
        if row.name == "a":
            raise error
        return real(row, now, in_time_since)

    with monkeypatch.context() as patch:
        patch.setattr(firing, "due_occurrences", due)
        result = scheduler.fire_due()
        assert ([each.schedule.name for each in result.fired], result.next_seconds) == (["b"], 1)
        assert scheduler.fire_due() == ([], 1)
    assert caplog.text.count("schedule a is postponed") == 1
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["a"]
    assert occurrences() == ["12:05", "12:05"]


def test_a_receiver_that_says_redis_is_unreachable_stops_no_other_schedule(clock: Clock, scheduler: Scheduler) -> None:
    """The project's code asks a Redis too. The schedule is tried again."""

    def refuse(*, records: list[TaskRecord], **kwargs: Any) -> None:
        if records[0].args == ["refused"]:
            raise BrokerUnavailable("the project's Redis is unreachable")

    schedule(name="a", args=["refused"])
    schedule(name="b")
    clock.step(minutes=5)
    task_state_changing.connect(refuse)
    try:
        assert [each.schedule.name for each in scheduler.fire_due().fired] == ["b"]
    finally:
        task_state_changing.disconnect(refuse)
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["a"]


def test_more_failing_schedules_than_a_page_holds_stop_no_other(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the first in the order of their occurrences; in a round each fails in its page and alone, not again."""
    monkeypatch.setattr(scheduling, "SCHEDULES_PER_PAGE", 2)
    for number in range(5):
        schedule(name=f"bad {number}", cron="*/4 * * * *")
    schedule(name="well")
    clock.step(minutes=5)
    real, tried = firing.due_occurrences, []

    def due(row: Schedule, now: datetime, in_time_since: datetime) -> Any:
        tried.append(row.name)
        if row.name.startswith("bad"):
            raise RuntimeError(row.name)
        return real(row, now, in_time_since)

    monkeypatch.setattr(firing, "due_occurrences", due)
    assert [each.schedule.name for each in scheduler.fire_due().fired] == ["well"]
    assert set(tried) == {*(f"bad {number}" for number in range(5)), "well"}
    assert max(Counter(tried).values()) == 2


def test_a_round_ends_when_a_schedule_does_not_move(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays due whatever is done: the loop looks again in a second, not at once."""
    schedule()
    clock.step(minutes=5)
    rounds = []
    monkeypatch.setattr(scheduling, "fire", lambda *_: rounds.append(1) or {})
    assert scheduler.fire_due() == ([], 1)
    assert len(rounds) == 1


def test_an_outage_of_the_database_ends_the_round(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the database answers nobody, the other schedules are not tried one by one."""
    for name in "abc":
        schedule(name=name)
    clock.step(minutes=5)
    tried = []

    def due(row: Schedule, now: datetime, in_time_since: datetime) -> Any:
        tried.append(row.name)
        monkeypatch.setattr(scheduling, "rows_of", lost)
        raise DatabaseError("the connection is lost")

    def lost(model: Any) -> Any:
        raise DatabaseError("the connection is lost")

    monkeypatch.setattr(firing, "due_occurrences", due)
    with pytest.raises(DatabaseError, match="lost"):
        scheduler.fire_due()
    assert len(tried) == 1


def test_a_schedule_with_an_invalid_timing_is_refused_once(clock: Clock, scheduler: Scheduler) -> None:
    """Somebody wrote it past the form. It is logged once, not every second."""
    row = schedule()
    Schedule.objects.filter(pk=row.pk).update(zone="Mars/Olympus")
    clock.step(minutes=5)
    assert scheduler.fire_due() == ([], None)
    assert "Mars/Olympus" in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note
    assert Schedule.objects.get().next_occurrence_at is None


def test_the_last_occurrence_is_at_the_end_of_the_schedule(clock: Clock, scheduler: Scheduler) -> None:
    """An occurrence at `ends_at` itself still fires."""
    schedule(ends_at=NOON + timedelta(minutes=10))
    for _ in range(4):
        clock.step(minutes=5)
        scheduler.fire_due()
    assert occurrences() == ["12:05", "12:10"]


def test_a_clock_that_is_set_back_repeats_no_occurrence(clock: Clock, scheduler: Scheduler) -> None:
    """Five minutes back and forth: every occurrence once."""
    schedule(cron="* * * * *", missed=Missed.ALL)
    for minutes in (1, 1, 1, 5, -5, 1, 1, 1, 1, 1, 1, -5, 5, 1):
        clock.step(minutes=minutes)
        scheduler.fire_due()
    assert occurrences() == [f"12:{minute:02}" for minute in range(1, 11)]
    assert TaskRecord.objects.count() == 10


def test_a_clock_that_jumps_forward_follows_the_policy(clock: Clock, scheduler: Scheduler) -> None:
    """Five minutes forward with "skip": the latest occurrence is on time, the four before it are missed."""
    schedule(cron="* * * * *")
    clock.step(minutes=1)
    scheduler.fire_due()
    clock.step(minutes=5)
    scheduler.fire_due()
    assert occurrences() == ["12:01", "12:06"]
    assert occurrences(OccurrenceOutcome.MISSED) == ["12:05"]


def test_a_round_that_takes_long_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was due when it began is on time, however many come first."""

    class Passing(Clock):
        def __call__(self) -> datetime:
            return self.step(seconds=50)

    monkeypatch.setattr(scheduling, "SCHEDULES_PER_PAGE", 2)
    for number in range(8):
        schedule(name=f"report {number}")
    fired = Scheduler(clock=Passing(NOON + timedelta(minutes=4, seconds=10))).fire_due().fired
    assert len(fired) == 8 and occurrences() == ["12:05"] * 8
    assert occurrences(OccurrenceOutcome.MISSED) == []


def test_what_becomes_due_in_a_long_round_is_on_time(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler was at work all the time, so nothing of that was missed; after a pause it is."""
    schedule(name="first", cron="5 * * * *")
    schedule(name="second", cron="6 * * * *")
    clock.step(minutes=5)

    def takes_long(row: Schedule, occurs_at: datetime) -> UUID:
        clock.step(minutes=3)
        return enqueue(row, occurs_at)

    monkeypatch.setattr("django_asyncq.scheduling.scheduler.enqueue", takes_long)
    assert len(scheduler.fire_due().fired) == 1
    assert len(scheduler.fire_due().fired) == 1
    assert occurrences() == ["12:05", "12:06"] and occurrences(OccurrenceOutcome.MISSED) == []
    clock.now = NOON + timedelta(hours=1, minutes=5)
    scheduler.fire_due()
    clock.step(minutes=5)
    assert scheduler.fire_due().fired == []
    assert occurrences(OccurrenceOutcome.MISSED) == ["13:06"]


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_crash_between_occurrence_and_task_leaves_neither(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Both are one transaction. Nothing is in Redis either, and the occurrence fires in the next round."""
    schedule()
    clock.step(minutes=5)

    def dies(row: Schedule, occurs_at: datetime) -> None:
        if at == "after":
            enqueue(row, occurs_at)
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.scheduling.scheduler.enqueue", dies)
        with pytest.raises(SystemExit):
            scheduler.fire_due()
    assert TaskRecord.objects.count() == Occurrence.objects.count() == 0
    assert Broker().dequeue("default", "w", 9, 30).leases == []
    assert len(scheduler.fire_due().fired) == 1
    assert TaskRecord.objects.count() == 1


def test_a_scheduler_that_lost_its_lock_writes_nothing(clock: Clock) -> None:
    """Neither occurrence nor task. The next leader fires it."""
    schedule()
    clock.step(minutes=5)

    @contextmanager
    def lost_term() -> Iterator[None]:
        with transaction_of(TaskRecord):
            raise LockLost("maintenance", 1)
        yield

    with pytest.raises(LockLost):
        Scheduler(lost_term, clock).fire_due()
    assert Occurrence.objects.count() == TaskRecord.objects.count() == 0
    assert len(Scheduler(clock=clock).fire_due().fired) == 1


def test_the_time_is_that_of_the_database() -> None:
    """By default, whatever the host's clock says."""
    row = schedule(missed=Missed.ONCE)
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=timezone.now() - timedelta(minutes=10))
    found = Scheduler().fire_due()
    assert len(found.fired) == 1
    assert found.next_seconds == pytest.approx(150, abs=151)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_schedules_fire_in_time_when_the_connection_has_another_time_zone(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TIME_ZONE` in `DATABASES` says how MySQL and SQLite store times, not what time it is."""
    connection = connections[writing_database(Schedule)]
    monkeypatch.setitem(connection.__dict__, "timezone", ZoneInfo(zone))
    monkeypatch.setitem(connection.__dict__, "timezone_name", zone)
    for name, hours in (("due", 0), ("later", 1)):
        row = schedule(name=name, cron="* * * * *")
        moment = timezone.now().replace(second=0, microsecond=0) + timedelta(hours=hours)
        Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=moment)
    assert [fired.schedule.name for fired in Scheduler().fire_due().fired] == ["due"]


@pytest.mark.parametrize("change", ["save", "delete", "create"])
def test_a_change_wakes_the_scheduler_after_its_commit(change: str) -> None:
    """Not before: the scheduler would read the old row."""
    row = schedule()
    with Broker().client.pubsub(ignore_subscribe_messages=True) as subscription:
        subscription.subscribe(due_channel())
        subscription.get_message(timeout=5)
        with transaction_of(TaskRecord):
            {"save": row.save, "delete": row.delete, "create": lambda: schedule(name="new")}[change]()
            assert subscription.get_message(timeout=0.1) is None
        assert subscription.get_message(timeout=5) is not None


# --- run now


def test_run_now_enqueues_at_once(clock: Clock) -> None:
    """Whatever the overlap policy says, and without jitter. The next occurrence stays planned."""
    row = schedule(overlap=Overlap.SKIP, jitter_seconds=100)
    found = [run_now(row), run_now(row)]
    assert all(occurrence.by_person and occurrence.outcome == OccurrenceOutcome.QUEUED for occurrence in found)
    assert {occurrence.task_id for occurrence in found} == set(TaskRecord.objects.values_list("pk", flat=True))
    assert set(TaskRecord.objects.values_list("run_after", flat=True)) == {None}
    assert Schedule.objects.get().next_occurrence_at == NOON + timedelta(minutes=5)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"task": "tests.tasks.gone"}, TaskNotRegistered),
        ({"task": "tests.tasks.add", "args": [1, 2], "kwargs": {}}, InvalidOption),
        ({"kwargs": {"colour": "red"}}, InvalidOption),
    ],
)
def test_run_now_that_is_refused_writes_nothing(values: dict[str, Any], error: type[Exception]) -> None:
    """The error reaches the caller."""
    row = schedule(**values)
    with pytest.raises(error):
        run_now(row)
    assert Occurrence.objects.count() == TaskRecord.objects.count() == 0


def test_run_now_is_refused_by_a_full_gate(clock: Clock) -> None:
    """It raises QueueFull and writes no occurrence."""
    row = schedule(task="tests.tasks.gated_tally", args=[], kwargs={})
    run_now(row)
    with pytest.raises(QueueFull):
        run_now(row)
    assert Occurrence.objects.count() == 1


# --- declared in code


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Declare a task for this test only: `declare(function, schedule=…)`. `declare()` removes all."""
    monkeypatch.setattr(registry, "_registry", {})

    def declared(function: Any = None, **options: Any) -> None:
        registry._registry.clear()
        if function is not None:
            task(**options)(function)

    return declared


@pytest.mark.parametrize("kind", [tuple, list])
def test_declared_schedules_become_rows(
    scheduler: Scheduler, declare: Callable[..., Any], kind: Callable[[Any], Any]
) -> None:
    """A second `sync` changes nothing."""
    declare(
        tasks.tally.func,
        schedule=kind(
            [
                cron("30 2 * * *", timezone="Europe/Berlin", name="nightly", args=("north",), overlap="skip"),
                every(minutes=5, name="often", args=["south"], kwargs={"pages": 3}, missed="all", missed_cap=4),
            ]
        ),
    )
    assert scheduler.sync() == 2
    assert scheduler.sync() == 0
    nightly, often = Schedule.objects.order_by("name")
    assert (nightly.cron, nightly.zone, nightly.args, nightly.overlap) == (
        "30 2 * * *",
        "Europe/Berlin",
        ["north"],
        "skip",
    )
    assert (often.interval_seconds, often.args, often.kwargs, often.missed_cap) == (300, ["south"], {"pages": 3}, 4)
    assert nightly.is_declared
    assert often.next_occurrence_at is not None


def test_a_schedule_without_a_name_has_that_of_its_task(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """A schedule that an operator disabled stays disabled after the next start."""
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",)))
    scheduler.sync()
    Schedule.objects.update(enabled=False)
    scheduler.sync()
    row = Schedule.objects.get()
    assert (row.name, row.enabled) == ("tests.tasks.tally", False)


def test_a_changed_timing_plans_the_next_occurrence_anew(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """Another change does not. No occurrence of the old timing is fired late."""
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",)))
    scheduler.sync()
    Schedule.objects.update(next_occurrence_at=NOON)
    declare(tasks.tally.func, schedule=every(seconds=30, args=("south",)))
    assert scheduler.sync() == 1
    assert Schedule.objects.get().next_occurrence_at == NOON
    declare(tasks.tally.func, schedule=cron("0 3 * * *", args=("south",)))
    assert scheduler.sync() == 1
    row = Schedule.objects.get()
    assert (row.cron, row.interval_seconds) == ("0 3 * * *", None)
    assert row.next_occurrence_at is not None
    assert row.next_occurrence_at > timezone.now()


def test_arguments_that_only_differ_in_type_are_written(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """Python finds 1, 1.0 and True equal. The order of keys is no difference: PostgreSQL does not keep it."""
    for value in (1, 1.0, True, {"a": 1}, {"a": True}):
        declare(tasks.tally.func, schedule=every(minutes=5, name="often", args=["x"], kwargs={"pages": [value]}))
        scheduler.sync()
        assert repr(Schedule.objects.get().kwargs) == repr({"pages": [value]})
    for number, kwargs in enumerate(({"bb": 1, "a": 2}, {"a": 2, "bb": 1}, {"a": 2, "bb": 1, "c": 0})):
        declare(tasks.tally.func, schedule=every(minutes=5, name="often", args=["x"], kwargs={"pages": kwargs}))
        assert scheduler.sync() == (number != 1)


def test_a_schedule_removed_from_the_code_does_not_fire_until_it_is_declared_again(
    clock: Clock, scheduler: Scheduler, declare: Callable[..., Any]
) -> None:
    """Its row and its history stay. Occurrences in between are not fired late."""
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",), missed="all"))
    scheduler.sync()
    declare()
    assert scheduler.sync() == 1
    assert Schedule.objects.get().retired_at is not None
    clock.now = timezone.now() + timedelta(days=1)
    assert scheduler.fire_due() == ([], None)
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",), missed="all"))
    scheduler.sync()
    row = Schedule.objects.get()
    assert row.retired_at is None
    assert row.next_occurrence_at is not None
    assert timezone.now() < row.next_occurrence_at < timezone.now() + timedelta(seconds=31)


def test_code_may_schedule_any_task(clock: Clock, scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """Even one that people may not schedule."""
    declare(tasks.add.func, schedule=cron("*/5 * * * *", args=(1, 2)))
    scheduler.sync()
    clock.now = Schedule.objects.get().next_occurrence_at or NOON
    assert len(scheduler.fire_due().fired) == 1


def test_code_does_not_replace_a_schedule_made_in_the_admin(
    scheduler: Scheduler, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule in code does not fire, and the log says so."""
    schedule(name="tests.tasks.tally", cron="1 1 1 1 *")
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",)))
    assert [scheduler.sync(), scheduler.sync()] == [0, 0]
    assert Schedule.objects.get().cron == "1 1 1 1 *"
    assert caplog.text.count("has the name of one made in the admin") == 1


def test_a_schedule_that_is_declared_twice_is_logged_once(
    scheduler: Scheduler, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule of the first task fires. The scheduler and each page of the admin read the declarations again."""
    declare(tasks.tally.func, schedule=every(minutes=5, name="c", args=["x"]))
    task(schedule=every(minutes=6, name="c", args=[1, 2]))(tasks.add.func)
    assert [scheduler.sync(), scheduler.sync()] == [1, 0]
    assert Schedule.objects.get().interval_seconds == 360
    assert caplog.text.count("schedule c is declared twice") == 1


def test_a_declared_schedule_that_cannot_be_written_stops_no_other(
    scheduler: Scheduler, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver of the project refuses one: the other is written, and the next `sync` tries the first again."""

    def refuse(*, instance: Schedule, **kwargs: Any) -> None:
        if instance.name == "a":
            raise RuntimeError("refused")

    declare(tasks.tally.func, schedule=(every(minutes=5, name="a", args=["x"]), every(minutes=5, name="b", args=["x"])))
    pre_save.connect(refuse, sender=Schedule)
    try:
        assert [scheduler.sync(), scheduler.sync()] == [1, 0]
        assert not scheduler.is_synced
    finally:
        pre_save.disconnect(refuse, sender=Schedule)
    assert caplog.text.count("schedule a is postponed") == 1
    assert scheduler.sync() == 1
    assert scheduler.is_synced
    assert sorted(Schedule.objects.values_list("name", flat=True)) == ["a", "b"]


@LOCKS_ROWS
def test_a_locked_row_delays_no_other_declared_schedule(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """It is not waited for either; it is written when the lock is gone."""
    names = ("a", "b")
    declare(tasks.tally.func, schedule=tuple(every(minutes=5, name=name, args=["x"]) for name in names))
    scheduler.sync()
    declare(tasks.tally.func, schedule=tuple(every(minutes=6, name=name, args=["x"]) for name in names))
    with locked_row(Schedule.objects.get(name="a")):
        assert scheduler.sync() == 1
        assert not scheduler.is_synced
    assert scheduler.sync() == 1


def test_declarations_that_cannot_be_read_keep_no_schedule_from_firing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step fails and is logged, and what is due has fired."""
    row = schedule(cron="* * * * *")
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=timezone.now().replace(second=0, microsecond=0))
    maintenance = MaintenanceService([], single_instance=False)

    def fail() -> int:
        raise DatabaseError("no answer")

    monkeypatch.setattr(maintenance.scheduler, "sync", fail)
    maintenance.seek_leadership()
    try:
        with pytest.raises(DatabaseError, match="no answer"):
            maintenance.fire_schedules()
    finally:
        maintenance.coordinator.release(maintenance.lock_name)
    assert TaskRecord.objects.count() == 1
