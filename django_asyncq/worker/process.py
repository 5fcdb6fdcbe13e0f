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
import threading
import time
from collections.abc import Sequence
from typing import Any

from django.db import Error as DatabaseError
from django.db import connections

from .. import conf, lifecycle
from ..broker import Broker, Dequeued
from ..broker.standby import Standby
from ..broker.watch import QueueWatch
from ..exceptions import BrokerUnavailable, TaskNotRegistered
from ..tasks import registered
from .alarm import Alarm
from .board import Board
from .job import Job, Outcome
from .options import READY, WorkerOptions
from .order import QueueOrder
from .reporter import Reporter
from .room import Room
from .slots import LoopSlots, Runner, ThreadSlots
from .turns import SHORTEST_REST_SECONDS, Turns
from .waiting import Waiting

logger = logging.getLogger("django_asyncq.worker")

HAND_BACK_AFTER_SECONDS = 0.15
MARK_AFTER_SECONDS = 0.05
IDLE_LOOK_SECONDS = 5.0
TICK_SECONDS = 0.04
# So many outcomes may wait to be written, each with a result of up to a megabyte: two groups. Beyond that nothing is
# taken, for what a killed process had not written runs again.
MOST_UNWRITTEN = 1_000
# Together less than the supervisor waits beyond the grace.
REPORT_SECONDS = 4.0
PUT_OFF_SECONDS = 15


