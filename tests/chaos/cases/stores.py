"""Redis: replies lost, killed, emptied."""

from __future__ import annotations

import time

from tests.workers import wait_until

from .. import checker, witness
from ..proxy import LossyProxy
from ..rig import PERSISTENCE, Report, Rig, Server, enqueue

REBUILT_SECONDS = 5.0
# The load of `lost_replies` is repeated at most this often.
LOADS = 5


def lost_replies(rig: Rig, report: Report, scale: float) -> None:
    """Run 10,000 tasks through a relay that loses 5 % of all replies after Redis has run the commands.

    The number of replies depends on the batches, so more load follows until enough replies are lost.
    """
    count, wanted = max(200, round(10_000 * scale)), 500 if scale >= 1 else 20
    with rig.redis() as server, LossyProxy(("127.0.0.1", server.port), 0.05, rig.seed) as proxy:
        direct, rig.redis_url = rig.redis_url, proxy.url()
        with rig.fleet(2, 4):
            for seed in range(rig.seed, rig.seed + 2 * LOADS, 2):
                producers = [rig.producer("load", count - count // 20, 5, 1, seed)]
                if not rig.mutant:
                    # Without its guard five lost tasks would keep the gate full, and its producer waiting, for ever.
                    producers.append(rig.producer("load", count // 20, 5, 1, seed + 1, "lossy"))
                rig.ended_well(*producers)
                if proxy.lost >= wanted:
                    break
            rig.settle(20 if rig.mutant else 120)
            proxy.share = 0.0
            rig.redis_url = direct
            rig.check(report)
        report.goal("replies lost", proxy.lost, at_least=wanted)
        report.figure("of", proxy.replies)
    most = checker.most_live(witness.transitions()).get("lossy", 0)
    report.goal("most QUEUED or RUNNING at a gate of 5", most, at_most=5)


def redis_killed(rig: Rig, report: Report, scale: float) -> None:
    """Kill Redis under load, twenty times for each kind of persistence, and restart it within 2 s."""
    each, count = max(1, round(20 * scale)), max(200, round(8_000 * scale))
    slowest = 0.0
    kinds = list(PERSISTENCE) if scale >= 0.25 else ["none"]
    for kind in kinds:
        server = "redis" if kind in ("AOF always", "RDB") else "valkey"
        with rig.redis(server, kind) as redis, rig.fleet(2, 4) as fleet:
            rig.wait_ready(fleet, 2)
            producers = [
                rig.producer("load", count // 4, 10, 8, rig.seed),
                rig.producer("load", count // 8, 10, 8, rig.seed + 1, f"gate {kind}".replace(" ", "-")),
            ]
            for _ in range(each):
                # Pending tasks, so that a kill loses something.
                enqueue(rig, 200, 40)
                time.sleep(rig.random.uniform(0, 0.3))
                slowest = max(slowest, _kill_redis(rig, redis))
            rig.ended_well(*producers)
            rig.settle(25 if rig.mutant else 90)
            if kind != kinds[-1]:
                continue
            report.goal("kills", rig.count_faults("redis killed"), at_least=each * len(kinds))
            rig.check(report)
    report.timing("slowest s until a task began again", slowest, at_most=REBUILT_SECONDS)
    over = [most for most in checker.most_live(witness.transitions()).values() if most > 5]
    report.goal("gates over their limit", len(over), at_most=0)


def _kill_redis(rig: Rig, redis: Server) -> float:
    """Kill and restart; return how long it took from the restart until a task began."""
    redis.kill()
    rig.note("fault", kind="redis killed", pids=[pid for fleet in rig.fleets for pid in fleet.workers()])
    time.sleep(rig.random.uniform(0, 2))
    redis.start()
    restarted, begun = time.monotonic(), rig.count("begin")
    wait_until(lambda: rig.count("begin") > begun or rig.settle(0), "a task after the restart", 30)
    return time.monotonic() - restarted


def flushed(rig: Rig, report: Report, scale: float) -> None:
    """Send FLUSHALL with 5,000 tasks pending, 50 running, 500 scheduled, four full gates, and busy producers."""
    queued, scheduled = max(400, round(5_000 * scale)), max(20, round(500 * scale))
    # Of 54 slots, so that the queued tasks wait.
    running = 50
    gates, times = [f"flushed-{number}" for number in range(4)], max(2, round(3 * scale))
    with rig.redis() as redis, rig.fleet(2, 18) as first, rig.fleet(1, 18) as second:
        rig.wait_ready(first, 2)
        rig.wait_ready(second, 1)
        # So far ahead that they still wait at the first fault, also where two processes need long to start.
        rig.ended_well(rig.producer("load", scheduled, 5, 0, rig.seed, "", 25 + scheduled // 10))
        knocking = [rig.producer("load", max(20, round(100 * scale)), 1500, 0, rig.seed, gate) for gate in gates]
        wait_until(lambda: sum(map(len, rig.slots().values())) >= 16, "gates of which most slots are taken", 60)
        slowest, counts = 0.0, []
        for _ in range(times):
            _fill(rig, running, queued)
            counts.append(_standing())
            with redis.client() as client:
                client.flushall()
            began = time.monotonic()
            rig.note("fault", kind="FLUSHALL", pids=[pid for fleet in rig.fleets for pid in fleet.workers()])
            slowest = max(slowest, _until_rebuilt(rig, redis, began))
            time.sleep(rig.random.uniform(0.5, 1.5))
        rig.ended_well(*knocking)
        rig.settle(60 if rig.mutant else 240)
        report.figure("FLUSHALLs", times)
        report.goal("most scheduled at one", max(count[0] for count in counts), at_least=scheduled)
        report.goal("fewest queued at one", min(count[1] for count in counts), at_least=queued)
        report.goal("fewest running at one", min(count[2] for count in counts), at_least=running * 0.8)
        rig.check(report)
    over = [most for most in checker.most_live(witness.transitions()).values() if most > 5]
    report.goal("gates over their limit", len(over), at_most=0)
    report.timing("slowest rebuild s", slowest, at_most=REBUILT_SECONDS)


def _fill(rig: Rig, running: int, queued: int) -> None:
    """Start long tasks, and enqueue tasks that wait behind them."""
    from django_asyncq.models import TaskRecord

    from .. import tasks

    long = tasks.work.enqueue_many([(rig.random.uniform(4_000, 5_000),) for _ in range(running)])
    rig.note("committed", ids=[str(result.id) for result in long])
    wait_until(lambda: TaskRecord.objects.running().count() >= running * 0.9, "tasks that run", 60)
    # Some of them begin meanwhile.
    enqueue(rig, round(queued * 1.2), 20)


def _standing() -> tuple[int, int, int]:
    """Return how many tasks are scheduled, pending and running."""
    from django.utils import timezone

    from django_asyncq.models import TaskRecord

    rows = TaskRecord.objects.queued()
    scheduled = rows.filter(run_after__gt=timezone.now()).count()
    return scheduled, rows.count() - scheduled, TaskRecord.objects.running().count()


def _until_rebuilt(rig: Rig, redis: Server, began: float) -> float:
    """Wait until Redis knows every row that was QUEUED before; return the time since the FLUSHALL."""
    from django_asyncq.models import TaskRecord

    unseen = list(TaskRecord.objects.queued().values_list("id", "queue_name"))

    def is_known() -> bool:
        # In parts: asking for all of them each time would take a core from the rebuild.
        while part := unseen[:500]:
            with redis.client() as client, client.pipeline(transaction=False) as pipeline:
                for id, queue in part:
                    pipeline.exists(f"{rig.prefix}:{{{queue}}}:t:{id}")
                missing = [id for (id, _), there in zip(part, pipeline.execute(), strict=True) if not there]
            if missing and TaskRecord.objects.queued().filter(id__in=missing).exists():
                return False
            del unseen[:500]
        return True

    try:
        wait_until(is_known, "a Redis that knows the rows", 30)
    except AssertionError:
        return 30.0
    return time.monotonic() - began
