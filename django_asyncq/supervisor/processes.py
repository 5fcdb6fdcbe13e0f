"""The worker processes of a supervisor: started, killed when a task ignores its timeout, replaced when dead."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import failpoints, lifecycle
from ..definitions.names import runs_alone
from ..worker.bootstrap import start
from ..worker.crash_stack import CrashStack
from ..worker.options import READY, WorkerOptions
from ..worker.slot_table import SlotTable

logger = logging.getLogger("django_asyncq.supervisor")

# A process that dies younger than this is replaced after growing pauses.
YOUNG_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 30.0
# A burst gives up when this many processes in a row exited before they were ready; a service never gives up.
FAILED_STARTS = 3


class WorkersCannotStart(RuntimeError):
    """Worker processes exit before they are ready; their own output says why."""


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, and what is known about it after its death.

    overdue: ids of the tasks for which it was killed. was_killed: by its supervisor. was_ready: whether it began to
    fetch; known after its death. exit_code, stack: of the dead process; stack: "" if it left none.
    """

    process: Any
    slot_table: SlotTable
    pipe: Any
    worker_id: str
    started_at: float
    crash_stack: CrashStack
    exit_code: int | None = None
    stack: str = ""
    overdue: set[str] = field(default_factory=set)
    was_killed: bool = False
    was_ready: bool = False

    @property
    def is_starting(self) -> bool:
        """Whether it lives and has not begun to fetch. It sends nothing else than READY."""
        return not self.pipe.poll()

    @property
    def is_alone(self) -> bool:
        """Whether it is a quarantine process, which runs one task at a time."""
        return runs_alone(self.worker_id)


class Processes:
    """The living worker processes, `count` and those in quarantine, and when the next one may be started.

    on_death: called once for each process that has exited.
    """

    def __init__(self, options: WorkerOptions, count: int, *, on_death: Callable[[Child], None]) -> None:
        self.options = options
        self.count = count
        self.on_death = on_death
        self.children: list[Child] = []
        # Whether processes are expected to exit: their deaths are no errors, and nobody replaces them.
        self.is_stopping = False
        self._spawn = multiprocessing.get_context("spawn")
        self._start_at = 0.0
        self._early_deaths = 0
        self._failed_starts = 0

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a process exits."""
        return [child.process.sentinel for child in self.children]

    @property
    def are_complete(self) -> bool:
        """Whether all processes run, those in quarantine aside."""
        return len(self.children) - len(self.alone) == self.count

    @property
    def alone(self) -> list[Child]:
        """The quarantine processes."""
        return [child for child in self.children if child.is_alone]

    @property
    def cannot_start(self) -> bool:
        """Whether several processes in a row have exited before they were ready."""
        return self._failed_starts >= FAILED_STARTS

    # --- start

    def start_missing(self, now: float) -> None:
        """Start processes until there are `count`, unless it is too early."""
        while not self.are_complete and now >= self._start_at:
            self.start(self.options, now)

    def start(self, options: WorkerOptions, now: float) -> None:
        """Start one process with options of its own."""
        # Async tasks have slots of their own, after those of the threads.
        slot_table = SlotTable(2 * options.concurrency)
        ours, theirs = self._spawn.Pipe()
        crash_stack = CrashStack()
        arguments = (options, slot_table, theirs, crash_stack.path)
        process = self._spawn.Process(target=start, args=arguments, name="asyncq-worker")
        process.start()
        theirs.close()
        pid = process.pid
        assert pid is not None  # noqa: S101 - it has been started
        self.children.append(Child(process, slot_table, ours, options.worker_id_of(pid), now, crash_stack))

    # --- death

    def reap(self, now: float) -> None:
        """Notice dead processes: pass them on, and delay the next start if they died young."""
        for child in [child for child in self.children if child.process.exitcode is not None]:
            self.children.remove(child)
            child.was_ready = was_ready(child.pipe)
            child.pipe.close()
            child.stack = child.crash_stack.take()
            child.exit_code = child.process.exitcode
            self.on_death(child)
            failpoints.reach("reap.death_noticed")
            if child.exit_code == 0 or self.is_stopping:
                continue
            details = "\n".join(filter(None, [lifecycle.describe_exit(child.exit_code), child.stack]))
            logger.error("worker %s exited unexpectedly: %s", child.worker_id, details)
            if not child.is_alone:
                self._failed_starts = 0 if child.was_ready else self._failed_starts + 1
                self._delay_next_start(child, now)

    def _delay_next_start(self, child: Child, now: float) -> None:
        # A death that a task may have caused does not repeat itself: the task does not come back to this process.
        died_young = now - child.started_at < YOUNG_SECONDS and not child.slot_table.running()
        self._early_deaths = self._early_deaths + 1 if died_young else 0
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self._early_deaths - 2)) if self._early_deaths > 1 else 0.0
        self._start_at = now + pause

    # --- signals

    def signal_all(self, number: int) -> None:
        """Send a signal to every process."""
        for child in self.children:
            if child.process.exitcode is None:
                os.kill(child.process.pid, number)

    def kill_overdue(self, now: float) -> None:
        """Kill processes in which a task ignores its timeout; the next round replaces them."""
        for child in self.children:
            overdue = {
                running.id for running in child.slot_table.running() if running.deadline and running.deadline < now
            }
            if overdue and not child.overdue:
                child.overdue = overdue
                for id in sorted(overdue):
                    text = "worker %s is replaced: task %s ran on after its timeout"
                    logger.error(text, child.worker_id, id, extra={"task_id": id})
                kill(child)

    def kill_remaining(self) -> None:
        """Kill the processes that did not stop in time, and notice their death."""
        for child in self.children:
            logger.error("worker %s did not stop in time and is killed", child.worker_id)
            kill(child)
        self.reap(time.monotonic())


def kill(child: Child) -> None:
    """Kill one process, and wait until it is dead."""
    child.was_killed = True
    child.process.kill()
    child.process.join(5)


def was_ready(pipe: Any) -> bool:
    """Return whether the process at the other end of the pipe began to fetch tasks."""
    try:
        return bool(pipe.poll() and pipe.recv() == READY)
    except (EOFError, OSError):
        return False
