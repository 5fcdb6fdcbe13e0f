"""A web process of `test_mixed_versions`: enqueues tasks of each kind, round after round, until its stdin is closed.

`python -P` runs this file with PYTHONPATH at the tree of a version, so it uses the package and the tasks of that: only
public names, and tasks that older trees have. After each round it prints the ids of each kind, as JSON.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import django

django.setup()

from django.utils import timezone  # noqa: E402

from django_asyncq import DuplicateTask, QueueFull  # noqa: E402
from django_asyncq.models import Schedule  # noqa: E402
from tests import batch_tasks, tasks  # noqa: E402

# Long enough that some are enqueued while the old workers run, and run by the new ones.
DELAY = timedelta(seconds=3)
PAUSE_SECONDS = 0.2


def accepted(enqueue: Callable[[], Any], times: int) -> list[str]:
    """Call this often; return the ids of what was accepted, with "" for each refusal.

    "in" is written once the task is admitted; what it has acquired is released after the end of its run.
    """
    ids = []
    for _ in range(times):
        try:
            id = enqueue().id
        except (QueueFull, DuplicateTask):
            ids.append("")
        else:
            tasks.note("in", id=id)
            ids.append(id)
    return ids


def enqueue_round(name: str, number: int, gate: str, limit: int) -> dict[str, list[str]]:
    """Enqueue some tasks of each kind; return their ids."""
    gated = tasks.gated_and_fails_once.using(queue_limit=limit)
    unique = tasks.nap.using(unique=True)
    return {
        "plain": [tasks.stamp.enqueue().id for _ in range(4)],
        "delayed": [tasks.stamp.using(run_after=DELAY).enqueue().id],
        "retried": [tasks.fail_until.enqueue(2).id],
        "batched": [batch_tasks.per_account.enqueue(number=2 * number + each, account=name).id for each in range(2)],
        "gated": accepted(lambda: gated.enqueue(gate, 0.1), limit + 1),
        "unique": accepted(lambda: unique.enqueue(0.2), 2),
    }


def main(name: str, gate: str, limit: int) -> None:
    """Enqueue until stdin is closed. The old version makes a schedule first."""
    if name == "old":
        Schedule.objects.create(
            name="mixed",
            task="tests.tasks.stamp",
            interval_seconds=1,
            missed="all",
            missed_cap=100,
            next_occurrence_at=timezone.now(),
        )
    number = 0
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        print(json.dumps(enqueue_round(name, number, gate, limit)), flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
