"""One claim of one task, as it goes from the claim to the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..broker import Lease
from ..models import TaskRecord


@dataclass(slots=True, eq=False)
class Run:
    """One claim of a task.

    counted: whether the run uses up an attempt. begun: whether `begin` was called. written: whether the row says
    RUNNING. pause_seconds: how long an unfinished run is postponed; 0: it is requeued at once.
    members: of a batch: one for each call. Their leases are in no entry: Redis holds the batch alone.
    """

    record: TaskRecord
    lease: Lease
    counted: bool = True
    begun: bool = False
    written: bool = False
    pause_seconds: int = 0
    members: list[Run] = field(default_factory=list)
