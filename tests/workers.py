"""Running `manage.py runworkers` for tests, as a user would, in its own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connections

ROOT = Path(__file__).parent.parent
PATIENCE_SECONDS = 100.0


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that shares this test's database, Redis and keys."""
    database = dict(connections["default"].settings_dict)
    name = database["NAME"]
    if database["ENGINE"].endswith("sqlite3"):
        url = f"sqlite:///{name}"
    else:
        kind = "postgres" if "postgresql" in database["ENGINE"] else "mysql"
        user = f"{database['USER']}:{database['PASSWORD']}".rstrip(":")
        url = f"{kind}://{user}@{database['HOST']}:{database['PORT']}/{name}"
    own = {}
    if "tasks" in connections:
        own["ASYNCQ_TEST_OWN_DATABASE"] = str(connections["tasks"].settings_dict["NAME"])
    return {
        **os.environ,
        **own,
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(ROOT),
        "ASYNCQ_TEST_REDIS_URL": settings.CACHES["default"]["LOCATION"],
        **more,
    }


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until a condition is true; return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {seconds} s")


def start_workers(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `runworkers` until it exits."""
    command = [sys.executable, "-m", "django", "runworkers", *options]
    return subprocess.run(
        command,
        env=environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def run_workers(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a burst that succeeds."""
    done = start_workers("--burst", *options, **more)
    assert done.returncode == 0, done.stderr
    return done


class Workers:
    """A running `runworkers`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def children(self) -> list[int]:
        """The pids of its worker processes."""
        return worker_pids(self.process.pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the supervisor and wait until it exits."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def output(self) -> str:
        """Return all it has logged."""
        return self.log.read_text()


def worker_pids(supervisor: int) -> list[int]:
    """Return the worker processes of a supervisor: its fresh interpreters, and what its fork server has forked."""
    spawned = [pid for pid in child_pids(supervisor) if b"spawn_main" in command_of(pid)]
    return spawned + [pid for server in fork_servers(supervisor) for pid in child_pids(server)]


def fork_servers(supervisor: int) -> list[int]:
    """Return the pids of the fork servers of a supervisor."""
    return [pid for pid in child_pids(supervisor) if b"multiprocessing.forkserver" in command_of(pid)]


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes of a fleet (-9), one after the other; some have ended by then because another one has."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> bytes:
    """Return how a process was started; nothing if it has exited."""
    return read_of_living(Path(f"/proc/{pid}/cmdline"))


def child_pids(parent: int) -> list[int]:
    """Return the pids of the children of a process, from the side of the children.

    The kernel's own list, /proc/…/children, may lack some while others begin or end.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    # After the name, which is in parentheses and may hold any character: the state, then the parent.
    stats = {pid: read_of_living(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split() for pid in pids}
    return sorted(pid for pid, words in stats.items() if len(words) > 1 and int(words[1]) == parent)


def read_of_living(path: Path) -> bytes:
    """Read a file below /proc; return nothing if its thread or process has just exited."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def workers(
    folder: Path, *options: str, process_group: int | None = None, start_new_session: bool = False, **more: str
) -> Iterator[Workers]:
    """Run workers in the background; they are stopped at the end, by force if need be.

    process_group: 0 for a group of their own, as a shell starts a command.
    start_new_session: whether they are in no shell's session, as a service manager starts them.
    """
    log = folder / "workers.log"
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "runworkers", *options],
            env=environment(**more),
            cwd=ROOT,
            stdout=output,
            stderr=output,
            text=True,
            process_group=process_group,
            start_new_session=start_new_session,
        )
    running = Workers(process, log)
    try:
        yield running
    finally:
        children = running.children() if process.poll() is None else []
        try:
            running.stop()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            for pid in children:
                os.kill(pid, signal.SIGKILL)


def history(path: Path) -> list[dict[str, Any]]:
    """Read a history file. A line that is being written is not there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
