"""Rules of leases, of faults, and of those that repair: supervisors, reconcilers, forwarders and asynq's own."""

from __future__ import annotations

from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.fleet import repairs
from django_asyncq.fleet.forwarder import WaiterService, forward_due
from django_asyncq.lifecycle import recovery, spill
from django_asyncq.models import TaskRecord

from . import stores
from .base import LONG, one_of, seldom
from .drops import Drops
from .values import ALONE, GATE, QUEUES, RUNNING, WORKERS


class Repairs(Drops):
    """What expires, what breaks, and what repairs it."""

    @seldom
    @rule(worker=st.sampled_from((*WORKERS, ALONE)), reasserts=st.booleans())
    def heartbeat(self, worker: str, reasserts: bool) -> None:
        """The supervisor renews leases; after Redis lost its memory it reasserts what runs."""
        self.last = None
        for queue in QUEUES:
            kept, lost = self.model.extend(queue, worker)
            found = self.broker.extend(queue, [worker], conf.current().lease_seconds)[0]
            assert found.kept == kept
            self.answer(sorted(map(stores.name_of, found.lost)), sorted(lost))
        if reasserts:
            mine = [hand.held for hand in self.open_hands if hand.held.worker == worker and hand.held.begun]
            names = list(dict.fromkeys(held.name for held in mine if held.name in self.model.rows))
            rows = {name: self.model.rows[name] for name in names}
            # A worker that was frozen may believe that it runs a task that another runs by now.
            running = [n for n, row in rows.items() if row.state == RUNNING and row.workers[-1:] == (worker,)]
            ids = [str(stores.id_of(name)) for name in names]
            self.last = lambda: lifecycle.reassert(self.broker, worker, ids)
            self.answer(self.last(), self.model.reassert(worker, running))

    @precondition(lambda self: self.active)
    @rule(name=one_of("active"))
    def lease_expires(self, name: str) -> None:
        entry = self.model.entries[name]
        stores.client().zadd(QueueKeys(entry.queue).lease, {str(stores.id_of(name)): 1})
        entry.expired = True

    @rule(dies=st.sampled_from(["", "", "before Redis"]))
    def recover_expired(self, dies: str) -> None:
        """dies: when the rows are written, before Redis is changed."""
        wanted = self.model.recover_expired(cut=bool(dies))
        with (
            self.dies_before(recovery, "_update_redis", dies=bool(dies)),
            self.dies_before(spill, "acknowledge", dies=bool(dies)),
        ):
            try:
                self.answer(self.reconciler.recover_expired(), wanted)
            except BrokerUnavailable:
                assert dies
        self.last = None if dies else self.reconciler.recover_expired

    @seldom
    @rule(worker=st.sampled_from((*WORKERS, ALONE)), killed=st.booleans(), is_named=st.booleans())
    def worker_stops(self, worker: str, killed: bool, is_named: bool) -> None:
        """Its supervisor recovers what it held; nothing is left in its hands. is_named: it said which task it was."""
        mine = [hand.held for hand in self.open_hands if hand.held.worker == worker]
        self.hands = [hand for hand in self.hands if hand.held.worker != worker]
        begun = [held.name for held in mine if held.begun] if killed else []
        names = (begun[:1], [], []) if is_named else ([], begun, []) if len(begun) == 1 else ([], [], begun)
        blame = lifecycle.Blame(*(frozenset(str(stores.id_of(name)) for name in each) for each in names))
        for queue in QUEUES:
            leases = self.broker.held(queue, worker)
            found = [(stores.name_of(lease.id), lease.fence) for lease in leases]
            assert dict(found) == self.model.listed(queue, worker)
            wanted = self.model.recover(queue, worker, found, blame=names)
            got = lifecycle.recover(self.broker, queue, worker, leases, reason="it stopped", blame=blame)
            self.answer(got, wanted)
        self.last = None

    @precondition(lambda self: self.active)
    @rule(name=one_of("active"))
    def leases_are_listed(self, name: str) -> None:
        """A supervisor or reconciler reads what a worker holds, and pauses there."""
        entry = self.model.entries[name]
        self.listed = (entry.queue, entry.worker, name, entry.fence)

    @precondition(lambda self: self.listed is not None)
    @rule(seen=st.booleans())
    def an_old_list_is_recovered(self, seen: bool) -> None:
        """Whatever has happened to the task since: finished, postponed, claimed by another."""
        assert self.listed is not None
        queue, worker, name, fence = self.listed
        self.listed = None
        wanted = self.model.recover(queue, worker, [(name, fence)], blame=([], [], []) if seen else None)
        leases = [Lease(str(stores.id_of(name)), fence)]
        blame = lifecycle.Blame() if seen else None
        got = lifecycle.recover(self.broker, queue, worker, leases, reason="it stopped", blame=blame)
        self.answer(got, wanted)
        self.last = None

    @seldom
    @precondition(lambda self: self.active)
    @rule(name=one_of("active"))
    def foreign_recoverer(self, name: str) -> None:
        """asynq's own server requeues an expired task; it does not know rows and held tasks."""
        entry, keys, id = self.model.entries[name], QueueKeys(self.model.entries[name].queue), str(stores.id_of(name))
        stores.client().lrem(keys.active, 0, id)
        stores.client().zrem(keys.lease, id)
        stores.client().hset(keys.task(id), "state", "pending")
        if entry.priority:
            stores.client().zadd(keys.priority, {id: -entry.priority})
        else:
            stores.client().lpush(keys.pending, id)
        self.model.foreign_recoverer(name)

    @precondition(lambda self: self.waiting)
    @rule(name=one_of("waiting"))
    def due_time_comes(self, name: str) -> None:
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
            # As is the time for which it was left to other programs.
            stores.client().hdel(keys.task(id), "left_until")
            entry.due = "past"

    @precondition(lambda self: any(entry.due == "past" for entry in self.model.entries.values()))
    @rule()
    def forward(self) -> None:
        wanted = self.model.forward()
        found = forward_due(self.broker, QUEUES)
        self.answer((found.forwarded, found.retried), wanted)
        # What has no row goes from retry to scheduled, so a second call would move it on.
        is_more_due = any(entry.place == "scheduled" and entry.due == "past" for entry in self.model.entries.values())
        self.last = None if is_more_due else lambda: forward_due(self.broker, QUEUES)

    @precondition(lambda self: self.model.waiters)
    @rule()
    def leader_looks_at_the_waiters(self) -> None:
        """A slot was released, or a second has passed."""
        self.model.look()
        self.last = lambda: WaiterService(self.broker).admit(GATE)
        self.last()

    @seldom
    @rule(knows=st.booleans())
    def redis_is_emptied(self, knows: bool) -> None:
        """knows: the reconciler has noticed since, and long ago."""
        stores.flush()
        self.model.flush()
        self.last = None
        # Every process registers its queues again, at the latest a minute later.
        Broker.forget_registered()
        if knows:
            self.remember()

    @seldom
    @rule()
    def reconcile(self) -> None:
        self.mended(self.reconciler.quick_repairs(), self.model.quick())
        self.check_requests_to_stop()
        self.last = None if self.model.strangers else self.reconciler.quick_repairs

    def check_requests_to_stop(self) -> None:
        """No cancel is forgotten: what runs although somebody has cancelled it was asked to stop, again if need be."""
        for name, row in self.model.rows.items():
            entry = self.model.entries.get(name)
            if row.asked and row.state == RUNNING and entry and entry.place == "active":
                key = QueueKeys(entry.queue).task(str(stores.id_of(name)))
                assert stores.client().hexists(key, "cancel"), f"the cancel of {name} was forgotten"

    def mended(self, got: repairs.Repairs, wanted: dict[str, int]) -> None:
        """Compare what a pass says it has mended; what it does not name is 0."""
        self.answer({k: v for k, v in got._asdict().items() if v}, {k: v for k, v in wanted.items() if v})

    @seldom
    @rule()
    def sweep(self) -> None:
        if not self.model.alive:
            self.broker.mark_alive()
            self.model.alive = "just"
        for _ in range(2):
            self.mended(self.reconciler.sweep(), self.model.sweep())
        if not self.twice:
            repairs = self.reconciler.sweep()
            assert not any(repairs), f"nothing is broken, but it repaired {repairs}"
        self.last = self.reconciler.sweep

    @precondition(lambda self: self.model.alive == "just")
    @rule()
    def time_passes_since_redis_came_back(self) -> None:
        self.remember()
