"""The main loop of the supervisor.

Its thread must never block for long: it renews the leases, so a task is lost only when the whole host is lost. Work
that may take long (forwarding, reconciling) is done by `maintenance` in threads of its own.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections

from .. import conf, stop_requests
from ..broker import Broker
from ..guard import get_logger, own_process
from ..maintenance.service import MaintenanceService
from ..storage.pooling import return_connections
from ..worker.options import WorkerOptions
from ..worker.wakeup import Reason, Wakeup
from .announcement import Announcement
from .heartbeat import HeartbeatWriter
from .leases import LeaseKeeper
from .liveness import LivenessFile
from .memory import MemorySampler
from .processes import EXIT_MARGIN_SECONDS, Child, Processes, WorkersCannotStart
from .quarantine import Quarantine
from .recovery import Recovery
from .reloading import Reloader
from .standstill import Standstill
from .suspension import Suspension

logger = get_logger("django_asyncq.supervisor")

TICK_SECONDS = 0.2
# Those that a supervisor and its parts handle.
SIGNALS = (*stop_requests.STOP_SIGNALS, signal.SIGTSTP, signal.SIGCONT)


class ThreadDied(RuntimeError):
    """A maintenance thread of the supervisor has died; the log says why."""


def ignore_signals() -> None:
    """Ignore stop signals: Python removes its handlers before it exits, and a signal would then kill the process."""
    for number in stop_requests.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def as_guest() -> Iterator[None]:
    """Restore the signal handlers after a supervisor has run in a process that goes on.

    Otherwise Ctrl-C would no longer stop a test run that has called `runworkers`. Main thread only.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        atexit.unregister(ignore_signals)
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        own_process(is_own=False)


