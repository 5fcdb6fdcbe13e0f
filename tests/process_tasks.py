"""Tasks that start processes of their own. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from django_asyncq import task

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


@task(max_attempts=1, timeout=0.3)
def starts_program_and_overruns(pid_file: str) -> None:
    """The same, with a timeout that it ignores."""
    starts_program.func(pid_file)


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
    """Start a forked process that sleeps, and terminate it; return its exit code within 5 s, else None."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(97,))
    child.start()
    child.terminate()
    child.join(5)
    return child.exitcode


def describe_fork() -> dict[str, Any]:
    """Return what a forked child has of its worker: handlers, and pipes other than its own."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    return {
        "handlers": [
            getattr(signal.getsignal(number), "__name__", str(signal.getsignal(number))) for number in numbers
        ],
        "wakeup": signal.set_wakeup_fd(-1),
        "pipes": sorted(_links(("pipe:", "socket:"))),
    }


def _links(kinds: tuple[str, ...]) -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(kinds):
            found.add(target)
    return found


@task(max_attempts=1)
def forks_and_describes(path: str) -> None:
    """Fork; the child writes what it has of its worker."""
    if (pid := os.fork()) == 0:
        try:
            import json

            write(path, json.dumps(describe_fork()))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@task(max_attempts=1)
def forks_and_returns(path: str) -> str:
    """Fork, and let the child return from the task like its parent."""
    pid = os.fork()
    if pid:
        write(path, pid)
        os.waitpid(pid, 0)
    return "parent" if pid else "child"
