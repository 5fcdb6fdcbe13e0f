"""One clock: rows have the database's time, Redis decides by its own, and the clock of a host decides nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import gates
from django_asyncq.broker import Broker, redis_clock
from django_asyncq.broker.keys import keys_of
from django_asyncq.core import time as clocks
from django_asyncq.core.time import MeasuredClock, steady_seconds
from django_asyncq.fleet import leader
from django_asyncq.fleet.leader import ClockCheck
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle.messages import later_fence
from django_asyncq.models import Gate, LockTerm, Occurrence, Schedule, StartupRun, TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.testing import crash_at
from django_asyncq.testing.crashes import CRASH_VARIABLE

from .. import tasks
from ..clock_shift import shifted_clock
from ..workers import ROOT, environment, history, run_workers, wait_until, workers

connection = connections["default"]
has_own_clock = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has the clock of its host")
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test as a new process does."""
    monkeypatch.setattr(database_clock, "_clocks", {})
    monkeypatch.setattr(database_clock, "_ask_from", {})
    monkeypatch.setattr(database_clock, "_askers", {})
    monkeypatch.setattr(redis_clock, "_clocks", {})


@pytest.fixture
def database_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A TIME_ZONE in DATABASES, for this process and those that it starts."""

    def forget() -> None:
        for each in connections.all():
            each.close()
            for name in ("timezone", "timezone_name"):
                each.__dict__.pop(name, None)

    forget()
    for each in connections.all():
        monkeypatch.setitem(each.settings_dict, "TIME_ZONE", "Asia/Tokyo")
    monkeypatch.setenv("ASYNCQ_TEST_DATABASE_ZONE", "Asia/Tokyo")
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library that shifts a clock is made, once."""
    return tmp_path_factory.mktemp("shifted_clock")


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A history file that the tasks of every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    yield path


