"""The steps of one run: begin → call → finish. They are the same in a slot of a worker and in the test kit.

What surrounds a run differs: where it is shown, who writes its row, how code is awaited. A subclass says that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ... import compat, conf, failpoints, lifecycle
from ...context import Ending, TaskContext
from ...exceptions import TaskCancelled, TaskTimeout
from ...guard import attempt, get_logger, is_a
from ...logs import about, enter_run, leave_run, log_extra
from ...masking import masker_of
from ...results import result_of, sender_of
from ...run_log import RunLog, keep_in
from ...runs import announce, log_returned, log_started
from ...signals import run_ended, run_started
from ...storage import database_clock
from ...storage.errors import is_connection_limit
from .batch_calls import arguments_of, storable
from .calling import call_in_transaction
from .completion import Completion
from .connections import begin_connections
from .cuts import causes_of
from .job import Cut, Job, JobPhase, Outcome, StopFlag, Unconnected
from .marking import is_marked_first

logger = get_logger("django_asyncq.worker")


class RunSteps(ABC):
    """Takes one job at a time through its run; keeps nothing of a single job."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id

    # --- what surrounds a run

    @abstractmethod
    def enter(self, job: Job) -> None:
        """Note that a job is about to begin."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """Note that a job has finished."""

    @abstractmethod
    def report(self, outcome: Outcome) -> None:
        """Have an outcome written."""

    @abstractmethod
    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes a run."""

    @abstractmethod
    def call_plainly(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function of a `def` task, outside a transaction of its own."""

    @abstractmethod
    def mark_first(self, job: Job) -> None:
        """Write RUNNING, and return once that is done. Raises: as `marking.wait_until_marked`."""

    def open_log(self, job: Job, most: int) -> RunLog:
        """Return what keeps the lines that a run logs. most: how many."""
        return RunLog(job.run.record.attempt, most)

    def report_log(self, job: Job) -> None:  # noqa: B027 - where the lines come with the outcome there is nothing to do
        """Have the lines of a run written that completed itself before it returned: it may have logged since."""

    # --- 1. begin

    def begin(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Count the attempt, show the run, send `task_started`; return the function's arguments."""
        self.count(job)
        begin_connections(job)
        return self.introduce(job)

    def count(self, job: Job) -> None:
        """Count the attempt, and show the run."""
        now = database_clock.estimate()
        job.note_begin(now)
        job.phase = JobPhase.RUNNING
        self.enter(job)
        lifecycle.begin(job.run, self.worker_id, now)

    def introduce(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Announce a run that has begun, in the process of its function; return the function's arguments."""
        record = job.run.record
        enter_run(record)
        announce(run_started, record)
        log_started(record)
        failpoints.reach("begin.counted")
        check_may_begin(job)
        arguments, keywords, wire_type = arguments_of(job)
        result = result_of(record)
        try:
            compat.task_started.send_robust(sender_of(job.task.backend), task_result=result)
        except BaseException:  # `send_robust` outlives an Exception only
            logger.exception("task %s: a receiver of task_started failed", record.id, extra=log_extra(record))
        if job.task.takes_context:
            completion = self.completion(job)
            block: Callable[[Any], AbstractContextManager[Ending]]
            block = completion.refuse if job.task.atomic else completion.block
            context = TaskContext(
                task_result=result,
                record=record,
                stop=StopFlag(job),
                completion=block,
                wire_type=wire_type,
            )
            arguments.insert(0, context)
        # Last: what is logged before, such as the framework's line about the start, is not the body's.
        if most := lines_to_keep(job):
            job.log = self.open_log(job, most)
            if job.task.sensitive:
                job.log.mask = masker_of(record).text
            keep_in(job.log)
        return arguments, keywords

    # --- 2. call

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function of a `def` task; that of an atomic one in the transaction that completes it."""
        if is_marked_first(job):
            self.mark_first(job)
        if not job.task.atomic:
            return self.call_plainly(job, args, kwargs)
        with self.completion(job).block() as ending:
            ending.result = call_in_transaction(job, args, kwargs)
        return None

    # --- 3. finish

    def finish(self, job: Job, value: Any, exception: BaseException | None) -> Outcome | None:
        """Note that the run has finished; return its outcome, None if the task has completed itself.

        A run that finished after its timeout has failed, unless it was cancelled or has spent that time waiting for a
        connection. A cancelled run that failed is final, whatever its error is (`outcomes.apply`).
        """
        announce(run_ended, job.run.record, exception=exception)
        leave_run()
        if exception is None:
            log_returned(job.run.record, job.clock() - (job.begun_at or job.arrived_at))
        if job.log is not None:
            job.log.close()
        if job.phase is JobPhase.COMPLETED:
            self.leave(job)
            if job.log is not None:
                self.report_log(job)
            if exception is not None:
                record = job.run.record
                with about(record):
                    logger.error(
                        "task %s: failed after its completion; it has succeeded",
                        record.id,
                        exc_info=exception,
                        extra=log_extra(record),
                    )
            return None
        job.phase = JobPhase.REPORTED
        if exception is None:
            value, exception = attempt(storable, job, value)
        # A cancelled task is not queued again because its connection was cut.
        may_repeat = exception is not None and not job.is_cancelled
        unconnected = may_repeat and _unconnected(job, exception)
        is_stopped = is_a(exception, (TaskTimeout, TaskCancelled))
        if not unconnected and not is_stopped and job.is_overdue(job.clock()):
            cause, exception = exception, job.timed_out()
            exception.__cause__ = cause
        failpoints.reach("run.function_returned")
        self.leave(job)
        if unconnected:
            return Unconnected(job, database_clock.estimate(), None, exception)
        was_cut = may_repeat and job.cut is not None and not is_a(exception, TaskTimeout)
        if was_cut and any(each is job.cut for each in causes_of(exception)):
            return Cut(job, database_clock.estimate(), None, exception)
        return Outcome(job, database_clock.estimate(), value, exception)


def lines_to_keep(job: Job) -> int:
    """Return how many lines of a run are kept: as its row says, its task, or the settings."""
    for found in (job.run.record.keep_logs, job.task.keep_logs):
        if found is not None:
            return int(found)
    return conf.current().keep_logs


def check_may_begin(job: Job) -> None:
    """Raise if the function shall not be called any more: TaskCancelled, TaskExpired.

    After the run was shown: a cancel either finds it there or is found here.
    """
    if job.is_cancelled:
        raise job.cancelled()
    if lifecycle.is_expired(job.run.record, database_clock.estimate()):
        # It has waited in this process since it was claimed.
        raise lifecycle.expired()


def _unconnected(job: Job, exception: BaseException | None) -> bool:
    """Whether a run failed because it got no connection: its transaction did not begin, or it had no connection before.

    An error that the function made of it is the function's own. So is that of a run that had a connection: what it has
    written may be there, and nobody may repeat it unasked.
    """
    if exception is None or is_a(exception, TaskTimeout):
        return False
    if job.unconnected is not None and any(each is job.unconnected for each in causes_of(exception)):
        return True
    return not job.was_connected and is_connection_limit(exception)
