"""The package with one guard taken out: a case that passes with its mutant proves nothing.

Applied in the processes of a run by ASYNCQ_CHAOS_MUTANT, never in the one that checks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


def apply(name: str) -> None:
    """Take the guard of this name out; "" takes none."""
    if name:
        MUTANTS[name]()


def no_recovery() -> None:
    """Nobody hands back what a dead worker held."""
    from django_asyncq.maintenance.reconciler import Reconciler
    from django_asyncq.supervisor import Supervisor

    Supervisor.recover = lambda self, child, exit_code: None  # type: ignore[method-assign]
    Reconciler.recover_expired = lambda self: 0  # type: ignore[method-assign]
    Reconciler.requeue_lost_runs = lambda self: iter(())  # type: ignore[method-assign]


def late_recovery() -> None:
    """What a dead worker held is handed back LATE_SECONDS after somebody could have."""
    from django_asyncq.exceptions import BrokerUnavailable
    from django_asyncq.maintenance.reconciler import Reconciler
    from django_asyncq.supervisor import Supervisor

    noticed: dict[str, float] = {}

    def is_due(what: str) -> bool:
        return time.monotonic() - noticed.setdefault(what, time.monotonic()) > LATE_SECONDS

    recover, recover_leases = Supervisor.recover, Reconciler._recover_leases

    def recover_late(self: Any, child: Any, exit_code: int | None) -> None:
        if not is_due(child.worker_id):
            raise BrokerUnavailable("not yet")
        recover(self, child, exit_code)

    def recover_leases_late(self: Any, queue: str, found: Any) -> int:
        return recover_leases(self, queue, [expired for expired in found if is_due(expired.id)])

    Supervisor.recover = recover_late  # type: ignore[method-assign]
    Reconciler._recover_leases = recover_leases_late  # type: ignore[method-assign]


def no_way_back() -> None:
    """Who could not reach Redis once looks again minutes later."""
    from django_asyncq.worker.fetch.pacing import Pacing

    def give_up(self: Any) -> None:
        self._not_before = time.monotonic() + 150

    Pacing.fail = give_up  # type: ignore[method-assign]


def eager_pushes() -> None:
    """Tasks are pushed before their transaction is over, and an id without a row is run all the same."""
    from django_asyncq.lifecycle import enqueueing

    trusts_messages()
    enqueueing.CommitHook.register = lambda self, database: self()  # type: ignore[method-assign]


def no_rebuild() -> None:
    """What Redis forgot is not pushed again."""
    from django_asyncq.maintenance.reconciler import Reconciler

    Reconciler._push_pages = lambda self, *, young, is_rebuild=False: iter(())  # type: ignore[method-assign]


def no_gate_rebuild() -> None:
    """A gate that was never built since Redis lost its memory admits."""
    _cut_scripts("no-gate-rebuild")
    from django_asyncq.gates.slots import Drift

    from django_asyncq.maintenance.reconciler import Reconciler

    Reconciler.audit_gates = lambda self, names: Drift(0, 0)  # type: ignore[method-assign]


def no_adoption() -> None:
    """What a lost reply handed out is not looked for."""
    from django_asyncq.worker.fetch.fetcher import Fetcher

    Fetcher.adopt = lambda self, queue: True  # type: ignore[method-assign]


def no_fence() -> None:
    """Whoever answers last wins, in both stores."""
    from django_asyncq.storage import batches

    batches.GUARD = "(t.state = t.state)"
    _cut_scripts("no-fence")


def check_then_add() -> None:
    """The gate looks, then adds."""
    from django_asyncq import QueueFull, broker, gates

    def admit(name: str, records: Any, *, partial: bool, seconds: int, again: bool) -> gates.Admission:
        client, key = broker.Broker("producer").client, gates.keys(name)[0]
        limit = int(client.hget(gates.keys(name)[1], "limit") or records[0].queue_limit)
        occupancy = client.zcard(key)
        if occupancy >= limit:
            raise QueueFull(gate=name, limit=limit, occupancy=occupancy, retry_after=1)
        client.zadd(key, {str(record.id): int(time.time()) + seconds for record in records})
        return gates.Admission(set(), limit, occupancy, 1.0)

    gates.admit = admit


def deaf_gates() -> None:
    """What the Gate row says does not count, only what the task was declared with."""
    _cut_scripts("deaf-gates")


def shrinking_ttl() -> None:
    """The key's time to live follows the last slot, not the longest."""
    _cut_scripts("shrinking-ttl")


