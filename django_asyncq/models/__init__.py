"""The models: tasks, their edges and log lines, gates, schedules, pauses, bulk actions, alerts, what a fleet shares.

The database is the source of truth; Redis only dispatches. Only `lifecycle` changes a task's state, so no method here
does.
"""

from __future__ import annotations

from .operating import (
    Alert,
    AlertKind,
    BulkAction,
    BulkKind,
    BulkState,
    DatabaseIdentity,
    Gate,
    LockTerm,
    Pause,
    PauseKind,
    Rate,
    StartupRun,
)
from .schedules import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, ScheduleQuerySet, default_timezone
from .tasks import FailureReason, Suspicion, TaskEdge, TaskLogLine, TaskRecord, TaskRecordQuerySet, TaskState

__all__ = [
    "Alert",
    "AlertKind",
    "BulkAction",
    "BulkKind",
    "BulkState",
    "DatabaseIdentity",
    "FailureReason",
    "Gate",
    "LockTerm",
    "Missed",
    "Occurrence",
    "OccurrenceOutcome",
    "Overlap",
    "Pause",
    "PauseKind",
    "Rate",
    "Schedule",
    "ScheduleQuerySet",
    "StartupRun",
    "Suspicion",
    "TaskEdge",
    "TaskLogLine",
    "TaskRecord",
    "TaskRecordQuerySet",
    "TaskState",
    "default_timezone",
]
