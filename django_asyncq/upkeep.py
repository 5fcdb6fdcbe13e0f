"""The supervisor's second thread: what is due, and, on one host of the fleet, the repairs.

Apart from the main thread because it may take long, and renewing leases must not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.db.models import Q
from django.utils import timezone

from . import conf
from .broker import Broker
from .coordinator import StartupTaskCoordinator
from .exceptions import BrokerUnavailable
from .models import TaskRecord, TaskState
from .reconciler import Reconciler
from .scheduler import forward_due

logger = logging.getLogger("django_asyncq.upkeep")

# What is due within a second counts as due: times on the wire are whole seconds.
DUE_WITHIN_SECONDS = 2


class Upkeep(threading.Thread):
    """Forwards what is due each second; reconciles while it holds the coordinator's lock."""

    def __init__(self, queues: Sequence[str], *, single_instance: bool | None) -> None:
        super().__init__(name="upkeep", daemon=True)
        self.queues = list(queues)
        self.broker = Broker("worker")
        # Projects that share a Redis under prefixes of their own each have an upkeep of their own.
        self.lock_name = f"{conf.current().key_prefix}.upkeep"
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.reconciler = Reconciler(self.broker)
        self._stopping = threading.Event()
        self._failing = False

    def run(self) -> None:
        """Tick until stopped."""
        try:
            while not self._stopping.is_set():
                self._tick_safely()
                self._stopping.wait(conf.current().forward_seconds)
        finally:
            self.coordinator.release(self.lock_name)
            connections.close_all()

    def stop(self) -> None:
        """End the thread and give the lock back."""
        self._stopping.set()
        if self.is_alive():
            self.join(10)

    def _tick_safely(self) -> None:
        """Tick; an outage is logged once when it begins and once when it ends."""
        try:
            close_old_connections()
            self.tick()
        except (BrokerUnavailable, DatabaseError) as error:
            connections.close_all()
            if not self._failing:
                logger.warning("upkeep waits for a store: %s", error)
            self._failing = True
        except Exception:
            logger.exception("upkeep failed; it goes on")
        else:
            if self._failing:
                logger.info("upkeep goes on: both stores are back")
            self._failing = False

    def tick(self) -> None:
        """Forward what is due; reconcile if this process is the one to do it."""
        if self._is_leader():
            self.reconciler.tick(time.monotonic())
        forward_due(self.broker, self.queues or sorted(self.broker.queues()))

    def _is_leader(self) -> bool:
        self.coordinator.tick()
        return self.coordinator.is_held(self.lock_name) or self.coordinator.acquire(
            self.lock_name, conf.current().lock_ttl_seconds
        )

    def nothing_left(self, backend: str) -> bool:
        """Whether no task of this alias is queued, running or due, going by the rows. A store away: no."""
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
