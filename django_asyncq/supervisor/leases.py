"""The leases of the tasks that a supervisor's processes hold: renewed with each beat, reasserted if Redis lost them.

A beat also learns which of them were cancelled, so a process that missed the message learns of it a beat later.
"""

from __future__ import annotations

import time

from django.db import connections

from .. import conf, failpoints, lifecycle
from ..broker import Broker
from ..broker.many_queues import queues_with
from ..faults import Faults, in_turn
from ..guard import get_logger
from ..worker.options import WorkerOptions
from .heartbeat import HeartbeatWriter
from .processes import Processes

logger = get_logger("django_asyncq.supervisor")


class LeaseKeeper:
    """Renews the leases of the tasks that the processes hold.

    heartbeat: is given what the renewal says of the tasks.
    """

    def __init__(
        self, broker: Broker, options: WorkerOptions, processes: Processes, heartbeat: HeartbeatWriter
    ) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self.heartbeat = heartbeat
        self._beat_at = 0.0
        self._alive_since: int | None = None
        self._faults = Faults(logger, "leases cannot be renewed", over="leases are renewed again")

    @property
    def is_failing(self) -> bool:
        """Whether the last renewal failed."""
        return self._faults.is_failing

    def beat(self) -> bool:
        """Renew the leases when due; return whether it was. While a store is unreachable, retry soon; log it once."""
        now = time.monotonic()
        if now < self._beat_at:
            return False
        try:
            self.renew()
        except Exception as error:  # noqa: BLE001 - it is logged there; whatever it is, the supervisor must live
            connections.close_all()
            self._beat_at = now + conf.current().beat_retry_seconds
            self._faults.note(error)
        else:
            self._beat_at = now + conf.current().beat_seconds
            self._faults.clear()
        return True

    def renew(self) -> None:
        """Renew the leases of all tasks that the processes hold, and reassert tasks that Redis has forgotten."""
        settings = conf.current()
        alive_since = self.broker.reachability(settings.outage_seconds).alive_since
        # Read first: a task that begins from now on has a fresh lease, and must not count as missing.
        children = self.processes.children
        runs = {child.worker_id: child.slot_table.running() for child in children}
        running = {worker_id: {run.id for run in found} for worker_id, found in runs.items()}
        workers, begun = list(running), [id for ids in running.values() for id in ids]
        wanted = [id for found in runs.values() for id in self.heartbeat.unknown(found)]
        kept = dict.fromkeys(workers, 0)

        def extend(queue: str) -> None:
            extensions = self.broker.extend(queue, workers, settings.lease_seconds, begun, wanted)
            for worker_id, extended in zip(workers, extensions, strict=True):
                kept[worker_id] += extended.kept
                self.heartbeat.note(queue, extended.messages, runs[worker_id])
                if extended.cancelled:
                    self.processes.cancel(worker_id, extended.cancelled)
            failpoints.reach("beat.leases_renewed")

        queues = list(self.options.queues or self.broker.known_queues()) if workers else []
        in_turn(queues_with(self.broker, queues, held_by=workers), extend)
        # The first mark is not a loss: Redis still has what began before it.
        has_lost_memory = self._alive_since is not None and alive_since != self._alive_since
        forgotten = [id for id, ids in running.items() if ids and (has_lost_memory or kept[id] < len(ids))]
        in_turn(forgotten, lambda id: lifecycle.reassert(self.broker, id, running[id]))
        # Kept while there is no mark, so that every beat reasserts until the new mark is seen.
        self._alive_since = alive_since or self._alive_since
