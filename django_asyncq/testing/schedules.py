"""Enqueue the occurrences of schedules in a test, without a leader and without Redis."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

from .. import compat
from ..exceptions import InvalidOption
from ..models import Schedule, TaskRecord
from ..results import result_of
from ..scheduling.scheduler import Scheduler
from ..storage import database_clock
from ..storage.routing import rows_of
from .running import load_tasks_once


def run_schedules(*, most: int = 1000) -> list[compat.TaskResult[Any, Any]]:
    """Enqueue a task for each occurrence that is due by the clock, as a leader does that was never stopped.

    The first call writes the rows of the schedules that the code declares; their occurrences count from then. So a
    test calls it, moves the clock of `travel`, and calls it again. Each occurrence fires as if the clock showed its
    time, so none is missed. most: how many occurrences.
    Returns: the results of the tasks enqueued, in order; `run_tasks` runs them.
    Raises: InvalidOption when more than `most` occurrences are due.
    """
    load_tasks_once()
    Scheduler().sync()
    fired: list[Any] = []
    while (moment := _next_occurrence()) is not None and moment <= database_clock.now():
        if len(fired) >= most:
            raise InvalidOption(
                f"run_schedules(most={most}): more occurrences are due; move the clock by less, or give a higher number"
            )
        fired += Scheduler(clock=partial(_same, moment)).fire_due().fired
        if _next_occurrence() == moment:
            break  # it could not be fired, and the log says why
    rows = rows_of(TaskRecord).in_bulk([each.task_id for each in fired])
    return [result_of(rows[each.task_id]) for each in fired if each.task_id in rows]


def _same(moment: datetime) -> datetime:
    return moment


def _next_occurrence() -> datetime | None:
    rows = rows_of(Schedule).firing().order_by("next_occurrence_at")
    return rows.values_list("next_occurrence_at", flat=True).first()
