"""One run of one job, from top to bottom: begin → call → finish → report.

`RunSteps` has the steps, which are the same in a slot of a worker and in the test kit. What surrounds a run differs:
where it is shown, who writes its row, how code is awaited. A subclass says that; `JobRunner` is that of a worker's
slots, in which `run` is for a `def` task in a thread, and `arun` for an `async def` task in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from django.db import close_old_connections

from .. import conf, lifecycle
from ..context import Ending, TaskContext
from ..core import compat
from ..core.guard import attempt, get_logger, is_a
from ..core.logs import about, enter_run, leave_run, log_extra
from ..core.masking import masker_of
from ..core.run_log import RunLog, keep_in
from ..exceptions import TaskCancelled, TaskTimeout
from ..lifecycle.base import announce_runs as announce
from ..lifecycle.base import log_returned, log_started, run_logger
from ..results import as_discard, result_of, sender_of
from ..signals import run_ended, run_started
from ..storage import database_clock
from ..storage.errors import is_connection_limit
from .around import Around
from .call import (
    acall,
    arguments_of_row,
    await_in_loop,
    begin_connections,
    call,
    own_thread,
    refuse_awaitable,
    refuse_late,
    tidy_connections,
)
from .capacity import Capacity
from .checkpoints import keep
from .complete import Completion, arguments_of, causes_of, storable
from .job import Job, JobPhase, Outcome, OutcomeKind, StopFlag
from .marks import await_until_marked, is_marked_first, wait_until_marked, wait_within_run
from .rates import RateKeeper
from .report import Reporter
from .slot_table import SlotTable

logger = get_logger("django_asyncq.worker")


class RunSteps(ABC):
    """Takes one job at a time through its run; keeps nothing of a single job."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        # Decided once: a process that has nothing around its tasks never asks again how one is called.
        paths = conf.current().around
        self.around = Around(paths) if paths else None
        self._call, self._acall = (self.around.call, self.around.acall) if self.around else (call, acall)

    # --- what surrounds a run

    @abstractmethod
    def enter(self, job: Job) -> None:
        """Note that a job is about to begin."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """Note that a job has finished."""

    @abstractmethod
    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes a run."""

    @abstractmethod
    def await_value(self, job: Job, value: Any) -> tuple[Any, BaseException | None]:
        """Await what the function of a `def` task has returned; return its value or its error."""

    @abstractmethod
    def mark_first(self, job: Job) -> None:
        """Write RUNNING, and return once that is done. Raises: as `wait_until_marked`."""

    @abstractmethod
    def mark_within(self, job: Job) -> None:
        """Do the same while the function runs. Raises: as `wait_within_run`."""

    @abstractmethod
    def report_log(self, log: RunLog) -> None:
        """Have the lines of a run written that completed itself before it returned: it may have logged since."""

    # --- 1. begin

    def begin(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Count the attempt, show the run, send `task_started`; return the function's arguments.

        Raises: TaskCancelled, TaskExpired, and what says that the function cannot be called.
        """
        now, record = database_clock.estimate(), job.run.record
        job.note_begin(now)
        job.phase = JobPhase.RUNNING
        self.enter(job)
        lifecycle.begin(job.run, self.worker_id, now)
        begin_connections(job)
        enter_run(record)
        if run_started.receivers or run_started.direct:
            announce(run_started, record)
        if run_logger.logger.isEnabledFor(logging.DEBUG):
            log_started(record)
        # After the run was shown: a cancel either finds it there or is found here.
        if job.is_cancelled:
            raise job.cancelled(had_begun=False)
        # Checked again where the function is called. Here, so that no receiver hears of a start that comes too late.
        if record.expires_at is not None or job.run.members:
            refuse_late(job, [])
        if job.run.unfit is not None:
            raise job.run.unfit
        is_single = job.task.batch is None and record.batch_size is None
        arguments, keywords, wire_type = arguments_of_row(job, record) if is_single else arguments_of(job)
        job.shown = result = result_of(record, declared=job.task)
        try:
            compat.task_started.send_robust(sender_of(job.task.backend), task_result=result)
        except BaseException:  # `send_robust` outlives an Exception only
            logger.exception("task %s: a receiver of task_started failed", record.id, extra=log_extra(record))
        if job.task.takes_context or self.around is not None:
            completion = self.completion(job)
            block: Callable[[Any], AbstractContextManager[Ending]]
            block = completion.refuse if job.task.atomic else completion.block
            job.context = TaskContext(
                task_result=result,
                record=record,
                stop=StopFlag(job),
                completion=block,
                wire_type=wire_type,
                keep=partial(keep, self.mark_within, job),
            )
            if job.task.takes_context:
                arguments.insert(0, job.context)
        # Last: what is logged before, such as the framework's line about the start, is not the body's.
        most = record.keep_logs if record.keep_logs is not None else job.task.keep_logs
        if most is None:
            most = conf.current().keep_logs
        if most:
            mask = masker_of(record).text if job.task.sensitive else None
            job.run.log = RunLog(record.id, job.run.lease.fence, record.attempt, most, mask)
            keep_in(job.run.log)
        return arguments, keywords

    # --- 2. call

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function of a `def` task; that of an atomic one in the transaction that completes it."""
        if (job.run.record.unique_key or job.run.members) and is_marked_first(job):
            self.mark_first(job)
        if not job.task.atomic:
            return self._call(job, args, kwargs, self.await_value)
        with self.completion(job).block() as ending:
            ending.result = self._call(job, args, kwargs, refuse_awaitable)
        return None

    # --- 3. finish

    def finish(self, job: Job, value: Any, exception: BaseException | None) -> Outcome | None:
        """Note that the run has finished; return its outcome, None if the task has completed itself.

        A run that finished after its timeout has failed, unless it was cancelled or has spent that time waiting for a
        connection. A cancelled run that failed is final, whatever its error is (`outcomes.apply`).
        """
        if exception is not None:
            exception = as_discard(job.task, exception)
        has_returned, may_repeat, unconnected = exception is None, False, False
        if job.phase is not JobPhase.COMPLETED:
            # None is storable, except as what a batch returns.
            if exception is None and (value is not None or job.task.batch is not None):
                value, exception = attempt(storable, job, value)
            # A cancelled task is not queued again because its connection was cut.
            may_repeat = exception is not None and not job.is_cancelled
            unconnected = may_repeat and _unconnected(job, exception)
            is_stopped = exception is not None and is_a(exception, (TaskTimeout, TaskCancelled))
            if not unconnected and not is_stopped and job.clock() > job.overdue_at:
                cause, exception = exception, job.late or job.timed_out()
                exception.__cause__ = cause
        # Now it is certain how the run has ended.
        if run_ended.receivers or run_ended.direct:
            announce(run_ended, job.run.record, exception=exception)
        leave_run()
        if has_returned and run_logger.logger.isEnabledFor(logging.DEBUG):
            log_returned(job.run.record, job.clock() - (job.begun_at or job.arrived_at))
        if job.run.log is not None:
            job.run.log.close()
        if job.phase is JobPhase.COMPLETED:
            self.leave(job)
            if job.run.log is not None:
                self.report_log(job.run.log)
            if exception is not None:
                record = job.run.record
                with about(record):
                    logger.error(
                        "task %s: raised after completing; the task stays SUCCEEDED",
                        record.id,
                        exc_info=exception,
                        extra=log_extra(record),
                    )
            return None
        job.phase = JobPhase.REPORTED
        self.leave(job)
        if unconnected:
            return Outcome(job, database_clock.estimate(), None, exception, OutcomeKind.UNCONNECTED)
        was_cut = may_repeat and job.cut is not None and not is_a(exception, TaskTimeout)
        if was_cut and any(each is job.cut for each in causes_of(exception)):
            return Outcome(job, database_clock.estimate(), None, exception, OutcomeKind.CUT)
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


# --- In a slot of a worker process.


class JobRunner(RunSteps):
    """Runs the jobs of one worker process. Called by its slots, many at a time; keeps nothing of a single job."""

    def __init__(
        self,
        worker_id: str,
        slot_table: SlotTable,
        reporter: Reporter,
        capacity: Capacity,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """capacity: told of each slot that is free again. loop: runs all coroutines."""
        super().__init__(worker_id)
        self.slot_table = slot_table
        self.reporter = reporter
        self.capacity = capacity
        self.loop = loop
        self.timeout_grace_seconds = conf.current().timeout_grace_seconds
        # Runs isolated jobs elsewhere; None where they run here.
        self.isolate: Callable[[Job], object] | None = None
        # Asked before a job with a rate begins; only a fetcher gives it one.
        self.rates: RateKeeper | None = None

    def run(self, job: Job, *, refresh: bool) -> None:
        """Run a `def` task, or an isolated task of either kind.

        refresh: the thread has waited, so its database connections may be too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS).
        """
        if job.rate and self.rates is not None and not self.rates.may_start(job):
            return
        # One that is cancelled finishes here: nothing of it is called.
        if job.task.isolated and self.isolate is not None and not job.is_cancelled:
            self.isolate(job)
            return
        value, exception = None, None
        try:
            if refresh:
                close_old_connections()
            args, kwargs = self.begin(job)
            value = self.call(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a task must not end the slot
            exception = error
        try:
            tidy_connections()
        except BaseException:
            record = job.run.record
            logger.exception("task %s: its database connection could not be tidied", record.id, extra=log_extra(record))
        if outcome := self.finish(job, value, exception):
            self.reporter.report(outcome)

    async def arun(self, job: Job) -> None:
        """Run an `async def` task."""
        if job.rate and self.rates is not None and not await self.rates.may_start_async(job):
            return
        value, exception = None, None
        try:
            async with own_thread():
                args, kwargs = self.begin(job)
                if is_marked_first(job):
                    await await_until_marked(job, self.reporter.mark)
                value = await self._acall(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - as in `run`
            exception = error
        if outcome := self.finish(job, value, exception):
            self.reporter.report(outcome)

    def enter(self, job: Job) -> None:
        """Show the run in the slot table, where the supervisor looks when this process dies."""
        deadline = 0.0 if job.overdue_at == math.inf else job.overdue_at + self.timeout_grace_seconds
        self.slot_table.enter(job.slot, job.run.record.id, deadline)

    def report_log(self, log: RunLog) -> None:
        """Have the reporter write the lines of a run that has completed itself."""
        self.reporter.report_log(log)

    def leave(self, job: Job) -> None:
        """Remove the run from the slot table."""
        self.slot_table.leave(job.slot)

    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes a run; the reporter leaves the row to it."""
        return Completion(job, self.reporter.leave_row, self.reporter.report)

    def mark_first(self, job: Job) -> None:
        """Have the reporter write RUNNING, and wait for that."""
        wait_until_marked(job, self.reporter.mark)

    def mark_within(self, job: Job) -> None:
        """Have the reporter write RUNNING while the function runs, and wait for that."""
        wait_within_run(job, self.reporter.mark)

    def await_value(self, job: Job, value: Any) -> tuple[Any, BaseException | None]:
        """Have the event loop await it, with the rest of the timeout."""
        return await_in_loop(job, value, self.loop)
