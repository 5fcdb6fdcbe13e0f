"""Who listens inside the app: the gate takes and gives back its slots here; changed rows take effect at once."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models.signals import post_delete, post_save, pre_save
from django.dispatch import receiver

from . import gates, lifecycle
from .broker import Broker
from .broker.scheduler_entries import forget_events
from .exceptions import BrokerUnavailable
from .models import Gate, Schedule, TaskRecord, TaskState
from .signals import task_state_changed, task_state_changing

logger = logging.getLogger("django_asyncq.receivers")


@receiver(task_state_changing, dispatch_uid="django_asyncq.acquire_gate_slots")
def acquire_gate_slots(
    *, records: list[TaskRecord], old: TaskState | None, partial: bool, timed: bool, **kwargs: Any
) -> set[UUID]:
    """Take a slot for each task that is about to be queued. Raises: QueueFull, GateUnavailable, UnknownGate."""
    return gates.acquire(records, partial=partial, again=old is not None, timed=timed)


@receiver(task_state_changed, dispatch_uid="django_asyncq.release_gate_slots")
def release_gate_slots(*, records: list[TaskRecord], new: TaskState, **kwargs: Any) -> None:
    """Give the slots of tasks back that are neither queued nor running any more."""
    if new not in gates.LIVE_STATES:
        gates.release(records)


@receiver(post_delete, sender=TaskRecord, dispatch_uid="django_asyncq.forget_deleted_task")
def forget_deleted_task(*, instance: TaskRecord, **kwargs: Any) -> None:
    """Take a deleted task out of Redis and give its slot back."""
    lifecycle.follow_deletion([instance])


@receiver(pre_save, sender=Gate, dispatch_uid="django_asyncq.remember_gate_name")
def remember_gate_name(*, instance: Gate, using: str, **kwargs: Any) -> None:
    """Note the name a gate had before: its limit ends with a renaming."""
    old = Gate.objects.using(using).filter(pk=instance.pk).values_list("name", flat=True)
    instance.former_names = {*old, instance.name}


@receiver([post_save, post_delete], sender=Gate, dispatch_uid="django_asyncq.publish_gate")
def publish_gate(*, instance: Gate, using: str, **kwargs: Any) -> None:
    """Let a changed limit take effect at once: the gate is built anew at its next use."""
    names = {instance.name, *instance.former_names}

    def publish() -> None:
        for name in names:
            try:
                gates.forget_built(name)
            except BrokerUnavailable as error:
                logger.warning("gate %s: the new limit takes effect when Redis is back: %s", name, error)

    transaction.on_commit(publish, using=using, robust=True)


@receiver([post_save, post_delete], sender=Schedule, dispatch_uid="django_asyncq.publish_schedule")
def publish_schedule(*, using: str, **kwargs: Any) -> None:
    """Let a changed schedule take effect at once: who sleeps until the next tick looks again."""

    def publish() -> None:
        try:
            Broker("producer").notify_due()
        except BrokerUnavailable as error:
            logger.warning("the changed schedule is noticed within seconds, not at once: %s", error)

    transaction.on_commit(publish, using=using, robust=True)


@receiver(post_delete, sender=Schedule, dispatch_uid="django_asyncq.forget_schedule")
def forget_schedule(*, instance: Schedule, using: str, **kwargs: Any) -> None:
    """Remove what asynq's tools list of a deleted schedule."""
    entry_id = str(instance.pk)

    def forget() -> None:
        try:
            forget_events(entry_id)
        except BrokerUnavailable as error:
            logger.warning("the events of schedule %s stay in Redis: %s", entry_id, error)

    transaction.on_commit(forget, using=using, robust=True)
