"""Repair what does not agree within Redis: lists, hashes, leases and claims. The rows say what each entry should be.

Every repair yields how many repairs a step made, can be repeated, and is safe when two processes do it at once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple
from uuid import UUID

from .. import conf, gates, interop, lifecycle
from ..broker import Broker, Lease, redis_clock
from ..broker import entries as replies
from ..broker.access import queues_with
from ..broker.foreign import changed_retries, new_members
from ..broker.groups import Groups
from ..broker.inspection import PLACES, EntryState, Inspection, Page
from ..core.aliases import uses_redis
from ..core.guard import get_logger
from ..lifecycle import rows_of_entries
from ..lifecycle.dispatching import by_queue
from ..models import TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock
from ..storage.errors import Parts
from ..storage.isolation import each_alone
from ..storage.routing import rows_of, writing_database

# --- One sweep over all unfinished tasks, split into steps: what each step repaired, and how long the sweep has run.

logger = get_logger("django_asyncq.fleet.reconciler")

# The process that enqueued a younger row may still be pushing it.
GRACE_SECONDS = 3


class Repairs(NamedTuple):
    """How many repairs of each kind one pass made.

    recovered: tasks whose lease expired. pushed: QUEUED rows that Redis did not know. parked: RETRYING rows that Redis
    did not know. requeued: RUNNING rows that no worker ran. leased: active entries without a lease. strays: ids without
    a hash. orphans: hashes in no list. discarded: waiting entries of finished rows. released: claims that dead workers
    still seemed to hold. slots_added, slots_removed: gate slots. closed: tasks that were cancelled or had expired.
    settled: rows that show now what another program has done. followed: the same, of tasks that only such a one runs.
    """

    recovered: int = 0
    pushed: int = 0
    parked: int = 0
    requeued: int = 0
    leased: int = 0
    strays: int = 0
    orphans: int = 0
    discarded: int = 0
    released: int = 0
    slots_added: int = 0
    slots_removed: int = 0
    closed: int = 0
    settled: int = 0
    followed: int = 0

    def plus(self, other: Repairs) -> Repairs:
        """Return the sums."""
        return Repairs(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self._asdict().items() if count) or "nothing"


def ignore_progress(rows: int) -> None:
    """Ignore how many rows have been checked."""


def log_repairs(repairs: Repairs) -> Repairs:
    """Log what was repaired, if anything was, and return it."""
    if any(repairs):
        logger.info("repaired: %s", repairs)
    return repairs


class Rebuilt(NamedTuple):
    """What a rebuild did, or would do. queues: (alias, name) → set in Redis → number of tasks. gates: name → slots."""

    queues: dict[tuple[str, str], Counter[str]]
    gates: dict[str, gates.Drift]


class Sweep:
    """A sweep that may need several rounds of the reconciler.

    begun_at: monotonic seconds. is_rebuild: Redis is new or has lost its memory. worked_seconds: time spent so far.
    """

    def __init__(self, steps: Iterator[Repairs], *, begun_at: float, is_rebuild: bool) -> None:
        self.begun_at = begun_at
        self.is_rebuild = is_rebuild
        self.worked_seconds = 0.0
        self.is_finished = False
        self.repairs = Repairs()
        self._steps = steps

    def advance(self, seconds: float) -> Repairs:
        """Take steps until the sweep is finished or the seconds have passed; return what these steps repaired."""
        begun_at = time.monotonic()
        repairs = Repairs()
        for step in self._steps:
            repairs = repairs.plus(step)
            if time.monotonic() >= begun_at + seconds:
                break
        else:
            self.is_finished = True
        self.worked_seconds += time.monotonic() - begun_at
        self.repairs = self.repairs.plus(repairs)
        return repairs


class EntryRepairs:
    """The repairs of a sweep that begin with what Redis has of one alias."""

    def __init__(self, broker: Broker, parts: Parts) -> None:
        self.broker = broker
        self.inspection = Inspection(broker.role, broker.alias)
        self._parts = parts

    def lists(self) -> Iterator[Repairs]:
        """Walk the lists of waiting and active tasks: ids without a hash, finished rows, missing leases."""
        for queue in queues_with(self.broker, sorted(self.broker.queues()), *PLACES):
            for page in self.inspection.pages(queue):
                what = f"repair of {page.place} tasks in queue {self.broker.name_of(queue)}"
                yield self._parts.attempt(what, partial(self._repair_page, queue, page), Repairs())

    def _repair_page(self, queue: str, page: Page) -> Repairs:
        strays = [task.id for task in page.tasks if not task.state]
        dropped = self.inspection.remove_dangling(queue, page.place, strays) if strays else 0
        if page.place == "active":
            claimed = [task.id for task in page.tasks if task.state == "active" and task.fence]
            leased, discarded = self._settle_leaseless(queue, self.inspection.misplaced(queue, claimed).leaseless)
            return Repairs(strays=dropped, leased=leased, discarded=discarded)
        known = [task for task in page.tasks if task.state]
        return Repairs(strays=dropped, discarded=self._discard_finished(queue, known))

    def _settle_leaseless(self, queue: str, ids: Sequence[str]) -> tuple[int, int]:
        """Give leases to active tasks that have none; return how many got one, and how many were removed instead.

        Those of finished rows are removed, some seconds later: a changed fence kept their worker from it, which knows
        nothing of them now. With a new lease they would stay for as long as that worker lives.
        """
        if not ids:
            return 0, 0
        tasks = self.inspection.entry_states(queue, ids)
        open_ids = set(ids) - self._with_rows(queue, tasks, finished_at__isnull=False)
        leased = self.inspection.grant_leases(queue, sorted(open_ids), conf.current().lease_seconds) if open_ids else 0
        finished = self._finished(queue, tasks)
        fences = {
            task.id: replies.whole(task.fence.encode("utf-8", "surrogateescape"), 0)
            for task in tasks
            if task.id in finished
        }
        over = [Lease(id, fence) for id, fence in fences.items() if fence is not None]
        discarded = self.broker.done(queue, "", over).count("done") if over else 0
        if odd := [id for id, fence in fences.items() if fence is None]:
            discarded += self.broker.remove(queue, odd)
        return leased, discarded

    def _discard_finished(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting entries of finished rows: a process was killed before it could remove them."""
        ids = self._finished(queue, tasks)
        if not ids:
            return 0
        return self.inspection.remove_waiting(queue, [task for task in tasks if task.id in ids])

    def _finished(self, queue: str, tasks: Sequence[EntryState]) -> set[str]:
        """Return the ids of tasks whose row finished some seconds ago; later ones may still be acknowledged."""
        before = database_clock.now() - timedelta(seconds=GRACE_SECONDS)
        ids = self._with_rows(queue, tasks, finished_at__lt=before)
        if not ids:
            return ids
        # Another program may have chosen the id of a finished row for a message of its own.
        return {id for id, row in rows_of_entries(self.broker, queue, ids).items() if row.is_final}

    def _with_rows(self, queue: str, tasks: Sequence[EntryState], **conditions: Any) -> set[str]:
        """Return the ids of the entries whose row meets the conditions."""
        entries = {task.row or task.id: task.id for task in tasks if is_row_id(task.row or task.id)}
        rows = rows_of(TaskRecord).filter(id__in=[UUID(id) for id in entries], queue_name=queue, **conditions)
        named = {str(id): wire_id for id, wire_id in rows.values_list("id", "wire_id")}
        return {entries[id] for id, wire_id in named.items() if entries[id] == (id if wire_id is None else wire_id)}

    def hashes(self) -> Iterator[Repairs]:
        """Walk the keys of Redis: hashes in no list, active tasks without a lease, claims of dead workers."""
        ours = self.broker.queues()
        for found in self.inspection.hashes():
            for queue, workers in found.workers.items():
                if queue not in ours:
                    continue
                what = f"repair of what workers hold in queue {self.broker.name_of(queue)}"
                yield self._parts.attempt(what, partial(self._release, queue, workers), Repairs())
            for queue, ids in found.tasks.items():
                # Those of a queue that only other programs know are theirs alone.
                if queue not in ours:
                    continue
                what = f"repair of hashes in queue {self.broker.name_of(queue)}"
                yield self._parts.attempt(what, partial(self._repair_hashes, queue, ids), Repairs())

    def _release(self, queue: str, workers: Sequence[str]) -> Repairs:
        return Repairs(released=sum(self.inspection.prune_held(queue, worker) for worker in workers))

    def _repair_hashes(self, queue: str, ids: Sequence[str]) -> Repairs:
        misplaced = self.inspection.misplaced(queue, ids)
        known = self.inspection.entry_states(queue, misplaced.orphans) if misplaced.orphans else []
        orphans = self.inspection.repair_orphans(queue, sorted(self._with_rows(queue, known)) if known else [])
        leased, discarded = self._settle_leaseless(queue, misplaced.leaseless)
        return Repairs(orphans=orphans, leased=leased, discarded=discarded)


