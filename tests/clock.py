"""A clock for tests that must not wait, and the ids of tasks that were enqueued at another time."""

from __future__ import annotations

import os
from datetime import datetime
from uuid import UUID

from django_asyncq.core.names import lowest_uuid7_at


def uuid7_at(moment: datetime) -> UUID:
    """Return the id of a task that was enqueued at a moment; another one in each call."""
    return UUID(int=lowest_uuid7_at(moment).int | int.from_bytes(os.urandom(7)))


class Clock:
    """Seconds that pass only when a test moves them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now
