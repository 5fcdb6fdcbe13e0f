"""One of the producers of `test_gate`: enqueues at one gate for some seconds and ends each task after a moment.

"in" is written between taking the slot and writing the row, "out" between the row's end and giving the slot back: the
history covers every instant at which the row is in 0 or 1, and none at which the slot is not held.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import django

django.setup()

from django.utils import timezone  # noqa: E402

from django_asyncq import QueueFull, broker, gates, lifecycle  # noqa: E402
from django_asyncq.models import TaskRecord, TaskState  # noqa: E402
from django_asyncq.signals import task_state_changing  # noqa: E402
from tests import tasks  # noqa: E402


def naive_admit(
    name: str, records: list[TaskRecord], *, partial: bool, seconds: int, again: bool = False
) -> gates.Admission:
    """The mutant: look, then add."""
    client = broker.Broker("producer").client
    key = gates.keys(name)[0]
    occupancy = client.zcard(key)
    limit = records[0].queue_limit or 0
    if occupancy >= limit and client.zscore(key, str(records[0].id)) is None:
        raise QueueFull(gate=name, limit=limit, occupancy=occupancy, retry_after=1)
    client.zadd(key, {str(record.id): int(time.time()) + 3600 for record in records})
    return gates.Admission(set(), limit, occupancy, 1.0)


def end(record: TaskRecord) -> None:
    """Take the task through 1 to 2, as a worker does: it cannot have what was not pushed yet."""
    lifecycle.flush_pushes()
    run = lifecycle.Run(record, broker.Lease(str(record.id), record.fence + 1))
    lifecycle.begin(run, "producer", timezone.now())
    lifecycle.succeed(run, None, timezone.now())
    lifecycle.record_runs([run])
    tasks.note("out")
    broker.Broker("producer").remove(record.queue_name, [str(record.id)])
    lifecycle.announce([record], TaskState.RUNNING, TaskState.SUCCEEDED)


def note_entry(**kwargs: Any) -> None:
    """Called once the gate's receiver has taken the slot."""
    tasks.note("in")


def main(seconds: float, limit: int) -> None:
    """Enqueue until the time is over."""
    task_state_changing.connect(note_entry)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            result = tasks.gated.using(queue_limit=limit).enqueue("load")
        except QueueFull:
            time.sleep(random.uniform(0, 0.002))
            continue
        time.sleep(random.uniform(0, 0.01))
        end(TaskRecord.objects.get(id=result.id))


if __name__ == "__main__":
    if "--mutant" in sys.argv:
        gates.admit = naive_admit  # type: ignore[assignment]
    main(float(sys.argv[1]), int(sys.argv[2]))
