"""Rules of people: they retry, delete, pause, and change limits."""

from __future__ import annotations

from copy import copy

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq import lifecycle
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.lifecycle import deletion
from django_asyncq.models import Gate, TaskRecord

from . import stores
from .base import LIKELY_QUEUES, Base, one_of, seldom
from .values import GATE


class People(Base):
    """What people do in the admin."""

    @precondition(lambda self: self.failed)
    @rule(name=one_of("failed"))
    def person_retries(self, name: str) -> None:
        full = self.model.retry([name], by_person=True)
        if not full:
            self.cancelled.discard(name)
            self.model.dispatch([name], again=True)
        self.last = lambda: lifecycle.retry([stores.id_of(name)], by_person=True)
        got = self.last()
        self.answer([stores.name_of(str(record.id)) for record in got.full], full)
        if full:
            self.last = None

    @seldom
    @precondition(lambda self: self.names)
    @rule(name=one_of("names"), dies=st.booleans())
    def delete(self, name: str, dies: bool) -> None:
        """dies: after the commit, before Redis and the gate are changed."""
        row = self.model.rows.pop(name)
        record = TaskRecord.objects.get(id=stores.id_of(name))
        with self.dies_before(deletion.Removal, "__call__", dies=dies):
            copy(record).delete()
        if not dies:
            self.model.remove(name)
            self.model.free_slots([name] if row.gate else [])
            self.model.stop_waiting([name] if row.gate and row.retry_at else [])
            self.last = lambda: lifecycle.follow_deletion([record], "default")

    @seldom
    @rule(queue=st.sampled_from(LIKELY_QUEUES))
    def pause_or_resume(self, queue: str) -> None:
        if queue in self.model.paused:
            self.model.paused.remove(queue)
            stores.client().delete(QueueKeys(queue).paused)
        else:
            self.model.paused.add(queue)
            stores.client().set(QueueKeys(queue).paused, 1)

    @seldom
    @rule(limit=st.integers(0, 4))
    def change_limit(self, limit: int) -> None:
        row = Gate.objects.get(name=GATE)
        row.limit = self.model.limit = limit
        row.save()
        self.model.built = False
