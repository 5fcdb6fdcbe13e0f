"""The supervisor's threads, in processes of their own: in time, one leader, and nobody missed when it dies."""

from __future__ import annotations

import logging
import os
import random
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
from django.utils import timezone

from django_asyncq import conf
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.leadership.owner import Owner
from django_asyncq.maintenance import service
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import LockTerm, Missed, Occurrence, Schedule, StartupRun, TaskRecord, TaskState

from . import tasks
from .workers import ROOT, environment, history, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

# Leaders killed at the occurrence, four seconds each.
ROUNDS = int(os.environ.get("ASYNCQ_TEST_ROUNDS", "4"))

UPKEEP = """
import sys
import django

django.setup()
from django_asyncq.registry import load_task_modules
from django_asyncq.maintenance.service import MaintenanceService

load_task_modules()
maintenance = MaintenanceService([], single_instance=sys.argv[1] == "single")
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


class Upkeeps:
    """Processes that do only what a supervisor's other threads do."""

    def __init__(self, mode: str, client: redis.Redis) -> None:
        self.mode = mode
        self.client = client
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, *, wait: bool = True) -> None:
        """Start one more."""
        process = subprocess.Popen(
            [sys.executable, "-c", UPKEEP, self.mode],
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
        """The pid in the lock, if that process is one of these and alive."""
        value = self.client.get(f"task_lock:{conf.current().key_prefix}.maintenance")
        owner = Owner.read(value.decode()) if value else None
        return owner.pid if owner is not None and owner.pid in self.processes else None

    def kill(self, pid: int) -> None:
        """End one without a word."""
        process = self.processes.pop(pid)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def end(self) -> None:
        """Let all stop in order."""
        for process in self.processes.values():
            process.communicate("", timeout=30)


@pytest.fixture
def upkeeps(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[Upkeeps]:
    running = Upkeeps(request.param, redis_client)
    try:
        yield running
    finally:
        for pid in list(running.processes):
            running.kill(pid)


@pytest.mark.timeout(60 + 8 * ROUNDS)
@pytest.mark.parametrize("upkeeps", ["single", "multi"], indirect=True)
def test_leader_killed_at_the_tick_loses_no_tick_and_doubles_none(
    upkeeps: Upkeeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time, an occurrence each second; the one that leads is killed around an occurrence, again and again."""
    monkeypatch.setenv("ASYNCQ_TEST_LOCK_TTL", "3")
    spread = random.Random(7)
    every_seconds(1, missed=Missed.ALL, missed_cap=1000)
    upkeeps.start()
    upkeeps.start()
    for _ in range(ROUNDS):
        seen = Occurrence.objects.count()
        wait_until(lambda seen=seen: Occurrence.objects.count() > seen + 1, "occurrences of a new leader")
        leader = wait_until(upkeeps.leader, "a leader")
        upkeeps.start(wait=False)
        # From just before the occurrence until its transaction is surely over.
        now = time.time()
        time.sleep(max(int(now) + 2 + spread.uniform(-0.01, 0.04) - now, 0))
        upkeeps.kill(leader)
    seen = Occurrence.objects.count()
    wait_until(lambda: Occurrence.objects.count() > seen + 1, "occurrences of the last leader")
    upkeeps.end()
    found = list(Occurrence.objects.order_by("occurs_at"))
    times = [occurrence.occurs_at for occurrence in found]
    assert times == [times[0] + timedelta(seconds=number) for number in range(len(times))]
    assert {occurrence.outcome for occurrence in found} == {"queued"}
    assert sorted(str(occurrence.task_id) for occurrence in found) == sorted(
        str(pk) for pk in TaskRecord.objects.values_list("pk", flat=True)
    )
    assert len(found) >= 2 * ROUNDS


@pytest.mark.parametrize("upkeeps", ["single"], indirect=True)
def test_change_takes_effect_without_a_restart(upkeeps: Upkeeps) -> None:
    """A schedule that was not there, then one whose interval became a second; both at once, not at the next look."""
    upkeeps.start()
    wait_until(upkeeps.leader, "a leader")
    row = every_seconds(3600)
    row.interval_seconds = 1
    row.plan_next(timezone.now())
    row.save()
    wait_until(lambda: Occurrence.objects.count() >= 3, "occurrences", 6)
    Schedule.objects.filter(pk=row.pk).update(enabled=False)
    wait_until(lambda: not Schedule.objects.firing().exists(), "the end")


@pytest.mark.parametrize("upkeeps", ["single"], indirect=True)
def test_clean_stop_hands_over_at_once(upkeeps: Upkeeps) -> None:
    """The lock is given back; the term of the next one is higher."""
    upkeeps.start()
    first = wait_until(upkeeps.leader, "a leader")
    every_seconds(1)
    wait_until(Occurrence.objects.count, "an occurrence")
    term = LockTerm.objects.get().number
    upkeeps.start()
    process = upkeeps.processes.pop(first)
    process.communicate("", timeout=30)
    wait_until(upkeeps.leader, "the other one", 5)
    seen = Occurrence.objects.count()
    wait_until(lambda: Occurrence.objects.count() > seen, "its occurrences")
    assert LockTerm.objects.get().number > term


def test_delayed_tasks_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for half a minute unless woken, so each is in time only because its own time woke somebody."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_FORWARD", "30")
    with workers(tmp_path):
        tasks.stamp.enqueue()
        wait_until(lambda: history(tmp_path / "history"), "a worker that is ready")
        start = timezone.now()
        # The later one first: the nearer has to wake who sleeps until it.
        due = {
            str(tasks.stamp.using(run_after=start + timedelta(seconds=seconds)).enqueue().id): seconds
            for seconds in (2.75, 2.0, 1.25)
        }
        wait_until(lambda: len(history(tmp_path / "history")) == 4, "all three")
    started = {line["id"]: line["wall"] - start.timestamp() for line in history(tmp_path / "history")}
    for id, seconds in due.items():
        assert 0 <= started[id] - seconds < 1, (started[id], seconds)


def test_retries_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise: the time of a retry wakes who would look in half a minute only."""
    monkeypatch.setenv("ASYNCQ_TEST_FORWARD", "30")
    with workers(tmp_path):
        began = time.monotonic()
        result = tasks.fail_until.enqueue(3)
        wait_until(lambda: TaskRecord.objects.get(id=result.id).state == TaskState.SUCCEEDED, "the third attempt")
        assert time.monotonic() - began < 20


# --- start-up tasks


def test_startup_task_runs_once_per_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bursts right after each other are one start for one task, two for the one that wants every start."""
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
    """Its last run ended longer ago than its ttl."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "well")
    run_workers()
    StartupRun.objects.update(finished_at=timezone.now() - timedelta(seconds=700))
    run_workers()
    assert [line["event"] for line in history(tmp_path / "history")].count("once") == 2


@pytest.mark.parametrize(("how", "words"), [("fails", "RuntimeError: no luck"), ("dies", "SIGKILL")])
def test_startup_task_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    """It is told in the log and on its row; the others run, and so do the tasks."""
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


def test_startup_task_of_a_killed_supervisor_is_run_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends with it; the unfinished run does not count."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "hangs")
    lines = tmp_path / "history"
    with workers(tmp_path) as running:
        wait_until(lambda: [line for line in history(lines) if line["event"] == "hangs"], "its begin")
        pid = history(lines)[-1]["pid"]
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of its process")
    monkeypatch.setenv("ASYNCQ_TEST_HANG_SECONDS", "0")
    run_workers()
    assert [run.finished_at is not None for run in StartupRun.objects.filter(name="hangs").order_by("id")] == [
        False,
        True,
    ]


def test_startup_task_is_ended_at_shutdown_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while it hangs: the workers stop in time."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "hangs")
    monkeypatch.setenv("ASYNCQ_TEST_SHUTDOWN_GRACE", "1")
    with workers(tmp_path) as running:
        lines = tmp_path / "history"
        wait_until(lambda: [line for line in history(lines) if line["event"] == "hangs"], "its begin")
        assert running.stop() == 0
    run = StartupRun.objects.get(name="hangs")
    assert run.finished_at is None


def test_a_loop_tells_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    """While it is not this process's turn it asks nothing, so it does not say that the stores are back."""
    caplog.set_level(logging.INFO, logger="django_asyncq.maintenance.service")
    # Leads, fails, fails, leads no more for three rounds, leads again: fails, then works.
    turns = iter([True, True, True, False, False, False, True, True, True])
    answers: Iterator[Exception | None] = iter([*[BrokerUnavailable("away")] * 4, None, None])

    def step() -> float:
        if answer := next(answers):
            raise answer
        return 0.0

    loop = service.Loop("repairs", step, lambda: next(turns))
    for _ in range(9):
        loop.round()
    words = [record.getMessage() for record in caplog.records]
    assert words == ["repairs waits for a store: away", "repairs goes on: both stores are back"]


@pytest.mark.parametrize("hurries", [True, False])
def test_a_first_sweep_goes_on_at_once_and_any_other_rests(hurries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be filling a Redis that lost its memory: nobody pauses between its parts."""
    monkeypatch.setattr(Reconciler, "occurrence", lambda self, now: None)
    monkeypatch.setattr(Reconciler, "hurries", hurries)
    pause = service.MaintenanceService([], single_instance=False)._repair()
    assert pause == (0.0 if hurries else min(service.REPAIR_SECONDS, conf.current().reconcile_seconds))
    assert (pause > 0) is not hurries
