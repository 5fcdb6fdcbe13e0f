"""A worker process owns what its tasks start, and only that: groups, forks, deaths, signals, in real processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from django_asyncq.worker.process_groups import (
    has_exited,
    signal_group,
    signal_process,
    start_of_child,
    wait_for_exit,
)

from . import process_tasks
from .workers import ROOT, environment, read_of_living, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


def runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    status = read_of_living(Path(f"/proc/{pid}/stat")).decode()
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


def pids_in(path: Path) -> tuple[int, int]:
    """Return the pids of a started program and of the worker process that started it, once they are known."""
    wait_until(path.exists, "a started program")
    program, worker = path.read_text().split()
    return int(program), int(worker)


# --- groups


def test_program_of_a_task_dies_with_its_killed_process(tmp_path: Path) -> None:
    """kill -9 of the worker process alone: what its task has started is killed too."""
    path = tmp_path / "pids"
    process_tasks.starts_program.enqueue(str(path))
    with workers(tmp_path):
        program, worker = pids_in(path)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not runs(program), "the end of the program", 5)


def test_program_of_a_task_dies_with_the_process_that_is_replaced(tmp_path: Path) -> None:
    """A task that ignores its timeout does not leave its program behind."""
    path = tmp_path / "pids"
    process_tasks.starts_program_and_overruns.enqueue(str(path))
    run_workers(ASYNCQ_TEST_TIMEOUT_GRACE="0.5")
    assert not runs(pids_in(path)[0])


def test_program_that_a_finished_task_left_dies_at_the_stop(tmp_path: Path) -> None:
    """Whether the supervisor stops in order."""
    path = tmp_path / "pids"
    process_tasks.starts_program.enqueue(str(path), waits=False)
    with workers(tmp_path) as fleet:
        program, _ = pids_in(path)
        assert fleet.stop() == 0
        assert not runs(program)


def test_program_that_a_task_left_dies_with_the_fleet_of_a_killed_supervisor(tmp_path: Path) -> None:
    """The worker process, which drains then, kills its own group as its last act."""
    path = tmp_path / "pids"
    process_tasks.starts_program.enqueue(str(path), waits=False)
    with workers(tmp_path) as fleet:
        program, _ = pids_in(path)
        fleet.process.kill()
        wait_until(lambda: not runs(program), "the end of the program", 10)


def test_program_in_a_session_of_its_own_escapes(tmp_path: Path) -> None:
    """That is how a task starts a program that is to outlive its process."""
    path = tmp_path / "pids"
    process_tasks.starts_program.enqueue(str(path), waits=False, escapes=True)
    with workers(tmp_path) as fleet:
        program, _ = pids_in(path)
        assert fleet.stop() == 0
    assert runs(program)
    os.kill(program, signal.SIGKILL)


def test_orphans_are_reaped_where_the_supervisor_inherits_them(tmp_path: Path) -> None:
    """As the first process of a container does: no zombie is left of what a dead worker process had started."""
    path = tmp_path / "pids"
    process_tasks.starts_program.enqueue(str(path))
    with workers(tmp_path, ASYNCQ_TEST_SUBREAPER="1"):
        program, worker = pids_in(path)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{program}").exists(), "the end of the zombie", 5)


def test_number_that_was_given_to_another_process_is_not_signalled() -> None:
    """Once a child is reaped, the system may reuse its number; the new process and its group live on."""
    command = ["sh", "-c", "setsid sleep 97 >/dev/null 2>&1 & echo $!"]
    started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    stranger = int(started.stdout)
    try:
        wait_until(lambda: os.getpgid(stranger) == stranger, "a group of its own")
        reaped: Any = SimpleNamespace(pid=stranger, exitcode=0)
        assert has_exited(reaped)
        signal_group(reaped, signal.SIGKILL)
        signal_process(reaped, signal.SIGKILL)
        dies = os.pidfd_open(stranger)
        assert select.select([dies], [], [], 0.3)[0] == []
        os.close(dies)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_dead_child_is_seen_before_it_is_reaped() -> None:
    """Its number stays its own until `exitcode` is read; then there is nobody to signal."""
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    with start_of_child():
        child.start()
    wait_for_exit(child, 10)
    assert has_exited(child)
    assert Path(f"/proc/{child.pid}").exists()
    assert child.exitcode == 0
    assert not Path(f"/proc/{child.pid}").exists()
    assert has_exited(child)
    signal_group(child, signal.SIGTERM)


# --- memory


def test_memory_is_that_of_the_process_itself_and_of_now() -> None:
    """Neither what its parent once had, nor what it has freed itself."""
    code = (
        "import subprocess, sys\n"
        "from django_asyncq.worker.memory import memory_mb\n"
        "block = b'1' * (300 << 20); full = memory_mb(); del block\n"
        "assert full > 300 > memory_mb() + 100, (full, memory_mb())\n"
        "show = 'from django_asyncq.worker.memory import memory_mb; print(memory_mb())'\n"
        "block = b'1' * (300 << 20); subprocess.run([sys.executable, '-c', show], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 5 < float(done.stdout) < 200
