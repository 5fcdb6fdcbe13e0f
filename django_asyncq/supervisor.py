"""The supervisor: processes started, leases kept alive, the dead replaced, the end in order.

Its main thread must never be held up: it renews the leases, so a task is lost only when the whole host is. What may
take long (forwarding, reconciling) is done by `maintenance` in a thread of its own.
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
from .results import next_try
from .worker.bootstrap import start
from .worker.crash_stack import CrashStack
from .worker.options import READY, WorkerOptions
from .worker.slot_table import SlotTable
from .worker.wakeup import Wakeup

logger = logging.getLogger("django_asyncq.supervisor")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK_SECONDS = 0.2
# A process that dies younger than this is started again with growing pauses.
YOUNG_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 30.0
# After the tasks' own grace: time to write the last outcomes.
EXIT_MARGIN_SECONDS = 8.0
RECOVER_AGAIN_SECONDS = 1.0
# A burst gives up when so many processes in a row ended before they began; a service goes on trying.
FAILED_STARTS = 3


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, and what is known of it when it is gone."""

    process: Any
    board: SlotTable
    pipe: Any
    worker_id: str
    started_at: float
    crash_stack: CrashStack
    stack: str = ""
    overdue: set[str] = field(default_factory=set)


def ignore_signals() -> None:
    """Let what comes now be without effect: Python takes its handlers away before it has ended, and would be killed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def has_said_ready(pipe: Any) -> bool:
    """Whether the process at the other end came as far as fetching."""
    try:
        return bool(pipe.poll() and pipe.recv() == READY)
    except (EOFError, OSError):
        return False


class WorkersCannotStart(RuntimeError):
    """Worker processes end before they begin; their own output says why."""


class Supervisor:
    """Runs `processes` worker processes until told to stop, or, with `burst`, until nothing is left to do."""

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
        self.alarm = Wakeup()
        self.broker = Broker("worker")
        self.maintenance = MaintenanceService(list(options.queues), single_instance=single_instance)
        self.children: list[Child] = []
        self.lost: list[tuple[Child, int | None]] = []
        self.stop_requests = 0
        self._spawn = multiprocessing.get_context("spawn")
        self._beat_at = 0.0
        self._start_at = 0.0
        self._recover_at = 0.0
        self._early_deaths = 0
        self._failed_starts = 0
        self._is_stopping = False
        self._idle_looks = 0
        self._alive_since: int | None = None
        self._is_cut_off = False

    # --- from start to end

    def run(self) -> None:
        """Supervise until stopped. A second SIGTERM or SIGINT hurries."""
        self.alarm.attach_signals()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        atexit.register(ignore_signals)
        self.maintenance.start()
        logger.info("supervisor %d: %d processes, %d slots each", os.getpid(), self.processes, self.options.concurrency)
        try:
            while not self.stop_requests and not (self.burst and self._nothing_left()):
                self.tick()
                self.alarm.wait(TICK_SECONDS, also=[child.process.sentinel for child in self.children])
        finally:
            self._shut_down()

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only a flag, see WorkerProcess._on_signal.
        self.stop_requests += 1

    def tick(self) -> None:
        """One look at everything."""
        now = time.monotonic()
        self._end_overdue(now)
        self._reap(now)
        self._recover_lost(now)
        self.beat()
        if self.code_changed is not None and self.code_changed():
            logger.info("code has changed: worker processes are started anew")
            self._signal_all(signal.SIGTERM)
        if self.burst and self._failed_starts >= FAILED_STARTS:
            raise WorkersCannotStart("worker processes end before they begin; their own output above says why")
        self._start_missing(now)

    # --- processes

    def _start_missing(self, now: float) -> None:
        while len(self.children) < self.processes and now >= self._start_at:
            self.children.append(self._start_child(now))

    def _start_child(self, now: float) -> Child:
        # Async tasks have entries of their own, behind the threads'.
        board = SlotTable(2 * self.options.concurrency)
        ours, theirs = self._spawn.Pipe()
        crash_stack = CrashStack()
        arguments = (self.options, board, theirs, crash_stack.path)
        process = self._spawn.Process(target=start, args=arguments, name="asyncq-worker")
        process.start()
        theirs.close()
        pid = process.pid
        assert pid is not None  # noqa: S101 - it has been started
        return Child(process, board, ours, self.options.worker_id_of(pid), now, crash_stack)

    def _reap(self, now: float) -> None:
        """Notice processes that have ended; see to what they held."""
        for child in [child for child in self.children if child.process.exitcode is not None]:
            self.children.remove(child)
            was_ready = has_said_ready(child.pipe)
            child.pipe.close()
            child.stack = child.crash_stack.take()
            exit_code = child.process.exitcode
            self.lost.append((child, exit_code))
            self._recover_at = now
            failpoints.reach("reap.death_noticed")
            if exit_code == 0 or self.stop_requests or self._is_stopping:
                continue
            said = "\n".join(filter(None, [lifecycle.describe_exit(exit_code), child.stack]))
            logger.error("worker %s is gone: %s", child.worker_id, said)
            self._failed_starts = 0 if was_ready else self._failed_starts + 1
            young = now - child.started_at < YOUNG_SECONDS
            self._early_deaths = self._early_deaths + 1 if young else 0
            pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self._early_deaths - 2)) if self._early_deaths > 1 else 0.0
            self._start_at = now + pause

    def _end_overdue(self, now: float) -> None:
        """Replace processes in which a task ignores its timeout."""
        for child in self.children:
            late = {running.id for running in child.board.running() if running.deadline and running.deadline < now}
            if late and not child.overdue:
                child.overdue = late
                logger.error("worker %s is replaced: %s went on after its timeout", child.worker_id, sorted(late))
                child.process.kill()
                child.process.join(5)

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            if child.process.exitcode is None:
                os.kill(child.process.pid, number)

    # --- leases

    def beat(self) -> None:
        """Renew the leases when that is due; while a store is away, try again soon, and say so once."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        try:
            self._renew()
        except (BrokerUnavailable, DatabaseError) as error:
            connections.close_all()
            self._beat_at = now + conf.current().beat_retry_seconds
            if not self._is_cut_off:
                logger.warning("leases cannot be renewed: %s", error)
            self._is_cut_off = True
        else:
            self._beat_at = now + conf.current().beat_seconds
            if self._is_cut_off:
                logger.info("leases are renewed again")
            self._is_cut_off = False
        if self.liveness_file is not None and len(self.children) == self.processes:
            self.liveness_file.touch()

    def _renew(self) -> None:
        """Renew the leases of all that the processes hold; give back to Redis what it has forgotten."""
        settings = conf.current()
        alive_since = self.broker.pulse(settings.outage_seconds).alive_since
        # Looked at first: what is begun from now on has a lease, and need not be looked for.
        running = {child.worker_id: {task.id for task in child.board.running()} for child in self.children}
        workers, begun = list(running), [id for ids in running.values() for id in ids]
        kept = dict.fromkeys(workers, 0)
        for queue in self._queues() if workers else ():
            for worker_id, extended in zip(
                workers, self.broker.extend(queue, workers, settings.lease_seconds, begun), strict=True
            ):
                kept[worker_id] += extended.kept
            failpoints.reach("beat.lease_renewed")
        # The first mark is no loss: what began before it is there.
        has_lost_memory = self._alive_since is not None and alive_since != self._alive_since
        for worker_id, ids in running.items():
            if ids and (has_lost_memory or kept[worker_id] < len(ids)):
                lifecycle.reassert(self.broker, worker_id, ids)
        # Kept while there is no mark, so that a loss is answered until the new one is seen.
        self._alive_since = alive_since or self._alive_since

    def _queues(self) -> list[str]:
        return list(self.options.queues) or self.broker.known_queues()

    # --- the dead

    def _recover_lost(self, now: float) -> None:
        """Hand back what dead processes held; again later if a store is away."""
        if not self.lost or now < self._recover_at:
            return
        self._recover_at = now + RECOVER_AGAIN_SECONDS
        while self.lost:
            child, exit_code = self.lost[0]
            try:
                self._recover(child, exit_code)
            except (BrokerUnavailable, DatabaseError) as error:
                connections.close_all()
                logger.warning("worker %s: its tasks are not handed back yet: %s", child.worker_id, error)
                return
            self.lost.pop(0)

    def _recover(self, child: Child, exit_code: int | None) -> None:
        started = {running.id for running in child.board.running()}
        # First: Redis may not have noticed yet that nobody waits there any more.
        self.broker.stop_handoff(child.worker_id)
        # Asked anew: the names known were read up to 5 s ago, and it may have taken a task of a queue named since.
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
            logger.info("worker %s: %d tasks of %s handed back", child.worker_id, recovered, queue)

    @staticmethod
    def _timed_out(leases: list[Lease], overdue: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
        """Decide what becomes of the tasks their process was ended for."""
        decided: dict[str, tuple[BaseException, datetime | None]] = {}
        rows = lifecycle.load_rows([lease for lease in leases if lease.id in overdue])
        for id, record in rows.items():
            error = TaskTimeout(
                f"the task took longer than its timeout of {record.timeout_seconds:g} s and did not stop when told; "
                f"its process was replaced"
            )
            try:
                retry_at = next_try(registered(record.name), record, error, timezone.now())
            except TaskNotRegistered:
                retry_at = None
            decided[id] = (error, retry_at)
        return decided

    # --- the end

    def _nothing_left(self) -> bool:
        """Whether a burst is over: twice in a row nothing was queued, running or due."""
        if not self.children or time.monotonic() - self.children[0].started_at < TICK_SECONDS:
            return False
        self._idle_looks = self._idle_looks + 1 if self.maintenance.nothing_left(self.options.backend) else 0
        return self._idle_looks > 1

    def _shut_down(self) -> None:
        """Let the processes drain, hurry them when told, end them at the deadline; then hand back what is left."""
        self._is_stopping = True
        self._signal_all(signal.SIGTERM)
        requests = self.stop_requests
        deadline = time.monotonic() + conf.current().shutdown_grace_seconds + EXIT_MARGIN_SECONDS
        while self.children and time.monotonic() < deadline:
            self.alarm.wait(TICK_SECONDS, also=[child.process.sentinel for child in self.children])
            if self.stop_requests > max(requests, 1):
                requests = self.stop_requests
                self._signal_all(signal.SIGTERM)
            self._while_draining()
        for child in self.children:
            logger.error("worker %s did not stop in time; it is killed", child.worker_id)
            child.process.kill()
            child.process.join(5)
        self._reap(time.monotonic())
        self._recover_lost(time.monotonic())
        self.maintenance.stop()
        connections.close_all()
        logger.info("supervisor %d stopped", os.getpid())

    def _while_draining(self) -> None:
        now = time.monotonic()
        self._end_overdue(now)
        self._reap(now)
        self._recover_lost(now)
        self.beat()
