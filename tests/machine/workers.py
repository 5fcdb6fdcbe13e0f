"""Rules of workers: they claim, run, finish, stop half way, requeue, and spill outcomes to Redis."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any
from unittest import mock

from django.db import transaction
from django.db.models import F
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq import conf, interop, lifecycle
from django_asyncq.broker import scripts
from django_asyncq.broker.task_entries import dequeue_suspect

from . import stores
from .base import LIKELY_QUEUES, LONG, Hand, one_of, seldom
from .repairs import Repairs
from .values import ALONE, FAILED, QUEUED, RUNNING, SUCCEEDED, WORKERS, Outcome


class Workers(Repairs):
    """What workers do with what they claim. What depends on a repair first is in `Repairs`."""

    @precondition(lambda self: self.claimable)
    @rule(queue=one_of("claimable"), worker=st.sampled_from(WORKERS), count=st.integers(1, 2))
    def claim(self, queue: str, worker: str, count: int) -> None:
        leases = self.model.dequeue(queue, worker, count)
        claimed = interop.claim(self.broker, queue, worker, count, "default")
        assert claimed.paused == (queue in self.model.paused)
        self.receive(queue, worker, leases, claimed.runs)

    @precondition(lambda self: self.claimable)
    @rule(queue=one_of("claimable"), worker=st.sampled_from(WORKERS), count=st.integers(1, 2))
    def claim_whose_reply_is_lost(self, queue: str, worker: str, count: int) -> None:
        self.model.dequeue(queue, worker, count)
        self.broker.dequeue(queue, worker, count, conf.current().lease_seconds)

    @precondition(lambda self: self.suspicious and not self.is_quarantine_busy)
    @rule(queue=one_of("suspicious"))
    def claim_suspect(self, queue: str) -> None:
        """The worker in quarantine holds nothing."""
        claimed = self.dequeue_suspect(queue, lambda: interop.claim_suspect(self.broker, queue, ALONE, "default"))
        assert claimed.is_drained == (not self.taken)
        self.receive(queue, ALONE, self.taken, claimed.runs)

    @precondition(lambda self: self.suspicious and not self.is_quarantine_busy)
    @rule(queue=one_of("suspicious"))
    def claim_of_a_suspect_whose_reply_is_lost(self, queue: str) -> None:
        self.dequeue_suspect(queue, lambda: dequeue_suspect(self.broker, queue, ALONE, conf.current().lease_seconds))

    def dequeue_suspect(self, queue: str, call: Callable[[], Any]) -> Any:
        """Note in `taken` what the script has dequeued: of those of one millisecond it chooses one."""
        self.taken: list[tuple[str, int]] = []
        dequeue = scripts.run

        def run(name: str, *arguments: Any) -> Any:
            reply = dequeue(name, *arguments)
            if name == "dequeue_suspect" and reply:
                assert queue not in self.model.paused
                self.taken = [self.model.dequeue_suspect(stores.name_of(reply[0]), ALONE)]
                assert self.taken[0][1] == int(reply[1])
            return reply

        with mock.patch.object(scripts, "run", run):
            answer = call()
        waiting = queue in self.suspicious and queue not in self.model.paused
        assert self.taken or not waiting, f"no suspect of {queue} was claimed"
        return answer

    @rule(queue=st.sampled_from(LIKELY_QUEUES), worker=st.sampled_from(WORKERS))
    def adopt(self, queue: str, worker: str) -> None:
        """Run what Redis says the worker holds and the worker does not know."""
        known = {hand.held.name for hand in self.hands if hand.held.worker == worker}
        leases = [lease for lease in self.broker.held(queue, worker) if stores.name_of(lease.id) not in known]
        found = [(stores.name_of(lease.id), lease.fence) for lease in leases]
        held = self.model.listed(queue, worker)
        assert dict(found) == {name: fence for name, fence in held.items() if name not in known}
        self.receive(queue, worker, found, interop.classify(self.broker, queue, worker, leases, "default"))

    def receive(self, queue: str, worker: str, leases: list[tuple[str, int]], runs: list[lifecycle.Run]) -> None:
        """Put what was claimed into the worker's hands."""
        self.last = None
        helds = self.model.classify(queue, worker, leases)
        got = [(stores.name_of(run.lease.id), run.lease.fence) for run in runs]
        assert got == [(held.name, held.fence) for held in helds], f"got {got}, the model says {helds}"
        for held, run in zip(helds, runs, strict=True):
            assert run.record.cancel_requested_at is None, f"{held.name} was cancelled, and is to run"
            self.claims += 1
            self.hands.append(Hand(f"{held.name}@{worker}#{self.claims}", held, run))

    @precondition(lambda self: self.fresh_hands)
    @rule(hand=one_of("fresh_hands"), marked=st.booleans())
    def begin(self, hand: Hand, marked: bool) -> None:
        """marked: it runs for long enough that its row becomes RUNNING."""
        self.start(hand)
        if marked:
            self.mark(hand)

    def start(self, hand: Hand) -> None:
        held = hand.held
        lifecycle.begin(hand.run, held.worker, timezone.now() - LONG)
        held.row.begin(held.worker)
        held.row.fence, held.begun = held.fence, True

    def mark(self, hand: Hand) -> None:
        held = hand.held
        accepted = self.model.write(held.name, held.fence, held.read, held.row)
        held.written = True
        self.last = lambda: lifecycle.mark_running([hand.run])
        assert (self.last() == []) == accepted, f"mark_running of {hand}: the model says {accepted}"

    @precondition(lambda self: self.open_hands)
    @rule(
        hand=one_of("open_hands"),
        how=st.sampled_from(["succeeds", "succeeds", "fails, retried", "fails", "asks for a retry"]),
        until=st.sampled_from(["recorded", "acknowledged", "announced", "announced", "announced"]),
    )
    def finish(self, hand: Hand, how: str, until: str) -> None:
        """until: the step after which the worker stops; the other steps may still come."""
        self.set_outcome(hand, how)
        self.record_outcome(hand)
        self.acknowledge_and_announce(hand, until)

    def set_outcome(self, hand: Hand, how: str) -> None:
        """Set the outcome of the run, in memory."""
        if not hand.held.begun:
            self.start(hand)
        held, run, now = hand.held, hand.run, timezone.now()
        if how == "succeeds":
            lifecycle.succeed(run, 1, now)
            held.row.state, held.row.suspicion = SUCCEEDED, 0
        else:
            retry_at = None if how == "fails" else now + LONG
            counted = how != "asks for a retry"
            lifecycle.fail(run, ValueError("no"), "", now, retry_at=retry_at, counted=counted)
            held.row.state, held.row.suspicion = FAILED, 0
            held.row.retry_at, held.counted = "future" if retry_at else "", counted
            if not counted:
                held.row.undo_attempt()
            elif retry_at:
                held.row.crashes = 0

    def acknowledge_and_announce(self, hand: Hand, until: str) -> None:
        """Acknowledge and announce an outcome that is in the row."""
        if until != "recorded":
            self.acknowledge(hand)
        if until == "announced":
            self.announce(hand)

    def record_outcome(self, hand: Hand) -> None:
        held = hand.held
        hand.lost = not self.model.write(held.name, held.fence, held.read, held.row)

        def record() -> None:
            lost = bool(lifecycle.record_runs([hand.run]))
            assert lost == hand.lost, f"the outcome of {hand}: the model says lost={hand.lost}"

        # Each outcome is written twice: the reply to the first is lost.
        record()
        record()
        self.last = record
        hand.stage = "recorded"
        if not hand.lost:
            self.outcomes.setdefault(held.name, []).append(held.fence)

    def acknowledge(self, hand: Hand) -> None:
        lost = [hand.run] if hand.lost else []
        self.last = lambda: lifecycle.acknowledge(self.broker, hand.held.worker, [hand.run], lost)
        self.last()
        self.model.acknowledge(hand.held, lost=hand.lost)
        hand.stage = "acknowledged"

    def announce(self, hand: Hand) -> None:
        self.hands.remove(hand)
        if not hand.lost:
            state = hand.run.record.state
            self.last = lambda: lifecycle.announce([hand.run.record], RUNNING, state)
            self.last()
            self.model.announce(hand.held.name, hand.held.fence)
        else:
            self.last = lambda: lifecycle.settle_lost(self.broker, [hand.run])
            self.last()
            self.model.settle_lost(hand.held)

    @precondition(lambda self: self.unannounced_hands)
    @rule(hand=one_of("unannounced_hands"))
    def worker_continues(self, hand: Hand) -> None:
        """A worker that stopped after a step takes the next."""
        if hand.stage == "recorded":
            self.acknowledge(hand)
        else:
            self.announce(hand)

    @precondition(lambda self: self.open_hands)
    @rule(
        hand=one_of("open_hands"),
        marked=st.booleans(),
        commits=st.sampled_from([True, True, False]),
        until=st.sampled_from(["recorded", "acknowledged", "announced"]),
    )
    def complete(self, hand: Hand, marked: bool, commits: bool, until: str) -> None:
        """Finish the run in the transaction of its effects. After a rollback it is still unfinished."""
        held = hand.held
        if not held.begun:
            self.start(hand)
        if marked:
            self.mark(hand)
        accepted = self.model.is_open_to(held.name, held.fence, held.read)
        completed = self.commit(hand, commits=commits, accepted=accepted)
        self.last = None
        if completed is None:
            return
        is_recorded = lifecycle.already_recorded([completed]) == [completed]
        assert is_recorded == commits, f"a commit of {hand} that gave no reply is looked up: {is_recorded}"
        if not commits:
            return
        held.row.state, held.row.suspicion = SUCCEEDED, 0
        self.model.write(held.name, held.fence, held.read, held.row)
        self.model.effects += 1
        self.outcomes.setdefault(held.name, []).append(held.fence)
        hand.run, hand.stage, hand.lost = completed, "recorded", False
        self.acknowledge_and_announce(hand, until)

    def commit(self, hand: Hand, *, commits: bool, accepted: bool) -> lifecycle.Run | None:
        """Have the effect and write the success, twice, as one commit."""
        before = copy(hand.run.record.__dict__)
        with transaction.atomic():
            stores.effects.update(limit=F("limit") + 1)
            completed = lifecycle.complete(hand.run, 1, timezone.now())
            again = lifecycle.complete(hand.run, 1, timezone.now())
            transaction.set_rollback(not commits or completed is None)
        assert (completed is not None) == (again is not None) == accepted, f"complete of {hand}: not {accepted}"
        assert hand.run.record.__dict__ == before, "the run as it was given is changed"
        return completed

    @precondition(lambda self: self.open_hands)
    @rule(
        hand=one_of("open_hands"),
        how=st.sampled_from(["succeeds", "succeeds", "fails, retried", "fails", "asks for a retry"]),
        in_doubt=st.sampled_from([False, False, True]),
    )
    def spill_outcomes(self, hand: Hand, how: str, in_doubt: bool) -> None:
        """It must stop while the database is unreachable. in_doubt: its last commit gave no reply, but succeeded."""
        held = hand.held
        self.set_outcome(hand, how)
        if in_doubt:
            self.record_outcome(hand)
        taken = self.model.spill_outcomes(
            held.row.queue, held.name, held.worker, held.fence, Outcome(replace(held.row), held.counted, held.read)
        )
        for _ in range(2):
            got = lifecycle.spill_outcomes(self.broker, held.worker, [hand.run])
            assert got == taken, f"spill_outcomes of {hand}: the model says {taken}"
        self.last = None
        if taken:
            # Like every expired lease of the machine: otherwise their order would depend on the clock.
            self.lease_expires(held.name)
        self.hands.remove(hand)

    @precondition(lambda self: self.spilled)
    @rule(
        name=one_of("spilled"),
        to=st.sampled_from(["the reconciler", "a worker", "a worker that loses the reply", "nobody"]),
    )
    def spilled_outcome_is_replayed(self, name: str, to: str) -> None:
        """By the process that gets the entry first; a worker gets it from a foreign recoverer."""
        entry = self.model.entries[name]
        if to == "the reconciler":
            self.recover_expired("")
        elif to == "nobody":
            self.recover_expired("before Redis")
        else:
            if entry.place == "active":
                self.foreign_recoverer(name)
            rule = self.claim if to == "a worker" else self.claim_whose_reply_is_lost
            rule(entry.queue, "B", 2)

    @precondition(lambda self: self.open_hands)
    @rule(hand=one_of("open_hands"))
    def requeue(self, hand: Hand) -> None:
        held = hand.held
        accepted = True
        if held.begun:
            held.row.undo_attempt()
            held.row.state = QUEUED
            accepted = not held.written or self.model.write(held.name, held.fence, held.read, held.row)
        if accepted:
            aside = [held.name] if held.row.suspect else []
            self.model.requeue(held.row.queue, [(held.name, held.fence)], held.worker, suspects=aside)
        self.last = lambda: lifecycle.requeue(self.broker, held.worker, [hand.run])
        self.last()
        self.hands.remove(hand)

    @seldom
    @precondition(lambda self: self.fresh_hands)
    @rule(hand=one_of("fresh_hands"), refused=st.booleans())
    def postpone(self, hand: Hand, refused: bool) -> None:
        """It has no code for the task. refused: it was postponed for too long already, so it fails."""
        held = hand.held
        wanted = self.model.postpone(held.row.queue, held.name, held.worker, held.fence)
        ages = lifecycle.postpone(self.broker, held.worker, [hand.run], 7200)
        self.answer(ages[hand.run.record.id] >= 0, wanted)
        self.last = None
        self.hands.remove(hand)
        if refused and ages[hand.run.record.id] >= 0:
            lifecycle.refuse(self.broker, hand.run, ValueError("no code"))
            new = replace(held.row, state=FAILED, fence=held.fence)
            if self.model.write(held.name, held.fence, held.read, new):
                self.model.remove(held.name)
                self.model.free_slots([held.name])
