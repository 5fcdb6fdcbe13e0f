"""Tasks that start processes of their own. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from django_asyncq import startup_task, task
from django_asyncq.worker.slot_table import SlotTable

PR_SET_CHILD_SUBREAPER = 36
if os.environ.get("ASYNCQ_TEST_SUBREAPER"):
    # This process then inherits orphans, as the first process of a container does.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write(path: str, text: object) -> None:
    """Write a whole file at once, for a test that waits until it is there."""
    unfinished = Path(f"{path}.{os.getpid()}")
    unfinished.write_text(str(text))
    unfinished.rename(path)


@task(max_attempts=1)
def starts_program(pid_file: str, waits: bool = True, escapes: bool = False) -> None:
    """Start a program that runs for longer than any test, and write its pid; wait for it, if asked to."""
    program = subprocess.Popen(["sleep", "97"], start_new_session=escapes)
    write(pid_file, f"{program.pid} {os.getpid()}")
    if waits:
        program.wait()


@task(max_attempts=1)
def runs_program(pid_file: str, seconds: float) -> int:
    """Run a program that takes so long; return its exit code."""
    program = subprocess.Popen(["sleep", str(seconds)])
    write(pid_file, f"{program.pid} {os.getpid()}")
    return program.wait()


@task(max_attempts=1, timeout=0.3)
def starts_program_and_overruns(pid_file: str) -> None:
    """The same, with a timeout that it ignores."""
    starts_program.func(pid_file)


@task
def writes_pid(path: str) -> None:
    """Write the pid of the worker process."""
    write(path, os.getpid())


if pid_file := os.environ.get("ASYNCQ_TEST_STARTUP_PROGRAM"):

    @startup_task("starts program")
    def starts_program_at_startup() -> None:
        """Start a program and leave it behind."""
        starts_program.func(str(pid_file), waits=False)


def square(number: int) -> int:
    """Return a square; importable, as a pool needs it."""
    return number * number


@task(max_attempts=1)
def uses_pool() -> float:
    """Use a pool of forked processes; return the seconds that it took."""
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
    return time.monotonic() - began


@task(max_attempts=1)
def terminates_fork() -> Any:
    """Start forked processes that sleep, and terminate each at once; return their exit codes, None after 5 s."""
    codes = []
    for _ in range(20):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(97,), daemon=True)
        child.start()
        child.terminate()
        child.join(5)
        codes.append(child.exitcode)
    return codes


def _targets(descriptors: Iterable[int | str]) -> set[str]:
    """Return the pipes and sockets behind descriptors."""
    found = set()
    for descriptor in descriptors:
        with suppress(FileNotFoundError):
            found.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return {target for target in found if target.startswith(("pipe:", "socket:"))}


def _describe(ours: set[str], table: SlotTable) -> dict[str, Any]:
    """Return what a forked child has of its worker process, and try to write to the slot table."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    for slot in range(8):
        table.leave(slot)
    return {
        "handlers": [getattr(handler, "__name__", str(handler)) for handler in handlers],
        "wakeup": signal.set_wakeup_fd(-1),
        "faulthandler": faulthandler.is_enabled(),
        "shared": sorted(ours & _targets(path.name for path in Path("/proc/self/fd").iterdir())),
    }


@task(max_attempts=1)
def forks_and_describes(path: str) -> dict[str, Any]:
    """Fork; the child writes what it has of its worker. Return what the worker has itself afterwards."""
    from django_asyncq.worker.process import WorkerProcess

    (process,) = (found for found in gc.get_objects() if isinstance(found, WorkerProcess))
    wakeup, table = process.wakeup, process.executors.threads.runner.slot_table
    ours = _targets([wakeup._read, wakeup._write, process.supervisor.fileno()])
    if (pid := os.fork()) == 0:
        try:
            write(path, json.dumps(_describe(ours, table)))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return {"pipes": len(ours), "running": len(table.running())}


def _fork(path: str, raises: bool) -> str:
    pid = os.fork()
    if pid == 0 and raises:
        raise ValueError("in the child")
    if pid:
        write(path, os.waitpid(pid, 0)[1])
    return "parent" if pid else "child"


@task(max_attempts=1)
def forks_and_returns(path: str, raises: bool = False) -> str:
    """Fork, and let the child return from the task like its parent, or raise; write how it exited."""
    return _fork(path, raises)


@task(max_attempts=1, atomic=True)
def forks_and_returns_atomically(path: str, raises: bool = False) -> str:
    """The same in a transaction."""
    return _fork(path, raises)


@task(max_attempts=1)
async def forks_and_returns_async(path: str, raises: bool = False) -> str:
    """The same in the event loop."""
    return _fork(path, raises)
