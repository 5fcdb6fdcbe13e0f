"""Make Redis agree with the rows again after crashes, outages and lost memory.

Every round (RECONCILE_SECONDS apart) finds

- an active task whose lease has expired, because its host or supervisor died (`recover_expired`);
- a QUEUED row of the last five minutes that Redis does not know, because its process crashed between commit and push
  (`push_missing`);
- a task that was cancelled while it ran, or has not begun in time (`StopRepairs`);
- what other programs have done to our tasks, and to those that only they run (`repairs`);
- a gate slot that had no unfinished row at the last audit, because a process crashed before it released the slot
  (`audit_gates`).

A sweep (SWEEP_SECONDS apart, and at once when Redis has lost its memory) also finds

- an id in a list without a hash, after an eviction (`repair_lists`);
- a waiting entry of a finished row, because a process crashed before it could remove it (`repair_lists`);
- an active task of ours without a lease, after an eviction (`repair_lists`, `repair_hashes`);
- a hash in no list, after an eviction (`repair_hashes`);
- a claim of a dead worker on a task that another process has recovered (`repair_hashes`);
- a QUEUED row of any age that Redis does not know, or has had among failed tasks for two sweeps (`push_missing`);
- a RETRYING row that Redis does not know (`park_missing`);
- a RUNNING row that no worker runs (`requeue_lost_runs`);
- a gate whose slots or waiters differ from its rows (`audit_gates`).

Every repair returns how many repairs it made, can be repeated, and is safe when two processes do it at once. The
leadership lock only saves the work of doing it twice. On a healthy system every count is 0, however busy it is.

`lifecycle.base` says whose a task is. An id without a hash is no task and may be removed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import CharField, Q, Subquery
from django.db.models.functions import Cast

from .. import conf, gates, lifecycle
from ..broker import Broker, Expired, Lease, Reachability, redis_clock
from ..broker.access import queues_with
from ..broker.inspection import Inspection
from ..control import PauseKeeper
from ..core.aliases import one_alias_per_prefix, uses_redis
from ..core.guard import get_logger, is_a
from ..core.names import lowest_uuid7_at
from ..core.several_gates import read_others
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..lifecycle.dispatching import by_queue
from ..lifecycle.messages import entry_of, later_fence
from ..models import FailureReason, Gate, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock, identity
from ..storage.errors import Parts
from ..storage.isolation import each_alone, usable_rows
from ..storage.routing import as_check, rows_of, writing_database
from ..storage.walking import QUEUED, RUNNING, TO_RETRY, Way, pages
from .repairs import (
    GRACE_SECONDS,
    EntryRepairs,
    EvidenceRepairs,
    Rebuilt,
    RemoteTasks,
    Repairs,
    RowAndEntry,
    Sweep,
    ignore_progress,
    log_repairs,
    repair_groups,
)

# --- What a Redis that has lost its memory must know before any task is pushed to it.


def prepare(broker: Broker) -> None:
    """Restore the pauses, so that no task of a paused queue begins; then mark that Redis remembers from now on.

    Safe to call at any time. Raises: BrokerUnavailable, django.db.Error.
    """
    PauseKeeper().tick()
    # Before the rebuild: tasks enqueued from now on are pushed by their own process.
    broker.mark_alive()


# --- Close what was cancelled or has expired, and ask the workers of cancelled tasks again.
#
# A part of each quick pass of the reconciler. So the gate slots of a queue without workers are released, and no
# cancel is forgotten: a message may be lost, and Redis may forget the field with everything else, but the row does
# not. Each statement reads an index that holds hardly any row.


class StopRepairs:
    """The repairs of tasks that must not go on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def tick(self, *, cancelled: bool = True, late: bool = True) -> int:
        """Do each of them; return how many tasks were closed. Raises: BrokerUnavailable, django.db.Error.

        cancelled, late: whether there may be tasks that were cancelled, and such that have not begun in time.
        """
        attempt, closed = self._parts.attempt, 0
        if cancelled:
            closed += attempt("closing of cancelled tasks", lifecycle.close_cancelled, 0)
        if late:
            closed += attempt("closing of expired tasks", lifecycle.expire, 0)
        if cancelled:
            attempt("requests to stop", lifecycle.ask_again, 0)
        return closed


YOUNG = timedelta(minutes=5)

