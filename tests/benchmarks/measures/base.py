"""The sizes of the measures, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Outcome(NamedTuple):
    """One measured outcome. `values`: by name, with the unit in it; costs are per task (see `costs.between`)."""

    label: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tasks, except where the name says otherwise. The slowest peers need some ten seconds for each."""

    warm: int = 200
    enqueue: int = 10_000
    bulk: int = 20_000
    drain: tuple[int, ...] = (1_000, 10_000, 100_000)
    latency: int = 500
    latency_rates: tuple[int, ...] = (50,)
    sleep: int = 2_000
    bursts: int = 12
    shorts_in_burst: int = 30
    burst_pause_seconds: float = 0.4
    retries: int = 2_000
    gated: int = 10_000
    idle_seconds: float = 30.0
    flow: int = 5_000


QUICK = Sizes(
    warm=50,
    enqueue=500,
    bulk=2_000,
    drain=(1_000,),
    latency=50,
    sleep=320,
    bursts=4,
    retries=200,
    gated=500,
    idle_seconds=5.0,
    flow=500,
)
