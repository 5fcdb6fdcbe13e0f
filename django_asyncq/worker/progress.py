"""When the progress of a run is written: to Redis at most once a second, to its row every five.

The body only puts the newest value into memory. The main thread looks once a second for values that are new, and the
reporter writes them: never the thread of the body, whose transaction they are no part of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from django.db import connections

from .. import lifecycle
from ..broker import Broker
from ..definitions.progress import CLEARED
from ..exceptions import BrokerUnavailable
from ..faults import STORE_ERRORS, Faults
from ..guard import get_logger
from ..logs import log_extra
from .execute.job import Job, JobPhase
from .unconnected import connect

logger = get_logger("django_asyncq.worker")

LOOK_SECONDS = 1.0
ROW_SECONDS = 5.0
# An unreachable Redis may keep each attempt waiting, and outcomes wait behind it.
PAUSE_SECONDS = 10.0


class NewProgress(NamedTuple):
    """Jobs that have reported progress since the last look: an event for the reporter."""

    jobs: list[Job]


class ProgressLook:
    """Looks for new progress; called by the main thread."""

    def __init__(self) -> None:
        self._look_at = 0.0

    def new(self, running: Iterable[Job], now: float) -> list[Job]:
        """Return the jobs with progress that is not written yet; none before the next look is due.

        now: monotonic seconds.
        """
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        return [job for job in running if _is_unnoted(job) or _is_unrecorded(job, now)]


class ProgressWriter:
    """Writes what is new; called by the reporter. marking: held while a row is written that its slot might write.

    A failure is no more than a value that is shown late: the next look finds it, or the outcome brings it.
    """

    def __init__(self, broker: Broker, marking: AbstractContextManager[object]) -> None:
        self.broker = broker
        self._marking = marking
        self._redis_from = 0.0
        self._faults = Faults(
            logger,
            "the progress of running tasks is not in their rows yet",
            over="the progress of running tasks is in their rows again",
        )

    def write(self, jobs: Sequence[Job], *, is_abandoned: Callable[[Job], bool]) -> None:
        """Write the progress of those jobs that still run. Raises: nothing of the stores."""
        now = time.monotonic()
        running = [job for job in jobs if job.phase in (JobPhase.RUNNING, JobPhase.COMPLETING)]
        self._note([job for job in running if _is_unnoted(job) and not is_abandoned(job)], now)
        self._record([job for job in running if _is_unrecorded(job, now)], now, is_abandoned)

    def _note(self, jobs: Sequence[Job], now: float) -> None:
        """Write to Redis."""
        if not jobs or now < self._redis_from:
            return
        # Taken before they are read to be sent, so a newer value is found by the next look.
        values = [job.run.record.progress for job in jobs]
        try:
            lifecycle.note_progress(self.broker, [job.run for job in jobs])
        except BrokerUnavailable as error:
            self._redis_from = now + PAUSE_SECONDS
            logger.debug("the progress of running tasks is not in Redis: %s", error, extra=_extra(jobs))
            return
        for job, value in zip(jobs, values, strict=True):
            job.progress_noted = value

    def _record(self, jobs: Sequence[Job], now: float, is_abandoned: Callable[[Job], bool]) -> None:
        """Write to the rows, except those that their slot writes: within its transaction they would conflict."""
        if not jobs:
            return
        try:
            # Without the lock, because a slot may hold the last connection.
            connect()
            with self._marking:
                free = [job for job in jobs if job.phase is JobPhase.RUNNING and job.run.written]
                free = [job for job in free if not is_abandoned(job)]
                values = [job.run.record.progress for job in free]
                if free:
                    lifecycle.record_progress([job.run for job in free])
        except STORE_ERRORS as error:
            connections.close_all()
            self._faults.note(error, quiet_first=True)
            return
        self._faults.clear()
        for job, value in zip(free, values, strict=True):
            job.progress_recorded, job.progress_recorded_at = value, now


def _extra(jobs: Sequence[Job]) -> dict[str, object]:
    return log_extra(*(job.run.record for job in jobs))


def _has_progress(job: Job) -> bool:
    """Whether the run has reported progress. Before it has begun, the row has that of an earlier run."""
    progress = job.run.record.progress
    return job.run.begun and progress is not None and progress is not CLEARED


def _is_unnoted(job: Job) -> bool:
    return _has_progress(job) and job.run.record.progress is not job.progress_noted


def _is_unrecorded(job: Job, now: float) -> bool:
    is_due = now - job.progress_recorded_at >= ROW_SECONDS
    return is_due and _has_progress(job) and job.run.record.progress is not job.progress_recorded
