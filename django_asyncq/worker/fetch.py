"""How a worker process gets its tasks: it dequeues them, and while it is idle it waits for pushes.

The main thread does all of it. It sleeps as long as is said here, and on the sockets.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import connections

from .. import interop, lifecycle
from ..broker import Broker, pauses, servers
from ..broker.access import queues_with
from ..broker.clients import pause_after
from ..broker.waits import PushWait, WorkerListener
from ..core import names as wire_names
from ..core.guard import get_logger
from ..core.names import runs_isolated
from ..core.registry import names_digest, present_name, runnable
from ..exceptions import BrokerUnavailable, TaskNotRegistered
from ..lifecycle import Run
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.errors import STORE_ERRORS, Faults
from ..storage.routing import return_connections
from ..tasks import Task
from .capacity import Capacity
from .executors import Executors
from .job import Job, JobPhase
from .options import WorkerOptions
from .report import Reporter
from .slot_table import Pulse
from .wakeup import Notice, Reason, Wakeup

# --- When a worker process asks its queues again, and when it begins to wait for pushes.

SHORTEST_PAUSE_SECONDS = 0.0025
# A little longer than producers batch (PUSH_BATCH_SECONDS): while batches keep coming, the next comes within it.
PAUSE_AFTER_BATCH_SECONDS = 0.012
LONGEST_PAUSE_SECONDS = 0.02
# This many tasks are worth a longer pause for more; a producer batches at the same rate (`lifecycle.dispatching`).
STREAM_PER_SECOND = 400
BATCH = 4
LONGEST_BACKOFF_SECONDS = 5.0


class Pacing:
    """Decides when to ask the queues: at once after a push, else from time to time, and later after a failure.

    After it has emptied the queues, a worker pauses before it asks again, so tasks that come one by one are taken in
    batches: a batch costs little more than a single task. While pauses bring STREAM_PER_SECOND they grow, and nobody
    need wake the process. A pause that brings fewer is followed by a short one. Used by the main thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never fall."""
        self.failures = 0
        self.wait_failures = 0
        self._clock = clock
        self._may_have_work = True
        self._look_at = clock()
        self._not_before = clock()
        self._pause_seconds = 0.0
        # Whether work came during the latest pause, and whether this fetch is the first after such a pause.
        self._came_in_pause = False
        self._is_stream = False
        self._wait_at = clock()
        self._wait_again_at = clock()

    # --- asking the queues

    def note_push(self) -> None:
        """Note that a queue may have work."""
        self._came_in_pause = self._clock() < self._not_before
        self._may_have_work = True

    def is_due(self) -> bool:
        """Whether to ask now."""
        now = self._clock()
        return now >= self._not_before and (self._may_have_work or now >= self._look_at)

    def sleep_seconds(self, shortest: float) -> float:
        """Return how long nothing is to be asked: to the end of the pause if work waits for it, or to the next look."""
        now = self._clock()
        if self._may_have_work and self._not_before > now:
            return self._not_before - now
        return max(self._look_at - now, shortest)

    def begin(self) -> None:
        """Note that the queues are asked now: a push from here on counts for the next time."""
        self._is_stream, self._came_in_pause = self._came_in_pause, False
        self._may_have_work = False

    def finish(self, got: int, *, is_more_left: bool, look_seconds: float) -> bool:
        """Note how many tasks came; return whether to wait for the next push.

        look_seconds: when to look again without a push.
        """
        now = self._clock()
        if self.failures:
            # The outage is over: a wait that failed during it begins again at once.
            self.failures, self._wait_again_at = 0, now
        self._look_at = now + look_seconds
        if is_more_left:
            self._may_have_work = True
            return False
        self._is_stream = self._is_stream and got >= STREAM_PER_SECOND * self._pause_seconds
        self._pause_seconds = self._next_pause(got)
        self._not_before = now + self._pause_seconds
        if self._is_stream:
            self._may_have_work = self._came_in_pause = True
        return not self._is_stream

    def _next_pause(self, got: int) -> float:
        if self._is_stream:
            return max(SHORTEST_PAUSE_SECONDS, min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS))
        # After a longer pause, this many tasks are no sign of a producer that batches.
        if got >= BATCH and self._pause_seconds < PAUSE_AFTER_BATCH_SECONDS:
            return PAUSE_AFTER_BATCH_SECONDS
        return SHORTEST_PAUSE_SECONDS if got else 0.0

    def fail(self) -> None:
        """Note that the queues could not be asked: ask again at once, then after growing, spread-out pauses."""
        self._may_have_work = True
        self.failures += 1
        pause = 0.0 if self.failures == 1 else min(LONGEST_BACKOFF_SECONDS, 0.2 * 2**self.failures)
        self._not_before = self._clock() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    # --- waiting for pushes

    def wait_later(self, seconds: float) -> None:
        """Begin to wait for pushes only after some seconds."""
        self._wait_at = self._clock() + seconds

    def until_wait(self) -> float:
        """Return in how many seconds to begin to wait for pushes; 0 for now."""
        return max(self._wait_at - self._clock(), self._wait_again_at - self._clock(), 0.0)

    def wait_failed(self) -> bool:
        """Note that a wait failed: begin again after growing, spread-out pauses. Return whether it is the second time.

        Waits of several queues that fail at once count as one.
        """
        now = self._clock()
        if now < self._wait_again_at:
            return False
        self.wait_failures += 1
        self._wait_again_at = now + pause_after(self.wait_failures)
        return self.wait_failures == 2

    def wait_succeeded(self) -> bool:
        """Note that a wait brought an answer; return whether several had failed before."""
        had_failed, self.wait_failures = self.wait_failures >= 2, 0
        return had_failed


# --- The names of paused tasks, in the memory of a worker process.

logger = get_logger("django_asyncq.worker")

# When a message about a change was lost, this much later a worker notices it.
READ_SECONDS = 5.0
LOG_AGAIN_SECONDS = 60.0


class PausedTasks:
    """Sorts claimed runs into those to start and those whose task is paused.

    The names are read when tasks have come, at most each READ_SECONDS: an idle worker pays nothing.
    """

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._names: set[str] = set()
        self._read_at = -math.inf
        self._logged_at: dict[str, float] = {}

    def expire(self) -> None:
        """Read the names again before the next task begins."""
        self._read_at = -math.inf

    def split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """Return the runs to start, and those of paused tasks. Raises: BrokerUnavailable; then none may start yet."""
        now = time.monotonic()
        if runs and now - self._read_at >= READ_SECONDS:
            self._names = pauses.paused_tasks("worker")
            self._read_at = now
        if not self._names:
            return list(runs), []
        # By the name that the code has now: a pause and a call may know the task by a former one.
        paused = {present_name(name) for name in self._names}
        held = [run for run in runs if present_name(run.record.name) in paused]
        self._log(held, now)
        return [run for run in runs if present_name(run.record.name) not in paused], held

    def _log(self, held: Iterable[Run], now: float) -> None:
        """Log each paused task at most once a minute: its calls come again and again."""
        self._logged_at = {name: at for name, at in self._logged_at.items() if now - at < LOG_AGAIN_SECONDS}
        for name, count in Counter(run.record.name for run in held).items():
            if name not in self._logged_at:
                self._logged_at[name] = now
                text = "worker %s: task %s is paused; calls postponed now: %d"
                logger.info(text, self._worker_id, name, count, extra={"task": name})


# --- In which order a worker asks its queues.

REFRESH_SECONDS = 5.0
DEFAULT_QUEUE = "default"


class QueueOrder:
    """Every fetch asks all queues; a weight only raises the chance of being asked first.

    weights: name → weight; if empty, the queues that rows of the alias have had, and those of its tasks with a wire
    name, looked up again each REFRESH_SECONDS. A queue that only other programs know is not among them.
    strict: the highest weight is always first. Source: asynq, processor.queues.
    """

    def __init__(self, broker: Broker, weights: Mapping[str, int], *, strict: bool) -> None:
        self.broker = broker
        self.weights = dict(weights)
        self.strict = strict
        self.finds_queues = not weights
        self.refresh_seconds = REFRESH_SECONDS if self.finds_queues else float("inf")
        self._refresh_at = 0.0

    def refresh(self) -> None:
        """Look the queues up at the next fetch."""
        self._refresh_at = 0.0

    @property
    def names(self) -> list[str]:
        """The queues known now."""
        return sorted(self.weights)

    def next(self) -> list[str]:
        """Return the order of one fetch. Raises: BrokerUnavailable while it looks queues up."""
        if self.finds_queues and time.monotonic() >= self._refresh_at:
            self.weights = dict.fromkeys(sorted(self._found()), 1)
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
        if len(self.weights) == 1:
            return list(self.weights)
        if self.strict:
            return sorted(self.weights, key=lambda name: -self.weights[name])
        # A weighted shuffle without replacement, by exponential clocks: each queue's is as fast as its weight.
        return sorted(self.weights, key=lambda name: random.expovariate(self.weights[name]))

    def _found(self) -> set[str]:
        """Return the queues of the alias. Raises: BrokerUnavailable.

        Those of tasks with a wire name are registered here: a message may be the first that comes to them. Any other
        queue is registered by the first `enqueue`, so no worker asks, or waits for, one that nobody uses.
        """
        for task in wire_names.tasks_of(self.broker.alias):
            self.broker.register_queue(task.queue_name)
        return self.broker.queues() or {DEFAULT_QUEUE}


# --- Fetching itself.

IDLE_LOOK_SECONDS = 5.0
# How many outcomes may wait to be written, each with a result of up to a megabyte: two batches. Beyond that nothing is
# fetched, because what a killed process had not written runs again.
MOST_UNWRITTEN = 1_000
POSTPONE_SECONDS = 15
# How old what heartbeats say of other workers may be when a task is not known here. What is put aside although a new
# worker has it waits for the next look of the leader.
READ_WORKERS_SECONDS = 0.2
# Then such a task is looked at again, whatever else has failed to bring it back.
UNKNOWN_SECONDS = 3600


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
        broker.code = names_digest()
        self.broker = broker
        self.worker_id = worker_id
        self.options = options
        self.capacity = capacity
        self.queue_slots = capacity.queue_slots
        self.executors = executors
        self.reporter = reporter
        self.wakeup = wakeup
        self.pulse = pulse
        self.on_cancel = on_cancel
        self.on_death = on_death
        self.order = QueueOrder(broker, options.queues, strict=options.strict)
        self.pacing = Pacing()
        self.paused_tasks = PausedTasks(worker_id)
        self.faults = Faults(logger, "worker %s cannot fetch", worker_id, over="worker %s fetches again")
        self.waits: list[PushWait] = []
        self.listener: WorkerListener | None = None
        # Whether all queues were found empty, or paused, so that pushes are to be waited for.
        self.is_idle = False
        # Queues for which this process was woken, and that it has not asked since.
        self.woken_for: set[str] = set()
        # Queues whose latest reply may have been lost, with the tasks in it.
        self.uncertain: set[str] = set()
        # Whether this process will never fetch again, though nobody has stopped it.
        self.is_finished = False
        # Whether it takes no tasks for now.
        self.is_paused = False
        self._workers: list[servers.WorkerInfo] = []
        self._read_workers_at = 0.0

    # --- what the main thread sleeps on

    def begin_waits(self) -> None:
        """Begin to wait for pushes, if that is due."""
        if not self.is_idle or self.pacing.until_wait():
            return
        try:
            full = self.queue_slots.full if self.queue_slots is not None else ()
            for wait in self.waits:
                if left := wait.begin(without=full):
                    self.broker.wake(left)
            self.is_idle = False
        except BrokerUnavailable as error:
            self._wait_failed(error)

    @property
    def sockets(self) -> dict[int, PushWait]:
        """File descriptor → wait; when it is readable, the wait has ended."""
        sockets = ((wait.socket, wait) for wait in self.waits)
        return {each.fileno(): wait for each, wait in sockets if each is not None and each.fileno() >= 0}

    def sleep_seconds(self, shortest: float) -> float:
        """Return how long there is nothing to do here, if nothing is notified and no socket is readable."""
        if self.is_paused and not self.uncertain:
            return IDLE_LOOK_SECONDS  # the supervisor wakes this thread
        found = [self.pacing.sleep_seconds(shortest)]
        if self.uncertain:
            found.append(shortest)
        if self.is_idle:
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
            if self.pacing.is_due():
                self._wake_others(self.woken_for)
                if self.is_paused:
                    self._start_lost()
            return False
        self.pacing.begin()
        self.capacity.expect_outcomes()
        if self.listener is not None and self.listener.take_new_names():
            self.order.refresh()
        try:
            got, is_more_left = self._dequeue(wanted)
            self.pulse.note_look()
        except STORE_ERRORS as error:
            self._fetch_failed(error)
            return self.pacing.is_due()
        self.faults.clear()
        if self.woken_for:
            self._wake_others(self.woken_for)
        look_seconds = min(IDLE_LOOK_SECONDS, self.order.refresh_seconds)
        if self.pacing.finish(got, is_more_left=is_more_left or bool(self.uncertain), look_seconds=look_seconds):
            self.is_idle = True
            # Later if tasks have come: the slots that begin them need the interpreter.
            self.pacing.wait_later(SHORTEST_PAUSE_SECONDS if got else 0.0)
        return got > 0 and self.pacing.is_due()

    def _dequeue(self, wanted: int) -> tuple[int, bool]:
        """Dequeue up to `wanted` tasks and start them; return how many, and whether more is left."""
        got, is_more_left = 0, False
        names = self.order.next()
        self._listen()
        waiting = set(queues_with(self.broker, names, "pending", "priority")) | self.uncertain
        self.woken_for &= waiting
        if self.queue_slots is not None:
            self.queue_slots.keep_full(waiting)
        for queue in names:
            # One that is full stays among those that this process was woken for, so another worker is.
            if queue not in waiting or (self.queue_slots is not None and self.queue_slots.is_full(queue)):
                continue
            asked_at = time.monotonic()
            claimed = self.faults.attempt(
                f"the fetch from queue {queue}", partial(self._claim, queue, wanted - got), None
            )
            self.woken_for.discard(queue)
            if claimed is None:
                continue
            got += len(claimed.runs)
            self._start(claimed.runs, asked_at)
            has_more = not (claimed.is_drained or claimed.paused)
            if has_more and self.queue_slots is not None and self.queue_slots.is_full(queue):
                has_more = False  # `note_freed` says when to ask again
            is_more_left = has_more or is_more_left
            if got >= wanted:
                return got, True
        return got, is_more_left

    def read_wait(self, wait: PushWait) -> None:
        """Read what ended a wait, and note that there may be work."""
        try:
            queue = wait.read()
        except BrokerUnavailable as error:
            self._wait_failed(error)
            return
        if self.pacing.wait_succeeded():
            logger.info("worker %s waits for pushes again", self.worker_id)
        if queue:
            self.woken_for.add(queue)
            self.pacing.note_push()
        elif queue is not None:
            self.is_idle = True  # wait on

    def note_freed(self) -> None:
        """Note that a task of a queue with a limit has left: if the queue was full, it may have more."""
        if self.queue_slots is not None and self.queue_slots.full:
            self.pacing.note_push()

    def pause(self) -> None:
        """Fetch nothing until `resume`. The listener goes on: what runs may be cancelled."""
        self.is_paused = True
        self.capacity.expects_more = False
        self._end_waits()

    def resume(self) -> None:
        """Fetch again."""
        self.is_paused = False
        self.pacing.note_push()

    def stop(self) -> None:
        """Fetch nothing any more."""
        self.capacity.expects_more = False
        if self.listener is not None:
            self.listener.stop()
        self._end_waits()

    def _end_waits(self) -> None:
        """Wait for no pushes; what may have woken this process at the last moment wakes another."""
        queues = {queue for wait in self.waits for queue in wait.queues if wait.since is not None}
        for wait in self.waits:
            wait.close()
        self.waits, self.is_idle = [], False
        self._wake_others(self.woken_for | queues)

    def _wake_others(self, queues: Collection[str]) -> None:
        """Wake another worker for the tasks of some queues, which this process does not take."""
        if queues:
            with suppress(BrokerUnavailable):  # the leader does it within a second
                self.broker.wake(sorted(queues))
        self.woken_for.clear()

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

    def _claim(self, queue: str, count: int) -> lifecycle.Claimed:
        adopted = self.adopt(queue) if queue in self.uncertain else True
        self.uncertain.add(queue)
        if self.queue_slots is not None and queue in self.queue_slots.limits:
            # After the adoption, which counts. Until then it is not known how many tasks of the queue are here.
            count = self.queue_slots.most(queue, count) if adopted else 0
            if not count:
                if adopted:
                    self.uncertain.discard(queue)
                return lifecycle.Claimed([], paused=False, is_drained=False, others=lifecycle.Others([], []))
        claimed = interop.claim(self.broker, queue, self.worker_id, count, self.options.backend)
        if adopted:
            self.uncertain.discard(queue)
        return claimed

    def adopt(self, queue: str) -> bool:
        """Start what Redis gave to this process in a reply that was lost, or whose rows could not be read.

        Returns False if it is too early to know.
        """
        jobs = [job for job in self.capacity.jobs.all if job.phase is not JobPhase.ISOLATED]
        known = {job.run.lease.id for job in jobs}
        if self.reporter.unwritten:
            return False  # Redis still holds what has just finished; look again later
        asked_at = time.monotonic()
        leases = [lease for lease in self.broker.held(queue, self.worker_id) if lease.id not in known]
        self._start(interop.classify(self.broker, queue, self.worker_id, leases, self.options.backend), asked_at)
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

    def _fetch_failed(self, error: Exception) -> None:
        """Fetch again later on new connections; log it once per outage.

        Raises: DatabaseNotSetUp when no fetch can succeed until a person has acted.
        """
        connections.close_all()
        self.pulse.note_look()
        self.pacing.fail()
        self._wake_others(self.woken_for)
        # The first failure may be that of a connection that had died.
        self.faults.note(error, quiet_first=True)
        if self.faults.not_set_up is not None:
            raise self.faults.not_set_up

    def _wait_failed(self, error: Exception) -> None:
        # Ask now: what the reply would have said is lost.
        self.is_idle = True
        self.pacing.note_push()
        if self.pacing.wait_failed():
            logger.warning(
                "worker %s cannot wait for pushes; it looks for tasks every %g s: %s",
                self.worker_id,
                IDLE_LOOK_SECONDS,
                error,
            )

    def _listen(self) -> None:
        """Listen to new queues, pauses and cancelled tasks; let the waits be for the queues known now."""
        names = self.order.names
        if sorted(queue for wait in self.waits for queue in wait.queues) != names:
            for wait in self.waits:
                wait.close()
            # In a cluster each queue has its own slot.
            parts = [names] if self.broker.reaches_all else [[name] for name in names]
            self.waits = [PushWait(self.broker, part) for part in parts]
        if self.listener is None:
            notice = Notice(self.wakeup, Reason.PUSH)
            alias = self.broker.alias
            self.listener = WorkerListener(notice, alias=alias, on_cancel=self.on_cancel, on_death=self.on_death)
            self.listener.start()

    # --- what was fetched

    def _start(self, runs: Sequence[lifecycle.Run], taken_at: float) -> None:
        """Find each task's code and give it to the slots; postpone those that are paused or not registered here.

        Raises: BrokerUnavailable, django.db.Error; then none has begun.
        """
        if runs:
            # For the estimates of the slots: while this process was idle, nobody measured.
            database_clock.now()
        if self.listener is not None and self.listener.take_new_pauses():
            self.paused_tasks.expire()
        try:
            starting, paused = self.paused_tasks.split(runs)
            if paused:
                lifecycle.postpone(self.broker, self.worker_id, paused, POSTPONE_SECONDS)
        except STORE_ERRORS:
            # Nothing begins by names that may be too old. This process holds these runs, so it finds them again.
            self.uncertain.update(run.record.queue_name for run in runs)
            raise
        jobs: list[Job] = []
        unknown: list[tuple[lifecycle.Run, TaskNotRegistered]] = []
        found: dict[tuple[str, int], Task[Any, Any] | TaskNotRegistered] = {}
        for name, version in {(run.record.name, run.record.version) for run in starting}:
            try:
                found[name, version] = runnable(name, version)
            except TaskNotRegistered as error:
                found[name, version] = error
        for run in starting:
            task = found[run.record.name, run.record.version]
            if isinstance(task, TaskNotRegistered):
                unknown.append((run, task))
            else:
                jobs.append(Job(run, task, taken_at))
        self.executors.put(jobs)
        if unknown:
            self._postpone(unknown)

    def _is_known_elsewhere(self, record: TaskRecord) -> bool:
        """Whether another worker takes tasks of this name, as the heartbeats say."""
        if record.is_suspect:
            return False  # of all workers, a quarantine process has it
        if (now := time.monotonic()) >= self._read_workers_at:
            self._workers = servers.workers(self.broker.alias, "worker")
            self._read_workers_at = now + READ_WORKERS_SECONDS
        key = (record.backend, record.queue_name, record.name, record.version)
        return any(each.knows(*key) for each in self._workers)

    def _postpone(self, unknown: Sequence[tuple[lifecycle.Run, TaskNotRegistered]]) -> None:
        """Leave tasks to workers whose code has them. While there is none, they wait for one, however long."""
        left = [run for run, _ in unknown if self._is_known_elsewhere(run.record)]
        if left:
            lifecycle.leave_to_others(self.broker, self.worker_id, left, POSTPONE_SECONDS)
            names = ", ".join(sorted({run.record.name for run in left}))
            logger.info("tasks left to workers whose code has them: %d (%s)", len(left), names)
            unknown = [each for each in unknown if each[0] not in left]
        if not unknown:
            return
        runs = [run for run, _ in unknown]
        lifecycle.postpone(self.broker, self.worker_id, runs, UNKNOWN_SECONDS, is_unknown=True)
        # A version that this code does not have has a reason of its own.
        for (name, reason), count in Counter((run.record.name, str(reason)) for run, reason in unknown).items():
            text = "%d of task %s wait for a worker whose code has it: %s"
            logger.error(text, count, name, reason, extra={"task": name})


# --- How a process that was started for one task gets it.


class AloneFetcher(Fetcher):
    """Takes the task that was claimed for this process, which exits once its outcome is written.

    The process of a suspect goes on with the other suspects of that queue, one after the other, until none is left.
    """

    # Whether it takes another task after those that it had.
    _takes_more = True

    def begin_waits(self) -> None:
        """Wait for no pushes."""

    def pause(self) -> None:
        """Finish after the current task: the remaining suspects are for another host."""
        self._takes_more = False

    def _fetch(self) -> bool:
        if self.capacity.jobs.count:
            return False
        # Before the look: what the reporter writes in between is seen, or notified.
        self.wakeup.expect(Reason.REPORTED)
        if self.reporter.unwritten or not self.pacing.is_due():
            return False
        if not self._takes_more:
            self.is_finished = True
            return True
        self.pacing.begin()
        self.capacity.expect_outcomes()
        alone, asked_at = self.options.alone, time.monotonic()
        assert alone is not None  # noqa: S101 - it is what makes the process use this class
        # While a function runs, nothing wakes this thread: see `Interruption.exit_if_cut_off`.
        self.wakeup.ignore(Reason.REPORTED)
        try:
            self.order.next()
            self._listen()
            claimed = interop.claim_suspect(self.broker, alone.queue, self.worker_id, self.options.backend)
            self._start(claimed.runs, asked_at)
        except STORE_ERRORS as error:
            self._fetch_failed(error)
            return self.pacing.is_due()
        self.faults.clear()
        self.pacing.finish(1, is_more_left=True, look_seconds=0.0)
        self.is_finished = claimed.is_drained
        self._takes_more = self._takes_more and not runs_isolated(alone.worker_id)
        return self.is_finished
