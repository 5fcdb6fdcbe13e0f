"""The maintenance threads in processes of their own: tasks start in time, and one process leads at a time."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import Error as DatabaseError
from django.db import IntegrityError
from django.utils import timezone

from django_asyncq import Arguments, conf
from django_asyncq.broker import Broker
from django_asyncq.exceptions import BrokerUnavailable, LockLost
from django_asyncq.fleet import forwarder
from django_asyncq.fleet import leader as service
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.leadership.coordinator import key_of
from django_asyncq.leadership.lock_files import Owner
from django_asyncq.lifecycle.messages import entry_of
from django_asyncq.models import LockTerm, Missed, Occurrence, Schedule, StartupRun, TaskRecord, TaskState

from .. import tasks
from ..workers import ROOT, environment, history, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

# How many leaders are killed at an occurrence, four seconds each.
ROUNDS = int(os.environ.get("ASYNCQ_TEST_ROUNDS", "4"))

MAINTENANCE = """
import sys
import django

django.setup()
from django_asyncq.core.registry import load_task_modules
from django_asyncq.fleet.leader import MaintenanceService

load_task_modules()
service = MaintenanceService([], single_instance=sys.argv[1] == "single")
service.start()
print("ready", flush=True)
sys.stdin.read()
service.stop()
"""


def every_seconds(seconds: int, **values: Any) -> Schedule:
    """A schedule of `tests.tasks.tally`."""
    row = Schedule(name="occurrences", task="tests.tasks.tally", args=["north"], interval_seconds=seconds, **values)
    row.plan_next(timezone.now())
    row.save()
    return row


class MaintenanceProcesses:
    """Processes that run only the maintenance threads of a supervisor."""

    def __init__(self, mode: str, client: redis.Redis) -> None:
        self.mode = mode
        self.client = client
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, *, wait: bool = True) -> None:
        """Start one more."""
        process = subprocess.Popen(
            [sys.executable, "-c", MAINTENANCE, self.mode],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes[process.pid] = process
        if wait:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def leader(self) -> int | None:
        """The pid in the lock, if it is one of these processes."""
        value = self.client.get(key_of(f"{conf.current().key_prefix}.maintenance"))
        owner = Owner.read(value.decode()) if value else None
        return owner.pid if owner is not None and owner.pid in self.processes else None

    def kill(self, pid: int) -> None:
        """Kill one at once."""
        process = self.processes.pop(pid)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def stop(self) -> None:
        """Let all stop in order."""
        for process in self.processes.values():
            process.communicate("", timeout=30)


@pytest.fixture
def processes(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[MaintenanceProcesses]:
    running = MaintenanceProcesses(request.param, redis_client)
    try:
        yield running
    finally:
        for pid in list(running.processes):
            running.kill(pid)


@pytest.mark.slow
@pytest.mark.timeout(60 + 8 * ROUNDS)
@pytest.mark.parametrize("processes", ["single", "multi"], indirect=True)
def test_a_leader_killed_at_an_occurrence_neither_loses_nor_repeats_one(
    processes: MaintenanceProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes, with an occurrence each second, the leader is killed around an occurrence again and again."""
    monkeypatch.setenv("ASYNCQ_TEST_LOCK_TTL", "3")
    spread = random.Random(7)
    every_seconds(1, missed=Missed.ALL, missed_cap=1000)
    processes.start()
    processes.start()
    for _ in range(ROUNDS):
        seen = Occurrence.objects.count()
        wait_until(lambda seen=seen: Occurrence.objects.count() > seen + 1, "occurrences of a new leader")
        leader = wait_until(processes.leader, "a leader")
        processes.start(wait=False)
        # From just before the occurrence until its transaction is certainly finished.
        now = time.time()
        time.sleep(max(int(now) + 2 + spread.uniform(-0.01, 0.04) - now, 0))
        processes.kill(leader)
    seen = Occurrence.objects.count()
    wait_until(lambda: Occurrence.objects.count() > seen + 1, "occurrences of the last leader")
    processes.stop()
    found = list(Occurrence.objects.order_by("occurs_at"))
    times = [occurrence.occurs_at for occurrence in found]
    assert times == [times[0] + timedelta(seconds=number) for number in range(len(times))]
    assert {occurrence.outcome for occurrence in found} == {"queued"}
    assert sorted(str(occurrence.task_id) for occurrence in found) == sorted(
        str(pk) for pk in TaskRecord.objects.values_list("pk", flat=True)
    )
    assert len(found) >= 2 * ROUNDS


@pytest.mark.parametrize("processes", ["single"], indirect=True)
def test_a_changed_schedule_takes_effect_without_a_restart(processes: MaintenanceProcesses) -> None:
    """A new schedule, and one whose interval changed, take effect at once and not at the next poll."""
    processes.start()
    wait_until(processes.leader, "a leader")
    row = every_seconds(3600)
    row.interval_seconds = 1
    row.plan_next(timezone.now())
    row.save()
    wait_until(lambda: Occurrence.objects.count() >= 3, "occurrences", 6)
    Schedule.objects.filter(pk=row.pk).update(enabled=False)
    wait_until(lambda: not Schedule.objects.firing().exists(), "the schedule to stop")


