"""The models: tasks and their log lines, gates, schedules, pauses, actions on many tasks, alerts, what a fleet shares.

The database is the source of truth; Redis only dispatches. Only `lifecycle` changes a task's state, so no method here
does.
"""

from __future__ import annotations

from .alerts import Alert, AlertChannel, AlertKind
from .fleet import DatabaseIdentity, LockTerm, StartupRun
from .gates import Gate
from .operating import BulkAction, BulkKind, BulkState, Pause, PauseKind
from .schedules import Missed, Occurrence, OccurrenceOutcome, Overlap, Schedule, ScheduleQuerySet, default_timezone
from .tasks import FailureReason, TaskLogLine, TaskRecord, TaskRecordQuerySet, TaskState

__all__ = [
    "Alert",
    "AlertChannel",
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
    "Schedule",
    "ScheduleQuerySet",
    "StartupRun",
    "TaskLogLine",
    "TaskRecord",
    "TaskRecordQuerySet",
    "TaskState",
    "default_timezone",
]
