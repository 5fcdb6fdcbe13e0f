"""Signals acquire and release the slots: the receivers of a task's state and of a changed Gate row.

The app imports it when it is ready. Whether a committed row may be pushed is not decided here: `lifecycle.dispatching`
calls `gates.confirm` for that.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models.signals import post_delete, post_save, pre_save
from django.dispatch import receiver

from ..aliases import is_redis_used
from ..exceptions import BrokerUnavailable
from ..guard import get_logger
from ..models import Gate, Pause, PauseKind, TaskRecord, TaskState
from ..signals import task_state_changed, task_state_changing
from .admission import acquire, forget_waiting, release
from .audit import LIVE_STATES
from .members import forget_built

logger = get_logger("django_asyncq.gates")


@receiver(task_state_changing, dispatch_uid="django_asyncq.acquire_gate_slots")
def acquire_gate_slots(
    *, records: list[TaskRecord], old: TaskState | None, partial: bool, timed: bool, **kwargs: Any
) -> set[UUID]:
    """Acquire a slot for each task that is about to be queued. Raises: QueueFull, GateUnavailable, UnknownGate."""
    return acquire(records, partial=partial, again=old is not None, timed=timed)


@receiver(task_state_changed, dispatch_uid="django_asyncq.release_gate_slots")
def release_gate_slots(*, records: list[TaskRecord], old: TaskState | None, new: TaskState, **kwargs: Any) -> None:
    """Release the slots of tasks that are no longer queued or running."""
    if new not in LIVE_STATES:
        release(records)
    if old == new == TaskState.FAILED:
        # It was closed while it was RETRYING. It may have waited at its gate, where a place keeps others out.
        forget_waiting(records)


@receiver(pre_save, sender=Gate, dispatch_uid="django_asyncq.remember_gate_name")
def remember_gate_name(*, instance: Gate, using: str, **kwargs: Any) -> None:
    """Remember the name that the gate had before: after a renaming the old name has no limit."""
    old = Gate.objects.using(using).filter(pk=instance.pk).values_list("name", flat=True)
    instance.former_names = {*old, instance.name}


@receiver([post_save, post_delete], sender=Gate, dispatch_uid="django_asyncq.publish_gate")
def publish_gate(*, instance: Gate, using: str, **kwargs: Any) -> None:
    """Make a changed limit take effect at once: the gate is rebuilt at its next use."""
    _rebuild_after_commit({instance.name, *instance.former_names}, using)


@receiver([post_save, post_delete], sender=Pause, dispatch_uid="django_asyncq.publish_paused_gate")
def publish_paused_gate(*, instance: Pause, using: str, **kwargs: Any) -> None:
    """Make a pause of a gate, or its end, take effect at once: the gate is rebuilt at its next use."""
    if instance.kind == PauseKind.GATE:
        _rebuild_after_commit({instance.name}, using)


def _rebuild_after_commit(names: Collection[str], using: str) -> None:
    if not is_redis_used():
        return

    def publish() -> None:
        for name in names:
            try:
                forget_built(name)
            except BrokerUnavailable as error:
                logger.warning("gate %s: the change takes effect when Redis is reachable again: %s", name, error)

    transaction.on_commit(publish, using=using, robust=True)
