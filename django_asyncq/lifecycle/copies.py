"""Close what a copy of a database holds of its original's tasks, so that the copy does not do them a second time.

Only rows are written. The Redis of the settings may still be the original's, whose entries have the same ids, and
receivers of the project's would act on an end that is none. Entries that the copy's own Redis may have find their rows
final, and the auditor frees the slots of gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.db.models import Q

from ..exceptions import TaskCancelled
from ..models import FailureReason, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock
from ..storage.routing import as_check, rows_of, transaction_of
from .base import append_error
from .messages import later_fence

ROWS_PER_PAGE = 500
# In the order in which a task that somebody runs after all would pass them; each is served by an index.
UNFINISHED = (
    Q(state=TaskState.FAILED, retry_at__isnull=False),
    Q(state=TaskState.QUEUED),
    Q(state=TaskState.RUNNING),
)
WHY = "it was enqueued in the database of which this one is a copy"
# What is written and read. Arguments are neither, so one that cannot be read keeps no task from being closed.
READ = ("id", "fence", "errors", "attempt", "worker_ids", "last_attempted_at")
WRITTEN = ("state", "reason", "fence", "retry_at", "finished_at", "errors", "last_exception", "cancelled_by")


class Waiting(NamedTuple):
    """How many tasks have not finished, and how many of them would begin at once. newest_at: of all; None for none."""

    total: int
    due: int
    newest_at: datetime | None


def count_waiting() -> Waiting:
    """Return what waits in the database: delayed, due, retrying and running tasks. Raises: django.db.Error."""
    rows, now = rows_of(TaskRecord), database_clock.now()
    retrying, queued, running = (rows.filter(look) for look in UNFINISHED)
    due = retrying.filter(retry_at__lte=now).count() + running.count()
    due += queued.filter(Q(run_after=None) | Q(run_after__lte=now), IS_READY, after_id=None).count()
    newest = rows.order_by("-id").values_list("enqueued_at", flat=True).first()
    return Waiting(retrying.count() + queued.count() + running.count(), due, newest)


def close_copied(by: str) -> Iterator[int]:
    """QUEUED, RETRYING or RUNNING → FAILED, cancelled, for all rows; yield how many after each page. by: who asks.

    | check    | none: no worker of this database may run                                             |
    | row      | → FAILED, with the error and a fence above all that were handed out; slots are freed |
    | Redis    | nothing                                                                              |
    | announce | nothing                                                                              |

    Interrupted, it is called again. Raises: django.db.Error.
    """
    has_closed = True
    while has_closed:
        # Once more, for what has changed behind the last page.
        has_closed = False
        for look in UNFINISHED:
            ids = rows_of(TaskRecord).filter(look).order_by("id").values_list("id", flat=True)
            page = list(ids[:ROWS_PER_PAGE])
            while page:
                count = _close(page, by)
                has_closed = has_closed or count > 0
                yield count
                page = list(ids.filter(id__gt=page[-1])[:ROWS_PER_PAGE])


def _close(ids: list[UUID], by: str) -> int:
    with transaction_of(TaskRecord):
        still = as_check(UNFINISHED[0] | UNFINISHED[1] | UNFINISHED[2])
        rows = rows_of(TaskRecord).filter(id__in=ids)
        records = list(rows.filter(still).only(*READ).select_for_update().order_by("id"))
        if not records:
            return 0
        now, error = database_clock.now(), TaskCancelled(WHY)
        fence = later_fence(max(records, key=lambda record: record.fence))
        groups: dict[str, list[TaskRecord]] = {}
        for record in records:
            record.state, record.reason, record.retry_at = TaskState.FAILED, FailureReason.CANCELLED, None
            record.finished_at, record.fence, record.cancelled_by = now, fence, by
            append_error(record, error, "", now)
            # Most have never run, and get the same entry: one UPDATE for all of them.
            groups.setdefault(repr(record.errors), []).append(record)
        for group in groups.values():
            values = {name: getattr(group[0], name) for name in WRITTEN}
            rows.filter(id__in=[record.id for record in group]).update(**values)
        # A throttled task keeps its slot, as after any other end. A task that follows another one is closed too.
        slots = rows.filter(Q(unique_until=None) | Q(after_id__isnull=False), unique_slot__isnull=False)
        slots.update(unique_slot=None, after_id=None)
    return len(records)
