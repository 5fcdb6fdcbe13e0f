"""Processes of a test: commands such as `runworkers` on the databases, the Redis and the settings of the test.

The program `python -m django_asyncq.testing.workers <command> …` reads from its standard input what the test has in
place of the written settings. Production has nothing of the kind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from django.core.management import execute_from_command_line
from django.db import connections

from ..worker import entry_points
from .redis_server import death_signal_command

LOG_TAIL_CHARACTERS = 8000


def run_command(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command of `manage.py` in a process of its own, on the databases and with the settings of the test.

    `subprocess` with `manage.py` would use the databases that the settings name, such as the development database. The
    test must not be in a transaction, whose rows no other process sees.
    arguments: such as `"place_order", "--fast"`. env: in place of the environment of the test, as of `crash_at`.
    Returns: the finished process, with `returncode`, `stdout` and `stderr`; a code other than 0 is no error.
    Raises: subprocess.TimeoutExpired; ImproperlyConfigured for a database or a setting that no other process can
        use.
    """
    entry_points.require_shared_databases(connections)
    command = _command(*arguments)
    done = subprocess.run(  # noqa: S603
        command,
        env=_environment(os.environ if env is None else env),
        input=entry_points.pack(),
        capture_output=True,
        timeout=timeout_seconds,
        check=False,
    )
    output, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(command, done.returncode, output, errors)


def _command(*arguments: str) -> list[str]:
    return [*death_signal_command(), sys.executable, "-m", __name__, *arguments]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the folders that pytest and its plugins have added for the project."""
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class WorkersProcess:
    """A `runworkers` in the background. pid: of its supervisor."""

    def __init__(self, log: Path, *options: str) -> None:
        """Start it. log: the file for its output. options: as on the command line.

        Raises: ImproperlyConfigured for a database or a setting that no other process can use.
        """
        self.log_file = log
        self._options = options
        entry_points.require_shared_databases(connections)
        inherited = entry_points.pack()
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                _command("runworkers", *options),
                env=_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        with self._process.stdin as stdin:
            stdin.write(inherited)

    @property
    def log(self) -> str:
        """What the processes have written, from the last LOG_TAIL_CHARACTERS on."""
        return self.log_file.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if self.log_file.exists() else ""

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a burst has finished.

        Raises: AssertionError, with the log, when it fails or takes longer; then it is stopped.
        """
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"workers were not finished after {timeout_seconds} s:\n{self.log}") from None
        self._check(code)

    def stop(self, timeout_seconds: float = 30) -> None:
        """Stop the workers in order, as SIGTERM does: running tasks may finish. May be called more than once.

        Raises: AssertionError, with the log, when the supervisor fails, had failed before, or does not stop.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.wait(timeout_seconds)

    def kill(self) -> None:
        """Kill the supervisor; its worker processes notice that and exit. Tasks stay unfinished."""
        self._process.kill()
        self._process.wait()

    def _check(self, code: int) -> None:
        if code:
            raise AssertionError(f"runworkers {' '.join(self._options)} exited with code {code}:\n{self.log}")


class Workers:
    """What the pytest fixture `asyncq_workers` gives: runs and starts workers, and stops them after the test."""

    def __init__(self, folder: Path) -> None:
        """folder: for the logs."""
        self._folder = folder
        self._started: list[WorkersProcess] = []

    def burst(self, *options: str, timeout_seconds: float = 60) -> str:
        """Run all tasks that are queued or due in worker processes, wait for the end, and return the log.

        options: more of `runworkers`, such as `"--queues", "slow"`.
        Raises: AssertionError, with the log, when the workers fail or take longer.
        """
        process = self.start("--burst", *options)
        process.wait(timeout_seconds)
        return process.log

    def start(self, *options: str) -> WorkersProcess:
        """Start workers in the background; they are stopped after the test. options: of `runworkers`."""
        process = WorkersProcess(self._folder / f"asyncq_workers_{len(self._started)}.log", *options)
        self._started.append(process)
        return process

    @property
    def log(self) -> str:
        """What all workers of the test have written."""
        return "\n".join(process.log for process in self._started)

    def stop(self) -> None:
        """Stop all that still run. Raises: AssertionError, with the log of the first that does not stop in order."""
        errors = []
        for process in self._started:
            try:
                process.stop()
            except AssertionError as error:
                errors.append(error)
        self._started = []
        if errors:
            raise errors[0]


def main(arguments: list[str]) -> None:
    """Run a command of `manage.py` with the settings from the standard input."""
    entry_points.apply(sys.stdin.buffer.read())
    execute_from_command_line(arguments)


if __name__ == "__main__":
    main(sys.argv)