# --- Ask in one statement for which of the quick repairs there is anything to look at: hardly ever for any of them.


class Candidates(NamedTuple):
    """Whether there are such rows. cancelled: those with a request that are not over. late: past `expires_at`.

    young: QUEUED ones of the last minutes.
    """

    followers: bool = True
    remote: bool = True
    young: bool = True
    cancelled: bool = True
    late: bool = True


def find_candidates() -> Candidates:
    """Look for one row of each kind, along its index. Raises: django.db.Error."""
    rows, now = rows_of(TaskRecord), database_clock.now()
    unfinished = rows.filter(finished_at__isnull=True)
    looks = {
        "followers": (rows.filter(after_id__isnull=False), "after_id"),
        "remote": (unfinished.filter(is_remote=True), "id"),
        "young": (rows.filter(state=TaskState.QUEUED, id__gte=lowest_uuid7_at(now - YOUNG)), "id"),
        "cancelled": (unfinished.filter(cancel_requested_at__isnull=False), "cancel_requested_at"),
        "late": (unfinished.filter(expires_at__isnull=False, expires_at__lte=now), "expires_at"),
    }
    # Ordered, so that none is looked for among all that are kept; as text, because SQLite may hold what cannot be read.
    asked = {
        name: Subquery(found.order_by(column).values(text=Cast(column, CharField()))[:1])
        for name, (found, column) in looks.items()
    }
    found: Any = identity.row().values(**asked).first()
    return Candidates() if found is None else Candidates(**{name: each is not None for name, each in found.items()})


logger = get_logger("django_asyncq.fleet.reconciler")

ROWS_PER_PAGE = 1000
# A sweep pauses three seconds for each second it works, within the sweep and after it, so that it leaves three quarters
# of the time to the workers.
PAUSE_FACTOR = 3
# States of entries in Redis; "" means that Redis does not know the task.
UNKNOWN = frozenset({""})
FINISHED_ENTRY_STATES = frozenset({"archived", "completed"})
FAILED_ENTRY_STATES = FINISHED_ENTRY_STATES | {"retry"}
# An entry in one of these states is neither running nor about to run.
IDLE_ENTRY_STATES = frozenset({"", "scheduled", "retry", "archived", "completed"})


