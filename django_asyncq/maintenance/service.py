"""The supervisor's other threads: what is due, what only one process of the fleet may do, what starts up.

Apart from the main thread, because they may take long and renewing leases must not wait for them; apart from each
other, because a tick must not wait for a sweep. Each sleeps until it has something to do, or is woken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.db.models import Q
from django.utils import timezone

from .. import conf
from ..broker import Broker
from ..broker.keys import due_channel
from ..broker.notifications import Listener
from ..exceptions import BrokerUnavailable, LockLost
from ..leadership.coordinator import StartupTaskCoordinator
from ..models import TaskRecord, TaskState
from ..scheduling.asynq_entries import BEAT_SECONDS, SchedulerEntries
from ..scheduling.scheduler import Fired, Scheduler
from .forwarder import forward_due
from .pruner import Pruner
from .reconciler import Reconciler
from .startup_tasks import StartupRunner

logger = logging.getLogger("django_asyncq.maintenance.service")

# What is due within a second counts as due: times on the wire are whole seconds.
DUE_WITHIN_SECONDS = 2
# Within the time a lock outlives its holder: how often it is looked at, by who has it and by who would have it.
LOOKS_PER_TTL = 10
# How often the process that leads looks whether something is to be mended or pruned.
REPAIR_SECONDS = 1.0
# How soon a schedule that was changed without a signal (`QuerySet.update`) is noticed.
LOOK_SECONDS = 5.0
OUTAGE_SECONDS = 1.0
STOP_SECONDS = 10.0
# Between SIGTERM and SIGKILL of a start-up task at shutdown; the tasks have had their own grace before.
STARTUP_GRACE_SECONDS = 2.0


class Loop(threading.Thread):
    """Repeats a step until stopped. step: returns in how many seconds to come again; None ends the loop.

    may: whether it is this process's to do now; while it is not, nothing is asked of the stores, nor learnt of them.
    """

    def __init__(self, name: str, step: Callable[[], float | None], may: Callable[[], bool] = lambda: True) -> None:
        super().__init__(name=name, daemon=True)
        self._step = step
        self._may = may
        self._woken = threading.Event()
        self._is_stopping = False
        self._is_failing = False

    def run(self) -> None:
        """Step and sleep in turn."""
        try:
            while not self._is_stopping:
                pause = self.round()
                if pause is None:
                    return
                self._woken.wait(pause)
                self._woken.clear()
        finally:
            connections.close_all()

    def wake(self) -> None:
        """End the current or the next sleep."""
        self._woken.set()

    def stop(self) -> None:
        """Let no step begin any more."""
        self._is_stopping = True
        self._woken.set()

    def round(self) -> float | None:
        """Step, if it may; an outage is logged once when it begins and once when it ends."""
        if not self._may():
            return LOOK_SECONDS
        try:
            close_old_connections()
            pause = self._step()
        except LockLost as error:
            logger.info("%s: %s", self.name, error)
            return OUTAGE_SECONDS
        except (BrokerUnavailable, DatabaseError) as error:
            connections.close_all()
            if not self._is_failing:
                logger.warning("%s waits for a store: %s", self.name, error)
            self._is_failing = True
            return OUTAGE_SECONDS
        except Exception:
            logger.exception("%s failed; it goes on", self.name)
            return OUTAGE_SECONDS
        if self._is_failing:
            logger.info("%s goes on: both stores are back", self.name)
        self._is_failing = False
        return pause


class MaintenanceService:
    """All that a supervisor does besides its processes. Schedules, repairs and pruning only while it leads."""

    def __init__(self, queues: Sequence[str], *, single_instance: bool | None) -> None:
        self.queues = list(queues)
        self.broker = Broker("worker")
        # Projects that share a Redis under prefixes of their own each have an maintenance of their own.
        self.lock_name = f"{conf.current().key_prefix}.maintenance"
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.reconciler = Reconciler(self.broker)
        self.pruner = Pruner(self.broker, fenced=self._fenced)
        self.scheduler = Scheduler(self._fenced)
        self.entries = SchedulerEntries()
        self.startup = StartupRunner(single_instance=single_instance)
        self._synced_term = 0
        self._beat_at = 0.0
        self._leader = Loop("leader", self._lead)
        self._forwarder = Loop("forwarder", self._forward)
        self._scheduler = Loop("scheduler", self._fire, self._may_fire)
        self._repairs = Loop("repairs", self._repair, lambda: self.leads)
        self._startup = Loop("startup", self._start_up)
        self._loops = [self._leader, self._forwarder, self._scheduler, self._repairs, self._startup]
        self._watch = Listener(channels=[due_channel()], event=self)

    # --- from start to end

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops:
            loop.start()
        self._watch.start()

    def stop(self) -> None:
        """End the threads and give the locks back."""
        for loop in self._loops:
            loop.stop()
        self._watch.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for loop in self._loops:
            if loop.is_alive():
                loop.join(max(deadline - time.monotonic(), 0.1))
        self.startup.stop(STARTUP_GRACE_SECONDS)
        if self.coordinator.is_held(self.lock_name):
            with suppress(BrokerUnavailable):
                self.entries.clear()
        self.coordinator.release(self.lock_name)

    def is_alive(self) -> bool:
        """Whether a thread still runs."""
        return any(loop.is_alive() for loop in self._loops)

    def set(self) -> None:
        """Wake those who sleep until something is due; the watch calls it."""
        self._forwarder.wake()
        self._scheduler.wake()

    def nothing_left(self, backend: str) -> bool:
        """Whether no task of this alias is queued, running or due, going by the rows. A store away: no."""
        if not self.startup.is_over:
            return False
        soon = timezone.now() + timedelta(seconds=DUE_WITHIN_SECONDS)
        due = (
            Q(state=TaskState.RUNNING)
            | Q(state=TaskState.QUEUED, run_after=None)
            | Q(state=TaskState.QUEUED, run_after__lte=soon)
            | Q(state=TaskState.FAILED, retry_at__lte=soon)
        )
        rows = TaskRecord.objects.filter(due, backend=backend)
        if self.queues:
            rows = rows.filter(queue_name__in=self.queues)
        try:
            return not rows.exists()
        except DatabaseError:
            connections.close_all()
            return False

    # --- the steps

    @property
    def leads(self) -> bool:
        """Whether this process is the one that may do what only one may."""
        return self.coordinator.is_held(self.lock_name)

    def _fenced(self) -> AbstractContextManager[int]:
        """Return a transaction in which only the one that leads may write."""
        return self.coordinator.fenced(self.lock_name)

    def _lead(self) -> float:
        self.coordinator.tick()
        if not self.leads and self.coordinator.acquire(self.lock_name, conf.current().lock_ttl_seconds):
            logger.info("this process leads: schedules, repairs and pruning are its own")
            self._scheduler.wake()
            self._repairs.wake()
        return conf.current().lock_ttl_seconds / LOOKS_PER_TTL

    def _forward(self) -> float:
        due = forward_due(self.broker, self.queues or self.broker.known_queues())
        longest = conf.current().forward_seconds
        return longest if due.next_seconds is None else min(max(due.next_seconds, 0.0), longest)

    def _may_fire(self) -> bool:
        # Without zones a time of day is no moment; a check says so.
        return self.leads and settings.USE_TZ

    def _fire(self) -> float:
        term = self.coordinator.term(self.lock_name)
        if term != self._synced_term:
            self.scheduler.sync()
            self._synced_term = term
        look = self.scheduler.look()
        self._show(look.fired)
        return LOOK_SECONDS if look.next_seconds is None else min(max(look.next_seconds, 0.0), LOOK_SECONDS)

    def _show(self, fired: Sequence[Fired]) -> None:
        """Keep what asynq's tools list up to date."""
        self.entries.note(fired)
        if time.monotonic() >= self._beat_at:
            self.entries.beat()
            self._beat_at = time.monotonic() + BEAT_SECONDS

    def _repair(self) -> float:
        self.reconciler.tick(time.monotonic())
        self.pruner.tick(time.monotonic())
        return 0.0 if self.reconciler.hurries else min(REPAIR_SECONDS, conf.current().reconcile_seconds)

    def _start_up(self) -> float | None:
        return None if self.startup.is_over else self.startup.step()
