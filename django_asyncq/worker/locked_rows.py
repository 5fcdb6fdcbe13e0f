"""What the reporter puts aside because another transaction, such as that of a request, has locked its row."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .execute.job import Job, Outcome

AGAIN_SECONDS = 0.25


class LockedRows:
    """Jobs to mark as running and outcomes to write, until their rows are free. Used by one thread."""

    def __init__(self) -> None:
        self.events: list[Job | Outcome] = []
        self._again_at = 0.0

    @property
    def has_outcomes(self) -> bool:
        """Whether an outcome is among them."""
        return any(isinstance(event, Outcome) for event in self.events)

    def holds(self, job: Job) -> bool:
        """Whether a job is among those to mark as running."""
        return any(event is job for event in self.events)

    def put(self, events: Sequence[Job | Outcome]) -> None:
        """Put events aside for AGAIN_SECONDS."""
        self.events += events
        self._again_at = time.monotonic() + AGAIN_SECONDS

    def take_due(self) -> list[Job | Outcome]:
        """Return what is tried again now."""
        if not self.events or time.monotonic() < self._again_at:
            return []
        found, self.events = self.events, []
        return found
