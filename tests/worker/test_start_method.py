"""Worker processes that a fork server forks: nothing shared that must not be, and nothing lost when the server dies."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import ENVIRONMENT_VARIABLE

from django_asyncq.conf import AUTO, FORKSERVER, SPAWN
from django_asyncq.fleet import processes as processes_module
from django_asyncq.fleet.processes import Child, ForkStarter, Processes, Start
from django_asyncq.management.commands.runworkers import Command
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker import entry_points
from django_asyncq.worker.bootstrap import PRELOAD_VARIABLE
from django_asyncq.worker.child_process import REAP_SECONDS, UNKNOWN_EXIT_CODE, CrashStack, ForkedProcess, NeverStarted
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.slot_table import SlotTable

from .. import isolated_tasks, loaded_tasks, process_tasks, tasks
from ..workers import ROOT, Workers, child_pids, fork_servers, run_workers, wait_until, workers
from .test_processes import pids_in, runs

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def forked(folder: Path, *options: str, **more: str) -> Iterator[Workers]:
    """Run workers that a fork server forks."""
    with workers(folder, *options, ASYNCQ_TEST_START_METHOD=FORKSERVER, **more) as fleet:
        yield fleet


def server_of(fleet: Workers) -> int:
    """Return the pid of the one fork server of a fleet."""
    (found,) = fork_servers(fleet.process.pid)
    return found


def wait_for(result: Any) -> TaskRecord:
    """Wait until a task has finished; return its row."""

    def finished() -> TaskRecord | None:
        record = TaskRecord.objects.get(id=result.id)
        return record if record.finished_at else None

    found: TaskRecord = wait_until(finished, "the end of a task")
    return found


def ready(fleet: Workers, count: int) -> list[int]:
    """Wait until a fleet has so many worker processes; return their pids."""
    found: list[int] = wait_until(lambda: len(fleet.children()) == count and fleet.children(), f"{count} processes")
    return found


# --- what they are


def test_forked_processes_run_tasks_of_each_kind(tmp_path: Path) -> None:
    """The project is loaded once, also for an isolated task, whose process is forked too."""
    results = [tasks.add.enqueue(1, 2), tasks.add_async.enqueue(1, 2), isolated_tasks.plain.enqueue("returns", 1)]
    with forked(tmp_path, "--processes", "2") as fleet:
        assert [wait_for(each).state for each in results] == [TaskState.SUCCEEDED] * 3
        pids = ready(fleet, 2)
        assert sorted(child_pids(server_of(fleet))) == sorted(pids)
        assert fleet.stop() == 0
    assert fleet.output().count("has loaded the project") == 1
    assert fleet.output().count("stopped; tasks finished") == 3


def test_forks_share_no_connection_of_the_project_with_the_database(tmp_path: Path) -> None:
    """One that was opened while it was loaded is closed."""
    result = loaded_tasks.is_connected.enqueue()
    with forked(tmp_path, ASYNCQ_TEST_LOADING="database") as fleet:
        assert wait_for(result).return_value is False
        open_files = {str(each.readlink()) for each in Path(f"/proc/{server_of(fleet)}/fd").iterdir()}
        assert not [each for each in open_files if "sqlite3" in each]
    assert "share connections" not in fleet.output()


def test_other_connections_of_the_project_are_named(tmp_path: Path) -> None:
    """Whether a client survives that it is shared, only its project can know."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        result = tasks.add.enqueue(1)
        with forked(tmp_path, ASYNCQ_TEST_LOADING=f"socket={address}") as fleet:
            assert wait_for(result).state == TaskState.SUCCEEDED
    assert f"share connections that the project has opened while it was loaded: {address}; open them" in fleet.output()


