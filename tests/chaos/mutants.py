"""The package with one guard taken out: a case that passes with its mutant proves nothing.

ASYNCQ_CHAOS_MUTANT names the mutant. It is applied in the processes of a run, never in the one that checks.

Every replacement is made by `replace`, `replace_value` or `_cut_scripts`. They raise when the package no longer has
what they replace. They write into the history that the replacement stands there and, once per process, that it was
reached. A run whose mutant was never reached has proved nothing and fails (see `checker.unreached`).

These are the only private names of the package that the tests use.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.tasks import note


def apply(name: str) -> None:
    """Take the guard of this name out; "" takes none."""
    if name:
        MUTANTS[name]()


# --- replacing

_noted: set[str] = set()


def replace(owners: Any, name: str, substitute: Callable[..., Any]) -> None:
    """Replace a function in its module or class, and count that it is called.

    owners: one, or a tuple of those that hold the same function; it counts as reached when one of them is called.
    Raises: AttributeError when an owner has no such name.
    """
    owners = owners if isinstance(owners, tuple) else (owners,)
    what = f"{owners[0].__name__}.{name}"

    def counted(*arguments: Any, **more: Any) -> Any:
        _reached(what)
        return substitute(*arguments, **more)

    for owner in owners:
        _set(owner, name, counted)
    note("replaced", what=what)


def replace_value(owner: Any, name: str, make: Callable[[Callable[[], None]], Any]) -> None:
    """Replace a value that is no function. make: called with what is to be called when the value is used."""
    what = f"{owner.__name__}.{name}"
    _set(owner, name, make(lambda: _reached(what)))
    note("replaced", what=what)


def _set(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner.__name__} has no {name} any more: write the mutant anew")
    setattr(owner, name, value)


def _reached(what: str) -> None:
    if what not in _noted:
        _noted.add(what)
        note("reached", what=what)


def _cut_scripts(name: str) -> None:
    """Let this process run its scripts without what this mutant takes out of them; one of them must be run."""
    from django_asyncq.broker import scripts
    from tests import script_mutants

    cuts = script_mutants.CHAOS[name]
    for cut in cuts:
        scripts.script = script_mutants.without(cut)  # type: ignore[assignment]
    what, names, known = f"the scripts of {name}", {cut.script for cut in cuts}, scripts.script

    def counted(script: str) -> Any:
        if script in names:
            _reached(what)
        return known(script)

    scripts.script = counted  # type: ignore[assignment]
    note("replaced", what=what)


def _module_of(function: Callable[..., Any]) -> Any:
    """Return the module that defines a function, where its callees are looked up."""
    return sys.modules[function.__module__]


# --- the mutants


def no_recovery() -> None:
    """Nothing requeues what a dead worker held."""
    from django_asyncq.fleet.reconciler import Reconciler
    from django_asyncq.fleet.recovery import Recovery

    replace(Recovery, "recover", lambda self, child: None)
    replace(Reconciler, "recover_expired", lambda self: 0)
    replace(Reconciler, "requeue_lost_runs", lambda self: iter(()))


def late_recovery() -> None:
    """What a dead worker held is requeued LATE_SECONDS after it could have been."""
    from django_asyncq.exceptions import BrokerUnavailable
    from django_asyncq.fleet.reconciler import Reconciler
    from django_asyncq.fleet.recovery import Recovery

    noticed: dict[str, float] = {}

    def is_due(what: str) -> bool:
        return time.monotonic() - noticed.setdefault(what, time.monotonic()) > LATE_SECONDS

    recover, recover_leases = Recovery.recover, Reconciler._recover_leases

    def recover_late(self: Any, child: Any) -> None:
        if not is_due(child.worker_id):
            raise BrokerUnavailable("not yet")
        recover(self, child)

    def recover_leases_late(self: Any, broker: Any, queue: str, found: Any) -> int:
        return recover_leases(self, broker, queue, [expired for expired in found if is_due(expired.id)])

    replace(Recovery, "recover", recover_late)
    replace(Reconciler, "_recover_leases", recover_leases_late)


def no_way_back() -> None:
    """A worker that could not reach Redis once asks again minutes later."""
    from django_asyncq.worker.fetch import Pacing

    is_due, failed_at = Pacing.is_due, dict[int, float]()

    def is_due_much_later(self: Any) -> bool:
        return time.monotonic() - failed_at.get(id(self), -150.0) >= 150 and is_due(self)

    replace(Pacing, "fail", lambda self: failed_at.update({id(self): time.monotonic()}))
    replace(Pacing, "is_due", is_due_much_later)


def eager_pushes() -> None:
    """Tasks are pushed before their transaction commits, and an id without a row runs nevertheless."""
    from django_asyncq.lifecycle import enqueueing

    trusts_messages()
    replace(enqueueing.CommitHook, "register", lambda self, connection: self())


def no_rebuild() -> None:
    """What Redis forgot is not pushed again."""
    from django_asyncq.fleet.reconciler import Reconciler

    replace(Reconciler, "_push_pages", lambda self, *, young, is_rebuild=False: iter(()))


def no_gate_rebuild() -> None:
    """A gate that was never built since Redis lost its memory admits tasks."""
    from django_asyncq.fleet.reconciler import Reconciler
    from django_asyncq.gates import Drift

    _cut_scripts("no-gate-rebuild")
    replace(Reconciler, "audit_gates", lambda self, names: Drift(0, 0))


def no_adoption() -> None:
    """What Redis handed out in a lost reply is not looked for."""
    from django_asyncq.worker.fetch import Fetcher

    replace(Fetcher, "adopt", lambda self, queue: True)


def no_fence() -> None:
    """The last outcome wins, in both stores."""
    from django_asyncq.storage import batches

    class Guard(str):
        on_use: Callable[[], None]

        def __format__(self, spec: str) -> str:
            self.on_use()
            return str(self)

    def make(on_use: Callable[[], None]) -> str:
        guard = Guard("(t.state = t.state)")
        guard.on_use = on_use
        return guard

    replace_value(batches, "GUARD", make)
    _cut_scripts("no-fence")


def check_then_add() -> None:
    """The gate looks, then adds."""
    from django_asyncq import QueueFull, broker, gates

    def admit(of_tasks: Any, records: Any, *, mode: str, seconds: int, again: bool = False) -> gates.Admission:
        name = of_tasks[0].name
        client, key = broker.Broker("producer").client, gates.keys(name)[0]
        limit = int(client.hget(gates.keys(name)[1], "limit") or records[0].queue_limit)
        occupancy = client.zcard(key)
        if occupancy >= limit:
            raise QueueFull(gate=name, limit=limit, occupancy=occupancy, retry_after=1)
        client.zadd(key, {str(record.id): int(time.time()) + seconds for record in records})
        return gates.Admission({}, set(), limit, occupancy, 1.0, 0)

    replace((gates, _module_of(gates.acquire)), "admit", admit)


def deaf_gates() -> None:
    """The Gate row does not count, only the limit with which the task was declared."""
    _cut_scripts("deaf-gates")


def shrinking_ttl() -> None:
    """The key's time to live follows the last slot, not the longest."""
    _cut_scripts("shrinking-ttl")


