"""Schedules: each occurrence becomes one task, whoever fires it, whatever the clock does, and none by itself goes missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_asyncq import cron, every, registry, task
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import due_channel
from django_asyncq.exceptions import InvalidOption, LockLost, QueueFull, TaskNotRegistered
from django_asyncq.models import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, TaskRecord, TaskState
from django_asyncq.scheduling.scheduler import DatabaseNow, Scheduler, enqueue, run_now
from django_asyncq.testing import EmbeddedRedis

from . import tasks

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


class Clock:
    """A clock that stands where it is put."""

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
    """A schedule of `tests.tasks.tally`, each five minutes from noon on, with other values."""
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


def test_a_tick_becomes_a_task_once(clock: Clock, scheduler: Scheduler) -> None:
    """The row has the schedule's arguments; the next occurrence is planned, and told for the next look."""
    row = schedule()
    assert scheduler.look() == ([], 300)
    clock.step(minutes=5)
    fired, seconds = scheduler.look()
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
    assert scheduler.look() == ([], 300)
    row.refresh_from_db()
    assert row.next_occurrence_at == NOON + timedelta(minutes=10)


def test_nothing_to_fire_has_no_next(scheduler: Scheduler) -> None:
    """Without schedules, and with those that are disabled, gone from the code, or over."""
    assert scheduler.look() == ([], None)
    schedule(enabled=False, next_occurrence_at=NOON)
    schedule(name="gone", retired_at=NOON)
    schedule(name="over", ends_at=NOON - timedelta(days=1))
    assert scheduler.look() == ([], None)


def test_many_at_once_fire_each_tick_once() -> None:
    """Eight threads, no lock among them, clocks five minutes apart: forty schedules, forty tasks."""
    for number in range(40):
        schedule(name=f"report {number}")
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def fire(minutes: int) -> None:
        scheduler = Scheduler(clock=Clock(NOON + timedelta(minutes=minutes)))
        barrier.wait(10)
        try:
            for _ in range(3):
                scheduler.look()
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


def test_a_tick_that_is_written_is_never_fired_again(clock: Clock, scheduler: Scheduler) -> None:
    """Not even when somebody sets the schedule back."""
    row = schedule()
    for _ in range(3):
        clock.step(minutes=5)
        scheduler.look()
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=NOON + timedelta(minutes=5), missed=Missed.ALL)
    assert scheduler.look().fired == []
    assert TaskRecord.objects.count() == 3
    assert occurrences() == ["12:05", "12:10", "12:15"]


@pytest.mark.parametrize(
    ("missed", "late", "queued", "left_out"),
    [
        (Missed.SKIP, timedelta(seconds=59), ["13:00"], ["12:55"]),
        (Missed.SKIP, timedelta(seconds=61), [], ["13:00"]),
        (Missed.ONCE, timedelta(seconds=1), ["13:00"], ["12:55"]),
        (Missed.ONCE, timedelta(minutes=4), ["13:00"], ["12:55"]),
        (Missed.ALL, timedelta(minutes=4), ["12:50", "12:55", "13:00"], ["12:45"]),
    ],
)
def test_missed_ticks_go_by_the_policy(
    clock: Clock, scheduler: Scheduler, missed: Missed, late: timedelta, queued: list[str], left_out: list[str]
) -> None:
    """Twelve occurrences, nobody there; what is left out is told in one row."""
    schedule(missed=missed, missed_cap=3)
    clock.now = NOON + timedelta(hours=1) + late
    fired = scheduler.look().fired
    assert [each.occurs_at.strftime("%H:%M") for each in fired] == occurrences() == queued
    assert occurrences(OccurrenceOutcome.MISSED) == left_out
    assert "back to 2026-11-21 12:05:00 UTC" in Occurrence.objects.get(outcome=OccurrenceOutcome.MISSED).note
    assert scheduler.look().fired == []
    clock.now = NOON + timedelta(minutes=65)
    assert [each.occurs_at for each in scheduler.look().fired] == [clock.now]


