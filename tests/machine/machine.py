"""The rules: each calls the project and the model alike; after each the stores must be as the model says.

A worker that is frozen needs no rule of its own: what it has taken stays in its hands whatever becomes of the lease,
and every verb may come later. Names of tasks are numbers in the order of their birth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

from django.db import transaction
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from django_asyncq import conf, gate, lifecycle, reconciler
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.keys import QueueKeys, alive_key, queues_key
from django_asyncq.exceptions import BrokerUnavailable, QueueFull
from django_asyncq.forwarder import forward_due
from django_asyncq.lifecycle import entering, leaving, returning
from django_asyncq.models import Gate, TaskRecord
from django_asyncq.reconciler import Reconciler

from . import stores
from .model import FAILED, GATE, QUEUED, QUEUES, RUNNING, SUCCEEDED, WORKERS, Held, Model, Row

# Few tasks meet often: most guards are about two who want the same one.
MOST_LIVE = 5
LIKELY_QUEUES = ("one", "one", "one", "two")
LONG = timedelta(hours=2)
# A second call of these answers something else by their nature: they take, or list and clean up.
NOT_REPEATABLE = {"dequeue", "expired"}


@dataclass(eq=False)
class Hand:
    """A run in a worker's hands, in the model and for real. stage: "open", "recorded" or "acknowledged"."""

    label: str
    held: Held
    run: lifecycle.Run
    stage: str = "open"
    lost: bool = False

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis prints it in a failing sequence."""
        printer.text(self.label)


def one_of(attribute: str) -> st.SearchStrategy[Any]:
    """Choose among what the machine has at this moment."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, attribute)))


def seldom(function: Any) -> Any:
    """Offer a rule at each third step only: what the world does must not crowd out what workers do."""
    return precondition(lambda machine: machine.steps % 3 == 0)(function)


def hands_of(machine: Any, *stages: str) -> list[Hand]:
    return [hand for hand in machine.hands if hand.stage in stages]


