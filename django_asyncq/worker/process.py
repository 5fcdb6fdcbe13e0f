"""A worker process from start to end: fetch while there is room, look after what runs, stop in order.

Started by the supervisor in a fresh interpreter. It never renews a lease: a task that holds the interpreter for a
minute must not look dead.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections

from .. import conf, lifecycle
from ..broker import Broker
from ..exceptions import BrokerUnavailable
from .execute.executors import AsyncExecutor, Runner, ThreadExecutor
from .execute.job import Job, Outcome
from .fetch.capacity import Capacity
from .fetch.fetcher import Fetcher
from .options import READY, WorkerOptions
from .reporter import Reporter
from .slot_table import SlotTable
from .wakeup import Wakeup

logger = logging.getLogger("django_asyncq.worker")

HAND_BACK_AFTER_SECONDS = 0.15
MARK_AFTER_SECONDS = 0.05
TICK_SECONDS = 0.04
# Together less than the supervisor waits beyond the grace.
REPORT_SECONDS = 4.0


def peak_memory_mb() -> float:
    """Return the most memory this process has had; macOS counts it in bytes, Linux in kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 / 1024 if sys.platform == "darwin" else peak / 1024


class WorkerProcess:
    """The main thread of a worker process."""

    def __init__(self, options: WorkerOptions, board: SlotTable, supervisor: Any) -> None:
        """supervisor: a pipe; what this process has to say goes there, and its end is the supervisor's death."""
        self.options = options
        self.supervisor = supervisor
        # For `select`, which would ask the pipe for it each time.
        self._supervisor_fd: int = supervisor.fileno()
        self.worker_id = options.worker_id_of(os.getpid())
        self.alarm = Wakeup()
        self.broker = Broker("worker")
        self.reporter = Reporter(self.broker, self.worker_id, self._written, self._is_more_to_come)
        runner = Runner(self.worker_id, board, self._ended, self._slot_is_free, self.reporter.withhold)
        self.threads = ThreadExecutor(runner, options.concurrency)
        self.loop = AsyncExecutor(runner, options.concurrency, options.concurrency)
        self.room = Capacity([self.threads, self.loop], options.concurrency, self.alarm.ring, most=options.max_tasks)
        self.fetching = Fetcher(
            self.broker,
            self.worker_id,
            options,
            room=self.room,
            reporter=self.reporter,
            put=self._put,
            ring=self.alarm.ring,
        )
        self.stop_requests = 0
        self._waits_until_idle = False

    # --- from start to end

    def run(self) -> None:
        """Work until told to stop, until recycled, or until the supervisor is gone."""
        self._install_signals()
        self.reporter.start()
        self.supervisor.send(READY)
        logger.info("worker %s started: %d slots", self.worker_id, self.options.concurrency)
        exit_code = 1
        try:
            while not self._is_to_stop():
                if self.room.occupied:
                    self._tick()
                if not self.fetching.fetch():
                    self._tell_reporter()
                    self._sleep()
            exit_code = 0
        except Exception:
            # Said here, for this process ends without looking back.
            logger.exception("worker %s failed; draining", self.worker_id)
        finally:
            self._shut_down(exit_code)

    def _install_signals(self) -> None:
        self.alarm.attach_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only a flag: raising into redis or the database driver would leave a connection half read.
        # Ctrl-C reaches the whole process group; the supervisor alone decides what it means.
        if number == signal.SIGTERM:
            self.stop_requests += 1

    def _is_to_stop(self) -> bool:
        if self.stop_requests:
            return True
        # Not `poll()`, which makes a selector each time, and this is asked before each fetch.
        if select.select([self._supervisor_fd], [], [], 0)[0]:
            try:
                self.supervisor.recv()
            except (EOFError, ConnectionResetError):
                # Reset, when the supervisor had left unread what this process told it.
                logger.warning("worker %s: the supervisor is gone; draining", self.worker_id)
                return True
        return self._is_used_up()

    def _is_used_up(self) -> bool:
        if self.room.is_used_up:
            return True
        most_mb = self.options.max_memory_mb
        # Only after a task: a limit below what Django itself takes must not keep every task from running.
        return bool(most_mb and self.room.finished) and peak_memory_mb() > most_mb

    # --- looking after what runs

    def _tick(self) -> None:
        """Hand back what waits here while its turn may come elsewhere; see to what runs."""
        now = time.monotonic()
        self.requeue(self._take_back(now - HAND_BACK_AFTER_SECONDS))
        running = self.room.running
        self.reporter.mark([job for job in running if job.is_to_be_marked(MARK_AFTER_SECONDS, now)])
        for job in running:
            if job.is_overdue(now):
                job.tell_to_stop()

    def _put(self, jobs: Sequence[Job]) -> None:
        """Give jobs to the slots."""
        self.threads.put([job for job in jobs if not job.is_async])
        if coroutines := [job for job in jobs if job.is_async]:
            self.loop.put(coroutines)

    def _take_back(self, came_before: float) -> list[Job]:
        return self.threads.take_back(came_before) + self.loop.take_back(came_before)

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Give jobs back to their queues without using an attempt."""
        if not jobs:
            return
        try:
            lifecycle.requeue(self.broker, self.worker_id, [job.run for job in jobs])
        except (BrokerUnavailable, DatabaseError) as error:
            logger.warning("%d tasks not handed back now; the supervisor will: %s", len(jobs), error)

    def _ended(self, outcome: Outcome) -> None:
        """Called by a slot when its job is over."""
        self.room.ended(time.monotonic() - (outcome.job.begun_at or outcome.job.came_at))
        self.reporter.ended(outcome)

    def _slot_is_free(self) -> None:
        """Called by a slot after that."""
        if self.room.slot_is_free():
            self._tell_reporter()
            if self._waits_until_idle:
                self.alarm.ring()
        if self._is_used_up():
            self.alarm.ring()

    def _is_more_to_come(self) -> bool:
        """Whether outcomes follow soon: tasks are here, or are being fetched."""
        return self.room.occupied > 0 or self.fetching.may_bring()

    def _tell_reporter(self) -> None:
        """Let outcomes be written that wait for others, when none can follow."""
        if not self._is_more_to_come():
            self.reporter.last_has_ended()

    def _written(self) -> None:
        """Called by the reporter when it has written a group."""
        self.fetching.written()

    def _sleep(self) -> None:
        """Wait for work, for room, or for the next look at the clock."""
        # Set before the look: a slot that becomes free in between rings.
        self._waits_until_idle = True
        self.fetching.begin_waits()
        self._waits_until_idle = self.fetching.could_stand_by
        pause = self.fetching.pause_seconds(TICK_SECONDS)
        if self.room.occupied:
            pause = min(pause, TICK_SECONDS)
        sockets = self.fetching.sockets
        for descriptor in self.alarm.wait(pause, also=[self._supervisor_fd, *sockets]):
            if queue := sockets.get(descriptor):
                self.fetching.hear(queue)

    # --- the end

    def _shut_down(self, exit_code: int) -> None:
        """Stop fetching, hand back what has not begun, drain to the deadline, hand back the rest."""
        self.fetching.stop()
        self.requeue(self._take_back(time.monotonic()))
        deadline = time.monotonic() + conf.current().shutdown_grace_seconds
        self.room.wait_until_empty()
        while self.room.running and time.monotonic() < deadline and self.stop_requests < 2:
            self.alarm.wait(TICK_SECONDS)
            self._tick()
            self._hurry(deadline)
        # A run in its own transaction is the supervisor's: with this process it is rolled back, or it was committed.
        rest = [job for job in self.room.running if not job.is_withheld]
        self.reporter.abandon(rest)
        if not self.reporter.close(REPORT_SECONDS):
            self.reporter.spill_outcomes()
        self.requeue(rest)
        lifecycle.flush_pushes()
        connections.close_all()
        logger.info("worker %s stopped: %d tasks done, %d handed back", self.worker_id, self.room.finished, len(rest))
        # Threads that still run a task cannot be ended otherwise, and its answer would be refused by its fence.
        os._exit(exit_code)

    def _hurry(self, deadline: float) -> None:
        """Set the flag of all runs in the last quarter of the grace: time to end."""
        if time.monotonic() > deadline - conf.current().shutdown_grace_seconds / 4:
            for job in self.room.running:
                job.tell_to_stop()
