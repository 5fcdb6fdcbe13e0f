"""Count how runs end, for monitors: in memory when a change is announced, in Redis about once a second.

A worker process that is killed loses what it has counted since the last time. Other processes, such as that of a
request which cancels a task, write at once. A count decides nothing.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from ..broker.run_counts import BOUNDS, RunCounting, RunCounts
from ..core.aliases import uses_redis
from ..core.guard import get_logger
from ..exceptions import BrokerUnavailable
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import Faults

logger = get_logger("django_asyncq.lifecycle")

WRITE_SECONDS = 1.0
# Why a task has failed for good; every other reason is "failed".
OUTCOME_OF_REASON = {
    FailureReason.TIMEOUT.value: "timeout",
    FailureReason.WORKER_LOST.value: "crashed",
    FailureReason.CANCELLED.value: "cancelled",
    FailureReason.EXPIRED.value: "expired",
    FailureReason.DISCARDED.value: "discarded",
}
# By alias, queue and name of the task.
Counted = defaultdict[tuple[str, str, str], RunCounts]


class _Counter:
    """What this process has counted and not written yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Counted = defaultdict(RunCounts)
        # Monotonic seconds; None while every count is written at once.
        self._write_at: float | None = None
        self._faults = Faults(logger, "runs cannot be counted", over="runs are counted again")

    def begin_keeping(self) -> None:
        """Write only when `write` is called, as the reporter of a worker process does."""
        self._write_at = 0.0

    def end_keeping(self) -> None:
        """Write what was kept, and all that follows at once."""
        self._write_at = None
        self.write()

    def count(self, records: Sequence[TaskRecord], old: TaskState | None, new: TaskState) -> None:
        """Count tasks that have just ended, or whose run has: SUCCEEDED, FAILED or RETRYING."""
        now, has_run = None, old == TaskState.RUNNING
        with self._lock:
            for record in records:
                if record.batch_size is not None or (record.retry_at is not None and not has_run):
                    continue  # a batch, whose members count; or it waits at a gate
                counts = self._kept[record.backend, record.queue_name, record.name]
                counts.outcomes["succeeded" if new == TaskState.SUCCEEDED else _outcome_of(record)] += 1
                began = record.last_attempted_at
                if not has_run or began is None:
                    continue
                ended = record.finished_at or (now := now or database_clock.estimate())
                seconds = (ended - began).total_seconds()
                counts.took.buckets[bisect_left(BOUNDS, seconds)] += 1
                counts.took.seconds += seconds
                if (waited := record.waited_seconds) is not None:
                    counts.waited.buckets[bisect_left(BOUNDS, waited)] += 1
                    counts.waited.seconds += waited
        if self._write_at is None:
            self.write()

    def write_when_due(self) -> None:
        """Write what was counted, at most once in WRITE_SECONDS."""
        if self._kept and self._write_at is not None and (now := time.monotonic()) >= self._write_at:
            self._write_at = now + WRITE_SECONDS
            self.write()

    def write(self) -> None:
        """Write what was counted. While Redis is unreachable it is kept."""
        with self._lock:
            kept, self._kept = self._kept, defaultdict(RunCounts)
        by_queue: dict[tuple[str, str], dict[str, RunCounts]] = {}
        for (alias, queue, name), counts in kept.items():
            by_queue.setdefault((alias, queue), {})[name] = counts
        for (alias, queue), of_queue in by_queue.items():
            if not uses_redis(alias):
                continue
            try:
                RunCounting("worker", alias).add(queue, of_queue)
                self._faults.clear()
            except BrokerUnavailable as error:
                logger.debug("the runs of the queue %s are not counted in Redis yet: %s", queue, error)
                with self._lock:
                    for name, counts in of_queue.items():
                        self._kept[alias, queue, name].add(counts)
            except Exception as error:  # noqa: BLE001 - logged once; the reporter must not end for want of a count
                self._faults.note(error)


def _outcome_of(record: TaskRecord) -> str:
    return "retried" if record.retry_at else OUTCOME_OF_REASON.get(int(record.reason), "failed")


counter = _Counter()
