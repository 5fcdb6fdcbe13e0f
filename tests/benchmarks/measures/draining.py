"""How fast workers drain a backlog.

The tasks are enqueued while no worker runs. Then the workers are started. The clock of `per_second` runs from the first
body to the instant at which the peer's own records say that all is finished (rows final, messages acknowledged:
`is_settled`). So the start of processes and their imports do not count, and deferred writes do.
`bodies_per_second` ends with the last body, `from_start_per_second` begins with the start of the processes.

Costs are taken from the look after the first body (2 to 5 ms later) to that end, over the tasks that ended meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..costs import Memory, between
from ..peers import Peer
from ..rig import MeasureFailed, Rig
from .base import Outcome, Sizes
from .enqueueing import produce

BEGIN_SECONDS = 60.0
SLOTS = 32
NAP_SECONDS = 0.01
# The slowest peers run some hundred tasks a second; less than a hundred is a failure.
SECONDS_FOR_EACH_TASK = 0.01


def drain(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Tasks that do nothing; one outcome for each size."""
    for count in sizes.drain:
        if count <= peer.drain_limit:
            yield Outcome(f"drain {count:,}", go_down(rig, peer, "noop", count, "drain"))


def sleep(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Tasks that sleep 10 ms as a `def`, with 32 slots in two processes or what the peer can have."""
    yield Outcome("sleep", nap(rig, peer, "nap", sizes.sleep))


def asleep(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Tasks that sleep 10 ms as an `async def`."""
    yield Outcome("asleep", nap(rig, peer, "anap", sizes.sleep))


def nap(rig: Rig, peer: Peer, kind: str, count: int) -> dict[str, float]:
    """Return also how many times the ideal it took: all tasks' sleep, divided by 32 slots, whatever the peer has."""
    values = go_down(rig, peer, kind, count, "sleep" if kind == "nap" else "asleep")
    values["times_ideal"] = count / values["per_second"] / (count * NAP_SECONDS / SLOTS)
    values["slots"] = peer.sleep_slots
    return values


def retries(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Tasks whose first attempt fails and that are retried at once; tasks a second, each run twice."""
    yield Outcome("retries", go_down(rig, peer, "fail_once", sizes.retries, "retries"))


def gated(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Tasks behind an open gate against tasks without one, enqueued one by one and drained, back to back.

    `enqueue_share` and `drain_share`: the gated rate divided by the ungated one.
    """
    entered = {kind: produce(rig, peer, sizes.warm, sizes.gated, "one_by_one", kind=kind) for kind in ("noop", "gated")}
    drained = {kind: go_down(rig, peer, kind, sizes.gated, "drain") for kind in ("noop", "gated")}
    yield Outcome(
        "gated enqueue",
        {"share": entered["gated"]["per_second"] / entered["noop"]["per_second"], **entered["gated"]},
    )
    yield Outcome(
        "gated drain", {"share": drained["gated"]["per_second"] / drained["noop"]["per_second"], **drained["gated"]}
    )


def go_down(rig: Rig, peer: Peer, kind: str, count: int, profile: str) -> dict[str, float]:
    """Make a backlog, start the workers, wait until all is done. Raises: MeasureFailed."""
    rig.reset(peer)
    rig.fill(peer, kind, count)
    transactions = rig.count_transactions()
    with rig.workers(peer, profile) as fleet:
        memory = Memory(fleet.sessions)
        rig.wait(lambda: rig.probe.first_ns, "the first task", fleet, BEGIN_SECONDS)
        before = rig.meter.read(fleet.sessions)
        seconds = 60 + count * SECONDS_FOR_EACH_TASK
        rig.wait(lambda: rig.probe.count >= count, "all tasks", fleet, seconds, meanwhile=memory.look)
        memory.look(now=True)
        rig.wait_settled(peer, fleet, count)
        settled_ns = time.monotonic_ns()
        after = rig.meter.read(fleet.sessions)
        first_ns, last_ns = rig.probe.first_ns, rig.probe.last_ns
    if rig.probe.count > count:
        raise MeasureFailed(f"{rig.probe.count} runs of {count} tasks")
    return {
        "count": count,
        "per_second": count / (settled_ns - first_ns) * 1e9,
        "bodies_per_second": count / max(last_ns - first_ns, 1) * 1e9,
        "from_start_per_second": count / (settled_ns - fleet.started_ns) * 1e9,
        **between(before, after, count - before.tasks),
        "transactions": (rig.count_transactions() - transactions) / count,
        **memory.values(),
    }
