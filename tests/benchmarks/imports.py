"""What the import of the app costs a web process that does not use Redis: `python -m tests.benchmarks.imports`.

Pairs of processes, with the app and without it, in turns; both have the admin and its URLs, and check the project when
that is measured. Figures of a busy machine are too high, those of CPU time least: the load is printed too. Reads /proc,
so it needs Linux.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..core.test_import_cost import ADDRESS, OURS, SETTINGS, URLS
from ..workers import ROOT

SCRIPT = """
import time
begun, cpu_begun = time.perf_counter(), time.process_time()
import django
django.setup()
from django.core.handlers.wsgi import WSGIHandler
from django.urls import get_resolver
WSGIHandler()
get_resolver().url_patterns
wall = time.perf_counter() - begun
# Not ru_maxrss, which begins with that of the parent process.
peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
figures = [wall * 1000, (time.process_time() - cpu_begun) * 1000, peak / 1024]
begun, cpu_begun = time.perf_counter(), time.process_time()
import os
from django.core.management import call_command
call_command("check", stdout=open(os.devnull, "w"))
print(*figures, (time.perf_counter() - begun) * 1000, (time.process_time() - cpu_begun) * 1000)
"""
NAMES = ("wall, ms", "CPU, ms", "memory, MB", "check, wall, ms", "check, CPU, ms")


def measured(folder: Path, settings: str) -> list[float]:
    """Return the figures of one process, in the order of NAMES."""
    own = {"PYTHONPATH": f"{ROOT}:{folder}", "PYTHONPYCACHEPREFIX": f"{folder}/compiled", "PYTHONDONTWRITEBYTECODE": ""}
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": settings, **own}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    return [float(figure) for figure in done.stdout.split()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print medians and the smallest difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args(arguments).pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "with_app.py").write_text(SETTINGS + OURS + ADDRESS)
        (folder / "without_app.py").write_text(SETTINGS)
        (folder / "web_urls.py").write_text(URLS)
        figures: dict[str, list[list[float]]] = {"with_app": [], "without_app": []}
        for settings in figures:  # compiles the bytecode
            measured(folder, settings)
        for turn in range(pairs):
            for settings in sorted(figures, reverse=bool(turn % 2)):
                figures[settings].append(measured(folder, settings))
    print(f"{pairs} pairs; load {os.getloadavg()[0]:.1f}")
    for index, what in enumerate(NAMES):
        app, plain = ([each[index] for each in figures[settings]] for settings in ("with_app", "without_app"))
        more = statistics.median(one - other for one, other in zip(app, plain, strict=True))
        least = min(app) - min(plain)
        fastest = f"of the fastest {least:.1f} more than {min(plain):.1f}"
        print(f"{what}: plain {statistics.median(plain):.1f}, more {more:.1f}, {fastest}")


if __name__ == "__main__":
    main()
