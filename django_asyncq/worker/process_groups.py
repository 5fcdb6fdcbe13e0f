"""The process group of a worker process: the process, and all that its tasks start.

Each worker process leads a group of its own. Its supervisor can then signal the whole group, and kill what the process
leaves behind. A program in a session of its own (`start_new_session=True`) is in another group, and escapes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def start_of_child(*numbers: int) -> Iterator[None]:
    """Block SIGINT in a child that is started within, until `lead_group`: Ctrl-C must not reach its imports.

    The parent cannot make the group instead: the child has called `exec`, after which only itself may.
    numbers: more signals that are blocked until then.
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


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
