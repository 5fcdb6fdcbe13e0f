"""Rules of tasks that may not begin any more: they are cancelled, or their time to begin is over."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq import lifecycle
from django_asyncq.broker import Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.task_entries import HOLDER
from django_asyncq.lifecycle import closing
from django_asyncq.models import TaskRecord
from django_asyncq.storage.rollbacks import release_rolled_back

from . import stores
from .base import Base, Hand, one_of, seldom
from .values import QUEUES


class Cancels(Base):
    """Who cancels, and what becomes late."""

    @precondition(lambda self: self.unfinished)
    @rule(
        name=one_of("unfinished"),
        how=st.sampled_from(["commits", "commits", "rolls back", "dies after the commit"]),
    )
    def cancel(self, name: str, how: str) -> None:
        """A row that says QUEUED may be in a worker's hands."""
        try:
            with self.dies_before(closing.Stop, "follow_up", dies=how.startswith("dies")), transaction.atomic():
                got = lifecycle.cancel([stores.id_of(name)])
                if how == "rolls back":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            release_rolled_back()
            self.model.give_back(self.model.held_by([name]))
            return
        held = self.model.held_by([name])
        closed, asked = self.model.cancel([name])
        self.answer(got, (len(closed), len(asked), 0))
        self.cancelled |= set(closed)
        if how == "commits":
            self.model.follow_close(closed)
        else:
            self.leader_finds_holds()
            self.model.follow_close(held)
        self.last = lambda: lifecycle.cancel([stores.id_of(name)]) if closed else None

    def leader_finds_holds(self) -> None:
        """Their leases have expired, and a row that was closed is settled."""
        for queue in QUEUES:
            for id in stores.client().lrange(QueueKeys(queue).active, 0, -1):
                worker, fence = stores.client().hmget(QueueKeys(queue).task(id.decode()), "worker", "fence")
                if worker and worker.startswith(HOLDER.encode()):
                    lease = Lease(id.decode(), int(fence))
                    lifecycle.recover(self.broker, queue, worker.decode(), [lease], reason="expired")

    @precondition(lambda self: self.open_hands)
    @rule(hand=one_of("open_hands"), begins=st.booleans())
    def a_claimed_task_is_cancelled(self, hand: Hand, begins: bool) -> None:
        """begins: the body runs already, and its row may say so."""
        if begins and not hand.held.begun:
            self.begin(hand, self.steps % 2 == 0)  # type: ignore[attr-defined]
        if hand.held.name in self.unfinished:
            self.cancel(hand.held.name, "commits")

    @seldom
    @precondition(lambda self: self.unfinished)
    @rule(name=one_of("unfinished"))
    def its_time_to_begin_is_over(self, name: str) -> None:
        """A task that runs already may finish."""
        TaskRecord.objects.filter(id=stores.id_of(name)).update(expires_at=timezone.now() - timedelta(hours=1))
        self.model.rows[name].late = True

    @property
    def unfinished(self) -> list[str]:
        return sorted(name for name, row in self.model.rows.items() if not row.is_final)
