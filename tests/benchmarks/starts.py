"""What ten idle worker processes take, spawned and forked: `python -m tests.benchmarks.starts --rounds 3`.

The example project's `runworkers`, with each start method in turn, a Valkey of its own and a new SQLite file. Ready is
the time from the call of the command until all processes fetch. Memory is PSS, where shared pages count in equal parts,
and what is not shared at all. Reads /proc, so it needs Linux.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from django_asyncq.conf import FORKSERVER, SPAWN
from django_asyncq.testing import EmbeddedRedis

from ..workers import ROOT, child_pids, wait_until, worker_pids

PROJECT = ROOT / "example_project"
SETTINGS = """
import os
from studio_site.settings import *
ASYNCQ = {**ASYNCQ, "START_METHOD": os.environ.get("START_METHOD", "spawn")}
"""
MIB = 1024
# After the start: until nothing is imported and compiled any more.
IDLE_SECONDS = 5.0
NAMES = ("ready, s", "PSS of a worker, MiB", "private, MiB", "PSS of all processes, MiB")


def kilobytes(pid: int, *names: str) -> int:
    """Return the sum of these lines of a process's smaps_rollup."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(found) for name in names for found in re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE))


def measured(processes: int, environment: dict[str, str], log: Path) -> list[float]:
    """Start a fleet; return its figures in the order of NAMES."""
    began = time.monotonic()
    command = [sys.executable, "manage.py", "runworkers", "--processes", str(processes), "--concurrency", "4"]
    with log.open("w") as output:
        fleet = subprocess.Popen(command, env=environment, cwd=PROJECT, stdout=output, stderr=output)
    try:
        wait_until(lambda: log.read_text().count(" started: 4 slots") == processes, "all worker processes")
        ready = time.monotonic() - began
        time.sleep(IDLE_SECONDS)
        workers = worker_pids(fleet.pid)
        own = [fleet.pid, *child_pids(fleet.pid)]
        pss = [kilobytes(pid, "Pss") / MIB for pid in workers]
        private = [kilobytes(pid, "Private_Clean", "Private_Dirty") / MIB for pid in workers]
        everything = sum(kilobytes(pid, "Pss") for pid in {*own, *workers}) / MIB
        return [ready, statistics.mean(pss), statistics.mean(private), everything]
    finally:
        fleet.send_signal(signal.SIGTERM)
        fleet.wait(60)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    figures: dict[str, list[list[float]]] = {SPAWN: [], FORKSERVER: []}
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as redis:
        folder = Path(name)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{folder}",
            "DJANGO_SETTINGS_MODULE": "timed_settings",
            "STUDIO_VAR": name,
            "STUDIO_REDIS_URL": redis.url,
        }
        # As in production; the first start, which is not counted, compiles.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        (folder / "timed_settings.py").write_text(SETTINGS)
        migrate = [sys.executable, "manage.py", "migrate", "-v", "0"]
        subprocess.run(migrate, env=environment, cwd=PROJECT, check=True)
        measured(1, environment, folder / "log")
        for turn in range(options.rounds):
            for method in sorted(figures, reverse=bool(turn % 2)):
                environment["START_METHOD"] = method
                figures[method].append(measured(options.processes, environment, folder / "log"))
    print(f"{options.processes} processes, medians of {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    for index, what in enumerate(NAMES):
        values = {method: statistics.median(each[index] for each in found) for method, found in figures.items()}
        print(f"{what}: " + ", ".join(f"{method} {value:.2f}" for method, value in values.items()))


if __name__ == "__main__":
    main()