def lasting_slots() -> None:
    """A slot lasts from the start, not from the commit, nothing audits, and a rollback releases nothing."""
    from django_asyncq import gates
    from django_asyncq.fleet.reconciler import Reconciler

    admit = gates.admit

    def admit_for_long(of_tasks: Any, records: Any, *, mode: Any, seconds: int, again: bool = False) -> Any:
        return admit(of_tasks, records, mode=mode, seconds=0, again=again)

    replace((gates, _module_of(gates.acquire)), "admit", admit_for_long)
    replace(Reconciler, "audit_gates", lambda self, names: gates.Drift(0, 0))
    silent_rollbacks()


def silent_rollbacks() -> None:
    """A rollback releases nothing: slots stay until they expire."""
    from django_asyncq.storage.rollbacks import RolledBack

    replace(RolledBack, "note", lambda self, acquired: None)


def no_breaker() -> None:
    """Every request waits for Redis, however long Redis has been silent."""
    from django_asyncq.lifecycle import dispatching

    class NoPause(float):
        on_use: Callable[[], None]

        def __radd__(self, other: float) -> float:
            self.on_use()
            return other

    def make(on_use: Callable[[], None]) -> float:
        pause = NoPause()
        pause.on_use = on_use
        return pause

    replace_value(dispatching, "BREAKER_SECONDS", make)


def attempts_stay_used() -> None:
    """A requeued task has used the attempt."""
    from django_asyncq import lifecycle

    replace(_module_of(lifecycle.requeue), "undo_attempt", lambda record: None)


