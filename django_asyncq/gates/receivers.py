"""Signals acquire and release the slots: the receivers of a task's state and of a changed Gate row.

The app connects them when it is ready, so before those of the apps behind it. Whether a committed row may be pushed is
not decided here: `lifecycle.dispatching` calls `gates.confirm` for that.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from ..core.guard import get_logger
from ..models import Gate, TaskRecord, TaskState
from ..storage.publishing import publish_after_commit
from .admission import acquire, forget_waiting, release
from .auditor import LIVE_STATES
from .members import forget_built

logger = get_logger("django_asyncq.gates")


def acquire_gate_slots(
    *, records: list[TaskRecord], old: TaskState | None, partial: bool, timed: bool, **kwargs: Any
) -> set[UUID]:
    """Acquire a slot for each task that is about to be queued. Raises: QueueFull, GateUnavailable, UnknownGate."""
    # What waits for other tasks asks its gate when it waits for none any more (`lifecycle.children`).
    records = [record for record in records if not record.waits_for]
    return acquire(records, partial=partial, again=old is not None, timed=timed)


def release_gate_slots(*, records: list[TaskRecord], old: TaskState | None, new: TaskState, **kwargs: Any) -> None:
    """Release the slots of tasks that are no longer queued or running; an ordered one keeps it until it is retried."""
    if new not in LIVE_STATES:
        release([record for record in records if not record.holds_slot])
    if new == TaskState.FAILED and old in (TaskState.QUEUED, TaskState.FAILED):
        # It was closed before it ran. It may have waited at its gate, where a place keeps others out.
        forget_waiting([record for record in records if record.is_final])


def publish_gate(*, instance: Gate, using: str, **kwargs: Any) -> None:
    """Make a changed limit take effect at once: the gate is rebuilt at its next use."""
    text = "gate %s: the change takes effect when Redis is reachable again: %s"
    publish_after_commit(instance, using, forget_built, logger, text)