def lasting_slots() -> None:
    """A slot lasts from the start, not from the commit, and nobody audits."""
    from django_asyncq import gates
    from django_asyncq.maintenance.reconciler import Reconciler

    Reconciler.audit_gates = lambda self, names: gates.Drift(0, 0)  # type: ignore[method-assign]

    admit = gates.admit
    gates.admit = lambda name, records, *, partial, seconds, again: admit(
        name, records, partial=partial, seconds=0, again=again
    )


def no_breaker() -> None:
    """Every request waits for Redis, however long it has been silent."""
    from django_asyncq.lifecycle import dispatching

    dispatching.BREAKER_SECONDS = 0.0


def attempts_stay_used() -> None:
    """A hand-back uses up the attempt."""
    from django_asyncq import lifecycle

    # Where the verb has it from, for it may have been imported there.
    sys.modules[lifecycle.requeue.__module__].undo_attempt = lambda record: None  # type: ignore[attr-defined]


def outcomes_dropped() -> None:
    """An outcome that the database does not take at once is forgotten."""
    from django.db import Error

    from django_asyncq.worker.reporter import Reporter

    def write_once(self: Any, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except Error:
            return []

    Reporter._write_until_done = write_once  # type: ignore[method-assign]


def no_terms() -> None:
    """Who once led goes on leading: no trust that ends, no term that is refused."""
    from django_asyncq.leadership import fencing
    from django_asyncq.leadership.coordinator import StartupTaskCoordinator
    from tests.tasks import note

    StartupTaskCoordinator.is_held = lambda self, name: name in self._holds  # type: ignore[method-assign]
    StartupTaskCoordinator._drop = lambda self, name: name in self._holds  # type: ignore[method-assign]
    StartupTaskCoordinator._is_overdue = lambda self, name: True  # type: ignore[method-assign]
    fencing.fence = lambda name, number: note("fenced", lock=name, term=number)


def leaking_sockets() -> None:
    """A connection that broke is forgotten, not closed."""
    from redis.connection import AbstractConnection

    kept: list[Any] = []
    disconnect = AbstractConnection.disconnect

    def leak(self: Any, *arguments: Any, **more: Any) -> None:
        if (sock := self._sock) is not None:
            kept.append(sock.dup())
        disconnect(self, *arguments, **more)

    AbstractConnection.disconnect = leak  # type: ignore[method-assign]


def no_jitter() -> None:
    """All who failed together come back together."""
    import random

    from django_asyncq.definitions import backoff

    class Even(random.Random):
        def random(self) -> float:
            return 0.5

    backoff.random = Even()  # type: ignore[attr-defined]


def no_sweep() -> None:
    """Nobody walks what Redis has."""
    from django_asyncq.maintenance.reconciler import Reconciler

    Reconciler.repair_lists = lambda self: iter(())  # type: ignore[method-assign]
    Reconciler.repair_hashes = lambda self: iter(())  # type: ignore[method-assign]


def trusts_messages() -> None:
    """An id without a row is run all the same."""
    from django_asyncq import lifecycle
    from django_asyncq.models import TaskRecord

    home: Any = sys.modules[lifecycle.sort_out.__module__]
    load = home.load

    def load_or_invent(leases: Any) -> dict[str, TaskRecord]:
        leases = list(leases)
        strangers = {lease.id for lease in leases} - set(found := load(leases))
        return {**found, **{id: TaskRecord(name=FORGED, args=[1, "forged"], kwargs={}) for id in strangers}}

    home.load = load_or_invent


def _cut_scripts(name: str) -> None:
    """Let this process run its scripts without what this mutant takes out of them."""
    from django_asyncq.broker import scripts
    from tests import script_mutants

    for cut in script_mutants.CHAOS[name]:
        scripts.script = script_mutants.without(cut)  # type: ignore[assignment]


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
    "no-breaker": no_breaker,
    "attempts-stay-used": attempts_stay_used,
    "outcomes-dropped": outcomes_dropped,
    "no-terms": no_terms,
    "no-jitter": no_jitter,
    "no-sweep": no_sweep,
    "leaking-sockets": leaking_sockets,
    "trusts-messages": trusts_messages,
}
