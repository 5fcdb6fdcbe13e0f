"""Rows of limits that Redis counts by: a change is published after its commit, under each name of the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import transaction

from ..core.aliases import is_redis_used
from ..core.guard import GuardedLogger
from ..exceptions import BrokerUnavailable


def remember_name(*, instance: Any, using: str, **kwargs: Any) -> None:
    """Remember the name that a row had before: after a renaming the old name has no row."""
    old = type(instance).objects.using(using).filter(pk=instance.pk).values_list("name", flat=True)
    instance.former_names = {*old, instance.name}


def publish_after_commit(
    instance: Any, using: str, publish: Callable[[str], None], logger: GuardedLogger, text: str
) -> None:
    """Call `publish` with each name of a changed row. text: what to log where Redis is unreachable: name and error."""
    if not is_redis_used():
        return
    names = {instance.name, *instance.former_names}

    def publish_all() -> None:
        for name in names:
            try:
                publish(name)
            except BrokerUnavailable as error:
                logger.warning(text, name, error)

    transaction.on_commit(publish_all, using=using, robust=True)
