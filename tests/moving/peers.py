"""Ask the real packages when they fire and what they write; run by the Python of an environment that has them.

It gets one JSON document on stdin and prints another. It must not import this package, which is not installed there.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

STEP = timedelta(seconds=20)


def prepare(database: str, zone: str) -> None:
    """Set Django up with the two apps, on an SQLite file with their tables."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.configure(
        INSTALLED_APPS=["django_celery_beat", "django_q"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        USE_TZ=True,
        TIME_ZONE=zone,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        Q_CLUSTER={"name": "peers", "orm": "default", "timeout": 30, "retry": 60},
    )
    django.setup()
    call_command("migrate", verbosity=0)


def of_crontab(fields: dict[str, str], zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """Return when beat fires a crontab of django-celery-beat, asked every twenty seconds."""
    from celery import Celery
    from django_celery_beat.models import CrontabSchedule

    row = CrontabSchedule(**fields, timezone=ZoneInfo(zone))
    schedule, fired, last, now = row.schedule, [], begin, begin
    schedule.app = Celery()
    schedule.nowfun = lambda: now.astimezone(ZoneInfo(zone))
    while now <= end:
        if schedule.is_due(last.astimezone(UTC))[0]:
            fired.append(now.replace(second=0))
            last = now
        now += STEP
    return fired


def of_q2(row: dict[str, Any], begin: datetime, end: datetime) -> list[datetime]:
    """Return when a schedule of django-q2 fires."""
    from unittest import mock

    from django.utils import timezone
    from django_q.models import Schedule

    found = Schedule(**{**row, "next_run": datetime.fromisoformat(row["next_run"])})
    fired = []
    while found.next_run <= end:
        if found.next_run > begin:
            fired.append(found.next_run)
        with mock.patch.object(timezone, "now", lambda now=found.next_run: now):
            found.next_run = found.calculate_next_run()
    return fired


def of_huey(fields: dict[str, str], zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """Return the minutes that a crontab of huey matches."""
    from huey import crontab

    matches, fired, now = crontab(**fields, strict=True), [], begin + timedelta(minutes=1)
    while now <= end:
        if matches(now.astimezone(ZoneInfo(zone))):
            fired.append(now)
        now += timedelta(minutes=1)
    return fired


def of_rq(text: str, begin: datetime, end: datetime) -> list[datetime]:
    """Return when rq's cron scheduler fires an expression, in the zone of the process."""
    from rq.cron import CronJob

    found, fired = CronJob("default", func_name="tests.tasks.tidy", cron=text), []
    found.set_enqueue_time(begin)
    while found.next_enqueue_time is not None and found.next_enqueue_time <= end:
        fired.append(found.next_enqueue_time)
        found.set_enqueue_time(found.next_enqueue_time)
    return fired


def write_rows(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write rows through the models."""
    from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask
    from django_q.models import Schedule

    for each in rows["beat"]:
        crontab, interval = each.pop("crontab", None), each.pop("interval", None)
        PeriodicTask.objects.create(
            crontab=CrontabSchedule.objects.create(**crontab) if crontab else None,
            interval=IntervalSchedule.objects.create(**interval) if interval else None,
            **each,
        )
    for each in rows["q2"]:
        Schedule.objects.create(**each)


def main() -> None:
    """Answer."""
    asked = json.load(sys.stdin)
    prepare(asked["database"], asked["zone"])
    begin, end = (datetime.fromisoformat(asked[name]) for name in ("begin", "end"))
    write_rows(asked["rows"])
    answers = {"crontab": of_crontab, "q2": of_q2, "huey": of_huey, "rq": of_rq}
    found = [answers[kind](*arguments, begin, end) for kind, *arguments in asked["questions"]]
    print(json.dumps([[moment.isoformat() for moment in each] for each in found]))


if __name__ == "__main__":
    main()
