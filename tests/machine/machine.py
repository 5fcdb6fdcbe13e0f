"""The rules: each calls the project and the model with the same arguments; then the stores must be as the model says.

A frozen worker needs no rule: what it has claimed stays in its hands, whatever happens to the lease, and every verb may
come later. Names of tasks are numbers in the order of their creation.
"""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from django_asyncq.broker.keys import QueueKeys

from . import stores
from .base import MOST_LIVE, Hand, one_of, seldom
from .cancels import Cancels
from .people import People
from .producers import Producers
from .values import FAILED, QUEUES, WORKERS
from .workers import Workers


class Machine(Producers, Workers, People, Cancels):
    """Broker, gates and rows against the model."""

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.drain()
        finally:
            for patch in self.patches:
                patch.stop()

    # --- short cuts to where two workers want the same task

    @precondition(lambda self: self.live < MOST_LIVE)
    @rule(worker=st.sampled_from(WORKERS), gated=st.booleans(), marked=st.booleans())
    def one_begins(self, worker: str, gated: bool, marked: bool) -> None:
        self.enqueue(1, "one", gated, 0, False, "at once")
        self.claim("one", worker, 1)
        for hand in self.fresh_hands[-1:]:
            self.begin(hand, marked)

    @precondition(lambda self: self.active)
    @rule(name=one_of("active"), begins=st.booleans())
    def another_worker_recovers_it(self, name: str, begins: bool) -> None:
        """Its worker is frozen for longer than the lease."""
        entry = self.model.entries[name]
        queue, other = entry.queue, "B" if entry.worker == "A" else "A"
        self.lease_expires(name)
        self.recover_expired("")
        if queue in self.suspicious and not self.is_quarantine_busy:
            self.claim_suspect(queue)
        else:
            self.claim(queue, other, 1)
        for hand in self.fresh_hands[-1:] if begins else ():
            self.begin(hand, True)

    @precondition(lambda self: self.zombies)
    @rule(hand=one_of("zombies"), how=st.sampled_from(["succeeds", "fails, retried", "fails", "is requeued"]))
    def frozen_worker_wakes_up(self, hand: Hand, how: str) -> None:
        """By now another worker has its lease, or none has."""
        if how == "is requeued":
            self.requeue(hand)
        else:
            self.finish(hand, how, "announced")

    @precondition(lambda self: self.holding)
    @rule(hand=one_of("holding"), how=st.sampled_from(["succeeds", "fails, retried", "fails", "is requeued"]))
    def foreign_recoverer_comes_first(self, hand: Hand, how: str) -> None:
        """The entry waits already, with the fence of the run: only its state says that another may dequeue it."""
        self.foreign_recoverer(hand.held.name)
        if hand.stage == "recorded":
            self.worker_continues(hand)
        elif how == "is requeued":
            self.requeue(hand)
        else:
            self.finish(hand, how, "announced")

    @precondition(lambda self: self.failed)
    @rule(name=one_of("failed"), worker=st.sampled_from(WORKERS))
    def person_retries_and_a_worker_claims(self, name: str, worker: str) -> None:
        self.person_retries(name)
        self.claim(self.model.rows[name].queue, worker, 1)

    # --- lost replies

    @precondition(lambda self: self.last is not None)
    @rule()
    def last_call_again(self) -> None:
        """Its reply was lost: both stores stay as they are."""
        assert self.last is not None
        self.last()

    @seldom
    @rule(twice=st.booleans())
    def every_reply_of_redis_is_lost(self, twice: bool) -> None:
        """twice: from now on each script runs twice, and the second reply is used."""
        self.twice = twice

    # --- what always holds

    @invariant()
    def all_holds(self) -> None:
        """One invariant for all: a failing sequence prints each after every step."""
        self.model.later += 1000
        self.steps += 1
        # A call is repeated at once or never.
        self.last = None if self.last is self.called_before else self.last
        self.called_before = self.last
        got, wanted = stores.observed(), stores.expected(self.model)
        for part in wanted:
            assert got[part] == wanted[part], f"{part}:\n  found    {got[part]}\n  expected {wanted[part]}"
        for name, row in got["rows"].items():
            assert name not in self.cancelled or row[0] == FAILED, f"{name} was cancelled, and its row says {row}"
        for name, row in self.model.rows.items():
            # I5
            assert row.fence >= self.fences.get(name, 0), f"the fence of {name} fell"
            self.fences[name] = row.fence
        for name, fences in self.outcomes.items():
            # I4
            assert fences == sorted(set(fences)), f"outcomes of {name} were accepted by the fences {fences}"

    # --- after the last step

    def drain(self) -> None:
        """Run all that is left; then the gate is empty, and Redis agrees with the rows."""
        self.twice = False
        self.hands = []
        stores.client().delete(*(QueueKeys(queue).paused for queue in QUEUES))
        self.model.paused = set()
        self.change_limit(4)
        for queue, names in list(self.model.dropped.items()):
            # No sweep repairs an id without a row: it may belong to another program.
            if not self.model.rows.keys() >= set(names):
                self.put_back(queue)
        for _ in range(20):
            self.remember()
            for name in self.active:
                self.lease_expires(name)
            for name in self.provisional:
                self.provisional_slot_expires(name)
            self.sweep()
            for name in self.waiting:
                self.due_time_comes(name)
            if self.model.waiters:
                self.leader_looks_at_the_waiters()
            self.forward()
            for queue in QUEUES:
                self.claim(queue, "A", 50)
                if queue in self.suspicious and not self.is_quarantine_busy:
                    self.claim_suspect(queue)
            for hand in self.open_hands:
                self.finish(hand, "succeeds", "announced")
            self.all_holds()
            if all(row.is_final for row in self.model.rows.values()) and not self.active:
                break
        self.sweep()
        self.all_holds()
        found = stores.observed()
        unfinished = {name: found["rows"][name] for name, row in self.model.rows.items() if not row.is_final}
        assert not unfinished, f"never finished: {unfinished}"
        assert not found["members"], f"slots without a task: {found['members']}"
        assert not found["waiters"], f"waiters without a task: {found['waiters']}"
        assert not any(found["held"].values()), f"held without a run: {found['held']}"
        # What has no row waits for other programs.
        left = {
            name: entry
            for name, entry in found["entries"].items()
            if entry[1] != "archived" and (entry[1] != "scheduled" or name in self.model.rows)
        }
        assert not left, f"Redis still has {left}"
