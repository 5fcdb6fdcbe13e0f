"""Writing down what happened: all outcomes that are waiting, as one group.

While a group is written the next one gathers, so under load the groups grow by themselves. A lone outcome is written
at once; while several come at a time, groups wait for more, longer each time: a group costs as much as 20 tasks. None
waits when none are to follow.
A task that the process has marked, because it goes on for a while, is written as running; others once, at their end.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, connections
from django.utils import timezone

from .. import compat, failpoints, lifecycle
from ..broker import Broker
from ..exceptions import BrokerUnavailable, LeaseLost, RetryRequested
from ..models import TaskState
from ..results import next_attempt_at, result_of, sender_of
from .execute.job import Job, Outcome

logger = logging.getLogger("django_asyncq.worker")

LARGEST_GROUP = 500
SHORTEST_GATHER_SECONDS = 0.005
LONGEST_GATHER_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 5.0
ACKNOWLEDGE_AGAIN_SECONDS = 0.5
GIVE_UP_SECONDS = 0.5


class GaveUp(Exception):
    """The process must end while the database is away."""


class Reporter(threading.Thread):
    """The one thread of a worker process that changes records at their end and writes them.

    But for runs that end within their own transaction: it hears of those when they are committed (see `completion`).
    """

    def __init__(
        self, broker: Broker, worker_id: str, on_written: Callable[[], None], is_more_to_come: Callable[[], bool]
    ) -> None:
        """on_written: called after each group. is_more_to_come: whether outcomes follow soon."""
        super().__init__(name="reporter", daemon=True)
        self.broker = broker
        self.worker_id = worker_id
        self.on_written = on_written
        self.is_more_to_come = is_more_to_come
        self.events: queue.SimpleQueue[Job | Outcome | None] = queue.SimpleQueue()
        self.unwritten = 0  # outcomes that were reported and are not yet in the database; read by the process
        self.database_is_away = False
        self._gather_seconds = 0.0
        self._unrecorded: dict[Job, Outcome] = {}
        self._marking = threading.Lock()
        self._unacknowledged: list[tuple[list[lifecycle.Run], list[lifecycle.Run]]] = []
        self._abandoned: set[Job] = set()
        self._counter = threading.Lock()
        self._last_has_ended = threading.Event()
        self._given_up = threading.Event()

    # --- called from the slots

    def ended(self, outcome: Outcome) -> None:
        """Tell how a job ended."""
        with self._counter:
            self.unwritten += 1
        self.events.put(outcome)

    def last_has_ended(self) -> None:
        """Tell that no outcome follows soon: what waits for more is written now."""
        self._last_has_ended.set()

    def withhold(self, job: Job) -> None:
        """Leave the row of a job to its slot from now on; waits while it is being marked as running.

        The slot may hold no lock of the database. Raises: LeaseLost when the job is being handed back.
        """
        with self._marking:
            if job in self._abandoned:
                raise LeaseLost(f"task {job.run.record.id}: it is being handed back")
            job.is_withheld = True

    # --- called from the process

    def mark(self, jobs: Iterable[Job]) -> None:
        """Write that these jobs run; each is marked once."""
        for job in jobs:
            job.is_marked = True
            self.events.put(job)

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Ignore what is still to be heard of these jobs: they are being handed back."""
        self._abandoned.update(jobs)

    def close(self, timeout_seconds: float) -> bool:
        """Write all that was reported, then end; return whether that was done in time."""
        self.events.put(None)
        self.join(timeout_seconds)
        self._given_up.set()
        # It ends at once, unless the database keeps it waiting within a call.
        self.join(GIVE_UP_SECONDS)
        return not self.is_alive() and not self.unwritten

    def spill_outcomes(self) -> None:
        """Leave with Redis what could not be written. Called after `close`, when the thread is over or stuck."""
        with suppress(queue.Empty):
            while True:
                event = self.events.get_nowait()
                if isinstance(event, Outcome) and event.job not in self._abandoned:
                    self._unrecorded[event.job] = event
        outcomes = [outcome for job, outcome in self._unrecorded.copy().items() if not job.is_completed]
        if not outcomes:
            return
        for outcome in outcomes:
            if outcome.job.run.record.state == TaskState.RUNNING:
                _apply(outcome)
        try:
            taken = lifecycle.spill_outcomes(self.broker, self.worker_id, [outcome.job.run for outcome in outcomes])
        except BrokerUnavailable as error:
            logger.error("%d outcomes are lost, Redis is away too; their tasks run again: %s", len(outcomes), error)
            return
        logger.warning("the database is away: %d of %d outcomes were left in Redis", taken, len(outcomes))

    # --- the thread

    def run(self) -> None:
        """Take what is waiting, write it, until closed."""
        try:
            while self._report(self._gather()):
                self.on_written()
        except GaveUp as error:
            logger.warning("%d outcomes are not recorded: %s", len(self._unrecorded), error)
        finally:
            connections.close_all()

    def _gather(self) -> list[Job | Outcome | None]:
        """Wait for the first event, take those that are there with it."""
        try:
            found = [self.events.get(timeout=ACKNOWLEDGE_AGAIN_SECONDS if self._unacknowledged else None)]
        except queue.Empty:
            return []
        if self._gather_seconds and self.events.qsize() < LARGEST_GROUP:
            self._wait_for_more()
        while len(found) < LARGEST_GROUP:
            try:
                found.append(self.events.get_nowait())
            except queue.Empty:
                break
        longer = min(max(2 * self._gather_seconds, SHORTEST_GATHER_SECONDS), LONGEST_GATHER_SECONDS)
        self._gather_seconds = longer if len(found) > 1 else 0.0
        return found

    def _wait_for_more(self) -> None:
        # Cleared before the look: the last that ends in between is seen, or told.
        self._last_has_ended.clear()
        if self.is_more_to_come():
            self._last_has_ended.wait(self._gather_seconds)

    def _report(self, events: Sequence[Job | Outcome | None]) -> bool:
        """Write one group; return whether to go on."""
        marked = [event for event in events if isinstance(event, Job)]
        outcomes = [event for event in events if isinstance(event, Outcome)]
        heard = [outcome for outcome in outcomes if outcome.job not in self._abandoned]
        self._unrecorded.update((outcome.job, outcome) for outcome in heard)
        try:
            if heard:
                self._write(heard)
            self._mark_running(marked)
            self._acknowledge_again()
        except GaveUp:
            raise
        except Exception:
            logger.exception("%d outcomes could not be reported; each is tried alone", len(heard))
            for outcome in heard:
                self._write_alone(outcome)
        with self._counter:
            self.unwritten -= len(outcomes)
        return None not in events

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        """Rows, then Redis, then signals."""
        self._look_at_doubtful(outcomes)
        for outcome in outcomes:
            if outcome.job.run.record.state == TaskState.RUNNING:  # not yet applied, in a group that failed
                _apply(outcome)
        runs = [outcome.job.run for outcome in outcomes]
        open_runs = [outcome.job.run for outcome in outcomes if not outcome.job.is_completed]
        try:
            lost = self._insist(lambda: lifecycle.record_runs(open_runs)) if open_runs else []
        except DatabaseError:
            # One of them cannot be stored: the others must not suffer for it.
            lost = [run for run in open_runs if self._record_alone(run)]
        for outcome in outcomes:
            self._unrecorded.pop(outcome.job, None)
        failpoints.reach("report.row_written")
        try:
            lifecycle.acknowledge(self.broker, self.worker_id, runs, lost)
        except BrokerUnavailable as error:
            logger.warning("%d tasks recorded, Redis not told yet: %s", len(runs), error)
            self._unacknowledged.append((runs, lost))
        failpoints.reach("report.acknowledged")
        kept = [outcome for outcome in outcomes if outcome.job.run not in lost]
        for state in (TaskState.SUCCEEDED, TaskState.FAILED):
            records = [outcome.job.run.record for outcome in kept if outcome.job.run.record.state == state]
            lifecycle.announce(records, TaskState.RUNNING, state)
        for outcome in kept:
            _send_finished(outcome)

    def _look_at_doubtful(self, outcomes: Sequence[Outcome]) -> None:
        """Where a commit gave no answer, the row says whether it was one."""
        doubtful = {outcome.job.doubtful: outcome.job for outcome in outcomes if outcome.job.doubtful}
        if doubtful:
            for run in self._insist(lambda: lifecycle.already_recorded(list(doubtful))):
                doubtful[run].run, doubtful[run].is_completed = run, True

    def _write_alone(self, outcome: Outcome) -> None:
        """Write one outcome after its group failed; in the last resort as a failure that says so."""
        run = outcome.job.run
        try:
            self._write([outcome])
        except GaveUp:
            raise
        except Exception as error:
            logger.exception("task %s: its outcome cannot be recorded", run.record.id)
            lifecycle.fail(run, error, "its outcome could not be recorded", outcome.ended_at, retry_at=None)
            lifecycle.acknowledge(self.broker, self.worker_id, [run], lifecycle.record_runs([run]))

    def _record_alone(self, run: lifecycle.Run) -> bool:
        """Write one run; without its result if the database refuses that. Return whether the run lost its lease."""
        try:
            return bool(self._insist(lambda: lifecycle.record_runs([run])))
        except DatabaseError as error:
            logger.exception("task %s: the database refuses its result", run.record.id)
            lifecycle.strip_result(run, str(error))
            return bool(self._insist(lambda: lifecycle.record_runs([run])))

    def _mark_running(self, jobs: Sequence[Job]) -> None:
        """Write those as running that are not over by now."""
        with self._marking:
            theirs = [job for job in jobs if job not in self._abandoned and not (job.is_withheld or job.is_over)]
            if theirs:
                self._insist(lambda: lifecycle.mark_running([job.run for job in theirs]))

    def _acknowledge_again(self) -> None:
        while self._unacknowledged:
            runs, lost = self._unacknowledged[0]
            try:
                lifecycle.acknowledge(self.broker, self.worker_id, runs, lost)
            except BrokerUnavailable:
                return
            self._unacknowledged.pop(0)

    def _insist(self, write: Callable[[], list[lifecycle.Run]]) -> list[lifecycle.Run]:
        """Repeat a write until the database takes it: the leases stay, so nothing runs twice meanwhile.

        Raises: django.db.Error for what will not pass by waiting; GaveUp once the process has given up waiting.
        """
        failures = 0
        while True:
            try:
                found = write()
                self.database_is_away = False
                return found
            except (OperationalError, InterfaceError) as error:
                connections.close_all()
                failures += 1
                if self._given_up.is_set():
                    raise GaveUp(str(error)) from error
                # The first failure may be that of a connection that had died.
                self.database_is_away = failures > 1
                if failures == 1:
                    logger.warning("outcomes wait for the database: %s", error)
                # The first repetition is for a connection that had died; later ones spread out.
                pause = 0.0 if failures == 1 else random.uniform(0.05, min(LONGEST_PAUSE_SECONDS, 0.1 * 2**failures))  # noqa: S311
                self._given_up.wait(pause)


