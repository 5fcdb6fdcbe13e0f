"""Count a run whose database connection was cut before its commit: nothing of it remains, so it uses no attempt."""

from __future__ import annotations

from datetime import datetime

from ..definitions.exception_text import text_of
from ..guard import class_name
from .running import Run, count_crash

# Each run of such a body is cut, so the text says where to look.
REMEDY = (
    "If this happens in each run, the transaction may be idle for longer than the server's "
    "idle_in_transaction_session_timeout: keep it short, with complete_on_commit() for the last part of the task"
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
