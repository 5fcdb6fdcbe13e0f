"""Cancel runs of this worker process, when their tasks were cancelled elsewhere; note where those are that are late."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Sequence
from types import FrameType, TracebackType

from .. import conf
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..lifecycle import Run
from .call import call
from .job import Job, JobPhase, Jobs, StopReason
from .slot_table import SlotTable

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
        """Cancel the runs of these tasks. ids: requests as of `broker.task_entries`; any other texts are ignored."""
        fences: dict[str, int] = {}
        for text in ids:
            id, _, fence = text.rpartition(" ")
            if fence.isdecimal():
                fences[id] = max(int(fence), fences.get(id, 0))
        wanted = set(ids)
        for job in self.jobs.all:
            id, run = job.run.lease.id, job.run
            # A run that has begun has another fence in its row already.
            read = run.read_fence if run.begun else run.record.fence
            if id in wanted or read < fences.get(id, 0):
                self._cancel(job, "it was cancelled, or replaced")

    def stop_void(self, runs: Sequence[Run]) -> None:
        """Stop runs whose outcome the row will refuse. The next run of such a task may be in this process already."""
        for job in self.jobs.all:
            if job.run in runs:
                self._cancel(job, "it was closed, replaced or given to another worker")

    def note_late(self, jobs: Iterable[Job], now: float) -> None:
        """Note where `def` tasks are that have just passed their timeout or soft timeout. Called by the main thread.

        Nothing interrupts a thread, so its error comes later and from elsewhere. now: monotonic seconds.
        """
        for job in jobs:
            if now > job.overdue_at:
                if job.late is None and (stack := self._stack_of(job)) is not None:
                    job.late = job.timed_out().with_traceback(stack)
            elif (
                job.run.record.soft_timeout_seconds is not None
                and job.softly_late is None
                and job.has_run_for(job.run.record.soft_timeout_seconds, now)
                and (stack := self._stack_of(job)) is not None
            ):
                job.softly_late = job.soft_timed_out().with_traceback(stack)

    def _stack_of(self, job: Job) -> TracebackType | None:
        """Return where the function of a job is in its thread, as a traceback; None if none is called there now."""
        # What is isolated or awaited is interrupted there, and its error says where.
        if job.task.isolated or job.interrupt is not None:
            return None
        id = str(job.run.record.id)
        thread = next((each.thread for each in self.slot_table.running() if each.id == id), 0)
        frame: FrameType | None = sys._current_frames().get(thread)
        stack: TracebackType | None = None
        while frame is not None and frame.f_code is not call.__code__:
            stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno or frame.f_code.co_firstlineno)
            frame = frame.f_back
        return None if frame is None else stack

    def _cancel(self, job: Job, why: str) -> None:
        record = job.run.record
        # What has succeeded is over, though its function may go on; another process has been told of what it has.
        if job.phase in (JobPhase.COMPLETED, JobPhase.ISOLATED) or not job.ask_to_stop(StopReason.CANCELLED):
            return
        logger.info("task %s: %s, and is asked to stop", record.id, why, extra=log_extra(record))
        # One that has no slot yet looks at the flag when it begins.
        if job.slot >= 0:
            deadline = time.monotonic() + self.grace_seconds
            self.slot_table.cancel(job.slot, record.id, deadline)