class Reconciler:
    """Run each repair when it is due: the quick ones often, a sweep over all unfinished rows seldom."""

    def __init__(self, broker: Broker, *, on_page: Callable[[int], None] = ignore_progress) -> None:
        """on_page: called after each page of rows with the number of rows in it."""
        self.broker = broker
        self._parts = Parts(logger)
        # Aliases of unfinished rows: the settings may not name them any more.
        self._aliases_of_rows: set[str] = set()
        self.on_page = on_page
        # Gate → slots that had no unfinished row at the last audit.
        self._unmatched_slots: dict[str, set[str]] = {}
        # Gate → waiters that were not RETRYING at the last audit.
        self._unmatched_waiters: dict[str, set[str]] = {}
        # QUEUED rows whose entry was in a state of FAILED tasks at the last sweep.
        self._stranded: set[UUID] = set()
        self._is_dry_run = False
        # Read at the start of a round, and used by its first repair.
        self._reachability: Reachability | None = None
        self._quick_at = 0.0
        self._sweep_at = 0.0
        self._evidence = EvidenceRepairs(broker, self._parts)
        self._remote = RemoteTasks(broker)
        # The sweep that the last round left unfinished.
        self.current_sweep: Sweep | None = None
        # When Redis began to remember, as of the last round, and whether a sweep has checked everything since then.
        self._alive_since: int | None = None
        self.has_checked_all = False

    @property
    def brokers(self) -> list[Broker]:
        """One for each prefix: of the aliases in TASKS, and of those that unfinished rows have."""
        return [self.broker.of_alias(alias) for alias in one_alias_per_prefix(self._aliases_of_rows)]

    @property
    def is_urgent(self) -> bool:
        """Whether the sweep must go on at once, because Redis may lack tasks that no sweep has looked for yet."""
        return self.current_sweep is not None and not self.has_checked_all

    def tick(self, now: float) -> Repairs:
        """Do the repairs that are due, and return what was repaired. now: monotonic seconds.

        A sweep gets a share of the time until the next quick repairs and continues after them, so no expired lease
        waits for a long sweep to finish. Until one sweep has checked everything, it gets all of the time.
        Raises: BrokerUnavailable, django.db.Error; what failed is due again.
        """
        if now < self._quick_at:
            return Repairs()
        is_rebuild = self._notice_lost_memory(conf.current().outage_seconds)
        # First, so that no sweep can hold them up. Not when Redis has just come back: the sweep then pushes all rows.
        repairs = Repairs() if is_rebuild else log_repairs(self.quick_repairs())
        if self.current_sweep is None and now >= self._sweep_at:
            self.current_sweep = Sweep(self.sweep_steps(is_rebuild=is_rebuild), begun_at=now, is_rebuild=is_rebuild)
        if self.current_sweep is not None:
            repairs = repairs.plus(self._continue_sweep(self.current_sweep, now, conf.RECONCILE_SECONDS))
        self._quick_at = now + conf.RECONCILE_SECONDS
        return repairs

    def _notice_lost_memory(self, outage_seconds: float) -> bool:
        """Start over when Redis has lost its memory since the last round; return whether it has only just come back."""
        self._reachability = self.broker.reachability(outage_seconds)
        is_new = self._reachability.alive_since is None
        if is_new:
            prepare(self.broker)
        if is_new or self._reachability.alive_since != self._alive_since:
            # Earlier findings are void. If another process has marked Redis, its rebuild may not have finished.
            self.current_sweep, self._sweep_at, self._unmatched_slots, self.has_checked_all = None, 0.0, {}, False
            self._unmatched_waiters = {}
            self._alive_since = self.broker.alive_since() if is_new else self._reachability.alive_since
        return is_new

    def _continue_sweep(self, sweep: Sweep, now: float, seconds: float) -> Repairs:
        # Forgotten first: a sweep that fails starts over.
        self.current_sweep = None
        paused_seconds = now - sweep.begun_at - sweep.worked_seconds
        repairs = sweep.advance(seconds / (1 + PAUSE_FACTOR) if self.has_checked_all else seconds)
        if not sweep.is_rebuild:
            log_repairs(repairs)
        if not sweep.is_finished:
            self.current_sweep = sweep
            return repairs
        self.has_checked_all = True
        # The more rows wait, the longer a sweep takes, and the more it slows the workers.
        pause = max(conf.SWEEP_SECONDS, PAUSE_FACTOR * sweep.worked_seconds - paused_seconds)
        self._sweep_at = now + pause
        if sweep.is_rebuild:
            level = logging.WARNING if any(sweep.repairs) else logging.INFO
            logger.log(level, "Redis was new or had lost its memory; it was rebuilt from the rows: %s", sweep.repairs)
        return repairs

    def quick_repairs(self) -> Repairs:
        """Repair expired leases, young rows that were never pushed, and gate slots without a row at the last audit."""
        drift = self.audit_gates(sorted(self._unmatched_slots)) if self._unmatched_slots else gates.Drift(0, 0)
        alone = self._parts.attempt
        found = alone("look for what may be repaired", find_candidates, Candidates())
        if found.followers:
            alone("followers of nobody", lifecycle.move_up_waiting, 0)

        def follow() -> int:
            return alone("following of tasks that other programs run", self._remote.tick, 0) if found.remote else 0

        def push() -> int:
            return alone("push of young tasks", lambda: self.push_missing(young=True), 0) if found.young else 0

        return Repairs(
            # Before the push: what another program has finished is not missing.
            settled=alone("settling of what other programs did", lambda: self._evidence.tick(self.brokers), 0),
            followed=follow(),
            recovered=alone("recovery of expired leases", self.recover_expired, 0),
            pushed=push(),
            slots_added=drift.added,
            slots_removed=drift.removed,
            closed=StopRepairs(self._parts).tick(cancelled=found.cancelled, late=found.late),
        )

    def sweep(self) -> Repairs:
        """Do every repair in one go, for every unfinished row and for everything that Redis has of it."""
        return reduce(Repairs.plus, self.sweep_steps(), Repairs())

    def sweep_steps(self, *, is_rebuild: bool = False) -> Iterator[Repairs]:
        """Sweep, and yield after each page what it repaired.

        is_rebuild: Redis has only just come back, so rows of the last seconds are missing like all others.
        """
        # Half-deleted entries must go before the rows that Redis lacks are looked for.
        yield Repairs(recovered=self._parts.attempt("recovery of expired leases", self.recover_expired, 0))
        yield from self.repair_lists()
        yield from self.repair_hashes()
        yield Repairs(pushed=self._parts.attempt("groups", partial(repair_groups, self.broker), 0))
        pushes = self._push_pages(young=False, is_rebuild=is_rebuild)
        yield from self._apart("push of missing tasks", (Repairs(pushed=count) for count in pushes))
        yield from self._apart("parking of missing tasks", (Repairs(parked=count) for count in self.park_missing()))
        requeues = self.requeue_lost_runs()
        yield from self._apart("requeue of lost runs", (Repairs(requeued=count) for count in requeues))
        # Last: a row that lost its slot before it was pushed must ask for one, and may be postponed.
        for name in self._gate_names():
            drift = self.audit_gates([name])
            yield Repairs(slots_added=drift.added, slots_removed=drift.removed)

    def _apart(self, repair: str, steps: Iterator[Repairs]) -> Iterator[Repairs]:
        """Yield the steps of one repair; if one fails for odd data the repair is over, and the next one follows."""
        while (step := self._parts.attempt(repair, lambda: next(steps, None), None)) is not None:
            yield step

    def rebuild(self, *, dry_run: bool = False) -> Rebuilt:
        """Push or park every waiting row that Redis does not know, and correct the gates.

        dry_run: only count. Raises: BrokerUnavailable, GateUnavailable, django.db.Error; what was done before stays.
        """
        rebuilt = Rebuilt({}, {})
        self._is_dry_run = dry_run
        if not dry_run:
            prepare(self.broker)
        # First: the pushes below acquire slots, so later nobody could tell how many were missing.
        for name in self._gate_names():
            drift = self._audit(name, dry_run=dry_run)
            if any(drift):
                rebuilt.gates[name] = drift
        now = database_clock.now()
        for page in self.rows_to_push(young=False):
            if not dry_run:
                self._each_alone("push of tasks", page, self._push)
            for row in page:
                target = "scheduled" if row.run_after and row.run_after > now else "pending"
                # A full gate has postponed the row.
                target = target if row.state == TaskState.QUEUED else "retry"
                rebuilt.queues.setdefault((row.backend, row.queue_name), Counter())[target] += 1
        for page in self.rows_to_park():
            if not dry_run:
                self._each_alone("parking of tasks", page, self._park)
            for row in page:
                rebuilt.queues.setdefault((row.backend, row.queue_name), Counter())["retry"] += 1
        return rebuilt

    # --- expired leases

    def recover_expired(self) -> int:
        """Requeue tasks whose lease expired: their host is down, or their supervisor was silent for too long.

        Does nothing shortly after an outage of Redis: supervisors renew the leases that expired during it.
        """
        settings = conf.current()
        reachability, self._reachability = self._reachability or self.broker.reachability(settings.outage_seconds), None
        if reachability.reachable_seconds < settings.quiet_seconds:
            return 0
        recovered = 0
        for broker in self.brokers:
            for queue in queues_with(broker, broker.known_queues(), "lease"):
                what = f"recovery of expired leases in queue {broker.name_of(queue)}"
                recovered += self._parts.attempt(what, partial(self._recover_queue, broker, queue), 0)
        return recovered

    def _recover_queue(self, broker: Broker, queue: str) -> int:
        recovered, previous = 0, list[Expired]()
        # A lease that could not be recovered is listed again, so an unchanged list is left to the next round.
        while (found := broker.expired(queue)) and found != previous:
            recovered += self._recover_leases(broker, queue, found)
            previous = found
        return recovered

    def _recover_leases(self, broker: Broker, queue: str, found: Iterable[Expired]) -> int:
        by_worker: dict[str, list[Lease]] = {}
        for expired in found:
            by_worker.setdefault(expired.worker, []).append(Lease(expired.id, expired.fence))
        recover = partial(lifecycle.recover, broker, queue, reason=lifecycle.LEASE_EXPIRED)
        return sum(
            self._parts.attempt(f"recovery of worker {worker_id}", partial(recover, worker_id, leases), 0)
            for worker_id, leases in by_worker.items()
        )

    # --- what does not agree within Redis

    def repair_lists(self) -> Iterator[Repairs]:
        """Walk the lists of waiting and active tasks: ids without a hash, finished rows, missing leases."""
        for broker in self.brokers:
            yield from self._apart("repair of lists", EntryRepairs(broker, self._parts).lists())

    def repair_hashes(self) -> Iterator[Repairs]:
        """Walk the keys of Redis: hashes in no list, active tasks without a lease, claims of dead workers."""
        for broker in self.brokers:
            yield from self._apart("repair of hashes", EntryRepairs(broker, self._parts).hashes())

    # --- rows that Redis lacks

    def push_missing(self, *, young: bool) -> int:
        """Push QUEUED rows that Redis does not know: a crash between commit and push, or an outage of Redis."""
        return sum(self._push_pages(young=young))

    def _push_pages(self, *, young: bool, is_rebuild: bool = False) -> Iterator[int]:
        for page in self.rows_to_push(young=young, is_rebuild=is_rebuild):
            try:
                yield sum(self._each_alone("push of tasks", page, self._push))
            except GateUnavailable as error:
                cause = error.__cause__
                raise cause if is_a(cause, BrokerUnavailable) else BrokerUnavailable(str(error)) from error

    def _push(self, rows: Sequence[TaskRecord]) -> int:
        return lifecycle.push(self.broker, rows, again=True)

    @staticmethod
    def _each_alone(what: str, rows: Sequence[TaskRecord], act: Callable[[Sequence[TaskRecord]], int]) -> list[int]:
        """Act on the rows of a page; on each alone when one of them is odd. Returns: what `act` returned."""
        return each_alone(
            what, rows, lambda part: [act(part)], key=lambda row: row.id, database=writing_database(TaskRecord)
        )

    def rows_to_push(self, *, young: bool, is_rebuild: bool = False) -> Iterator[list[TaskRecord]]:
        """Yield, page by page, QUEUED rows that Redis does not know or, unless `young`, has as retry or archived.

        Most pages are empty. The latter rows only when two sweeps in a row have seen them so: a retry writes the row
        before the entry. is_rebuild: as for `sweep_steps`.
        """
        now = database_clock.now()
        # What waits at a gate has no entry; the audit of the gates gives it its place.
        alone = {"after_id": None, "batch_id": None, "is_remote": False}
        waiting = Q(IS_READY, state=TaskState.QUEUED, reason=FailureReason.NONE, **alone)
        if not is_rebuild:
            waiting &= Q(enqueued_at__lt=now - timedelta(seconds=GRACE_SECONDS))
        if young:
            for page in self._rows_by_entry_state(QUEUED, waiting, behind=lowest_uuid7_at(now - YOUNG)):
                yield [found.row for found in page]
            return
        seen, self._stranded = self._stranded, set()
        for found_page in self._rows_by_entry_state(QUEUED, waiting, FAILED_ENTRY_STATES | UNKNOWN):
            page = found_page if self._is_dry_run else self._evidence.unsettled(found_page)
            self._stranded |= {found.row.id for found in page if found.entry_state} - seen
            yield [found.row for found in page if found.row.id not in self._stranded]

    def park_missing(self) -> Iterator[int]:
        """Park RETRYING rows that Redis does not know; yield how many after each page."""
        for page in self.rows_to_park():
            yield sum(self._each_alone("parking of tasks", page, self._park))

    def rows_to_park(self) -> Iterator[list[TaskRecord]]:
        """Yield, page by page, the rows with a time to retry, or to ask their gate, that Redis does not know."""
        states = (TaskState.QUEUED, TaskState.FAILED)
        retrying = Q(state__in=states, retry_at__isnull=False, is_remote=False)
        for page in self._rows_by_entry_state(TO_RETRY, retrying, FINISHED_ENTRY_STATES | UNKNOWN):
            rest = page if self._is_dry_run else self._evidence.unsettled(page)
            yield [found.row for found in rest if not found.entry_state]

    def _park(self, page: Sequence[TaskRecord]) -> int:
        parked = 0
        for broker, queue, rows in by_queue(self.broker, page):
            broker.register_queue(queue)
            parked += broker.park(queue, [entry_of(row, fence=later_fence(row)) for row in rows]).count("parked")
        return parked

    def requeue_lost_runs(self) -> Iterator[int]:
        """Requeue RUNNING rows that no worker runs; yield how many after each page.

        Either Redis does not know them, or the recoverer of a Go server has set them aside.
        """
        alive_since = self.broker.alive_since()
        settings = conf.current()
        quiet = settings.lease_seconds + 2 * settings.beat_seconds
        if alive_since is None or redis_clock.seconds() - alive_since < quiet:
            return
        before = database_clock.now() - timedelta(seconds=quiet)
        running = Q(state=TaskState.RUNNING, is_remote=False, batch_id=None, last_attempted_at__lt=before)
        for found_page in self._rows_by_entry_state(RUNNING, running, IDLE_ENTRY_STATES):
            page = self._evidence.unsettled(found_page)
            yield sum(sum(self._each_alone("requeue of tasks", [found.row], _abandon)) for found in page)

    def _rows_by_entry_state(
        self, way: Way, wanted: Q, states: Collection[str] = UNKNOWN, *, behind: UUID | None = None
    ) -> Iterator[list[RowAndEntry]]:
        """Yield, page by page, the rows whose entry is in one of the states, read again after Redis has answered.

        way, behind: as for `pages`.
        """
        rows = rows_of(TaskRecord)
        still = rows.filter(as_check(wanted)).order_by("id")
        columns = ("backend", "queue_name", "wire_id")
        for checked in pages(way, *columns, size=ROWS_PER_PAGE, check=wanted, behind=behind):
            found: dict[str, str] = {}
            ids: dict[tuple[str, str], dict[str, str]] = {}
            for id, alias, queue, wire_id, *_ in checked:
                if uses_redis(alias):
                    ids.setdefault((alias, queue), {})[str(id) if wire_id is None else wire_id] = str(id)
            for (alias, queue), of_queue in ids.items():
                self._aliases_of_rows.add(alias)
                # A producer that registered the queue less than a minute ago does not know that Redis forgot it.
                if not self._is_dry_run:
                    self.broker.of_alias(alias).register_queue(queue)
                entry_states = Inspection(self.broker.role, alias).entry_states(queue, list(of_queue))
                found |= {of_queue[task.id]: task.state for task in entry_states if task.state in states}
            matching = usable_rows(list(found), lambda part: still.filter(id__in=part), database=rows.db)
            yield [RowAndEntry(row, found[str(row.id)]) for row in matching]
            self.on_page(len(checked))

    # --- gates

    def _gate_names(self) -> list[str]:
        """Return every gate that has a row, a task that is queued or running, or a slot or a waiter in Redis.

        Retries that Redis has forgotten, at a gate without all of these, are retried at their `retry_at`.
        """
        live = rows_of(TaskRecord).at_gate().filter(state__in=gates.LIVE_STATES)
        # Ordered, the DISTINCT would return every row.
        found = live.order_by().values_list("gate", "other_gates").distinct()
        names = {name for gate, others in found for name in (gate, *(each.name for each in read_others(others)))}
        named = {*names, *rows_of(Gate).values_list("name", flat=True)}
        return sorted(named | gates.occupied() | gates.waiting_gates())

    def audit_gates(self, names: Iterable[str]) -> gates.Drift:
        """Make the slots of gates agree with their rows; a slot without a row is removed when it is seen again."""
        added = removed = 0
        for name in names:
            seen = self._unmatched_slots.pop(name, set())
            drift = self._audit(name, seen=seen)
            if seen:
                self._unmatched_slots[name] = seen
            if any(drift):
                logger.warning("gate %s: slots added: %d, slots removed: %d", name, drift.added, drift.removed)
            added += drift.added
            removed += drift.removed
        return gates.Drift(added, removed)

    def _audit(self, gate: str, **options: Any) -> gates.Drift:
        """Audit one gate; an odd row of it, or odd data in Redis, concerns no other gate."""
        attempt, nothing = self._parts.attempt, gates.Drift(0, 0)
        if not options.get("dry_run"):
            seen = self._unmatched_waiters.pop(gate, set())
            look = partial(gates.audit_waiters, gate, seen=seen)
            waiters = attempt(f"audit of those that wait at the gate {gate}", look, nothing)
            if seen:
                self._unmatched_waiters[gate] = seen
            if any(waiters):
                logger.info("gate %s: waiters added: %d, waiters removed: %d", gate, waiters.added, waiters.removed)
        return attempt(f"audit of the gate {gate}", partial(gates.audit, gate, **options), nothing)


def _abandon(rows: Sequence[TaskRecord]) -> int:
    return sum(lifecycle.abandon(row, "no worker has a lease on it") for row in rows)
