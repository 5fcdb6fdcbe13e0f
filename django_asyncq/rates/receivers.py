"""A changed Rate row takes effect at once: Redis counts by its numbers from the commit on."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from ..core.aliases import is_redis_used
from ..core.guard import get_logger
from ..exceptions import BrokerUnavailable
from ..models import Rate
from .counting import forget_built

logger = get_logger("django_asyncq.rates")


def remember_rate_name(*, instance: Rate, using: str, **kwargs: Any) -> None:
    """Remember the name that the rate had before: after a renaming the old name has no row."""
    old = Rate.objects.using(using).filter(pk=instance.pk).values_list("name", flat=True)
    instance.former_names = {*old, instance.name}


def publish_rate(*, instance: Rate, using: str, **kwargs: Any) -> None:
    """Have the rate built again at its next use, and what waits placed anew by the leader."""
    if not is_redis_used():
        return
    names = {instance.name, *instance.former_names}

    def publish() -> None:
        for name in names:
            try:
                forget_built(name)
            except BrokerUnavailable as error:
                text = "rate %s: the change takes effect within a minute after Redis is reachable again: %s"
                logger.warning(text, name, error)

    transaction.on_commit(publish, using=using, robust=True)
