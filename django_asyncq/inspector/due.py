"""Which rows are due, and since when: what is said of queues, of the health and of all that waits."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q
from django.db.models.functions import Coalesce, Greatest

from ..models import TaskRecord, TaskRecordQuerySet, TaskState
from ..storage.routing import rows_of

# `run_after` of a task that was retried, or run at once by a person, is when that was. One whose run was lost has been
# due since some time after its last attempt began.
DUE_SINCE = Greatest(Coalesce("run_after", "enqueued_at"), Coalesce("last_attempted_at", "enqueued_at"))


def is_due(now: datetime) -> Q:
    """Return the condition that the time of a QUEUED row has come."""
    return Q(run_after=None) | Q(run_after__lte=now)


def due_rows(now: datetime) -> TaskRecordQuerySet:
    """Return the tasks that a worker of ours could run now, those that are paused too. Reads QUEUED rows only."""
    rows = rows_of(TaskRecord).order_by().filter(state=TaskState.QUEUED, after_id=None, batch_id=None, is_remote=False)
    return rows.filter(is_due(now))
