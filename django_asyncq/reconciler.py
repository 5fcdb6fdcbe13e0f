"""Making Redis agree with the rows again: what crashed, what drifted, what was lost.

Every repair returns how many it mended, can be repeated, and is right even when two processes do it at once; the
coordinator only sees to it that one does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

from django.db.models import QuerySet
from django.utils import timezone

from . import conf, gate, lifecycle
from .broker import Broker, Expired, Lease
from .lifecycle.messages import entry_of, later_fence
from .models import Gate, TaskRecord, TaskState

logger = logging.getLogger("django_asyncq.reconciler")

# Younger rows may be in the hands of the process that enqueues them.
GRACE_SECONDS = 3
YOUNG_SECONDS = 300
ROWS_PER_PAGE = 500


class Repairs(NamedTuple):
    """What one pass mended."""

    recovered: int = 0
    pushed: int = 0
    parked: int = 0
    unleased: int = 0
    slots_added: int = 0
    slots_removed: int = 0


class Reconciler:
    """Runs the repairs when they are due: the quick ones often, the sweeps over all rows seldom."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._quick_at = 0.0
        self._sweep_at = 0.0

    def tick(self, now: float) -> Repairs:
        """Do what is due. now: monotonic seconds. Raises: BrokerUnavailable, django.db.Error."""
        settings = conf.current()
        if now < self._quick_at:
            return Repairs()
        self._quick_at = now + settings.reconcile_seconds
        remembers = self.broker.is_alive() is not None
        sweep = not remembers or now >= self._sweep_at
        if not remembers:
            # Set first: what is enqueued from now on is pushed by its own process. A sweep that fails is due again.
            self._sweep_at = 0.0
            self.broker.mark_alive()
        repairs = self.sweep() if sweep else self.quick()
        if sweep:
            self._sweep_at = now + settings.sweep_seconds
        if not remembers:
            level = logging.WARNING if any(repairs) else logging.INFO
            logger.log(level, "Redis was new or had lost its memory; built again from the rows: %s", repairs)
        elif any(repairs):
            logger.info("reconciled: %s", repairs)
        return repairs

    def quick(self) -> Repairs:
        """Lapsed leases, and young rows that were never pushed."""
        return Repairs(recovered=self.recover_expired(), pushed=self.push_missing(young=True))

    def sweep(self) -> Repairs:
        """Every repair over every row that is not final."""
        added, removed = self.audit_gates()
        return Repairs(
            recovered=self.recover_expired(),
            pushed=self.push_missing(young=False),
            parked=self.park_missing(),
            unleased=self.recover_unleased(),
            slots_added=added,
            slots_removed=removed,
        )

    def recover_expired(self) -> int:
        """Hand back tasks whose lease ran out: their host is gone, or its supervisor was silent for too long."""
        recovered = 0
        for queue in sorted(self.broker.queues()):
            while found := self.broker.expired(queue):
                now_recovered = self._recover_leases(queue, found)
                recovered += now_recovered
                # What could not be moved would be listed again and again; the next pass looks at it.
                if not now_recovered:
                    break
        return recovered

    def _recover_leases(self, queue: str, found: Iterable[Expired]) -> int:
        by_worker: dict[str, list[Lease]] = {}
        for expired in found:
            by_worker.setdefault(expired.worker, []).append(Lease(expired.id, expired.fence))
        reason = "its lease ran out: its host or supervisor is gone"
        return sum(
            lifecycle.recover(self.broker, queue, worker_id, leases, reason=reason)
            for worker_id, leases in by_worker.items()
        )

    def push_missing(self, *, young: bool) -> int:
        """Push rows in 0 that Redis does not know: a crash between commit and push, or Redis was away or emptied."""
        now = timezone.now()
        rows = TaskRecord.objects.filter(state=TaskState.QUEUED, enqueued_at__lt=now - timedelta(seconds=GRACE_SECONDS))
        if young:
            rows = rows.filter(enqueued_at__gt=now - timedelta(seconds=YOUNG_SECONDS))
        return sum(lifecycle.dispatch(list(page), again=True) for page in self._missing(rows))

    def park_missing(self) -> int:
        """Put rows that wait for a retry back into the retry set."""
        parked = 0
        rows = TaskRecord.objects.filter(state=TaskState.FAILED, retry_at__isnull=False)
        for page in self._missing(rows):
            for queue in {row.queue_name for row in page}:
                entries = [entry_of(row, fence=later_fence()) for row in page if row.queue_name == queue]
                parked += self.broker.park(queue, entries).count("parked")
        return parked

    def recover_unleased(self) -> int:
        """Hand back rows in 1 that Redis does not know, although their supervisors had time to assert them."""
        alive_since = self.broker.is_alive()
        settings = conf.current()
        quiet = settings.lease_seconds + 2 * settings.beat_seconds
        if alive_since is None or time.time() - alive_since < quiet:
            return 0
        recovered = 0
        rows = TaskRecord.objects.filter(
            state=TaskState.RUNNING, last_attempted_at__lt=timezone.now() - timedelta(seconds=quiet)
        )
        for page in self._missing(rows):
            for row in page:
                recovered += lifecycle.abandon(row, "no worker has a lease on it")
        return recovered

    def audit_gates(self) -> gate.Drift:
        """Make the slots of every gate in use agree with its rows."""
        live = TaskRecord.objects.filter(state__in=gate.LIVE_STATES).exclude(gate="")
        names = {*live.values_list("gate", flat=True).distinct(), *Gate.objects.values_list("name", flat=True)}
        added = removed = 0
        for name in sorted(names):
            drift = gate.audit(name, time.time())
            added += drift.added
            removed += drift.removed
        return gate.Drift(added, removed)

    def _missing(self, rows: QuerySet[TaskRecord]) -> Iterator[list[TaskRecord]]:
        """Yield pages of those rows that have no hash in Redis, read again after Redis was asked."""
        last = None
        while True:
            page = rows.order_by("id") if last is None else rows.order_by("id").filter(id__gt=last)
            found = list(page.values_list("id", "queue_name")[:ROWS_PER_PAGE])
            if not found:
                return
            last = found[-1][0]
            gone: list[str] = []
            for queue in {queue for _, queue in found}:
                gone += self.broker.missing(queue, [str(id) for id, name in found if name == queue])
            if gone and (still := list(rows.filter(id__in=gone))):
                yield still
