"""Why a task failed: the one door for `errors`, `reason` and `last_exception`, which must agree.

Filters ask for `reason` and `last_exception`, which are indexed or small; they never read the JSON of `errors`.

- `reason` says why the row is FAILED or RETRYING now. In every other state it is NONE: a retry clears it, and a
  constraint of the database enforces that.
- `last_exception` is the class path of the last entry of `errors`. It stays as long as the entry does, so a task that
  succeeded after retries still shows the error of its last failed attempt.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ..definitions.exception_text import class_path, text_of
from ..definitions.payload import TRACEBACK_CHARACTERS, storable_text
from ..exceptions import TaskCancelled, TaskExpired, TaskNotRegistered, TaskTimeout, WorkerLost
from ..guard import is_a
from ..models import FailureReason, TaskRecord, TaskState

REASONS: dict[type[BaseException], FailureReason] = {
    TaskTimeout: FailureReason.TIMEOUT,
    TaskCancelled: FailureReason.CANCELLED,
    TaskExpired: FailureReason.EXPIRED,
    WorkerLost: FailureReason.WORKER_LOST,
    TaskNotRegistered: FailureReason.NOT_REGISTERED,
}
CLASS_CHARACTERS = 200


def append_error(record: TaskRecord, exception: BaseException, traceback: str, now: datetime) -> None:
    """Append the error of a failed attempt, in memory; a row that is FAILED gets the reason too.

    The state must have been set before: a lost worker's task may be QUEUED again, with the error and no reason.
    """
    entry = {
        "exception": class_path(exception),
        "message": text_of(exception),
        "traceback": storable_text(traceback, TRACEBACK_CHARACTERS),
        "attempt": record.attempt,
        "worker": record.worker_ids[-1] if record.worker_ids else "",
        "started_at": record.last_attempted_at.isoformat() if record.last_attempted_at else None,
        "failed_at": now.isoformat(),
    }
    append_entry(record, entry)
    record.reason = reason_of(exception) if record.state == TaskState.FAILED else FailureReason.NONE


def append_entry(record: TaskRecord, entry: dict[str, Any]) -> None:
    """Append an entry as `append_error` made it, perhaps in another process; the reason comes separately."""
    record.errors = [*record.errors, entry]
    record.last_exception = entry["exception"][:CLASS_CHARACTERS]


def reason_of(exception: BaseException) -> FailureReason:
    """Return the reason that this exception stands for."""
    return next((reason for kind, reason in REASONS.items() if is_a(exception, kind)), FailureReason.EXCEPTION)
