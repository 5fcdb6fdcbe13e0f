"""Schedules as asynq's own tools list them: entries while somebody leads, and an event for each task queued.

A mirror only: the rows decide. A Redis that is away misses it, and the next beat shows it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress

from django.db.models import Max, Q
from django.utils import timezone

from ..broker.message import SchedulerEnqueueEvent, SchedulerEntry
from ..broker.scheduler_entries import SchedulerEntryList
from ..compat import task_backends
from ..definitions.payload import json_bytes
from ..definitions.timing import Cron, Timing
from ..exceptions import InvalidOption
from ..models import OccurrenceOutcome, Schedule
from ..registry import find
from ..tasks import default_of
from .scheduler import Fired

# asynq beats each 10 s, and takes a scheduler for gone after two.
BEAT_SECONDS = 10


class SchedulerEntries:
    """The entries of this process."""

    def __init__(self) -> None:
        self.board = SchedulerEntryList()

    def beat(self) -> None:
        """Show all schedules that fire. Raises: BrokerUnavailable, django.db.Error."""
        queued = Q(occurrences__outcome=OccurrenceOutcome.QUEUED, occurrences__by_person=False)
        rows = Schedule.objects.firing().annotate(previous=Max("occurrences__occurs_at", filter=queued))
        shown = []
        for row in rows:
            # A row that does not fire says so at its occurrence.
            with suppress(InvalidOption):
                shown.append(entry_of(row).encode())
        self.board.beat(shown, 2 * BEAT_SECONDS)

    def note(self, fired: Iterable[Fired]) -> None:
        """Add the events of tasks that were queued. Raises: BrokerUnavailable."""
        now = timezone.now()
        for each in fired:
            event = SchedulerEnqueueEvent(task_id=str(each.task_id), enqueued_at=now)
            self.board.note(str(each.schedule.pk), event.encode(), int(now.timestamp()))

    def clear(self) -> None:
        """Show nothing any more. Raises: BrokerUnavailable."""
        self.board.clear()


def entry_of(row: Schedule) -> SchedulerEntry:
    """Return a schedule as an entry; a task that is gone from the code has no options. Raises: InvalidOption."""
    return SchedulerEntry(
        id=str(row.pk),
        spec=spec(row.timing),
        type=row.task,
        payload=json_bytes({"args": row.args, "kwargs": row.kwargs}),
        options=tuple(_options_of(row)),
        next_at=row.next_occurrence_at or timezone.now(),
        previous_at=getattr(row, "previous", None),
    )


def _options_of(row: Schedule) -> Iterable[str]:
    task = find(row.task)
    if task is None:
        return
    options = task_backends[task.backend].options
    # Names of queues are plain ASCII: quoted as they are, Go reads them.
    yield f'Queue("{task.queue_name}")'
    yield f"MaxRetry({max(default_of(task, 'max_attempts', options) - 1, 0)})"
    if timeout := default_of(task, "timeout", options):
        yield f"Timeout({go_duration(math.ceil(timeout))})"


def spec(timing: Timing) -> str:
    """Write it as asynq's scheduler does: `CRON_TZ=Europe/Berlin 30 2 * * *`, `@every 1m30s`.

    What asynq has no word for, such as `L`, is written all the same: its tools only show it.
    """
    if isinstance(timing, Cron):
        expression = " ".join(timing.expression.split())
        return expression if timing.zone == "UTC" else f"CRON_TZ={timing.zone} {expression}"
    return f"@every {go_duration(int(timing.least_step().total_seconds()))}"


def go_duration(seconds: int) -> str:
    """Write a duration as Go does: `30s`, `1m30s`, `1h0m0s`."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    # Go leaves out only leading zeros.
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if minutes or hours else ""
    return f"{text}{seconds}s"
