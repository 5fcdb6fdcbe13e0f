"""Workers that are killed, frozen or terminated."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

from tests.workers import wait_until

from .. import checker
from ..log_lines import LEASE_LOST
from ..rig import Report, Rig, enqueue

LEASE_SECONDS = 2
# What was lost together runs one at a time, after the start of a process, which may be killed while it starts.
QUARANTINE_SECONDS = 10


def kills(rig: Rig, report: Report, scale: float) -> None:
    """Run 10,000 tasks of 0-5 ms, half of them async; kill a worker, or a supervisor with its workers, 50 times.

    Each kill waits for all workers and comes in the middle of a chunk of tasks: so it hits work, and other workers are
    left to recover the tasks.
    """
    times = max(3, round(50 * scale))
    kinds: list[str] = []
    with rig.redis(), rig.fleet(2, 4) as first, rig.fleet(2, 4) as second:
        fleets = [first, second]
        for _ in range(times):
            wait_until(lambda: all(len(fleet.ready()) == 2 for fleet in fleets), "all workers", 60)
            begun = rig.count("begin") + rig.random.randrange(10, 120)
            enqueue(rig, 200, 5)
            wait_until(lambda begun=begun: rig.count("begin") >= begun, "a chunk that has begun", 60)
            kinds.append(_kill_something(rig, fleets))
        is_settled = rig.settle(15 if rig.mutant == "no-recovery" else 120)
        report.figure("of which", f"{kinds.count('worker')} workers, {kinds.count('fleet')} fleets")
        rig.check(report)
    report.goal("kills", len(kinds), at_least=times)
    history = rig.history()
    flying = checker.in_flight(history)
    report.figure("in flight at the kills", flying)
    report.goal("extra beyond those in flight", max(0, checker.extra_executions(history) - flying), at_most=0)
    seconds = sorted(checker.recovery_seconds(history))
    report.figure("recoveries", len(seconds))
    report.figure("median s", seconds[len(seconds) // 2] if seconds else 0.0)
    # In the short form the goal stays below the pause of the mutant `late-recovery`.
    at_most = LEASE_SECONDS + QUARANTINE_SECONDS if scale >= 1 else 5 * (LEASE_SECONDS + 1.5)
    report.goal("slowest s", seconds[-1] if seconds else 0.0, at_most=at_most)
    report.goal("settled", int(is_settled), at_least=1)


def _kill_something(rig: Rig, fleets: list) -> str:  # type: ignore[type-arg]
    """Kill a worker, or a whole fleet, which is started again; return which."""
    while True:
        fleet = rig.random.choice(fleets)
        if victims := fleet.workers():
            break
        time.sleep(0.02)
    if rig.random.random() < 0.6:
        fleet.kill_worker(rig.random.choice(victims))
        return "worker"
    fleet.kill()
    fleet.start()
    return "fleet"


def freezes(rig: Rig, report: Report, scale: float) -> None:
    """Freeze fleets in the middle of their tasks for longer than their leases, 200 times."""
    times = max(2, round(200 * scale))
    # The leader may be frozen too; its successor waits for the lock's time to live.
    rig.more["ASYNCQ_TEST_LOCK_TTL"] = "3"
    with rig.redis(), ExitStack() as stack:
        # One fleet is never frozen at the same time, so that it recovers what the others held.
        fleets = [stack.enter_context(rig.fleet(1, 8)) for _ in range(3 if times < 20 else 6)]
        for fleet in fleets:
            rig.wait_ready(fleet, 1)
        load = rig.producer("load", times * 40, 1200, 60, rig.seed)
        wait_until(lambda: rig.count("begin") > 8, "tasks that run", 30)
        done = 0
        while done < times:
            victims = rig.random.sample(fleets, min(len(fleets) - 1, times - done))
            pids = {pid for fleet in victims for pid in fleet.workers()}
            wait_until(lambda pids=pids: _running_in(rig, pids) > len(pids), "tasks in the middle", 30)
            for fleet in victims:
                fleet.freeze()
            time.sleep(rig.random.uniform(2.6, 3.2) * LEASE_SECONDS)
            for fleet in victims:
                fleet.thaw()
            done += len(victims)
            time.sleep(rig.random.uniform(0.3, 0.8))
        if load.poll() is None:
            load.terminate()
            load.wait()
        rig.settle(60)
        report.goal("freezes", done, at_least=times)
        rig.note_rows()
        rig.check(report)
    history = rig.history()
    refused = checker.refused_answers(history)
    lost = sum(fleet.log.read_text(errors="replace").count(LEASE_LOST) for fleet in fleets)
    report.figure("runs cut off by a freeze", checker.in_flight(history))
    if not rig.mutant:
        report.goal("late writes refused", refused + lost, at_least=1)
    seconds = checker.recovery_seconds(history)
    report.figure("median s until another began the task", sorted(seconds)[len(seconds) // 2] if seconds else 0.0)


def _running_in(rig: Rig, pids: set[int]) -> int:
    return sum(run.pid in pids and run.ended_at is None for run in checker.executions(rig.history()))


def terminations(rig: Rig, report: Report, scale: float) -> None:
    """Send SIGTERM to a fleet under load, 50 times, with a grace of 1 s and tasks of up to 3 s."""
    from django_asyncq.models import TaskRecord

    times, grace = max(2, round(50 * scale)), 1.0
    chance = random.Random(rig.seed)
    exits: list[float] = []
    with rig.redis():
        rig.ended_well(rig.producer("load", times * 6, 3000, 0, rig.seed))
        for _ in range(times):
            with rig.fleet(1, 6, ASYNCQ_TEST_SHUTDOWN_GRACE=str(grace)) as fleet:
                begun = rig.count("begin")
                wait_until(lambda begun=begun: rig.count("begin") > begun or rig.settle(0), "a task that runs", 30)
                time.sleep(chance.uniform(0, 1))
                rig.note("fault", kind="SIGTERM", pids=fleet.workers())
                exits.append(fleet.stop())
        with rig.fleet(2, 8):
            rig.settle(60 + times * 6)
            rig.check(report)
    report.goal("SIGTERMs", len(exits), at_least=times)
    report.figure("median exit s", sorted(exits)[len(exits) // 2])
    report.timing("slowest exit s", max(exits), at_most=grace + 1.0)
    over = TaskRecord.objects.exclude(attempt=1).count() + TaskRecord.objects.exclude(crash_count=0).count()
    report.goal("attempts or crashes counted by requeuing", over, at_most=0)
    report.goal("tasks failed", TaskRecord.objects.failed().count(), at_most=0)
