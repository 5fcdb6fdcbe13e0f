"""`runworkers --reload`: when code has changed and can be loaded, the whole command starts again.

The supervisor has loaded the code too: it fires the schedules, and takes the documents out of the inboxes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from django.utils import autoreload

from ..core.guard import get_logger

logger = get_logger("django_asyncq.fleet")

LOAD = "import django; django.setup(); from django_asyncq.core.registry import load_task_modules; load_task_modules()"


class Reloader:
    """Watches the files of the loaded code.

    A process of its own loads the changed code first. While that fails, the old code goes on.
    """

    def __init__(self) -> None:
        self._seen = _times()
        self._trial: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def is_due(self) -> bool:
        """Return whether code has changed that can be loaded. Call it often; it does not wait."""
        now = _times()
        if any(self._seen.get(path, time) != time for path, time in now.items()):
            self.stop()
            self._begin()
        self._seen = now
        return self._has_loaded()

    def stop(self) -> None:
        """Stop the process that loads the changed code, if there is one."""
        if self._trial is not None:
            self._trial.kill()
            self._trial.wait()
        self._forget()

    def _begin(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `_forget` closes it
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        self._trial = subprocess.Popen(  # noqa: S603 - it is this Python
            [sys.executable, "-c", LOAD],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def _has_loaded(self) -> bool:
        if self._trial is None or self._output is None or self._trial.poll() is None:
            return False
        if code := self._trial.returncode:
            self._output.seek(0)
            printed = self._output.read().decode(errors="replace").strip()
            text = "code has changed and cannot be loaded (exit code %d), so the old code goes on: %s"
            logger.error(text, code, printed)
        self._forget()
        return not code

    def _forget(self) -> None:
        if self._output is not None:
            self._output.close()
        self._trial = self._output = None


def start_again() -> NoReturn:
    """Start this program again in this process, with the arguments of its start."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - there is no shell


def _times() -> dict[Path, float]:
    """Return when each file of the loaded code was changed."""
    found = {}
    for path in autoreload.iter_all_python_module_files():
        with suppress(OSError):
            found[path] = path.stat().st_mtime
    return found