def do(action: str, *arguments: str, **variables: str) -> dict[str, str]:
    """Run an action of `clock_producer` in a process of its own; return what it prints, nothing if it died."""
    command = [sys.executable, "-m", "tests.clock_producer", action, *arguments]
    done = subprocess.run(
        command, env=environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if not done.stdout:
        return {}
    found: dict[str, str] = json.loads(done.stdout)
    return found


# --- a measured clock


def test_a_measurement_counts_from_the_middle_of_its_round_trip() -> None:
    """Asked at 10 and answered at 12: the store showed its time at 11."""
    clock = MeasuredClock()
    assert (clock.seconds(), clock.is_measured) == (None, False)
    now = steady_seconds()
    clock.note(now - 2, now, 1000.0)
    assert clock.seconds() == pytest.approx(1001, abs=0.1)
    assert clock.age_seconds == pytest.approx(0, abs=0.1)


def test_a_measurement_that_agrees_changes_nothing() -> None:
    """Within the uncertainty of its round trip the earlier one stays, so no run ends before it has begun."""
    clock, now = MeasuredClock(), steady_seconds()
    clock.note(now, now, 1000.0)
    before = clock.seconds()
    clock.note(now - 1, now + 1, 999.2)
    assert before is not None
    assert (clock.seconds() or 0) >= before
    clock.note(now - 1, now + 1, 998.0)
    assert clock.seconds() == pytest.approx(998, abs=0.2)


# --- the database's clock


@pytest.mark.django_db(transaction=True)
def test_the_time_costs_one_statement_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none on SQLite. An estimate is made without one for ever, once the clock is measured."""
    one = 0 if connection.vendor == "sqlite" else 1
    with CaptureQueriesContext(connection) as captured:
        assert abs(database_clock.now() - timezone.now()) < timedelta(seconds=2)
        database_clock.now()
    assert len(captured) == one
    monkeypatch.setattr(clocks, "steady_seconds", lambda: steady_seconds() + 61)
    with CaptureQueriesContext(connection) as captured:
        database_clock.estimate()
    assert len(captured) == 0
    with CaptureQueriesContext(connection) as captured:
        database_clock.now()
    assert len(captured) == one


@pytest.mark.django_db(transaction=True)
def test_a_plain_enqueue_asks_for_no_time() -> None:
    """The database notes it by itself; a delay in a `timedelta` is counted from the measured time."""
    with CaptureQueriesContext(connection) as captured:
        tasks.add.enqueue(1)
        tasks.add.enqueue_many([(1,), (2,)])
    assert not [query["sql"] for query in captured if query["sql"].startswith("SELECT")]
    assert not database_clock._clocks.get("default", MeasuredClock()).is_measured


@pytest.mark.django_db(transaction=True)
def test_the_time_is_told_within_an_aborted_transaction() -> None:
    """Nothing is asked then, or the question fails; either way the transaction can be rolled back as before."""
    Gate.objects.create(name="one", limit=1)

    def spoil() -> None:
        with pytest.raises(IntegrityError), connection.cursor() as cursor:
            columns = ", ".join(map(connection.ops.quote_name, ("name", "limit", "expected_seconds")))
            cursor.execute(f"INSERT INTO django_asyncq_gate ({columns}) VALUES ('one', 1, 60)")

    with transaction.atomic():
        Gate.objects.create(name="two", limit=1)
        spoil()
        assert abs(database_clock.now() - timezone.now()) < timedelta(seconds=2)
        transaction.set_rollback(True)
        assert abs(database_clock.now() - timezone.now()) < timedelta(seconds=2)
    assert list(Gate.objects.values_list("name", flat=True)) == ["one"]


@pytest.mark.django_db(transaction=True)
def test_the_time_is_told_within_an_event_loop() -> None:
    """Where Django refuses statements; a thread of its own asks for the first one."""

    async def ask() -> datetime:
        return database_clock.now()

    assert abs(asyncio.run(ask()) - timezone.now()) < timedelta(seconds=2)
    assert database_clock._clocks.get("default", MeasuredClock()).is_measured == (connection.vendor != "sqlite")


def test_an_event_loop_asks_with_one_connection_and_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it needs the time while a slow database has not answered."""
    asked, answer = [], threading.Event()

    def measure(alias: str) -> None:
        asked.append(alias)
        answer.wait(10)

    monkeypatch.setitem(database_clock.STATEMENTS, connection.vendor, "")
    monkeypatch.setattr(database_clock, "measure", measure)
    monkeypatch.setattr(database_clock, "LOOP_SECONDS", 0.2)

    async def ask() -> float:
        begun_at = time.monotonic()
        for _ in range(20):
            database_clock.now("default")
        return time.monotonic() - begun_at

    seconds = asyncio.run(ask())
    answer.set()
    for thread in database_clock._askers.values():
        thread.join(10)
    assert asked == ["default"]
    assert seconds < 1


def test_the_time_is_told_where_no_database_may_be_used() -> None:
    """As in a `SimpleTestCase`: the host's clock is used, and nothing is raised."""
    assert abs(database_clock.now() - timezone.now()) < timedelta(seconds=2)


@pytest.mark.django_db(transaction=True)
def test_the_time_has_no_time_zone_where_django_has_none(settings: Any) -> None:
    """With USE_TZ off, a moment of the database is naive and local, as `timezone.now()` is."""
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    found = database_clock.now()
    assert found.tzinfo is None
    assert abs(found - timezone.now()) < timedelta(seconds=2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("database_zone")
def test_every_time_in_a_row_is_right_on_a_connection_with_a_time_zone(
    history_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of tasks, occurrences, start-up runs and terms; what is due fires, and nothing else does."""
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "well")
    began_at, minute = timezone.now().replace(microsecond=0) - timedelta(seconds=2), timedelta(minutes=1)
    for name, starts_at in [("due", began_at - minute / 4), ("not due", began_at + 10 * minute)]:
        row = Schedule(name=name, task="tests.tasks.tally", args=["a"], kwargs={"pages": 1}, interval_seconds=3600)
        row.starts_at = row.next_occurrence_at = starts_at
        row.save()
    tasks.add.enqueue(1, 2)
    tasks.add.enqueue_many([(1, 2), (3, 4)])
    with workers(tmp_path):
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 4, "end of four tasks")
        wait_until(
            lambda: StartupRun.objects.filter(finished_at__isnull=False).count() == 2, "end of two start-up runs"
        )
    run_workers()
    assert [occurrence.schedule.name for occurrence in Occurrence.objects.all()] == ["due"]
    assert [line["event"] for line in history(history_path)].count("once") == 1
    found = [
        (model.__name__, name, moment)
        for model in (TaskRecord, Occurrence, StartupRun, LockTerm)
        for row in model._default_manager.all()
        for name, moment in vars(row).items()
        if isinstance(moment, datetime)
    ]
    # Four tasks have four times each, the occurrence one of its own, three start-up runs two, and terms one.
    assert len(found) >= 4 * 4 + 1 + 3 * 2 + 1
    ends_at = timezone.now() + timedelta(seconds=2)
    assert [each for each in found if not began_at - minute <= each[2] <= ends_at] == []


@pytest.mark.django_db(transaction=True)
def test_a_later_fence_follows_the_database_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a slow clock hands out no fence below one that another handed out before."""
    found = later_fence(TaskRecord(name="a"))
    assert found == pytest.approx(database_clock.unix_seconds() * 1_000_000, abs=2_000_000)
    assert later_fence(TaskRecord(name="a", fence=2**52)) == 2**52 + 1


# --- both clocks


@pytest.mark.django_db(transaction=True)
def test_clocks_that_come_apart_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when they do, one line when they agree again, nothing in between."""
    caplog.set_level(logging.INFO)
    check, found = ClockCheck(), []
    for number, difference in enumerate([0.2, 1.5, 9.0, 0.7, -0.1, 0.9, -2.0]):
        monkeypatch.setattr(leader, "clock_difference_seconds", lambda shown=difference: shown)
        check.tick(1000.0 * (number + 1))
        found.append([record.levelname for record in caplog.records])
        caplog.clear()
    assert found == [[], ["WARNING"], [], [], ["INFO"], [], ["WARNING"]]


@pytest.mark.django_db(transaction=True)
def test_clocks_are_compared_once_a_minute() -> None:
    """The stores of one host agree."""
    assert leader.clock_difference_seconds() == pytest.approx(0, abs=0.5)
    check = ClockCheck()
    with CaptureQueriesContext(connection) as captured:
        check.tick(1000.0)
        check.tick(1059.0)
    assert len(captured) == (0 if connection.vendor == "sqlite" else 1)


# --- processes with a wrong clock


@pytest.mark.django_db(transaction=True)
def test_a_shifted_process_sees_the_wrong_time(library_folder: Path) -> None:
    """Or the tests below would prove nothing."""
    found = do("begin", **shifted_clock(600, library_folder))
    assert datetime.fromisoformat(found["host"]) - timezone.now() > timedelta(seconds=570)


@has_own_clock
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("shift", [60, -600, 600])
def test_rows_have_the_database_time_whatever_the_producer_shows(shift: int, library_folder: Path) -> None:
    """`enqueued_at`, and a delay that is a `timedelta`. The result shows the host's clock until it is refreshed."""
    variables = shifted_clock(shift, library_folder)
    plain, delayed = do("enqueue", **variables), do("delay", **variables)
    now = database_clock.now()
    assert abs(TaskRecord.objects.get(id=plain["id"]).enqueued_at - now) < timedelta(seconds=10)
    assert abs(datetime.fromisoformat(plain["shown"]) - now - timedelta(seconds=shift)) < timedelta(seconds=10)
    due = TaskRecord.objects.get(id=delayed["id"]).run_after
    assert due is not None
    assert abs(due - now - timedelta(seconds=100)) < timedelta(seconds=10)


@has_own_clock
@pytest.mark.django_db(transaction=True)
def test_task_of_a_producer_with_a_fast_clock_that_died_is_pushed_in_time(library_folder: Path) -> None:
    """Its clock is 60 s too fast, and it dies between commit and push: the task does not wait 60 s more."""
    armed = {CRASH_VARIABLE: crash_at("enqueue.committed")[CRASH_VARIABLE]}
    assert do("enqueue", **armed, **shifted_clock(60, library_folder)) == {}
    committed_at = time.monotonic()
    reconciler = Reconciler(Broker("worker"))
    wait_until(lambda: reconciler.push_missing(young=True), "push of the task", 15)
    assert time.monotonic() - committed_at < 10
    assert TaskRecord.objects.get().state == TaskState.QUEUED


@has_own_clock
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("shift", [-600, 600])
def test_retries_of_a_worker_with_a_wrong_clock_come_in_time(
    shift: int, library_folder: Path, history_path: Path, tmp_path: Path
) -> None:
    """Its clock is wrong by ten minutes: the retry comes after the backoff, not ten minutes later and not at once."""
    result = tasks.fails_once.enqueue()
    with workers(tmp_path, **shifted_clock(shift, library_folder)):
        wait_until(lambda: len(history(history_path)) == 2, "second attempt")
        wait_until(lambda: TaskRecord.objects.succeeded().exists(), "success")
    first, second = (line["at"] for line in history(history_path))
    assert tasks.BACKOFF_SECONDS - 0.5 < second - first < tasks.BACKOFF_SECONDS + 4
    row, now = TaskRecord.objects.get(id=result.id), database_clock.now()
    for moment in (row.enqueued_at, row.started_at, row.last_attempted_at, row.finished_at):
        assert moment is not None
        assert timedelta() < now - moment < timedelta(seconds=60)


@pytest.mark.django_db(transaction=True)
def test_counters_of_the_day_follow_redis(library_folder: Path) -> None:
    """A worker whose clock is a day fast counts in the counter of today, for as long as the others do."""
    tasks.add.enqueue(1)
    run_workers(**shifted_clock(86_400, library_folder))
    keys, client = keys_of("default"), Broker().client
    today = datetime.fromtimestamp(redis_clock.seconds(), UTC).date()
    assert client.get(keys.processed_on(today.isoformat())) == b"1"
    assert not client.exists(keys.processed_on((today + timedelta(days=1)).isoformat()))
    assert client.ttl(keys.processed_on(today.isoformat())) == pytest.approx(90 * 86_400, abs=60)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("shift", [-600, 600])
def test_an_audit_by_a_wrong_clock_keeps_provisional_slots(shift: int, library_folder: Path) -> None:
    """The slot of a transaction that has not committed is not taken for one that nobody holds."""
    Gate.objects.create(name="g", limit=2)
    gates.acquire([TaskRecord(name="tests.tasks.nap", gate="g")])
    assert do("audit", "g", **shifted_clock(shift, library_folder))["drift"] == "(0, 0)"
    assert len(gates.slots("g")) == 1
