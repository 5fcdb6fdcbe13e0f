"""Isolated tasks: each run in a process of its own, in real workers."""

from __future__ import annotations

import os
import pickle
import re
import signal
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.utils import timezone

from django_asyncq.models import FailureReason, TaskRecord, TaskState

from .. import isolated_tasks as own
from ..workers import run_workers, wait_until, workers
from .test_processes import runs

pytestmark = pytest.mark.django_db(transaction=True)

SUCCEEDED, FAILED, QUEUED = TaskState.SUCCEEDED, TaskState.FAILED, TaskState.QUEUED


def row_of(result: Any) -> TaskRecord:
    """The row of a task."""
    return TaskRecord.objects.get(pk=result.id)


def outcome_of(result: Any) -> tuple[int, str, Any]:
    """The state, the class of the last error, and the return value."""
    record = row_of(result)
    return record.state, record.last_exception.rpartition(".")[2], record.return_value


def groups() -> set[str]:
    """What the bodies have written."""
    return set(Group.objects.values_list("name", flat=True))


# --- outcomes


def test_process_of_its_own(tmp_path: Path) -> None:
    """A child of the supervisor, with a group of its own; the function is in the main thread and knows its run."""
    results = [own.plain.enqueue("says_where") for _ in range(2)]
    counted = own.coroutine.enqueue("awaits")
    logged = own.plain.enqueue("logs")
    done = run_workers()
    found = [row_of(result) for result in results]
    pids, parents, leaders, mains, attempts, ids = zip(*(record.return_value for record in found), strict=True)
    assert len(set(pids)) == 2 and leaders == pids and len(set(parents)) == 1
    assert all(record.worker_ids[0].endswith("-isolated") for record in found)
    assert (mains, attempts, ids) == ((True, True), (1, 1), tuple(result.id for result in results))
    assert outcome_of(counted) == (SUCCEEDED, "", [0, True])
    assert outcome_of(logged) == (SUCCEEDED, "", None)
    assert "a line of the body" in done.stderr and "printed by the body" in done.stdout.splitlines()
    assert not any(map(runs, pids))


def test_outcomes() -> None:
    """Values that fit or do not, errors that pickle cannot hold, and exits are those of any task."""
    large = own.plain.enqueue("returns", 60_000)
    too_large = own.plain.enqueue("returns", 1_100_000)
    odd = own.plain.enqueue("returns_set")
    unpicklable = own.plain.enqueue("raises_unpicklable")
    exits = [own.plain.enqueue("exits", code) for code in (0, "text")]
    threads = own.plain.enqueue("leaves_threads")
    done = run_workers()
    assert outcome_of(large) == (SUCCEEDED, "", "x" * 60_000)
    state, _, value = outcome_of(too_large)
    assert state == SUCCEEDED and "1,100,002 bytes" in value["result_not_stored"]
    assert outcome_of(odd) == (FAILED, "TypeError", None)
    assert outcome_of(unpicklable) == (FAILED, "Unpicklable", None)
    (error,) = row_of(unpicklable).errors
    assert error["message"] == "odd" and "in raises_unpicklable" in error["traceback"]
    assert [outcome_of(result)[:2] for result in exits] == [(FAILED, "SystemExit")] * 2
    assert outcome_of(threads) == (SUCCEEDED, "", "done")
    # A final failure is one ERROR with its traceback, written where the exception was.
    assert len(re.findall(f"ERROR .*isolated task .*{unpicklable.id}", done.stderr)) == 1


def test_retry_is_decided_by_the_exception(tmp_path: Path) -> None:
    """A class, and a backoff that looks at the exception, as in the worker's own process."""
    again = own.retried.enqueue("raises", "", "again", "again")
    final = own.retried.enqueue("raises", "", "again", "enough")
    other = own.retried.enqueue("exits", 3)
    run_workers()
    assert outcome_of(again) == (SUCCEEDED, "Passing", 3) and len(row_of(again).worker_ids) == 3
    assert outcome_of(final)[:2] == (FAILED, "Passing") and row_of(final).attempt == 2
    assert outcome_of(other)[:2] == (FAILED, "SystemExit") and row_of(other).attempt == 1


