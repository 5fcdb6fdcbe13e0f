"""The tasks of dead worker processes: each process's are recovered once, and again while a store is unreachable."""

from __future__ import annotations

import time
from datetime import datetime

from django.db import connections

from .. import lifecycle
from ..broker import Broker
from ..exceptions import TaskCancelled, TaskNotRegistered, TaskTimeout
from ..faults import STORE_ERRORS, Faults, concerns_one_row, in_turn
from ..guard import get_logger, is_a
from ..registry import registered
from ..results import Judgement, judge_failure
from ..storage import database_clock
from ..worker.execute.job import timeout_text
from ..worker.options import WorkerOptions
from .blame import blame, describe_death
from .memory import MemorySampler
from .processes import Child

logger = get_logger("django_asyncq.supervisor")

RECOVER_AGAIN_SECONDS = 1.0


class Recovery:
    """The dead processes whose tasks are not recovered yet."""

    def __init__(self, broker: Broker, options: WorkerOptions, memory: MemorySampler) -> None:
        self.broker = broker
        self.options = options
        self.memory = memory
        self.dead: list[Child] = []
        self._recover_at = 0.0
        self._faults = Faults(
            logger,
            "the tasks of dead workers cannot be recovered yet",
            over="the tasks of dead workers have been recovered",
        )

    def add(self, child: Child) -> None:
        """Have the tasks of a dead process recovered in the next round."""
        self.dead.append(child)
        self._recover_at = time.monotonic()

    def recover_dead(self, now: float) -> bool:
        """Recover the tasks of dead processes; retry later while a store is unreachable. Return whether it was done."""
        if not self.dead or now < self._recover_at:
            return False
        self._recover_at = now + RECOVER_AGAIN_SECONDS
        has_failed = False
        for child in self.dead.copy():
            try:
                self.recover(child)
            except Exception as error:  # noqa: BLE001 - it is logged, and the leases of the tasks expire at last
                connections.close_all()
                self._faults.note(error)
                has_failed = True
                if is_a(error, STORE_ERRORS) and not concerns_one_row(error):
                    return False
                continue
            self.dead.remove(child)
            self.memory.forget(child)
        if not has_failed:
            self._faults.clear()
        return not has_failed

    def recover(self, child: Child) -> None:
        """Recover the tasks of one dead process. Raises: BrokerUnavailable, django.db.Error."""
        # First, because a task that fails now is announced now.
        if child.slot_table.logs is not None and (logs := child.slot_table.logs.runs()):
            lifecycle.record_lines_of_dead(logs)
        reason, blamed = describe_death(child, self.memory), blame(child)
        # First: Redis may still hand a task to the dead worker's blocked connection.
        self.broker.stop_handoff(child.worker_id)
        # Read again: the known names may be 5 s old, and the worker may have claimed a task of a newer queue.

        def recover_queue(queue: str) -> None:
            self.broker.requeue_moved(queue, child.worker_id)
            leases = self.broker.held(queue, child.worker_id)
            if not leases:
                return
            recovered = lifecycle.recover(
                self.broker,
                queue,
                child.worker_id,
                leases,
                reason=reason,
                blame=blamed,
                timed_out=_cancelled(child.cancelled) | _timed_out(child.overdue),
                stack=child.stack,
            )
            logger.info("worker %s: tasks recovered in queue %s: %d", child.worker_id, queue, recovered)

        in_turn(self.options.queues or sorted(self.broker.queues()), recover_queue)


def _cancelled(ids: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
    """Return the error, by id, of cancelled tasks that did not stop. They are not retried."""
    text = "the task was cancelled and did not stop when asked; its process was replaced"
    return {id: (TaskCancelled(text), None) for id in ids}


def _timed_out(overdue: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
    """Return the error and the time of the retry, by id, of tasks that overran their timeout."""
    decided: dict[str, tuple[BaseException, datetime | None]] = {}
    for id, record in lifecycle.load_rows(sorted(overdue)).items():
        now = database_clock.now()
        is_past_deadline = record.deadline is not None and record.deadline <= now
        passed = timeout_text(record, by_deadline=is_past_deadline)
        error = TaskTimeout(f"{passed} and did not stop when asked; its process was replaced")
        try:
            judgement = judge_failure(registered(record.name), record, error, now)
        except TaskNotRegistered:
            judgement = Judgement(error, None)
        decided[id] = (judgement.exception, judgement.retry_at)
    return decided
