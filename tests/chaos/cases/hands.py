"""Interventions from outside: rows changed by SQL, killed connections, and many failures at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import redis
from django.utils import timezone

from tests.workers import wait_until

from .. import checker
from ..rig import Fleet, Report, Rig

# A worker that has claimed the task may be about to begin it when the row is deleted.
BEGUN_SECONDS = 0.5


def edited(rig: Rig, report: Report, scale: float) -> None:
    """Delete, fail, succeed or requeue 400 QUEUED and RUNNING rows by SQL, under load."""
    times = max(24, round(400 * scale))
    # The entry of a deleted row is archived by the first worker that meets it, not after ten minutes.
    rig.more["ASYNCQ_TEST_PATIENCE"] = "0"
    with rig.redis(), rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        loads = [
            rig.producer("load", times * 4, 600, 40, rig.seed),
            rig.producer("load", times, 600, 40, rig.seed + 1, "edited"),
        ]
        wait_until(lambda: rig.count("begin") > 4, "tasks that run", 30)
        done: Counter[str] = Counter()
        while done.total() < times:
            kind = ("deleted", "failed", "succeeded", "requeued")[done.total() % 4]
            done[kind] += _edit(rig, kind)
            time.sleep(rig.random.uniform(0, 0.1))
        rig.ended_well(*loads)
        rig.settle(120)
        report.goal("edits", done.total(), at_least=times)
        deleted = {id: line["at"] for line in rig.history() if line["event"] == "deleted" for id in line["ids"]}
        rig.check(report, agreement_seconds=25, deleted=deleted)
    begins = [line for line in rig.history() if line["event"] == "begin" and line["id"] in deleted]
    late = [line for line in begins if line["at"] > deleted[line["id"]] + BEGUN_SECONDS]
    report.goal("deleted and begun afterwards", len(late), at_most=0)


def _edit(rig: Rig, kind: str) -> int:
    """Change one row by SQL, without signals and fence; return how many rows changed."""
    from django_asyncq.models import FailureReason, TaskRecord, TaskState

    states = (TaskState.QUEUED, TaskState.RUNNING) if kind == "deleted" else (TaskState.RUNNING,)
    ids = list(TaskRecord.objects.filter(state__in=states).values_list("id", flat=True)[:20])
    if not ids:
        return 0
    id = rig.random.choice(ids)
    row = TaskRecord.objects.filter(id=id, state__in=states)
    now = timezone.now()
    if kind == "deleted":
        changed = row._raw_delete(row.db)
        if changed:
            rig.note("deleted", ids=[str(id)])
        return int(changed)
    if kind == "requeued":
        # A person who does this asks for a second run.
        rig.note("fault", kind="requeued", pids=[pid for fleet in rig.fleets for pid in fleet.workers()])
        return row.update(state=TaskState.QUEUED)
    if kind == "failed":
        final = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION}
    else:
        final = {"state": TaskState.SUCCEEDED}
    return row.update(**final, finished_at=now, retry_at=None)


def cut_off(rig: Rig, report: Report, scale: float) -> None:
    """Kill every connection to Redis each 20 ms for a minute, under load; then count files and connections."""
    seconds = max(5.0, 60 * scale)
    with rig.redis() as server, rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        rig.ended_well(rig.producer("bulk", 400, 10, rig.seed))
        wait_until(lambda: rig.settle(0), "a quiet start", 60)
        before = _open_files(fleet)
        load = rig.producer("load", round(seconds * 30), 20, 25, rig.seed + 1)
        kills = _kill_clients(server.client(), seconds)
        rig.ended_well(load)
        is_settled = rig.settle(60)
        report.goal("connections killed", kills, at_least=round(seconds * 10))
        report.goal("settled", int(is_settled), at_least=1)
        rig.check(report)
        report.figure("open files before", before)
        deadline = time.monotonic() + 10
        # A pool may have grown once by one connection for each slot.
        while (grown := _open_files(fleet) - before) > 8 and time.monotonic() < deadline:
            time.sleep(0.2)
        report.goal("open files more afterwards", grown, at_most=8)
        with server.client() as client:
            report.goal("connections at the end", len(client.client_list()), at_most=60)


def _open_files(fleet: Fleet) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (fleet.pid, *fleet.workers()))


def _kill_clients(client: redis.Redis, seconds: float) -> int:
    killed, deadline, pause = 0, time.monotonic() + seconds, threading.Event()
    with client:
        while time.monotonic() < deadline:
            killed += int(client.client_kill_filter(_type="normal", skipme=True))
            killed += int(client.client_kill_filter(_type="pubsub", skipme=True))
            pause.wait(0.02)
    return killed


def storm(rig: Rig, report: Report, scale: float) -> None:
    """Let 10,000 tasks fail at their first attempt: the delays are spread, and all second attempts succeed."""
    from django_asyncq.models import TaskRecord

    count = max(400, round(10_000 * scale)) // 200 * 200
    with rig.redis(), rig.fleet(2, 8):
        rig.ended_well(rig.producer("storm", count))
        delays: dict[str, float] = {}

        def has_seen_all() -> bool:
            rows = TaskRecord.objects.filter(retry_at__isnull=False, attempt=1)
            for id, at, since in rows.values_list("id", "retry_at", "last_attempted_at"):
                delays[str(id)] = (at - since).total_seconds()
            return len(delays) >= count * 0.5

        wait_until(has_seen_all, "tasks that wait for their retry", 120)
        rig.settle(240)
        rig.check(report)
    bins = Counter(round(delay * 10) for delay in delays.values())
    report.figure("delays seen", len(delays))
    report.figure("shortest s", min(delays.values()))
    report.figure("longest s", max(delays.values()))
    report.goal("most in 100 ms, %", round(100 * max(bins.values()) / len(delays), 1), at_most=5.0)
    begun = {id for (id, attempt) in checker.by_attempt(rig.history()) if attempt == 2}
    report.goal("second attempts", len(begun), at_least=count)
    report.goal("tasks failed", TaskRecord.objects.failed().count(), at_most=0)