def test_a_single_late_tick_is_not_missed_while_a_successor_may_still_come(
    clock: Clock, scheduler: Scheduler, settings: Any
) -> None:
    """The lock of a dead leader lasts its TTL; on time is twice that."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LOCK_TTL_SECONDS": 100}
    schedule()
    clock.step(minutes=5, seconds=199)
    assert len(scheduler.look().fired) == 1
    assert occurrences(OccurrenceOutcome.MISSED) == []


def test_overlapping_ticks_are_left_out_where_asked(clock: Clock, scheduler: Scheduler) -> None:
    """While one of its tasks is queued, running or waits for a retry; not for ever after it has failed."""
    schedule(overlap=Overlap.SKIP)
    schedule(name="allows")
    states: list[dict[str, Any]] = [
        {"state": TaskState.QUEUED},
        {"state": TaskState.RUNNING},
        {"state": TaskState.FAILED, "retry_at": NOON},
        {"state": TaskState.FAILED, "finished_at": NOON},
    ]
    clock.step(minutes=5)
    scheduler.look()
    first = Occurrence.objects.get(schedule__name="report").task_id
    for state in states:
        TaskRecord.objects.filter(pk=first).update(**{"retry_at": None, "finished_at": None, **state})
        clock.step(minutes=5)
        scheduler.look()
    outcomes = (
        Occurrence.objects.filter(schedule__name="report").order_by("occurs_at").values_list("outcome", flat=True)
    )
    assert list(outcomes) == ["queued", "skipped", "skipped", "skipped", "queued"]
    assert Occurrence.objects.filter(schedule__name="allows", outcome="queued").count() == 5


def test_jitter_delays_the_task_and_is_the_same_everywhere(clock: Clock, scheduler: Scheduler) -> None:
    """The occurrence keeps its time; each occurrence has a delay of its own within the limit."""
    schedule(jitter_seconds=60, missed=Missed.ALL)
    schedule(name="other", jitter_seconds=60, missed=Missed.ALL)
    clock.step(minutes=50)
    scheduler.look()
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
    Scheduler(clock=clock).look()
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
def test_a_tick_that_cannot_be_queued_says_why_and_the_next_one_comes(
    clock: Clock, scheduler: Scheduler, values: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is gone, was never given to people, or takes other arguments by now."""
    schedule(**values)
    schedule(name="well")
    clock.step(minutes=5)
    assert [each.schedule.name for each in scheduler.look().fired] == ["well"]
    occurrence = Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED)
    assert words in occurrence.note
    assert words in caplog.text
    assert occurrence.task_id is None
    assert Schedule.objects.get(name="report").next_occurrence_at == NOON + timedelta(minutes=10)


def test_a_full_gate_refuses_the_tick(clock: Clock, scheduler: Scheduler) -> None:
    """The occurrence is used up: the limit is strict, for schedules too."""
    schedule(task="tests.tasks.gated_tally", args=[], kwargs={})
    clock.step(minutes=5)
    scheduler.look()
    clock.step(minutes=5)
    assert scheduler.look().fired == []
    assert "is full: 1 of 1" in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note


def test_a_gate_that_cannot_be_asked_lets_the_tick_wait(
    clock: Clock, scheduler: Scheduler, own_redis: EmbeddedRedis
) -> None:
    """Redis is away: that occurrence stays due, the task without a gate is accepted; when Redis is back it is fired."""
    schedule(name="a", task="tests.tasks.gated_tally", args=[], kwargs={})
    schedule(name="b")
    clock.step(minutes=5)
    own_redis.kill()
    look = scheduler.look()
    assert [each.schedule.name for each in look.fired] == ["b"]
    assert look.next_seconds == 1
    own_redis.start()
    assert [each.schedule.name for each in scheduler.look().fired] == ["a"]
    assert occurrences() == ["12:05", "12:05"]


def test_a_row_that_is_no_timing_stops_and_says_so(clock: Clock, scheduler: Scheduler) -> None:
    """Written past the form; one line of log, not one a second."""
    row = schedule()
    Schedule.objects.filter(pk=row.pk).update(zone="Mars/Olympus")
    clock.step(minutes=5)
    assert scheduler.look() == ([], None)
    assert "Mars/Olympus" in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note
    assert Schedule.objects.get().next_occurrence_at is None


def test_a_schedule_ends(clock: Clock, scheduler: Scheduler) -> None:
    """The last occurrence is the one at its end."""
    schedule(ends_at=NOON + timedelta(minutes=10))
    for _ in range(4):
        clock.step(minutes=5)
        scheduler.look()
    assert occurrences() == ["12:05", "12:10"]


def test_a_clock_that_is_set_back_repeats_no_tick(clock: Clock, scheduler: Scheduler) -> None:
    """Five minutes back and forth: every time once."""
    schedule(cron="* * * * *", missed=Missed.ALL)
    for minutes in (1, 1, 1, 5, -5, 1, 1, 1, 1, 1, 1, -5, 5, 1):
        clock.step(minutes=minutes)
        scheduler.look()
    assert occurrences() == [f"12:{minute:02}" for minute in range(1, 11)]
    assert TaskRecord.objects.count() == 10


def test_a_clock_that_leaps_ahead_goes_by_the_policy(clock: Clock, scheduler: Scheduler) -> None:
    """Five minutes ahead with "skip": the latest occurrence is on time, the four before it are told as missed."""
    schedule(cron="* * * * *")
    clock.step(minutes=1)
    scheduler.look()
    clock.step(minutes=5)
    scheduler.look()
    assert occurrences() == ["12:01", "12:06"]
    assert occurrences(OccurrenceOutcome.MISSED) == ["12:05"]


