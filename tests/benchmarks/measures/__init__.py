"""The measures by name. Each yields its outcomes: a label (its own name, one for each size or kind) and its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..peers import MEASURES, Peer
from ..rig import Rig
from .base import Outcome, Sizes
from .draining import asleep, drain, gated, retries, sleep
from .enqueueing import bulk, enqueue, flow, transaction
from .waiting import idle, latency, mix

__all__ = ["ALL", "MEASURES", "Outcome", "Sizes"]

ALL: dict[str, Callable[[Rig, Peer, Sizes], Iterator[Outcome]]] = {
    "enqueue": enqueue,
    "transaction": transaction,
    "bulk": bulk,
    "drain": drain,
    "latency": latency,
    "sleep": sleep,
    "asleep": asleep,
    "mix": mix,
    "retries": retries,
    "gated": gated,
    "idle": idle,
    "flow": flow,
}
