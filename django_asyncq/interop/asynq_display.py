"""Show schedules to asynq's own tools: an entry for each schedule while there is a leader, an event for each task.

This is only a copy: the rows decide. If Redis is unreachable, the next beat writes the copy again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from django.db.models import OuterRef, Subquery

from ..broker import redis_clock
from ..broker.message import SchedulerEnqueueEvent, SchedulerEntry
from ..broker.servers import SchedulerEntryList
from ..core.aliases import DEFAULT_ALIAS, one_alias_per_prefix, prefix_of
from ..core.compat import task_backends
from ..core.guard import get_logger
from ..core.payload import json_bytes
from ..core.registry import find
from ..core.timing import Cron, Timing
from ..exceptions import InvalidOption
from ..models import Occurrence, OccurrenceOutcome, Schedule
from ..scheduling.scheduler import Fired, usable_schedules
from ..storage import database_clock
from ..storage.errors import Parts
from ..storage.routing import rows_of
from ..tasks import default_of

logger = get_logger("django_asyncq.interop")

# asynq writes its entries every 10 s, and considers a scheduler dead after two missed beats.
BEAT_SECONDS = 10


class SchedulerEntries:
    """The entries of this process."""

    def __init__(self) -> None:
        self.entry_list = SchedulerEntryList()
        self._parts = Parts(logger)
        # Alias → what the last beat has written; None when the rows are to be read.
        self._entries: dict[str, list[bytes]] | None = None

    def forget(self) -> None:
        """Have the next beat read the rows."""
        self._entries = None

    def beat(self) -> None:
        """Write an entry for every schedule that fires, from its row or as the beat before has written it.

        Raises: BrokerUnavailable, django.db.Error.
        """
        if self._entries is None:
            self._entries = self._read()
        for alias, entries in self._entries.items():
            self.entry_list.beat(alias, entries, 2 * BEAT_SECONDS)

    def _read(self) -> dict[str, list[bytes]]:
        queued = rows_of(Occurrence).filter(schedule=OuterRef("pk"), outcome=OccurrenceOutcome.QUEUED, by_person=False)
        # The latest one by the index, not the maximum of all that are kept.
        latest = queued.order_by("-occurs_at").values("occurs_at")[:1]
        rows = rows_of(Schedule).firing().annotate(previous=Subquery(latest))
        # Also where there is none: it may have been the last one.
        by_prefix = {prefix_of(alias): (alias, list[bytes]()) for alias in one_alias_per_prefix()}
        for row in usable_schedules(rows):
            entry = self._parts.attempt(f"the entry of schedule {row.name}", partial(_encoded, row), None)
            if entry is not None:
                alias = _alias_of(row)
                by_prefix.setdefault(prefix_of(alias), (alias, []))[1].append(entry)
        return dict(by_prefix.values())

    def add_events(self, fired: Iterable[Fired]) -> None:
        """Add an event for every task that was queued. Raises: BrokerUnavailable."""
        now = datetime.fromtimestamp(redis_clock.seconds(), UTC)
        for each in fired:
            event = SchedulerEnqueueEvent(task_id=str(each.task_id), enqueued_at=now)
            self.entry_list.note(_alias_of(each.schedule), str(each.schedule.pk), event.encode(), int(now.timestamp()))

    def clear(self) -> None:
        """Remove the entries. Raises: BrokerUnavailable."""
        self.entry_list.clear()


def _alias_of(row: Schedule) -> str:
    """Return the alias of a schedule's task; the default one if the code has no such task."""
    task = find(row.task)
    return DEFAULT_ALIAS if task is None else task.backend


def _encoded(row: Schedule) -> bytes | None:
    # The scheduler reports a schedule that is not valid when it is due.
    with suppress(InvalidOption):
        return entry_of(row).encode()
    return None


def entry_of(row: Schedule) -> SchedulerEntry:
    """Return the entry of a schedule, without options if the code has no such task. Raises: InvalidOption."""
    return SchedulerEntry(
        id=str(row.pk),
        spec=spec(row.timing),
        type=row.task,
        payload=json_bytes({"args": row.args, "kwargs": row.kwargs}),
        options=tuple(_options_of(row)),
        next_at=row.next_occurrence_at or database_clock.now(),
        previous_at=getattr(row, "previous", None),
    )


def _options_of(row: Schedule) -> Iterable[str]:
    task = find(row.task)
    if task is None:
        return
    options = task_backends[task.backend].options
    # Queue names are plain ASCII, so Go can read them in quotes without escapes.
    yield f'Queue("{task.queue_name}")'
    yield f"MaxRetry({max(default_of(task, 'max_attempts', options) - 1, 0)})"
    if timeout := default_of(task, "timeout", options):
        yield f"Timeout({go_duration(math.ceil(timeout))})"


def spec(timing: Timing) -> str:
    """Write the timing as asynq's scheduler does: `CRON_TZ=Europe/Berlin 30 2 * * *`, `@every 1m30s`.

    Forms that asynq does not know, such as `L`, are written unchanged, because its tools only show them.
    """
    if isinstance(timing, Cron):
        expression = " ".join(timing.expression.split())
        return expression if timing.zone == "UTC" else f"CRON_TZ={timing.zone} {expression}"
    return f"@every {go_duration(int(timing.least_step().total_seconds()))}"


def go_duration(seconds: int) -> str:
    """Write a duration as Go does: `30s`, `1m30s`, `1h0m0s`."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    # Go omits leading zeros only.
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if minutes or hours else ""
    return f"{text}{seconds}s"
