"""A worker process owns what its tasks start, and only that: groups, forks, deaths, signals, in real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from django_asyncq.fleet.supervisor import Supervisor
from django_asyncq.lifecycle import describe_exit
from django_asyncq.worker.child_process import ChildProcess, start_of_child
from django_asyncq.worker.options import WorkerOptions

from .. import process_tasks
from ..workers import ROOT, environment, read_of_living, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as "S", or "" if there is no such process."""
    status = read_of_living(Path(f"/proc/{pid}/stat")).decode()
    return status.rpartition(")")[2].split()[0] if status else ""


def runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    return state_of(pid) not in ("", "Z")


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


def test_program_that_a_startup_task_left_dies_with_its_process(tmp_path: Path) -> None:
    """Start-up tasks have processes of their own, to which the same applies."""
    path = tmp_path / "pids"
    with workers(tmp_path, ASYNCQ_TEST_STARTUP_PROGRAM=str(path)):
        program, _ = pids_in(path)
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
        process: Any = SimpleNamespace(pid=stranger, exitcode=0)
        reaped = ChildProcess(process)
        assert reaped.has_exited()
        reaped.signal_group(signal.SIGKILL)
        reaped.signal(signal.SIGKILL)
        dies = os.pidfd_open(stranger)
        assert select.select([dies], [], [], 0.3)[0] == []
        os.close(dies)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_dead_child_is_seen_before_it_is_reaped() -> None:
    """Its number stays its own until `exitcode` is read; then there is nobody to signal."""
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    with start_of_child():
        process.start()
    child = ChildProcess(process)
    child.wait_for_exit(10)
    assert child.has_exited()
    assert Path(f"/proc/{child.pid}").exists()
    assert child.exit_code == 0
    assert not Path(f"/proc/{child.pid}").exists()
    assert child.has_exited()
    child.signal_group(signal.SIGTERM)


def test_ends_of_processes_are_described() -> None:
    """Also by a signal without a name, and where nothing is known."""
    assert describe_exit(-9) == "its process was killed by signal 9 (SIGKILL)"
    assert describe_exit(-(signal.SIGRTMIN + 1)) == f"its process was killed by signal {signal.SIGRTMIN + 1}"
    assert describe_exit(3) == "its process exited with code 3"
    assert describe_exit(None) == "its process did not start"


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


# --- deaths


def test_process_that_is_killed_again_and_again_is_replaced_each_time_at_once(tmp_path: Path) -> None:
    """As by the OOM killer: however young it is when it dies, there is no pause once it was ready."""
    with workers(tmp_path, "--processes", "1") as fleet:
        for number in range(8):  # after the last one the pause was 30 s
            path = tmp_path / str(number)
            process_tasks.writes_pid.enqueue(str(path))
            wait_until(path.exists, "a process that runs a task", 25)
            os.kill(int(path.read_text()), signal.SIGKILL)
        assert fleet.output().count("exited unexpectedly") >= 7


# --- stop requests


@pytest.mark.parametrize("kind", ["", " swallows"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_request_during_the_imports_is_obeyed(number: signal.Signals, kind: str, tmp_path: Path) -> None:
    """The command exits with 0 and has run nothing, also if a module swallows every exception."""
    task = process_tasks.writes_pid.enqueue(str(tmp_path / "pid"))
    imports = tmp_path / "imports"
    with workers(tmp_path, "--burst", ASYNCQ_TEST_SLOW_IMPORT=f"{imports}{kind}") as fleet:
        wait_until(imports.exists, "an import that takes long")
        fleet.process.send_signal(number)
        try:
            assert fleet.process.wait(60) == 0, fleet.output()
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on, and has said:\n{fleet.output()}")
    assert "Traceback" not in fleet.output()
    task.refresh()
    assert task.status == "READY"


# --- forks


def test_forked_children_can_be_terminated() -> None:
    """A pool of `multiprocessing` exits at once, and `terminate()` has an effect."""
    pool, child = process_tasks.uses_pool.enqueue(), process_tasks.terminates_fork.enqueue()
    run_workers("--concurrency", "1")
    pool.refresh()
    child.refresh()
    assert pool.return_value < 3
    assert child.return_value == [-signal.SIGTERM] * 20


def test_forked_child_has_nothing_of_its_worker(tmp_path: Path) -> None:
    """Default handlers, no wake-up descriptor, no pipe, and a slot table of its own."""
    path = tmp_path / "child"
    task = process_tasks.forks_and_describes.enqueue(str(path))
    run_workers()
    task.refresh()
    assert task.return_value == {"pipes": 2, "running": 1}
    handlers = [str(signal.SIG_DFL), "default_int_handler", str(signal.SIG_DFL)]
    assert json.loads(path.read_text()) == {"handlers": handlers, "wakeup": -1, "faulthandler": False, "shared": []}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", ["forks_and_returns", "forks_and_returns_atomically", "forks_and_returns_async"])
def test_forked_child_that_returns_from_the_task_exits(name: str, raises: bool, tmp_path: Path) -> None:
    """Only the worker process records an outcome and runs the tasks that wait in it."""
    path = tmp_path / "status"
    task = getattr(process_tasks, name).enqueue(str(path), raises=raises)
    run_workers()
    task.refresh()
    assert (task.status, task.return_value) == ("SUCCESSFUL", "parent")
    assert os.waitstatus_to_exitcode(int(path.read_text())) == int(raises)


# --- signals


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)])
def test_only_ctrl_c_reaches_the_program_of_a_task(number: signal.Signals, exit_code: int, tmp_path: Path) -> None:
    """Both stop the workers in order: at SIGTERM the running program may finish, at Ctrl-C it is interrupted too."""
    path = tmp_path / "pids"
    task = process_tasks.runs_program.enqueue(str(path), 3)
    with workers(tmp_path, process_group=0) as fleet:
        pids_in(path)
        assert fleet.stop(number) == 0
    task.refresh()
    assert (task.status, task.return_value) == ("SUCCESSFUL", exit_code)


