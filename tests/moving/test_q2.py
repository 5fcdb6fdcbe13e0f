"""The verdicts on schedules of django-q2."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection

from .. import old_queues
from ..old_queues import add_q2, by_name, run

pytestmark = pytest.mark.django_db(transaction=True)

CUTOVER = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
AT = ("q2", "--cutover", CUTOVER.isoformat())
SIX = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)
LATE = SIX + timedelta(seconds=37, microseconds=5)


@pytest.fixture(autouse=True)
def table(transactional_db: None) -> Iterator[None]:
    """The table of django-q2, empty."""
    old_queues.make(old_queues.Q2)
    yield
    old_queues.drop()


# Name → the row, its verdict, a part of its reasons, and its timing here, in UTC.
VERDICTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "daily": ({"next_run": SIX}, "same", "", "86400 2026-11-22 06:00:00"),
    "daily, with seconds": ({"next_run": LATE}, "same", "", "86400 2026-11-22 06:00:38"),
    "daily, late": ({"next_run": SIX - timedelta(days=9)}, "same", "", "86400 2026-11-22 06:00:00"),
    "weekly": ({"schedule_type": "W", "next_run": SIX}, "same", "", "604800 2026-11-22 06:00:00"),
    "biweekly": ({"schedule_type": "BW", "next_run": SIX}, "same", "", "1209600 2026-11-22 06:00:00"),
    "monthly": ({"schedule_type": "M", "next_run": SIX}, "same", "", "0 6 22 * * UTC"),
    "monthly, with seconds": ({"schedule_type": "M", "next_run": LATE}, "same, but", "next full minute", "1 6 22 * *"),
    "bimonthly": ({"schedule_type": "BM", "next_run": SIX}, "same", "", "0 6 22 1,3,5,7,9,11 * UTC"),
    "quarterly": ({"schedule_type": "Q", "next_run": SIX}, "same", "", "0 6 22 2,5,8,11 * UTC"),
    "yearly": ({"schedule_type": "Y", "next_run": SIX}, "same", "", "0 6 22 11 * UTC"),
    "last day": ({"schedule_type": "M", "next_run": SIX.replace(day=30)}, "not", "0 6 L * *", ""),
    "minutes": ({"schedule_type": "I", "minutes": 5, "next_run": LATE}, "same", "", "300 2026-11-22 06:00:38"),
    "minutes, late": (
        {"schedule_type": "I", "minutes": 5, "next_run": CUTOVER - timedelta(days=1, seconds=1)},
        "same",
        "",
        "300 2026-11-21 12:04:59",
    ),
    "minutes, none": ({"schedule_type": "I", "next_run": SIX}, "same", "", "60 2026-11-22 06:00:00"),
    "hourly": ({"schedule_type": "H", "next_run": SIX}, "same", "", "3600 2026-11-22 06:00:00"),
    "once": ({"schedule_type": "O", "next_run": SIX}, "same, but", "it fires once", "86400 2026-11-22 06:00:00"),
    "once, past": ({"schedule_type": "O", "next_run": CUTOVER}, "not", "no occurrence after the cutover", ""),
    "cron": ({"schedule_type": "C", "cron": "0 6 * * *", "next_run": SIX}, "same", "", "0 6 * * * UTC"),
    "cron, either day": (
        {"schedule_type": "C", "cron": "0 6 13 * 5", "next_run": datetime(2026, 11, 27, 6, tzinfo=UTC)},
        "same",
        "",
        "0 6 13 * 5 UTC",
    ),
    "cron, star with a step": (
        {"schedule_type": "C", "cron": "0 6 */2 * 5", "next_run": datetime(2026, 11, 23, 6, tzinfo=UTC)},
        "same",
        "",
        "0 6 1-31/2 * 5 UTC",
    ),
    "cron, moved": (
        {"schedule_type": "C", "cron": "0 6 * * *", "next_run": SIX + timedelta(hours=1)},
        "not",
        "it would fire only there at 2026-11-22 07:00 UTC",
        "",
    ),
    "cron, rubbish": ({"schedule_type": "C", "cron": "at dawn", "next_run": SIX}, "not", "instead of five", ""),
    "cron, seconds": ({"schedule_type": "C", "cron": "* * * * * 5", "next_run": SIX}, "not", "6 fields", ""),
    "no repeats": ({"repeats": 0, "next_run": SIX}, "not", "it has no repeats left", ""),
    "repeats": ({"repeats": 3, "next_run": SIX}, "same, but", "it ends after 3 more occurrences", "86400"),
    "one repeat": ({"repeats": 1, "next_run": SIX}, "same, but", "it ends after 1 more occurrence,", "86400"),
    "no next_run": ({}, "not", "it has no next_run", ""),
    "odd kind": ({"schedule_type": "X", "next_run": SIX}, "not", "its kind 'X' is not known", ""),
    "args": ({"next_run": SIX, "args": "7"}, "same", "", "86400"),
    "args, two": ({"next_run": SIX, "func": "tests.tasks.tally", "args": "'eu', 2"}, "same", "", "86400"),
    "args, code": ({"next_run": SIX, "args": "__import__('os').getpid()"}, "not", "no Python literals", ""),
    "kwargs": ({"next_run": SIX, "kwargs": "days=7"}, "same", "", "86400"),
    "kwargs, a dict": ({"next_run": SIX, "kwargs": "{'days': 7}"}, "same", "", "86400"),
    "kwargs, code": ({"next_run": SIX, "kwargs": "days=open('a')"}, "not", "no Python literals", ""),
    "kwargs, a call": ({"next_run": SIX, "kwargs": "x=1) or g(y=2"}, "not", "no Python literals", ""),
    "kwargs, a list": ({"next_run": SIX, "kwargs": "[1]"}, "not", "no dictionary", ""),
    "wrong arguments": ({"next_run": SIX, "kwargs": "weeks=7"}, "not", "cannot be called with", ""),
    "no JSON": ({"next_run": SIX, "args": "{1, 2}"}, "not", "which JSON cannot carry", ""),
    "options": ({"next_run": SIX, "kwargs": "q_options={'timeout': 5}"}, "same, but", "q_options (timeout)", ""),
    "hook": ({"next_run": SIX, "hook": "tests.tasks.note"}, "same, but", "its hook 'tests.tasks.note' is not", ""),
    "cluster": ({"next_run": SIX, "cluster": "big"}, "same, but", "its cluster 'big': here", ""),
    "its time": ({"next_run": SIX, "intended_date_kwarg": "days"}, "same, but", "not passed as days", ""),
    "unknown": ({"next_run": SIX, "func": "math.copysign"}, "not", "the task math.copysign is not declared", ""),
}


def ours(each: dict[str, Any]) -> str:
    """Return the timing of a schedule as the tables above have it."""
    starts_at = (each["starts_at"] or "")[:19].replace("T", " ")
    return f"{each['cron']} {each['zone']}" if each["cron"] else f"{each['interval_seconds']} {starts_at}"


def test_each_verdict(settings: Any) -> None:
    """Its kind, its reason and its timing; and what is same has no reason."""
    for name, (row, *_) in VERDICTS.items():
        add_q2(name=name, **row)
    found = by_name(*AT)
    wrong = []
    for name, (_, verdict, reason, timing) in VERDICTS.items():
        each = found[name]
        has_reason = any(reason in text for text in each["reasons"]) if reason else not each["reasons"]
        if each["verdict"] != verdict or not has_reason or (timing and not ours(each).startswith(timing)):
            wrong.append((name, each["verdict"], each["reasons"], ours(each)))
    assert wrong == []
    assert found["minutes"]["missed"] == "all"
    assert found["cron"]["missed"] == "once"
    assert found["repeats"]["ends_at"].startswith("2026-11-24T06:00")
    settings.Q_CLUSTER = {"catch_up": False}
    assert by_name(*AT)["minutes"]["missed"] == "once"


# The same in a zone whose clocks change: 06:00 UTC is 07:00 in Berlin, in winter.
BERLIN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "daily": ({"next_run": SIX}, "same", "", "0 7 * * * Europe/Berlin"),
    "daily, with seconds": ({"next_run": LATE}, "same, but", "next full minute", "1 7 * * * Europe/Berlin"),
    "weekly": ({"schedule_type": "W", "next_run": SIX}, "same", "", "0 7 * * 0 Europe/Berlin"),
    "biweekly": ({"schedule_type": "BW", "next_run": SIX}, "same, but", "from 2027-03-28 on it fires", "1209600"),
    "monthly": ({"schedule_type": "M", "next_run": SIX}, "same", "", "0 7 22 * * Europe/Berlin"),
    "yearly": ({"schedule_type": "Y", "next_run": SIX}, "same", "", "0 6 22 11 * UTC"),
    "hourly": ({"schedule_type": "H", "next_run": SIX}, "same", "", "3600 2026-11-22 06:00:00"),
    "cron": ({"schedule_type": "C", "cron": "0 7 * * *", "next_run": SIX}, "same", "", "0 7 * * * Europe/Berlin"),
    "cron at night": (
        {"schedule_type": "C", "cron": "30 2 * * *", "next_run": datetime(2026, 11, 22, 1, 30, tzinfo=UTC)},
        "same, but",
        "fires only there at 2027-10-31 01:30 UTC",
        "30 2 * * * Europe/Berlin",
    ),
    "daily at night": (
        {"next_run": datetime(2026, 11, 22, 1, 30, tzinfo=UTC)},
        "same, but",
        "fires only there at 2027-03-28 00:30 UTC and only here at 2027-03-28 01:00 UTC",
        "30 2 * * * Europe/Berlin",
    ),
}


def test_each_verdict_where_clocks_change(settings: Any) -> None:
    """What keeps its time of day is a cron expression of the zone."""
    settings.TIME_ZONE = "Europe/Berlin"
    for name, (row, *_) in BERLIN.items():
        add_q2(name=name, **row)
    found, wrong = by_name(*AT), []
    for name, (_, verdict, reason, timing) in BERLIN.items():
        each = found[name]
        has_reason = any(reason in text for text in each["reasons"]) if reason else not each["reasons"]
        if each["verdict"] != verdict or not has_reason or not ours(each).startswith(timing):
            wrong.append((name, each["verdict"], each["reasons"], ours(each)))
    assert wrong == []


def test_names_are_made_where_there_are_none() -> None:
    """The function's, and with the id where two would have one name; a name of rubbish is refused."""
    first, second = add_q2(next_run=SIX), add_q2(next_run=SIX)
    third = add_q2(name="a\x07b" if connection.vendor == "sqlite" else "a\nb", next_run=SIX)
    found = {int(each["key"]): each for each in by_name(*AT).values()}
    assert found[first]["name"] == "tests.tasks.tidy"
    assert found[second]["name"] == f"tests.tasks.tidy ({second})"
    assert "its name is no printable text" in found[third]["reasons"][0]


def test_a_missing_table_is_said_with_the_remedy() -> None:
    """Which table, in which database, and what to give."""
    old_queues.drop()
    with pytest.raises(CommandError, match="The database 'default' has no table django_q_schedule"):
        run("q2")


def test_odd_values_end_nothing() -> None:
    """SQLite keeps any value in any column; each such row is one that cannot be imported."""
    if connection.vendor != "sqlite":
        pytest.skip("the columns of this database have types")
    add_q2(name="good", next_run=SIX)
    columns = ("args", "kwargs", "next_run", "repeats", "minutes", "schedule_type", "func", "cron", "cluster", "hook")
    count = 0
    for column in columns:
        for value in (7, "rubbish", b"\xff\xfe", 1.5, "9999-99-99", "(" * 5_000, "\x00", -(2**62)):
            count += 1
            add_q2(**{"name": f"odd {count}", "next_run": SIX, "schedule_type": "I", column: value})
    found = by_name(*AT)
    assert found["good"]["verdict"] == "same"
    assert len(found) == 1 + count
