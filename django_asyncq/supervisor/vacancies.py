"""When a worker process may be started for each one that is missing.

A process that was ready is replaced at once, however often it is killed from outside. One that exits before it is
ready has most likely failed an import, and would fail again at once; so pauses grow before its replacements.
"""

from __future__ import annotations

from dataclasses import dataclass

# Between the start of a process and the start of its replacement. A start costs about 0.5 s of one core, so a task that
# kills its process each time takes no more than that core.
LEAST_SECONDS_BETWEEN_STARTS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A missing process. start_at: when one may be started, in monotonic seconds.

    failed_starts: how many processes in a row exited before they were ready, each the replacement of the one before.
    """

    start_at: float = 0.0
    failed_starts: int = 0

    @classmethod
    def after_death(cls, started_at: float, now: float) -> Vacancy:
        """Return the vacancy of a process that was ready before it died. started_at: when it was started."""
        return cls(max(now, started_at + LEAST_SECONDS_BETWEEN_STARTS))

    @classmethod
    def after_failed_start(cls, failed_starts: int, started_at: float, now: float) -> Vacancy:
        """Return the vacancy of a process that exited before it was ready: no pause, then 1 s, 2 s, 4 s, up to 30 s.

        failed_starts: its own included.
        """
        # The exponent is bounded too: 2.0 ** 1024 overflows.
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** min(failed_starts - 2, 10)) if failed_starts > 1 else 0.0
        return cls(max(now + pause, started_at + LEAST_SECONDS_BETWEEN_STARTS), failed_starts)
