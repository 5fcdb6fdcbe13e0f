"""One sweep over all unfinished tasks, split into steps: what each step repaired, and how long the sweep has run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .. import gates
from ..guard import get_logger

logger = get_logger("django_asyncq.maintenance.reconciler")

# The process that enqueued a younger row may still be pushing it.
GRACE_SECONDS = 3


class Repairs(NamedTuple):
    """How many repairs of each kind one pass made.

    recovered: tasks whose lease expired. pushed: QUEUED rows that Redis did not know. parked: RETRYING rows that Redis
    did not know. requeued: RUNNING rows that no worker ran. leased: active entries without a lease. strays: ids without
    a hash. orphans: hashes in no list. discarded: waiting entries of finished rows. released: claims that dead workers
    still seemed to hold. slots_added, slots_removed: gate slots. closed: tasks that were cancelled or had expired.
    settled: rows that show now what another program has done. followed: the same, of tasks that only such a one runs.
    """

    recovered: int = 0
    pushed: int = 0
    parked: int = 0
    requeued: int = 0
    leased: int = 0
    strays: int = 0
    orphans: int = 0
    discarded: int = 0
    released: int = 0
    slots_added: int = 0
    slots_removed: int = 0
    closed: int = 0
    settled: int = 0
    followed: int = 0

    def plus(self, other: Repairs) -> Repairs:
        """Return the sums."""
        return Repairs(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self._asdict().items() if count) or "nothing"


def ignore_progress(rows: int) -> None:
    """Ignore how many rows have been checked."""


def log_repairs(repairs: Repairs) -> Repairs:
    """Log what was repaired, if anything was, and return it."""
    if any(repairs):
        logger.info("repaired: %s", repairs)
    return repairs


class Rebuilt(NamedTuple):
    """What a rebuild did, or would do. queues: (alias, name) → set in Redis → number of tasks. gates: name → slots."""

    queues: dict[tuple[str, str], Counter[str]]
    gates: dict[str, gates.Drift]


class Sweep:
    """A sweep that may need several rounds of the reconciler.

    begun_at: monotonic seconds. is_rebuild: Redis is new or has lost its memory. worked_seconds: time spent so far.
    """

    def __init__(self, steps: Iterator[Repairs], *, begun_at: float, is_rebuild: bool) -> None:
        self.begun_at = begun_at
        self.is_rebuild = is_rebuild
        self.worked_seconds = 0.0
        self.is_finished = False
        self.repairs = Repairs()
        self._steps = steps

    def advance(self, seconds: float) -> Repairs:
        """Take steps until the sweep is finished or the seconds have passed; return what these steps repaired."""
        begun_at = time.monotonic()
        repairs = Repairs()
        for step in self._steps:
            repairs = repairs.plus(step)
            if time.monotonic() >= begun_at + seconds:
                break
        else:
            self.is_finished = True
        self.worked_seconds += time.monotonic() - begun_at
        self.repairs = self.repairs.plus(repairs)
        return repairs