@pytest.mark.parametrize("at", ["before", "after"])
def test_dying_between_tick_and_task_leaves_neither(
    clock: Clock, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """One transaction: what is not whole is not there, nor in Redis, and is fired at the next look."""
    schedule()
    clock.step(minutes=5)

    def dies(row: Schedule, occurs_at: datetime) -> None:
        if at == "after":
            enqueue(row, occurs_at)
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.scheduling.scheduler.enqueue", dies)
        with pytest.raises(SystemExit):
            scheduler.look()
    assert TaskRecord.objects.count() == Occurrence.objects.count() == 0
    assert Broker().dequeue("default", "w", 9, 30).leases == []
    assert len(scheduler.look().fired) == 1
    assert TaskRecord.objects.count() == 1


def test_who_lost_its_term_writes_nothing(clock: Clock) -> None:
    """Neither occurrence nor task; its successor fires it."""
    schedule()
    clock.step(minutes=5)

    @contextmanager
    def over() -> Iterator[None]:
        with transaction.atomic():
            raise LockLost("maintenance", 1)
        yield

    with pytest.raises(LockLost):
        Scheduler(over, clock).look()
    assert Occurrence.objects.count() == TaskRecord.objects.count() == 0
    assert len(Scheduler(clock=clock).look().fired) == 1


def test_time_is_the_databases() -> None:
    """By default; whatever the host's clock says."""
    row = schedule()
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=timezone.now() - timedelta(seconds=1))
    found = Schedule.objects.annotate(found=DatabaseNow()).get()
    assert abs((found.found - timezone.now()).total_seconds()) < 5
    assert Scheduler().look().next_seconds == pytest.approx(150, abs=151)


@pytest.mark.parametrize("change", ["save", "delete", "create"])
def test_a_change_wakes_the_scheduler_after_its_commit(change: str) -> None:
    """Not before: it would look and see nothing."""
    row = schedule()
    with Broker().client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(due_channel())
        heard.get_message(timeout=5)
        with transaction.atomic():
            {"save": row.save, "delete": row.delete, "create": lambda: schedule(name="new")}[change]()
            assert heard.get_message(timeout=0.1) is None
        assert heard.get_message(timeout=5) is not None


# --- by hand


def test_run_now_queues_at_once(clock: Clock) -> None:
    """Whatever the overlap policy says, without jitter; the plan stays as it is."""
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
    """The caller is told."""
    row = schedule(**values)
    with pytest.raises(error):
        run_now(row)
    assert Occurrence.objects.count() == TaskRecord.objects.count() == 0


def test_run_now_at_a_full_gate(clock: Clock) -> None:
    """QueueFull, and no occurrence."""
    row = schedule(task="tests.tasks.gated_tally", args=[], kwargs={})
    run_now(row)
    with pytest.raises(QueueFull):
        run_now(row)
    assert Occurrence.objects.count() == 1


# --- declared in code


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Declare tasks for this test alone: `declare(function, schedule=…)`; and `declare()` forgets them all."""
    monkeypatch.setattr(registry, "_registry", {})

    def declared(function: Any = None, **options: Any) -> None:
        registry._registry.clear()
        if function is not None:
            task(**options)(function)

    return declared


def test_declared_schedules_become_rows(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """Once; a second look changes nothing."""
    declare(
        tasks.tally.func,
        schedule=(
            cron("30 2 * * *", timezone="Europe/Berlin", name="nightly", args=("north",), overlap="skip"),
            every(minutes=5, name="often", args=["south"], kwargs={"pages": 3}, missed="all", missed_cap=4),
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


def test_name_of_the_only_schedule_is_the_tasks(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """And an operator's switch survives the next start."""
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",)))
    scheduler.sync()
    Schedule.objects.update(enabled=False)
    scheduler.sync()
    row = Schedule.objects.get()
    assert (row.name, row.enabled) == ("tests.tasks.tally", False)


def test_changed_declaration_plans_anew(scheduler: Scheduler, declare: Callable[..., Any]) -> None:
    """Only where its times changed; no occurrence of the old times is made up for."""
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


def test_schedule_that_is_gone_from_the_code_rests_and_may_come_back(
    clock: Clock, scheduler: Scheduler, declare: Callable[..., Any]
) -> None:
    """Its row and its history stay; occurrences meanwhile are not made up for."""
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",), missed="all"))
    scheduler.sync()
    declare()
    assert scheduler.sync() == 1
    assert Schedule.objects.get().retired_at is not None
    clock.now = timezone.now() + timedelta(days=1)
    assert scheduler.look() == ([], None)
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",), missed="all"))
    scheduler.sync()
    row = Schedule.objects.get()
    assert row.retired_at is None
    assert row.next_occurrence_at is not None
    assert timezone.now() < row.next_occurrence_at < timezone.now() + timedelta(seconds=31)


def test_declared_tasks_need_not_be_given_to_people(
    clock: Clock, scheduler: Scheduler, declare: Callable[..., Any]
) -> None:
    """Code may schedule any task."""
    declare(tasks.add.func, schedule=cron("*/5 * * * *", args=(1, 2)))
    scheduler.sync()
    clock.now = Schedule.objects.get().next_occurrence_at or NOON
    assert len(scheduler.look().fired) == 1


def test_persons_schedule_keeps_its_name(
    scheduler: Scheduler, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Code does not take it over; the log says so."""
    schedule(name="tests.tasks.tally", cron="1 1 1 1 *")
    declare(tasks.tally.func, schedule=every(seconds=30, args=("north",)))
    assert scheduler.sync() == 0
    assert Schedule.objects.get().cron == "1 1 1 1 *"
    assert "has the name of one made in the admin" in caplog.text
