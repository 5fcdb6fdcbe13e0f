"""A process that this one has started: whether it has exited, its exit code, and signals to it and to its group.

Nothing else signals a child. It must never signal a foreign process: the system may reuse a process id once its owner
is reaped.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from ..core.guard import get_logger
from .wakeup import readable

# Between SIGKILL and the death of a process: as long as it may be in a system call that cannot be interrupted.
DEATH_SECONDS = 5.0
# Until the thread that has reaped a child has noted its exit code.
REAP_SECONDS = 1.0
POLL_SECONDS = 0.005
# What multiprocessing says of the children of a fork server that has died.
UNKNOWN_EXIT_CODE = 255


class ChildProcess:
    """A child of this process, which multiprocessing has started as a fresh interpreter ("spawn")."""

    def __init__(self, process: BaseProcess) -> None:
        """process: after its start."""
        assert process.pid is not None  # noqa: S101 - it has been started
        self.pid = process.pid
        self._process = process

    @property
    def sentinel(self) -> int:
        """What becomes readable when it exits."""
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        """How it has exited, as multiprocessing says it; None if that is not known yet. This reaps the process."""
        return self._process.exitcode

    def has_exited(self) -> bool:
        """Return whether it has exited, and leave it unreaped, so that its id stays its own until it is reaped.

        Where the system cannot say that (macOS before Python 3.13), it is reaped.
        """
        if not hasattr(os, "waitid"):
            return self._process.exitcode is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # Reaped: multiprocessing reaps all children whenever another one is started.
            return True

    def _is_reaped(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.exitcode is not None
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    # --- signals

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if not self._is_reaped():
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to all processes of its group, if any is left."""
        if self._is_reaped() and _exists(self.pid):
            # The number belongs to a new process. None is reused while its group has members: the group is empty.
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It is still too young to lead a group, or nothing is left of the group.
            self.signal(number)
        except PermissionError:
            # macOS says this when only dead processes are left in the group.
            pass

    def kill_group(self) -> None:
        """Kill the process and its group; wait until the process is dead, and leave it unreaped."""
        self.signal_group(signal.SIGKILL)
        self.wait_for_exit(DEATH_SECONDS)

    # --- the end

    def wait_for_exit(self, seconds: float) -> None:
        """Wait until the process has exited, for so many seconds at most.

        Not `join`, which would also wait for every process that it has forked and that has left the group.
        """
        deadline = time.monotonic() + seconds
        while not self.has_exited() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Release what this process holds of it. Called once, after it was reaped."""
        self._process.close()


class NeverStarted(ChildProcess):
    """A child whose start has failed: there is no process to ask or to signal."""

    def __init__(self) -> None:
        self.pid = 0

    @property
    def exit_code(self) -> int | None:
        """None: nothing has exited."""
        return None

    def has_exited(self) -> bool:
        """Return True: it does not run."""
        return True

    def signal(self, number: int) -> None:
        """Signal nobody."""

    def signal_group(self, number: int) -> None:
        """Signal nobody: number 0 would be the group of this process itself."""

    def close(self) -> None:
        """Do nothing."""


class ForkedProcess(ChildProcess):
    """A child of a fork server of multiprocessing, which reaps it and reports its exit code.

    A file descriptor of the process (Linux: pidfd) says whether it lives, whatever becomes of the fork server.
    """

    def __init__(self, process: BaseProcess) -> None:
        super().__init__(process)
        self._pidfd = -1  # it died, and was reaped at once
        with suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)
        self._exited_at = 0.0

    @property
    def sentinel(self) -> int:
        # That of multiprocessing becomes readable too when the fork server dies.
        return self._pidfd if self._pidfd >= 0 else super().sentinel

    @property
    def exit_code(self) -> int | None:
        """How it has exited, None if that is not known yet; 255 when no fork server is left that could say it."""
        if not self.has_exited():
            return None
        # Only now: multiprocessing says 255 of all children of a fork server that has died.
        code = self._process.exitcode
        self._exited_at = self._exited_at or time.monotonic()
        is_late = time.monotonic() - self._exited_at > REAP_SECONDS
        return UNKNOWN_EXIT_CODE if code is None and is_late else code

    def has_exited(self) -> bool:
        """Return whether it has exited."""
        return self._pidfd < 0 or bool(readable([self._pidfd], 0))

    def _is_reaped(self) -> bool:
        return not self._send(0)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self._send(number)

    def _send(self, number: int) -> bool:
        """Send a signal, 0 for none; return whether there was a process, dead or alive."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Release what this process holds of it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# --- The process group of a worker process: the process, and all that its tasks start.
#
# Each worker process leads a group of its own. Its supervisor can then signal the whole group, and kill what the
# process leaves behind. A program in a session of its own (`start_new_session=True`) is in another group, and
# escapes.


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


# --- The stacks of a worker process that a signal such as SIGSEGV has killed, in a file that its supervisor reads.
#
# The process writes them itself, in C, when the interpreter may be broken (faulthandler). SIGKILL leaves no time
# for it.

logger = get_logger("django_asyncq.fleet")

# As much as one of a row's errors may hold.
LARGEST_BYTES = 65_536
FATAL = "Fatal Python error"
# Asks a process for its stacks; written in C, whatever its threads do. Source: Celery, which dumps its threads on it.
STACKS_SIGNAL = signal.SIGUSR1
# The heading of the stack of the thread that the signal stopped. Source: CPython, faulthandler.
CURRENT_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)


class CrashStack:
    """A temporary file for one process, which opens it and unlinks it: the file vanishes with both processes.

    path: "" if no file can be made; the process starts all the same.
    """

    def __init__(self) -> None:
        self.path = ""
        self._descriptor = -1
        try:
            self._descriptor, self.path = tempfile.mkstemp(prefix="asyncq-stack-")
        except OSError as error:
            logger.warning("the stack of a worker that crashes will not be known: %s", error)

    def peek(self) -> str:
        """Return what a living process has written so far."""
        return os.pread(self._descriptor, LARGEST_BYTES, 0).decode(errors="replace") if self.path else ""

    def take(self) -> str:
        """Return what was written, "" for nothing, and close the file. Called once, after the process has exited."""
        text = self.peek()
        self.close()
        return text

    def close(self) -> None:
        """Close the file. Called once, after the process has exited."""
        if self.path:
            os.close(self._descriptor)
            # It is still there if the process died before it opened it.
            Path(self.path).unlink(missing_ok=True)


def crashed_thread(stack: str) -> int | None:
    """Return the identifier of the thread in which a fatal signal came; None when the stack does not name it."""
    # Stacks that the process was asked for before name a thread too.
    _, _, fatal = stack.rpartition(FATAL)
    found = CURRENT_THREAD.search(fatal)
    return int(found[1], 16) if found else None


def write_crash_stack(path: str) -> None:
    """Have the stacks of all threads written to a file when a signal kills this process; unlink the file.

    And whenever STACKS_SIGNAL arrives, which kills nothing.
    """
    with suppress(OSError):
        file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - faulthandler keeps it open
        faulthandler.enable(file)
        faulthandler.register(STACKS_SIGNAL, file)
        Path(path).unlink()
