"""How a worker process comes to its tasks: it asks its queues in turn, or is handed one as it stands by.

All of it is done by the main thread, which sleeps for as long as is said here, and on the sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from django.db import Error as DatabaseError
from django.db import connections

from ... import conf, lifecycle
from ...broker import Broker, Dequeued
from ...broker.handoff import Handoff
from ...broker.notifications import QueueListener
from ...exceptions import BrokerUnavailable, TaskNotRegistered
from ...registry import registered
from ..execute.job import Job
from ..options import WorkerOptions
from ..reporter import Reporter
from .capacity import Capacity
from .pacing import SHORTEST_REST_SECONDS, Pacing
from .queue_order import QueueOrder
from .waiting import Waiting

logger = logging.getLogger("django_asyncq.worker")

IDLE_LOOK_SECONDS = 5.0
# So many outcomes may wait to be written, each with a result of up to a megabyte: two groups. Beyond that nothing is
# taken, for what a killed process had not written runs again.
MOST_UNWRITTEN = 1_000
PUT_OFF_SECONDS = 15


class Fetcher:
    """Takes tasks while there is room, and gives them to the slots."""

    def __init__(
        self,
        broker: Broker,
        worker_id: str,
        options: WorkerOptions,
        *,
        room: Capacity,
        reporter: Reporter,
        put: Callable[[Sequence[Job]], None],
        ring: Callable[[], None],
    ) -> None:
        """put: gives jobs to the slots. ring: wakes the main thread, from any other."""
        self.broker = broker
        self.worker_id = worker_id
        self.options = options
        self.room = room
        self.reporter = reporter
        self.put = put
        self.ring = ring
        self.order = QueueOrder(broker, options.queues, strict=options.strict)
        self.turns = Pacing()
        self.standby = Handoff(worker_id, conf.current().lease_seconds)
        self.waiting = Waiting(self.standby)
        self.watch: QueueListener | None = None
        self._waits_for_reporter = False
        # Queues of which an answer may have been lost, with what it had brought.
        self._uncertain: set[str] = set()

    # --- called from other threads

    def set(self) -> None:
        """Take note that a queue may have work; the watch calls it."""
        self.turns.told()
        self.ring()

    def may_bring(self) -> bool:
        """Whether tasks are being fetched, or are to be fetched now."""
        return self.turns.may_bring()

    def written(self) -> None:
        """Take note that the reporter has written a group."""
        if self._waits_for_reporter:
            self.ring()

    # --- what the main thread sleeps on

    def begin_waits(self) -> None:
        """Wait for pushes where that is due, and stand by where a task may be handed."""
        if (queue := self.waiting.begin(self._may_stand_by)) is not None:
            self._lose(queue)

    @property
    def could_stand_by(self) -> bool:
        """Whether this process would stand by, if it ran nothing."""
        return self.standby.could_stand_by

    @property
    def sockets(self) -> dict[int, str]:
        """File descriptor → queue, whose wait has ended when there is something to read."""
        return self.standby.sockets

    def pause_seconds(self, shortest: float) -> float:
        """Return how long there is nothing to do here, if nobody rings and no socket is readable."""
        pauses = [self.turns.pause_seconds(shortest)]
        if self.could_stand_by and (rest := self.turns.rest_seconds()):
            pauses.append(rest)
        if self._uncertain:
            pauses.append(shortest)
        if (until_waiting := self.waiting.pause_seconds()) is not None:
            pauses.append(until_waiting)
        return min(pauses)

    # --- taking

    def fetch(self) -> bool:
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
        return got > 0 and self.turns.is_due()

    def hear(self, queue: str) -> None:
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

    def stop(self) -> None:
        """Take nothing any more, and give back what was handed at the last moment."""
        if self.watch is not None:
            self.watch.stop()
        for queue, heard in self.standby.close().items():
            if heard.taken is not None and heard.taken.leases:
                try:
                    self.broker.requeue(queue, self.worker_id, heard.taken.leases)
                except BrokerUnavailable as error:
                    logger.warning("a task of %s not handed back now; the supervisor will: %s", queue, error)

    def _room(self) -> int:
        """Return how many tasks may be taken."""
        # Set before the look: what the reporter writes in between is seen, or told.
        self._waits_for_reporter = True
        if self.reporter.database_is_away or self.reporter.unwritten >= MOST_UNWRITTEN:
            return 0  # what cannot be read or written is not taken from others
        self._waits_for_reporter = False
        return self.room.left()

    def _may_stand_by(self) -> bool:
        """Whether a task may be handed to this process: it runs nothing that could keep it from beginning another."""
        return not (self.room.occupied or self._uncertain or self.turns.rest_seconds()) and self._room() > 0

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

    def _claim(self, queue: str, count: int) -> lifecycle.Claimed:
        adopted = self._adopt(queue) if queue in self._uncertain else True
        self._uncertain.add(queue)
        claimed = lifecycle.claim(self.broker, queue, self.worker_id, count, self.options.backend)
        if adopted:
            self._uncertain.discard(queue)
        return claimed

    def _lose(self, queue: str) -> None:
        """Look for what may have been handed in an answer that was lost."""
        self._uncertain.add(queue)
        self.turns.told()

    def _adopt(self, queue: str) -> bool:
        """Run what Redis gave to this process in a reply that was lost, or whose rows could not be read."""
        self.broker.put_back(queue, self.worker_id)
        known = {str(job.run.record.id) for job in self.room.jobs}
        if self.reporter.unwritten:
            return False  # what has just ended is still held in Redis; look again later
        asked_at = time.monotonic()
        leases = [lease for lease in self.broker.held(queue, self.worker_id) if lease.id not in known]
        self._start(lifecycle.classify(self.broker, queue, self.worker_id, leases, self.options.backend), asked_at)
        return True

    def _put_off_fetching(self, error: Exception) -> None:
        """Try again on new connections; say so once per outage."""
        connections.close_all()
        self.turns.fail()
        if self.turns.failures == 2:
            logger.warning("worker %s cannot fetch: %s", self.worker_id, error)

    def _listen(self) -> None:
        """Be told of pushes by priority to the queues known now, and of new ones."""
        if self.watch is not None and self.watch.queues == self.order.names:
            return
        if self.watch is not None:
            self.watch.stop()
        self.watch = QueueListener(self.order.names, self)
        self.watch.start()

    # --- what was taken

    def _start(self, runs: Sequence[lifecycle.Run], taken_at: float) -> None:
        """Find each task's code and give it to the slots; put off what is not registered here."""
        jobs: list[Job] = []
        unknown: list[tuple[lifecycle.Run, TaskNotRegistered]] = []
        for run in runs:
            try:
                jobs.append(Job(run, registered(run.record.name), taken_at))
            except TaskNotRegistered as error:
                unknown.append((run, error))
        self.put(jobs)
        if unknown:
            self._put_off(unknown)

    def _put_off(self, unknown: Sequence[tuple[lifecycle.Run, TaskNotRegistered]]) -> None:
        """Leave tasks to a worker with newer code for a while; then fail them, saying why."""
        patience = conf.current().unregistered_patience_seconds
        delay = PUT_OFF_SECONDS if patience else 1
        ages = lifecycle.postpone(self.broker, self.worker_id, [run for run, _ in unknown], delay)
        for run, reason in unknown:
            name, age = run.record.name, ages[run.record.id]
            logger.error(
                "task %s: no task named %r is registered here; put off (%d s so far)", run.record.id, name, age
            )
            if age >= patience:
                lifecycle.refuse(self.broker, run, reason)
