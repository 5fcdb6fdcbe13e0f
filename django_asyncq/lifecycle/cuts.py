"""Count a run whose database connection was cut before its commit: nothing of it remains, so it uses no attempt."""

from __future__ import annotations

from datetime import datetime

from .. import conf
from ..definitions.exception_text import text_of
from ..exceptions import WorkerLost
from ..guard import class_name
from ..models import TaskState
from .failures import append_error
from .running import Run

# Each run of such a body is cut, so the text says where to look.
REMEDY = (
    "If this happens in each run, the transaction may be idle for longer than the server's "
    "idle_in_transaction_session_timeout: keep it short, with complete_on_commit() for the last part of the task"
)


def count_cut(run: Run, error: BaseException, traceback: str, now: datetime) -> None:
    """RUNNING → QUEUED in memory after a cut; → FAILED after MAX_CRASHES cuts and crashes in a row.

    error: the database's own. `record_runs` writes the row, and `acknowledge` requeues the task in Redis.
    """
    record = run.record
    record.crash_count += 1
    # The process did not die of it.
    record.is_suspect = False
    if record.crash_count < conf.current().max_crashes:
        record.state = TaskState.QUEUED
    else:
        record.state = TaskState.FAILED
        record.retry_at = None
        record.finished_at = now
    text = f"{class_name(error)}: {text_of(error)}".strip()
    lost = WorkerLost(f"its database connection was cut, and nothing was committed: {text}. {REMEDY}")
    append_error(record, lost, traceback, now)
    record.attempt = max(record.attempt - 1, 0)
