"""The names of paused tasks, in the memory of a worker process."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from ...broker import pauses
from ...exceptions import BrokerUnavailable
from ...guard import get_logger
from ...lifecycle import Run

logger = get_logger("django_asyncq.worker")

# When a message about a change was lost, this much later a worker notices it.
READ_SECONDS = 5.0
LOG_AGAIN_SECONDS = 60.0


class PausedTasks:
    """Sorts claimed runs into those to start and those whose task is paused.

    The names are read when tasks have come, at most each READ_SECONDS: an idle worker pays nothing.
    """

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._names: set[str] = set()
        self._read_at = -math.inf
        self._logged_at: dict[str, float] = {}

    def expire(self) -> None:
        """Read the names again before the next task begins."""
        self._read_at = -math.inf

    def split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """Return the runs to start, and those of paused tasks.

        While Redis is unreachable the names stay as they are.
        """
        now = time.monotonic()
        if runs and now - self._read_at >= READ_SECONDS:
            try:
                self._names = pauses.paused_tasks("worker")
            except BrokerUnavailable as error:
                logger.debug("worker %s cannot read which tasks are paused: %s", self._worker_id, error)
            self._read_at = now
        if not self._names:
            return list(runs), []
        held = [run for run in runs if run.record.name in self._names]
        self._log(held, now)
        return [run for run in runs if run.record.name not in self._names], held

    def _log(self, held: Iterable[Run], now: float) -> None:
        """Log each paused task at most once a minute: its calls come again and again."""
        self._logged_at = {name: at for name, at in self._logged_at.items() if now - at < LOG_AGAIN_SECONDS}
        for name, count in Counter(run.record.name for run in held).items():
            if name not in self._logged_at:
                self._logged_at[name] = now
                text = "worker %s: task %s is paused; calls postponed now: %d"
                logger.info(text, self._worker_id, name, count, extra={"task": name})
