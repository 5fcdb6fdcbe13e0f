"""Receivers of deleted tasks, of changed schedules and of migrations. Those of gates are in `gates.receivers`."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models.signals import post_delete, post_migrate, post_save
from django.dispatch import receiver

from . import lifecycle
from .aliases import is_redis_used
from .broker import Broker
from .broker.scheduler_entries import forget_events
from .exceptions import BrokerUnavailable
from .guard import get_logger
from .models import Schedule, TaskRecord
from .prefixes import DEFAULT_ALIAS
from .storage import identity
from .storage.routing import writing_database

logger = get_logger("django_asyncq.receivers")


@receiver(post_delete, sender=TaskRecord, dispatch_uid="django_asyncq.forget_deleted_task")
def forget_deleted_task(*, instance: TaskRecord, using: str, **kwargs: Any) -> None:
    """Remove a deleted task from Redis and release its gate slot."""
    lifecycle.follow_deletion([instance], using)


@receiver([post_save, post_delete], sender=Schedule, dispatch_uid="django_asyncq.publish_schedule")
def publish_schedule(*, using: str, **kwargs: Any) -> None:
    """Make a changed schedule take effect at once: wake the scheduler, which sleeps until the next occurrence."""
    if not is_redis_used():
        return

    def publish() -> None:
        try:
            Broker("producer", DEFAULT_ALIAS).notify_due()
        except BrokerUnavailable as error:
            logger.warning("the changed schedule takes effect within seconds, not at once: %s", error)

    transaction.on_commit(publish, using=using, robust=True)


@receiver(post_delete, sender=Schedule, dispatch_uid="django_asyncq.forget_schedule")
def forget_schedule(*, instance: Schedule, using: str, **kwargs: Any) -> None:
    """Remove the events of a deleted schedule that asynq's tools list."""
    if not is_redis_used():
        return
    entry_id = str(instance.pk)

    def forget() -> None:
        try:
            forget_events(entry_id)
        except BrokerUnavailable as error:
            logger.warning("the events of schedule %s stay in Redis: %s", entry_id, error)

    transaction.on_commit(forget, using=using, robust=True)


@receiver(post_migrate, dispatch_uid="django_asyncq.give_identity")
def give_identity(*, app_config: Any, using: str, **kwargs: Any) -> None:
    """Give a migrated database its identity; restore that of a flushed one, if this process knows it.

    A flush by another process leaves that to a supervisor, which may be running and knows it.
    """
    if app_config.name != "django_asyncq" or using != writing_database(TaskRecord):
        return
    # `flush` sends the signal without a plan.
    if ("plan" in kwargs or identity.known() is not None) and identity.has_table():
        identity.ensure()