def outcomes_dropped() -> None:
    """An outcome that the database does not take at once is forgotten."""
    from django.db import Error

    from django_asyncq.worker.report import Reporter

    def write_once(self: Any, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except Error:
            return []

    replace(Reporter, "_write_until_done", write_once)


def cuts_use_attempts() -> None:
    """A run whose connection was cut has failed, as one that raised an error."""
    from django_asyncq.worker import complete

    replace(complete, "is_cut", lambda error, connection, used: False)


def no_terms() -> None:
    """A process that once led goes on leading: its trust never ends, and no term is refused."""
    from django_asyncq.leadership import fencing
    from django_asyncq.leadership.coordinator import StartupTaskCoordinator

    replace(StartupTaskCoordinator, "is_held", lambda self, name: name in self._holds)
    replace(StartupTaskCoordinator, "_drop", lambda self, name: name in self._holds)
    replace(StartupTaskCoordinator, "_is_overdue", lambda self, name: True)
    replace(fencing, "fence", lambda name, number: note("fenced", lock=name, term=number))


def leaking_sockets() -> None:
    """A connection that broke is forgotten, not closed."""
    from redis.connection import AbstractConnection

    kept: list[Any] = []
    disconnect = AbstractConnection.disconnect

    def leak(self: Any, *arguments: Any, **more: Any) -> None:
        if (sock := self._sock) is not None:
            kept.append(sock.dup())
        disconnect(self, *arguments, **more)

    replace(AbstractConnection, "disconnect", leak)


def no_jitter() -> None:
    """All tasks that failed together are retried together."""
    from django_asyncq.core import policies

    class Even(random.Random):
        on_use: Callable[[], None]

        def random(self) -> float:
            self.on_use()
            return 0.5

    def make(on_use: Callable[[], None]) -> random.Random:
        even = Even()
        even.on_use = on_use
        return even

    replace_value(policies, "random", make)


def odd_keys_stay() -> None:
    """A key of a wrong type stays where it is."""
    _cut_scripts("odd-keys-stay")


def blames_all() -> None:
    """Every task that was lost with its process counts a crash and comes back with the others."""
    from django_asyncq import lifecycle
    from django_asyncq.fleet import recovery as recovery_of_supervisor
    from django_asyncq.lifecycle import recovery, running

    def blame_all(child: Any) -> lifecycle.Blame:
        return lifecycle.Blame(named=frozenset(each.id for each in child.slot_table.running()))

    count_crash = running.count_crash

    def count_and_suspect_nobody(record: Any, *arguments: Any, **more: Any) -> None:
        count_crash(record, *arguments, **more)
        record.suspicion = 0

    replace((running, recovery), "count_crash", count_and_suspect_nobody)
    replace(recovery_of_supervisor, "blame", blame_all)


def no_sweep() -> None:
    """Nothing walks what Redis has."""
    from django_asyncq.fleet.reconciler import Reconciler

    replace(Reconciler, "repair_lists", lambda self: iter(()))
    replace(Reconciler, "repair_hashes", lambda self: iter(()))


def trusts_messages() -> None:
    """An id without a row runs nevertheless."""
    from django_asyncq import lifecycle
    from django_asyncq.models import TaskRecord

    home = _module_of(lifecycle.classify)
    look_up = home.look_up

    def load_or_invent(broker: Any, queue: str, ids: Any) -> Any:
        found = look_up(broker, queue, ids)
        forged = {id: TaskRecord(name=FORGED, args=[1, "forged"], kwargs={}) for id in found.missing}
        return found._replace(rows={**found.rows, **forged}, missing=[])

    replace(home, "look_up", load_or_invent)


def deaf_workers() -> None:
    """No worker stops a run that somebody has cancelled."""
    from django_asyncq.worker.job import Job

    replace(Job, "ask_to_stop", lambda self, reason: False)


def forgetful_rates() -> None:
    """A rate does not remember the starts that it has allowed."""
    _cut_scripts("forgetful-rates")


def replaces_in_silence() -> None:
    """A call that replaces the arguments of a task leaves the run alone that has read the old ones."""
    from django.db.models import F

    from django_asyncq.lifecycle import replacing

    replace(replacing, "_raised_fence", lambda record: F("fence"))


# Beyond the goal of the short form, five times that of the long one.
LATE_SECONDS = 20
FORGED = "tests.chaos.tasks.work"
MUTANTS: dict[str, Callable[[], None]] = {
    "no-recovery": no_recovery,
    "late-recovery": late_recovery,
    "no-way-back": no_way_back,
    "eager-pushes": eager_pushes,
    "no-rebuild": no_rebuild,
    "no-gate-rebuild": no_gate_rebuild,
    "no-adoption": no_adoption,
    "no-fence": no_fence,
    "check-then-add": check_then_add,
    "deaf-gates": deaf_gates,
    "shrinking-ttl": shrinking_ttl,
    "lasting-slots": lasting_slots,
    "silent-rollbacks": silent_rollbacks,
    "no-breaker": no_breaker,
    "forgetful-rates": forgetful_rates,
    "attempts-stay-used": attempts_stay_used,
    "outcomes-dropped": outcomes_dropped,
    "cuts-use-attempts": cuts_use_attempts,
    "no-terms": no_terms,
    "no-jitter": no_jitter,
    "odd-keys-stay": odd_keys_stay,
    "no-sweep": no_sweep,
    "blames-all": blames_all,
    "deaf-workers": deaf_workers,
    "leaking-sockets": leaking_sockets,
    "replaces-in-silence": replaces_in_silence,
    "trusts-messages": trusts_messages,
}
