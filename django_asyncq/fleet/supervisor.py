"""The main loop of the supervisor.

Its thread must never block for long: it renews the leases, so a task is lost only when the whole host is lost. Work
that may take long (forwarding, reconciling) is done by `leader` in threads of its own.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.db import connections

from .. import conf
from ..broker import Broker
from ..broker.access import queues_with
from ..core import stop_requests
from ..core.guard import get_logger, own_process
from ..exceptions import BrokerUnavailable
from ..storage.connections import close_connections
from ..storage.routing import return_connections
from ..worker.child_process import STACKS_SIGNAL
from ..worker.options import WorkerOptions
from ..worker.wakeup import Reason, Wakeup
from .heartbeat import HeartbeatWriter, LeaseKeeper, LivenessFile
from .leader import MaintenanceService
from .processes import EXIT_MARGIN_SECONDS, Child, Processes, WorkersCannotStart
from .recovery import MemorySampler, Quarantine, Recovery
from .reloading import Reloader

# --- Says once that all worker processes are ready, which process leads the fleet, and that a stop has begun.
#
# Later changes are logged.


class Announcement:
    """Watches for the first two moments. The supervisor calls `stopping`.

    say: is given each sentence; it must not raise, nor block for long.
    """

    def __init__(self, processes: Processes, maintenance: MaintenanceService, say: Callable[[str], None]) -> None:
        self.processes = processes
        self.maintenance = maintenance
        self._say = say
        self._is_ready = False
        self._is_leader_known = False

    def check(self) -> None:
        """Say what has become known since the last call. One call costs nothing once both are said."""
        if not self._is_leader_known and (leader := self.maintenance.leader):
            self._is_leader_known = True
            self._say(f"Leader: {leader}.")
        if not self._is_ready and self.processes.are_ready:
            self._is_ready = True
            self._say("Ready. Press Ctrl-C to stop after the running tasks have finished, and again to stop at once.")

    def stopping(self, grace_seconds: float) -> None:
        """Say that a stop was requested. grace_seconds: how long running tasks may take to finish."""
        self._say(f"Stopping: running tasks may finish within {grace_seconds:g} s. Press Ctrl-C again to stop at once.")


# --- Replaces worker processes that stand still: a task is due, a slot is free, and nothing is taken.
#
# A process that has died is noticed at once. One that hangs, in a lock or in a call without a timeout, keeps its
# tasks and looks well from outside. Each process notes its progress in its `Pulse`, and Redis says whether it
# should have taken a task. A process that stands still is asked for its stacks, then asked to stop, then killed.

logger = get_logger("django_asyncq.fleet")

CHECK_SECONDS = 1.0
# After a longer gap this process stood still itself, perhaps with its whole host; all begin anew.
LONGEST_GAP_SECONDS = 5.0
# A heartbeat thread that has not run for this long: one thread holds the interpreter.
SILENT_SECONDS = 10.0


@dataclass(slots=True)
class Stall:
    """A process that stands still. kill_at: monotonic; None until it was asked to stop."""

    reason: str
    kill_at: float | None = None


class Standstill:
    """Looks at the pulse of every worker process once a second."""

    def __init__(self, broker: Broker, options: WorkerOptions, processes: Processes) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self._stalls: dict[Child, Stall] = {}
        self._checked_at = 0.0
        # What happened before this does not count.
        self._since = 0.0

    def check(self, now: float) -> None:
        """Take the next step with each process that stands still. now: monotonic seconds."""
        if now - self._checked_at < CHECK_SECONDS:
            return
        if now - self._checked_at > LONGEST_GAP_SECONDS:
            self._since = now
        self._checked_at = now
        children = self.processes.children
        self._stalls = {child: stall for child, stall in self._stalls.items() if child in children}
        for child in children:
            stall = self._stalls.get(child)
            if stall is None:
                self._look_at(child, now)
            elif stall.kill_at is None:
                self._ask_to_stop(child, stall, now)
            elif now >= stall.kill_at:
                logger.error("worker %s did not stop in time and is killed", child.worker_id)
                self.processes.kill(child)

    def _look_at(self, child: Child, now: float) -> None:
        if reason := self.reason(child, now):
            logger.error("worker %s stands still: %s", child.worker_id, reason)
            self._stalls[child] = Stall(reason)
            child.process.signal(STACKS_SIGNAL)

    def _ask_to_stop(self, child: Child, stall: Stall, now: float) -> None:
        """Log what the threads were doing, and send SIGTERM; unless the process goes on after all."""
        if not self.reason(child, now):
            logger.warning("worker %s goes on", child.worker_id)
            del self._stalls[child]
            return
        stacks = child.crash_stack.peek() or "(they are not known)"
        logger.error("worker %s is replaced, since it stands still; its threads:\n%s", child.worker_id, stacks)
        child.is_stalled = True
        stall.kill_at = now + conf.current().shutdown_grace_seconds + EXIT_MARGIN_SECONDS
        child.process.signal(signal.SIGTERM)

    def reason(self, child: Child, now: float) -> str:
        """Return why a process stands still, "" if it does not. One that runs one task never takes a second."""
        seconds = conf.current().stall_seconds
        pulse, running = child.slot_table.pulse, child.slot_table.running()
        if child.is_alone or len(running) >= self.options.concurrency:
            return ""
        is_held = now - pulse.beat_at > SILENT_SECONDS
        if is_held and running:
            return ""  # a long call in C is work
        stuck_since, looked_at = pulse.loop_stuck_since, pulse.looked_at
        if stuck_since and not is_held and now - max(stuck_since, self._since) > seconds:
            return f"async tasks have waited for its event loop for {now - stuck_since:.0f} s"
        if looked_at and now - max(looked_at, self._since) > seconds and self._is_task_due():
            return f"a task is due and a slot is free, but it has not looked for {now - looked_at:.0f} s"
        return ""

    def _is_task_due(self) -> bool:
        try:
            queues = list(self.options.queues or self.broker.known_queues())
            waiting = queues_with(self.broker, queues, "pending", "priority")
            return any(self.broker.has_pending(queue) for queue in waiting)
        except BrokerUnavailable:
            return False  # then nobody can take anything


# --- Ctrl-Z and `fg`: a terminal reaches only the supervisor, so it passes both on to the groups of its processes.
#
# After a long stop the leases have run out, as after a freeze of the host: tasks may have been recovered elsewhere,
# and their fences refuse the late outcomes.


class Suspension:
    """Stops and continues a supervisor together with its processes and all that their tasks have started."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._received: list[int] = []

    def attach(self) -> None:
        """Handle SIGTSTP and SIGCONT, unless the supervisor was started with SIGTSTP ignored. Main thread only."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            for number in (signal.SIGTSTP, signal.SIGCONT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received.append(number)

    def apply(self) -> None:
        """Do what the signals since the last call ask for."""
        while self._received:
            if self._received.pop(0) == signal.SIGTSTP:
                self._stop()
            self.processes.signal_groups(signal.SIGCONT)

    def _stop(self) -> None:
        """Stop the processes, then this one, until SIGCONT comes.

        The kernel ignores SIGTSTP in a group that no shell could continue; then this returns at once.
        """
        self.processes.signal_groups(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_signal)


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
    `starts_again` is then true. start_method: of the processes, see `processes.STARTERS`.
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
            close_connections()
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
        self.processes.listen(now)
        if self.recovery.recover_dead(now):
            self.quarantine.look_soon()
        if self.leases.beat():
            # While Redis does not answer, one time-out a beat is enough for this thread.
            if not self.leases.is_failing:
                self.heartbeat.beat()
            if self.liveness_file is not None and self.processes.are_complete:
                self.liveness_file.touch()
        if self.burst:
            # It asks in each round whether work is left.
            return_connections()
        else:
            close_connections()

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
        if not self.leases.is_failing:
            # So that others leave no task to processes that take none any more.
            self.heartbeat.beat()
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
