"""Rules of producers: they enqueue at once, in a transaction, and with a death in between."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from datetime import timedelta

from django.db import transaction
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq import gates, lifecycle
from django_asyncq.exceptions import QueueFull
from django_asyncq.lifecycle import enqueueing
from django_asyncq.models import TaskRecord
from django_asyncq.storage import rollbacks

from . import stores
from .base import LIKELY_QUEUES, LONG, MOST_LIVE, Base, one_of, seldom
from .values import GATE, QUEUES, Row


class Producers(Base):
    """How tasks are enqueued."""

    @precondition(lambda self: self.live < MOST_LIVE)
    @rule(
        count=st.integers(1, 2),
        queue=st.sampled_from(LIKELY_QUEUES),
        gated=st.booleans(),
        priority=st.sampled_from([0, 0, 5, -5]),
        delayed=st.sampled_from([False, False, True]),
        how=st.sampled_from(["at once", "at once", "commits", "rolls back", "dies after the commit"]),
    )
    def enqueue(self, count: int, queue: str, gated: bool, priority: int, delayed: bool, how: str) -> None:
        """at once: all or nothing. Otherwise one by one in a transaction, as many as the gate admits."""
        names = [f"t{self.born + number:02}" for number in range(1, count + 1)]
        self.born += count
        run_after = "future" if delayed else ""
        row = Row(queue, GATE if gated else "", priority, run_after)
        records = [self.record(name, row) for name in names]
        groups = [records] if how == "at once" else [[record] for record in records]
        admitted: list[str] = []
        try:
            with self.dies_before(enqueueing, "dispatch", dies=how.startswith("dies")), transaction.atomic():
                for group in groups:
                    admitted += self.enqueue_group(group, row)
                if how == "rolls back":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            for name in admitted:
                del self.model.rows[name]
                self.model.members.pop(name, None)
            # What a thread does within milliseconds.
            rollbacks.release_rolled_back()
            return
        if not how.startswith("dies"):
            self.model.dispatch(admitted)
            self.last = lambda: lifecycle.dispatch([r for r in records if stores.name_of(str(r.id)) in admitted])

    def record(self, name: str, row: Row) -> TaskRecord:
        return TaskRecord(
            id=stores.id_of(name),
            name="tests.tasks.add",
            args=[1],
            queue_name=row.queue,
            gate=row.gate,
            queue_limit=2 if row.gate else None,
            priority=row.priority,
            run_after=timezone.now() + LONG if row.run_after else None,
            enqueued_at=timezone.now() - timedelta(minutes=1),
        )

    def enqueue_group(self, records: list[TaskRecord], row: Row) -> list[str]:
        """Enqueue within the transaction; return the names that are admitted."""
        names = [stores.name_of(str(record.id)) for record in records]
        refused = self.model.admit(names, provisional=True, partial=False) if row.gate else []
        try:
            lifecycle.enqueue(records)
        except QueueFull:
            assert refused is None, f"{names} were refused, the model admits them"
            return []
        assert refused == [], f"{names} were admitted, the model refuses them"
        self.model.rows |= {name: replace(row) for name in names}
        return names

    @seldom
    @rule()
    def producer_dies_with_a_slot(self) -> None:
        """The slot was acquired, the row never written."""
        self.born += 1
        record = self.record(name := f"t{self.born:02}", Row(QUEUES[0], GATE))
        refused = self.model.admit([name], provisional=True, partial=True)
        self.answer({stores.name_of(str(id)) for id in gates.acquire([record], partial=True)}, set(refused or []))

    @seldom
    @precondition(lambda self: self.provisional)
    @rule(name=one_of("provisional"))
    def provisional_slot_expires(self, name: str) -> None:
        stores.client().zadd(gates.keys(GATE)[0], {str(stores.id_of(name)): 1})
        del self.model.members[name]

    @seldom
    @precondition(lambda self: self.queued)
    @rule(name=one_of("queued"), again=st.booleans())
    def push_late(self, name: str, again: bool) -> None:
        """By a second reconciler, or a slow commit hook."""
        record = TaskRecord.objects.get(id=stores.id_of(name))
        entry = self.model.entries.get(name)
        if entry is None and not again:
            return  # after Redis was emptied, its fence would start again; only new rows are pushed like this
        self.last = lambda: lifecycle.dispatch([copy(record)], again=again)
        self.last()
        self.model.dispatch([name], again=again)
