"""A process of `test_clocks` with a wrong clock: it does what its first argument says."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import django

django.setup()

from django.utils import timezone  # noqa: E402

from django_asyncq import gates  # noqa: E402
from django_asyncq.models import TaskRecord  # noqa: E402
from tests import tasks  # noqa: E402


def enqueue() -> dict[str, str]:
    """Enqueue a plain task."""
    result = tasks.nap.enqueue(0)
    return {"id": result.id, "shown": str(result.enqueued_at), "host": str(timezone.now())}


def delay() -> dict[str, str]:
    """Enqueue a task that is to run in 100 seconds."""
    return {"id": tasks.nap.using(run_after=timedelta(seconds=100)).enqueue(0).id, "host": str(timezone.now())}


def audit() -> dict[str, str]:
    """Audit a gate."""
    return {"drift": str(tuple(gates.audit(sys.argv[2]))), "host": str(timezone.now())}


def begin() -> dict[str, str]:
    """Return the time that a worker would write."""
    from django_asyncq.storage import database_clock

    return {"now": str(database_clock.now()), "rows": str(TaskRecord.objects.count()), "host": str(timezone.now())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
