"""What a run of an isolated task has changed in its row, as its process sends it to the worker: plain JSON.

The process applies the outcome to the row in memory, since only there the exception exists that decides on a retry. The
worker writes the row as that of any other run. Unlike a spilled outcome, all of this comes from one process that the
worker has started, so it is not signed, and the database's constraints check it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..models import TaskRecord
from .claimed_runs import Run
from .running import count_crash, succeed

COLUMNS = (
    "state",
    "reason",
    "last_exception",
    "attempt",
    "worker_ids",
    "return_value",
    "errors",
    "crash_count",
    "is_suspect",
    "progress",
)
TIMES = ("started_at", "last_attempted_at", "finished_at", "retry_at")


def changes_of(run: Run) -> dict[str, Any]:
    """Return what a finished run has changed, as values that JSON can hold."""
    record = run.record
    columns = {name: getattr(record, name) for name in COLUMNS}
    times: dict[str, datetime | None] = {name: getattr(record, name) for name in TIMES}
    return {
        "columns": columns,
        "times": {name: at.isoformat() if at else None for name, at in times.items()},
        "counted": run.counted,
        "written": run.written,
        "pause_seconds": run.pause_seconds,
    }


def apply_changes(run: Run, changes: Mapping[str, Any]) -> None:
    """Change a run and its row in memory as `changes_of` says. Raises: KeyError, ValueError for anything else."""
    columns = {name: changes["columns"][name] for name in COLUMNS}
    times = {name: _time(changes["times"][name]) for name in TIMES}
    run.counted = changes["counted"]
    run.written = run.written or changes["written"]
    run.pause_seconds = changes["pause_seconds"]
    for name, value in {**columns, **times}.items():
        setattr(run.record, name, value)


def completed_run(run: Run, changes: Mapping[str, Any]) -> Run:
    """Return a run as it is after the commit that completed it; the given one is unchanged."""
    completed = replace(run, record=copy.copy(run.record))
    apply_changes(completed, changes)
    return completed


def perhaps_completed(run: Run, now: datetime) -> Run:
    """Return a run as it would be if its process had completed it before it died; the given one is unchanged."""
    completed = replace(run, record=copy.copy(run.record))
    succeed(completed, None, now)
    return completed


def count_own_crash(record: TaskRecord, reason: str, now: datetime, *, stack: str = "") -> None:
    """RUNNING → QUEUED in memory after the task's own process died; → FAILED after too many crashes in a row.

    No other task was in that process, so this one is to blame, and needs no quarantine to be the only one.
    """
    count_crash(record, reason, now, stack=stack)
    record.is_suspect = False


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text is not None else None
