"""One run of one job, from top to bottom: begin → call → finish → report.

`run` is for a `def` task in a thread, `arun` for an `async def` task in the event loop. They differ in the call only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from django.db import close_old_connections

from ... import compat, conf, failpoints, lifecycle
from ...context import Ending, TaskContext
from ...exceptions import TaskNotRunnable, TaskTimeout
from ...guard import get_logger, is_a
from ...logs import enter_run, leave_run, log_extra
from ...results import result_of, sender_of
from ...runs import log_returned, log_started
from ...storage import database_clock
from ...storage.errors import is_connection_limit
from ..fetch.capacity import Capacity
from ..reporter import Reporter
from ..slot_table import SlotTable
from .calling import acall, call, call_in_transaction, own_thread
from .completion import Completion
from .connections import begin_connections, tidy_connections
from .cuts import causes_of
from .job import Cut, Job, JobPhase, Outcome, Unconnected

logger = get_logger("django_asyncq.worker")


class JobRunner:
    """Runs the jobs of one worker process. Called by its slots, many at a time; keeps nothing of a single job."""

    def __init__(
        self,
        worker_id: str,
        slot_table: SlotTable,
        reporter: Reporter,
        capacity: Capacity,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """loop: runs the `async def` tasks, and the awaitables that `def` tasks return."""
        self.worker_id = worker_id
        self.slot_table = slot_table
        self.reporter = reporter
        self.capacity = capacity
        self.loop = loop
        self.timeout_grace_seconds = conf.current().timeout_grace_seconds

    def run(self, job: Job, *, refresh: bool) -> None:
        """Run a `def` task.

        refresh: the thread has waited, so its database connections may be too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS).
        """
        value, exception = None, None
        try:
            if refresh:
                close_old_connections()
            args, kwargs = self._begin(job)
            value = self._call(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a task must not end the slot
            exception = error
        self._tidy(job)
        if outcome := self._finish(job, value, exception):
            self._report(outcome)

    async def arun(self, job: Job) -> None:
        """Run an `async def` task."""
        value, exception = None, None
        try:
            async with own_thread():
                args, kwargs = self._begin(job)
                value = await acall(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - as in `run`
            exception = error
        if outcome := self._finish(job, value, exception):
            self._report(outcome)

    # --- 1. begin

    def _begin(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Count the attempt, show the run in the slot table, send `task_started`; return the function's arguments."""
        record = job.run.record
        job.stop = threading.Event() if job.task.takes_context else None
        job.begun_at = time.monotonic()
        job.phase = JobPhase.RUNNING
        begin_connections(job)
        deadline = job.begun_at + job.timeout_seconds + self.timeout_grace_seconds if job.timeout_seconds else 0.0
        self.slot_table.enter(job.slot, record.id, deadline)
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
            completion = self._completion(job)
            block: Callable[[Any], AbstractContextManager[Ending]]
            block = completion.refuse if job.task.atomic else completion.block
            arguments.insert(0, TaskContext(task_result=result, record=record, stop=job.stop, completion=block))
        return arguments, dict(record.kwargs)

    def _completion(self, job: Job) -> Completion:
        return Completion(job, self.reporter.leave_row, self._report)

    # --- 2. call, and tidy up behind the task

    def _call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function; that of an atomic task in the transaction that completes it."""
        if not job.task.atomic:
            return call(job, args, kwargs, self.loop)
        with self._completion(job).block() as ending:
            ending.result = call_in_transaction(job, args, kwargs)
        return None

    def _tidy(self, job: Job) -> None:
        try:
            tidy_connections()
        except BaseException:
            record = job.run.record
            logger.exception("task %s: its database connection could not be tidied", record.id, extra=log_extra(record))

    # --- 3. finish

    def _finish(self, job: Job, value: Any, exception: BaseException | None) -> Outcome | None:
        """Remove the run from the slot table; return its outcome, None if the task has completed itself.

        A run that finished after its timeout has failed, unless it has spent that time waiting for a connection.
        """
        leave_run()
        if job.phase is JobPhase.COMPLETED:
            self.slot_table.leave(job.slot)
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
        unconnected = _unconnected(job, exception)
        if not unconnected and job.is_overdue(time.monotonic()) and not is_a(exception, TaskTimeout):
            cause, exception = exception, job.timed_out()
            exception.__cause__ = cause
        failpoints.reach("run.function_returned")
        self.slot_table.leave(job.slot)
        if unconnected:
            return Unconnected(job, database_clock.estimate(), None, exception)
        if job.cut is not None and not is_a(exception, TaskTimeout) and any(e is job.cut for e in causes_of(exception)):
            return Cut(job, database_clock.estimate(), None, exception)
        return Outcome(job, database_clock.estimate(), value, exception)

    # --- 4. report

    def _report(self, outcome: Outcome) -> None:
        """Count the run, and give its outcome to the reporter."""
        job = outcome.job
        seconds = time.monotonic() - (job.begun_at or job.arrived_at)
        self.capacity.count_run(seconds)
        if outcome.exception is None:
            log_returned(job.run.record, seconds)
        self.reporter.report(outcome)


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
