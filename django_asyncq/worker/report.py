"""Writes the outcomes of runs: all that are waiting, as one batch.

While a batch is written the next one grows, so under load batches become larger by themselves. A single outcome is
written at once. While several come at a time, a batch waits for more, longer each time, since a batch costs as much as
20 tasks. It does not wait when no outcome can follow. A task that runs for a while is marked, and written as RUNNING;
the others are written once, when they have finished.
"""

from __future__ import annotations

import contextvars
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, lifecycle
from ..broker import Broker, redis_clock
from ..core.guard import LongLivedThread, get_logger
from ..core.logs import log_extra
from ..core.payload import CLEARED
from ..core.run_log import RunLog
from ..exceptions import BrokerUnavailable, DatabaseNotSetUp, LeaseLost
from ..models import TaskRecord, TaskState
from ..storage import database_clock
from ..storage.connections import close_connections
from ..storage.errors import LONGEST_AGAIN_SECONDS, PAUSE_SECONDS, STORE_ERRORS, Faults, concerns_one_row
from ..storage.isolation import MOST_AT_ONCE, each_alone, set_aside, table_of
from ..storage.routing import return_connections, writing_database
from .job import Job, JobPhase, Outcome, OutcomeKind
from .marks import settle_marks
from .outcomes import (
    UnconnectedLog,
    announce,
    apply,
    changes_row,
    connect,
    fail_unrecorded,
    record_alone,
)
from .wakeup import Reason, Wakeup

# --- Measure the clocks of both stores with each beat, so that no run sends a statement to know the time.
#
# Not in an idle process; the first claim after that measures.

logger = get_logger("django_asyncq.worker")


class ClockBeat:
    """Called by the reporter, whose thread has a database connection and is on no task's way."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def tick(self) -> None:
        """Measure, if that is due. While a store is unreachable its last measurement is used."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + conf.current().beat_seconds
        for measure in (database_clock.measure, redis_clock.measure):
            try:
                measure()
            except Exception as error:  # noqa: BLE001 - whatever it is, outcomes must still be written
                connections.close_all()
                logger.debug("a clock could not be measured: %s", error)
        return_connections()


# --- What the reporter puts aside because another transaction, such as that of a request, has locked its row.

AGAIN_SECONDS = 0.25


class LockedRows:
    """Jobs to mark as running and outcomes to write, until their rows are free. Used by one thread."""

    def __init__(self) -> None:
        self.events: list[Job | Outcome] = []
        self._again_at = 0.0

    @property
    def has_outcomes(self) -> bool:
        """Whether an outcome is among them."""
        return any(isinstance(event, Outcome) for event in self.events)

    def holds(self, job: Job) -> bool:
        """Whether a job is among those to mark as running."""
        return any(event is job for event in self.events)

    def put(self, events: Sequence[Job | Outcome]) -> None:
        """Put events aside for AGAIN_SECONDS."""
        self.events += events
        self._again_at = time.monotonic() + AGAIN_SECONDS

    def take_due(self) -> list[Job | Outcome]:
        """Return what is tried again now."""
        if not self.events or time.monotonic() < self._again_at:
            return []
        found, self.events = self.events, []
        return found


# --- When the progress of a run is written: to Redis at most once a second, to its row every five.
#
# The body only puts the newest value into memory. The main thread looks once a second for values that are new, and
# the reporter writes them: never the thread of the body, whose transaction they are no part of.

LOOK_SECONDS = 1.0
ROW_SECONDS = 5.0
# An unreachable Redis may keep each attempt waiting, and outcomes wait behind it.
PROGRESS_PAUSE_SECONDS = 10.0


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
            self._redis_from = now + PROGRESS_PAUSE_SECONDS
            logger.debug("the progress of running tasks is not in Redis: %s", error, extra=_extra_of(jobs))
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


def _extra_of(jobs: Sequence[Job]) -> dict[str, object]:
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


# A job is to be written as RUNNING; a log is that of a run which had completed itself before it finished.
Event = Job | Outcome | NewProgress | RunLog
LARGEST_BATCH = 500
SHORTEST_WAIT_SECONDS = 0.005
LONGEST_WAIT_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 5.0
ACKNOWLEDGE_AGAIN_SECONDS = 0.5
GIVE_UP_SECONDS = 0.5


