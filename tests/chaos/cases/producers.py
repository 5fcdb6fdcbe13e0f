"""Producers: killed, rolled back, and without Redis."""

from __future__ import annotations

import time
from contextlib import ExitStack

from tests.proxy import Proxy
from tests.workers import wait_until

from ..rig import Report, Rig


def crashes(rig: Rig, report: Report, scale: float) -> None:
    """Kill 1,000 processes between COMMIT and push, some of them with gate slots."""
    count = max(20, round(1_000 * scale))
    with rig.redis(), rig.fleet(1, 8):
        producers = [rig.producer("crash", count // 2, rig.seed + number) for number in range(2)]
        rig.ended_well(*producers)
        # A child that is not killed makes its producer fail.
        report.goal("crashes", rig.count("crash"), at_least=count // 2 * 2)
        rig.settle(10 if rig.mutant else 60)
        rig.check(report)
    begins = {line["id"]: line["at"] for line in reversed(rig.history()) if line["event"] == "begin"}
    waited = sorted(
        begins[id] - line["at"]
        for line in rig.history()
        if line["event"] == "committed"
        for id in line["ids"]
        if id in begins
    )
    # The reconciler gives the producer 3 s, passes each second, and needs time for a pass.
    p99 = waited[round(len(waited) * 0.99) - 1] if waited else 0.0
    report.timing("p99 s from COMMIT to start", p99, at_most=3 + 1 + 2)


def rollbacks(rig: Rig, report: Report, scale: float) -> None:
    """Run 1,000 transactions with savepoints to a depth of four, and roll about half of all blocks back."""
    count = max(50, round(1_000 * scale))
    rig.more["ASYNCQ_CHAOS_PROVISIONAL"] = "7"
    with rig.redis(), rig.fleet(1, 8):
        rig.ended_well(*(rig.producer("rollback", count // 2, rig.seed + number) for number in range(2)))
        # Each transaction writes one line, even when it kept nothing.
        report.goal("transactions", rig.count("committed"), at_least=count // 2 * 2)
        rig.settle(60)
        # A rolled-back task gives its slot back at once, not after its provisional time (7 s here).
        rig.check(report, agreement_seconds=3)


def redis_away(rig: Rig, report: Report, scale: float) -> None:
    """Make 1,000 requests while Redis is silent and 1,000 while its port is closed; all tasks run afterwards."""
    count = max(100, round(1_000 * scale))
    with ExitStack() as stack:
        server = stack.enter_context(rig.redis())
        proxy = stack.enter_context(Proxy(("127.0.0.1", server.port)))
        direct, rig.redis_url = rig.redis_url, proxy.url()
        baseline = _latencies(rig, 100)
        for name, leave, return_ in (
            ("silent", proxy.hold, proxy.resume),
            ("gone", server.kill, server.start),
        ):
            leave()
            try:
                taken = _latencies(rig, count)
            finally:
                return_()
            usual = baseline[len(baseline) // 2]
            added = [seconds - usual for seconds in taken]
            # The breaker lets one request through each 2 s; that one waits for Redis.
            paying = [seconds for seconds in added if seconds > 0.1]
            rest = sorted(seconds for seconds in added if seconds <= 0.1)
            report.goal(f"{name}: paying requests of {count}", len(paying), at_most=max(2, count * 0.01))
            report.timing(f"{name}: slowest of them s", max(paying, default=0.0), at_most=1.1)
            p99 = rest[round(len(rest) * 0.99) - 1] * 1000 if rest else 0.0
            report.timing(f"{name}: p99 ms added to the others", p99, at_most=5.0)
        rig.redis_url = direct
        refused = sum(line["event"] == "request" and not line["accepted"] for line in rig.history())
        report.goal("requests refused", refused, at_most=0)
        with rig.fleet(2, 8):
            rig.settle(60)
            rig.check(report)


def _latencies(rig: Rig, count: int) -> list[float]:
    """Let a fresh producer make requests; return the seconds of each."""
    before = rig.count("request")
    producer = rig.producer("requests", count, 2)
    wait_until(lambda: producer.poll() is not None, "the requests", 600)
    rig.ended_well(producer)
    time.sleep(0.05)
    return [line["seconds"] for line in rig.history() if line["event"] == "request"][before:]


def newest(rig: Rig, report: Report, scale: float) -> None:
    """Replace the arguments of 300 keys twelve times each, while workers are killed and Redis is emptied."""
    from ..tasks import NEWEST

    keys = max(12, round(300 * scale))
    with rig.redis() as redis, rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        producers = [rig.producer("newest", keys // 2, rig.seed + number, number * keys) for number in range(2)]
        while any(producer.poll() is None for producer in producers):
            time.sleep(rig.random.uniform(0.5, 4.0))
            workers = fleet.ready()
            if rig.random.random() < 0.5:
                with redis.client() as client:
                    client.flushall()
                rig.note("fault", kind="FLUSHALL", pids=workers)
            elif workers:
                fleet.kill_worker(rig.random.choice(workers))
        rig.ended_well(*producers)
        report.goal("settled", int(rig.settle(30 if rig.mutant else 120)), at_least=1)
        rig.check(report, repeats=True)
    for kind in ("kill worker", "FLUSHALL"):
        report.figure(kind, rig.count_faults(kind))
    calls = [line["got"] for line in rig.history() if line["event"] == "begin"]
    run = {got["key"] for got in calls if got["number"] == NEWEST}
    report.goal("keys", len({got["key"] for got in calls}), at_least=keys // 2 * 2)
    report.goal("keys whose newest call did not run", len({got["key"] for got in calls} - run), at_most=0)
