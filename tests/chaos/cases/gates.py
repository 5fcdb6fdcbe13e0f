"""Gates: many producers, killed holders, changed limits."""

from __future__ import annotations

import signal
import subprocess
import time

from tests.workers import wait_until

from .. import checker
from ..rig import Report, Rig

GATES = 8
LIMITS = (5, 2, 8, 3, 5)


def under_load(rig: Rig, report: Report, scale: float) -> None:
    """Run twelve processes at eight gates for five minutes; every 3 s change the limits and kill a process."""
    from django_asyncq.models import Gate

    seconds, processes = 300 * scale, 12 if scale >= 1 else 6
    share, long = 0.005, 1.5
    with rig.redis():
        for number in range(GATES):
            Gate.objects.create(name=f"g{number}", limit=LIMITS[0], expected_seconds=1)
            rig.note("limit", gate=f"g{number}", limit=LIMITS[0])

        def start(number: int) -> subprocess.Popen[bytes]:
            return rig.producer("hammer", seconds, GATES, 5, share, long, rig.seed * 1000 + number)

        # A later slot that shortens the time to live of its key shows only at a gate with little traffic.
        rig.note("limit", gate="sparse", limit=5)
        quiet = rig.producer("sparse", seconds, 5)
        running = [start(number) for number in range(processes)]
        kills = changes = 0
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 4:
            time.sleep(min(3.0, left))
            changes += 1
            _change_limits(rig, LIMITS[changes % len(LIMITS)])
            # Mostly while the gates are being rebuilt.
            time.sleep(rig.random.choice([0.0, 0.005, 0.02, 0.5]))
            victim = running.pop(rig.random.randrange(len(running)))
            rig.signal(signal.SIGKILL, victim.pid)
            victim.wait()
            rig.note("fault", kind="kill holder", pids=[victim.pid])
            running.append(rig.producer("hammer", left - 3, GATES, 5, share, long, rig.seed * 1000 + 100 + kills))
            kills += 1
        for producer in (*running, quiet):
            producer.wait(seconds + 60)
        history = rig.history()
        over = checker.over_limit(history)
        acquisitions = sum(line["event"] == "in" for line in history)
        report.goal("acquisitions", acquisitions, at_least=50_000 if scale >= 1 else 200)
        report.figure("holders killed", kills)
        report.figure("changes of limits", changes)
        report.goal("entries over the limit", len(over), at_most=0)
        # The slots of a killed holder expire after their time.
        until = time.monotonic() + long + 5
        while (left_over := sum(map(len, rig.slots().values()))) and time.monotonic() < until:
            time.sleep(0.2)
        report.goal("slots left", left_over, at_most=0)


def _change_limits(rig: Rig, limit: int) -> None:
    """Save another limit for each gate; a raised one counts from before the write, a lowered one from after it."""
    from django_asyncq.models import Gate

    for row in Gate.objects.all():
        was_lower = row.limit < limit
        if was_lower:
            rig.note("limit", gate=row.name, limit=limit)
        row.limit = limit
        row.save()
        if not was_lower:
            rig.note("limit", gate=row.name, limit=limit)


# 0: no limit. None: the row is deleted, and the task's own limit counts.
STEPS: tuple[int | None, ...] = (2, 0, 8, None, 5)
TASK_LIMIT = 3


def changed(rig: Rig, report: Report, scale: float) -> None:
    """Cycle the limits under load: 5, 2, none (0), 8, the task's own 3 (row deleted), each for 2.5 s."""
    from django_asyncq.models import Gate, TaskRecord

    rounds, pause = max(1, round(24 * scale)), 2.5
    names = ("g0", "g1")
    with rig.redis():
        for name in names:
            Gate.objects.create(name=name, limit=5, expected_seconds=1)
            rig.note("limit", gate=name, limit=5)
        seconds = rounds * len(STEPS) * pause + 4
        producers = [rig.producer("occupy", seconds, len(names), TASK_LIMIT, 400, rig.seed + n) for n in range(12)]
        wait_until(lambda: rig.count("in") > 40, "a gate in use", 60)
        for _ in range(rounds):
            for step in STEPS:
                for name in names:
                    _step(rig, name, step)
                time.sleep(rig.random.uniform(0.8, 1.2) * pause)
        rig.ended_well(*producers)
        history = rig.history()
        report.figure("changes", rounds * len(STEPS) * len(names))
        report.goal("entries", sum(line["event"] == "in" for line in history), at_least=100)
        report.goal("admitted while over", len(checker.over_limit(history)), at_most=0)
        seconds_to_wake = checker.wake_ups(history)
        report.goal("raises", len(seconds_to_wake), at_least=rounds * len(names))
        report.timing("slowest s from a raise to an entry it allows", max(seconds_to_wake, default=0.0), at_most=1.0)
        report.goal("rows left", TaskRecord.objects.count(), at_most=0)
        report.goal("slots left", sum(map(len, rig.slots().values())), at_most=0)


def _step(rig: Rig, name: str, limit: int | None) -> None:
    """Save or delete the row; a task that asks between the two lines may go by either limit."""
    from django_asyncq.models import Gate

    row = Gate.objects.filter(name=name).first()
    wanted = TASK_LIMIT if limit is None else limit
    current = row.limit if row else TASK_LIMIT
    is_raise = current > 0 and (wanted <= 0 or wanted > current)
    if is_raise:
        rig.note("limit", gate=name, limit=wanted)
    if limit is None and row is not None:
        row.delete()
    else:
        row = row or Gate(name=name, expected_seconds=1)
        row.limit = wanted
        row.save()
    if not is_raise:
        rig.note("limit", gate=name, limit=wanted)
