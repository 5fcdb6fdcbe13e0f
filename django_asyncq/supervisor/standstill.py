"""Replaces worker processes that stand still: a task is due, a slot is free, and nothing is taken.

A process that has died is noticed at once. One that hangs, in a lock or in a call without a timeout, keeps its tasks
and looks well from outside. Each process notes its progress in its `Pulse`, and Redis says whether it should have taken
a task. A process that stands still is asked for its stacks, then asked to stop, then killed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from .. import conf
from ..broker import Broker
from ..broker.many_queues import queues_with
from ..exceptions import BrokerUnavailable
from ..guard import get_logger
from ..worker.crash_stack import STACKS_SIGNAL
from ..worker.options import WorkerOptions
from .processes import EXIT_MARGIN_SECONDS, Child, Processes

logger = get_logger("django_asyncq.supervisor")

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
        """Return why a process stands still, "" if it does not. A process in quarantine never takes a second task."""
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
