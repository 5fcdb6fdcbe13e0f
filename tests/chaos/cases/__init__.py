"""The cases, by the numbers of the fault list. Each takes a rig and a scale (1 is full scale) and fills a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..rig import Report, Rig
from . import (
    cancels,
    cuts,
    databases,
    everywhere,
    gates,
    hands,
    leaders,
    links,
    messages,
    odd,
    poison,
    producers,
    rates,
    stores,
    workers,
)


@dataclass(frozen=True)
class Case:
    """One case. short: its scale in the short form. mutants: the guards without which it must fail."""

    number: str
    what: str
    run: Callable[[Rig, Report, float], None]
    short: float
    mutants: tuple[str, ...] = ()
    needs_cluster: bool = False


ALL = (
    Case("1", "random kill -9 of workers and whole fleets", workers.kills, 0.03, ("no-recovery", "late-recovery")),
    Case("2", "kill -9 at each failpoint that a mixed load passes", everywhere.everywhere, 0.05),
    Case("3", "fleets frozen past their leases (SIGSTOP, SIGCONT)", workers.freezes, 0.01, ("no-fence",)),
    Case("4", "5 % of Redis's replies lost", stores.lost_replies, 0.04, ("no-adoption",)),
    Case("5", "requests lost, latency, data in small parts", links.bad_line, 0.2, ("no-way-back",)),
    Case("6", "producer killed between COMMIT and push", producers.crashes, 0.03, ("no-rebuild",)),
    Case(
        "7",
        "half-rolled-back nested savepoints",
        producers.rollbacks,
        0.1,
        ("lasting-slots", "silent-rollbacks", "eager-pushes"),
    ),
    Case("8", "Redis unreachable or silent at enqueue", producers.redis_away, 0.1, ("no-breaker",)),
    Case("9", "Redis killed under load, four kinds of persistence", stores.redis_killed, 0.05, ("no-rebuild",)),
    Case("10", "FLUSHALL under load, gates full", stores.flushed, 0.05, ("no-gate-rebuild",)),
    Case("11", "fail-over that loses a second of writes", links.failed_over, 0.2),
    Case("14", "single keys of the queue vanish", messages.vanished, 0.25, ("no-sweep",)),
    Case("16", "CLIENT KILL of every connection each 20 ms", hands.cut_off, 0.08, ("leaking-sockets",)),
    Case("17", "gates under load", gates.under_load, 0.04, ("check-then-add", "shrinking-ttl")),
    Case("18", "limits of gates changed under load", gates.changed, 0.04, ("deaf-gates",)),
    Case("21", "Redis flapping, leaders cut off", leaders.flapping, 0.1, ("no-terms",)),
    Case("22", "PostgreSQL stopped while tasks finish", databases.stopped, 0.2, ("outcomes-dropped",), True),
    Case("23", "database connections terminated", databases.terminated, 0.05, ("outcomes-dropped",), True),
    Case("24", "rows deleted and edited by SQL", hands.edited, 0.06, ("no-fence",)),
    Case("25", "forged messages in Redis", messages.forged, 0.1, ("trusts-messages",)),
    Case("26", "odd keys and values in Redis", odd.odd, 0.1, ("odd-keys-stay",)),
    Case("29", "SIGTERM under load", workers.terminations, 0.04, ("attempts-stay-used",)),
    # With fewer than some hundred delays, one bin may have 5 % by chance.
    Case("33", "all tasks fail at once", hands.storm, 0.2, ("no-jitter",)),
    Case("34", "connections cut under atomic tasks", cuts.in_transactions, 0.05, ("cuts-use-attempts",), True),
    Case("35", "tasks that kill their worker beside healthy ones", poison.poisoned, 0.04, ("blames-all",)),
    Case("37", "the newest call of a key, kills, FLUSHALL", producers.newest, 0.1, ("replaces-in-silence",)),
    Case("38", "a rate, changed under load, kills, FLUSHALL", rates.kept, 0.05, ("forgetful-rates",)),
    Case("36", "200 cancels in every phase, kills, FLUSHALL", cancels.cancelled, 0.1, ("deaf-workers",)),
)
CASES = {case.number: case for case in ALL}
