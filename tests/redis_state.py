"""What tests ask of Redis in many places."""

from __future__ import annotations

from collections.abc import Iterable

from django_asyncq.broker.sweeping import Sweeping


def unknown(ids: Iterable[object], queue: str = "default") -> list[str]:
    """Return the ids of which Redis has no task, in the order given."""
    return [task.id for task in Sweeping("worker").standings(queue, [str(id) for id in ids]) if not task.state]
