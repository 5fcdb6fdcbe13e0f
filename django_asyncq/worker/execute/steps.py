"""The steps of one run: begin → call → finish. They are the same in a slot of a worker and in the test kit.

What surrounds a run differs: where it is shown, who writes its row, how code is awaited. A subclass says that.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ... import compat, failpoints, lifecycle
from ...context import Ending, TaskContext
from ...definitions.payload import storable_result
from ...exceptions import TaskNotRunnable, TaskTimeout
from ...guard import attempt, get_logger, is_a
from ...logs import enter_run, leave_run, log_extra
from ...results import result_of, sender_of
from ...runs import log_returned, log_started
from ...storage import database_clock
from ...storage.errors import is_connection_limit
from .calling import call_in_transaction
from .completion import Completion
from .connections import begin_connections
from .cuts import causes_of
from .job import Cut, Job, JobPhase, Outcome, Unconnected

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

    def stop_flag(self, job: Job) -> threading.Event:
        """Return the flag that asks the function to stop."""
        return threading.Event()

    # --- 1. begin

    def begin(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Count the attempt, show the run, send `task_started`; return the function's arguments."""
        record = job.run.record
        job.stop = self.stop_flag(job) if job.task.takes_context else None
        job.begun_at = job.clock()
        job.phase = JobPhase.RUNNING
        begin_connections(job)
        self.enter(job)
        lifecycle.begin(job.run, self.worker_id, database_clock.estimate())
        enter_run(record)
        log_started(record)
        failpoints.reach("begin.counted")
        if not isinstance(record.args, list) or not isinstance(record.kwargs, dict):
            raise TaskNotRunnable("the row's arguments are not a list and an object")
        result = result_of(record)
        try:
            compat.task_started.send_robust(sender_of(job.task.backend), task_result=result)
        except BaseException:  # `send_robust` outlives an Exception only
            logger.exception("task %s: a receiver of task_started failed", record.id, extra=log_extra(record))
        arguments = list(record.args)
        if job.task.takes_context:
            completion = self.completion(job)
            block: Callable[[Any], AbstractContextManager[Ending]]
            block = completion.refuse if job.task.atomic else completion.block
            arguments.insert(0, TaskContext(task_result=result, record=record, stop=job.stop, completion=block))
        return arguments, dict(record.kwargs)

    # --- 2. call

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function of a `def` task; that of an atomic one in the transaction that completes it."""
        if not job.task.atomic:
            return self.call_plainly(job, args, kwargs)
        with self.completion(job).block() as ending:
            ending.result = call_in_transaction(job, args, kwargs)
        return None

    # --- 3. finish

    def finish(self, job: Job, value: Any, exception: BaseException | None) -> Outcome | None:
        """Note that the run has finished; return its outcome, None if the task has completed itself.

        A run that finished after its timeout has failed, unless it has spent that time waiting for a connection.
        """
        leave_run()
        if exception is None:
            log_returned(job.run.record, job.clock() - (job.begun_at or job.arrived_at))
        if job.phase is JobPhase.COMPLETED:
            self.leave(job)
            if exception is not None:
                record = job.run.record
                logger.error(
                    "task %s: failed after its completion; it has succeeded",
                    record.id,
                    exc_info=exception,
                    extra=log_extra(record),
                )
            return None
        job.phase = JobPhase.REPORTED
        if exception is None:
            value, exception = attempt(storable_result, value)
        unconnected = _unconnected(job, exception)
        if not unconnected and job.is_overdue(job.clock()) and not is_a(exception, TaskTimeout):
            cause, exception = exception, job.timed_out()
            exception.__cause__ = cause
        failpoints.reach("run.function_returned")
        self.leave(job)
        if unconnected:
            return Unconnected(job, database_clock.estimate(), None, exception)
        if job.cut is not None and not is_a(exception, TaskTimeout) and any(e is job.cut for e in causes_of(exception)):
            return Cut(job, database_clock.estimate(), None, exception)
        return Outcome(job, database_clock.estimate(), value, exception)


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