# --- transactions


def test_transactions() -> None:
    """Effects and success are one commit; hooks run; an error or a death rolls back."""
    made = own.atomic.enqueue("makes_group", "atomic")
    rolled_back = own.atomic.enqueue("makes_group", "rolled back", "raises")
    plain = own.plain.enqueue("makes_group", "plain", "raises")
    completed = own.plain.enqueue("completes", "completed", "")
    raised = own.plain.enqueue("completes", "raised", "raises after")
    within = own.plain.enqueue("completes", "within", "raises within")
    died = own.plain.enqueue("completes", "died", "dies after")
    run_workers()
    assert outcome_of(made) == (SUCCEEDED, "", "atomic")
    assert outcome_of(rolled_back)[:2] == outcome_of(plain)[:2] == outcome_of(within)[:2] == (FAILED, "Passing")
    assert outcome_of(completed) == (SUCCEEDED, "", "completed")
    assert outcome_of(raised) == (SUCCEEDED, "", "raised")
    assert outcome_of(died) == (SUCCEEDED, "", "died")
    assert groups() == {
        "atomic",
        "plain",
        *(f"{name}{more}" for name in ("completed", "raised", "died") for more in ("", ": hook")),
    }


def test_death_within_a_transaction() -> None:
    """Nothing is committed, and it counts as a crash."""
    result = own.plain.enqueue("completes", "within", "dies within")
    run_workers()
    assert outcome_of(result)[:2] == (FAILED, "WorkerLost") and row_of(result).crash_count == 3
    assert groups() == set()


# --- the process dies


def test_crash_is_that_of_the_task_alone(tmp_path: Path) -> None:
    """A signal or an exit takes no worker and no other task with it; the task runs again, at last it has failed."""
    neighbour = own.plain.enqueue("sleeps", 1)
    once = [own.plain.enqueue("dies", how, str(tmp_path / how)) for how in ("exit", "kill", "segfault")]
    always = own.plain.enqueue("dies", "segfault")
    done = run_workers()
    assert [outcome_of(result)[2] for result in once] == ["second run"] * 3
    assert [len(row_of(result).errors) for result in once] == [1, 1, 1]
    record = row_of(always)
    assert (record.state, record.reason, record.crash_count, len(record.errors)) == (
        FAILED,
        FailureReason.WORKER_LOST,
        3,
        3,
    )
    assert "killed by signal 11 (SIGSEGV); lost alone" in record.errors[0]["message"]
    assert "in dies" in record.errors[0]["traceback"]
    assert outcome_of(neighbour)[0] == SUCCEEDED and row_of(neighbour).attempt == 1
    assert not TaskRecord.objects.exclude(suspicion=0).exists()
    assert all(name.endswith("-isolated") for name in re.findall(r"worker (\S+) exited unexpectedly", done.stderr))


class Touch:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_function_that_closes_all_files() -> None:
    """It can report nothing, so it counts as a crash."""
    result = own.plain.enqueue("closes_descriptors")
    run_workers()
    assert outcome_of(result)[:2] == (FAILED, "WorkerLost")


def test_file_in_place_of_the_pipe(tmp_path: Path) -> None:
    """No byte is written into it, and what it holds is not taken for a message of the worker."""
    message = pickle.dumps(Touch(tmp_path / "unpickled"))
    content = struct.pack("!i", len(message)) + message
    path = tmp_path / "own"
    path.write_bytes(content)
    result = own.plain.enqueue("replaces_descriptors", str(path))
    run_workers()
    assert outcome_of(result)[:2] == (FAILED, "WorkerLost")
    assert path.read_bytes() == content and not (tmp_path / "unpickled").exists()


def test_function_that_forks(tmp_path: Path) -> None:
    """Only the parent reports, and a child that lives on is killed with its process."""
    path = tmp_path / "pid"
    result = own.plain.enqueue("forks", str(path))
    with workers(tmp_path):
        wait_until(lambda: outcome_of(result)[0] == SUCCEEDED, "the outcome")
        wait_until(lambda: not runs(int(path.read_text())), "the end of the child")
    assert outcome_of(result) == (SUCCEEDED, "", "parent")


