"""The schedules, for an `Inspector`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import Max, Q

from ..broker import servers
from ..core.aliases import one_alias_per_prefix
from ..core.names import did_you_mean
from ..core.registry import load_task_modules
from ..core.timing import describe
from ..exceptions import AsyncqError, InvalidOption
from ..models import Occurrence, OccurrenceOutcome, Schedule
from ..scheduling.occurrences import run_now
from ..scheduling.scheduler import switch
from ..storage.routing import rows_of
from .values import ForeignScheduleInfo, OccurrenceInfo, ScheduleInfo


class Schedules:
    """List, run, enable and disable schedules, by name."""

    def all(self) -> list[ScheduleInfo]:
        """Return all schedules, by name; those that were removed from the code are retired."""
        queued = Q(occurrences__outcome=OccurrenceOutcome.QUEUED)
        rows: Any = rows_of(Schedule).annotate(latest=Max("occurrences__occurs_at", filter=queued)).order_by("name")
        return [
            ScheduleInfo(
                id=row.id,
                name=row.name,
                task=row.task,
                timing=_timing(row),
                zone=row.zone,
                enabled=row.enabled,
                is_declared=row.is_declared,
                is_retired=row.retired_at is not None,
                next_occurrence_at=row.next_occurrence_at,
                latest=row.latest,
            )
            for row in rows
        ]

    def foreign(self) -> list[ForeignScheduleInfo]:
        """Return the schedules that other programs list in Redis, by task and timing.

        Ours are listed there too, until 20 s after they were deleted. Raises: BrokerUnavailable.
        """
        own = {str(id) for id in rows_of(Schedule).values_list("id", flat=True)}
        found = [
            _foreign_info(each, alias)
            for alias in one_alias_per_prefix()
            for each in servers.schedules(alias)
            if each.entry is None or each.entry.id not in own
        ]
        return sorted(found, key=lambda each: (each.task, each.timing, each.id))

    def history(self, name: str, *, most: int = 20) -> list[OccurrenceInfo]:
        """Return the latest occurrences of a schedule, the newest first. Raises: InvalidOption for an unknown name."""
        rows = rows_of(Occurrence).filter(schedule=_row(name)).order_by("-occurs_at", "-id")
        return [OccurrenceInfo(row.occurs_at, str(row.outcome), row.by_person, row.task_id) for row in rows[:most]]

    def run(self, name: str) -> UUID:
        """Queue the schedule's task now; return its id. Raises: InvalidOption, and what `enqueue` raises."""
        load_task_modules()
        occurrence = run_now(_row(name))
        if occurrence.task_id is None:
            raise AsyncqError(f"schedule {name} queued no task")
        return occurrence.task_id

    def enable(self, name: str) -> bool:
        """Let a schedule fire again from its next occurrence on; return whether it was disabled.

        Raises: InvalidOption for an unknown name, or when its timing is not valid.
        """
        return self._switch(name, enabled=True)

    def disable(self, name: str) -> bool:
        """Let a schedule fire no more; return whether it was enabled. Raises: InvalidOption for an unknown name."""
        return self._switch(name, enabled=False)

    def _switch(self, name: str, *, enabled: bool) -> bool:
        switched = switch([_row(name).id], enabled=enabled)
        if switched.broken:
            raise InvalidOption(f"schedule {name} cannot be enabled: {switched.broken[0][1]}")
        return bool(switched.changed)


def _foreign_info(listed: servers.ListedSchedule, alias: str) -> ForeignScheduleInfo:
    entry = listed.entry
    return ForeignScheduleInfo(
        id=entry.id if entry else "",
        task=entry.type if entry else "",
        timing=entry.spec if entry else "",
        options=list(entry.options) if entry else [],
        next_occurrence_at=entry.next_at if entry else None,
        latest=entry.previous_at if entry else None,
        scheduler=listed.scheduler,
        backend=alias,
        is_readable=entry is not None,
    )


def _row(name: str) -> Schedule:
    row = rows_of(Schedule).filter(name=name).first()
    if row is None:
        meant = did_you_mean(name, rows_of(Schedule).values_list("name", flat=True))
        raise InvalidOption(f"no schedule is called {name!r}. {meant}`asyncq schedules list` shows their names")
    return row


def _timing(row: Schedule) -> str:
    if row.cron:
        return row.cron
    try:
        return describe(row.timing)
    except InvalidOption as error:
        return f"not valid: {error}"