@pytest.mark.parametrize("processes", ["single"], indirect=True)
def test_a_clean_stop_lets_another_process_lead_at_once(processes: MaintenanceProcesses) -> None:
    """The lock is released. The term of the next leader is higher."""
    processes.start()
    first = wait_until(processes.leader, "a leader")
    every_seconds(1)
    wait_until(Occurrence.objects.count, "an occurrence")
    term = LockTerm.objects.get().number
    processes.start()
    process = processes.processes.pop(first)
    process.communicate("", timeout=30)
    wait_until(processes.leader, "the other one", 5)
    seen = Occurrence.objects.count()
    wait_until(lambda: Occurrence.objects.count() > seen, "its occurrences")
    assert LockTerm.objects.get().number > term


def test_delayed_tasks_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwarder polls every half minute, so each is in time only because its enqueueing woke the forwarder."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_FORWARD", "30")
    with workers(tmp_path):
        tasks.stamp.enqueue()
        wait_until(lambda: history(tmp_path / "history"), "a worker that is ready")
        start = timezone.now()
        # The latest first: each nearer one has to wake the forwarder from its sleep.
        due = {
            str(tasks.stamp.using(run_after=start + timedelta(seconds=seconds)).enqueue().id): seconds
            for seconds in (2.75, 2.0, 1.25)
        }
        wait_until(lambda: len(history(tmp_path / "history")) == 4, "all three")
    started = {line["id"]: line["wall"] - start.timestamp() for line in history(tmp_path / "history")}
    for id, seconds in due.items():
        assert 0 <= started[id] - seconds < 1, (started[id], seconds)


def test_retries_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise, the retry wakes the forwarder, which polls every half minute."""
    monkeypatch.setenv("ASYNCQ_TEST_FORWARD", "30")
    with workers(tmp_path):
        began = time.monotonic()
        result = tasks.fail_until.enqueue(3)
        wait_until(lambda: TaskRecord.objects.get(id=result.id).state == TaskState.SUCCEEDED, "the third attempt")
        assert time.monotonic() - began < 28


# --- start-up tasks


def test_startup_task_runs_once_per_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bursts in quick succession are one start, except for a task with `every_start`."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "well")
    for _ in range(2):
        run_workers()
    events = [line["event"] for line in history(tmp_path / "history")]
    assert sorted(events) == ["each start", "each start", "once"]
    runs = StartupRun.objects.order_by("id")
    assert [run.name for run in runs if run.finished_at and not run.error] == ["once", "each start", "each start"]
    assert all(run.term for run in runs)


def test_startup_task_of_an_earlier_start_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last run finished longer ago than its TTL."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "well")
    run_workers()
    StartupRun.objects.update(finished_at=timezone.now() - timedelta(seconds=700))
    run_workers()
    assert [line["event"] for line in history(tmp_path / "history")].count("once") == 2


@pytest.mark.parametrize(("how", "words"), [("fails", "RuntimeError: no luck"), ("dies", "SIGKILL")])
def test_a_failed_startup_task_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    """The log and its row have the error. The other start-up tasks and all tasks run."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", how)
    result = tasks.add.enqueue(1, 2)
    done = run_workers()
    assert words in done.stderr
    failed = StartupRun.objects.get(name=how)
    assert words in failed.error
    assert failed.finished_at is not None
    assert not StartupRun.objects.get(name="once").error
    assert TaskRecord.objects.get(pk=result.id).state == TaskState.SUCCEEDED


def test_the_startup_task_of_a_killed_supervisor_is_run_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process exits with the supervisor. The unfinished run does not count."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "hangs")
    lines = tmp_path / "history"
    with workers(tmp_path) as running:
        wait_until(lambda: [line for line in history(lines) if line["event"] == "hangs"], "its start")
        pid = history(lines)[-1]["pid"]
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the exit of its process")
    monkeypatch.setenv("ASYNCQ_TEST_HANG_SECONDS", "0")
    run_workers()
    assert [run.finished_at is not None for run in StartupRun.objects.filter(name="hangs").order_by("id")] == [
        False,
        True,
    ]


def test_a_startup_task_is_killed_at_shutdown_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while it hangs: the supervisor stops in time."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "hangs")
    monkeypatch.setenv("ASYNCQ_TEST_SHUTDOWN_GRACE", "1")
    with workers(tmp_path) as running:
        lines = tmp_path / "history"
        wait_until(lambda: [line for line in history(lines) if line["event"] == "hangs"], "its start")
        assert running.stop() == 0
    run = StartupRun.objects.get(name="hangs")
    assert run.finished_at is None