def test_threads_of_the_project_are_named() -> None:
    """Forks lack them, and some libraries start theirs anew. Spawned processes each have their own."""
    result = tasks.add.enqueue(1)
    done = run_workers(ASYNCQ_TEST_START_METHOD=FORKSERVER, ASYNCQ_TEST_LOADING="thread=watcher")
    text = "lack the threads that the project has started while it was loaded: watcher; start them when they are first"
    assert done.stderr.count(text) == 1
    assert "set ASYNCQ['START_METHOD'] = 'spawn'" in done.stderr
    assert TaskRecord.objects.get(id=result.id).state == TaskState.SUCCEEDED
    spawned = run_workers(ASYNCQ_TEST_START_METHOD=SPAWN, ASYNCQ_TEST_LOADING="thread=watcher")
    assert "lack the threads" not in spawned.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("thread=watcher", "threads were started while the project was loaded: watcher"),
        ("library=", "threads were started while the project was loaded: 1 of libraries"),
        ("socket", "connections were opened while the project was loaded: 127.0.0.1:"),
    ],
)
def test_processes_are_spawned_where_the_loaded_project_should_not_be_forked(
    what: str, said: str, tmp_path: Path
) -> None:
    """By default, and with one line that says why; the fork server is gone. A process is replaced in the same way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if what == "socket":
            what = "socket={}:{}".format(*server.getsockname())
        more = {"ASYNCQ_TEST_START_METHOD": AUTO, "ASYNCQ_TEST_LOADING": what}
        with workers(tmp_path, "--processes", "2", **more) as fleet:
            assert wait_for(tasks.add.enqueue(1)).state == TaskState.SUCCEEDED
            before = ready(fleet, 2)
            assert not fork_servers(fleet.process.pid)
            assert all(pid in child_pids(fleet.process.pid) for pid in before)
            os.kill(before[0], signal.SIGKILL)
            wait_until(lambda: len(set(fleet.children()) - {before[0]}) == 2, "another process")
            assert fleet.stop() == 0
    output = fleet.output()
    assert output.count(f"worker processes are spawned, not forked: {said}") == 1
    assert "has loaded the project" not in output and "could not be started" not in output
    assert output.count("exited unexpectedly") == 1


def test_processes_are_forked_by_default(tmp_path: Path) -> None:
    """Where there are several and nothing speaks against it, nothing is said."""
    with workers(tmp_path, "--processes", "2", ASYNCQ_TEST_START_METHOD=AUTO) as fleet:
        assert wait_for(tasks.add.enqueue(1)).state == TaskState.SUCCEEDED
        assert sorted(child_pids(server_of(fleet))) == sorted(ready(fleet, 2))
        assert fleet.stop() == 0
    assert "not forked" not in fleet.output()


# --- the death of the fork server


def test_tasks_outlive_the_fork_server(tmp_path: Path) -> None:
    """multiprocessing says then that its processes have died. A task that runs goes on, and runs once."""
    path = tmp_path / "pids"
    result = process_tasks.runs_program.enqueue(str(path), 4)
    with forked(tmp_path) as fleet:
        _, worker = pids_in(path)
        os.kill(server_of(fleet), signal.SIGKILL)
        record = wait_for(result)
        assert (record.state, record.attempt, record.crash_count) == (TaskState.SUCCEEDED, 1, 0)
        # The lease was renewed, and no other process has taken the place of the worker.
        assert runs(worker)
        assert "unexpectedly" not in fleet.output()
        os.kill(worker, signal.SIGKILL)
        second = tasks.add.enqueue(1)
        assert wait_for(second).state == TaskState.SUCCEEDED
        assert fleet.output().count("has loaded the project") == 2
        assert fleet.output().count("exited unexpectedly") == 1
        assert fleet.stop() == 0


def test_process_that_exits_in_order_after_the_fork_server_is_no_crash(tmp_path: Path) -> None:
    """It says its exit code itself, as its last word."""
    first = tasks.add.enqueue(1)
    with forked(tmp_path, "--max-tasks", "2") as fleet:
        wait_for(first)
        server = server_of(fleet)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not runs(server), "the end of the fork server")
        wait_for(tasks.add.enqueue(2))
        wait_until(lambda: fleet.output().count("has loaded the project") == 2, "another fork server")
        wait_for(tasks.add.enqueue(3))
        assert fleet.stop() == 0
    assert "unexpectedly" not in fleet.output()


def test_fork_server_that_dies_while_it_loads_is_replaced(tmp_path: Path) -> None:
    """The start that has failed is logged, and tried again."""
    result = tasks.add.enqueue(1)
    with forked(tmp_path, ASYNCQ_TEST_LOADING=f"dies={tmp_path / 'died'}") as fleet:
        assert wait_for(result).state == TaskState.SUCCEEDED
    assert fleet.output().count("a worker process could not be started: ") == 1


def test_leases_are_renewed_while_the_fork_server_hangs(tmp_path: Path) -> None:
    """A start that does not return keeps the supervisor from nothing; what runs is not lost."""
    path = tmp_path / "pids"
    with forked(tmp_path, "--processes", "2") as fleet:
        before = ready(fleet, 2)
        # Longer than a lease.
        result = process_tasks.runs_program.enqueue(str(path), 4)
        _, worker = pids_in(path)
        server = server_of(fleet)
        os.kill(server, signal.SIGSTOP)
        (idle,) = set(before) - {worker}
        os.kill(idle, signal.SIGKILL)
        record = wait_for(result)
        assert (record.state, record.attempt, record.crash_count) == (TaskState.SUCCEEDED, 1, 0)
        assert f":{idle}:" in fleet.output().partition("exited unexpectedly")[0]
        os.kill(server, signal.SIGCONT)
        assert worker in ready(fleet, 2)
        assert fleet.stop() == 0


def test_fork_server_exits_with_its_supervisor(tmp_path: Path) -> None:
    """When the supervisor is killed, its workers drain, and nothing is left."""
    with forked(tmp_path) as fleet:
        (worker,), server = ready(fleet, 1), server_of(fleet)
        fleet.process.kill()
        wait_until(lambda: not runs(worker) and not runs(server), "the end of both")


def test_stop_while_the_project_is_loaded(tmp_path: Path) -> None:
    """It waits for nobody; a process that is forked after all finds no supervisor, and exits in order."""
    result = tasks.add.enqueue(1)
    with forked(tmp_path, ASYNCQ_TEST_LOADING="sleep=12") as fleet:
        wait_until(lambda: fork_servers(fleet.process.pid), "a fork server")
        server = server_of(fleet)
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 10
        wait_until(lambda: not runs(server), "the end of the fork server")
    assert "Traceback" not in fleet.output()
    assert TaskRecord.objects.get(id=result.id).state == TaskState.QUEUED


# --- when there is no fork server


def test_reload_has_a_new_fork_server(tmp_path: Path) -> None:
    """The old one would keep the code that it has loaded."""
    result = tasks.add.enqueue(1)
    with forked(tmp_path, "--reload") as fleet:
        assert wait_for(result).state == TaskState.SUCCEEDED
        before = server_of(fleet)
        os.utime(tasks.__file__)
        wait_until(lambda: not runs(before) and fork_servers(fleet.process.pid), "a new fork server")
        assert wait_for(tasks.add.enqueue(2)).state == TaskState.SUCCEEDED


@pytest.mark.parametrize("method", [AUTO, FORKSERVER])
def test_only_a_program_has_a_fork_server(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a test run, nor what it has started with its settings: a fork server has those that are written."""
    caplog.set_level("INFO", "django_asyncq.fleet")
    command = Command()
    assert command._start_method(method, 2) == SPAWN
    assert "spawned, not forked: runworkers was called by a program" in caplog.text
    command._is_program = True
    caplog.clear()
    assert command._start_method(method, 2) == method
    assert command._start_method(AUTO, 1) == SPAWN
    assert command._start_method(SPAWN, 2) == SPAWN
    assert not caplog.text
    monkeypatch.setattr(entry_points, "applied", lambda: b"packed")
    assert command._start_method(method, 2) == SPAWN
    assert "called by a program" in caplog.text


