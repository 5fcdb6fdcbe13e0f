"""The demo's own processes: started in a session of their own, ended by pid on every way out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from django.conf import settings

START_SECONDS = 30.0
# The workers' own grace is 8 s (SHUTDOWN_GRACE_SECONDS), and 8 s more to write the last outcomes.
STOP_SECONDS = 18.0


class StageError(Exception):
    """A process of the demo did not start or has ended; the message holds the end of its log."""


class Stage:
    """The processes of one demo. folder: where their logs go. environment: added to the demo's own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, name: str, *command: str) -> int:
        """Start `manage.py <command>`, its output in `<name>.log`; return its pid."""
        line = [sys.executable, str(settings.BASE_DIR / "manage.py"), *command]
        if sys.platform.startswith("linux") and shutil.which("setpriv"):
            # It shall not outlive a demo that was killed. setpriv becomes the command, and keeps its pid.
            line = ["setpriv", "--pdeathsig", "TERM", *line]
        with self.log_of(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends everything in order.
            process = subprocess.Popen(
                line,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = process
        return process.pid

    def log_of(self, name: str) -> Path:
        """Return where a process's output is."""
        return self.folder / f"{name}.log"

    def wait_for_file(self, name: str, path: Path) -> str:
        """Wait until a process has written a file; return its text. Raises: StageError."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if path.exists():
                return path.read_text()
            self.check()
            time.sleep(0.05)
        raise StageError(f"{name} did not start within {START_SECONDS:.0f} s:\n{self.log_tail(name)}")

    def check(self) -> None:
        """Raises: StageError when a process has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise StageError(f"{name} has ended with exit code {process.returncode}:\n{self.log_tail(name)}")

    def log_tail(self, name: str, lines: int = 25) -> str:
        """Return the last lines of a process's log."""
        log = self.log_of(name)
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"

    def stop(self) -> None:
        """End every process, the last started first: told, told to hurry, killed. May be repeated."""
        # An impatient second Ctrl-C must not leave one of them behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._running:
                _, process = self._running.popitem()
                self._end(process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            if process.poll() is not None:
                return
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
