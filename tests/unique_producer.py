"""One of the producers of `test_unique_races`: enqueues with one key for some seconds and finishes each task at once.

"in" is written once the row is committed, and "out" before the UPDATE that frees the slot. So what the history shows
of one row lies within the time in which it holds the slot, and no two may overlap.
"""

from __future__ import annotations

import sys
import time

import django

django.setup()

from django.db import OperationalError  # noqa: E402
from django.utils import timezone  # noqa: E402

from django_asyncq import DuplicateTask, broker, lifecycle  # noqa: E402
from django_asyncq.models import TaskRecord  # noqa: E402
from django_asyncq.storage.errors import ErrorKind, kind_of  # noqa: E402
from tests import tasks, unique_tasks  # noqa: E402


def record(run: lifecycle.Run) -> list[lifecycle.Run]:
    """Write the outcome; after a deadlock once more, as the reporter does. InnoDB has them with the INSERT of a key."""
    while True:
        try:
            return lifecycle.record_runs([run])
        except OperationalError as error:
            if kind_of(error) is not ErrorKind.AGAIN:
                raise


def main(seconds: float) -> None:
    """Enqueue for this many seconds, and until five tasks were accepted."""
    deadline, accepted = time.monotonic() + seconds, 0
    while time.monotonic() < deadline or accepted < 5:
        try:
            result = unique_tasks.report.enqueue(1)
        except DuplicateTask:
            continue
        except OperationalError as error:
            if kind_of(error) is not ErrorKind.AGAIN:
                raise
            continue
        tasks.note("in", id=result.id)
        accepted += 1
        row = TaskRecord.objects.get(id=result.id)
        run = lifecycle.Run(row, broker.Lease(result.id, row.fence + 1))
        lifecycle.begin(run, "producer", timezone.now())
        lifecycle.succeed(run, None, timezone.now())
        tasks.note("out", id=result.id)
        assert not record(run)


if __name__ == "__main__":
    main(float(sys.argv[1]))
