"""When a call of a task can no longer begin, and when its run must have finished: `expires` and `deadline`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from django.utils import timezone

from ..exceptions import InvalidOption
from .moments import checked_moment, moment_after


class TimeLimits(NamedTuple):
    """The limits of one call, for its row; None for none. expires_at: also the deadline, if that is earlier."""

    expires_at: datetime | None = None
    deadline: datetime | None = None


def limits_of(task: Any, clock: Callable[[], datetime]) -> TimeLimits:
    """Return the limits of a call that is enqueued now. clock: returns the database's time; asked only if needed.

    A duration counts from `run_after`, or else from now.
    Raises: InvalidOption for a limit that is over already, or before `run_after`.
    """
    if task.expires is None and task.deadline is None:
        return TimeLimits()
    now = clock()
    begins_at = now if task.run_after is None else max(now, _like(now, task.run_after))
    deadline = None if task.deadline is None else _like(now, checked_moment("deadline", task.deadline))
    if task.expires is None or isinstance(task.expires, datetime):
        expires_at = None if task.expires is None else _like(now, checked_moment("expires", task.expires))
    else:
        expires_at = moment_after("expires", begins_at, task.expires)
    for name, moment in (("expires", expires_at), ("deadline", deadline)):
        if moment is not None and moment <= begins_at:
            past = "is over already" if moment <= now else "is not after its run_after, so it could never begin"
            raise InvalidOption(f"task {task.module_path}: {name}={moment.isoformat()} {past}: give a later time")
    return TimeLimits(min(filter(None, (expires_at, deadline)), default=None), deadline)


def _like(now: datetime, moment: datetime) -> datetime:
    """Return a moment with or without a time zone, as `now` has one or not."""
    if timezone.is_aware(now):
        return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    return timezone.make_naive(moment) if timezone.is_aware(moment) else moment
