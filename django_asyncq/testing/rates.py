"""The rates of the test kit, counted from the rows: when tasks began, by the clock of the test. Workers ask Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from .. import rates
from ..core.rates import next_start_us, rate_of
from ..core.registry import every_task, find
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.routing import rows_of
from ..worker.rates import name_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def next_start(record: TaskRecord) -> datetime | None:
    """Return when a task may start that has to wait for its rate; None when it may start now."""
    task = find(record.name)
    if task is None or task.rate is None:
        return None
    name = name_of(task, record)
    rate = rates.row_of(name) or rate_of(task)
    at = EPOCH + next_start_us(rate, _starts(name)) * MICROSECOND
    return at if at > database_clock.now() else None


def _starts(name: str) -> list[int]:
    """Return all starts, in order, in Unix microseconds: each counts for the next, however long ago it was."""
    rated = [task for task in every_task() if task.rate is not None]
    named = {known: task for task in rated for known in (task.module_path, *task.aliases)}
    # Of a batch, its own row: it is one start.
    rows = rows_of(TaskRecord).filter(last_attempted_at__isnull=False, name__in=list(named), batch_id=None)
    moments = [
        moment
        for row in rows.defer("return_value")
        if name_of(named[row.name], row) == name
        for moment in {row.last_attempted_at, *_of_errors(row)}
        if moment is not None
    ]
    return sorted((moment - EPOCH) // MICROSECOND for moment in moments)


def _of_errors(row: TaskRecord) -> set[datetime]:
    """Return when the attempts that failed had begun."""
    return {datetime.fromisoformat(error["started_at"]) for error in row.errors if error.get("started_at")}
