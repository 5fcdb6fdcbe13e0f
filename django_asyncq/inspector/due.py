"""Which rows are due, and since when: what is said of queues, of the health and of all that waits."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q
from django.db.models.functions import Coalesce, Greatest

# `run_after` of a task that was retried, or run at once by a person, is when that was. One whose run was lost has been
# due since some time after its last attempt began.
DUE_SINCE = Greatest(Coalesce("run_after", "enqueued_at"), Coalesce("last_attempted_at", "enqueued_at"))


def is_due(now: datetime) -> Q:
    """Return the condition that the time of a QUEUED row has come."""
    return Q(run_after=None) | Q(run_after__lte=now)