@pytest.mark.parametrize(
    ("requests", "passed_on"),
    [
        ([], ["workers SIGTERM"]),
        ([signal.SIGTERM], ["workers SIGTERM"]),
        ([signal.SIGINT], ["groups SIGINT", "workers SIGTERM"]),
        ([signal.SIGTERM, signal.SIGTERM], ["hurry", "groups SIGTERM"]),
        ([signal.SIGINT, signal.SIGINT], ["hurry", "groups SIGINT", "workers SIGTERM"]),
    ],
)
def test_a_second_request_reaches_the_programs_of_tasks_too(
    requests: list[int], passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can clean up before their group is killed."""
    supervisor, passed = Supervisor(WorkerOptions()), []
    for name, to in (("signal_all", "workers"), ("signal_groups", "groups")):
        monkeypatch.setattr(
            supervisor.processes, name, lambda number, to=to: passed.append(f"{to} {signal.Signals(number).name}")
        )
    monkeypatch.setattr(supervisor.processes, "hurry_all", lambda: passed.append("hurry"))
    for number in requests:
        supervisor._on_signal(number, None)
    supervisor._pass_on_stop()
    assert passed == passed_on


def test_ctrl_z_stops_everything_and_fg_continues_it(tmp_path: Path) -> None:
    """The supervisor, its worker process, and the program of the task."""
    path = tmp_path / "pids"
    task = process_tasks.runs_program.enqueue(str(path), 1)
    with workers(tmp_path, "--processes", "1", process_group=0) as fleet:
        everything = [*pids_in(path), fleet.process.pid]
        fleet.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: [state_of(pid) for pid in everything] == ["T"] * 3, "everything to stop", 5)
        fleet.process.send_signal(signal.SIGCONT)
        wait_until(lambda: task.refresh() or task.status == "SUCCESSFUL", "the task to finish")


def test_ctrl_z_without_a_shell_stops_nothing(tmp_path: Path) -> None:
    """In a session of its own nobody could continue the supervisor, so the kernel ignores it; the workers go on."""
    first, second = tmp_path / "first", tmp_path / "second"
    process_tasks.writes_pid.enqueue(str(first))
    with workers(tmp_path, "--processes", "1", start_new_session=True) as fleet:
        wait_until(first.exists, "a first task")
        fleet.process.send_signal(signal.SIGTSTP)
        process_tasks.writes_pid.enqueue(str(second))
        wait_until(second.exists, "a second task", 10)


def test_terminal_does_not_stop_a_process_that_writes_to_it() -> None:
    """A group of its own is in the background for the terminal; with `tostop` that stops those that write."""
    code = (
        "import os, signal, sys, termios\n"
        "from django_asyncq.worker.child_process import lead_group\n"
        "modes = termios.tcgetattr(1); modes[3] |= termios.TOSTOP; termios.tcsetattr(1, termios.TCSANOW, modes)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    lead_group(); os.write(1, b'written'); os._exit(7)\n"
        "status = os.waitpid(pid, os.WUNTRACED)[1]\n"
        "sys.exit(7 if os.WIFEXITED(status) else 1)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], environment())
    shown = b""
    with suppress(OSError):  # Linux raises at the end of the terminal
        while found := os.read(terminal, 1024):
            shown += found
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, shown
    assert b"written" in shown
