"""Making Redis agree with the rows again: what crashed, what drifted, what was lost.

Every repair returns how many it mended, can be repeated, and is right even when two processes do it at once; the
coordinator only sees to it that one does. On a healthy system every count is 0, however busy it is.

Ours is a task that has a row, or that our workers have taken (its hash has a `fence` and is active). All else that
stands in Redis is of some Go program: no repair removes it. An id without a hash is no task, whoever put it there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import NamedTuple
from uuid import UUID

from django.db.models import QuerySet
from django.utils import timezone

from .. import conf, failpoints, gates, lifecycle
from ..broker import Broker, Expired, Lease, Reachability
from ..broker.inspection import EntryState, Inspection, Page
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..lifecycle.messages import entry_of, later_fence
from ..models import Gate, TaskRecord, TaskState
from .sweep import Repairs, Sweep

logger = logging.getLogger("django_asyncq.maintenance.reconciler")

# Younger rows may be in the hands of the process that enqueues them.
GRACE_SECONDS = 3
YOUNG_SECONDS = 300
ROWS_PER_PAGE = 1000
# So many seconds of rest go with each of a sweep, in its midst and after it: it works beside those who run the tasks.
LEAST_REST = 3
# Where asynq has a task that does not run and is not about to.
SET_ASIDE = {"", "scheduled", "retry", "archived", "completed"}
PLACES_OF_FAILED = {"retry", "archived", "completed"}


class Rebuilt(NamedTuple):
    """What a rebuild did, or would do. queues: name → place → tasks put there. gates: name → slots."""

    queues: dict[str, Counter[str]]
    gates: dict[str, gates.Drift]


def look_on(rows: int) -> None:
    """Take no notice of how far a walk over rows has come."""


class Reconciler:
    """Runs the repairs when they are due: the quick ones often, the sweeps over all rows seldom."""

    def __init__(self, broker: Broker, *, looked_at: Callable[[int], None] = look_on) -> None:
        """looked_at: told after each page of rows how many it had."""
        self.broker = broker
        self.sweeping = Inspection(broker.role)
        self.looked_at = looked_at
        # Members of gates that had no live row when they were last looked at.
        self._strangers: dict[str, set[str]] = {}
        # Rows in 0 whose entry stood in a place of 3 at the last sweep.
        self._stranded: set[UUID] = set()
        # False in a rebuild that only counts.
        self._writes = True
        # Taken by the pass under way.
        self._pulse: Reachability | None = None
        self._quick_at = 0.0
        self._sweep_at = 0.0
        # What the last tick left unfinished.
        self.under_way: Sweep | None = None
        # Since when Redis remembered at the last tick, and whether a sweep has seen all of it since.
        self._alive_since: int | None = None
        self._has_seen_all = False

    @property
    def hurries(self) -> bool:
        """Whether a sweep is under way that may be filling Redis: another process's may have been cut off."""
        return self.under_way is not None and not self._has_seen_all

    def tick(self, now: float) -> Repairs:
        """Do what is due, and return what was mended. now: monotonic seconds.

        A sweep is put aside when it has had its share of the time until the quick repairs are due again, and goes on
        with them: nobody's lapsed lease waits for the end of a long one. Until one has come to its end, it has all the
        time.
        Raises: BrokerUnavailable, django.db.Error; what failed is due again.
        """
        if now < self._quick_at:
            return Repairs()
        settings = conf.current()
        self._pulse = self.broker.reachability(settings.outage_seconds)
        is_new = self._pulse.alive_since is None
        if is_new:
            # Set first: what is enqueued from now on is pushed by its own process.
            self.broker.mark_alive()
            failpoints.reach("reconcile.marked_alive")
        if is_new or self._pulse.alive_since != self._alive_since:
            # What was seen is gone; whoever else has marked Redis since may not have come to the end of its rebuild.
            self.under_way, self._sweep_at, self._strangers, self._has_seen_all = None, 0.0, {}, False
            self._alive_since = self.broker.alive_since() if is_new else self._pulse.alive_since
        repairs = Repairs()
        if self.under_way is None and now >= self._sweep_at:
            self.under_way = Sweep(self.pages(is_new=is_new), begun_at=now, is_new=is_new)
        else:
            repairs = logged(self.quick())
        if self.under_way is not None:
            repairs = repairs.plus(self._go_on(self.under_way, now, settings.reconcile_seconds))
        self._quick_at = now + settings.reconcile_seconds
        return repairs

    def _go_on(self, sweep: Sweep, now: float, seconds: float) -> Repairs:
        """Go on with a sweep for its share of so long; when it is over, say when the next one is due."""
        # Taken out: one that fails begins anew.
        self.under_way = None
        rested = now - sweep.begun_at - sweep.took
        mended = sweep.go_on(seconds / (1 + LEAST_REST) if self._has_seen_all else seconds)
        if not sweep.is_new:
            logged(mended)
        if not sweep.is_over:
            self.under_way = sweep
            return mended
        self._has_seen_all = True
        # The more rows wait, the longer it takes, and the more it slows those who work them off.
        self._sweep_at = now + max(conf.current().sweep_seconds, LEAST_REST * sweep.took - rested)
        if sweep.is_new:
            level = logging.WARNING if any(sweep.repairs) else logging.INFO
            logger.log(level, "Redis was new or had lost its memory; built again from the rows: %s", sweep.repairs)
        return mended

    def quick(self) -> Repairs:
        """Lapsed leases, young rows that were never pushed, and gate slots that the last sweep found strange."""
        drift = self.audit_gates(sorted(self._strangers)) if self._strangers else gates.Drift(0, 0)
        return Repairs(
            recovered=self.recover_expired(),
            pushed=self.push_missing(young=True),
            slots_added=drift.added,
            slots_removed=drift.removed,
        )

    def sweep(self) -> Repairs:
        """Every repair, over every row that is not final and over all that Redis has of it, in one go."""
        return reduce(Repairs.plus, self.pages(), Repairs())

    def pages(self, *, is_new: bool = False) -> Iterator[Repairs]:
        """Sweep, and yield after each page what was mended.

        is_new: Redis remembers only since now, so that rows of the last seconds are as lost as all others.
        """
        # In this order: what Redis has half of goes before it is looked which rows it lacks.
        yield Repairs(recovered=self.recover_expired())
        yield from self.sweep_places()
        yield from self.sweep_hashes()
        for pushed in self._pushing(young=False, is_new=is_new):
            yield Repairs(pushed=pushed)
        for page in self.unparked():
            yield Repairs(parked=self._park(page))
        for unleased in self._abandoning():
            yield Repairs(unleased=unleased)
        # Last: a row that lost its slot before it was pushed has to ask for one, and may be put off.
        for name in self._gates():
            drift = self.audit_gates([name])
            yield Repairs(slots_added=drift.added, slots_removed=drift.removed)

    def rebuild(self, *, dry_run: bool = False) -> Rebuilt:
        """Put every row that waits and that Redis does not know back into its place, and mend the gates.

        dry_run: only count. Raises: BrokerUnavailable, GateUnavailable, django.db.Error; what was done by then stays.
        """
        rebuilt = Rebuilt({}, {})
        self._writes = not dry_run
        if not dry_run:
            self.broker.mark_alive()
        # First, else the pushes below make the members, and nobody sees how many lacked.
        for name in self._gates():
            drift = gates.audit(name, time.time(), dry_run=dry_run)
            if any(drift):
                rebuilt.gates[name] = drift
        now = timezone.now()
        for page in self.unpushed(young=False):
            if not dry_run:
                lifecycle.push(self.broker, page, again=True)
            for row in page:
                place = "scheduled" if row.run_after and row.run_after > now else "pending"
                # A full gate has put it off.
                place = place if row.state == TaskState.QUEUED else "retry"
                rebuilt.queues.setdefault(row.queue_name, Counter())[place] += 1
        for page in self.unparked():
            if not dry_run:
                self._park(page)
            for row in page:
                rebuilt.queues.setdefault(row.queue_name, Counter())["retry"] += 1
        return rebuilt

    def recover_expired(self) -> int:
        """Hand back tasks whose lease ran out: their host is gone, or its supervisor was silent for too long.

        Not while Redis has only just come back: leases that ran out meanwhile are their supervisors' to renew.
        """
        settings = conf.current()
        pulse, self._pulse = self._pulse or self.broker.reachability(settings.outage_seconds), None
        if pulse.reachable_seconds < settings.quiet_seconds:
            return 0
        recovered = 0
        for queue in self.broker.known_queues():
            before: list[Expired] = []
            # What could not be moved would be listed again and again; the next pass looks at it.
            while (found := self.broker.expired(queue)) and found != before:
                recovered += self._recover_leases(queue, found)
                before = found
        failpoints.reach("reconcile.leases_recovered")
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

    def sweep_places(self) -> Iterator[Repairs]:
        """Walk what waits and what is active in Redis: ids without a hash, rows that are final, leases that lack."""
        for queue in sorted(self.broker.queues()):
            for page in self.sweeping.pages(queue):
                yield self._mend_page(queue, page)

    def _mend_page(self, queue: str, page: Page) -> Repairs:
        strays = [task.id for task in page.tasks if not task.state]
        dropped = self.sweeping.remove_dangling(queue, page.place, strays) if strays else 0
        if page.place == "active":
            taken = [task.id for task in page.tasks if task.state == "active" and task.fence]
            return Repairs(strays=dropped, leased=self._give_leases(queue, taken))
        return Repairs(strays=dropped, ended=self._discard_ended(queue, [task for task in page.tasks if task.state]))

    def _give_leases(self, queue: str, ids: Sequence[str]) -> int:
        return self.sweeping.grant_leases(queue, ids, conf.current().lease_seconds) if ids else 0

    def _discard_ended(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting entries of rows that have ended: the process that should have was killed in between."""
        before = timezone.now() - timedelta(seconds=GRACE_SECONDS)
        final = self._rows_of(queue, [task.id for task in tasks]).filter(finished_at__lt=before)
        ids = {str(id) for id in final.values_list("id", flat=True)}
        if not ids:
            return 0
        return self.sweeping.remove_waiting(queue, [task for task in tasks if task.id in ids])

    def _rows_of(self, queue: str, ids: Iterable[str]) -> QuerySet[TaskRecord]:
        return TaskRecord.objects.filter(id__in=list(map(UUID, filter(is_id, ids))), queue_name=queue)

    def sweep_hashes(self) -> Iterator[Repairs]:
        """Walk the key space: hashes in no list, active ones without a lease, what gone workers seem to hold."""
        for found in self.sweeping.hashes():
            for queue, workers in found.workers.items():
                yield Repairs(held=sum(self.sweeping.prune_held(queue, worker) for worker in workers))
            for queue, ids in found.tasks.items():
                misplaced = self.sweeping.misplaced(queue, ids)
                known = (
                    self._rows_of(queue, misplaced.orphans).values_list("id", flat=True) if misplaced.orphans else []
                )
                orphans = self.sweeping.repair_orphans(queue, [str(id) for id in known])
                yield Repairs(orphans=orphans, leased=self._give_leases(queue, misplaced.leaseless))

    def unpushed(self, *, young: bool, is_new: bool = False) -> Iterator[list[TaskRecord]]:
        """Yield, page by page, rows in 0 that Redis does not know, or, not among the young, has in a place of 3.

        Of most pages that is none. The latter only when seen twice: whoever retries a task writes the row first.
        is_new: as of `pages`.
        """
        now = timezone.now()
        rows = TaskRecord.objects.filter(state=TaskState.QUEUED)
        if not is_new:
            rows = rows.filter(enqueued_at__lt=now - timedelta(seconds=GRACE_SECONDS))
        if young:
            yield from self._missing(rows.filter(enqueued_at__gt=now - timedelta(seconds=YOUNG_SECONDS)))
            return
        seen, self._stranded = self._stranded, set()
        for page in self._missing(rows, PLACES_OF_FAILED | {""}):
            stranded = {row.id for row in page if row.standing}  # type: ignore[attr-defined]
            self._stranded |= stranded - seen
            yield [row for row in page if row.id not in self._stranded]

    def push_missing(self, *, young: bool) -> int:
        """Push rows in 0 that Redis does not know: a crash between commit and push, or Redis was away or emptied."""
        return sum(self._pushing(young=young))

    def _pushing(self, *, young: bool, is_new: bool = False) -> Iterator[int]:
        for page in self.unpushed(young=young, is_new=is_new):
            try:
                pushed = lifecycle.push(self.broker, page, again=True)
            except GateUnavailable as error:
                raise BrokerUnavailable(str(error)) from error
            yield pushed

    def unparked(self) -> Iterator[list[TaskRecord]]:
        """Yield, page by page, the rows that wait for a retry and that Redis does not know."""
        return self._missing(TaskRecord.objects.filter(state=TaskState.FAILED, retry_at__isnull=False))

    def _park(self, page: Sequence[TaskRecord]) -> int:
        parked = 0
        for queue in {row.queue_name for row in page}:
            self.broker.register_queue(queue)
            entries = [entry_of(row, fence=later_fence(row)) for row in page if row.queue_name == queue]
            parked += self.broker.park(queue, entries).count("parked")
        return parked

    def _abandoning(self) -> Iterator[int]:
        """Requeue RUNNING rows that nobody runs, page by page, and yield how many.

        Either Redis does not know them, or a Go server's recoverer has set them aside.
        """
        alive_since = self.broker.alive_since()
        settings = conf.current()
        quiet = settings.lease_seconds + 2 * settings.beat_seconds
        if alive_since is None or time.time() - alive_since < quiet:
            return
        rows = TaskRecord.objects.filter(
            state=TaskState.RUNNING, last_attempted_at__lt=timezone.now() - timedelta(seconds=quiet)
        )
        for page in self._missing(rows, SET_ASIDE):
            yield sum(lifecycle.abandon(row, "no worker has a lease on it") for row in page)

    def _gates(self) -> list[str]:
        """Return the names of all gates that tasks are at, that have a row, or whose slots Redis still has."""
        live = TaskRecord.objects.filter(state__in=gates.LIVE_STATES).exclude(gate="")
        named = {*live.values_list("gate", flat=True).distinct(), *Gate.objects.values_list("name", flat=True)}
        return sorted(named | gates.occupied())

    def audit_gates(self, names: Iterable[str]) -> gates.Drift:
        """Make the slots of gates agree with their rows; a slot without a live row goes when it is seen again."""
        added = removed = 0
        for name in names:
            seen = self._strangers.pop(name, set())
            drift = gates.audit(name, time.time(), seen=seen)
            if seen:
                self._strangers[name] = seen
            if any(drift):
                logger.warning("gate %s: %d slots added, %d removed", name, drift.added, drift.removed)
            added += drift.added
            removed += drift.removed
        return gates.Drift(added, removed)

    def _missing(
        self, rows: QuerySet[TaskRecord], states: Collection[str] = frozenset({""})
    ) -> Iterator[list[TaskRecord]]:
        """Yield, page by page, those rows that stand in Redis in one of some states, read again after it was asked."""
        last = None
        while True:
            page = rows.order_by("id") if last is None else rows.order_by("id").filter(id__gt=last)
            found = list(page.values_list("id", "queue_name")[:ROWS_PER_PAGE])
            if not found:
                return
            last = found[-1][0]
            gone: dict[str, str] = {}
            for queue in {queue for _, queue in found}:
                # A producer that named it less than a minute ago does not know that Redis has forgotten it since.
                if self._writes:
                    self.broker.register_queue(queue)
                entry_states = self.sweeping.entry_states(queue, [str(id) for id, name in found if name == queue])
                gone |= {task.id: task.state for task in entry_states if task.state in states}
            still = list(rows.filter(id__in=list(gone)).order_by("id")) if gone else []
            for row in still:
                row.standing = gone[str(row.id)]  # type: ignore[attr-defined]
            yield still
            if still:
                failpoints.reach("reconcile.page_repaired")
            self.looked_at(len(found))


def logged(repairs: Repairs) -> Repairs:
    """Log what was mended, if anything was."""
    if any(repairs):
        logger.info("reconciled: %s", repairs)
    return repairs


def is_id(text: str) -> bool:
    """Whether an id of Redis can be that of a row."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
