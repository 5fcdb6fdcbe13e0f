"""One of the producers of `test_gate`: enqueues at one gate for some seconds and finishes each task after a moment.

"in" is written after the slot is acquired and before the row; "out" after the outcome of the row and before the slot is
released. So the history covers every instant at which the row is QUEUED or RUNNING, and only instants at which the slot
is held.
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
    of_tasks: Any, records: list[TaskRecord], *, mode: str, seconds: int, again: bool = False
) -> gates.Admission:
    """Stand in for `admit`, as the mutant: check first, then add."""
    client, name = broker.Broker("producer").client, of_tasks[0].name
    key = gates.keys(name)[0]
    occupancy = client.zcard(key)
    limit = records[0].queue_limit or 0
    if occupancy >= limit and client.zscore(key, str(records[0].id)) is None:
        raise QueueFull(gate=name, limit=limit, occupancy=occupancy, retry_after=1)
    client.zadd(key, {str(record.id): int(time.time()) + 3600 for record in records})
    return gates.Admission({}, set(), limit, occupancy, 1.0, 0)


def finish(record: TaskRecord) -> None:
    """Take the task through RUNNING to SUCCEEDED as a worker does, which can claim it only after the push."""
    lifecycle.flush_pushes()
    run = lifecycle.Run(record, broker.Lease(str(record.id), record.fence + 1))
    lifecycle.begin(run, "producer", timezone.now())
    lifecycle.succeed(run, None, timezone.now())
    lifecycle.record_runs([run])
    tasks.note("out")
    broker.Broker("producer").remove(record.queue_name, [str(record.id)])
    lifecycle.announce([record], TaskState.RUNNING, TaskState.SUCCEEDED)


def note_entry(**kwargs: Any) -> None:
    """Note that the task is in: called after the gate's receiver has acquired the slot."""
    tasks.note("in")


def main(seconds: float, limit: int) -> None:
    """Enqueue for this many seconds."""
    task_state_changing.connect(note_entry)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            result = tasks.gated.using(queue_limit=limit).enqueue("load")
        except QueueFull:
            time.sleep(random.uniform(0, 0.002))
            continue
        time.sleep(random.uniform(0, 0.01))
        finish(TaskRecord.objects.get(id=result.id))


if __name__ == "__main__":
    if "--mutant" in sys.argv:
        gates.admission.admit = naive_admit  # type: ignore[assignment]
    main(float(sys.argv[1]), int(sys.argv[2]))
