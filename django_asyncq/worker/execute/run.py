"""One run of one job in a slot, from top to bottom: begin → call → finish → report.

`run` is for a `def` task in a thread, `arun` for an `async def` task in the event loop. They differ in the call only.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from django.db import close_old_connections

from ... import conf
from ...guard import get_logger
from ...logs import log_extra
from ...run_log import RunLog
from ..fetch.capacity import Capacity
from ..reporter import Reporter
from ..slot_table import SlotTable
from .calling import acall, call, own_thread
from .completion import Completion
from .connections import tidy_connections
from .isolated import IsolatedRun
from .job import Job, Outcome
from .marking import await_until_marked, is_marked_first, wait_until_marked
from .steps import RunSteps

logger = get_logger("django_asyncq.worker")


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
        """loop: runs the `async def` tasks, and the awaitables that `def` tasks return."""
        super().__init__(worker_id)
        self.slot_table = slot_table
        self.reporter = reporter
        self.capacity = capacity
        self.loop = loop
        self.timeout_grace_seconds = conf.current().timeout_grace_seconds

    def run(self, job: Job, *, refresh: bool) -> None:
        """Run a `def` task, or an isolated task of either kind.

        refresh: the thread has waited, so its database connections may be too old (CONN_MAX_AGE, CONN_HEALTH_CHECKS).
        """
        if job.task.isolated:
            IsolatedRun(self, job).run()
            return
        value, exception = None, None
        try:
            if refresh:
                close_old_connections()
            args, kwargs = self.begin(job)
            value = self.call(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a task must not end the slot
            exception = error
        self._tidy(job)
        if outcome := self.finish(job, value, exception):
            self.report(outcome)

    async def arun(self, job: Job) -> None:
        """Run an `async def` task."""
        value, exception = None, None
        try:
            async with own_thread():
                args, kwargs = self.begin(job)
                if is_marked_first(job):
                    await await_until_marked(job, self.reporter.mark)
                value = await acall(job, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - as in `run`
            exception = error
        if outcome := self.finish(job, value, exception):
            self.report(outcome)

    def enter(self, job: Job) -> None:
        """Show the run in the slot table, where the supervisor looks when this process dies."""
        assert job.begun_at is not None  # noqa: S101 - set by `begin`
        seconds = job.timeout_seconds
        grace = self.timeout_grace_seconds + job.margin_seconds
        deadline = 0.0 if seconds is None else job.begun_at + seconds + grace
        self.slot_table.enter(job.slot, job.run.record.id, deadline)

    def open_log(self, job: Job, most: int) -> RunLog:
        """Return what keeps the lines that a run logs, in the memory of the supervisor too if there is any for them."""
        table = self.slot_table.logs
        if table is None:
            return RunLog(job.run.record.attempt, most)
        slot, record, fence = job.slot, job.run.record, job.run.lease.fence
        table.begin(slot, record.id, fence, record.attempt)
        return RunLog(record.attempt, most, partial(table.add, slot), partial(table.note_recorded, slot, fence))

    def report_log(self, job: Job) -> None:
        """Have the reporter write the lines of a run that has completed itself."""
        self.reporter.report_log(job)

    def leave(self, job: Job) -> None:
        """Remove the run from the slot table."""
        self.slot_table.leave(job.slot)

    def report(self, outcome: Outcome) -> None:
        """Count the run, and give its outcome to the reporter."""
        job = outcome.job
        self.capacity.count_run(time.monotonic() - (job.begun_at or job.arrived_at))
        self.reporter.report(outcome)

    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes a run; the reporter leaves the row to it."""
        return Completion(job, self.reporter.leave_row, self.report)

    def mark_first(self, job: Job) -> None:
        """Have the reporter write RUNNING, and wait for that."""
        wait_until_marked(job, self.reporter.mark)

    def call_plainly(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function; the event loop awaits what it may return."""
        return call(job, args, kwargs, self.loop)

    def _tidy(self, job: Job) -> None:
        try:
            tidy_connections()
        except BaseException:
            record = job.run.record
            logger.exception("task %s: its database connection could not be tidied", record.id, extra=log_extra(record))