Found = TypeVar("Found")


class GaveUp(Exception):
    """The process must stop while the database is unreachable."""


class Reporter(LongLivedThread):
    """The thread of a worker process that changes rows when their runs have finished.

    Runs that complete within their own transaction are the exception: it gets them after the commit (`complete`).
    """

    def __init__(
        self,
        broker: Broker,
        worker_id: str,
        wakeup: Wakeup,
        quiet: threading.Event,
        *,
        on_void: Callable[[Sequence[lifecycle.Run]], object] | None = None,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        """wakeup: notified after each batch. quiet: set while no outcome can follow soon (`Capacity.quiet`).

        on_void: called with runs whose rows will refuse the outcomes.
        """
        super().__init__("reporter", self.report_until_closed, on_death=on_death)
        self.broker = broker
        self.worker_id = worker_id
        self.wakeup = wakeup
        self.quiet = quiet
        self._on_void = on_void
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.unwritten = 0  # outcomes that were reported and are not yet in the database; read by the main thread
        self.is_database_unreachable = False
        # Why nothing can be written until a person has acted; read by the main thread.
        self.not_set_up: DatabaseNotSetUp | None = None
        self._faults = Faults(logger, "outcomes wait for the database", over="outcomes are recorded again")
        self._wait_seconds = 0.0
        self._unconnected_log = UnconnectedLog()
        self._unrecorded: dict[Job, Outcome] = {}
        self._marking = threading.Lock()
        self._progress = ProgressWriter(broker, self._marking)
        self._unacknowledged: list[tuple[list[lifecycle.Run], list[lifecycle.Run]]] = []
        self._abandoned: set[Job] = set()
        self._locked = LockedRows()
        self._counter = threading.Lock()
        self._given_up = threading.Event()
        self._clock_beat = ClockBeat()
        # Whether the process has had no task for a while. Set by the main thread.
        self.is_idle = False

    # --- called by the slots

    def report(self, outcome: Outcome) -> None:
        """Have an outcome written."""
        with self._counter:
            self.unwritten += 1
        self.events.put(outcome)

    def report_log(self, log: RunLog) -> None:
        """Have the lines of a run written whose outcome was reported before it returned."""
        self.events.put(log)

    def leave_row(self, job: Job) -> None:
        """Leave the row of a job to its slot from now on; wait while it is being written as RUNNING.

        The slot may hold no lock of the database. Raises: LeaseLost if the job is being requeued.
        """
        with self._marking:
            if job in self._abandoned:
                raise LeaseLost(f"task {job.run.record.id}: it is being requeued")
            if job.phase is not JobPhase.REPORTED:
                job.phase = JobPhase.COMPLETING

    # --- called by the main thread, and by slots

    def mark(self, jobs: Iterable[Job]) -> None:
        """Have these jobs written as RUNNING; each is marked once."""
        for job in jobs:
            job.is_marked = True
            self.events.put(job)

    def show_progress(self, jobs: Sequence[Job]) -> None:
        """Have the progress of these jobs written while they run."""
        if jobs:
            self.events.put(NewProgress(list(jobs)))

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Ignore all that is still reported of these jobs: they are being requeued."""
        self._abandoned.update(jobs)

    def close(self, timeout_seconds: float) -> bool:
        """Write all that was reported, then stop; return whether that was done in time."""
        self.events.put(None)
        self.join(timeout_seconds)
        self._given_up.set()
        # It stops at once, unless the database keeps it waiting within a call.
        self.join(GIVE_UP_SECONDS)
        return not self.is_alive() and not self.unwritten

    def spill_outcomes(self) -> None:
        """Leave in Redis what could not be written. Called after `close`, when the thread has stopped or hangs."""
        with suppress(queue.Empty):
            while True:
                event = self.events.get_nowait()
                if isinstance(event, Outcome) and event.job not in self._abandoned:
                    self._unrecorded[event.job] = event
        # A run that was cut or got no connection is not spilled: the supervisor requeues what this process holds.
        outcomes = [
            outcome
            for job, outcome in self._unrecorded.copy().items()
            if job.phase is not JobPhase.COMPLETED
            and outcome.kind is OutcomeKind.ENDED
            # An outcome in Redis is that of one row. A batch runs again.
            and not job.run.record.is_batch
        ]
        if not outcomes:
            return
        for outcome in outcomes:
            if outcome.job.run.record.state == TaskState.RUNNING:
                apply(outcome)
        try:
            spilled = lifecycle.spill_outcomes(self.broker, self.worker_id, [outcome.job.run for outcome in outcomes])
        except BrokerUnavailable as error:
            text = "Redis is unreachable too; outcomes lost: %d; their tasks run again: %s"
            logger.error(text, len(outcomes), error, extra=_extra(outcomes))
            return
        why = "rows are locked by another transaction" if self._locked.events else "the database is unreachable"
        logger.warning("%s; outcomes spilled to Redis: %d of %d", why, spilled, len(outcomes), extra=_extra(outcomes))

    # --- the thread

    def report_until_closed(self) -> None:
        """Take what is waiting and write it, until closed; beside work, measure the clocks with each beat."""
        lifecycle.counter.begin_keeping()
        try:
            self._clock_beat.tick()
            while self._report(self.take_batch()):
                self.wakeup.notify(Reason.REPORTED)
                lifecycle.counter.write_when_due()
                if self.is_idle:
                    close_connections()
                else:
                    self._clock_beat.tick()
            while self._locked.has_outcomes and not self._given_up.wait(AGAIN_SECONDS):
                self._report([])
        except GaveUp as error:
            outcomes = list(self._unrecorded.copy().values())
            logger.warning("%d outcome%s not recorded: %s", *_counted(outcomes), error, extra=_extra(outcomes))
        finally:
            connections.close_all()
            lifecycle.counter.end_keeping()

    def take_batch(self) -> list[Event | None]:
        """Wait for the first event; return it with those that have come by then, or soon after while several come.

        Returns: an empty list when nothing has come, but an acknowledgement or a beat is due.
        """
        try:
            longest = ACKNOWLEDGE_AGAIN_SECONDS if self._unacknowledged else conf.current().beat_seconds
            found = [self.events.get(timeout=AGAIN_SECONDS if self._locked.events else longest)]
        except queue.Empty:
            return []
        if self._wait_seconds and self.events.qsize() < LARGEST_BATCH:
            self.quiet.wait(self._wait_seconds)
        with suppress(queue.Empty):
            while len(found) < LARGEST_BATCH:
                found.append(self.events.get_nowait())
        longer = min(max(2 * self._wait_seconds, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
        self._wait_seconds = longer if len(found) > 1 else 0.0
        return found

    def _report(self, events: Sequence[Event | None]) -> bool:
        """Write one batch; return whether to go on."""
        events = [*self._locked.take_due(), *events]
        outcomes = [event for event in events if isinstance(event, Outcome)]
        # Mostly none.
        others = [event for event in events if not isinstance(event, Outcome)] if len(outcomes) < len(events) else []
        reported = [outcome for outcome in outcomes if outcome.job not in self._abandoned]
        self._unrecorded |= {outcome.job: outcome for outcome in reported}
        try:
            if reported:
                self._write(reported)
            self._mark_running([event for event in others if isinstance(event, Job)])
            self._acknowledge_again()
            if logs := [event for event in others if isinstance(event, RunLog)]:
                self._write_until_done(lambda: lifecycle.record_log_lines(logs))
            for event in others:
                if isinstance(event, NewProgress):
                    self._progress.write(event.jobs, is_abandoned=self._abandoned.__contains__)
        except GaveUp:
            raise
        except Exception:
            text = "%d outcome%s could not be written as a batch; each is written alone"
            logger.exception(text, *_counted(reported), extra=_extra(reported))
            for outcome in reported:
                self._write_alone(outcome)
        finally:
            return_connections()
        with self._counter:
            self.unwritten -= len(outcomes)
        return None not in others

    def _wait_for_rows(self, events: Sequence[Job | Outcome]) -> None:
        """Put aside what cannot be written now, because another transaction has locked its row."""
        with self._counter:
            self.unwritten += sum(isinstance(event, Outcome) for event in events)
        self._locked.put(events)

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        """Rows, then Redis, then signals."""
        self._look_up_uncertain(outcomes)
        for outcome in outcomes:
            run = outcome.job.run
            if run.record.state != TaskState.RUNNING:
                continue  # applied before, in a batch that failed
            if outcome.exception is None and run.record.batch_size is None:
                lifecycle.succeed(run, outcome.value, outcome.finished_at)
            else:
                contextvars.copy_context().run(apply, outcome)  # it calls the task's backoff
        self._unconnected_log.note(self.worker_id, outcomes)
        ended = OutcomeKind.ENDED
        open_runs = [
            outcome.job.run
            for outcome in outcomes
            if (outcome.kind is ended and outcome.job.phase is JobPhase.REPORTED) or changes_row(outcome)
        ]
        lost: list[lifecycle.Run] = []
        try:
            if open_runs:
                lost, locked = self._write_until_done(lambda: lifecycle.record_unlocked(open_runs))
                if locked:
                    self._wait_for_rows([outcome for outcome in outcomes if outcome.job.run in locked])
                    outcomes = [outcome for outcome in outcomes if outcome.job.run not in locked]
        except STORE_ERRORS as error:
            if not concerns_one_row(error):
                raise
            # One of them cannot be stored: the others must not suffer for it.
            lost = [run for run in open_runs if self._record_alone(run)]
        if lost:
            # A commit without an answer may have succeeded after the look-up; the write then waited for it.
            self._look_up_uncertain([outcome for outcome in outcomes if outcome.job.run in lost])
        runs = [outcome.job.run for outcome in outcomes]
        if logs := [run.log for run in runs if run.log is not None and run not in lost]:
            self._write_until_done(lambda: lifecycle.record_log_lines(logs))
        for outcome in outcomes:
            self._unrecorded.pop(outcome.job, None)
        self._acknowledge(runs, lost)
        announce([outcome for outcome in outcomes if outcome.job.run not in lost])

    def _look_up_uncertain(self, outcomes: Sequence[Outcome]) -> None:
        """Read from its row whether a commit that gave no answer was one."""
        uncertain = {outcome.job.uncertain: outcome.job for outcome in outcomes if outcome.job.uncertain}
        if uncertain:
            for run in self._write_until_done(lambda: lifecycle.already_recorded(list(uncertain))):
                uncertain[run].run, uncertain[run].phase = run, JobPhase.COMPLETED

    def _write_alone(self, outcome: Outcome) -> None:
        """Write one outcome after its batch failed; in the last resort as a failure that says so."""
        run = outcome.job.run
        try:
            self._write([outcome])
        except GaveUp:
            raise
        except Exception as error:
            logger.exception("task %s: its outcome cannot be recorded", run.record.id, extra=log_extra(run.record))
            fail_unrecorded(outcome, error)
            self._write_in_the_end(run)
            self._unrecorded.pop(outcome.job, None)

    def _write_in_the_end(self, run: lifecycle.Run) -> None:
        """Write a failed run; if the row refuses every write, set it aside, and remove the task's entry.

        A sweep finds the task when the row has been corrected.
        """
        try:
            lost = self._write_until_done(lambda: lifecycle.record_runs([run]))
        except GaveUp:
            raise
        except Exception as error:  # noqa: BLE001 - `set_aside` logs it
            id = str(run.record.id)
            set_aside.add(table_of(TaskRecord), [(id, error)])
            # If Redis is unreachable, the entry is removed by the worker that claims it next.
            with suppress(BrokerUnavailable):
                self.broker.remove(run.record.queue_name, [run.record.redis_id], lifecycle.named_rows([run.record]))
            return
        self._acknowledge([run], lost)

    def _record_alone(self, run: lifecycle.Run) -> bool:
        """Write one run, without its result if the database refuses that; return whether the run lost its lease."""
        return record_alone(run, lambda: self._write_until_done(lambda: lifecycle.record_runs([run])))

    def _mark_running(self, jobs: Sequence[Job]) -> None:
        """Write RUNNING for those that still run, unless the row is left to their slot; let slots that wait go on."""
        for start in range(0, len(jobs), MOST_AT_ONCE):
            part = jobs[start : start + MOST_AT_ONCE]
            lost: list[lifecycle.Run] = [job.run for job in part]
            try:
                lost = self._write_until_done(partial(self._mark, part))
            finally:
                # What was put aside may still get its mark.
                settle_marks([job for job in part if not self._locked.holds(job)], lost)
            if lost and self._on_void is not None:
                # The request to stop may have got lost, with the process that made it or with Redis.
                self._on_void(lost)

    def _mark(self, jobs: Sequence[Job]) -> list[lifecycle.Run]:
        """Try it once. The reporter waits for a connection without the lock, because a slot may hold the last one."""
        connect()
        with self._marking:
            unwritten = [job for job in jobs if job.phase is JobPhase.RUNNING and not job.run.written]
            running = [job for job in unwritten if job not in self._abandoned]
            return each_alone(
                "marking of tasks as running",
                running,
                self._mark_unlocked,
                key=lambda job: job.run.record.id,
                database=writing_database(TaskRecord),
            )

    def _mark_unlocked(self, jobs: Sequence[Job]) -> list[lifecycle.Run]:
        lost = lifecycle.mark_running([job.run for job in jobs], patient=False)
        if locked := [job for job in jobs if not job.run.written]:
            self._wait_for_rows(locked)
        return lost

    def _acknowledge(self, runs: list[lifecycle.Run], lost: list[lifecycle.Run]) -> None:
        try:
            self._acknowledge_and_settle(runs, lost)
        except BrokerUnavailable as error:
            logger.warning(
                "%d outcome%s recorded, but not acknowledged in Redis yet: %s",
                *_counted(runs),
                error,
                extra=_extra(runs),
            )
            self._unacknowledged.append((runs, lost))

    def _acknowledge_again(self) -> None:
        while self._unacknowledged:
            runs, lost = self._unacknowledged[0]
            try:
                self._acknowledge_and_settle(runs, lost)
            except BrokerUnavailable:
                return
            self._unacknowledged.pop(0)

    def _acknowledge_and_settle(self, runs: list[lifecycle.Run], lost: list[lifecycle.Run]) -> None:
        lifecycle.acknowledge(self.broker, self.worker_id, runs, lost)
        if lost:
            self._write_until_done(lambda: lifecycle.settle_lost(self.broker, lost))

    def _write_until_done(self, write: Callable[[], Found]) -> Found:
        """Repeat a write until the database accepts it; the leases are kept, so no task runs twice meanwhile.

        Raises: django.db.Error for the values of a row; GaveUp once the process has given up.
        """
        failures = 0
        while True:
            try:
                found = write()
                self.is_database_unreachable = False
                self._faults.clear()
                return found
            except STORE_ERRORS as error:
                if concerns_one_row(error):
                    raise
                connections.close_all()
                failures += 1
                if self._given_up.is_set():
                    raise GaveUp(str(error)) from error
                # The first failure may be that of a connection that had died.
                self.is_database_unreachable = failures > 1
                at_most = self._faults.note(error)
                # The main thread ends the process; until then the outcomes are kept, and then spilled.
                self.not_set_up = self._faults.not_set_up
                self._given_up.wait(_pause_seconds(failures, at_once=at_most < PAUSE_SECONDS))


def _pause_seconds(failures: int, *, at_once: bool) -> float:
    """Return how long to wait before a write is repeated. at_once: it met a lock or a deadlock."""
    if failures == 1 and not at_once:
        return 0.0  # for a connection that had died
    longest = LONGEST_AGAIN_SECONDS if at_once else min(LONGEST_PAUSE_SECONDS, 0.1 * 2 ** min(failures, 10))
    return random.uniform(longest / 20, longest)  # noqa: S311


def _counted(found: Sequence[object]) -> tuple[int, str]:
    """Return a number of things, and the ending of their noun."""
    return len(found), pluralize(len(found))


def _extra(found: Sequence[Outcome | lifecycle.Run]) -> dict[str, object]:
    """Return the `extra` of a line about outcomes or runs."""
    return log_extra(*((each.job.run if isinstance(each, Outcome) else each).record for each in found))
