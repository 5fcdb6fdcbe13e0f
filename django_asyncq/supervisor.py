"""The supervisor starts worker processes, renews their leases, replaces dead ones and shuts all of them down in order.

Its main thread must never block for long: it renews the leases, so a task is lost only when the whole host is lost.
Work that may take long (forwarding, reconciling) is done by `maintenance` in threads of its own.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections
from django.utils import timezone

from . import conf, failpoints, lifecycle
from .broker import Broker, Lease
from .exceptions import BrokerUnavailable, TaskNotRegistered, TaskTimeout
from .maintenance.service import MaintenanceService
from .registry import registered
from .results import next_attempt_at
from .worker.bootstrap import start
from .worker.crash_stack import CrashStack
from .worker.options import READY, WorkerOptions
from .worker.slot_table import SlotTable
from .worker.wakeup import Wakeup

logger = logging.getLogger("django_asyncq.supervisor")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK_SECONDS = 0.2
# A process that dies younger than this is replaced after growing pauses.
YOUNG_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 30.0
# After the tasks' own grace period: time to write the last outcomes.
EXIT_MARGIN_SECONDS = 8.0
RECOVER_AGAIN_SECONDS = 1.0
# A burst gives up when this many processes in a row exited before they were ready; a service never gives up.
FAILED_STARTS = 3


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, and what is known about it after its death.

    overdue: ids of the tasks for which it was killed. stack: of the crash, when it left one.
    """

    process: Any
    slot_table: SlotTable
    pipe: Any
    worker_id: str
    started_at: float
    crash_stack: CrashStack
    stack: str = ""
    overdue: set[str] = field(default_factory=set)


