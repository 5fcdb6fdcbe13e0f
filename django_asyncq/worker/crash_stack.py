"""The stacks of a worker process that a signal such as SIGSEGV has killed, in a file that its supervisor reads.

The process writes them itself, in C, when the interpreter may be broken (faulthandler). SIGKILL leaves no time for it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from ..guard import get_logger

logger = get_logger("django_asyncq.supervisor")

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
