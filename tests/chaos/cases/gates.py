"""The gate: many producers, holders killed, limits changed."""

from __future__ import annotations

import signal
import subprocess
import time

from .. import checker
from ..rig import Report, Rig

GATES = 8
LIMITS = (5, 2, 8, 3, 5)


def under_load(rig: Rig, report: Report, scale: float) -> None:
    """Twelve processes at eight gates for five minutes; each 3 s one is killed, each 5 s the limits change."""
    from django_asyncq.models import Gate

    seconds, processes = 300 * scale, 12 if scale >= 1 else 6
    share, long = 0.005, 1.5
    with rig.redis():
        for number in range(GATES):
            Gate.objects.create(name=f"g{number}", limit=LIMITS[0], expected_seconds=1)
            rig.note("limit", gate=f"g{number}", limit=LIMITS[0])

        def start(number: int) -> subprocess.Popen[bytes]:
            return rig.producer("hammer", seconds, GATES, 5, share, long, rig.seed * 1000 + number)

        # What becomes of a key whose time to live was shortened by a later slot shows only where little happens.
        rig.note("limit", gate="sparse", limit=5)
        quiet = rig.producer("sparse", seconds, 5)
        running = [start(number) for number in range(processes)]
        kills = changes = 0
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 3.5:
            time.sleep(min(1.5, left))
            changes += 1
            _change_limits(rig, LIMITS[changes % len(LIMITS)])
            # Apart from the change: who dies while it builds a gate may leave the old limit to the auditor, which does
            # not run here.
            time.sleep(1.5)
            victim = running.pop(rig.random.randrange(len(running)))
            rig.signal(signal.SIGKILL, victim.pid)
            victim.wait()
            rig.note("fault", kind="kill holder", pids=[victim.pid])
            running.append(rig.producer("hammer", left - 1.5, GATES, 5, share, long, rig.seed * 1000 + 100 + kills))
            kills += 1
        for producer in (*running, quiet):
            producer.wait(seconds + 60)
        history = rig.history()
        over = checker.over_limit(history)
        report.figure("acquisitions", sum(line["event"] == "in" for line in history))
        report.figure("holders killed", kills)
        report.figure("changes of limits", changes)
        report.goal("entries over the limit", len(over), at_most=0)
        # What a killed holder had expires by itself, with the time it was taken for.
        until = time.monotonic() + long + 5
        while (left_over := sum(map(len, rig.slots().values()))) and time.monotonic() < until:
            time.sleep(0.2)
        report.goal("slots left", left_over, at_most=0)


def _change_limits(rig: Rig, limit: int) -> None:
    """Save another limit for each gate; a raised one is in force from before, a lowered one from after."""
    from django_asyncq.models import Gate

    for row in Gate.objects.all():
        was_lower = row.limit < limit
        if was_lower:
            rig.note("limit", gate=row.name, limit=limit)
        row.limit = limit
        row.save()
        if not was_lower:
            rig.note("limit", gate=row.name, limit=limit)