def test_killed_worker_and_killed_isolated_process(tmp_path: Path) -> None:
    """The one that gave the task away takes nothing along; that of the task takes its programs along."""
    program, pid = tmp_path / "program", tmp_path / "pid"
    lost = own.plain.enqueue("runs_program", str(program))
    goes_on = own.plain.enqueue("sleeps", 4, str(pid))
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: program.exists() and pid.exists(), "both bodies")
        own_pid = runs_program_of(int(program.read_text()))
        (worker,) = set(fleet.children()) - {own_pid, int(pid.read_text())}
        os.kill(worker, signal.SIGKILL)
        os.kill(own_pid, signal.SIGKILL)
        wait_until(lambda: not runs(int(program.read_text())), "the end of the program")
        wait_until(lambda: row_of(lost).errors, "its recovery")
        wait_until(lambda: row_of(goes_on).finished_at, "the end of the other task")
    assert outcome_of(lost)[1] == "WorkerLost" and row_of(lost).crash_count == 1
    assert outcome_of(goes_on) == (SUCCEEDED, "", "slept") and row_of(goes_on).errors == []


def runs_program_of(program: int) -> int:
    """Return the parent of a process."""
    return int(re.search(r"^PPid:\t(\d+)", Path(f"/proc/{program}/status").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def test_killed_supervisor_and_worker_leave_nothing(tmp_path: Path) -> None:
    """The process notices that its supervisor is dead, without anyone who could kill it."""
    pid = tmp_path / "pid"
    own.plain.enqueue("sleeps", 60, str(pid))
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="1") as fleet:
        wait_until(pid.exists, "the body")
        children = fleet.children()
        os.kill(fleet.process.pid, signal.SIGKILL)
        for child in {*children} - {int(pid.read_text())}:
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: not runs(int(pid.read_text())), "its end")


# --- the process must stop


def test_timeouts(tmp_path: Path) -> None:
    """An exception in the main thread; SIGKILL after the grace; no neighbour and no worker process notices it."""
    cleaned, ignored = tmp_path / "cleaned", tmp_path / "ignored"
    neighbour = own.plain.enqueue("sleeps", 6)
    overruns = own.limited.enqueue("cleans_up", str(cleaned))
    ignores = own.limited.enqueue("ignores_everything", str(ignored))
    caught = own.softly.enqueue("catches_soft_timeout")
    softly = own.softly.enqueue("sleeps", 60)
    removes = own.limited.enqueue("removes_the_handler")
    coroutine = own.coroutine.enqueue("awaits", "sleeps")
    done = run_workers(ASYNCQ_TEST_TIMEOUT_GRACE="0.5")
    assert outcome_of(overruns)[:2] == (FAILED, "TaskTimeout") and cleaned.read_text() == "TaskTimeout"
    assert "in cleans_up" in row_of(overruns).errors[0]["traceback"]
    assert row_of(overruns).attempt == 2 and row_of(overruns).reason == FailureReason.TIMEOUT
    record = row_of(ignores)
    assert (record.state, record.reason, record.attempt, record.crash_count) == (FAILED, FailureReason.TIMEOUT, 2, 0)
    assert "did not stop when asked; its process was killed" in record.errors[0]["message"]
    assert "in ignores_everything" in record.errors[0]["traceback"]
    record = row_of(removes)
    assert (record.state, record.reason, record.attempt, record.crash_count) == (FAILED, FailureReason.TIMEOUT, 2, 0)
    assert outcome_of(caught) == (SUCCEEDED, "", "partial")
    assert outcome_of(softly)[:2] == outcome_of(coroutine)[:2] == (FAILED, "SoftTimeout")
    assert outcome_of(neighbour)[0] == SUCCEEDED and row_of(neighbour).attempt == 1
    assert "is replaced" not in done.stderr


def test_function_that_checked_is_not_interrupted_again(tmp_path: Path) -> None:
    """It is cleaning up; only the end of the grace ends that."""
    result = own.limited.enqueue("checks_and_cleans_up", str(tmp_path / "cleaned"))
    run_workers(ASYNCQ_TEST_TIMEOUT_GRACE="5")
    assert outcome_of(result)[:2] == (FAILED, "TaskTimeout")
    assert sorted(path.name for path in tmp_path.glob("cleaned*")) == ["cleaned1", "cleaned2"]


