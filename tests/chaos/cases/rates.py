"""A rate: kills, an emptied Redis, and numbers that change, all under load."""

from __future__ import annotations

import time
from typing import Any

from .. import checker
from ..rig import Fleet, Report, Rig

NAME = "chaos"
# The burst is the same all the time, so that what each fault may cost is one number.
BURST = 4
PER_SECOND = (40, 15, 80, 25, 60)
FAULTS = ("change", "change", "FLUSHALL", "kill worker", "kill fleet")
# More come than may start, and not so many that they take long at the end.
PAUSE_MS = 8
# From the answer of Redis to the line of the body: on a busy machine, with other cases beside it.
LATE_SECONDS = 1.0


def kept(rig: Rig, report: Report, scale: float) -> None:
    """For five minutes, every 2 s: change the rate, empty Redis, or kill a worker or the fleet."""
    from django_asyncq.models import Rate

    seconds = 300 * scale
    with rig.redis(), rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        numbers = {"starts": PER_SECOND[0], "seconds": 1, "burst": BURST}
        row, _ = Rate.objects.update_or_create(name=NAME, defaults=numbers)
        rig.note("rate", per_second=row.starts)
        producer = rig.producer("rated", seconds, PAUSE_MS, rig.seed)
        deadline, changes, kinds = time.monotonic() + seconds, 0, list[str]()
        # After a fault many wait, and come one after the other, whatever has started. For a while nobody does.
        time.sleep(seconds / 4)
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(rig.random.uniform(1.0, 3.0), left))
            # Each in turn, in another order each time.
            kinds = kinds or rig.random.sample(FAULTS, len(FAULTS))
            kind = kinds.pop()
            if kind == "change":
                changes += 1
                _change(rig, row, PER_SECOND[changes % len(PER_SECOND)])
            elif kind == "FLUSHALL":
                _empty(rig, fleet)
            elif kind == "kill fleet":
                fleet.kill()
                fleet.start()
            elif workers := fleet.ready():
                fleet.kill_worker(rig.random.choice(workers))
        rig.ended_well(producer)
        # The rest is not what this case is about.
        _change(rig, row, 1000)
        report.goal("settled", int(rig.settle(120)), at_least=1)
        rig.check(report)
    history = rig.history()
    for kind in ("kill worker", "kill fleet", "FLUSHALL"):
        report.figure(kind, rig.count_faults(kind))
    report.figure("changes", changes)
    report.goal("starts above the rate", checker.over_rate(history, BURST, LATE_SECONDS), at_most=0)
    # Without it a fleet that starts nothing would keep every rate. Each fault costs up to some seconds.
    report.goal("share of the rate", checker.share_of_rate(history), at_least=0.3)


def _change(rig: Rig, row: Any, per_second: int) -> None:
    """Save another rate. A raised one counts from before the write, a lowered one from after it."""
    before = row.starts
    if per_second > before:
        rig.note("rate", per_second=per_second)
    row.starts = per_second
    row.save()
    if per_second <= before:
        rig.note("rate", per_second=per_second)


def _empty(rig: Rig, fleet: Fleet) -> None:
    """Empty Redis, in which a burst more may start."""
    # Before it, so that nothing that starts after it comes before this line.
    rig.note("fault", kind="FLUSHALL", pids=fleet.workers())
    with rig.server.client() as client:
        client.flushall()
