"""How fast tasks are enqueued: one by one, in transactions, in bulk, and while workers run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..costs import Memory, between
from ..peers import Peer
from ..rig import MeasureFailed, Rig
from .base import Outcome, Sizes

PER_TRANSACTION = 100
WARM_SECONDS = 60.0
FLOW_SECONDS = 600.0


def enqueue(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Enqueue from one process, one call after the other, each in autocommit; no worker runs."""
    yield Outcome("enqueue", produce(rig, peer, sizes.warm, sizes.enqueue, "one_by_one"))


def transaction(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Do the same, a hundred calls in each transaction."""
    values = produce(rig, peer, sizes.warm, sizes.enqueue, "one_by_one", per_transaction=PER_TRANSACTION)
    yield Outcome("transaction", values)


def bulk(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Enqueue by the bulk call, a thousand tasks each; no worker runs."""
    yield Outcome("bulk", produce(rig, peer, 1000, sizes.bulk, "bulk"))


def produce(rig: Rig, peer: Peer, warm: int, count: int, order: str, **more: Any) -> dict[str, float]:
    """Enqueue `count` tasks after a warm-up; return their rate and costs. `kind` is noop unless given."""
    rig.reset(peer)
    kind = more.pop("kind", "noop")
    with rig.producer(peer) as producer:
        producer.do(order, kind=kind, first=0, count=warm, **more)
        transactions = rig.count_transactions()
        before = rig.meter.read(client=producer.pid)
        took = producer.do(order, kind=kind, first=warm, count=count, **more)
        after = rig.meter.read(client=producer.pid)
    values = {"count": count, "per_second": count / took["seconds"], "seconds": took["seconds"]}
    values |= between(before, after, count)
    # /proc counts in steps of 10 ms, the process itself in microseconds.
    values["client_cpu_us"] = took["cpu_seconds"] / count * 1e6
    values["transactions"] = max(0, rig.count_transactions() - transactions) / count
    return values


def flow(rig: Rig, peer: Peer, sizes: Sizes) -> Iterator[Outcome]:
    """Enqueue one by one while two worker processes run: from the first call until all tasks are finished."""
    rig.reset(peer)
    warm, count = sizes.warm, sizes.flow
    transactions = rig.count_transactions()
    with rig.workers(peer, "flow") as fleet, rig.producer(peer) as producer:
        producer.do("one_by_one", kind="noop", first=0, count=warm)
        rig.wait(lambda: rig.probe.count >= warm, "the warm-up", fleet, WARM_SECONDS)
        rig.wait_settled(peer, fleet, warm)
        memory = Memory(fleet.sessions)
        before, begun_at = rig.meter.read(fleet.sessions, producer.pid), time.monotonic()
        took = producer.do("one_by_one", kind="noop", first=warm, count=count)
        rig.wait(lambda: rig.probe.count >= warm + count, "all tasks", fleet, FLOW_SECONDS, meanwhile=memory.look)
        rig.wait_settled(peer, fleet, warm + count)
        seconds = time.monotonic() - begun_at
        after = rig.meter.read(fleet.sessions, producer.pid)
    if rig.probe.count > warm + count:
        raise MeasureFailed(f"{rig.probe.count} runs of {warm + count} tasks")
    values = {"count": count, "per_second": count / seconds, "enqueued_per_second": count / took["seconds"]}
    # Over the whole life of the processes, including the warm-up.
    values["transactions"] = (rig.count_transactions() - transactions) / (warm + count)
    yield Outcome("flow", values | between(before, after, count) | memory.values())
