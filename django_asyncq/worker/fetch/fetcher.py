"""How a worker process gets its tasks: it dequeues them, or is handed one while it is idle.

The main thread does all of it. It sleeps as long as is said here, and on the sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from django.db import connections

from ... import conf, lifecycle
from ...broker import Broker, Dequeued
from ...broker.many_queues import queues_with
from ...broker.notifications import QueueListener
from ...exceptions import BrokerUnavailable, TaskNotRegistered
from ...faults import STORE_ERRORS, Faults
from ...guard import get_logger
from ...logs import log_extra, log_extra_of_ids
from ...registry import registered
from ...storage.pooling import return_connections
from ..execute.executors import Executors
from ..execute.job import Job
from ..options import WorkerOptions
from ..pulse import Pulse
from ..reporter import Reporter
from ..wakeup import Notice, Reason, Wakeup
from .capacity import Capacity
from .pacing import SHORTEST_PAUSE_SECONDS, Pacing
from .paused_tasks import PausedTasks
from .queue_order import QueueOrder
from .waits import WAKE_LIST, Waits

logger = get_logger("django_asyncq.worker")

IDLE_LOOK_SECONDS = 5.0
# A paused queue wakes nobody when a tool resumes it; our own resume does.
PAUSED_LOOK_SECONDS = 1.0
# How many outcomes may wait to be written, each with a result of up to a megabyte: two batches. Beyond that nothing is
# fetched, because what a killed process had not written runs again.
MOST_UNWRITTEN = 1_000
POSTPONE_SECONDS = 15


class Fetcher:
    """Fetches tasks while there is capacity, and gives them to the slots."""

    def __init__(
        self,
        broker: Broker,
        worker_id: str,
        options: WorkerOptions,
        *,
        capacity: Capacity,
        executors: Executors,
        reporter: Reporter,
        wakeup: Wakeup,
        pulse: Pulse,
        on_cancel: Callable[[Collection[str]], object] | None = None,
        on_death: Callable[[str], object] | None = None,
    ) -> None:
        """on_cancel: called by the listener, with the ids of cancelled tasks. on_death: called when a thread of the
        fetcher dies (`ThreadDeath`).
        """
        self.broker = broker
        self.worker_id = worker_id
        self.options = options
        self.capacity = capacity
        self.executors = executors
        self.reporter = reporter
        self.wakeup = wakeup
        self.pulse = pulse
        self.on_cancel = on_cancel
        self.on_death = on_death
        self.order = QueueOrder(broker, options.queues, strict=options.strict)
        self.pacing = Pacing()
        self.paused_tasks = PausedTasks(worker_id)
        # The queues that were found paused at the last fetch.
        self.paused_queues: set[str] = set()
        self.faults = Faults(logger, "worker %s cannot fetch", worker_id, over="worker %s fetches again")
        self.waits = Waits(broker, worker_id, conf.current().lease_seconds, options.queues)
        self.listener: QueueListener | None = None
        # Queues that were found empty (and not paused), whose pushes are to be waited for.
        self.to_wait_for: set[str] = set()
        # Queues whose latest reply may have been lost, with the tasks in it.
        self.uncertain: set[str] = set()
        # Whether this process will never fetch again, though nobody has stopped it.
        self.is_finished = False
        # Whether it takes no tasks for now.
        self.is_paused = False

    # --- what the main thread sleeps on

    def begin_waits(self) -> None:
        """Begin to wait for pushes where that is due, and report whether a task may be handed to this process."""
        if self.pacing.until_wait() or not (self.to_wait_for or self.could_be_ready):
            return
        queue = None
        try:
            self.waits.report_ready(ready=self.is_ready(), served=self.order.weights)
            self.to_wait_for = self.waits.to_begin(self.to_wait_for, self.order.weights)
            for queue in self.to_wait_for.copy():
                self.waits.begin(queue, self.order.weights)
                self.to_wait_for.discard(queue)
        except BrokerUnavailable as error:
            self._wait_failed(error)
            if queue is not None:
                self._look_for_lost(queue)

    @property
    def could_be_ready(self) -> bool:
        """Whether a task could be handed to this process if it ran nothing."""
        return self.waits.could_be_ready

    @property
    def sockets(self) -> dict[int, str]:
        """File descriptor → queue, or WAKE_LIST; when it is readable, the wait for that queue has ended."""
        return self.waits.sockets

    def sleep_seconds(self, shortest: float) -> float:
        """Return how long there is nothing to do here, if nothing is notified and no socket is readable."""
        if self.is_paused and not self.uncertain:
            return IDLE_LOOK_SECONDS  # the supervisor wakes this thread
        found = [self.pacing.sleep_seconds(shortest)]
        if self.could_be_ready and (pause := self.pacing.pause_left()):
            found.append(pause)
        if self.uncertain:
            found.append(shortest)
        if self.to_wait_for:
            found.append(self.pacing.until_wait())
        return min(found)

    # --- fetching

    def fetch(self) -> bool:
        """Dequeue tasks from the queues in their order; return whether to fetch again at once.

        If not, the main thread sleeps at once: the slots need the interpreter to begin the tasks that have come.
        """
        again = self._fetch()
        return_connections()
        self.capacity.expects_more = self.pacing.is_due()
        return again

    def _fetch(self) -> bool:
        wanted = self.to_fetch() if self.pacing.is_due() else 0
        if wanted <= 0:
            if self.is_paused and self.pacing.is_due():
                self._start_lost()
            return False
        self.pacing.begin()
        self.capacity.expect_outcomes()
        if self.listener is not None and self.listener.take_new_names():
            self.order.refresh()
        try:
            got, empty, is_more_left = self._dequeue(wanted)
            self.pulse.note_look()
        except STORE_ERRORS as error:
            self._fetch_failed(error)
            return self.pacing.is_due()
        self.faults.clear()
        self.waits.note_fetch(got, empty, self.paused_queues)
        longest = PAUSED_LOOK_SECONDS if self.paused_queues else IDLE_LOOK_SECONDS
        look_seconds = min(longest, self.order.refresh_seconds)
        if self.pacing.finish(got, is_more_left=is_more_left or bool(self.uncertain), look_seconds=look_seconds):
            # Later if tasks have come: the slots that begin them need the interpreter.
            self._wait_for(empty, after_seconds=SHORTEST_PAUSE_SECONDS if got else 0.0)
        return got > 0 and self.pacing.is_due()

    def _dequeue(self, wanted: int) -> tuple[int, list[str], bool]:
        """Dequeue up to `wanted` tasks and start them; return how many, the empty queues, and whether more is left."""
        got, empty, is_more_left = 0, [], False
        names = self.order.next()
        self._listen()
        self.paused_queues.clear()
        waiting = set(queues_with(self.broker, names, "pending", "priority")) | self.uncertain
        for queue in names:
            if queue not in waiting:
                empty.append(queue)
                continue
            asked_at = time.monotonic()
            claimed = self.faults.attempt(
                f"the fetch from queue {queue}", partial(self._claim, queue, wanted - got), None
            )
            if claimed is None:
                continue
            got += len(claimed.runs)
            if claimed.paused:
                self.paused_queues.add(queue)
            self._start(claimed.runs, asked_at)
            if claimed.is_drained:
                empty.append(queue)
            is_more_left = not (claimed.is_drained or claimed.paused) or is_more_left
            if got >= wanted:
                return got, empty, True
        return got, empty, is_more_left

    def read_wait(self, queue: str) -> None:
        """Read what ended a wait: start the task that was handed to this process, or note that there may be work."""
        try:
            result = self.waits.read(queue)
        except BrokerUnavailable as error:
            self._wait_failed(error)
            self._look_for_lost(queue)
            return
        if self.pacing.wait_succeeded():
            logger.info("worker %s waits for pushes again", self.worker_id)
        if result is None:
            return
        if result.handed is not None and result.handed.leases:
            self.receive(queue, result.handed, result.since)
        elif result.may_have_work:
            self.pacing.note_push()
        elif queue != WAKE_LIST and queue not in self.order.weights:
            self.waits.handoff.stop_waiting(queue)  # it was removed
        elif result.handed is None or not result.handed.paused:
            self._wait_for([queue], after_seconds=0.0)
        else:
            self.pacing.note_push()  # the next fetch finds it paused, and looks again soon

    def pause(self) -> None:
        """Fetch nothing until `resume`. The listener goes on: what runs may be cancelled."""
        self.is_paused = True
        self.capacity.expects_more = False
        self.to_wait_for.clear()
        self._end_waits()

    def resume(self) -> None:
        """Fetch again."""
        self.is_paused = False
        self.pacing.note_push()

    def stop(self) -> None:
        """Fetch nothing any more, and requeue what was handed at the last moment."""
        self.capacity.expects_more = False
        if self.listener is not None:
            self.listener.stop()
        self._end_waits()

    def _end_waits(self) -> None:
        """Wait for no pushes, and requeue what was handed at the last moment."""
        for queue, result in self.waits.close().items():
            if result.handed is not None and result.handed.leases:
                try:
                    self.broker.requeue(queue, self.worker_id, result.handed.leases)
                except BrokerUnavailable as error:
                    extra = log_extra_of_ids([lease.id for lease in result.handed.leases], queue=queue)
                    text = "a task of queue %s was not requeued; the supervisor will: %s"
                    logger.warning(text, queue, error, extra=extra)

    def to_fetch(self) -> int:
        """Return how many tasks may be fetched; after 0, CAPACITY_FREED or REPORTED notifies when it is more."""
        if self.is_paused:
            self.pulse.note_look()
            return 0
        # Before the look: what the reporter writes in between is seen, or notified.
        self.wakeup.expect(Reason.REPORTED)
        is_unreachable = self.reporter.is_database_unreachable
        if self.reporter.unwritten >= MOST_UNWRITTEN and not is_unreachable:
            return 0  # for long only if the reporter hangs, which is no reason not to look
        if is_unreachable:
            self.pulse.note_look()
            return 0  # what cannot be read or written is not taken from others
        self.wakeup.ignore(Reason.REPORTED)
        found = self.capacity.to_fetch()
        if found <= 0:
            self.pulse.note_look()
        return found

    def is_ready(self) -> bool:
        """Whether a task may be handed to this process: it runs nothing that could keep it from beginning another."""
        is_free = not (self.capacity.jobs.count or self.uncertain or self.pacing.pause_left())
        return is_free and self.to_fetch() > 0

    def receive(self, queue: str, dequeued: Dequeued, since: float) -> None:
        """Start what was handed. since: monotonic seconds; no lease is older."""
        self.capacity.expect_outcomes()
        try:
            receive = partial(lifecycle.receive, self.broker, queue, self.worker_id, dequeued, self.options.backend)
            claimed = self.faults.attempt(f"the fetch from queue {queue}", receive, None)
        except STORE_ERRORS as error:
            self.uncertain.add(queue)
            self._fetch_failed(error)
            return
        if claimed is None:
            self._look_for_lost(queue)
            return
        self._start(claimed.runs, since)
        return_connections()
        if not claimed.is_drained:
            self.pacing.note_push()
            return
        # Now, since the slot that begins the task needs the interpreter.
        time.sleep(SHORTEST_PAUSE_SECONDS)
        self._wait_for([queue], after_seconds=0.0)

    def _wait_for(self, queues: Sequence[str], *, after_seconds: float) -> None:
        self.to_wait_for.update(queues)
        self.pacing.wait_later(after_seconds)

    def _claim(self, queue: str, count: int) -> lifecycle.Claimed:
        adopted = self.adopt(queue) if queue in self.uncertain else True
        self.uncertain.add(queue)
        claimed = lifecycle.claim(self.broker, queue, self.worker_id, count, self.options.backend)
        if adopted:
            self.uncertain.discard(queue)
        return claimed

    def adopt(self, queue: str) -> bool:
        """Start what Redis gave to this process in a reply that was lost, or whose rows could not be read.

        Returns False if it is too early to know.
        """
        self.broker.requeue_moved(queue, self.worker_id)
        known = {job.run.lease.id for job in self.capacity.jobs.all}
        if self.reporter.unwritten:
            return False  # Redis still holds what has just finished; look again later
        asked_at = time.monotonic()
        leases = [lease for lease in self.broker.held(queue, self.worker_id) if lease.id not in known]
        self._start(lifecycle.classify(self.broker, queue, self.worker_id, leases, self.options.backend), asked_at)
        return True

    def _start_lost(self) -> None:
        """Start what this process had been given before it was paused, in replies that were lost."""
        for queue in self.uncertain.copy():
            try:
                if self.adopt(queue):
                    self.uncertain.discard(queue)
            except STORE_ERRORS as error:
                self._fetch_failed(error)
                return

    def _look_for_lost(self, queue: str) -> None:
        """Look at the next fetch for what may have been in a lost reply. In a wake list that was no task."""
        if queue != WAKE_LIST:
            self.uncertain.add(queue)
        self.pacing.note_push()

    def _fetch_failed(self, error: Exception) -> None:
        """Fetch again later on new connections; log it once per outage.

        Raises: DatabaseNotSetUp when no fetch can succeed until a person has acted.
        """
        connections.close_all()
        self.pulse.note_look()
        self.pacing.fail()
        # The first failure may be that of a connection that had died.
        self.faults.note(error, quiet_first=True)
        if self.faults.not_set_up is not None:
            raise self.faults.not_set_up

    def _wait_failed(self, error: Exception) -> None:
        if self.pacing.wait_failed():
            logger.warning(
                "worker %s cannot wait for pushes; it looks for tasks every %g s: %s",
                self.worker_id,
                IDLE_LOOK_SECONDS,
                error,
            )

    def _listen(self) -> None:
        """Listen to the channels of the queues known now: pushes with a priority, new queues, and cancelled tasks."""
        if self.listener is not None:
            if self.listener.queues == self.order.names:
                return
            self.listener.stop()
        if self.waits.has_outgrown(self.order.weights):
            self._end_waits()
        notice = Notice(self.wakeup, Reason.PUSH)
        alias = self.broker.alias
        self.listener = QueueListener(
            self.order.names, notice, alias=alias, on_cancel=self.on_cancel, on_death=self.on_death
        )
        self.listener.start()

    # --- what was fetched

    def _start(self, runs: Sequence[lifecycle.Run], taken_at: float) -> None:
        """Find each task's code and give it to the slots; postpone those that are paused or not registered here."""
        if self.listener is not None and self.listener.take_new_pauses():
            self.paused_tasks.expire()
        runs, paused = self.paused_tasks.split(runs)
        if paused:
            lifecycle.postpone(self.broker, self.worker_id, paused, POSTPONE_SECONDS, timed=False)
        jobs: list[Job] = []
        unknown: list[tuple[lifecycle.Run, TaskNotRegistered]] = []
        for run in runs:
            try:
                jobs.append(Job(run, registered(run.record.name), taken_at))
            except TaskNotRegistered as error:
                unknown.append((run, error))
        self.executors.put(jobs)
        if unknown:
            self._postpone(unknown)

    def _postpone(self, unknown: Sequence[tuple[lifecycle.Run, TaskNotRegistered]]) -> None:
        """Leave tasks to a worker with newer code for a while; then fail them with the reason."""
        patience = conf.current().unregistered_patience_seconds
        delay = POSTPONE_SECONDS if patience else 1
        ages = lifecycle.postpone(self.broker, self.worker_id, [run for run, _ in unknown], delay)
        for run, reason in unknown:
            record = run.record
            age = ages[record.id]
            logger.error(
                "task %s: %s; postponed (for %d s so far)",
                record.id,
                reason,
                age,
                extra=log_extra(record),
            )
            if age >= patience:
                lifecycle.refuse(self.broker, run, reason)
