"""Rules of ids that a script has popped from pending when Redis refused its next command: a right was taken away."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq.broker.keys import QueueKeys

from . import stores
from .base import LIKELY_QUEUES, Base, one_of


class Drops(Base):
    """A task that is in no list is found by the sweep, or somebody puts it back."""

    @precondition(lambda self: self.droppable)
    @rule(queue=one_of("droppable"))
    def drop(self, queue: str) -> None:
        self.model.drop(queue)
        moved = stores.client().lmove(QueueKeys(queue).pending, stores.dropped_key(queue), "RIGHT", "LEFT")
        assert moved is not None
        self.last = None

    @rule(queue=st.sampled_from(LIKELY_QUEUES))
    def put_back(self, queue: str) -> None:
        self.model.put_back(queue)
        while stores.client().lmove(stores.dropped_key(queue), QueueKeys(queue).pending, "RIGHT", "RIGHT"):
            pass
        self.last = None
