"""The models of the other queues agree with the queues themselves: when they fire, and what their tables hold.

With ASYNCQ_TEST_PEERS, the Python of an environment with celery, django-celery-beat, django-q2, croniter, rq and huey:
`ASYNCQ_TEST_PEERS=…/bin/python python runtests.py -n 0 -m long tests/moving/test_peers.py`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_asyncq.moving import celery_beat, q2
from django_asyncq.moving.clocks import FIELDS, Crontab, each_time, each_wall_once, values_of, zone_called
from django_asyncq.moving.old import Occurrences
from django_asyncq.moving.q2 import rule_of_calendar, rule_of_cron
from django_asyncq.moving.rq import rule_of_cron as rule_of_cron_of_rq

from .. import old_queues

pytestmark = pytest.mark.long

BERLIN = "Europe/Berlin"
CELERY = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
HUEY = ("minute", "hour", "day", "month", "day_of_week")
MINUTE = timedelta(minutes=1)
# Three days around each change of the clocks.
WEEKS = (datetime(2027, 3, 27, tzinfo=UTC), datetime(2027, 10, 30, tzinfo=UTC))
FIELDS_ASKED = (
    *("0 6 * * *", "30 2 * * *", "*/15 * * * *", "0 */2 * * *", "30 1,2,3 * * *", "5 22-2 * * *", "0 3 * * *"),
    *("0 12 */2 * *", "0 12 28 * *", "15 4 * 3,10 *", "0 * * * 0,6", "*/7 1-5 * * *", "0 12 25-31 10 0"),
)
KINDS = ("D", "W", "BW", "M", "BM", "Q", "Y")
TIMES = ("2027-03-20T05:00:00+00:00", "2027-03-20T01:30:37+00:00", "2027-10-23T00:30:00+00:00")
ROWS: dict[str, list[dict[str, Any]]] = {
    "beat": [
        {"name": "daily", "task": "tests.tasks.tidy", "crontab": {"minute": "0", "hour": "6"}, "kwargs": '{"days": 7}'},
        {
            "name": "often",
            "task": "tests.tasks.tidy",
            "interval": {"every": 10, "period": "minutes"},
            "last_run_at": "2026-11-21T11:57:00+00:00",
        },
    ],
    "q2": [
        {"name": "nightly", "func": "tests.tasks.tidy", "schedule_type": "D", "next_run": "2026-11-22T06:00:00+00:00"}
    ],
}


def peers() -> str:
    """Return the Python that has the other queues; without one the test is skipped."""
    if not (python := os.environ.get("ASYNCQ_TEST_PEERS")):
        pytest.skip("ASYNCQ_TEST_PEERS names no Python that has the other queues")
    return python


def ask(folder: Path, begin: datetime, end: datetime, questions: list[Any]) -> list[list[datetime]]:
    """Return when the real packages fire, for each question; they write ROWS into peers.sqlite3 of the folder."""
    asked = {
        "database": str(folder / "peers.sqlite3"),
        "zone": BERLIN,
        "begin": begin.isoformat(),
        "end": end.isoformat(),
        "rows": ROWS,
        "questions": questions,
    }
    done = subprocess.run(
        [peers(), str(Path(__file__).with_name("peers.py"))],
        input=json.dumps(asked),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return [[datetime.fromisoformat(moment).astimezone(UTC) for moment in each] for each in printed]


def crontab(text: str) -> Crontab:
    """Return the values of a text of five fields."""
    return Crontab.of([values_of(field, part) for field, part in zip(FIELDS, text.split(), strict=True)], text.split())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("begin", WEEKS)
def test_each_model_fires_when_the_queue_does(begin: datetime, tmp_path: Path, settings: Any) -> None:
    """Around both changes of the clocks."""
    settings.TIME_ZONE = BERLIN
    end = begin + timedelta(days=3)
    questions: list[Any] = []
    models: list[tuple[str, Occurrences]] = []
    for text in FIELDS_ASKED:
        parts = text.split()
        questions.append(["crontab", dict(zip(CELERY, parts, strict=True)), BERLIN])
        models.append((f"celery {text}", each_wall_once(crontab(text).walls, zone_called(BERLIN))))
        for zone in (BERLIN, "UTC") if "*/" not in parts[4] else ():
            questions.append(["huey", dict(zip(HUEY, parts, strict=True)), zone])
            models.append((f"huey {text}", each_time(crontab(text).walls, zone_called(zone), at_change=False)))
        if "22-2" in text:
            continue
        questions.append(["rq", text])
        models.append((f"rq {text}", rule_of_cron_of_rq(text).old))
        first = begin + timedelta(seconds=1)
        questions.append(["q2", {"schedule_type": "C", "cron": text, "next_run": first.isoformat()}])
        models.append((f"q2 {text}", rule_of_cron(text, BERLIN, first).old))
    for kind in KINDS:
        for time in TIMES:
            questions.append(["q2", {"schedule_type": kind, "next_run": time}])
            models.append((f"q2 {kind} {time}", rule_of_calendar(kind, datetime.fromisoformat(time), BERLIN).old))
    found = ask(tmp_path, begin, end, questions)
    wrong = []
    for (name, model), answer in zip(models, found, strict=True):
        ours = list(takewhile(lambda moment: moment <= end, model(begin)))
        # Ours are rounded up to the second or the minute.
        apart = [(there, here) for there, here in zip(answer, ours, strict=False) if not there <= here < there + MINUTE]
        if apart or len(answer) != len(ours):
            wrong.append((name, answer[:6], ours[:6]))
    assert wrong == []


def test_the_real_tables_are_those_of_the_tests_and_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any
) -> None:
    """Every column that the tests make is there; rows that the models wrote are read."""
    ask(tmp_path, WEEKS[0], WEEKS[0], [])
    file = tmp_path / "peers.sqlite3"
    with sqlite3.connect(file) as opened:
        for table, columns in old_queues.COLUMNS.items():
            real = {name for _, name, *_ in opened.execute(f"PRAGMA table_info({table})")}
            assert real == {"id", *columns}, table
    settings = {**connections["default"].settings_dict, "ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}
    settings["OPTIONS"] = {}
    monkeypatch.setitem(connections.databases, "old", settings)
    with django_db_blocker.unblock():
        try:
            cutover = datetime(2026, 11, 21, 12, tzinfo=UTC)
            beat, nightly = celery_beat.read("old", cutover).schedules, q2.read("old").schedules
            assert [(each.name, each.refusal) for each in (*beat, *nightly)] == [
                ("daily", ""),
                ("often", ""),
                ("nightly", ""),
            ]
            assert beat[0].kwargs == {"days": 7}
            assert beat[1].rule is not None
            assert next(beat[1].rule.old(cutover)) == datetime(2026, 11, 21, 12, 7, tzinfo=UTC)
        finally:
            connections["old"].close()
            del connections["old"]
