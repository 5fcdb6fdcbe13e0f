"""Imported schedules are written once, together, and nothing fires twice or is missed at the cutover."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from django_asyncq import cron, every
from django_asyncq.core.redaction import MASK
from django_asyncq.core.schedules import Declaration
from django_asyncq.core.timing import Cron
from django_asyncq.models import Occurrence, Schedule, TaskRecord
from django_asyncq.moving import celery_beat, q2
from django_asyncq.moving.judging import Verdict, Wish, judge
from django_asyncq.moving.writing import write
from django_asyncq.scheduling.scheduler import Scheduler

from .. import moved_tasks, old_queues, tasks
from ..old_queues import add_beat, add_q2, by_name, imported, run

pytestmark = pytest.mark.django_db(transaction=True)

CUTOVER = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
CUT = ("--cutover", CUTOVER.isoformat())
SIX = {"crontab": {"minute": "0", "hour": "6"}}
LAST = CUTOVER - timedelta(minutes=3)


@pytest.fixture(autouse=True)
def tables(transactional_db: None) -> Iterator[None]:
    """The tables of the old queues, empty."""
    old_queues.make()
    yield
    old_queues.drop()


def rows() -> dict[str, dict[str, Any]]:
    """Return the schedules, without what each one has of its own."""
    listed = Schedule.objects.order_by("name").values()
    return {
        each["name"]: {key: value for key, value in each.items() if key not in ("id", "created_at")} for each in listed
    }


def test_without_write_nothing_is_changed() -> None:
    """And the document says so."""
    add_beat("prices", **SIX)
    found = imported("celery-beat")
    assert found["dry_run"] is True
    assert found["sums"] == {"schedules": 1, "same": 1, "same_but": 0, "not": 0, "there_already": 0, "written": 0}
    assert found["schedules"][0]["outcome"] == "to write"
    assert rows() == {}


def test_what_is_written_is_what_a_person_would_have_made() -> None:
    """A schedule of the admin's kind, from its first occurrence on."""
    add_beat("prices", args="[7]", **SIX)
    add_beat("solar", task="tests.tasks.add", **SIX)
    found = imported("celery-beat", "--write", *CUT)
    assert (found["sums"]["written"], found["sums"]["not"], found["dry_run"]) == (1, 1, False)
    first = datetime(2026, 11, 22, 6, tzinfo=UTC)
    assert rows() == {
        "prices": {
            "name": "prices",
            "task": "tests.tasks.tidy",
            "args": [7],
            "kwargs": {},
            "version": 1,
            "cron": "0 6 * * *",
            "interval_seconds": None,
            "zone": "UTC",
            "starts_at": first,
            "ends_at": None,
            "enabled": True,
            "overlap": "allow",
            "missed": "once",
            "missed_cap": 10,
            "jitter_seconds": 0,
            "is_declared": False,
            "retired_at": None,
            "next_occurrence_at": first,
        }
    }


def test_a_second_write_writes_nothing_and_says_what_differs() -> None:
    """A person's change stays; a schedule that is new is written."""
    add_beat("prices", **SIX)
    add_beat("mails", interval={"every": 1, "period": "hours"}, last_run_at=LAST)
    assert imported("celery-beat", "--write", *CUT)["sums"]["written"] == 2
    before = rows()
    again = imported("celery-beat", "--write", "--cutover", (CUTOVER + timedelta(hours=5)).isoformat())
    sums = {"schedules": 2, "same": 1, "same_but": 1, "not": 0, "there_already": 2, "written": 0}
    assert again["sums"] == sums
    assert [each["differs"] for each in again["schedules"]] == [[], []]
    assert rows() == before
    Schedule.objects.filter(name="prices").update(cron="0 7 * * *", enabled=False)
    add_beat("new", **SIX)
    third = by_name("celery-beat", "--write", *CUT)
    assert {name: each["outcome"] for name, each in third.items()} == {
        "prices": "there already",
        "mails": "there already",
        "new": "written",
    }
    differs = ["cron: 0 7 * * * in the database, 0 6 * * * there", "enabled: False in the database, True there"]
    assert third["prices"]["differs"] == differs
    assert rows()["prices"]["cron"] == "0 7 * * *"
    assert "  - differs from what is there: cron: 0 7 * * *" in run("celery-beat", *CUT)


