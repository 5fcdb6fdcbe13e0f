"""Rows, entries and runs of the model.

A row and its entry in Redis are separate, as in the design: each has its own guard, and a crash may change one without
the other. Times are "future" or "past"; time passes when a "future" becomes "past".
"""

from __future__ import annotations

from dataclasses import dataclass

QUEUED, RUNNING, SUCCEEDED, FAILED = range(4)
QUEUES = ("one", "two")
WORKERS = ("A", "B")
# The worker in quarantine.
ALONE = "C-alone"
GATE = "g"
MOST_CRASHES = 3
WAITING = ("scheduled", "retry", "archived")


@dataclass
class Row:
    """A row. retry_at, run_after: "", "future" or "past". workers: the workers of its attempts, the latest last.

    suspicion: 1 when it was lost once, 2 when it must run alone. waits: it is RETRYING because its gate was full.
    asked: somebody has cancelled it. late: its time to begin is over.
    closed: why it failed before a run of it could finish: "", "cancelled", "expired".
    """

    queue: str
    gate: str = ""
    priority: int = 0
    run_after: str = ""
    state: int = QUEUED
    fence: int = 0
    attempt: int = 0
    crashes: int = 0
    retry_at: str = ""
    workers: tuple[str, ...] = ()
    suspicion: int = 0
    waits: bool = False
    asked: bool = False
    late: bool = False
    closed: str = ""

    @property
    def suspect(self) -> bool:
        return self.suspicion == 2

    @property
    def is_live(self) -> bool:
        return self.state in (QUEUED, RUNNING)

    @property
    def is_waiting(self) -> bool:
        return self.state == QUEUED or bool(self.state == FAILED and self.retry_at)

    @property
    def is_final(self) -> bool:
        return self.state == SUCCEEDED or (self.state == FAILED and not self.retry_at)

    def begin(self, worker: str) -> None:
        self.state, self.attempt, self.workers = RUNNING, self.attempt + 1, (*self.workers, worker)

    def undo_attempt(self) -> None:
        self.attempt, self.workers = max(self.attempt - 1, 0), self.workers[:-1]

    @property
    def due(self) -> str:
        return self.retry_at or self.run_after


@dataclass
class Outcome:
    """A spilled outcome of a run. row: as the run would have written it. read: as of `Held`."""

    row: Row
    counted: bool
    read: int


@dataclass
class Entry:
    """What Redis knows of a task. place: pending, priority, suspects, scheduled, retry, archived or active.

    outcome: spilled by a worker that could not write the row. since: the number of the call that made it pending, 0
    where Redis does not know.
    """

    queue: str
    place: str
    fence: int = 0
    worker: str = ""
    priority: int = 0
    due: str = ""
    expired: bool = False
    outcome: Outcome | None = None
    since: int = 0


@dataclass
class Held:
    """A claim of a worker; the values are those of its record in memory. read: the fence of the row at the claim."""

    name: str
    worker: str
    fence: int
    row: Row
    begun: bool = False
    written: bool = False
    counted: bool = True
    read: int = -1

    def __post_init__(self) -> None:
        if self.read < 0:
            self.read = self.row.fence
