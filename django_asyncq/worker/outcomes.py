"""What becomes of an outcome: the row in memory, then, when it has been written, the signals.

It writes no row: the reporter of a worker does, and the runner of the test kit.
"""

from __future__ import annotations

import contextvars
import random
import time
from collections.abc import Callable, Iterable, Sequence

from django.db import connections

from .. import lifecycle
from ..core import compat, logs
from ..core.guard import attempt, get_logger, is_a
from ..core.logs import log_extra
from ..core.payload import traceback_of
from ..exceptions import LeaseLost
from ..lifecycle.base import log_cut, log_failed, log_uncounted
from ..models import TaskRecord, TaskState
from ..results import judge_failure, result_of, sender_of
from ..storage import database_clock
from ..storage.errors import STORE_ERRORS, concerns_one_row, one_line
from ..storage.routing import writing_database
from .complete import fail_batch, reason_of, settle_members
from .job import JobPhase, Outcome, OutcomeKind

# --- What becomes of runs that got no connection to the database, because the server or the pool has none left.
#
# Such a run has done nothing in the database. It uses no attempt and counts no crash, however often it happens: a
# full server is an outage, and no fault of the task.

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
        refused = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.UNCONNECTED]
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
    if outcome.kind is OutcomeKind.UNCONNECTED:
        return job.run.written or job.is_marked
    return job.phase is not JobPhase.COMPLETED


def connect() -> None:
    """Have a connection to the database of the rows. Raises: django.db.Error."""
    connections[writing_database(TaskRecord)].ensure_connection()


def record_alone(run: lifecycle.Run, record: Callable[[], Sequence[lifecycle.Run]]) -> bool:
    """Write one run, without its result if the database refuses that; return whether the run lost its lease.

    record: writes the run and returns it if it lost its lease.
    """
    try:
        return bool(record())
    except STORE_ERRORS as error:
        if not concerns_one_row(error):
            raise
        logger.exception("task %s: the database refuses its result", run.record.id, extra=log_extra(run.record))
        lifecycle.strip_result(run, str(error))
        return bool(record())


def fail_unrecorded(outcome: Outcome, error: BaseException) -> None:
    """Change the row in memory to a failure that says that the outcome could not be recorded."""
    text = "its outcome could not be recorded"
    lifecycle.fail(outcome.job.run, error, text, outcome.finished_at, retry_at=None)


def announce(outcomes: Sequence[Outcome]) -> None:
    """Send the signals of outcomes that are in their rows."""
    for state in (TaskState.SUCCEEDED, TaskState.FAILED):
        records = [each for each in every_record(outcomes) if each.state == state]
        lifecycle.announce(records, TaskState.RUNNING, state)
    unfinished = [outcome.job.run for outcome in outcomes if outcome.kind is not OutcomeKind.ENDED]
    records = [run.record for run in unfinished if run.written and run.record.state == TaskState.QUEUED]
    lifecycle.announce(records, TaskState.RUNNING, TaskState.QUEUED)
    for outcome in outcomes:
        # The thread keeps nothing that a receiver sets.
        if outcome.job.run.record.finished_at is not None:
            contextvars.copy_context().run(_send_finished, outcome)
        for member in outcome.job.run.members:
            contextvars.copy_context().run(_send_finished_member, outcome, member.record)


def every_record(outcomes: Iterable[Outcome]) -> list[TaskRecord]:
    """Return the rows of outcomes, each followed by those of its members if it is that of a batch."""
    return [run.record for outcome in outcomes for run in (outcome.job.run, *outcome.job.run.members)]


def apply(outcome: Outcome) -> None:
    """Change the row in memory as the outcome says."""
    job, run, exception = outcome.job, outcome.job.run, outcome.exception
    if run.record.batch_size is not None and outcome.kind is OutcomeKind.ENDED:
        if exception is not None:
            fail_batch(job, exception, outcome.finished_at)
            return
        settle_members(job, run, outcome.value, outcome.finished_at)
        lifecycle.succeed(run, None, outcome.finished_at)
        return
    if exception is None:
        lifecycle.succeed(run, outcome.value, outcome.finished_at)
        return
    if outcome.kind is OutcomeKind.UNCONNECTED:
        lifecycle.postpone_run(run, pause_seconds())
        log_uncounted(run.record, "got no connection to the database")
        return
    if outcome.kind is OutcomeKind.CUT:
        lifecycle.count_cut(run, reason_of(exception), traceback_of(exception), outcome.finished_at)
        log_cut(run.record, reason_of(exception))
        return
    judgement = judge_failure(job.task, run.record, exception, database_clock.estimate(), is_cancelled=job.is_cancelled)
    error = judgement.exception
    lifecycle.fail(
        run,
        error,
        traceback_of(error),
        outcome.finished_at,
        retry_at=judgement.retry_at,
        counted=judgement.counted,
        is_cancelled=job.is_cancelled,
    )
    if not judgement.counted:
        log_uncounted(run.record, "asked to be retried")
    elif not is_a(error, LeaseLost):
        log_failed(run.record, error, has_backoff_failed=judgement.is_fault)


def _send_finished(outcome: Outcome) -> None:
    """Send Django's `task_finished`, once, for a final row; inside `except`, where error monitors look.

    Called in a copy of the context, which ends with it.
    """
    job, record = outcome.job, outcome.job.run.record
    # Django itself logs the failure in a receiver (`FrameworkFilter`).
    logs.about_to_log(record)
    task = None if job.shown is None else job.shown.task
    try:
        kind = sender_of(job.task.backend)
        if outcome.exception is None or job.phase is JobPhase.COMPLETED:
            compat.task_finished.send_robust(kind, task_result=result_of(record, task))
            return
        try:
            raise outcome.exception
        except BaseException:  # noqa: BLE001 - raised only for `sys.exc_info()`
            compat.task_finished.send_robust(kind, task_result=result_of(record, task))
    except BaseException:  # `send_robust` outlives an Exception only
        logger.exception("task %s: a receiver of task_finished failed", record.id, extra=log_extra(record))


def _send_finished_member(outcome: Outcome, record: TaskRecord) -> None:
    """Do the same for a member of a batch; which exception is its own only its row says."""
    if not record.is_final:
        return
    logs.about_to_log(record)
    sent = attempt(compat.task_finished.send_robust, sender_of(outcome.job.task.backend), task_result=result_of(record))
    if sent.error is not None:
        text = "task %s: a receiver of task_finished failed"
        logger.error(text, record.id, exc_info=sent.error, extra=log_extra(record))