class Supervisor:
    """Run `processes` worker processes until stopped or, with `burst`, until no task is queued, running or due.

    liveness_file: touched while all processes run. reloader: stops this when the code that it watches has changed;
    `starts_again` is then true. start_method: of the processes, see `starting`.
    say: is given what a person at the terminal should know, see `Announcement`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        processes: int = 1,
        burst: bool = False,
        liveness_file: Path | None = None,
        single_instance: bool | None = None,
        reloader: Reloader | None = None,
        start_method: str = conf.SPAWN,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options = options
        self.burst = burst
        self.liveness_file = LivenessFile(liveness_file) if liveness_file else None
        self.reloader = reloader
        self._has_new_code = False
        self.wakeup = Wakeup(expected=[Reason.STARTED])
        self.broker = Broker("worker", options.backend)
        self.maintenance = MaintenanceService(
            list(options.queues),
            alias=options.backend,
            single_instance=single_instance,
            may_take_prefix=not burst,
            host=options.name,
        )
        self.memory = MemorySampler()
        self.recovery = Recovery(self.broker, options, self.memory)
        self.processes = Processes(
            options,
            processes,
            on_death=self._note_death,
            start_method=start_method,
            on_started=lambda: self.wakeup.notify(Reason.STARTED),
        )
        self.quarantine = Quarantine(self.broker, options, self.processes)
        self.standstill = Standstill(self.broker, options, self.processes)
        self.heartbeat = HeartbeatWriter(
            self.broker, options, self.processes, is_leader=lambda: self.maintenance.is_leader
        )
        self.leases = LeaseKeeper(self.broker, options, self.processes, self.heartbeat)
        self.suspension = Suspension(self.processes)
        self.announcement = Announcement(self.processes, self.maintenance, say)
        self.stop_requests = 0
        self._last_stop_signal = signal.SIGTERM
        self._idle_checks = 0

    @property
    def children(self) -> list[Child]:
        """The living worker processes."""
        return self.processes.children

    @property
    def starts_again(self) -> bool:
        """Whether the command starts again with changed code: not when a stop was requested meanwhile."""
        return self._has_new_code and not self.stop_requests

    # --- main loop

    def run(self) -> None:
        """Supervise until stopped; not at all if a stop was requested before.

        A second SIGTERM or SIGINT requeues the running tasks at once.
        Raises: WorkersCannotStart, of a burst; ThreadDied, DatabaseNotSetUp and PrefixTaken, after an orderly stop.
        """
        own_process()
        self.wakeup.attach_signals()
        for number in stop_requests.STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        self.suspension.attach()
        atexit.register(ignore_signals)
        self.stop_requests += stop_requests.received()
        if self.stop_requests:
            return
        self._check_prefix()
        self.maintenance.start()
        logger.info(
            "supervisor %d started; worker processes: %d, slots in each: %d",
            os.getpid(),
            self.processes.count,
            self.options.concurrency,
        )
        try:
            while not self._is_over():
                self.tick()
                self.wakeup.wait(TICK_SECONDS, also=self.processes.sentinels)
        finally:
            self._shut_down()

    def _check_prefix(self) -> None:
        """Start nothing under a Redis prefix of another database. Raises: PrefixTaken."""
        try:
            self.maintenance.ownership.tick()
        finally:
            return_connections()
        if lost := self.maintenance.ownership.lost:
            raise lost

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only a flag, see WorkerProcess._on_signal.
        self.stop_requests += 1
        self._last_stop_signal = signal.Signals(number)
        self.processes.is_stopping = True

    def tick(self) -> None:
        """Do one round of supervision: each step below, if it is due."""
        now = time.monotonic()
        self._look_after_children(now)
        if not_set_up := self.maintenance.not_set_up or self.processes.not_set_up:
            raise not_set_up
        if lost := self.maintenance.ownership.lost:
            raise lost
        if dead := self.maintenance.dead_threads:
            raise ThreadDied(f"the supervisor stops, since its thread {dead[0]} has died; the log says why")
        if self.reloader is not None and self.reloader.is_due():
            logger.info("code has changed: starting again when the running tasks have finished")
            self._has_new_code = True
        if self.burst and self.processes.cannot_start:
            raise WorkersCannotStart("worker processes exit before they are ready; their output above says why")
        self.processes.start_missing(now)
        self.heartbeat.obey_known()
        self.quarantine.tick(now, is_draining=self.heartbeat.is_draining)
        self.standstill.check(now)
        self.announcement.check()

    def _note_death(self, child: Child) -> None:
        self.recovery.add(child)
        self.quarantine.note_death(child)
        self.heartbeat.clear([child])

    def _look_after_children(self, now: float) -> None:
        # First: a signal that has come since is for them too.
        self.processes.take_started(now)
        self.suspension.apply()
        self.processes.kill_overdue(now)
        self.memory.sample(self.children, now)
        self.processes.reap(now)
        if self.recovery.recover_dead(now):
            self.quarantine.look_soon()
        if self.leases.beat():
            # While Redis does not answer, one time-out a beat is enough for this thread.
            if not self.leases.is_failing:
                self.heartbeat.beat()
            if self.liveness_file is not None and self.processes.are_complete:
                self.liveness_file.touch()
        return_connections()

    # --- shutdown

    def _is_over(self) -> bool:
        return bool(self.stop_requests) or self._has_new_code or (self.burst and self._has_no_work())

    def _has_no_work(self) -> bool:
        """Return whether a burst is finished: two checks in a row found no task queued, running or due."""
        if not self.children or time.monotonic() - self.children[0].started_at < TICK_SECONDS:
            return False
        self._idle_checks = self._idle_checks + 1 if self.maintenance.has_no_work(self.options.backend) else 0
        return self._idle_checks > 1

    def _shut_down(self) -> None:
        """Let the processes drain until the deadline, kill those that remain, and recover their tasks."""
        self.processes.stop_starting(time.monotonic())
        if self.stop_requests == 1 and self.children:
            self.announcement.stopping(conf.current().shutdown_grace_seconds)
        self._pass_on_stop()
        self._drain()
        self.processes.kill_remaining()
        self.recovery.recover_dead(time.monotonic())
        if self.reloader is not None:
            self.reloader.stop()
        self.maintenance.stop()
        connections.close_all()
        logger.info("supervisor %d stopped", os.getpid())

    def _pass_on_stop(self) -> None:
        """Ask the worker processes to stop; ask the programs of their tasks too at Ctrl-C, and at a second request.

        At the first SIGTERM they go on, because their tasks may finish.
        """
        if self.stop_requests > 1:
            self.processes.hurry_all()
        if self._last_stop_signal == signal.SIGINT:
            self.processes.signal_groups(signal.SIGINT)
        if self._last_stop_signal == signal.SIGINT or self.stop_requests < 2:
            self.processes.signal_all(signal.SIGTERM)
        else:
            self.processes.signal_groups(signal.SIGTERM)

    def _drain(self) -> None:
        """Supervise processes that are stopping; pass further stop requests on to them."""
        requests = self.stop_requests
        deadline = time.monotonic() + conf.current().shutdown_grace_seconds + EXIT_MARGIN_SECONDS
        while self.children and time.monotonic() < deadline:
            self.wakeup.wait(TICK_SECONDS, also=self.processes.sentinels)
            if self.stop_requests > max(requests, 1):
                requests = self.stop_requests
                self._pass_on_stop()
            self._look_after_children(time.monotonic())
