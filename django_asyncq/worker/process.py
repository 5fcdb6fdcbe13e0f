"""The main thread of a worker process: fetch while there is capacity, look after what runs, stop in order.

It is started in a process without other threads. It never renews a lease: a task that holds the interpreter for a
minute must not look dead.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, lifecycle
from ..broker import Broker
from ..exceptions import DatabaseNotSetUp
from ..faults import STORE_ERRORS, one_line
from ..guard import get_logger, own_process
from ..logs import log_extra
from ..storage.pooling import return_connections
from ..threads import EX_SOFTWARE, exit_process
from .execute.executors import Executors
from .execute.job import Job, JobPhase, StopReason
from .execute.jobs import Jobs
from .execute.loop_block import LoopBlock
from .execute.run import JobRunner
from .execute.stopping import RunStopper
from .fetch.capacity import Capacity
from .fetch.fetcher import Fetcher
from .fetch.suspect_fetcher import SuspectFetcher
from .heartbeat import Heartbeat
from .options import CANCEL, DRAIN, EXITS, HURRY, NOT_SET_UP, READY, WorkerOptions
from .process_groups import kill_own_group
from .progress import ProgressLook
from .reporter import Reporter
from .slot_table import SlotTable
from .thread_death import ThreadDeath
from .wakeup import Reason, Wakeup

logger = get_logger("django_asyncq.worker")

REQUEUE_AFTER_SECONDS = 0.15
MARK_AFTER_SECONDS = 0.05
TICK_SECONDS = 0.04
# With GIVE_UP_SECONDS less than the supervisor waits beyond the grace.
REPORT_SECONDS = 4.0


class WorkerProcess:
    """The main thread of a worker process, and the parts it owns."""

    def __init__(self, options: WorkerOptions, slot_table: SlotTable, supervisor: Any) -> None:
        """supervisor: a pipe to it; when its other side is closed, the supervisor is dead."""
        self.options = options
        self.supervisor = supervisor
        # For `select`, which would ask the pipe for it each time.
        self._supervisor_fd: int = supervisor.fileno()
        self.worker_id = options.worker_id_of(os.getpid())
        self.broker = Broker("worker", options.backend)
        self.wakeup = Wakeup(expected=[Reason.PUSH, Reason.USED_UP])
        self.jobs = Jobs()
        self.stopper = RunStopper(self.jobs, slot_table)
        self.capacity = Capacity(
            self.jobs,
            options.concurrency,
            self.wakeup,
            max_tasks=options.max_tasks,
            max_memory_mb=options.max_memory_mb,
        )
        on_death = ThreadDeath(self.worker_id, self.jobs)
        self.reporter = Reporter(
            self.broker,
            self.worker_id,
            self.wakeup,
            self.capacity.quiet,
            on_void=self.stopper.stop_void,
            on_death=on_death,
        )
        runner = JobRunner(self.worker_id, slot_table, self.reporter, self.capacity, asyncio.new_event_loop())
        self.executors = Executors(runner, self.jobs, options.concurrency)
        make_fetcher = Fetcher if options.quarantine is None else SuspectFetcher
        self.fetcher = make_fetcher(
            self.broker,
            self.worker_id,
            options,
            capacity=self.capacity,
            executors=self.executors,
            reporter=self.reporter,
            wakeup=self.wakeup,
            pulse=slot_table.pulse,
            on_cancel=self.stopper.cancel,
            on_death=on_death,
        )
        self.pulse = slot_table.pulse
        self.heartbeat = Heartbeat(self.pulse, LoopBlock(self.executors.loop), on_death)
        self.progress_look = ProgressLook()
        self._is_asked_to_stop = False
        # Whether running tasks are to be requeued without a grace.
        self._is_in_a_hurry = False
        self._is_orphan = False

    # --- from start to stop

    def run(self) -> None:
        """Work until asked to stop, until used up, or until the supervisor is dead."""
        own_process()
        self.install_signals()
        self.reporter.start()
        self.heartbeat.start()
        # From here on it must look: a main thread that hangs in its first look, as in any later one, is replaced.
        self.pulse.note_look()
        with suppress(OSError):  # the supervisor is dead, as the first look will find
            self.supervisor.send(READY)
        slots = self.options.concurrency
        logger.info("worker %s started: %d slot%s", self.worker_id, slots, pluralize(slots))
        exit_code = EX_SOFTWARE
        try:
            while not self._must_stop():
                if self.jobs.count:
                    self._tick()
                if not self.fetcher.fetch():
                    self.capacity.check_quiet()
                    self._sleep()
            exit_code = 0
        except DatabaseNotSetUp as error:
            logger.error("worker %s drains and exits: %s", self.worker_id, error)
            with suppress(OSError):
                self.supervisor.send((NOT_SET_UP, error.reason, error.remedy))
        except BaseException:
            # Logged here, because this process exits without a traceback.
            logger.exception("worker %s failed; draining", self.worker_id)
        try:
            self.shut_down(exit_code)
        except BaseException:  # noqa: BLE001 - it is logged by the last words
            exit_process(lambda: logger.exception("worker %s failed while it drained", self.worker_id))

    def install_signals(self) -> None:
        """Handle SIGTERM and SIGINT, and be woken by them."""
        self.wakeup.attach_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only a flag: raising into redis or the database driver would leave a connection half read.
        # SIGINT is for the programs that tasks run; the supervisor alone decides what Ctrl-C means. Nor is a second
        # SIGTERM more than one: what sends it to all processes sends it to the supervisor too, which passes it on.
        if number == signal.SIGTERM:
            self._is_asked_to_stop = True

    def _must_stop(self) -> bool:
        if self._is_asked_to_stop:
            return True
        if self.reporter.not_set_up is not None:
            raise self.reporter.not_set_up
        self._read_supervisor()
        if self._is_orphan:
            logger.warning("worker %s: the supervisor is dead; draining", self.worker_id)
        return self._is_orphan or self.capacity.is_used_up or self.fetcher.is_finished

    def _read_supervisor(self) -> None:
        """Read which tasks were cancelled, whether to take no more or to hurry, or that the supervisor is dead."""
        # Not `poll()`, which makes a selector each time, and this is asked before each fetch.
        while not self._is_orphan and select.select([self._supervisor_fd], [], [], 0)[0]:
            try:
                word, *rest = self.supervisor.recv()
            except (EOFError, ConnectionResetError):
                # Reset, when the supervisor had left unread what this process sent to it.
                self._is_orphan = True
                return
            if word == CANCEL:
                self.stopper.cancel(rest)
            elif word == DRAIN:
                self._drain(is_draining=bool(rest[0]))
            elif word == HURRY:
                self._is_in_a_hurry = True

    def _drain(self, *, is_draining: bool) -> None:
        """Take no more tasks, and requeue what has not begun; or take tasks again."""
        logger.info("worker %s %s", self.worker_id, "takes no more tasks" if is_draining else "takes tasks again")
        if is_draining:
            self.fetcher.pause()
            self.requeue(self.jobs.take_waiting(time.monotonic()))
        else:
            self.fetcher.resume()

    def _sleep(self) -> None:
        """Sleep until there is work, capacity, or a clock to look at; then read what has woken this thread."""
        # Before the look: a slot that is freed in between notifies.
        self.wakeup.expect(Reason.IDLE)
        self.fetcher.begin_waits()
        if not self.fetcher.could_be_ready:
            self.wakeup.ignore(Reason.IDLE)
        seconds = self.fetcher.sleep_seconds(TICK_SECONDS)
        if self.jobs.count:
            seconds = min(seconds, TICK_SECONDS)
        sockets = self.fetcher.sockets
        woken = self.wakeup.wait(seconds, also=[self._supervisor_fd, *sockets])
        if Reason.PUSH in woken.reasons:
            self.fetcher.pacing.note_push()
        # The other reasons need no more than that this thread looks again.
        for descriptor in woken.ready:
            if queue := sockets.get(descriptor):
                self.fetcher.read_wait(queue)

    # --- looking after what runs

    def _tick(self) -> None:
        """Requeue jobs that wait here while another process may be free; mark those that run for long."""
        now = time.monotonic()
        self.requeue(self.jobs.take_waiting(now - REQUEUE_AFTER_SECONDS))
        running = self.jobs.running
        self.reporter.mark([job for job in running if job.needs_mark(MARK_AFTER_SECONDS, now)])
        self.reporter.show_progress(self.progress_look.new(running, now))

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Give jobs back to their queues without using an attempt."""
        if not jobs:
            return
        try:
            lifecycle.requeue(self.broker, self.worker_id, [job.run for job in jobs])
        except STORE_ERRORS as error:
            count, extra = len(jobs), log_extra(*(job.run.record for job in jobs))
            text = "%d task%s not requeued; the supervisor will do it: %s"
            logger.warning(text, count, pluralize(count), one_line(error), extra=extra)
        finally:
            return_connections()

    # --- the stop

    def shut_down(self, exit_code: int) -> None:
        """Stop fetching, requeue what has not begun, drain until the deadline, requeue the rest, and exit."""
        grace_seconds = conf.current().shutdown_grace_seconds
        self.pulse.excuse(grace_seconds + REPORT_SECONDS)
        self.fetcher.stop()
        self.requeue(self.jobs.take_waiting(time.monotonic()))
        deadline = time.monotonic() + grace_seconds
        self.wakeup.expect(Reason.IDLE)
        while self.jobs.running and time.monotonic() < deadline and not self._is_in_a_hurry:
            self.wakeup.wait(TICK_SECONDS)
            self._read_supervisor()
            self._tick()
            if time.monotonic() > deadline - grace_seconds / 4:  # the last quarter of the grace
                for job in self.jobs.running:
                    job.ask_to_stop(StopReason.SHUTDOWN)
        # A run in its own transaction is left to the supervisor: it is rolled back with this process, or committed.
        rest = [job for job in self.jobs.running if job.phase in (JobPhase.WAITING, JobPhase.RUNNING)]
        self.reporter.abandon(rest)
        if not self.reporter.close(REPORT_SECONDS):
            self.reporter.spill_outcomes()
        self.requeue(rest)
        lifecycle.flush_pushes()
        connections.close_all()
        logger.info(
            "worker %s stopped; tasks finished: %d, requeued: %d", self.worker_id, self.capacity.finished, len(rest)
        )
        if self._is_orphan:
            # Nobody else is left to kill what its tasks have started.
            kill_own_group()
        with suppress(OSError):
            self.supervisor.send((EXITS, exit_code))
        # Threads that still run a task cannot be stopped otherwise, and its fence would refuse their outcome.
        os._exit(exit_code)
