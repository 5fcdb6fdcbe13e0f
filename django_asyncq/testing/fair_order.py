"""The fair order of what the test kit runs: computed from the rows, as `broker/lua/lines.lua` keeps it for workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar
from uuid import UUID

from ..core import fairness
from ..core.fairness import UNIT, Share
from ..models import TaskRecord, TaskRecordQuerySet

IDS_PER_QUERY = 500

Id = TypeVar("Id", UUID, str)
# A task that waits, and its share; None for a plain one.
Waiting = tuple[Id, Share | None]


class FairOrder(Generic[Id]):
    """The order in which the tasks of one queue and one priority run."""

    def __init__(self) -> None:
        # The tag up to which it was served; those of the last task of each key, and of each task that waits.
        self._clock = 0
        self._last: dict[str, int] = {}
        self._tags: dict[Id, tuple[int, Share]] = {}
        # Of the next plain task, since it was first seen.
        self._next_plain: int | None = None

    def note(self, waiting: Sequence[Waiting[Id]]) -> None:
        """Give each new task its place, in this order; a key gets back what it paid for one that waits no more."""
        present = {id for id, _ in waiting}
        for id in [id for id in self._tags if id not in present]:
            tag, paid = self._tags.pop(id)
            if tag > self._clock and paid.key in self._last:
                self._last[paid.key] = max(self._last[paid.key] - paid.step, self._clock)
        for id, share in waiting:
            if share is not None and id not in self._tags:
                tag = max(self._clock, self._last.get(share.key, 0)) + share.step
                self._last[share.key] = tag
                self._tags[id] = tag, share

    def take(self, waiting: Sequence[Waiting[Id]]) -> Id:
        """Return the next of the tasks that wait, in the order in which they were enqueued; it waits no more then."""
        plain = next((id for id, share in waiting if share is None), None)
        fair = min(((self._tags[id][0], str(id), id) for id, share in waiting if share is not None), default=None)
        self._next_plain = None if plain is None else self._next_plain or self._clock + UNIT
        if fair is not None and (self._next_plain is None or fair[0] < self._next_plain):
            tag, _, id = fair
            del self._tags[id]
            self._clock = max(self._clock, tag)
            return id
        assert plain is not None and self._next_plain is not None  # noqa: S101 - something waits
        if fair is not None:
            self._clock = max(self._clock, self._next_plain)
            self._next_plain += UNIT
        return plain


class FairOrders:
    """The orders of all queues of one run of the test kit."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], FairOrder[UUID]] = defaultdict(FairOrder)
        self._shares: dict[UUID, Share | None] = {}

    def next_id(self, due: TaskRecordQuerySet) -> UUID | None:
        """Return the id of the task that a worker would claim first; None when none is due."""
        rows = list(due.order_by("-priority", "id").values_list("id", "queue_name", "priority", "name"))
        self._read_shares(due, [id for id, _, _, name in rows if name in fairness.declared and id not in self._shares])
        of_queues: dict[str, dict[int, list[Waiting[UUID]]]] = defaultdict(lambda: defaultdict(list))
        for id, queue, priority, _ in rows:
            of_queues[queue][priority].append((id, self._shares.get(id)))
        for queue, of_queue in of_queues.items():
            for priority, waiting in of_queue.items():
                self._orders[queue, priority].note(waiting)
        if not rows:
            return None
        # Among queues, what comes first by priority and age; then in its queue what is next in fair order.
        _, queue, priority, _ = rows[0]
        id = self._orders[queue, priority].take(of_queues[queue][priority])
        # If it runs again, it waits anew.
        self._shares.pop(id, None)
        if sum(map(len, of_queues[queue].values())) == 1:
            # The queue is empty: what comes next is numbered anew.
            for at in [at for at in self._orders if at[0] == queue]:
                del self._orders[at]
        return id

    def _read_shares(self, due: TaskRecordQuerySet, ids: list[UUID]) -> None:
        for start in range(0, len(ids), IDS_PER_QUERY):
            records: Sequence[TaskRecord] = list(due.filter(id__in=ids[start : start + IDS_PER_QUERY]))
            self._shares |= {record.id: fairness.share_of(record) for record in records}
