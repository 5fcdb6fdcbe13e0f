"""Tasks of a fleet that shares queues with other programs. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import time

from django_asyncq import remote, task
from django_asyncq.context import TaskContext


@task(wire_name="fleet:ours", takes_context=True, max_attempts=5, backoff=0)
def ours(context: TaskContext, number: int, fails: bool = False, seconds: float = 0.0) -> dict[str, int]:
    """Leave a line in the history; fail at the first attempt if asked to."""
    # Registered with them.
    from .tasks import note

    note("ran", number=number, attempt=context.attempt, type=context.wire_type)
    time.sleep(seconds)
    if fails and context.attempt == 1:
        raise ValueError("as it was asked to")
    return {"number": number}


# Run by another program only.
elsewhere = remote("go:remote", queue_name="shared", max_attempts=30)
