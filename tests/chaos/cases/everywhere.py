"""Kills at each failpoint that a mixed load passes, under that load."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import connections
from django.utils import timezone

from tests.workers import wait_until

from .. import arming, checker
from ..log_lines import LEADS
from ..rig import Fleet, Report, Rig

# For new processes on a machine that does other work as well.
PATIENCE_SECONDS = 240

WORKER = (
    "claim.leased",
    "claim.rows_read",
    "begin.counted",
    "mark_running.row_written",
    "run.function_returned",
    "report.row_written",
    "acknowledge.queue_acknowledged",
    "report.acknowledged",
    "complete.row_written",
    "complete.committed",
    "postpone.put_aside",
    "requeue.row_written",
)
PRODUCER = (
    "build.gate_built",
    "enqueue.slot_acquired",
    "enqueue.row_inserted",
    "enqueue.committed",
    "dispatch.slots_confirmed",
    "dispatch.queue_pushed",
    "push_batch.collected",
    "enqueue.pushed",
    "broker.batch_sent",
    "park.row_written",
    "delete.committed",
)
SUPERVISOR = (
    "retry.slot_acquired",
    "retry.committed",
    "recover.row_written",
    "recover.redis_updated",
    "abandon.row_written",
    "prune.rows_deleted",
    "forward.retry_found",
    "reconcile.marked_alive",
    "reconcile.page_repaired",
    "reconcile.leases_recovered",
    "beat.leases_renewed",
    "reap.death_noticed",
    "fire.occurrences_written",
    "fire.committed",
    "start_up.row_written",
)
# What this load passes; `test_crash.py` kills at every point there is.
POINTS = (*WORKER, *PRODUCER, *SUPERVISOR)
# How often a process may pass before it dies; the others are brought about one by one, and die at the first.
OFTEN = {
    **dict.fromkeys(WORKER[:10], 6),
    "beat.leases_renewed": 6,
    "reconcile.leases_recovered": 2,
    "mark_running.row_written": 2,
}
REACHED_SECONDS = 20
TRIES = 3


def everywhere(rig: Rig, report: Report, scale: float) -> None:
    """Kill producers, workers and supervisors of three fleets, twenty times at each failpoint."""
    times = max(1, round(20 * scale))
    rig.more.update(
        {
            "ASYNCQ_TEST_SHUTDOWN_GRACE": "0.2",
            "ASYNCQ_TEST_PATIENCE": "0",
            "ASYNCQ_TEST_LOCK_TTL": "3",
            "ASYNCQ_CHAOS_SWEEP": "2",
            arming.VARIABLE: str(rig.folder / "arms"),
        }
    )
    with rig.redis(), rig.fleet() as one, rig.fleet() as two, rig.fleet() as three:
        schedule()
        fleets = [one, two, three]
        for fleet in fleets:
            rig.wait_ready(fleet, 2)
        loads = [rig.producer("mixed", 3600, 30, rig.seed + number) for number in range(2)]
        doomed = rig.producer("doomed", times, 500, rig.seed)
        killing = Killing(rig, fleets)
        workers = threading.Thread(target=killing.kill_workers, args=(times,))
        workers.start()
        killing.kill_supervisors(times)
        workers.join()
        killing.wait_for_orphans()
        rig.ended_well(doomed)
        killing.give_up_unknown()
        for load in loads:
            load.terminate()
            load.wait()
        unschedule()
        settled = rig.settle(10 if rig.mutant else PATIENCE_SECONDS)
        rig.note_rows()
        report.goal("settled", int(settled), at_least=1)
        rig.check(report, agreement_seconds=5 if rig.mutant else 25, deleted=_deleted(rig))
    _count(rig, report, times)


def _count(rig: Rig, report: Report, times: int) -> None:
    history = rig.history()
    kills = Counter(line["kind"] for line in history if line["event"] == "fault" and line["kind"] in POINTS)
    report.figure("points", len(POINTS))
    report.goal("kills", kills.total(), at_least=times * len(POINTS))
    report.goal("fewest at a point", min(kills[point] for point in POINTS), at_least=times)
    if short := [point for point in POINTS if kills[point] < times]:
        report.figure("points with fewer", ", ".join(short))
    most = {kind: runs for kind, runs in checker.most_executions(history).items() if kind in POINTS}
    report.figure("most executions of one attempt", max(most.values(), default=0))
    report.figure("at", ", ".join(sorted(kind for kind, runs in most.items() if runs == max(most.values()))))


def _deleted(rig: Rig) -> list[str]:
    return [id for line in rig.history() if line["event"] == "deleted" for id in line["ids"]]


class Killing:
    """Arm a point, provoke it, wait for the death, write it into the history, and replace the process."""

    def __init__(self, rig: Rig, fleets: list[Fleet]) -> None:
        self.rig = rig
        self.fleets = fleets
        self.arms = arming.Arms(rig.folder / "arms")
        # Each of the two threads draws from its own generator, so that a seed repeats the draws of both.
        self.chance = {role: random.Random(rig.seed + number) for number, role in enumerate(arming.ROLES)}
        self.children: dict[int, set[int]] = {}
        # Workers of dead supervisors that have not exited yet, each with the point at which its supervisor died.
        self.orphans: dict[int, str] = {}
        # Points that no process has reached in time: the report says so, and no more time is spent on them.
        self.missed: set[str] = set()

    # --- workers, by a thread of their own

    def kill_workers(self, times: int) -> None:
        """Kill workers; their supervisors replace them."""
        chance = self.chance["worker"]
        try:
            for point in self._turns(WORKER, times, chance):
                if point in self.missed:
                    continue
                wait_until(lambda: len(self._ready()) >= 3, "workers that are back", PATIENCE_SECONDS)
                pid = self._kill_surely("worker", point, self._provoke_worker)
                if pid is not None:
                    self.rig.note("fault", kind=point, pids=[pid])
        finally:
            connections.close_all()

    def _provoke_worker(self, point: str) -> None:
        if point == "postpone.put_aside":
            self._unknown_task()
        elif point == "requeue.row_written":
            # A worker that gets SIGTERM finishes short tasks and requeues the rest: this repeats no run.
            victim = self.chance["worker"].choice(self._busy() or self._ready() or [0])
            if victim:
                self.rig.note("fault", kind="SIGTERM worker", pids=[victim])
                self.rig.signal(signal.SIGTERM, victim)

    # --- supervisors

    def kill_supervisors(self, times: int) -> None:
        """Kill supervisors: half of the times with their workers, as if the host were lost."""
        for point in self._turns(SUPERVISOR, times, self.chance["supervisor"]):
            if point in self.missed:
                continue
            wait_until(
                lambda: len({fleet for fleet in self.fleets if fleet.ready()}) >= 2, "two fleets", PATIENCE_SECONDS
            )
            pid = self._kill_surely("supervisor", point, self._provoke_supervisor)
            if pid is not None:
                self._replace(next(fleet for fleet in self.fleets if fleet.pid == pid), point)

    def _replace(self, fleet: Fleet, kind: str) -> None:
        """Kill the workers of a dead supervisor or let them drain, write it into the history, and start another."""
        fleet.process.wait(10)
        children = sorted(self.children.get(fleet.pid, ()))
        if self.chance["supervisor"].random() < 0.5:
            for child in children:
                self.rig.signal(signal.SIGKILL, child)
        self.rig.note("fault", kind=kind, pids=[fleet.pid, *children])
        self.orphans.update(dict.fromkeys(children, kind))
        fleet.more.pop("ASYNCQ_TEST_STARTUP", None)
        fleet.start()

    def _provoke_supervisor(self, point: str) -> None:
        provoke: dict[str, Callable[[], object]] = {
            "reconcile.marked_alive": self._forget_alive,
            "reconcile.page_repaired": self._never_pushed,
            "abandon.row_written": self._unknown_run,
            "prune.rows_deleted": self._old_rows,
            "start_up.row_written": self._start_anew,
            "reap.death_noticed": self._kill_busy,
            "recover.row_written": self._kill_busy,
            "recover.redis_updated": self._kill_busy,
        }
        provoke.get(point, lambda: None)()

    # --- both

    @staticmethod
    def _turns(points: tuple[str, ...], times: int, chance: random.Random) -> list[str]:
        turns = [point for point in points for _ in range(times)]
        chance.shuffle(turns)
        return turns

    def _kill_surely(self, role: str, point: str, provoke: Callable[[str], None]) -> int | None:
        """Try again when no process reached the point in time: what provokes it may have met a dying process."""
        tries = 1 if self.rig.mutant else TRIES
        pid = next((pid for _ in range(tries) if (pid := self._kill(role, point, provoke)) is not None), None)
        if pid is None:
            self.missed.add(point)
        return pid

    def _kill(self, role: str, point: str, provoke: Callable[[str], None]) -> int | None:
        """Return the pid of the process that died at the point; None when none reached it, which counts as missed."""
        self._look()
        mark = self.arms.arm(role, point, self.chance[role].randint(1, OFTEN.get(point, 1)))
        again_at = 0.0
        deadline = time.monotonic() + (4 if self.rig.mutant else REACHED_SECONDS)
        try:
            while (pid := arming.victim_of(mark)) is None and (now := time.monotonic()) < deadline:
                if now >= again_at:
                    again_at = now + 5
                    provoke(point)
                if role == "supervisor":
                    self._look()
                time.sleep(0.02)
            return pid
        finally:
            self.arms.disarm(role)

    def _look(self) -> None:
        """Remember the workers of each supervisor, since a dead one cannot be asked; note the exit of orphans.

        An orphan drains for no longer than its grace, so its exit may cut off runs that it began meanwhile.
        """
        # Called by both threads.
        for pid in [pid for pid in list(self.orphans) if not Path(f"/proc/{pid}").exists()]:
            if point := self.orphans.pop(pid, ""):
                self.rig.note("fault", kind="orphan ended", pids=[pid], of=point)
        for fleet in self.fleets:
            if fleet.process.poll() is None:
                self.children.setdefault(fleet.pid, set()).update(fleet.workers())

    def wait_for_orphans(self) -> None:
        """Wait until all workers of dead supervisors have exited."""

        def are_gone() -> bool:
            self._look()
            return not self.orphans

        wait_until(are_gone, "the exit of all workers whose supervisor died", 30)

    def _ready(self) -> list[int]:
        return [pid for fleet in self.fleets for pid in fleet.ready()]

    def _busy(self) -> list[int]:
        open_runs = {run.pid for run in checker.executions(self.rig.latest()) if run.ended_at is None}
        return [pid for pid in self._ready() if pid in open_runs]

    def _kill_busy(self) -> None:
        if victims := self._busy() or self._ready():
            victim = self.chance["supervisor"].choice(victims)
            self.rig.note("fault", kind="kill worker", pids=[victim])
            self.rig.signal(signal.SIGKILL, victim)

    def _forget_alive(self) -> None:
        from django_asyncq.broker.keys import alive_key

        with self.rig.server.client() as client:
            client.delete(alive_key())

    def _never_pushed(self) -> None:
        """Insert rows of a producer that died a while ago."""
        from django_asyncq.models import TaskRecord

        at = timezone.now() - timedelta(seconds=10)
        _rows(
            TaskRecord(name="tests.chaos.tasks.work", args=[0], queue_name="default", enqueued_at=at) for _ in range(3)
        )

    def _unknown_task(self) -> None:
        """Enqueue a task of which no worker has the code; those that wait for it already are given up."""
        from django_asyncq import lifecycle
        from django_asyncq.models import TaskRecord

        self.give_up_unknown()
        lifecycle.dispatch(_rows([TaskRecord(name="gone.away", queue_name="default")]))

    def give_up_unknown(self) -> None:
        """Cancel the tasks that wait for code: without it they would wait without an end."""
        from django_asyncq import lifecycle
        from django_asyncq.models import TaskRecord

        rows = TaskRecord.objects.queued().filter(name="gone.away")
        lifecycle.cancel(list(rows.values_list("pk", flat=True)), by="the case")

    def _unknown_run(self) -> None:
        """Insert a RUNNING row that Redis does not know."""
        from django_asyncq.models import TaskRecord, TaskState

        then = timezone.now() - timedelta(minutes=1)
        fields: dict[str, Any] = {"state": TaskState.RUNNING, "fence": 1, "attempt": 1, "worker_ids": ["lost"]}
        name = "tests.chaos.tasks.work"
        _rows([TaskRecord(name=name, args=[0], started_at=then, last_attempted_at=then, **fields)])

    def _old_rows(self) -> None:
        """Insert rows beyond their retention, and provoke a new leader, which prunes at once."""
        from django_asyncq.core.names import lowest_uuid7_at
        from django_asyncq.models import FailureReason, TaskRecord, TaskState

        then = timezone.now() - timedelta(days=40, seconds=self.chance["supervisor"].randrange(10**6))
        final: dict[str, Any] = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": then}
        rows = _rows([TaskRecord(id=lowest_uuid7_at(then), name="gone", **final)])
        self.rig.note("deleted", ids=[str(row.id) for row in rows])
        for fleet in self.fleets:
            if f" {fleet.pid} INFO django_asyncq.fleet.leader: {LEADS}" in fleet.log.read_text(errors="replace"):
                self._lose(fleet)

    def _start_anew(self) -> None:
        """Restart a supervisor with start-up tasks."""
        fleet = self.chance["supervisor"].choice([fleet for fleet in self.fleets if fleet.process.poll() is None])
        fleet.more["ASYNCQ_TEST_STARTUP"] = "well"
        self._lose(fleet)

    def _lose(self, fleet: Fleet) -> None:
        fleet.kill()
        fleet.start()


def _rows(rows: Any) -> list[Any]:
    from django_asyncq.models import TaskRecord

    return list(TaskRecord.objects.bulk_create(rows))


def schedule() -> None:
    from django_asyncq.models import Schedule

    now = timezone.now()
    row = Schedule(name="chaos", task="tests.chaos.tasks.ticked", interval_seconds=1)
    row.plan_next(now)
    row.save()


def unschedule() -> None:
    from django_asyncq.models import Schedule

    Schedule.objects.filter(name="chaos").delete()
