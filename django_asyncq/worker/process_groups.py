"""The process group of a worker process: the process, and all that its tasks start.

Each worker process leads a group of its own. Its supervisor can then signal the whole group, and kill what the process
leaves behind. A program in a session of its own (`start_new_session=True`) is in another group, and escapes.
Must never signal a foreign process: the system may reuse a process id once its owner is reaped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

# Between SIGKILL and the death of a process: as long as it may be in a system call that cannot be interrupted.
DEATH_SECONDS = 5.0
# Until the thread that has reaped a child has noted its exit code.
REAP_SECONDS = 1.0
POLL_SECONDS = 0.005


@contextmanager
def start_of_child(*numbers: int) -> Iterator[None]:
    """Block SIGINT in a child that is started within, until `lead_group`: Ctrl-C must not reach its imports.

    The parent cannot make the group instead: the child has called `exec`, after which only itself may.
    numbers: more signals that are blocked until the child unblocks them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *numbers})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def lead_group() -> None:
    """Make this process the leader of a group of its own, and ignore SIGINT; the first act of a child.

    The supervisor alone decides what Ctrl-C means. It sends the whole group SIGINT, for the programs that tasks run.
    """
    with suppress(PermissionError):  # it leads a session, so it leads a group already
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # For a terminal this is a background group, which `stty tostop` would stop at its first log line.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM as one of a worker's group: the worker alone decides what they mean.

    Handlers that do nothing, since a program that a task starts would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as in `lead_group`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def kill_own_group() -> None:
    """Kill this process and all that it has started, if it leads a group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def has_exited(process: BaseProcess) -> bool:
    """Return whether a child has exited, and leave it unreaped, so that its id stays its own until `exitcode` is read.

    Where the system cannot say that (macOS before Python 3.13), the child is reaped.
    """
    if not hasattr(os, "waitid"):
        return process.exitcode is not None
    try:
        return os.waitid(os.P_PID, _pid(process), os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # Reaped: multiprocessing reaps all children whenever another one is started.
        return True


def signal_process(process: BaseProcess, number: int) -> None:
    """Send a signal to a child alone."""
    if not _is_reaped(process):
        os.kill(_pid(process), number)


def signal_group(process: BaseProcess, number: int) -> None:
    """Send a signal to a child and to all processes of its group, if any is left."""
    pid = _pid(process)
    if _is_reaped(process) and _exists(pid):
        # The number belongs to a new process. A number is not reused while its group has members: the group is empty.
        return
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It is still too young to lead a group, or nothing is left of the group.
        signal_process(process, number)
    except PermissionError:
        # macOS says this when only dead processes are left in the group.
        pass


def kill_group(process: BaseProcess) -> None:
    """Kill a child and all processes of its group; wait until the child is dead, and leave it unreaped."""
    signal_group(process, signal.SIGKILL)
    wait_for_exit(process, DEATH_SECONDS)


def wait_for_exit(process: BaseProcess, seconds: float) -> None:
    """Wait until a child has exited, for so many seconds at most.

    Not `join`, which would also wait for every process that the child has forked and that has left the group.
    """
    deadline = time.monotonic() + seconds
    while not has_exited(process) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def reap(process: BaseProcess) -> int | None:
    """Reap a child that has exited; return its exit code, None if it is unknown.

    Whenever a thread starts a process, multiprocessing reaps all others that have exited: then the code of this one is
    known a moment later. It stays unknown if a task has reaped it, with `os.wait()` for instance.
    """
    deadline = time.monotonic() + REAP_SECONDS
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return code


def reap_group(pid: int) -> bool:
    """Reap the dead of a group whose leader is reaped; return whether any of its processes is still to be reaped.

    Only a supervisor that is the container's first process, or a subreaper, inherits the orphans of a group. Nobody
    else would reap them.
    """
    try:
        while True:
            found, _ = os.waitpid(-pid, os.WNOHANG)
            if found == 0:
                return True
    except ChildProcessError:
        return False


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None  # noqa: S101 - it has been started
    return process.pid


def _is_reaped(process: BaseProcess) -> bool:
    if not hasattr(os, "waitid"):
        return process.exitcode is not None
    try:
        os.waitid(os.P_PID, _pid(process), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
