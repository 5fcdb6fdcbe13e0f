"""Repair what does not agree within Redis: lists, hashes, leases and claims. The rows say what each entry should be.

Every repair yields how many repairs a step made, can be repeated, and is safe when two processes do it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from uuid import UUID

from django.db.models import QuerySet

from .. import conf
from ..broker import Broker, Lease, replies
from ..broker.inspection import EntryState, Inspection, Page
from ..faults import Faults
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.routing import rows_of
from .sweep import GRACE_SECONDS, Repairs


class EntryRepairs:
    """The repairs of a sweep that begin with what Redis has of one alias."""

    def __init__(self, broker: Broker, faults: Faults) -> None:
        self.broker = broker
        self.inspection = Inspection(broker.role, broker.alias)
        self._faults = faults

    def lists(self) -> Iterator[Repairs]:
        """Walk the lists of waiting and active tasks: ids without a hash, finished rows, missing leases."""
        for queue in sorted(self.broker.queues()):
            for page in self.inspection.pages(queue):
                what = f"repair of {page.place} tasks in queue {self.broker.name_of(queue)}"
                yield self._faults.attempt(what, partial(self._repair_page, queue, page), Repairs())

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
        is_final = self._rows_of(queue, ids).filter(finished_at__isnull=False)
        open_ids = set(ids) - {str(id) for id in is_final.values_list("id", flat=True)}
        leased = self.inspection.grant_leases(queue, sorted(open_ids), conf.current().lease_seconds) if open_ids else 0
        finished = self._finished(queue, ids)
        states = self.inspection.entry_states(queue, sorted(finished)) if finished else []
        fences = {state.id: replies.whole(state.fence.encode("utf-8", "surrogateescape"), 0) for state in states}
        over = [Lease(id, fence) for id, fence in fences.items() if fence is not None]
        discarded = self.broker.done(queue, "", over).count("done") if over else 0
        if odd := [id for id, fence in fences.items() if fence is None]:
            discarded += self.broker.remove(queue, odd)
        return leased, discarded

    def _discard_finished(self, queue: str, tasks: Sequence[EntryState]) -> int:
        """Remove waiting entries of finished rows: a process was killed before it could remove them."""
        ids = self._finished(queue, [task.id for task in tasks])
        if not ids:
            return 0
        return self.inspection.remove_waiting(queue, [task for task in tasks if task.id in ids])

    def _finished(self, queue: str, ids: Iterable[str]) -> set[str]:
        """Return the ids of tasks whose row finished some seconds ago; later ones may still be acknowledged."""
        before = database_clock.now() - timedelta(seconds=GRACE_SECONDS)
        finished = self._rows_of(queue, ids).filter(finished_at__lt=before)
        return {str(id) for id in finished.values_list("id", flat=True)}

    def _rows_of(self, queue: str, ids: Iterable[str]) -> QuerySet[TaskRecord]:
        return rows_of(TaskRecord).filter(id__in=list(map(UUID, filter(is_row_id, ids))), queue_name=queue)

    def hashes(self) -> Iterator[Repairs]:
        """Walk the keys of Redis: hashes in no list, active tasks without a lease, claims of dead workers."""
        for found in self.inspection.hashes():
            for queue, workers in found.workers.items():
                what = f"repair of what workers hold in queue {self.broker.name_of(queue)}"
                yield self._faults.attempt(what, partial(self._release, queue, workers), Repairs())
            for queue, ids in found.tasks.items():
                what = f"repair of hashes in queue {self.broker.name_of(queue)}"
                yield self._faults.attempt(what, partial(self._repair_hashes, queue, ids), Repairs())

    def _release(self, queue: str, workers: Sequence[str]) -> Repairs:
        return Repairs(released=sum(self.inspection.prune_held(queue, worker) for worker in workers))

    def _repair_hashes(self, queue: str, ids: Sequence[str]) -> Repairs:
        misplaced = self.inspection.misplaced(queue, ids)
        known = self._rows_of(queue, misplaced.orphans).values_list("id", flat=True) if misplaced.orphans else []
        orphans = self.inspection.repair_orphans(queue, [str(id) for id in known])
        leased, discarded = self._settle_leaseless(queue, misplaced.leaseless)
        return Repairs(orphans=orphans, leased=leased, discarded=discarded)


def is_row_id(text: str) -> bool:
    """Return whether an id in Redis can be the id of a row."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
