"""How long a task waits for an idle worker and among long tasks, and what an idle worker costs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..costs import Memory, between
from ..figures import longest_idle_wait_ms, percentile
from ..peers import Peer
from ..processes import read_stat, session_members
from ..rig import Fleet, Rig
from .base import Outcome, Sizes

WARM = 20
WARM_SECONDS = 60.0
# Long enough for what processes do at their start: imports, registration, the first looks at the queues.
REST_SECONDS = 3.0
SLOTS = 8
MIX_WARM = 200
LONG_SECONDS = 1.0


def warm_up(rig: Rig, peer: Peer, fleet: Fleet, kind: str, count: int) -> None:
    """Run some tasks, numbered from 0, and wait: the measure must not include the start of the processes."""
    with rig.producer(peer) as producer:
        producer.do("one_by_one", kind=kind, first=0, count=count)
    rig.wait(lambda: rig.probe.count >= count, "the warm-up", fleet, WARM_SECONDS)
    time.sleep(REST_SECONDS)


def latency(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Measure from before the enqueue call to the first line of the body, at a steady rate, with idle workers.

    `call_ms`: the median time of those calls; at 50 a second all processes sleep in between.
    """
    for rate in sizes.latency_rates:
        yield Outcome(f"latency {rate:,}/s", _pick_up(rig, peer, sizes.latency, rate))


def _pick_up(rig: Rig, peer: Peer, count: int, per_second: int) -> dict[str, float]:
    rig.reset(peer)
    transactions = rig.count_transactions()
    with rig.workers(peer, "latency") as fleet:
        warm_up(rig, peer, fleet, "stamp", WARM)
        with rig.producer(peer) as producer:
            # The producer warms up too: its first call connects.
            producer.do("paced", kind="stamp", first=WARM, count=WARM, per_second=per_second)
            before = rig.meter.read(fleet.sessions, producer.pid)
            first = 2 * WARM
            took = producer.do("paced", kind="stamp", first=first, count=count, per_second=per_second)
            rig.wait(lambda: rig.probe.count >= first + count, "all tasks", fleet, WARM_SECONDS)
            after = rig.meter.read(fleet.sessions, producer.pid)
    found = [rig.probe.times(number) for number in range(first, first + count)]
    waits = [(task.begun_ns - task.enqueued_ns) / 1e6 for task in found]
    values = {f"p{share}_ms": percentile(waits, share / 100) for share in (50, 95, 99)}
    values["call_ms"] = took["call_seconds"] * 1000
    # Over the whole life of the processes, including the warm-ups.
    values["transactions"] = (rig.count_transactions() - transactions) / (first + count)
    return {"count": count, **values, "max_ms": max(waits), **between(before, after, count)}


def mix(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Enqueue a burst of one 1 s task and thirty 1 ms tasks every 0.4 s, at 8 slots of which fewer than half are busy.

    `idle_wait_ms`: how long, at most, a short task waited while fewer than 8 tasks ran; `p99_ms`: any wait of one.
    Two hundred short tasks run before, so that a worker that estimates durations starts with a wrong estimate.
    """
    rig.reset(peer)
    each = sizes.shorts_in_burst + 1
    count = sizes.bursts * each
    seconds = sizes.bursts * (sizes.burst_pause_seconds + LONG_SECONDS) + WARM_SECONDS
    with rig.workers(peer, "mix") as fleet:
        warm_up(rig, peer, fleet, "short", MIX_WARM)
        with rig.producer(peer) as producer:
            producer.do("one_by_one", kind="short", first=MIX_WARM, count=1)
            first = MIX_WARM + 1
            pause = sizes.burst_pause_seconds
            producer.do("bursts", first=first, count=sizes.bursts, shorts=sizes.shorts_in_burst, pause_seconds=pause)
        rig.wait(lambda: rig.probe.count >= first + count, "all tasks", fleet, seconds)
    everything = [rig.probe.times(number) for number in range(first, first + count)]
    short = [task for index, task in enumerate(everything) if index % each]
    waits = [(task.begun_ns - task.enqueued_ns) / 1e6 for task in short]
    values = {"idle_wait_ms": longest_idle_wait_ms(short, everything, SLOTS), "max_ms": max(waits)}
    yield Outcome(
        "mix", {"count": count, **values, "p50_ms": percentile(waits, 0.5), "p99_ms": percentile(waits, 0.99)}
    )


def idle(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Measure an idle fleet of two processes that has run some tasks, per second, and its CPU in % of a core.

    `worker_cpu_percent`: of all its processes together; `busiest_cpu_percent`: of the one that used most.
    """
    rig.reset(peer)
    with rig.workers(peer, "idle") as fleet:
        warm_up(rig, peer, fleet, "stamp", WARM)
        memory = Memory(fleet.sessions)
        memory.look(now=True)
        before, used = rig.meter.read(fleet.sessions), _used(fleet)
        time.sleep(sizes.idle_seconds)
        after = rig.meter.read(fleet.sessions)
        busiest = max((cpu - used.get(pid, 0.0) for pid, cpu in _used(fleet).items()), default=0.0)
        fleet.check()
    seconds = after.at - before.at
    cost = between(before, after, seconds)
    values = {
        "redis_commands_per_second": cost["redis_commands"],
        "round_trips_per_second": cost["round_trips"],
        "statements_per_second": cost["statements"],
        "worker_cpu_percent": cost["worker_cpu_us"] / 1e4,
        "busiest_cpu_percent": busiest / seconds * 100,
        "redis_cpu_percent": cost["redis_cpu_us"] / 1e4,
        "database_cpu_percent": cost["database_cpu_us"] / 1e4,
        "processes": len(used),
        "foreign": cost["foreign"],
    }
    yield Outcome("idle", values | memory.values())


def _used(fleet: Fleet) -> dict[int, float]:
    found = {pid: read_stat(pid) for pid in session_members(fleet.sessions)}
    return {pid: stat.own_seconds for pid, stat in found.items() if stat is not None}
