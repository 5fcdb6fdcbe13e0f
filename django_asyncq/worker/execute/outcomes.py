"""What becomes of an outcome: the row in memory, then, when it has been written, the signals.

It writes no row: the reporter of a worker does, and the runner of the test kit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ... import compat, failpoints, lifecycle
from ...definitions.exception_text import traceback_of
from ...exceptions import LeaseLost
from ...faults import STORE_ERRORS, concerns_one_row
from ...guard import attempt, get_logger, is_a
from ...logs import about, log_extra
from ...models import TaskRecord, TaskState
from ...results import judge_failure, result_of, sender_of
from ...run_log import KeptLog
from ...runs import log_crashed, log_cut, log_failed, log_uncounted
from ...storage import database_clock
from ..unconnected import pause_seconds
from .batch_calls import fail_batch, settle_members
from .cuts import reason_of
from .job import Crash, Cut, Job, JobPhase, Outcome, Unconnected

logger = get_logger("django_asyncq.worker")


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


def note_recorded() -> None:
    """Note that outcomes are in their rows, before anybody else knows of them."""
    failpoints.reach("report.row_written")


def record_logs(jobs: Iterable[Job]) -> None:
    """Store the lines that runs have logged whose tasks keep any. Raises: django.db.Error."""
    kept = [(job, job.log) for job in jobs if job.log is not None]
    logs = [KeptLog(job.run.record.id, job.run.lease.fence, log.attempt, log.lines) for job, log in kept]
    lifecycle.record_log_lines([log for log in logs if log.lines])
    for _, log in kept:
        log.recorded()


def announce(outcomes: Sequence[Outcome]) -> None:
    """Send the signals of outcomes that are in their rows."""
    for state in (TaskState.SUCCEEDED, TaskState.FAILED):
        records = [each for each in every_record(outcomes) if each.state == state]
        lifecycle.announce(records, TaskState.RUNNING, state)
    unfinished = [outcome.job.run for outcome in outcomes if isinstance(outcome, (Cut, Unconnected))]
    records = [run.record for run in unfinished if run.written and run.record.state == TaskState.QUEUED]
    lifecycle.announce(records, TaskState.RUNNING, TaskState.QUEUED)
    for outcome in outcomes:
        send_finished(outcome)
        for member in outcome.job.run.members:
            _send_finished_member(outcome, member.record)


def every_record(outcomes: Iterable[Outcome]) -> list[TaskRecord]:
    """Return the rows of outcomes, each followed by those of its members if it is that of a batch."""
    return [run.record for outcome in outcomes for run in (outcome.job.run, *outcome.job.run.members)]


def apply(outcome: Outcome) -> None:
    """Change the row in memory as the outcome says."""
    job, run, exception = outcome.job, outcome.job.run, outcome.exception
    if run.record.is_batch and not isinstance(outcome, (Cut, Unconnected)):
        if exception is not None:
            fail_batch(job, exception, outcome.finished_at)
            return
        settle_members(job, run, outcome.value, outcome.finished_at)
        lifecycle.succeed(run, None, outcome.finished_at)
        return
    if outcome.changes is not None:
        lifecycle.apply_changes(run, outcome.changes)
        return
    if isinstance(outcome, Crash):
        lifecycle.count_own_crash(run.record, outcome.reason, outcome.finished_at, stack=outcome.stack)
        log_crashed(run.record, outcome.reason)
        return
    if exception is None:
        lifecycle.succeed(run, outcome.value, outcome.finished_at)
        return
    if isinstance(outcome, Unconnected):
        lifecycle.postpone_run(run, pause_seconds())
        log_uncounted(run.record, "got no connection to the database")
        return
    if isinstance(outcome, Cut):
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


def send_finished(outcome: Outcome) -> None:
    """Send Django's `task_finished`, once, for a final row; inside `except`, where error monitors look."""
    record = outcome.job.run.record
    if not record.is_final:
        return
    try:
        # Django itself logs the failure in a receiver.
        with about(record):
            _send_to_receivers(outcome, record)
    except BaseException:  # `send_robust` outlives an Exception only
        logger.exception("task %s: a receiver of task_finished failed", record.id, extra=log_extra(record))


def _send_finished_member(outcome: Outcome, record: TaskRecord) -> None:
    """Do the same for a member of a batch; which exception is its own only its row says."""
    if not record.is_final:
        return
    sent = attempt(compat.task_finished.send_robust, sender_of(outcome.job.task.backend), task_result=result_of(record))
    if sent.error is not None:
        text = "task %s: a receiver of task_finished failed"
        logger.error(text, record.id, exc_info=sent.error, extra=log_extra(record))


def _send_to_receivers(outcome: Outcome, record: TaskRecord) -> None:
    sender = sender_of(outcome.job.task.backend)
    if outcome.exception is None or outcome.job.phase is JobPhase.COMPLETED:
        compat.task_finished.send_robust(sender, task_result=result_of(record))
        return
    try:
        raise outcome.exception
    except BaseException:  # noqa: BLE001 - raised only for `sys.exc_info()`
        compat.task_finished.send_robust(sender, task_result=result_of(record))
