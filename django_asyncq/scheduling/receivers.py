"""Receivers of changed and of deleted schedules; the app connects them."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from ..broker import Broker
from ..broker.servers import forget_events
from ..core.aliases import DEFAULT_ALIAS, is_redis_used
from ..core.guard import get_logger
from ..exceptions import BrokerUnavailable
from ..models import Schedule

logger = get_logger("django_asyncq.scheduling.receivers")


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
