"""A process that this one has started: whether it has exited, its exit code, and signals to it and to its group.

Nothing else signals a child. It must never signal a foreign process: the system may reuse a process id once its owner
is reaped.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess

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

    def reap(self) -> int | None:
        """Reap the process, which has exited; return its exit code, None if it is unknown.

        Whenever a thread starts a process, multiprocessing reaps all others that have exited: then the code of this one
        is known a moment later. It stays unknown if a task has reaped it, with `os.wait()` for instance.
        """
        deadline = time.monotonic() + REAP_SECONDS
        while (code := self.exit_code) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return code

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
