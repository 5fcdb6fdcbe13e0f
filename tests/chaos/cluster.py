"""A PostgreSQL that a case may stop: `initdb` in a temporary folder, on a free loopback port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tests.workers import wait_until

from .rig import free_port

BINARIES = Path(os.environ.get("ASYNCQ_CHAOS_POSTGRES", "/usr/lib/postgresql/15/bin"))


def is_available() -> bool:
    """Whether PostgreSQL's server programs and its driver are installed."""
    return (BINARIES / "initdb").exists() and find_spec("psycopg") is not None


class Cluster:
    """Runs as a context manager; `url` is for DATABASE_URL."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="asyncq-chaos-postgres-"))
        # It refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self._folder, self._user)

    @property
    def url(self) -> str:
        """The address of its database."""
        return f"postgres://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Cluster:
        self._run("initdb", "-U", "postgres", "-A", "trust", "-N", "-D", self._data)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        # Without pg_ctl, so that it ends with this process, even when that is killed.
        tied = ["setpriv", "--pdeathsig", "QUIT"] if shutil.which("setpriv") else []
        settings = ["-p", str(self.port), "-h", "127.0.0.1", "-k", str(self._folder), "-c", "max_connections=300"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*tied, str(BINARIES / "postgres"), "-D", self._data, *settings],
                user=self._user,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ready = ["pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        wait_until(lambda: subprocess.run([str(BINARIES / ready[0]), *ready[1:]], check=False).returncode == 0, "it")

    def stop(self) -> None:
        """Stop it immediately: connections break, and transactions are rolled back."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(BINARIES / program), *arguments],
            check=True,
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
