"""The last stacks of a worker process that a signal such as SIGSEGV has ended, in a file its supervisor reads.

The process writes them itself, in C, when the interpreter may be broken (faulthandler). SIGKILL leaves nothing.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("django_asyncq.supervisor")

# As much as an entry of a row's errors may hold.
LARGEST_BYTES = 65_536


class CrashStack:
    """A temporary file for one process, which opens it by its path and removes the path: it goes with both processes.

    path: "" where no file can be made; a process must start all the same.
    """

    def __init__(self) -> None:
        self.path = ""
        self._descriptor = -1
        try:
            self._descriptor, self.path = tempfile.mkstemp(prefix="asyncq-stack-")
        except OSError as error:
            logger.warning("the last stack of a worker that crashes will not be known: %s", error)

    def take(self) -> str:
        """Return what was written, "" for nothing, and let the file go. Called once, after the process has ended."""
        if not self.path:
            return ""
        with os.fdopen(self._descriptor, "rb") as file:
            text = file.read(LARGEST_BYTES).decode(errors="replace")
        # Still there when the process ended before it came as far as opening it.
        Path(self.path).unlink(missing_ok=True)
        return text


def write_crash_stack(path: str) -> None:
    """Have the stacks of all threads written to a file when a signal ends this process; remove its path."""
    with suppress(OSError):
        file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - faulthandler keeps it until the end
        faulthandler.enable(file)
        Path(path).unlink()
