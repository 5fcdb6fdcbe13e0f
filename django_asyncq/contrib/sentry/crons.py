"""Check-ins of schedules with the cron monitors of Sentry.

One is sent when the task of an occurrence is queued, one when it has succeeded or failed finally, each by the process
that makes that known. The id of the task joins them. An occurrence that does not come is for Sentry to notice.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING

from django.utils.text import slugify
from sentry_sdk.crons import MonitorStatus, capture_checkin

from ...core.headers import SCHEDULE_HEADER

if TYPE_CHECKING:
    from sentry_sdk.types import MonitorConfig

    from ...models import Schedule, TaskRecord, TaskState

# Sentry's limit for the name of a monitor in addresses.
LONGEST_SLUG = 50
UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60))
# What Sentry takes for the longest time of an occurrence that has none.
RUNTIME_MINUTES = 30
# What all readers of cron expressions understand alike.
_PORTABLE_FIELD = re.compile(r"(?:[\d*,/-]|(?<![A-Za-z])[A-Za-z]{3}(?![A-Za-z]))+")


def check_in(record: TaskRecord, old: TaskState | None, new: TaskState) -> None:
    """Send the check-in of a task that a schedule has queued, if its new state is one that a monitor knows."""
    from ...models import TaskState

    name = (record.headers or {}).get(SCHEDULE_HEADER)
    if not name:
        return
    if new == TaskState.QUEUED and old != TaskState.RUNNING:
        config = config_of(_schedule_named(name), record)
        capture_checkin(slug_of(name), record.id.hex, MonitorStatus.IN_PROGRESS, monitor_config=config)
    elif record.finished_at is not None and record.is_final:
        status = MonitorStatus.OK if new == TaskState.SUCCEEDED else MonitorStatus.ERROR
        seconds = max((record.finished_at - record.enqueued_at).total_seconds(), 0.0)
        capture_checkin(slug_of(name), record.id.hex, status, seconds)


def slug_of(name: str) -> str:
    """Return the name of the monitor of a schedule: its own one, or what is left of it with a digest."""
    plain = name.replace(".", "-")
    slug = slugify(plain)
    if slug == plain and len(slug) <= LONGEST_SLUG:
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{slug[: LONGEST_SLUG - 9].strip('-_')}-{digest}".lstrip("-")


def config_of(schedule: Schedule | None, record: TaskRecord) -> MonitorConfig | None:
    """Return what a monitor must know of a schedule; None where Sentry has no words for its times."""
    if schedule is None:
        return None
    config: MonitorConfig = {"timezone": schedule.zone}
    fields = schedule.cron.split()
    if fields:
        # When day and weekday are both given, not every reader takes either.
        is_portable = len(fields) == 5 and "*" in (fields[2], fields[4]) and all(map(_PORTABLE_FIELD.fullmatch, fields))
        if not is_portable:
            return None
        config["schedule"] = {"type": "crontab", "value": " ".join(fields)}
    else:
        seconds = schedule.interval_seconds or 0
        found = next(((unit, seconds // size) for unit, size in UNITS if seconds and seconds % size == 0), None)
        if found is None:
            return None
        config["schedule"] = {"type": "interval", "unit": found[0], "value": found[1]}  # type: ignore[typeddict-item]
    if record.timeout_seconds is not None:
        config["max_runtime"] = max(math.ceil(record.timeout_seconds * record.max_attempts / 60), RUNTIME_MINUTES)
    return config


def _schedule_named(name: str) -> Schedule | None:
    from ...models import Schedule
    from ...storage.routing import rows_of

    return rows_of(Schedule).filter(name=name).first()
