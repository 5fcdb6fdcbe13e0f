"""Writes the outcomes of runs: all that are waiting, as one batch.

While a batch is written the next one grows, so under load batches become larger by themselves. A single outcome is
written at once. While several come at a time, a batch waits for more, longer each time, since a batch costs as much as
20 tasks. It does not wait when no outcome can follow. A task that runs for a while is marked, and written as RUNNING;
the others are written once, when they have finished.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, failpoints, lifecycle
from ..broker import Broker
from ..exceptions import BrokerUnavailable, DatabaseNotSetUp, LeaseLost
from ..faults import LONGEST_AGAIN_SECONDS, PAUSE_SECONDS, STORE_ERRORS, Faults, concerns_one_row
from ..guard import get_logger
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..storage.isolation import MOST_AT_ONCE, each_alone, set_aside, table_of
from ..storage.pooling import return_connections
from ..storage.routing import writing_database
from ..threads import LongLivedThread
from .clock_beat import ClockBeat
from .execute.job import Cut, Job, JobPhase, LaterLines, NotStarted, Outcome, Unconnected
from .execute.marking import settle_marks
from .execute.outcomes import announce, apply, fail_unrecorded, note_recorded, record_alone, record_logs
from .locked_rows import AGAIN_SECONDS, LockedRows
from .progress import NewProgress, ProgressWriter
from .unconnected import UnconnectedLog, changes_row, connect
from .wakeup import Reason, Wakeup

logger = get_logger("django_asyncq.worker")

# A job is to be written as RUNNING.
Event = Job | Outcome | NewProgress | LaterLines
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

    Runs that complete within their own transaction are the exception: it gets them after the commit (`completion`).
    """

    def __init__(
        self,
        broker: Broker,
        worker_id: str,
        wakeup: Wakeup,
        quiet: threading.Event,
        *,
        on_void: Callable[[set[str]], object] | None = None,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        """wakeup: notified after each batch. quiet: set while no outcome can follow soon (`Capacity.quiet`).

        on_void: called with the ids of tasks that run although their rows will refuse the outcomes.
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

    # --- called by the slots

    def report(self, outcome: Outcome) -> None:
        """Have an outcome written."""
        with self._counter:
            self.unwritten += 1
        self.events.put(outcome)

    def report_log(self, job: Job) -> None:
        """Have the lines of a run written whose outcome was reported before it returned."""
        self.events.put(LaterLines(job))

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
            and not isinstance(outcome, (Cut, NotStarted, Unconnected))
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
        """Take what is waiting and write it, until closed; with each beat, measure the clocks of both stores."""
        try:
            self._clock_beat.tick()
            while self._report(self.take_batch()):
                self.wakeup.notify(Reason.REPORTED)
                self._clock_beat.tick()
            while self._locked.has_outcomes and not self._given_up.wait(AGAIN_SECONDS):
                self._report([])
        except GaveUp as error:
            outcomes = list(self._unrecorded.copy().values())
            logger.warning("%d outcome%s not recorded: %s", *_counted(outcomes), error, extra=_extra(outcomes))
        finally:
            connections.close_all()

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
        marked = [event for event in events if isinstance(event, Job)]
        outcomes = [event for event in events if isinstance(event, Outcome)]
        reported = [outcome for outcome in outcomes if outcome.job not in self._abandoned]
        self._unrecorded.update((outcome.job, outcome) for outcome in reported)
        try:
            if reported:
                self._write(reported)
            self._mark_running(marked)
            self._acknowledge_again()
            self._record_logs([event.job for event in events if isinstance(event, LaterLines)])
            for event in events:
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
        return None not in events

    def _wait_for_rows(self, events: Sequence[Job | Outcome]) -> None:
        """Put aside what cannot be written now, because another transaction has locked its row."""
        with self._counter:
            self.unwritten += sum(isinstance(event, Outcome) for event in events)
        self._locked.put(events)

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        """Rows, then Redis, then signals."""
        self._look_up_uncertain(outcomes)
        for outcome in outcomes:
            if outcome.job.run.record.state == TaskState.RUNNING:  # not yet applied, in a batch that failed
                apply(outcome)
        self._unconnected_log.note(self.worker_id, outcomes)
        open_runs = [outcome.job.run for outcome in outcomes if changes_row(outcome)]
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
        self._record_logs([outcome.job for outcome in outcomes if outcome.job.run not in lost])
        for outcome in outcomes:
            self._unrecorded.pop(outcome.job, None)
        note_recorded()
        self._acknowledge(runs, lost)
        failpoints.reach("report.acknowledged")
        announce([outcome for outcome in outcomes if outcome.job.run not in lost])

    def _record_logs(self, jobs: Iterable[Job]) -> None:
        """Store the lines that these runs have logged, if their tasks keep any."""
        kept = [job for job in jobs if job.log is not None]

        def write() -> list[lifecycle.Run]:
            record_logs(kept)
            return []

        if kept:
            self._write_until_done(write)

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
                self._on_void({run.lease.id for run in lost})

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
