"""Processes: their use of CPU and memory, read from /proc, and how they are started and stopped. Linux only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Stat:
    """Of /proc/<pid>/stat: seconds of CPU, of the process itself and of the children it has reaped."""

    parent: int
    session: int
    own_seconds: float
    reaped_seconds: float


def parse_stat(text: str) -> Stat:
    """Read a line of /proc/<pid>/stat. Source: proc(5); the name in field 2 may hold spaces and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    user, system, reaped_user, reaped_system = (int(field) / TICKS_PER_SECOND for field in fields[11:15])
    return Stat(int(fields[1]), int(fields[3]), user + system, reaped_user + reaped_system)


def read_stat(pid: int) -> Stat | None:
    """Return what a process has used so far; None when it has exited."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (OSError, ValueError):
        return None


def stats() -> dict[int, Stat]:
    """Return every process of this machine."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}


def session_members(sessions: Iterable[int]) -> list[int]:
    """Return the ids of the processes in these sessions; a session's id is that of the process it was started with."""
    wanted = set(sessions)
    return [pid for pid, stat in stats().items() if stat.session in wanted]


def cpu_seconds(pids: Iterable[int]) -> float:
    """Sum up the CPU of processes and of their reaped children."""
    found = (read_stat(pid) for pid in pids)
    return sum(stat.own_seconds + stat.reaped_seconds for stat in found if stat is not None)


def family_cpu_seconds(root: int) -> float:
    """Sum up the CPU of a process, its living children (each of PostgreSQL's has its own session) and the reaped."""
    found = stats()
    if root not in found:
        return 0.0
    children = sum(stat.own_seconds + stat.reaped_seconds for stat in found.values() if stat.parent == root)
    return found[root].own_seconds + found[root].reaped_seconds + children


def machine_cpu_seconds() -> float:
    """Return the busy seconds of all processors since boot, without waits for disks."""
    user, nice, system, _idle, _wait, irq, soft_irq = Path("/proc/stat").read_text().split()[1:8]
    return sum(map(int, (user, nice, system, irq, soft_irq))) / TICKS_PER_SECOND


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages divided among their users; 0 when it has exited."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def launch(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, *, with_pipes: bool = False
) -> subprocess.Popen[str]:
    """Start a process in a session of its own: its descendants can be found, and Ctrl-C reaches only the harness.

    It ends with the harness, even after SIGKILL (PR_SET_PDEATHSIG); its children then see their pipes closed.
    """
    tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with log.open("ab") as sink:
        return subprocess.Popen(
            [*tied, *command],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.PIPE if with_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if with_pipes else sink,
            stderr=sink,
            text=True,
            start_new_session=True,
        )


def end(started: Sequence[subprocess.Popen[str]], grace_seconds: float = END_SECONDS) -> None:
    """Stop processes by SIGTERM; after the grace, kill what is left in their sessions."""
    for process in started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.05, deadline - time.monotonic()))
    for pid in session_members(process.pid for process in started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait(END_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