def test_cancel(tmp_path: Path) -> None:
    """An exception in the main thread, a cancelled coroutine, or SIGKILL; never a retry, and no neighbour notices."""
    paths = {name: tmp_path / name for name in ("sleeps", "checks", "waits", "ignores_everything", "neighbour")}
    results = {
        "sleeps": own.stubborn.enqueue("sleeps", 60, str(paths["sleeps"])),
        "checks": own.stubborn.enqueue("checks", str(paths["checks"])),
        "waits": own.coroutine_for_long.enqueue("waits", str(paths["waits"])),
        "ignores_everything": own.stubborn.enqueue("ignores_everything", str(paths["ignores_everything"])),
    }
    neighbour = own.plain.enqueue("sleeps", 60, str(paths["neighbour"]))
    with workers(tmp_path, ASYNCQ_TEST_TIMEOUT_GRACE="1") as fleet:
        worker = wait_until(fleet.children, "the worker")[0]
        wait_until(lambda: all(path.exists() for path in paths.values()), "all bodies")
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.RUNNING).count() == 5, "their rows")
        assert [result.cancel() for result in results.values()] == ["asked"] * 4
        for result in results.values():
            wait_until(lambda result=result: row_of(result).finished_at, "the end of a cancelled task")
        pids = [int(paths[name].read_text()) for name in results]
        wait_until(lambda: not any(map(runs, pids)), "the end of their processes", 5)
        assert worker in fleet.children() and runs(int(paths["neighbour"].read_text()))
        assert neighbour.cancel() == "asked"
        assert fleet.stop() == 0
    for result in results.values():
        record = row_of(result)
        assert (record.state, record.reason, record.attempt) == (FAILED, FailureReason.CANCELLED, 1)
        assert outcome_of(result)[1] == "TaskCancelled"
    assert "its process was killed" in row_of(results["ignores_everything"]).errors[0]["message"]
    assert "is replaced" not in fleet.output()


def test_cancel_while_the_process_starts(tmp_path: Path) -> None:
    """The function is never called, and the worker process outlives it, also where the row must say RUNNING first."""
    paths = [tmp_path / str(number) for number in range(2)]
    calls = [own.plain, own.plain.using(unique=True)]
    with workers(tmp_path, ASYNCQ_TEST_SLOW_START="2", ASYNCQ_TEST_START_METHOD="spawn") as fleet:
        worker = wait_until(fleet.children, "the worker")
        results = [call.enqueue("sleeps", 0, str(path)) for call, path in zip(calls, paths, strict=True)]
        wait_until(lambda: len(fleet.children()) == 3, "their processes")
        # They have been claimed.
        assert [result.cancel() for result in results] == ["asked"] * 2
        wait_until(lambda: all(row_of(result).finished_at for result in results), "their end")
        wait_until(lambda: fleet.children() == worker, "the end of their processes")
        assert fleet.stop() == 0
    assert not any(path.exists() for path in paths)
    assert {(row_of(result).state, row_of(result).reason) for result in results} == {(FAILED, FailureReason.CANCELLED)}
    assert "Traceback" not in fleet.output()


def test_deadline(tmp_path: Path) -> None:
    """It ends a run as the timeout does."""
    cleaned = tmp_path / "cleaned"
    result = own.plain.enqueue("cleans_up", str(cleaned))
    TaskRecord.objects.filter(pk=result.id).update(deadline=timezone.now() + timedelta(seconds=20))
    run_workers()
    record = row_of(result)
    assert (record.state, record.reason) == (FAILED, FailureReason.TIMEOUT)
    assert "after its deadline" in record.errors[0]["message"] and cleaned.read_text() == "TaskTimeout"


