"""Rules of workers that wait: they stand by, and no longer; what was moved aside for one comes back."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq.broker.keys import QueueKeys

from . import stores
from .base import LIKELY_QUEUES, Base, one_of
from .values import WORKERS


class Waits(Base):
    """What Redis is told of who waits, and what becomes of a wait that is cut short."""

    @rule(worker=st.sampled_from(WORKERS), read=st.booleans(), may_be_handed=st.booleans())
    def stand_by(self, worker: str, read: bool, may_be_handed: bool) -> None:
        """read: it says that it has read what it was handed first."""
        unread = self.model.standby[worker].unread
        queue = next(iter(unread), "") if read else ""
        self.model.stand_by(queue, worker, may_be_handed=may_be_handed)
        self.last = lambda: self.broker.handoff_ready(queue, worker, ready=may_be_handed)
        self.last()

    @rule(worker=st.sampled_from(WORKERS))
    def dismiss(self, worker: str) -> None:
        """By its supervisor, or by itself when an answer was lost."""
        assert self.broker.stop_handoff(worker) == self.model.dismiss(worker)
        self.last = lambda: self.broker.stop_handoff(worker)

    @precondition(lambda self: self.movable)
    @rule(queue=one_of("movable"), worker=st.sampled_from(WORKERS))
    def connection_ends_behind_blmove(self, queue: str, worker: str) -> None:
        """No script takes what has been moved."""
        self.model.move(queue, worker)
        self.move(queue, worker)
        self.last = None

    def move(self, queue: str, worker: str) -> None:
        """`BLMOVE`, of which something is there."""
        keys = QueueKeys(queue)
        assert stores.client().lmove(keys.pending, keys.handed(worker), "RIGHT", "LEFT") is not None

    @rule(queue=st.sampled_from(LIKELY_QUEUES), worker=st.sampled_from(WORKERS))
    def put_back(self, queue: str, worker: str) -> None:
        """By its supervisor, or by itself when an answer was lost."""
        self.last = lambda: self.broker.requeue_moved(queue, worker)
        self.answer(self.last(), self.model.put_back(queue, worker))
