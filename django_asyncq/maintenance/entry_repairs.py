"""Repair what does not agree within Redis: lists, hashes, leases and claims. The rows say what each entry should be.

Every repair yields how many repairs a step made, can be repeated, and is safe when two processes do it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from .. import conf
from ..broker import Broker, Lease, replies
from ..broker.inspection import PLACES, EntryState, Inspection, Page
from ..broker.many_queues import queues_with
from ..faults import Parts
from ..lifecycle import rows_of_entries
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.routing import rows_of
from .sweep import GRACE_SECONDS, Repairs


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
