"""Start the processes of the demo, each in a new session, and stop them by pid."""

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
# The workers get 8 s to finish (SHUTDOWN_GRACE_SECONDS) and 8 s more to write the last outcomes.
STOP_SECONDS = 18.0


class StageError(Exception):
    """A process of the demo did not start or has exited. The message contains the end of its log."""


class Stage:
    """The processes of one demo. folder: for their logs. environment: added to that of the demo."""

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
            # The process must not outlive a killed demo. setpriv replaces itself with the command, so the pid stays.
            line = ["setpriv", "--pdeathsig", "TERM", *line]
        with self.log_of(name).open("ab") as log:
            # In a new session Ctrl-C reaches only the demo, which then stops everything in order.
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
        """Return the path of a process's log."""
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
        """Check that every process is running. Raises: StageError when one has exited."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise StageError(f"{name} exited with code {process.returncode}:\n{self.log_tail(name)}")

    def log_tail(self, name: str, lines: int = 25) -> str:
        """Return the last lines of a process's log."""
        log = self.log_of(name)
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"

    def stop(self) -> None:
        """Stop every process, the last started first: SIGTERM, a second SIGTERM, SIGKILL. It may be called twice."""
        # A second Ctrl-C must not leave a process behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._running:
                _, process = self._running.popitem()
                self._stop(process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            if process.poll() is not None:
                return
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