def peak_memory_mb() -> float:
    """Return the most memory this process has had; macOS counts it in bytes, Linux in kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 / 1024 if sys.platform == "darwin" else peak / 1024


class WorkerProcess:
    """The main thread of a worker process."""

    def __init__(self, options: WorkerOptions, board: Board, supervisor: Any) -> None:
        """supervisor: a pipe; what this process has to say goes there, and its end is the supervisor's death."""
        self.options = options
        self.supervisor = supervisor
        # For `select`, which would ask the pipe for it each time.
        self._supervisor_fd: int = supervisor.fileno()
        self.worker_id = options.worker_id_of(os.getpid())
        self.alarm = Alarm()
        self.broker = Broker("worker")
        self.order = QueueOrder(self.broker, options.queues, strict=options.strict)
        self.reporter = Reporter(self.broker, self.worker_id, self._written, self._is_more_to_come)
        runner = Runner(self.worker_id, board, self._ended, self._slot_is_free, self.reporter.withhold)
        self.threads = ThreadSlots(runner, options.concurrency)
        self.loop = LoopSlots(runner, options.concurrency, options.concurrency)
        self.room = Room([self.threads, self.loop], options.concurrency, self.alarm.ring)
        self.standby = Standby(self.worker_id, conf.current().lease_seconds)
        self.waiting = Waiting(self.standby)
        self.watch: QueueWatch | None = None
        self.stop_requests = 0
        self.finished_tasks = 0
        self.turns = Turns()
        self._waits_for_reporter = False
        self._waits_until_idle = False
        self._uncertain: set[str] = set()
        self._lock = threading.Lock()

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
                if not self._fetch():
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
        options = self.options
        if options.max_tasks and self.finished_tasks >= options.max_tasks:
            return True
        # Only after a task: a limit below what Django itself takes must not keep every task from running.
        return bool(options.max_memory_mb and self.finished_tasks) and peak_memory_mb() > options.max_memory_mb

    # --- looking after what runs

    def _tick(self) -> None:
        """Hand back what waits here while its turn may come elsewhere; see to what runs."""
        now = time.monotonic()
        self.hand_back(self._take_back(now - HAND_BACK_AFTER_SECONDS))
        running = self.room.running
        self.reporter.mark([job for job in running if job.is_to_be_marked(MARK_AFTER_SECONDS, now)])
        for job in running:
            if job.is_overdue(now):
                job.tell_to_stop()

    def _take_back(self, came_before: float) -> list[Job]:
        return self.threads.take_back(came_before) + self.loop.take_back(came_before)

    def hand_back(self, jobs: Sequence[Job]) -> None:
        """Give jobs back to their queues without using an attempt."""
        if not jobs:
            return
        try:
            lifecycle.hand_back(self.broker, self.worker_id, [job.run for job in jobs])
        except (BrokerUnavailable, DatabaseError) as error:
            logger.warning("%d tasks not handed back now; the supervisor will: %s", len(jobs), error)

    def _ended(self, outcome: Outcome) -> None:
        """Called by a slot when its job is over."""
        self.room.measure(time.monotonic() - (outcome.job.begun_at or outcome.job.came_at))
        with self._lock:
            self.finished_tasks += 1
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
        return self.room.occupied > 0 or self.turns.may_bring()

    def _tell_reporter(self) -> None:
        """Let outcomes be written that wait for others, when none can follow."""
        if not self._is_more_to_come():
            self.reporter.last_has_ended()

    def _written(self) -> None:
        """Called by the reporter when it has written a group."""
        if self._waits_for_reporter:
            self.alarm.ring()

    def set(self) -> None:
        """Called by the watch when a queue may have work."""
        self.turns.told()
        self.alarm.ring()

    def _sleep(self) -> None:
        """Wait for work, for room, or for the next look at the clock."""
        # Set before the look: a slot that becomes free in between rings.
        self._waits_until_idle = True
        if (queue := self.waiting.begin(self._may_stand_by)) is not None:
            self._lose(queue)
        self._waits_until_idle = self.standby.could_stand_by
        pause = self.turns.pause_seconds(TICK_SECONDS)
        if self._waits_until_idle and (rest := self.turns.rest_seconds()):
            pause = min(pause, rest)
        if self.room.occupied or self._uncertain:
            pause = min(pause, TICK_SECONDS)
        if (until_waiting := self.waiting.pause_seconds()) is not None:
            pause = min(pause, until_waiting)
        sockets = self.standby.sockets
        for descriptor in self.alarm.wait(pause, also=[self._supervisor_fd, *sockets]):
            if queue := sockets.get(descriptor):
                self._hear(queue)

    # --- fetching

    def _room(self) -> int:
        """Return how many tasks may be taken."""
        # Set before the look: what the reporter writes in between is seen, or told.
        self._waits_for_reporter = True
        if self.reporter.database_is_away or self.reporter.unwritten >= MOST_UNWRITTEN:
            return 0  # what cannot be read or written is not taken from others
        self._waits_for_reporter = False
        room = self.room.left()
        if self.options.max_tasks:
            room = min(room, self.options.max_tasks - self.finished_tasks - self.room.occupied)
        return room

    def _may_stand_by(self) -> bool:
        """Whether a task may be handed to this process: it runs nothing that could keep it from beginning another."""
        return not (self.room.occupied or self._uncertain or self.turns.rest_seconds()) and self._room() > 0

    def _hear(self, queue: str) -> None:
        """Take what was handed to this process as it stood by, or take note that there may be work."""
        try:
            heard = self.waiting.hear(queue)
        except BrokerUnavailable:
            self._lose(queue)
            return
        if heard is None:
            return
        if heard.taken is not None and heard.taken.leases:
            self._receive(queue, heard.taken, heard.since)
        elif heard.is_told:
            self.turns.told()
        elif queue not in self.order.weights:
            self.standby.leave(queue)  # it was removed
        elif heard.taken is None or not heard.taken.paused:
            self.waiting.add([queue], rest_seconds=0.0)

    def _lose(self, queue: str) -> None:
        """Look for what may have been handed in an answer that was lost."""
        self._uncertain.add(queue)
        self.turns.told()

    def _receive(self, queue: str, taken: Dequeued, since: float) -> None:
        """Run what was handed. since: monotonic seconds; no lease is older."""
        try:
            claimed = lifecycle.receive(self.broker, queue, self.worker_id, taken, self.options.backend)
        except (BrokerUnavailable, DatabaseError) as error:
            self._uncertain.add(queue)
            self._put_off_fetching(error)
            return
        self._start(claimed.runs, since)
        if not claimed.is_drained:
            self.turns.told()
            return
        # At once, for who begins it needs the interpreter.
        time.sleep(SHORTEST_REST_SECONDS)
        self.waiting.add([queue], rest_seconds=0.0)

    def _fetch(self) -> bool:
        """Take tasks from the queues in their order; return whether to ask again at once.

        Else the main thread sleeps at once: the slots need the interpreter to begin what has come.
        """
        room = self._room() if self.turns.is_due() else 0
        if room <= 0:
            return False
        self.turns.begin()
        if self.watch is not None and self.watch.take_new_names():
            self.order.look_again()
        got, empty, is_more_left = 0, [], False
        try:
            names = self.order.next()
            self._listen()
            for queue in names:
                asked_at = time.monotonic()
                claimed = self._claim(queue, room - got)
                got += len(claimed.runs)
                self._start(claimed.runs, asked_at)
                if claimed.is_drained:
                    empty.append(queue)
                is_more_left = not (claimed.is_drained or claimed.paused) or is_more_left
                if got >= room:
                    is_more_left = True
                    break
        except (BrokerUnavailable, DatabaseError) as error:
            self._put_off_fetching(error)
            return self.turns.is_due()
        if got:
            self.standby.took()
        look_seconds = min(IDLE_LOOK_SECONDS, self.order.refresh_seconds)
        if self.turns.end(got, is_more_left=is_more_left or bool(self._uncertain), look_seconds=look_seconds):
            # Who begins what has come needs the interpreter.
            self.waiting.add(empty, rest_seconds=SHORTEST_REST_SECONDS if got else 0.0)
        self._tell_reporter()
        return got > 0 and self.turns.is_due()

    def _put_off_fetching(self, error: Exception) -> None:
        """Try again on new connections; say so once per outage."""
        connections.close_all()
        self.turns.fail()
        if self.turns.failures == 2:
            logger.warning("worker %s cannot fetch: %s", self.worker_id, error)

    def _claim(self, queue: str, count: int) -> lifecycle.Claimed:
        adopted = self._adopt(queue) if queue in self._uncertain else True
        self._uncertain.add(queue)
        claimed = lifecycle.claim(self.broker, queue, self.worker_id, count, self.options.backend)
        if adopted:
            self._uncertain.discard(queue)
        return claimed

    def _adopt(self, queue: str) -> bool:
        """Run what Redis gave to this process in a reply that was lost, or whose rows could not be read."""
        self.broker.put_back(queue, self.worker_id)
        known = {str(job.run.record.id) for job in self.room.jobs}
        if self.reporter.unwritten:
            return False  # what has just ended is still held in Redis; look again later
        asked_at = time.monotonic()
        leases = [lease for lease in self.broker.held(queue, self.worker_id) if lease.id not in known]
        self._start(lifecycle.sort_out(self.broker, queue, self.worker_id, leases, self.options.backend), asked_at)
        return True

    def _start(self, runs: Sequence[lifecycle.Run], taken_at: float) -> None:
        """Find each task's code and give it to the slots; put off what is not registered here."""
        jobs: list[Job] = []
        unknown: list[tuple[lifecycle.Run, TaskNotRegistered]] = []
        for run in runs:
            try:
                jobs.append(Job(run, registered(run.record.name), taken_at))
            except TaskNotRegistered as error:
                unknown.append((run, error))
        self.threads.put([job for job in jobs if not job.is_async])
        if coroutines := [job for job in jobs if job.is_async]:
            self.loop.put(coroutines)
        if unknown:
            self._put_off(unknown)

    def _put_off(self, unknown: Sequence[tuple[lifecycle.Run, TaskNotRegistered]]) -> None:
        """Leave tasks to a worker with newer code for a while; then fail them, saying why."""
        patience = conf.current().unregistered_patience_seconds
        delay = PUT_OFF_SECONDS if patience else 1
        ages = lifecycle.put_off(self.broker, self.worker_id, [run for run, _ in unknown], delay)
        for run, reason in unknown:
            name, age = run.record.name, ages[run.record.id]
            logger.error(
                "task %s: no task named %r is registered here; put off (%d s so far)", run.record.id, name, age
            )
            if age >= patience:
                lifecycle.refuse(self.broker, run, reason)

    def _listen(self) -> None:
        """Be told of pushes by priority to the queues known now, and of new ones."""
        if self.watch is not None and self.watch.queues == self.order.names:
            return
        if self.watch is not None:
            self.watch.stop()
        self.watch = QueueWatch(self.order.names, self)
        self.watch.start()

    # --- the end

    def _shut_down(self, exit_code: int) -> None:
        """Stop fetching, hand back what has not begun, drain to the deadline, hand back the rest."""
        if self.watch is not None:
            self.watch.stop()
        self._hand_back_last()
        self.hand_back(self._take_back(time.monotonic()))
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
            self.reporter.hand_over()
        self.hand_back(rest)
        lifecycle.push_now()
        connections.close_all()
        logger.info("worker %s stopped: %d tasks done, %d handed back", self.worker_id, self.finished_tasks, len(rest))
        # Threads that still run a task cannot be ended otherwise, and its answer would be refused by its fence.
        os._exit(exit_code)

    def _hand_back_last(self) -> None:
        """Stand by no longer, and give back what was handed at the last moment."""
        for queue, heard in self.standby.close().items():
            if heard.taken is not None and heard.taken.leases:
                try:
                    self.broker.requeue(queue, self.worker_id, heard.taken.leases)
                except BrokerUnavailable as error:
                    logger.warning("a task of %s not handed back now; the supervisor will: %s", queue, error)

    def _hurry(self, deadline: float) -> None:
        """Set the flag of all runs in the last quarter of the grace: time to end."""
        if time.monotonic() > deadline - conf.current().shutdown_grace_seconds / 4:
            for job in self.room.running:
                job.tell_to_stop()
