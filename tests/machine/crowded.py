"""The machine with short cuts to a gate at which tasks wait: by single rules, sequences rarely come there."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .base import MOST_LIVE
from .machine import Machine
from .values import FAILED


class Crowded(Machine):
    """Retries compete with new tasks."""

    @precondition(lambda self: self.model.limit > 0 and self.live < MOST_LIVE - self.model.limit)
    @rule()
    def a_retry_waits(self) -> None:
        """A task fails, others take all slots, then its time comes."""
        self.one_begins("A", True, False)
        for hand in self.open_hands[-1:]:
            self.finish(hand, "fails, retried", "announced")
        for _ in range(self.model.limit - len(self.model.members)):
            self.enqueue(1, "two", True, 0, False, "at once")
        for name, row in sorted(self.model.rows.items()):
            if row.state == FAILED and row.retry_at == "future" and name not in self.model.waiters:
                self.due_time_comes(name)
        self.forward()

    @precondition(lambda self: self.model.waiters and self.model.holders())
    @rule(asks=st.sampled_from(["a new task", "the last waiter", "the leader"]))
    def a_slot_is_free(self, asks: str) -> None:
        """It belongs to the waiter that is next, whoever asks."""
        self.delete(self.model.holders()[0], False)
        last = self.model.waiters[-1]
        if asks == "a new task":
            self.enqueue(1, "one", True, 0, False, "at once")
        elif asks == "the leader":
            self.leader_looks_at_the_waiters()
        elif last in self.failed:
            self.person_retries(last)
