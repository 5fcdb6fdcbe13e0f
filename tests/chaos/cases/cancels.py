"""Cancels in every phase of a task's life, while workers are killed and Redis is emptied."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from typing import Any

from .. import checker
from ..checker import plain
from ..rig import Report, Rig

LIMIT = 5
# A body whose task a worker had when it was asked to stop may begin until the worker hears of it. No other one begins.
BEGUN_SECONDS = 1.0
# Where Redis was emptied at this moment, the reconciler asks again. Much less than a body takes that is not stopped.
STOPPED_SECONDS = 3.0


def cancelled(rig: Rig, report: Report, scale: float) -> None:
    """Cancel 200 tasks and more at a gate of 5, a fifth of them in each phase, under kills and FLUSHALL."""
    from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState

    from ..cancels import GATE, PHASES

    each = max(4, round(40 * scale))
    with rig.redis() as redis, rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        Gate.objects.create(name=GATE, limit=LIMIT, expected_seconds=1)
        rig.note("limit", gate=GATE, limit=LIMIT)
        producer = rig.producer("cancels", each, rig.seed)
        while producer.poll() is None:
            time.sleep(rig.random.uniform(1.0, 6.0))
            workers = fleet.ready()
            if rig.random.random() < 0.25:
                with redis.client() as client:
                    client.flushall()
                rig.note("fault", kind="FLUSHALL", pids=workers)
            elif workers:
                fleet.kill_worker(rig.random.choice(workers))
        rig.ended_well(producer)
        report.goal("settled", int(rig.settle(120)), at_least=1)
        rig.check(report)
        slots = sum(map(len, rig.slots().values()))
    history = rig.history()
    asked = {plain(line["id"]): line for line in history if line["event"] == "cancelled"}
    counts = Counter(line["phase"] for line in asked.values() if line["word"] != "over")
    for phase in PHASES:
        report.goal(phase, counts[phase], at_least=each)
    for kind in ("kill worker", "FLUSHALL"):
        report.figure(kind, rig.count_faults(kind))
    rows = {plain(str(row.id)): row for row in TaskRecord.objects.all()}
    closed = [rows[id] for id, line in asked.items() if line["word"] == "cancelled"]
    report.goal("succeeded after “cancelled”", sum(row.state == TaskState.SUCCEEDED for row in closed), at_most=0)
    report.goal("failed for another reason", sum(row.reason != FailureReason.CANCELLED for row in closed), at_most=0)
    report.goal("begun after the commit", len(_begun_late(history, asked)), at_most=0)
    report.goal("bodies over the limit", len(checker.over_limit(history)), at_most=0)
    report.goal("slots at the end", slots, at_most=0)
    for kind, seconds in sorted(_stopped_after(history, asked).items()):
        report.figure(f"{kind} stopped", len(seconds))
        report.figure(f"{kind} p95 s", sorted(seconds)[int(len(seconds) * 0.95)])
        report.goal(f"{kind} slowest s", max(seconds), at_most=STOPPED_SECONDS)


def _begun_late(history: list[dict[str, Any]], asked: dict[str, dict[str, Any]]) -> list[str]:
    """Return the tasks of which a body began after the commit of their cancel, or too long after a request to stop."""
    latest = {id: line["at"] + (0.0 if line["word"] == "cancelled" else BEGUN_SECONDS) for id, line in asked.items()}
    begins = [line for line in history if line["event"] == "begin" and plain(line["id"]) in latest]
    return [line["id"] for line in begins if line["at"] > latest[plain(line["id"])]]


def _stopped_after(history: list[dict[str, Any]], asked: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return how long after the commit each body went on that was running then, by kind of body.

    Until the kill of its worker at the latest; infinite for one that never ended and that no kill has hit.
    """
    kinds = {plain(line["id"]): line["kind"] for line in history if line["event"] == "begin" and "kind" in line}
    kills = [line for line in history if line["event"] == "fault" and line["kind"] == "kill worker"]
    killed_at = {pid: line["at"] for line in kills for pid in line["pids"]}
    found: dict[str, list[float]] = defaultdict(list)
    for run in checker.executions(history):
        id, ended_at = plain(run.id), run.ended_at or killed_at.get(run.pid, math.inf)
        if id in asked and run.began_at < asked[id]["at"] < ended_at:
            found[kinds[id]].append(ended_at - asked[id]["at"])
    return found