def test_start_does_not_count_towards_the_timeout() -> None:
    """The clock runs when the function does: the timeout is shorter than a process takes to start."""
    result = own.limited.enqueue("returns", 1)
    run_workers(ASYNCQ_TEST_SLOW_START="1.5", ASYNCQ_TEST_START_METHOD="spawn")
    assert outcome_of(result) == (SUCCEEDED, "", "x")


def test_stop_requeues_what_does_not_finish_in_time(tmp_path: Path) -> None:
    """A process in the middle of its function exits with its worker, and the task has used no attempt."""
    pid = tmp_path / "pid"
    result = own.plain.enqueue("sleeps", 60, str(pid))
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="1") as fleet:
        wait_until(pid.exists, "the body")
        assert fleet.stop() == 0
        assert not runs(int(pid.read_text()))
    record = row_of(result)
    assert (record.state, record.attempt, record.errors) == (QUEUED, 0, [])


def test_stop_waits_for_what_finishes_in_time(tmp_path: Path) -> None:
    """SIGTERM to all processes of the group, as systemd sends it, interrupts no function."""
    pid = tmp_path / "pid"
    result = own.plain.enqueue("sleeps", 1.5, str(pid))
    with workers(tmp_path) as fleet:
        wait_until(pid.exists, "the body")
        os.kill(int(pid.read_text()), signal.SIGTERM)
        os.kill(int(pid.read_text()), signal.SIGINT)
        assert fleet.stop() == 0
    assert outcome_of(result) == (SUCCEEDED, "", "slept")


def test_progress(tmp_path: Path) -> None:
    """The newest value is seen while the function runs, and stays with the outcome."""
    path = tmp_path / "seen"
    result = own.plain.enqueue("reports_progress", str(path))
    with workers(tmp_path):

        def message() -> str:
            result.refresh()
            return (result.progress or {}).get("message", "")

        wait_until(lambda: message() == "half", "progress")
        path.touch()
        wait_until(lambda: message() == "all", "the last progress")
        wait_until(lambda: outcome_of(result)[0] == SUCCEEDED, "the outcome")
    assert row_of(result).progress == {"done": 2, "total": 2, "message": "all", "data": {}}


def test_log_lines() -> None:
    """They are kept as those of any other task; those of a process that dies are not."""
    logged = own.plain.using(keep_logs=5).enqueue("logs")
    killed = own.plain.using(keep_logs=5).enqueue("logs_and_dies")
    run_workers()
    assert [line.text for line in logged.logs()] == ["a line of the body"]
    assert outcome_of(killed)[1] == "WorkerLost"
    assert killed.logs() == []


def test_unique_task_says_running_before_its_function(tmp_path: Path) -> None:
    """So a call that comes once the function has read its data is not refused: the slot is free by then."""
    once = own.plain.using(unique=True, unique_until="start")
    first = once.enqueue("shows_its_row")
    run_workers()
    assert outcome_of(first) == (SUCCEEDED, "", [TaskState.RUNNING, None])
    second = own.plain.using(unique=True).enqueue("shows_its_row")
    run_workers()
    record = row_of(second)
    assert record.return_value == [TaskState.RUNNING, record.unique_key] and record.unique_slot is None


def test_process_that_does_not_start(tmp_path: Path) -> None:
    """No attempt and no crash: nothing of the task has run. It runs when the processes start again."""
    broken = tmp_path / "broken"
    broken.touch()
    result = own.plain.enqueue("returns", 1)
    with workers(tmp_path, ASYNCQ_TEST_BROKEN_START=str(broken), ASYNCQ_TEST_START_METHOD="spawn") as fleet:
        wait_until(lambda: "its process did not start" in fleet.output(), "the log line")
        record = row_of(result)
        assert (record.state, record.attempt, record.crash_count, record.errors) == (QUEUED, 0, 0, [])
        wait_until(lambda: "in a row: 3;" in fleet.output(), "the error")
        broken.unlink()
        wait_until(lambda: outcome_of(result)[0] == SUCCEEDED, "its run")
        lines = [line for line in fleet.output().splitlines() if "its process did not start" in line]
    assert [re.split(r"\s+", line)[2] for line in lines] == ["WARNING", "INFO", "ERROR"]
    assert all("load average" in line for line in lines)
    assert row_of(result).attempt == 1
