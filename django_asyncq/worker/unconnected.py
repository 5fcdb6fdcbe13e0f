"""What becomes of runs that got no connection to the database, because the server or the pool has none left.

Such a run has done nothing in the database. It uses no attempt and counts no crash, however often it happens: a full
server is an outage, and no fault of the task.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from django.db import connections

from ..faults import one_line
from ..guard import get_logger
from ..models import TaskRecord
from ..storage.routing import writing_database
from .execute.job import JobPhase, NotStarted, Outcome, Unconnected

logger = get_logger("django_asyncq.worker")

SHORTEST_PAUSE_SECONDS = 2
LONGEST_PAUSE_SECONDS = 10
QUIET_SECONDS = 60.0


class UnconnectedLog:
    """Says that runs got no connection: at most once a minute, because a full server refuses many."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def note(self, worker_id: str, outcomes: Sequence[Outcome]) -> None:
        """Log the first of these errors, if there is one and none was logged lately."""
        refused = [outcome for outcome in outcomes if isinstance(outcome, Unconnected)]
        now = time.monotonic()
        if not refused or now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_SECONDS
        error = refused[0].job.unconnected or refused[0].exception
        logger.warning(
            "worker %s: tasks get no connection to the database; they run again later, without using an attempt: %s",
            worker_id,
            one_line(error) if error is not None else "",
        )


def pause_seconds() -> int:
    """Return how long a task waits that got no connection: not all ask again in the same second."""
    return random.randint(SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)  # noqa: S311


def changes_row(outcome: Outcome) -> bool:
    """Whether the reporter must write the row. After a run without a connection the row may still say QUEUED."""
    job = outcome.job
    if isinstance(outcome, (NotStarted, Unconnected)):
        return job.run.written or job.is_marked
    return job.phase is not JobPhase.COMPLETED


def connect() -> None:
    """Have a connection to the database of the rows. Raises: django.db.Error."""
    connections[writing_database(TaskRecord)].ensure_connection()