def _apply(outcome: Outcome) -> None:
    """Change the record in memory as the outcome says."""
    job, run, exception = outcome.job, outcome.job.run, outcome.exception
    if exception is None:
        lifecycle.succeed(run, outcome.value, outcome.ended_at)
        return
    try:
        retry_at = next_attempt_at(job.task, run.record, exception, timezone.now())
    except Exception as error:
        logger.exception("task %s: its backoff failed; it is not tried again", run.record.id)
        error.__context__ = exception
        exception, retry_at = error, None
    counted = not isinstance(exception, RetryRequested) or exception.counted
    lifecycle.fail(run, exception, _format(exception), outcome.ended_at, retry_at=retry_at, counted=counted)
    if counted and not isinstance(exception, LeaseLost):
        _log_failure(run, exception)


def _log_failure(run: lifecycle.Run, exception: BaseException) -> None:
    """Say in one line what failed and what comes next; the traceback is on the row."""
    record = run.record
    level = logging.ERROR if record.retry_at is None else logging.WARNING
    then = "it is not tried again" if record.retry_at is None else f"next try at {record.retry_at:%Y-%m-%dT%H:%M:%SZ}"
    logger.log(
        level,
        "task %s %s: attempt %d of %d failed with %s; %s",
        record.id,
        record.name,
        record.attempt,
        record.max_attempts,
        type(exception).__qualname__,
        then,
    )


def _format(exception: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(exception))
    except Exception as error:  # noqa: BLE001 - a user's exception may break the formatting in any way
        return f"<the traceback could not be made: {error!r}>"


def _send_finished(outcome: Outcome) -> None:
    """Send Django's `task_finished`, once, at the end; inside `except`, where error monitors look."""
    record = outcome.job.run.record
    if not record.is_final:
        return
    sender = sender_of(outcome.job.task.backend)
    if outcome.exception is None or outcome.job.is_completed:
        compat.task_finished.send_robust(sender, task_result=result_of(record))
        return
    try:
        raise outcome.exception
    except BaseException:  # noqa: BLE001 - raised only to be looked at
        compat.task_finished.send_robust(sender, task_result=result_of(record))
