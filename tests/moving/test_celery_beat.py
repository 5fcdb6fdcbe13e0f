"""The verdicts on schedules of Celery's beat: those of the tables, and those of the dictionary."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection

from .. import old_queues
from ..old_queues import add_beat, by_name, imported, run

pytestmark = pytest.mark.django_db(transaction=True)

CUTOVER = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
AT = ("celery-beat", "--cutover", CUTOVER.isoformat())
HOUR = timedelta(hours=1)
MINUTELY = {"every": 10, "period": "minutes"}
EACH_DAY = {"day_of_month": set(range(1, 32)), "month_of_year": set(range(1, 13)), "day_of_week": set(range(7))}
SUN = {"event": "sunrise", "latitude": 52, "longitude": 13}


@pytest.fixture(autouse=True)
def tables(transactional_db: None) -> Iterator[None]:
    """The tables of django-celery-beat and django-q2, empty."""
    old_queues.make()
    yield
    old_queues.drop()


def daily(**fields: str) -> dict[str, Any]:
    """A crontab for 06:00."""
    return {"crontab": {"minute": "0", "hour": "6", **fields}}


# What a row has → its verdict, a part of its reasons, and its timing here.
VERDICTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "daily": (daily(), "same", "", "0 6 * * * UTC"),
    "steps": ({"crontab": {"minute": "*/15"}}, "same", "", "*/15 * * * * UTC"),
    "names": (daily(day_of_week="mon-friday", month_of_year="january,Jun"), "same", "", "0 6 * 1,6 1-5 UTC"),
    "over the end": ({"crontab": {"minute": "5", "hour": "22-2"}}, "same", "", "5 0-2,22,23 * * * UTC"),
    "spaces": ({"crontab": {"minute": "0, 30", "hour": "1"}}, "same", "", "0,30 1 * * * UTC"),
    "first monday": (daily(day_of_month="1-7", day_of_week="1"), "same", "", "0 6 * * 1#1 UTC"),
    "second of two": (daily(day_of_month="8-14", day_of_week="1,3"), "same", "", "0 6 * * 1#2,3#2 UTC"),
    "odd fridays": (daily(day_of_month="*/2", day_of_week="5"), "same", "", "0 6 */2 * 5 UTC"),
    "friday the 13th": (daily(day_of_month="13", day_of_week="5"), "not", "only on days that match", ""),
    "never": (daily(day_of_month="31", month_of_year="2"), "not", "never fires", ""),
    "another zone": (daily(timezone="Asia/Tokyo"), "same", "", "0 6 * * * Asia/Tokyo"),
    "clocks that change": (daily(timezone="Europe/Berlin"), "same", "", "0 6 * * * Europe/Berlin"),
    "at night": (
        daily(hour="2", minute="30", timezone="Europe/Berlin"),
        "same, but",
        "fires only there at 2027-03-28 01:30 UTC and only here at 2027-03-28 01:00 UTC",
        "30 2 * * * Europe/Berlin",
    ),
    "often": (
        {"crontab": {"minute": "*/30", "timezone": "Europe/Berlin"}},
        "same, but",
        "fires only here at 2027-10-31 01:00 UTC, 2027-10-31 01:30 UTC",
        "*/30 * * * * Europe/Berlin",
    ),
    "unknown zone": (daily(timezone="Mars/Olympus"), "not", "'Mars/Olympus' is not known", ""),
    "rubbish fields": ({"crontab": {"minute": "every"}}, "not", "its minute 'every' is not valid", ""),
    "sunday as 7": (daily(day_of_week="7"), "not", "its day of week '7' is not valid", ""),
    "interval": (
        {"interval": MINUTELY, "last_run_at": CUTOVER - timedelta(minutes=3, seconds=20)},
        "same",
        "",
        "600 2026-11-21 12:06:40",
    ),
    "fractions": (
        {"interval": MINUTELY, "last_run_at": CUTOVER - timedelta(minutes=3, microseconds=1)},
        "same",
        "",
        "600 2026-11-21 12:07:00",
    ),
    "interval due at the cutover": (
        {"interval": MINUTELY, "last_run_at": CUTOVER - timedelta(minutes=10)},
        "same",
        "",
        "600 2026-11-21 12:10:00",
    ),
    "overdue": (
        {"interval": MINUTELY, "last_run_at": datetime(2026, 11, 1, tzinfo=UTC)},
        "same, but",
        "overdue there since 2026-11-01 00:10 UTC",
        "600 2026-11-21 12:10:00",
    ),
    "starts later": (
        {"interval": MINUTELY, "start_time": CUTOVER + timedelta(days=99_999)},
        "same",
        "",
        "600 2300-09-05 12:00:00",
    ),
    "never run": (
        {"interval": MINUTELY, "start_time": CUTOVER - timedelta(minutes=4)},
        "same, but",
        "it has not run since its start time",
        "600 2026-11-21 12:06:00",
    ),
    "microseconds": ({"interval": {"every": 5, "period": "microseconds"}}, "not", "5e-06 s", ""),
    "odd period": ({"interval": {"every": 5, "period": "moons"}}, "not", "'moons' is not valid", ""),
    "solar": ({"solar": SUN}, "not", "it follows the sun (sunrise)", ""),
    "clocked": ({"clocked": {"clocked_time": datetime(2300, 1, 1, tzinfo=UTC)}}, "same, but", "it fires once", "86400"),
    "clocked, past": ({"clocked": {"clocked_time": datetime(2026, 1, 1, tzinfo=UTC)}}, "not", "its time is past", ""),
    "one-off": ({**daily(), "one_off": True}, "same, but", "it fires once", "0 6 * * * UTC"),
    "one-off, fired": ({**daily(), "one_off": True, "total_run_count": 1}, "not", "it fires once, and has fired", ""),
    "one-off, disabled": ({**daily(), "one_off": True, "enabled": False}, "not", "or is disabled", ""),
    "crontab that starts": (
        {**daily(), "start_time": CUTOVER + timedelta(days=9)},
        "same, but",
        "beat also fires it at its start time",
        "0 6 * * * UTC",
    ),
    "started again": (
        {"interval": MINUTELY, "start_time": CUTOVER + timedelta(minutes=7), "last_run_at": CUTOVER},
        "same",
        "",
        "600 2026-11-21 12:07:00",
    ),
    "disabled": ({**daily(), "enabled": False}, "same, but", "it is disabled there", "0 6 * * * UTC"),
    "expires": ({**daily(), "expires": datetime(2300, 1, 1, tzinfo=UTC)}, "same", "", "0 6 * * * UTC"),
    "expired": ({**daily(), "expires": CUTOVER + HOUR}, "not", "no occurrence after the cutover", ""),
    "messages expire": ({**daily(), "expire_seconds": 90}, "same, but", "its messages expire after 90 s", ""),
    "queue": ({**daily(), "queue": "mails"}, "same, but", "its queue 'mails': here", ""),
    "routing": ({**daily(), "exchange": "e", "routing_key": "r"}, "same, but", "its exchange 'e' has no", ""),
    "priority": ({**daily(), "priority": 3}, "same, but", "its priority 3: here", ""),
    "headers": ({**daily(), "headers": '{"a": 1}'}, "same, but", "its headers are not passed on", ""),
    "arguments": ({**daily(), "args": "[7]"}, "same", "", "0 6 * * * UTC"),
    "wrong arguments": ({**daily(), "kwargs": '{"weeks": 7}'}, "not", "cannot be called with these arguments", ""),
    "no JSON": ({**daily(), "args": "[7"}, "not", "its args are no JSON list: '[7'", ""),
    "no object": ({**daily(), "kwargs": "[]"}, "not", "its kwargs are no JSON object", ""),
    "unknown task": ({**daily(), "task": "tests.tasks.no_such"}, "not", "is not declared: tests.tasks is imported", ""),
    "no task": ({**daily(), "task": ""}, "not", "it names no task", ""),
    "not schedulable": ({**daily(), "task": "tests.tasks.add"}, "not", "@task(schedulable=True)", ""),
    "housekeeping": ({**daily(), "task": "celery.backend_cleanup"}, "not", "Celery's own housekeeping", ""),
    "no timing": ({}, "not", "it has no kind of timing", ""),
    "two timings": ({**daily(), "interval": MINUTELY}, "not", "more than one kind", ""),
    "lost timing": ({"crontab_id": 99_999}, "not", "the row of its crontab is missing", ""),
    "nightly": (daily(), "same", "", "0 6 * * * UTC"),
}


def test_each_verdict() -> None:
    """Its kind, its reason and its timing; and what is same has no reason."""
    for name, (row, *_) in VERDICTS.items():
        add_beat(name, **row)
    found = by_name(*AT)
    assert found.keys() == VERDICTS.keys()
    wrong = []
    for name, (_, verdict, reason, timing) in VERDICTS.items():
        each = found[name]
        starts_at = (each["starts_at"] or "")[:19].replace("T", " ")
        ours = f"{each['cron']} {each['zone']}" if each["cron"] else f"{each['interval_seconds']} {starts_at}"
        has_reason = any(reason in text for text in each["reasons"]) if reason else not each["reasons"]
        if each["verdict"] != verdict or not has_reason or (timing and not ours.startswith(timing)):
            wrong.append((name, each["verdict"], each["reasons"], ours))
    assert wrong == []


def test_the_text_has_the_sums_at_its_top_and_the_line_where_code_must_change() -> None:
    """What is not schedulable has the line to write."""
    add_beat("prices", **daily())
    add_beat("sums", task="tests.tasks.add", args="[1, 2]", **daily(timezone="Europe/Berlin"))
    lines = run(*AT).splitlines()
    table = "the table django_celery_beat_periodictask of the database 'default'"
    assert lines[0] == f"2 schedules in {table}: 1 same, 0 same with a difference, 1 not."
    assert lines[1].startswith("A dry run: nothing was written.")
    assert lines[2] == "Cutover: 2026-11-21 12:00 UTC. The first occurrence here is later than that."
    assert "prices: same (to write)" in lines
    assert "  tests.tasks.tidy: 0 6 * * * (UTC), first 2026-11-22 06:00 UTC" in lines
    line = lines[-1].strip()
    assert line == (
        "@task(schedule=cron('0 6 * * *', timezone='Europe/Berlin', name='sums', args=[1, 2], "
        "starts_at=datetime(2026, 11, 22, 5, 0, tzinfo=UTC), missed='once'))"
    )


def test_an_older_table_is_read() -> None:
    """One without the columns of later versions."""
    newer = ("priority", "headers", "expire_seconds", "start_time", "one_off", "clocked_id", "timezone", "solar_id")
    old_queues.make(*list(old_queues.COLUMNS)[:-1], without=newer)
    crontab = {name: value for name, value in old_queues.CRONTAB_ROW.items() if name != "timezone"}
    id = old_queues.add("django_celery_beat_crontabschedule", **{**crontab, "hour": "3", "minute": "7"})
    row = {name: value for name, value in old_queues.BEAT_ROW.items() if name not in newer}
    old_queues.add(old_queues.BEAT, **row, name="old", crontab_id=id)
    (found,) = imported(*AT)["schedules"]
    assert (found["verdict"], found["cron"]) == ("same", "7 3 * * *")


def test_a_missing_table_is_said_with_the_remedy() -> None:
    """Which table, in which database, and what to give; an unknown database too."""
    old_queues.drop()
    with pytest.raises(CommandError, match=r"'default' has no table django_celery_beat_periodictask.*--database ALIAS"):
        run("celery-beat")
    with pytest.raises(CommandError, match="DATABASES has no 'attic'"):
        run("celery-beat", "--database", "attic")


def test_the_dictionary_of_the_settings(settings: Any) -> None:
    """Seconds, a timedelta and objects of Celery; a name that the table has too is that of the table."""
    old_queues.make()
    add_beat("both", **daily())
    every = frozenset(range(24))
    crontab = SimpleNamespace(
        minute={0}, hour={6}, day_of_month=set(range(1, 32)), month_of_year=set(range(1, 13)), day_of_week={1, 2, 3}
    )
    settings.CELERY_TIMEZONE = "Asia/Tokyo"
    settings.CELERY_BEAT_SCHEDULE = {
        "both": {"task": "tests.tasks.tidy", "schedule": 5},
        "seconds": {
            "task": "tests.tasks.tidy",
            "schedule": 10.0,
            "args": (7,),
            "options": {"queue": "a", "countdown": 1},
        },
        "delta": {"task": "tests.tasks.tidy", "schedule": timedelta(hours=1), "relative": True},
        "schedule": {"task": "tests.tasks.tidy", "schedule": SimpleNamespace(run_every=timedelta(minutes=1))},
        "crontab": {"task": "tests.tasks.tidy", "schedule": crontab},
        "solar": {"task": "tests.tasks.tidy", "schedule": SimpleNamespace(event="dusk", lat=1, lon=1)},
        "half": {"task": "tests.tasks.tidy", "schedule": 0.5},
        "odd": {"task": "tests.tasks.tidy", "schedule": every},
        "rubbish": 7,
        "no task": {"schedule": 5},
    }
    found = by_name(*AT)
    assert {name: each["verdict"] for name, each in found.items()} == {
        "both": "same",
        **dict.fromkeys(("seconds", "delta", "schedule"), "same, but"),
        "crontab": "same",
        **dict.fromkeys(("solar", "half", "odd", "rubbish", "no task"), "not"),
    }
    assert found["both"]["cron"] == "0 6 * * *"
    assert (found["crontab"]["cron"], found["crontab"]["zone"]) == ("0 6 * * 1-3", "Asia/Tokyo")
    assert any("multiples of the interval" in text for text in found["seconds"]["reasons"])
    assert any("its options countdown are not passed on" in text for text in found["seconds"]["reasons"])
    assert any("it is relative" in text for text in found["delta"]["reasons"])
    assert "@task(schedule=every(seconds=10, name='seconds', args=[7]" in run(*AT)


def test_the_dictionary_of_an_app_that_was_imported(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what receivers add when the app is finalized, in the zone of the app; one that cannot be read is none."""
    entries: dict[str, Any] = {}
    crontab = SimpleNamespace(minute={1}, hour={1}, **EACH_DAY)

    class App:
        conf = SimpleNamespace(beat_schedule=entries, timezone="Asia/Tokyo")

        def finalize(self) -> None:
            entries["added"] = {"task": "tests.tasks.tidy", "schedule": crontab}

    monkeypatch.setitem(sys.modules, "celery", SimpleNamespace(current_app=App()))
    (found,) = imported(*AT)["schedules"]
    assert (found["name"], found["verdict"], found["cron"]) == ("added", "same", "1 1 * * *")
    assert found["zone"] == "Asia/Tokyo"
    monkeypatch.setitem(sys.modules, "celery", SimpleNamespace(current_app=object()))
    assert imported(*AT)["schedules"] == []


def test_odd_values_end_nothing() -> None:
    """SQLite keeps any value in any column; each such row is one that cannot be imported."""
    if connection.vendor != "sqlite":
        pytest.skip("the columns of this database have types")
    add_beat("good", **daily())
    for number, (column, value) in enumerate(
        (column, value)
        for column in ("args", "kwargs", "last_run_at", "start_time", "expires", "enabled", "headers", "queue", "task")
        for value in (7, "rubbish", b"\xff\xfe", 1.5, "9999-99-99", -1, "\x00", "2026-01-01")
    ):
        row = {**daily(), "interval": None, column: value}
        add_beat(f"odd {number} {column}", **row)
    found = by_name(*AT)
    assert found["good"]["verdict"] == "same"
    assert len(found) == 1 + 9 * 8
    assert {each["verdict"] for each in found.values()} <= {"same", "same, but", "not"}
    assert found["odd 0 args"]["verdict"] == "not"