class Machine(RuleBasedStateMachine):
    """Broker, gate and rows against the model."""

    def __init__(self) -> None:
        super().__init__()
        stores.flush()
        Broker.forget_registered()
        TaskRecord.objects.all()._raw_delete(TaskRecord.objects.db)
        Gate.objects.all().delete()
        self.model = Model()
        Gate.objects.create(name=GATE, limit=self.model.limit, expected_seconds=1)
        self.broker = Broker("worker")
        self.reconciler = Reconciler(Broker("worker"))
        self.hands: list[Hand] = []
        self.born = 0
        self.claims = 0
        self.steps = 0
        self.last: Callable[[], Any] | None = None
        self.called_before: Callable[[], Any] | None = None
        self.twice = False
        self.fences: dict[str, int] = {}
        self.outcomes: dict[str, list[int]] = {}
        self.remember()
        self.patches = [
            mock.patch.object(scripts, "run", self._run_script(scripts.run)),
            mock.patch.object(reconciler, "GRACE_SECONDS", 0),
            *(mock.patch.object(module, "later_fence", self._later) for module in (entering, returning, reconciler)),
            mock.patch.object(entering, "GATE_RETRY_SECONDS", 7200),
            mock.patch.object(returning, "GATE_RETRY_SECONDS", 7200),
        ]
        for patch in self.patches:
            patch.start()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.drain()
        finally:
            for patch in self.patches:
                patch.stop()

    def _later(self, record: TaskRecord) -> int:
        """In place of the clock's, for two calls within a millisecond are none in the life of a queue."""
        return max(self.model.later, record.fence + 1)

    def _run_script(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(name: str, *arguments: Any) -> Any:
            answer = real(name, *arguments)
            return real(name, *arguments) if self.twice and name not in NOT_REPEATABLE else answer

        return run

    def remember(self) -> None:
        """Redis has its memory, and has had it for long."""
        stores.client().sadd(queues_key(), *QUEUES)
        stores.client().set(alive_key(), 1)
        self.model.alive = "long"

    def answer(self, got: Any, wanted: Any) -> None:
        """Compare an answer; the second of two calls may count differently."""
        assert self.twice or got == wanted, f"answered {got}, the model says {wanted}"

    @contextmanager
    def dies_before(self, module: Any, name: str, *, dies: bool) -> Iterator[None]:
        """Let the process end when it comes to this call."""
        if not dies:
            yield
            return
        with mock.patch.object(module, name, side_effect=BrokerUnavailable("it died here")):
            yield

    # --- choices

    @property
    def names(self) -> list[str]:
        return sorted(self.model.rows)

    @property
    def live(self) -> int:
        return sum(not row.is_final for row in self.model.rows.values())

    @property
    def queued(self) -> list[str]:
        return sorted(name for name, row in self.model.rows.items() if row.state == QUEUED)

    @property
    def takeable(self) -> list[str]:
        return sorted({e.queue for e in self.model.entries.values() if e.place in ("pending", "priority")})

    @property
    def failed(self) -> list[str]:
        """Rows in 3, but those whose run has not been acknowledged yet: see `test_known`."""
        found = (name for name, row in self.model.rows.items() if row.state == FAILED)
        return sorted(name for name in found if not self.is_unacknowledged(name))

    @property
    def active(self) -> list[str]:
        return sorted(name for name, entry in self.model.entries.items() if entry.place == "active")

    @property
    def waiting(self) -> list[str]:
        waits = {name for name, row in self.model.rows.items() if row.due == "future"}
        entries = {n for n, e in self.model.entries.items() if e.due == "future" and e.place in ("scheduled", "retry")}
        return sorted(waits | entries)

    @property
    def open_hands(self) -> list[Hand]:
        return hands_of(self, "open")

    @property
    def fresh_hands(self) -> list[Hand]:
        return [hand for hand in self.open_hands if not hand.held.begun]

    @property
    def zombies(self) -> list[Hand]:
        return [hand for hand in self.open_hands if not self.model.holds(hand.held.name, hand.held.fence)]

    @property
    def late_hands(self) -> list[Hand]:
        return hands_of(self, "recorded", "acknowledged")

    @property
    def provisional(self) -> list[str]:
        return sorted(name for name, provisional in self.model.members.items() if provisional)

    def is_unacknowledged(self, name: str) -> bool:
        entry = self.model.entries.get(name)
        late = any(hand.held.name == name and hand.stage != "open" for hand in self.hands)
        return late or (entry is not None and entry.place == "active")

    # --- in

    @precondition(lambda self: self.live < MOST_LIVE)
    @rule(
        count=st.integers(1, 2),
        queue=st.sampled_from(LIKELY_QUEUES),
        gated=st.booleans(),
        priority=st.sampled_from([0, 0, 5, -5]),
        delayed=st.sampled_from([False, False, True]),
        ends=st.sampled_from(["at once", "at once", "commits", "rolls back", "dies after the commit"]),
    )
    def enqueue(self, count: int, queue: str, gated: bool, priority: int, delayed: bool, ends: str) -> None:
        """at once: all or nothing. Otherwise one by one in a transaction, as many as there is room for."""
        names = [f"t{self.born + number:02}" for number in range(1, count + 1)]
        self.born += count
        run_after = "future" if delayed else ""
        row = Row(queue, GATE if gated else "", priority, run_after)
        records = [self.record(name, row) for name in names]
        groups = [records] if ends == "at once" else [[record] for record in records]
        admitted: list[str] = []
        try:
            with self.dies_before(entering, "dispatch", dies=ends.startswith("dies")), transaction.atomic():
                for group in groups:
                    admitted += self.enter(group, row)
                if ends == "rolls back":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            for name in admitted:
                del self.model.rows[name]
            return
        if not ends.startswith("dies"):
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

    def enter(self, records: list[TaskRecord], row: Row) -> list[str]:
        """Enqueue within the transaction; return the names admitted."""
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
        """The slot was taken, the row never written."""
        self.born += 1
        record = self.record(name := f"t{self.born:02}", Row(QUEUES[0], GATE))
        refused = self.model.admit([name], provisional=True, partial=True)
        self.answer({stores.name_of(str(id)) for id in gate.acquire([record], partial=True)}, set(refused or []))

    @seldom
    @precondition(lambda self: self.provisional)
    @rule(name=one_of("provisional"))
    def provisional_slot_expires(self, name: str) -> None:
        stores.client().zadd(gate.keys(GATE)[0], {str(stores.id_of(name)): 1})
        del self.model.members[name]

    @seldom
    @precondition(lambda self: self.queued)
    @rule(name=one_of("queued"), again=st.booleans())
    def push_late(self, name: str, again: bool) -> None:
        """A second reconciler, or a hook that was slow."""
        record = TaskRecord.objects.get(id=stores.id_of(name))
        entry = self.model.entries.get(name)
        if entry is None and not again:
            return  # after Redis was emptied its fence would begin anew; only fresh rows are pushed so
        self.last = lambda: lifecycle.dispatch([copy(record)], again=again)
        self.last()
        self.model.dispatch([name], again=again)

    # --- run

    @precondition(lambda self: self.takeable)
    @rule(queue=one_of("takeable"), worker=st.sampled_from(WORKERS), count=st.integers(1, 2))
    def claim(self, queue: str, worker: str, count: int) -> None:
        leases = self.model.dequeue(queue, worker, count)
        claimed = lifecycle.claim(self.broker, queue, worker, count, "default")
        assert claimed.paused == (queue in self.model.paused)
        self.take(queue, worker, leases, claimed.runs)

    @precondition(lambda self: self.takeable)
    @rule(queue=one_of("takeable"), worker=st.sampled_from(WORKERS), count=st.integers(1, 2))
    def claim_whose_reply_is_lost(self, queue: str, worker: str, count: int) -> None:
        self.model.dequeue(queue, worker, count)
        self.broker.dequeue(queue, worker, count, conf.current().lease_seconds)

    @rule(queue=st.sampled_from(LIKELY_QUEUES), worker=st.sampled_from(WORKERS))
    def adopt(self, queue: str, worker: str) -> None:
        """Run what Redis says the worker holds and it does not know."""
        known = {hand.held.name for hand in self.hands if hand.held.worker == worker}
        leases = [lease for lease in self.broker.held(queue, worker) if stores.name_of(lease.id) not in known]
        held = self.model.held.get((queue, worker), {})
        found = [(stores.name_of(lease.id), lease.fence) for lease in leases]
        assert dict(found) == {name: fence for name, fence in held.items() if name not in known}
        self.take(queue, worker, found, lifecycle.sort_out(self.broker, queue, worker, leases, "default"))

    def take(self, queue: str, worker: str, leases: list[tuple[str, int]], runs: list[lifecycle.Run]) -> None:
        """Put what was claimed into the worker's hands."""
        self.last = None
        helds = self.model.sort_out(queue, worker, leases)
        got = [(stores.name_of(run.lease.id), run.lease.fence) for run in runs]
        assert got == [(held.name, held.fence) for held in helds], f"got {got}, the model says {helds}"
        for held, run in zip(helds, runs, strict=True):
            self.claims += 1
            self.hands.append(Hand(f"{held.name}@{worker}#{self.claims}", held, run))

    @precondition(lambda self: self.fresh_hands)
    @rule(hand=one_of("fresh_hands"), marked=st.booleans())
    def begin(self, hand: Hand, marked: bool) -> None:
        """marked: it runs for long enough for its row to be told."""
        self.start(hand)
        if marked:
            self.mark(hand)

    def start(self, hand: Hand) -> None:
        held = hand.held
        lifecycle.begin(hand.run, held.worker, timezone.now() - LONG)
        held.row.state, held.row.fence, held.begun = RUNNING, held.fence, True
        held.row.attempt += 1

    def mark(self, hand: Hand) -> None:
        held = hand.held
        accepted = self.model.write(held.name, held.fence, held.row)
        held.written = True
        self.last = lambda: lifecycle.mark_running([hand.run])
        assert (self.last() == []) == accepted, f"mark_running of {hand}: the model says {accepted}"

    @precondition(lambda self: self.open_hands)
    @rule(
        hand=one_of("open_hands"),
        how=st.sampled_from(["succeeds", "succeeds", "fails, retried", "fails", "asks for a retry"]),
        until=st.sampled_from(["recorded", "acknowledged", "announced", "announced", "announced"]),
    )
    def end(self, hand: Hand, how: str, until: str) -> None:
        """until: the step after which the worker is stopped; what is left may still come."""
        if not hand.held.begun:
            self.start(hand)
        held, run, now = hand.held, hand.run, timezone.now()
        if how == "succeeds":
            lifecycle.succeed(run, 1, now)
            held.row.state = SUCCEEDED
        else:
            retry_at = None if how == "fails" else now + LONG
            counted = how != "asks for a retry"
            lifecycle.fail(run, ValueError("no"), "", now, retry_at=retry_at, counted=counted)
            held.row.state, held.row.retry_at, held.counted = FAILED, "future" if retry_at else "", counted
            held.row.attempt -= not counted
        self.record_end(hand)
        if until != "recorded":
            self.acknowledge(hand)
        if until == "announced":
            self.announce(hand)

    def record_end(self, hand: Hand) -> None:
        held = hand.held
        hand.lost = not self.model.write(held.name, held.fence, held.row)

        def record() -> None:
            lost = bool(lifecycle.record_runs([hand.run]))
            assert lost == hand.lost, f"the end of {hand}: the model says lost={hand.lost}"

        # Each end is written twice: the answer to the first is lost.
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
        name = hand.held.name
        if not hand.lost:
            state = hand.run.record.state
            self.last = lambda: lifecycle.announce([hand.run.record], RUNNING, state)
            self.last()
            self.model.free_slots([name])
        self.hands.remove(hand)

    @precondition(lambda self: self.late_hands)
    @rule(hand=one_of("late_hands"))
    def goes_on(self, hand: Hand) -> None:
        """A worker that stopped after a step takes the next."""
        if hand.stage == "recorded":
            self.acknowledge(hand)
        elif hand.held.name in self.model.rows and self.model.rows[hand.held.name].state in (QUEUED, RUNNING):
            self.hands.remove(hand)  # see `test_known`: its slot would go, though it is queued again
        else:
            self.announce(hand)

    @precondition(lambda self: self.open_hands)
    @rule(hand=one_of("open_hands"))
    def hand_back(self, hand: Hand) -> None:
        held = hand.held
        accepted = True
        if held.begun:
            held.row.attempt -= 1
            held.row.state = QUEUED
            accepted = not held.written or self.model.write(held.name, held.fence, held.row)
        if accepted:
            self.model.requeue(held.row.queue, [(held.name, held.fence)], held.worker)
        self.last = lambda: lifecycle.hand_back(self.broker, held.worker, [hand.run])
        self.last()
        self.hands.remove(hand)

    @seldom
    @precondition(lambda self: self.fresh_hands)
    @rule(hand=one_of("fresh_hands"), refused=st.booleans())
    def put_off(self, hand: Hand, refused: bool) -> None:
        """No code for it here. refused: for too long already, so it fails."""
        held = hand.held
        wanted = self.model.postpone(held.row.queue, held.name, held.worker, held.fence)
        ages = lifecycle.put_off(self.broker, held.worker, [hand.run], 7200)
        self.answer(ages[hand.run.record.id] >= 0, wanted)
        self.last = None
        self.hands.remove(hand)
        if refused and ages[hand.run.record.id] >= 0:
            lifecycle.refuse(self.broker, hand.run, ValueError("no code"))
            new = replace(held.row, state=FAILED, fence=held.fence)
            if self.model.write(held.name, held.fence, new):
                self.model.remove(held.name)
                self.model.free_slots([held.name])

    # --- leases

    @seldom
    @rule(worker=st.sampled_from(WORKERS), reasserts=st.booleans())
    def beat(self, worker: str, reasserts: bool) -> None:
        """The supervisor renews; after Redis lost its memory it gives back what runs."""
        self.last = None
        for queue in QUEUES:
            kept, lost = self.model.extend(queue, worker)
            found = self.broker.extend(queue, worker, conf.current().lease_seconds)
            assert found.kept == kept
            self.answer(sorted(map(stores.name_of, found.lost)), sorted(lost))
        if reasserts:
            mine = [hand.held for hand in self.open_hands if hand.held.worker == worker and hand.held.begun]
            # A run whose row is another's by now is left out: see `test_known`.
            names = [held.name for held in mine if held.name in self.model.rows]
            names = [n for n in names if (n, self.model.rows[n].fence) in [(held.name, held.fence) for held in mine]]
            running = [name for name in dict.fromkeys(names) if self.model.rows[name].state == RUNNING]
            ids = [str(stores.id_of(name)) for name in names]
            self.last = lambda: lifecycle.reassert(self.broker, worker, ids)
            self.answer(self.last(), self.model.reassert(worker, running))

    @precondition(lambda self: self.active)
    @rule(name=one_of("active"))
    def lease_lapses(self, name: str) -> None:
        entry = self.model.entries[name]
        stores.client().zadd(QueueKeys(entry.queue).lease, {str(stores.id_of(name)): 1})
        entry.lapsed = True

    @rule(dies=st.booleans())
    def recover_expired(self, dies: bool) -> None:
        """dies: between the rows and Redis."""
        wanted = self.model.recover_expired(cut=dies)
        with self.dies_before(returning, "_give_on", dies=dies):
            try:
                self.answer(self.reconciler.recover_expired(), wanted)
            except BrokerUnavailable:
                assert dies
        self.last = None if dies else self.reconciler.recover_expired

    @seldom
    @rule(worker=st.sampled_from(WORKERS), killed=st.booleans())
    def worker_ends(self, worker: str, killed: bool) -> None:
        """Its supervisor hands back what it held; nothing is left in its hands."""
        mine = [hand.held for hand in self.open_hands if hand.held.worker == worker]
        self.hands = [hand for hand in self.hands if hand.held.worker != worker]
        started = [held.name for held in mine if held.begun]
        ids = [str(stores.id_of(name)) for name in started]
        for queue in QUEUES:
            leases = self.broker.held(queue, worker)
            found = [(stores.name_of(lease.id), lease.fence) for lease in leases]
            wanted = self.model.recover(queue, worker, found, crashed=killed, started=started)
            got = lifecycle.recover(self.broker, queue, worker, leases, reason="it ended", crashed=killed, started=ids)
            self.answer(got, wanted)
        self.last = None

    @seldom
    @precondition(lambda self: self.active)
    @rule(name=one_of("active"))
    def foreign_recoverer(self, name: str) -> None:
        """asynq's own server gives a lapsed task on; rows and what is held it does not know."""
        entry, keys, id = self.model.entries[name], QueueKeys(self.model.entries[name].queue), str(stores.id_of(name))
        stores.client().lrem(keys.active, 0, id)
        stores.client().zrem(keys.lease, id)
        stores.client().hset(keys.task(id), "state", "pending")
        if entry.priority:
            stores.client().zadd(keys.priority, {id: -entry.priority})
        else:
            stores.client().lpush(keys.pending, id)
        self.model.foreign_recoverer(name)

    # --- short ways to where two want the same task

    @precondition(lambda self: self.live < MOST_LIVE)
    @rule(worker=st.sampled_from(WORKERS), gated=st.booleans(), marked=st.booleans())
    def one_begins(self, worker: str, gated: bool, marked: bool) -> None:
        self.enqueue(1, "one", gated, 0, False, "at once")
        self.claim("one", worker, 1)
        for hand in self.fresh_hands[-1:]:
            self.begin(hand, marked)

    @precondition(lambda self: self.active)
    @rule(name=one_of("active"), begins=st.booleans())
    def another_takes_over(self, name: str, begins: bool) -> None:
        """Its worker is frozen for longer than the lease."""
        entry = self.model.entries[name]
        queue, other = entry.queue, "B" if entry.worker == "A" else "A"
        self.lease_lapses(name)
        self.recover_expired(False)
        self.claim(queue, other, 1)
        for hand in self.fresh_hands[-1:] if begins else ():
            self.begin(hand, True)

    @precondition(lambda self: self.zombies)
    @rule(hand=one_of("zombies"), how=st.sampled_from(["succeeds", "fails, retried", "fails", "is handed back"]))
    def frozen_worker_wakes_up(self, hand: Hand, how: str) -> None:
        """Its lease is another's by now, or nobody's."""
        if how == "is handed back":
            self.hand_back(hand)
        else:
            self.end(hand, how, "announced")

    @precondition(lambda self: self.failed)
    @rule(name=one_of("failed"), worker=st.sampled_from(WORKERS))
    def person_retries_and_one_takes_it(self, name: str, worker: str) -> None:
        self.person_retries(name)
        self.claim(self.model.rows[name].queue, worker, 1)

    # --- what is due, and people

    @precondition(lambda self: self.waiting)
    @rule(name=one_of("waiting"))
    def its_time_comes(self, name: str) -> None:
        rows = TaskRecord.objects.filter(id=stores.id_of(name))
        past = timezone.now() - LONG
        rows.filter(run_after__isnull=False).update(run_after=past)
        rows.filter(retry_at__isnull=False).update(retry_at=past)
        if row := self.model.rows.get(name):
            row.run_after, row.retry_at = row.run_after and "past", row.retry_at and "past"
        entry = self.model.entries.get(name)
        if entry and entry.place in ("scheduled", "retry"):
            keys, id = QueueKeys(entry.queue), str(stores.id_of(name))
            stores.client().zadd(getattr(keys, entry.place), {id: 1}, xx=True)
            stores.client().zadd(keys.due, {id: 1}, xx=True)
            entry.due = "past"

    @precondition(lambda self: any(entry.due == "past" for entry in self.model.entries.values()))
    @rule()
    def forward(self) -> None:
        wanted = self.model.forward()
        found = forward_due(self.broker, QUEUES)
        self.answer((found.forwarded, found.retried), wanted)
        self.last = lambda: forward_due(self.broker, QUEUES)

    @precondition(lambda self: self.failed)
    @rule(name=one_of("failed"))
    def person_retries(self, name: str) -> None:
        full = self.model.retry([name], by_person=True)
        if not full:
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
        """dies: after the commit, so that neither Redis nor the gate is told."""
        row = self.model.rows.pop(name)
        record = TaskRecord.objects.get(id=stores.id_of(name))
        with self.dies_before(leaving.Removal, "__call__", dies=dies):
            copy(record).delete()
        if not dies:
            self.model.remove(name)
            self.model.free_slots([name] if row.gate else [])
            self.last = lambda: lifecycle.forget([record])

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

    # --- faults and repairs

    @seldom
    @rule(knows=st.booleans())
    def redis_is_emptied(self, knows: bool) -> None:
        """knows: the reconciler has noticed since, and long ago."""
        stores.flush()
        self.model.flush()
        self.last = None
        # A queue with nothing but running or retried tasks is not named again: see `test_known`.
        stores.client().sadd(queues_key(), *QUEUES)
        if knows:
            self.remember()

    @seldom
    @rule()
    def reconcile(self) -> None:
        self.mended(self.reconciler.quick(), self.model.quick())
        self.last = None if self.model.strangers else self.reconciler.quick

    def mended(self, got: reconciler.Repairs, wanted: dict[str, int]) -> None:
        """Compare what a pass says it has mended; what it does not name is 0."""
        self.answer({k: v for k, v in got._asdict().items() if v}, {k: v for k, v in wanted.items() if v})

    @seldom
    @rule()
    def sweep(self) -> None:
        """The quick repairs first: see `test_known` for what the audit would do before them."""
        self.reconcile()
        if not self.model.alive:
            self.broker.mark_alive()
            self.model.alive = "just"
        for _ in range(2):
            self.mended(self.reconciler.sweep(), self.model.sweep())
        if not self.twice:
            repairs = self.reconciler.sweep()
            assert not any(repairs), f"nothing is broken, and yet it mended {repairs}"
        self.last = self.reconciler.sweep

    @precondition(lambda self: self.model.alive == "just")
    @rule()
    def time_passes_since_redis_came_back(self) -> None:
        self.remember()

    @precondition(lambda self: self.last is not None)
    @rule()
    def last_call_again(self) -> None:
        """Its reply was lost: both stores stay as they are."""
        assert self.last is not None
        self.last()

    @seldom
    @rule(twice=st.booleans())
    def every_reply_of_redis_is_lost(self, twice: bool) -> None:
        """twice: from now on each script runs twice, and the second answer is heard."""
        self.twice = twice

    # --- what always holds

    @invariant()
    def all_holds(self) -> None:
        """One invariant for all: a failing sequence names each after every step."""
        self.model.later += 1000
        self.steps += 1
        # A call is repeated at once or not at all.
        self.last = None if self.last is self.called_before else self.last
        self.called_before = self.last
        got, wanted = stores.observed(), stores.expected(self.model)
        for part in wanted:
            assert got[part] == wanted[part], f"{part}:\n  found    {got[part]}\n  expected {wanted[part]}"
        for name, row in self.model.rows.items():
            # I5
            assert row.fence >= self.fences.get(name, 0), f"the fence of {name} fell"
            self.fences[name] = row.fence
        for name, fences in self.outcomes.items():
            # I4
            assert fences == sorted(set(fences)), f"outcomes of {name} were accepted by the fences {fences}"

    # --- the end

    def drain(self) -> None:
        """Run all that is left; then the gate is empty, and Redis agrees with the rows."""
        self.twice = False
        self.hands = []
        stores.client().delete(*(QueueKeys(queue).paused for queue in QUEUES))
        self.model.paused = set()
        self.change_limit(4)
        for _ in range(20):
            self.remember()
            for name in self.active:
                self.lease_lapses(name)
            for name in self.provisional:
                self.provisional_slot_expires(name)
            self.sweep()
            for name in self.waiting:
                self.its_time_comes(name)
            self.forward()
            for queue in QUEUES:
                self.claim(queue, "A", 50)
            for hand in self.open_hands:
                self.end(hand, "succeeds", "announced")
            self.all_holds()
            if all(row.is_final for row in self.model.rows.values()) and not self.active:
                break
        self.sweep()
        found = stores.observed()
        unfinished = {name: row for name, row in found["rows"].items() if row[0] < SUCCEEDED or row[4]}
        assert not unfinished, f"never ended: {unfinished}"
        assert not found["members"], f"slots of nobody: {found['members']}"
        assert not any(found["held"].values()), f"held by nobody: {found['held']}"
        left = {name: entry for name, entry in found["entries"].items() if entry[1] != "archived"}
        assert not left, f"Redis still has {left}"
