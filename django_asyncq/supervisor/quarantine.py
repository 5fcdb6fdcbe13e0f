"""Suspects run in quarantine: in extra worker processes, beside the others, that run one task at a time.

Nobody drains and nobody waits for them. A quarantine process takes one suspect after the other and exits when none
is left, or when one of them takes it down; that task was then alone. The process has an id that ends in `-alone`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from .. import conf
from ..broker import Broker
from ..broker.many_queues import queues_with
from ..broker.suspects import dequeue_suspect
from ..exceptions import BrokerUnavailable
from ..faults import Faults
from ..guard import get_logger, is_a
from ..logs import log_extra_of_ids
from ..worker.options import QuarantineOptions, WorkerOptions
from .processes import Child, Processes

logger = get_logger("django_asyncq.supervisor")

LOOK_SECONDS = 1.0
# A suspect that has waited this long beside the others gets a process of its own.
PATIENCE_SECONDS = 5.0


class Quarantine:
    """Starts a process for the first suspect, and another one each time that suspects have waited for too long.

    It claims the first suspect for the process, so of several supervisors one starts it. There are never more
    quarantine processes than slots in all other processes together.
    """

    def __init__(self, broker: Broker, options: WorkerOptions, processes: Processes) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self._faults = Faults(logger, "suspects cannot be claimed", over="suspects are claimed again")
        self._number = 1
        self._look_at = 0.0
        self._not_before = 0.0
        self._starting_at = 0.0

    def look_soon(self) -> None:
        """Look for suspects in the next round: there may be new ones."""
        self._look_at = 0.0

    def note_death(self, child: Child) -> None:
        """Wait for a while when a quarantine process died before it could fetch: the next one would die too."""
        if child.is_alone and not child.was_ready and child.exit_code != 0:
            self._not_before = time.monotonic() + PATIENCE_SECONDS

    def tick(self, now: float, *, is_draining: bool = False) -> None:
        """Start a quarantine process if a suspect waits for one. now: monotonic seconds.

        is_draining: whether this supervisor takes no more tasks.
        """
        if now < max(self._look_at, self._not_before) or self.processes.is_stopping or is_draining:
            return
        self._look_at = now + LOOK_SECONDS
        alone = len(self.processes.alone)
        if alone >= self.options.concurrency * self.processes.count:
            return
        if any(child.is_starting for child in self.processes.alone):
            # On a busy host a start takes long, and one more would make it longer.
            self._starting_at = now
        if alone and now - self._starting_at < PATIENCE_SECONDS:
            return
        try:
            queue = self._claim(waited_seconds=PATIENCE_SECONDS if alone else 0.0)
        except Exception as error:  # noqa: BLE001 - it is logged there; whatever it is, the supervisor must live
            if not is_a(error, BrokerUnavailable):
                self._faults.note(error)
            # The number stays: the next call returns what a lost reply may have claimed for it.
            self._not_before = now + PATIENCE_SECONDS
            return
        self._faults.clear()
        if queue is None:
            return
        quarantine = QuarantineOptions(self._number, queue)
        self._number += 1
        self._starting_at = now
        self.processes.start(replace(self.options, concurrency=1, max_tasks=0, quarantine=quarantine), now)

    def _claim(self, *, waited_seconds: float) -> str | None:
        """Claim a suspect for the next process; return its queue. Raises: BrokerUnavailable."""
        worker_id, seconds = self.options.alone_id(self._number), conf.current().lease_seconds
        queues = list(self.options.queues or self.broker.known_queues())
        # What it holds may be a suspect whose reply was lost.
        for queue in queues_with(self.broker, queues, "suspects", held_by=[worker_id]):
            lease = dequeue_suspect(self.broker, queue, worker_id, seconds, waited_seconds=waited_seconds)
            if lease is not None:
                text = "task %s of queue %s runs in quarantine: it was lost with its worker"
                logger.info(text, lease.id, queue, extra=log_extra_of_ids([lease.id], queue=queue))
                return queue
        return None
