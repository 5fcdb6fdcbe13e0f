"""Cancel runs of this worker process, when their tasks were cancelled elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection

from ... import conf
from ...guard import get_logger
from ...logs import log_extra
from ..slot_table import SlotTable
from .job import Job, JobPhase, StopReason
from .jobs import Jobs

logger = get_logger("django_asyncq.worker")


class RunStopper:
    """Asks runs to stop for good. The listener, the main thread and the reporter call it, at the same time.

    A function that has not stopped after the grace period keeps its slot, as one that ignores its timeout, and the
    supervisor replaces the process.
    """

    def __init__(self, jobs: Jobs, slot_table: SlotTable) -> None:
        self.jobs = jobs
        self.slot_table = slot_table
        self.grace_seconds = conf.current().timeout_grace_seconds

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel the runs of these tasks. ids: any texts; those that this process does not hold are ignored."""
        self._stop(ids, "it was cancelled")

    def stop_void(self, ids: Collection[str]) -> None:
        """Do the same with runs whose outcome the row will refuse."""
        self._stop(ids, "it was closed, replaced or given to another worker")

    def _stop(self, ids: Collection[str], why: str) -> None:
        wanted = set(ids)
        for job in self.jobs.all:
            if job.run.lease.id in wanted:
                self._cancel(job, why)

    def _cancel(self, job: Job, why: str) -> None:
        record = job.run.record
        # What has succeeded is over, though its function may go on.
        if job.phase is JobPhase.COMPLETED or not job.ask_to_stop(StopReason.CANCELLED):
            return
        logger.info("task %s: %s, and is asked to stop", record.id, why, extra=log_extra(record))
        # One that has no slot yet looks at the flag when it begins.
        if job.slot >= 0:
            deadline = time.monotonic() + self.grace_seconds + job.margin_seconds
            self.slot_table.cancel(job.slot, record.id, deadline)
