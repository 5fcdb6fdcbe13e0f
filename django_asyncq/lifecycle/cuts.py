"""Requeue or postpone a run of which nothing remains in the database, so that it uses no attempt.

One whose connection was cut before its commit has run, so it is counted. One that got no connection is not.
"""

from __future__ import annotations

from datetime import datetime

from ..definitions.exception_text import text_of
from ..guard import class_name
from ..models import TaskState
from .claimed_runs import Run
from .running import count_crash, undo_attempt

# Each run of such a body is cut, so the text says where to look.
REMEDY = (
    "If this happens in each run, the transaction may be idle for longer than the server's "
    "idle_in_transaction_session_timeout (on MariaDB idle_transaction_timeout): keep it short, "
    "with complete_on_commit() for the last part of the task"
)


def count_cut(run: Run, error: BaseException, traceback: str, now: datetime) -> None:
    """RUNNING → QUEUED in memory after a cut; → FAILED after MAX_CRASHES cuts and crashes in a row.

    error: the database's own. `record_runs` writes the row, and `acknowledge` requeues the task in Redis.
    """
    text = f"{class_name(error)}: {text_of(error)}".strip()
    count_crash(
        run.record,
        f"its database connection was cut, and nothing was committed: {text}. {REMEDY}",
        now,
        stack=traceback,
    )
    # The process did not die of it.
    run.record.is_suspect = False


def postpone_run(run: Run, pause_seconds: int) -> None:
    """RUNNING → QUEUED in memory for a run that got no connection to the database: no attempt, no crash.

    pause_seconds: how long the task waits before it may be claimed again. `record_runs` writes the row if it says
    RUNNING, and `acknowledge` postpones the task in Redis.
    """
    undo_attempt(run.record)
    run.record.state = TaskState.QUEUED
    run.pause_seconds = pause_seconds