@pytest.mark.parametrize("method", [AUTO, FORKSERVER])
@pytest.mark.parametrize("what", ["settings", "pidfd"])
def test_what_a_fork_server_needs_is_said(
    what: str, method: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, processes are spawned; a project that has asked for the fork server is warned."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    if what == "settings":
        monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    caplog.set_level("INFO", "django_asyncq.fleet")
    command = Command()
    command._is_program = True
    assert command._start_method(method, 2) == SPAWN
    said = {"settings": "DJANGO_SETTINGS_MODULE, which is not set", "pidfd": "it needs Linux 5.3"}[what]
    warned = capsys.readouterr().err
    assert (said in warned, said in caplog.text) == ((False, True) if method == AUTO else (True, False))


# --- one process


def test_number_of_a_forked_process_that_was_given_to_another_is_not_signalled() -> None:
    """Its parent reaps it, so at any moment its number may be that of another process."""
    program, stranger = (subprocess.Popen(["sleep", "97"], process_group=0) for _ in range(2))
    # As multiprocessing says it when the fork server has died.
    process: Any = SimpleNamespace(pid=program.pid, exitcode=UNKNOWN_EXIT_CODE, sentinel=-1)
    child = ForkedProcess(process)
    try:
        assert (child.has_exited(), child.exit_code) == (False, None)
        child.kill_group()
        assert (child.has_exited(), child.exit_code) == (True, UNKNOWN_EXIT_CODE)
        assert program.wait() == -signal.SIGKILL
        child.pid = stranger.pid
        child.signal_group(signal.SIGKILL)
        child.signal(signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.3)
    finally:
        child.close()
        stranger.kill()
        stranger.wait()


def test_forked_process_that_is_gone_before_it_is_looked_at() -> None:
    """It has exited, and nobody is signalled."""
    program = subprocess.Popen(["true"])
    program.wait()
    process: Any = SimpleNamespace(pid=program.pid, exitcode=0, sentinel=7)
    child = ForkedProcess(process)
    child.signal(signal.SIGKILL)
    assert (child.has_exited(), child.exit_code, child.sentinel) == (True, 0, 7)
    child.close()


def test_exit_code_that_nobody_says_is_unknown_after_a_while() -> None:
    """As while a fork server hangs: the tasks of the dead process are not to wait for it."""
    program = subprocess.Popen(["true"])
    program.wait()
    process: Any = SimpleNamespace(pid=program.pid, exitcode=None, sentinel=7)
    child = ForkedProcess(process)
    assert child.exit_code is None
    wait_until(lambda: child.exit_code == UNKNOWN_EXIT_CODE, "an exit code", REAP_SECONDS + 5)


def test_start_that_the_system_refuses_is_tried_again(
    own_keys: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor lives on."""

    def refuse(self: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    dead: list[Child] = []
    processes = Processes(WorkerOptions(queues={"default": 1}), 1, on_death=dead.append)
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        processes.start_missing(100.0)
    assert processes.children == dead == []
    assert "could not be started: BlockingIOError(11, 'no more processes')" in caplog.text
    processes.start_missing(101.0)
    assert len(processes.children) == 1
    processes.kill_remaining()
    assert len(dead) == 1


def test_child_that_never_started_is_signalled_as_nobody() -> None:
    """Its number, 0, would be the group of this very process."""
    child = NeverStarted()
    child.kill_group()
    child.signal(signal.SIGKILL)
    child.close()
    assert (child.has_exited(), child.exit_code) == (True, None)


def test_start_that_nobody_waits_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the workers are stopped while the project is loaded: no process is forked for nothing."""
    monkeypatch.setenv(PRELOAD_VARIABLE, "")  # restored afterwards
    begun: list[str] = []
    monkeypatch.setattr(processes_module, "new_process", lambda method, start: start.arguments[0])
    starter = ForkStarter(lambda: None)

    def wanted(name: str) -> Start:
        def start() -> None:
            begun.append(name)
            raise EOFError

        process: Any = SimpleNamespace(start=start)
        pipe, other = multiprocessing.Pipe()
        return Start((process,), WorkerOptions(), SlotTable(1), pipe, other, CrashStack(), 0.0, 0)

    abandoned, other = wanted("abandoned"), wanted("other")
    abandoned.abandon()
    starter.begin(abandoned)
    starter.begin(other)
    wait_until(lambda: list(starter.done()), "the end of the second start")
    assert begun == ["other"]
    other.abandon()


def test_module_that_a_fork_server_imports_does_nothing_elsewhere() -> None:
    """A tool that imports all modules must not load a project with it."""
    code = "import sys, django_asyncq.worker.preload; from django.apps import apps; sys.exit(apps.ready)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