def test_tasks_are_mapped_and_a_map_without_use_is_said() -> None:
    """The task has another name here; what no schedule has is a typing error."""
    add_beat("prices", task="mysite.tasks.refresh", **SIX)
    text = run("celery-beat", "--write", "--map", "mysite.tasks.refresh=tests.tasks.tidy", "--map", "a.b=c.d")
    assert rows()["prices"]["task"] == "tests.tasks.tidy"
    assert "--map a.b=…: no schedule there has this task." in text
    with pytest.raises(CommandError, match="give OLD=NEW"):
        run("celery-beat", "--map", "nothing")


def test_a_task_is_found_by_its_alias() -> None:
    """The row has its name of today."""
    add_beat("sweep", task="oldsite.tasks.sweep", **SIX)
    assert by_name("celery-beat", "--write")["sweep"]["verdict"] == "same"
    assert rows()["sweep"]["task"] == moved_tasks.sweep.module_path


def test_disabled_ones_are_enabled_later() -> None:
    """They fire from then on."""
    add_beat("prices", **SIX)
    assert by_name("celery-beat", "--write", "--disabled", *CUT)["prices"]["enabled"] is False
    assert not rows()["prices"]["enabled"]
    call_command("asyncq", "schedules", "enable", "prices")
    assert rows()["prices"]["next_occurrence_at"] > CUTOVER


def test_two_imports_at_once_write_each_once() -> None:
    """Whichever comes first; neither fails."""
    for number in range(20):
        add_beat(f"schedule {number}", **SIX)
    barrier, errors, written = threading.Barrier(2), list[BaseException](), list[int]()
    wish = Wish(cutover=CUTOVER, now=CUTOVER, tasks={})
    verdicts = [judge(celery_beat.read("default", CUTOVER).schedules, wish) for _ in range(2)]

    def act(mine: list[Verdict]) -> None:
        try:
            barrier.wait(10)
            written.append(len(write([each.row for each in mine if each.row is not None])))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=act, args=[each]) for each in verdicts]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert errors == []
    assert sum(written) == 20 == Schedule.objects.count()


def test_an_error_in_the_middle_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are one transaction."""
    for name in ("a", "b", "c"):
        add_beat(name, **SIX)
    save, count = Schedule.save, 0

    def fail(self: Schedule, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        save(self, *args, **kwargs)

    monkeypatch.setattr(Schedule, "save", fail)
    with pytest.raises(CommandError, match="Interrupted"):
        run("celery-beat", "--write", *CUT)
    assert count == 3
    assert rows() == {}


def test_the_line_declares_what_would_be_written() -> None:
    """Typed into code, it is the same schedule."""
    add_beat("prices", kwargs='{"days": 7}', crontab={"hour": "6", "minute": "5", "timezone": "Europe/Berlin"})
    add_beat(
        "mails", interval={"every": 90, "period": "seconds"}, last_run_at=LAST, expires=datetime(2300, 1, 1, tzinfo=UTC)
    )
    found = by_name("celery-beat", "--write", *CUT)
    for name, row in rows().items():
        line = found[name]["line"].removeprefix("@task(schedule=").removesuffix(")")
        declared = eval(line, {"cron": cron, "every": every, "datetime": datetime, "UTC": UTC})  # our own line
        assert isinstance(declared, Declaration)
        for field in ("cron", "interval_seconds", "starts_at", "ends_at", "missed", "kwargs"):
            assert getattr(declared, field) == row[field], (name, field)
        assert not row["cron"] or declared.zone == row["zone"]


def test_a_name_that_the_code_declares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code wins over such a row."""
    add_beat("prices", **SIX)
    declared = (tasks.tidy, cron("0 6 * * *", name="prices"))
    monkeypatch.setattr("django_asyncq.moving.judging.declared_schedules", lambda: [("prices", declared)])
    found = by_name("celery-beat", "--write", *CUT)["prices"]
    assert (found["verdict"], found["outcome"]) == ("not", "not")
    assert "has the name 'prices'" in found["reasons"][0]
    assert rows() == {}


# --- the cutover


