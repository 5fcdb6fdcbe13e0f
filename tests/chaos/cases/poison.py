"""Tasks that take their worker process down, beside healthy ones."""

from __future__ import annotations

import time
from functools import partial

from ..rig import Fleet, Report, Rig

SLOTS = 8
LEAST_SHARE = 0.5


def poisoned(rig: Rig, report: Report, scale: float) -> None:
    """Run 1,000 tasks of 1 s beside 20 that kill their process, in 8 slots; then tasks of 5 s in one process."""
    healthy, poisons = max(40, round(1000 * scale)), max(2, round(20 * scale))
    with rig.redis():
        with rig.fleet(2, SLOTS // 2) as fleet:
            _run(rig, report, fleet, "2 processes", healthy, poisons, ms=1000.0)
        with rig.fleet(1, SLOTS) as fleet:
            _run(
                rig, report, fleet, "1 process", healthy // 5, max(1, poisons // 4), ms=5000.0 if scale >= 1 else 1000.0
            )
        rig.check(report)


def _run(rig: Rig, report: Report, fleet: Fleet, name: str, healthy: int, poisons: int, *, ms: float) -> None:
    """Run one mixture, and look at what became of its tasks and how long they took."""
    from django_asyncq.models import TaskRecord, TaskState

    from .. import tasks

    rig.wait_ready(fleet, 1)
    began = time.monotonic()
    ids: dict[str, list[str]] = {"work": [], "poison": []}
    for number in range(poisons):
        count = healthy // poisons + (number < healthy % poisons)
        # First, so that healthy ones begin beside it and are still running when it kills their process.
        ids["poison"].append(str(tasks.poison.enqueue(ms / 2).id))
        some = tasks.work.enqueue_many([(ms,)] * count)
        ids["work"] += [str(result.id) for result in some]
        rig.note("committed", ids=[*(str(result.id) for result in some), ids["poison"][-1]])
    ideal_seconds = healthy * ms / 1000 / SLOTS
    report.goal(f"{name}: settled", int(rig.settle(60 + 10 * ideal_seconds)), at_least=1)
    rows = TaskRecord.objects.filter(id__in=ids["work"])
    last = max(rows.exclude(finished_at=None).values_list("finished_at", flat=True))
    seconds = (last - min(rows.values_list("enqueued_at", flat=True))).total_seconds()
    report.figure(f"{name}: all over after s", time.monotonic() - began)
    report.goal(f"{name}: healthy failed", rows.filter(state=TaskState.FAILED).count(), at_most=0)
    report.goal(f"{name}: crashes of healthy", rows.filter(crash_count__gt=0).count(), at_most=0)
    report.figure(f"{name}: healthy run in quarantine", sum("alone" in str(row.worker_ids[-1:]) for row in rows))
    failed = TaskRecord.objects.filter(id__in=ids["poison"], state=TaskState.FAILED, crash_count=3)
    report.goal(f"{name}: poison failed", failed.count(), at_least=poisons)
    # In the short form most of the time is that of the starts of processes, which says nothing of the share.
    share = partial(report.goal, at_least=LEAST_SHARE) if report.scale >= 1 else report.figure
    share(f"{name}: share of full throughput", ideal_seconds / seconds)