@pytest.mark.parametrize("is_single", [True, False])
def test_each_process_logs_once_who_leads_and_when_that_changes(
    caplog: pytest.LogCaptureFixture, is_single: bool
) -> None:
    """Rounds in which nothing changes log nothing; the first, and the one after the leader has stopped, do."""
    caplog.set_level(logging.INFO, logger="django_asyncq.fleet.leader")
    first, second = (service.MaintenanceService([], single_instance=is_single) for _ in range(2))

    def lines_of(seeker: service.MaintenanceService) -> list[str]:
        caplog.clear()
        for _ in range(3):
            seeker.seek_leadership()
        return [record.getMessage() for record in caplog.records]

    leads = ["leadership acquired: this process leads, and runs schedules, repairs and pruning"]
    assert lines_of(first) == leads
    (line,) = lines_of(second)
    since = r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC" if is_single else ""
    assert re.fullmatch(rf"leadership: led by {re.escape(str(first.coordinator.owner))}{since}; .* stops", line)
    assert lines_of(second) == [] and lines_of(first) == []
    first.coordinator.release(first.lock_name)
    assert lines_of(second) == leads
    assert len(lines_of(first)) == 1
    second.coordinator.release(second.lock_name)
    assert lines_of(first) == leads and len(lines_of(second)) == 1
    first.coordinator.release(first.lock_name)


def test_a_loop_logs_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    """While it is disabled it uses no store, so it does not say that the stores are reachable again."""
    caplog.set_level(logging.INFO, logger="django_asyncq.fleet.leader")
    # Leads and fails three times, does not lead for three rounds, leads again: fails once, then succeeds.
    leads = iter([True, True, True, False, False, False, True, True, True])
    answers: Iterator[Exception | None] = iter([*[BrokerUnavailable("unreachable")] * 4, None, None])

    def step() -> float:
        if answer := next(answers):
            raise answer
        return 0.0

    loop = service.Loop("repairs", step, lambda: next(leads))
    for _ in range(9):
        loop.tick()
    words = [record.getMessage().split(",")[0] for record in caplog.records]
    assert words == [
        "the repairs loop cannot reach a store and tries again: unreachable",
        "the repairs loop can reach both stores again",
    ]


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_first_sweep_continues_at_once_and_any_other_pauses(is_urgent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sweep may be rebuilding a Redis that lost its memory, so it does not pause between rounds."""
    monkeypatch.setattr(Reconciler, "tick", lambda self, now: None)
    monkeypatch.setattr(Reconciler, "is_urgent", is_urgent)
    pause = service.MaintenanceService([], single_instance=False).repair_and_prune()
    assert pause == (0.0 if is_urgent else min(service.REPAIR_SECONDS, conf.RECONCILE_SECONDS))
    assert (pause > 0) is not is_urgent


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailable("Redis is unreachable"),
        LockLost("maintenance", 1),
        DatabaseError("away"),
        IntegrityError("a row"),
        ValueError("odd"),
        SystemExit("of the project's code"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_loop_whose_step_fails_sleeps(error: BaseException) -> None:
    """Twenty rounds take at least fourteen seconds, whatever the error: five may be tried again at once."""

    def fail() -> float:
        raise error

    loop = service.Loop("repairs", fail)
    assert sum(loop.tick() or 0.0 for _ in range(20)) >= 14


def test_loops_with_nothing_to_do_sleep() -> None:
    """On empty stores, no loop of the leader asks for its next step at once, and none asks again within 0.1 s."""
    maintenance = service.MaintenanceService([], single_instance=False)
    steps = [
        maintenance.forward,
        maintenance.fire_schedules,
        maintenance.repair_and_prune,
        maintenance.check_key,
        maintenance.seek_leadership,
    ]
    maintenance.seek_leadership()
    try:
        # The first round of repairs is a sweep.
        maintenance.repair_and_prune()
        assert all(step() >= 0.1 for step in steps for _ in range(2))
    finally:
        maintenance.coordinator.release(maintenance.lock_name)


def test_retries_that_a_dead_process_left_half_done_are_no_reason_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are QUEUED and their entries due: a whole batch of them is looked at once in a round."""
    results = tasks.add.enqueue_many([Arguments((1, number), {}) for number in range(forwarder.LARGEST_BATCH)])
    broker = Broker()
    rows = list(TaskRecord.objects.filter(id__in=[result.id for result in results]))
    for row in rows:
        row.retry_at = timezone.now() - timedelta(seconds=5)
    broker.dequeue("default", "w", len(rows), 30)
    broker.remove("default", [str(row.id) for row in rows])
    broker.park("default", [entry_of(row) for row in rows])
    calls = []
    real = Broker.forward

    def counted(self: Broker, queue: str, source: Any, limit: int = 100) -> Any:
        calls.append(source)
        assert len(calls) < 10, "the round does not end"
        return real(self, queue, source, limit)

    monkeypatch.setattr(Broker, "forward", counted)
    assert forwarder.forward_due(broker, ["default"]).retried == 0
    assert calls == ["scheduled", "retry", "retry"]