@pytest.mark.parametrize("begin", [datetime(2027, 3, 25, tzinfo=UTC), datetime(2027, 10, 28, tzinfo=UTC)])
def test_what_is_same_fires_each_occurrence_once_over_the_cutover(begin: datetime, settings: Any) -> None:
    """In a week in which the clocks change, wherever in it the cutover is: there up to it, here after it."""
    settings.TIME_ZONE = "Europe/Berlin"
    berlin = {"timezone": "Europe/Berlin"}
    add_beat("daily", crontab={"minute": "0", "hour": "6", **berlin})
    add_beat("weekdays", crontab={"minute": "15", "hour": "4,18", "day_of_week": "mon-fri", **berlin})
    add_beat(
        "first weekday", crontab={"minute": "0", "hour": "12", "day_of_month": "22-28", "day_of_week": "0,6", **berlin}
    )
    add_beat("steps", crontab={"minute": "*/20"})
    add_beat(
        "interval", interval={"every": 7, "period": "hours"}, last_run_at=begin - timedelta(minutes=5, microseconds=7)
    )
    half_past_five = Cron("30 5 * * *", "Europe/Berlin")
    late = begin + timedelta(hours=3, seconds=7, microseconds=3)
    for kind in ("D", "W", "M", "H"):
        add_q2(name=kind, schedule_type=kind, next_run=begin + timedelta(hours=3))
    add_q2(name="minutes", schedule_type="I", minutes=50, next_run=late)
    add_q2(name="cron", schedule_type="C", cron="30 5 * * *", next_run=next(half_past_five.occurrences(begin)))
    cutovers = [begin + timedelta(hours=hours, seconds=seconds) for hours in range(7, 168, 23) for seconds in (0, 1807)]
    cutovers += [datetime(begin.year, begin.month, 28, 1, tzinfo=UTC), begin + timedelta(days=4, hours=4)]
    end = begin + timedelta(days=7)
    seen = 0
    for cutover in cutovers:
        wish = Wish(cutover=cutover, now=cutover, tasks={})
        for each in judge([*celery_beat.read("default", cutover).schedules, *q2.read("default").schedules], wish):
            assert each.row is not None and each.old.rule is not None, each
            assert [text for text in each.reasons if "overdue" not in text] == [], each
            rule, timing = each.old.rule, each.row.timing
            alone = list(takewhile(lambda moment: moment <= end, rule.old(begin)))
            # What is due after the cutover, rounded up, is ours; the rest was fired there.
            after = set(takewhile(lambda moment: moment <= end, rule.old(cutover)))
            there = [moment for moment in alone if moment not in after]
            here = list(takewhile(lambda moment: moment <= end, timing.occurrences(begin)))
            assert there + here == alone, (each.old.name, cutover)
            assert all(moment > cutover for moment in here)
            seen += len(here)
    assert seen > 1000


def test_the_leader_fires_only_what_is_later_than_the_cutover() -> None:
    """One that the old queue fired at the cutover itself is not fired again; what was due since then is made up for."""
    add_beat("hourly", crontab={"minute": "0"})
    run("celery-beat", "--write", *CUT)
    now = CUTOVER + timedelta(minutes=59)
    scheduler = Scheduler(clock=lambda: now)
    assert scheduler.fire_due().fired == []
    now = CUTOVER + timedelta(hours=2, minutes=30)
    scheduler.fire_due()
    fired = list(Occurrence.objects.filter(outcome="queued").values_list("occurs_at", flat=True))
    assert fired == [CUTOVER + timedelta(hours=2)]
    assert TaskRecord.objects.filter(name="tests.tasks.tidy").count() == 1


def test_arguments_are_masked() -> None:
    """In the text and in the document, as in the admin."""
    given = '{"region": "eu", "to": "a", "password": "hunter2"}'
    add_beat("secret", task="tests.tasks.statement", args='["eu"]', kwargs='{"to": "a", "password": "hunter2"}', **SIX)
    add_beat("wrong", task="tests.tasks.statement", kwargs=given, **SIX)
    for options in ([], ["--json"]):
        printed = run("celery-beat", *CUT, *options)
        assert "secret" in printed
        assert "hunter2" not in printed
    run("celery-beat", "--write", *CUT)
    Schedule.objects.update(kwargs={"to": "b", "password": "hunter3"})
    printed = run("celery-beat", *CUT)
    assert f"differs from what is there: arguments: ['eu'] and {{'to': 'b', 'password': '{MASK}'}}" in printed
    assert "hunter" not in printed


def test_the_time_is_that_of_the_database() -> None:
    """Without --cutover the first occurrence is later than now."""
    add_beat("each minute", crontab={})
    run("celery-beat", "--write")
    (row,) = Schedule.objects.all()
    assert row.starts_at is not None
    assert connection.is_usable()
    assert row.created_at < row.starts_at <= row.created_at + timedelta(minutes=1)