def ignore_signals() -> None:
    """Ignore stop signals: Python removes its handlers before it exits, and a signal would then kill the process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def was_ready(pipe: Any) -> bool:
    """Return whether the process at the other end of the pipe began to fetch tasks."""
    try:
        return bool(pipe.poll() and pipe.recv() == READY)
    except (EOFError, OSError):
        return False


class WorkersCannotStart(RuntimeError):
    """Worker processes exit before they are ready; their own output says why."""


class Supervisor:
    """Run `processes` worker processes until stopped or, with `burst`, until no task is queued, running or due.

    liveness_file: touched while all processes run. code_changed: returns whether to restart the processes.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        processes: int = 1,
        burst: bool = False,
        liveness_file: Path | None = None,
        single_instance: bool | None = None,
        code_changed: Callable[[], bool] | None = None,
    ) -> None:
        self.options = options
        self.processes = processes
        self.burst = burst
        self.liveness_file = liveness_file
        self.code_changed = code_changed
        self.wakeup = Wakeup()
        self.broker = Broker("worker")
        self.maintenance = MaintenanceService(list(options.queues), single_instance=single_instance)
        self.children: list[Child] = []
        # Dead processes whose tasks are not recovered yet, each with its exit code.
        self.dead: list[tuple[Child, int | None]] = []
        self.stop_requests = 0
        self._spawn = multiprocessing.get_context("spawn")
        self._beat_at = 0.0
        self._start_at = 0.0
        self._recover_at = 0.0
        self._early_deaths = 0
        self._failed_starts = 0
        self._is_stopping = False
        self._idle_checks = 0
        self._alive_since: int | None = None
        self._is_store_unreachable = False

    # --- main loop

    def run(self) -> None:
        """Supervise until stopped. A second SIGTERM or SIGINT requeues the running tasks at once."""
        self.wakeup.attach_signals()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        atexit.register(ignore_signals)
        self.maintenance.start()
        logger.info(
            "supervisor %d started; worker processes: %d, slots in each: %d",
            os.getpid(),
            self.processes,
            self.options.concurrency,
        )
        try:
            while not self.stop_requests and not (self.burst and self._has_no_work()):
                self.tick()
                self.wakeup.wait(TICK_SECONDS, also=[child.process.sentinel for child in self.children])
        finally:
            self._shut_down()

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only a flag, see WorkerProcess._on_signal.
        self.stop_requests += 1

    def tick(self) -> None:
        """Do one round of supervision: each step below, if it is due."""
        now = time.monotonic()
        self._look_after_children(now)
        self._restart_on_code_change()
        self._give_up_on_failed_starts()
        while len(self.children) < self.processes and now >= self._start_at:
            self.children.append(self._start_child(now))

    def _look_after_children(self, now: float) -> None:
        self._kill_overdue(now)
        self._reap(now)
        self._recover_dead(now)
        self.beat()

    # --- processes

    def _restart_on_code_change(self) -> None:
        if self.code_changed is not None and self.code_changed():
            logger.info("code has changed: restarting worker processes")
            self._signal_all(signal.SIGTERM)

    def _give_up_on_failed_starts(self) -> None:
        if self.burst and self._failed_starts >= FAILED_STARTS:
            raise WorkersCannotStart("worker processes exit before they are ready; their output above says why")

    def _start_child(self, now: float) -> Child:
        # Async tasks have slots of their own, after those of the threads.
        slot_table = SlotTable(2 * self.options.concurrency)
        ours, theirs = self._spawn.Pipe()
        crash_stack = CrashStack()
        arguments = (self.options, slot_table, theirs, crash_stack.path)
        process = self._spawn.Process(target=start, args=arguments, name="asyncq-worker")
        process.start()
        theirs.close()
        pid = process.pid
        assert pid is not None  # noqa: S101 - it has been started
        return Child(process, slot_table, ours, self.options.worker_id_of(pid), now, crash_stack)

    def _reap(self, now: float) -> None:
        """Notice dead processes: queue their tasks for recovery, and delay the next start if they died young."""
        for child in [child for child in self.children if child.process.exitcode is not None]:
            self.children.remove(child)
            began_to_fetch = was_ready(child.pipe)
            child.pipe.close()
            child.stack = child.crash_stack.take()
            exit_code = child.process.exitcode
            self.dead.append((child, exit_code))
            self._recover_at = now
            failpoints.reach("reap.death_noticed")
            if exit_code == 0 or self.stop_requests or self._is_stopping:
                continue
            details = "\n".join(filter(None, [lifecycle.describe_exit(exit_code), child.stack]))
            logger.error("worker %s exited unexpectedly: %s", child.worker_id, details)
            self._failed_starts = 0 if began_to_fetch else self._failed_starts + 1
            self._delay_next_start(child, now)

    def _delay_next_start(self, child: Child, now: float) -> None:
        died_young = now - child.started_at < YOUNG_SECONDS
        self._early_deaths = self._early_deaths + 1 if died_young else 0
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self._early_deaths - 2)) if self._early_deaths > 1 else 0.0
        self._start_at = now + pause

    def _kill_overdue(self, now: float) -> None:
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
                child.process.kill()
                child.process.join(5)

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            if child.process.exitcode is None:
                os.kill(child.process.pid, number)

    # --- leases

    def beat(self) -> None:
        """Renew the leases when due. While a store is unreachable, retry soon, and log it once."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        try:
            self.renew_leases()
        except (BrokerUnavailable, DatabaseError) as error:
            connections.close_all()
            self._beat_at = now + conf.current().beat_retry_seconds
            if not self._is_store_unreachable:
                logger.warning("leases cannot be renewed: %s", error)
            self._is_store_unreachable = True
        else:
            self._beat_at = now + conf.current().beat_seconds
            if self._is_store_unreachable:
                logger.info("leases are renewed again")
            self._is_store_unreachable = False
        if self.liveness_file is not None and len(self.children) == self.processes:
            self.liveness_file.touch()

    def renew_leases(self) -> None:
        """Renew the leases of all tasks that the processes hold, and reassert tasks that Redis has forgotten."""
        settings = conf.current()
        alive_since = self.broker.reachability(settings.outage_seconds).alive_since
        # Read first: a task that begins from now on has a fresh lease, and must not count as missing.
        running = {child.worker_id: {task.id for task in child.slot_table.running()} for child in self.children}
        workers, begun = list(running), [id for ids in running.values() for id in ids]
        kept = dict.fromkeys(workers, 0)
        for queue in (self.options.queues or self.broker.known_queues()) if workers else ():
            extensions = self.broker.extend(queue, workers, settings.lease_seconds, begun)
            for worker_id, extended in zip(workers, extensions, strict=True):
                kept[worker_id] += extended.kept
            failpoints.reach("beat.leases_renewed")
        # The first mark is not a loss: Redis still has what began before it.
        has_lost_memory = self._alive_since is not None and alive_since != self._alive_since
        for worker_id, ids in running.items():
            if ids and (has_lost_memory or kept[worker_id] < len(ids)):
                lifecycle.reassert(self.broker, worker_id, ids)
        # Kept while there is no mark, so that every beat reasserts until the new mark is seen.
        self._alive_since = alive_since or self._alive_since

    # --- dead processes

    def _recover_dead(self, now: float) -> None:
        """Recover the tasks of dead processes; retry later while a store is unreachable."""
        if not self.dead or now < self._recover_at:
            return
        self._recover_at = now + RECOVER_AGAIN_SECONDS
        while self.dead:
            child, exit_code = self.dead[0]
            try:
                self.recover(child, exit_code)
            except (BrokerUnavailable, DatabaseError) as error:
                connections.close_all()
                logger.warning("worker %s: its tasks cannot be recovered yet: %s", child.worker_id, error)
                return
            self.dead.pop(0)

    def recover(self, child: Child, exit_code: int | None) -> None:
        """Recover the tasks of one dead process. Raises: BrokerUnavailable, django.db.Error."""
        started = {running.id for running in child.slot_table.running()}
        # First: Redis may still hand a task to the dead worker's blocked connection.
        self.broker.stop_handoff(child.worker_id)
        # Read again: the known names may be 5 s old, and the worker may have claimed a task of a newer queue.
        for queue in self.options.queues or sorted(self.broker.queues()):
            self.broker.requeue_moved(queue, child.worker_id)
            leases = self.broker.held(queue, child.worker_id)
            if not leases:
                continue
            recovered = lifecycle.recover(
                self.broker,
                queue,
                child.worker_id,
                leases,
                reason=lifecycle.describe_exit(exit_code),
                crashed=exit_code != 0 and not child.overdue,
                started=started,
                timed_out=self._timed_out(leases, child.overdue),
                stack=child.stack,
            )
            logger.info("worker %s: tasks recovered in queue %s: %d", child.worker_id, queue, recovered)

    @staticmethod
    def _timed_out(leases: list[Lease], overdue: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
        """Return the error and the time of the retry, by id, of tasks that overran their timeout."""
        decided: dict[str, tuple[BaseException, datetime | None]] = {}
        for id, record in lifecycle.load_rows([lease for lease in leases if lease.id in overdue]).items():
            error = TaskTimeout(
                f"the task took longer than its timeout of {record.timeout_seconds:g} s and did not stop when asked; "
                f"its process was replaced"
            )
            try:
                retry_at = next_attempt_at(registered(record.name), record, error, timezone.now())
            except TaskNotRegistered:
                retry_at = None
            decided[id] = (error, retry_at)
        return decided

    # --- shutdown

    def _has_no_work(self) -> bool:
        """Return whether a burst is finished: two checks in a row found no task queued, running or due."""
        if not self.children or time.monotonic() - self.children[0].started_at < TICK_SECONDS:
            return False
        self._idle_checks = self._idle_checks + 1 if self.maintenance.has_no_work(self.options.backend) else 0
        return self._idle_checks > 1

    def _shut_down(self) -> None:
        """Let the processes drain until the deadline, kill those that remain, and recover their tasks."""
        self._is_stopping = True
        self._signal_all(signal.SIGTERM)
        self._drain()
        self._kill_remaining()
        self._reap(time.monotonic())
        self._recover_dead(time.monotonic())
        self.maintenance.stop()
        connections.close_all()
        logger.info("supervisor %d stopped", os.getpid())

    def _drain(self) -> None:
        """Supervise processes that are stopping; pass further stop requests on to them."""
        requests = self.stop_requests
        deadline = time.monotonic() + conf.current().shutdown_grace_seconds + EXIT_MARGIN_SECONDS
        while self.children and time.monotonic() < deadline:
            self.wakeup.wait(TICK_SECONDS, also=[child.process.sentinel for child in self.children])
            if self.stop_requests > max(requests, 1):
                requests = self.stop_requests
                self._signal_all(signal.SIGTERM)
            self._look_after_children(time.monotonic())

    def _kill_remaining(self) -> None:
        for child in self.children:
            logger.error("worker %s did not stop in time and is killed", child.worker_id)
            child.process.kill()
            child.process.join(5)
