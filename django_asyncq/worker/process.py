"""The main thread of a worker process: fetch while there is capacity, look after what runs, stop in order.

It is started in a process without other threads. It never renews a lease: a task that holds the interpreter for a
minute must not look dead.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, lifecycle
from ..broker import Broker
from ..core.guard import EX_SOFTWARE, LongLivedThread, attempt, exit_process, get_logger, own_process
from ..core.logs import log_extra
from ..exceptions import DatabaseNotSetUp
from ..storage.connections import IDLE_SECONDS, close_connections
from ..storage.errors import STORE_ERRORS, one_line
from ..storage.routing import return_connections
from .capacity import Capacity
from .child_process import kill_own_group
from .executors import Executors, LoopBlock, ThreadDeath
from .fetch import AloneFetcher, Fetcher
from .isolated import Interruption, IsolatedRunner, Isolator
from .job import Job, JobPhase, Jobs, StopReason
from .life import EXIT_SECONDS, greet, say_goodbye
from .options import CANCEL, DRAIN, EXITS, HURRY, NOT_SET_UP, OVER, READY, STOP, WorkerOptions
from .report import ProgressLook, Reporter
from .run import JobRunner
from .slot_table import Pulse, SlotTable
from .stopping import RunStopper
from .wakeup import Reason, Wakeup

# --- A thread that does nothing but show that threads can run here, and look at the event loop.

PULSE_SECONDS = 1.0


class Heartbeat:
    """Writes the pulse once a second."""

    def __init__(
        self, pulse: Pulse, loop_block: LoopBlock, capacity: Capacity, on_death: Callable[[str], object]
    ) -> None:
        self.pulse = pulse
        self.capacity = capacity
        self.loop_block = loop_block
        self._thread = LongLivedThread("heartbeat", self._beat_always, on_death=on_death, is_endless=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def beat(self) -> None:
        """Write the pulse."""
        now = time.monotonic()
        self.pulse.note_beat(now, self.loop_block.check(now), self.capacity.finished)

    def _beat_always(self) -> None:
        while True:
            self.beat()
            time.sleep(PULSE_SECONDS)


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
        is_alone = options.alone is not None
        # Nothing is to wake that of one task while the function runs: see `Interruption.exit_if_cut_off`.
        self.wakeup = Wakeup(expected=[] if is_alone else [Reason.PUSH, Reason.USED_UP])
        self.jobs = Jobs()
        self.stopper = RunStopper(self.jobs, slot_table)
        self.capacity = Capacity(
            self.jobs,
            options.concurrency,
            self.wakeup,
            max_tasks=options.max_tasks,
            max_memory_mb=options.max_memory_mb,
            queue_slots=options.queue_slots,
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
        make_runner, make_fetcher = (IsolatedRunner, AloneFetcher) if is_alone else (JobRunner, Fetcher)
        runner = make_runner(self.worker_id, slot_table, self.reporter, self.capacity, asyncio.new_event_loop())
        self.isolator = Isolator(self.broker, options, supervisor)
        self.interruption: Interruption | None = None
        if isinstance(runner, IsolatedRunner):
            self.interruption = runner.interruption = Interruption(supervisor)
        else:
            runner.isolate = self.isolator.run
        self.executors = Executors(runner, self.jobs, options.concurrency, is_alone=is_alone)
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
        runner.rates = self.fetcher.rates
        self.pulse = slot_table.pulse
        self.heartbeat = Heartbeat(self.pulse, LoopBlock(self.executors.loop), self.capacity, on_death)
        self.progress_look = ProgressLook()
        # When this process last had a task, and how many had finished by then.
        self._worked_at = time.monotonic()
        self._finished = 0
        self._is_asked_to_stop = False
        # Whether running tasks are to be requeued without a grace.
        self._is_in_a_hurry = False
        self._is_orphan = False

    # --- from start to stop

    def run(self) -> None:
        """Work until asked to stop, until used up, or until the supervisor is dead."""
        own_process()
        self.install_signals()
        greet(self.worker_id, self.options)
        self.reporter.start()
        self.heartbeat.start()
        if self.interruption is None:
            self._work()
        else:
            self.interruption.install()
            on_death = ThreadDeath(self.worker_id, self.jobs)
            LongLivedThread("control", self._work, on_death=on_death, is_endless=True).start()
            self.executors.threads.work()

    def _work(self) -> None:
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
                    self._notice_idleness()
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
        if self.interruption is not None:
            self.interruption.exit_if_cut_off()
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
            elif word == STOP:
                self._is_asked_to_stop = True
            elif word == HURRY:
                self._is_in_a_hurry = True
            elif word == OVER:
                self.isolator.note_over(*rest)

    def _drain(self, *, is_draining: bool) -> None:
        """Take no more tasks, and requeue what has not begun; or take tasks again."""
        logger.info("worker %s %s", self.worker_id, "takes no more tasks" if is_draining else "takes tasks again")
        if is_draining:
            self.fetcher.pause()
            self.requeue([*self.jobs.take_held(), *self.jobs.take_waiting(time.monotonic())])
        else:
            self.fetcher.resume()
        self.pulse.note_takes_none(takes_none=is_draining)

    def _sleep(self) -> None:
        """Sleep until there is work, capacity, or a clock to look at; then read what has woken this thread."""
        self.fetcher.begin_waits()
        seconds = self.fetcher.sleep_seconds(TICK_SECONDS)
        if self.jobs.count:
            seconds = min(seconds, TICK_SECONDS)
        sockets = self.fetcher.sockets
        woken = self.wakeup.wait(seconds, also=[self._supervisor_fd, *sockets])
        if Reason.PUSH in woken.reasons:
            self.fetcher.pacing.note_push()
        if Reason.QUEUE_FREED in woken.reasons:
            self.fetcher.note_freed()
        # The other reasons need no more than that this thread looks again.
        for descriptor in woken.ready:
            if wait := sockets.get(descriptor):
                self.fetcher.read_wait(wait)

    # --- looking after what runs

    def _tick(self) -> None:
        """Requeue jobs that wait here while another process may be free; mark those that run for long."""
        if self.interruption is not None:
            self.interruption.ask()
        now = time.monotonic()
        self.requeue(self.jobs.take_waiting(now - REQUEUE_AFTER_SECONDS))
        running = self.jobs.running
        self.reporter.mark([job for job in running if job.needs_mark(MARK_AFTER_SECONDS, now)])
        self.stopper.note_late(running, now)
        self.reporter.show_progress(self.progress_look.new(running, now))

    def _notice_idleness(self) -> None:
        """Once no task has come for a while, close what this thread has opened to read rows; the reporter does too."""
        now, finished = time.monotonic(), self.capacity.finished
        if self.jobs.count or finished != self._finished:
            self._worked_at, self._finished = now, finished
        self.reporter.is_idle = now - self._worked_at >= IDLE_SECONDS
        if self.reporter.is_idle:
            close_connections()

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
            if self.capacity.queue_slots is not None:
                for job in jobs:
                    self.capacity.queue_slots.leave(job)

    # --- the stop

    def shut_down(self, exit_code: int) -> None:
        """Stop fetching, requeue what has not begun, drain until the deadline, requeue the rest, and exit."""
        grace_seconds = conf.current().shutdown_grace_seconds
        self.pulse.excuse(grace_seconds + REPORT_SECONDS + EXIT_SECONDS)
        self.fetcher.stop()
        self.requeue([*self.jobs.take_held(), *self.jobs.take_waiting(time.monotonic())])
        deadline = time.monotonic() + grace_seconds
        self.wakeup.expect(Reason.IDLE)
        while self._has_running() and time.monotonic() < deadline and not self._is_in_a_hurry:
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
        # Before the exit functions: they close the files of the log.
        logger.info(
            "worker %s stopped; tasks finished: %d, requeued: %d", self.worker_id, self.capacity.finished, len(rest)
        )
        say_goodbye(self.worker_id, self.options, is_hurried=self._is_in_a_hurry)
        # What a task has printed; `os._exit` would lose it.
        for stream in (sys.stdout, sys.stderr):
            attempt(stream.flush)
        if self._is_orphan:
            # Nobody else is left to kill what its tasks have started.
            kill_own_group()
        with suppress(OSError):
            self.supervisor.send((EXITS, exit_code))
        # Threads that still run a task cannot be stopped otherwise, and its fence would refuse their outcome.
        os._exit(exit_code)

    def _has_running(self) -> bool:
        return any(job.phase is not JobPhase.ISOLATED for job in self.jobs.running)