def is_row_id(text: str) -> bool:
    """Return whether an id in Redis can be the id of a row."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


# --- Find members of batches that were deleted, and groups that nobody would take.

MOST_GROUPS = 1000


def repair_groups(broker: Broker) -> int:
    """Have every waiting member taken in time; return how many members and groups nobody would have taken.

    A member whose batch was deleted joins its group again. A group of ours is made known again: the recoverer of a Go
    server forgets the name of a group to which it returns members. Any number of processes may do this at once.
    Raises: BrokerUnavailable, django.db.Error.
    """
    repaired = lifecycle.release_orphans()
    rows = rows_of(TaskRecord).filter(IS_READY, state=TaskState.QUEUED, batch_id=None, batch_size=None)
    waiting = rows.exclude(group="")
    names = ("name", "backend", "queue_name", "group", "is_remote")
    found = [TaskRecord(**values) for values in waiting.order_by().values(*names).distinct()[:MOST_GROUPS]]
    for of_alias, queue, records in by_queue(broker, found):
        if rules := lifecycle.rules_of_groups(records):
            repaired += Groups(of_alias.role, of_alias.alias).ensure(queue, rules)
    return repaired


# --- Find what other programs have done to our tasks: each round among what is new in two zsets, the sweep by rows.
#
# A Go server or asynq's tools leave a task in `completed`, `archived` or `retry`. `interop.verdict` decides
# whether that is their doing, and writes it into the row.

SETTLED_PLACES: tuple[Literal["completed", "archived"], ...] = ("completed", "archived")
ROWS_PER_CALL = 200


class RowAndEntry(NamedTuple):
    """A row, and the state of its entry in Redis."""

    row: TaskRecord
    entry_state: str


class EvidenceRepairs:
    """Settle rows by their entries."""

    def __init__(self, broker: Broker, parts: Parts) -> None:
        self.broker = broker
        self._parts = parts
        # (prefix, queue, zset) → Unix seconds until which its members have been looked at.
        self._since: dict[tuple[str, str, str], int] = {}

    def tick(self, brokers: Iterable[Broker]) -> int:
        """Settle what has come into `completed` and `archived` since the last call; return how many rows changed.

        brokers: one for each prefix. Tasks of older calls are found by the sweep.
        """
        settled = 0
        for broker in brokers:
            for queue in queues_with(broker, broker.known_queues(), *SETTLED_PLACES, "retry"):
                what = f"settling of what other programs did in queue {broker.name_of(queue)}"
                settled += self._parts.attempt(what, partial(self._settle_queue, broker, queue), 0)
        return settled

    def _settle_queue(self, broker: Broker, queue: str) -> int:
        settled = 0
        for place in SETTLED_PLACES:
            key = (broker.prefix, queue, place)
            since = self._since.get(key)
            if since is None:
                since = int(redis_clock.seconds() - conf.SWEEP_SECONDS)
            ids, next_since = new_members(broker, queue, place, since)
            if ids:
                rows = lifecycle.rows_of_entries(broker, queue, ids).values()
                # Our own reporter archives what has failed for good.
                settled += len(self._settle([row for row in rows if place == "completed" or not row.is_final]))
            # After the work: what failed is looked at again.
            self._since[key] = next_since
        if ids := changed_retries(broker, queue):
            settled += len(self._settle(list(lifecycle.rows_of_entries(broker, queue, ids).values())))
        return settled

    def unsettled(self, page: Sequence[RowAndEntry]) -> list[RowAndEntry]:
        """Settle the rows of a page whose entries are not where we would have left them; return the others."""
        odd = [found.row for found in page if found.entry_state]
        settled = self._settle(odd)
        return [found for found in page if found.row.id not in settled]

    def _settle(self, rows: Sequence[TaskRecord]) -> set[UUID]:
        # Those that only another program runs are followed by the next part, until they are final.
        own = [row for row in rows if not row.is_remote or row.is_final]
        if not own:
            return set()

        def settle(part: Sequence[TaskRecord]) -> list[UUID]:
            return list(interop.settle_evidence(self.broker, part))

        database = writing_database(TaskRecord)
        settled = set[UUID]()
        for start in range(0, len(own), ROWS_PER_CALL):
            part = own[start : start + ROWS_PER_CALL]
            settled |= set(each_alone("settling of tasks", part, settle, key=lambda row: row.id, database=database))
        return settled


# --- Follow the tasks that only other programs run, page by page over the index of those that are not final.

ROWS_PER_PAGE = 200
# In one pass; the next one goes on behind them.
PAGES_PER_PASS = 50


class RemoteTasks:
    """Have the rows of tasks that other programs run show what Redis says of them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        # The last row that the last pass looked at, when it could not look at all of them.
        self._last: UUID | None = None

    def tick(self) -> int:
        """Follow at most PAGES_PER_PASS pages of rows; return how many changed. Raises: as `follow_remote`."""
        unfinished = rows_of(TaskRecord).filter(IS_READY, is_remote=True, finished_at__isnull=True, after_id=None)
        changed = 0
        for _ in range(PAGES_PER_PASS):
            rows = unfinished if self._last is None else unfinished.filter(id__gt=self._last)
            page = list(rows.order_by("id")[:ROWS_PER_PAGE])
            if page:
                changed += self._follow([row for row in page if uses_redis(row.backend)])
            self._last = page[-1].id if len(page) == ROWS_PER_PAGE else None
            if self._last is None:
                break
        return changed

    def _follow(self, rows: Sequence[TaskRecord]) -> int:
        reachability = self.broker.reachability(conf.current().outage_seconds)
        if reachability.alive_since is None:
            # The next round knows since when.
            return 0
        # After an outage Redis may be an older copy of itself, which still has the mark.
        resumed = math.ceil(redis_clock.seconds() - reachability.reachable_seconds)
        since = max(reachability.alive_since, resumed)
        pushed_before = database_clock.now() - timedelta(seconds=GRACE_SECONDS)

        def follow(part: Sequence[TaskRecord]) -> list[int]:
            return [interop.follow_remote(self.broker, part, since, pushed_before)]

        database = writing_database(TaskRecord)
        return sum(each_alone("following of tasks", rows, follow, key=lambda row: row.id, database=database))
