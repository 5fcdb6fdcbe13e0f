"""The chaos suite's long form: `python -m tests.chaos [--case N …] [--scale X] [--seed N] [--mutant NAME]`.

Prints the table of figures in markdown, with versions. Exit code 1: a goal was missed; 2: the mutant was never
reached, so the run proves nothing. Starts every server that it kills. The database is a file of SQLite unless
DATABASE_URL names another (its tasks and gates are deleted); the cases that stop PostgreSQL start one of their own.
--keep leaves histories and logs in their folder.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import django

# The exit code of a run whose mutant was never called.
UNREACHED = 2
VERSION_QUERIES = {
    "sqlite": "SELECT sqlite_version()",
    "postgresql": "SHOW server_version",
    "mysql": "SELECT version()",
}


def main() -> int:
    """Run the chosen cases; return the exit code."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.chaos.settings"
    from .cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=[], metavar="N", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--scale", type=float, help="1, the default, is the long form")
    parser.add_argument("--short", action="store_true", help="each case at its scale in the short form")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("ASYNCQ_CHAOS_SEED", time.time_ns() % 10**6)))
    parser.add_argument("--mutant", default="", help="take a guard out of the package, and see the case fail")
    parser.add_argument("--keep", action="store_true", help="leave the folder of histories and logs")
    options = parser.parse_args()
    chosen = options.case or list(CASES)
    if len(chosen) > 1:
        # A process for each: one that stops its database must not disturb another.
        return max([_run_apart(number, is_first=number == chosen[0]) for number in chosen])
    case = CASES[chosen[0]]
    folder = Path(tempfile.mkdtemp(prefix=f"asyncq-chaos-{case.number}-"))
    scale = options.scale or (case.short if options.short else 1.0)
    with ExitStack() as stack:
        if not options.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return run(case.number, folder, scale, options.seed, options.mutant, stack)


def _run_apart(number: str, *, is_first: bool) -> int:
    words = sys.argv[1:]
    if "--case" in words:
        start = words.index("--case")
        end = next((at for at in range(start + 1, len(words)) if words[at].startswith("--")), len(words))
        del words[start:end]
    more = {} if is_first else {"ASYNCQ_CHAOS_NO_HEADER": "1"}
    command = [sys.executable, "-m", "tests.chaos", *words, "--case", number]
    return subprocess.run(command, check=False, env={**os.environ, **more}).returncode


def run(number: str, folder: Path, scale: float, seed: int, mutant: str, stack: ExitStack) -> int:
    """Run one case in `folder`; print its row; return 1 when a goal was missed, 2 when the mutant was never reached."""
    from . import checker, cluster
    from .cases import CASES
    from .rig import Report, Rig, free_port
    from .witness import clear_witness, install_witness, remove_witness

    case, port = CASES[number], free_port()
    own_cluster = stack.enter_context(cluster.Cluster()) if case.needs_cluster else None
    if own_cluster is not None:
        os.environ["DATABASE_URL"] = own_cluster.url
    os.environ.setdefault("DATABASE_URL", f"sqlite:///{folder}/rows.sqlite3")
    os.environ["ASYNCQ_TEST_REDIS_URL"] = f"redis://127.0.0.1:{port}/0"
    os.environ["ASYNCQ_TEST_PREFIX"] = f"chaos{os.getpid()}"
    os.environ["ASYNCQ_TEST_LOCK_DIR"] = str(folder / "locks")
    django.setup()
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", verbosity=0)
    install_witness()
    stack.callback(connections.close_all)
    stack.callback(remove_witness)
    clear_witness()
    rig = Rig(folder, seed, port, mutant=mutant)
    rig.cluster = own_cluster
    report = Report(number, case.what, scale)
    began = time.monotonic()
    print(f"case {number}: {case.what}; scale {scale:g}, seed {seed}, {folder}", file=sys.stderr, flush=True)
    try:
        case.run(rig, report, scale)
    except Exception:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise
    report.figure("scale", scale)
    report.figure("seed", seed)
    report.figure("took s", round(time.monotonic() - began))
    if "ASYNCQ_CHAOS_NO_HEADER" not in os.environ:
        print(_versions(rig.server_versions))
        print("\n| case | fault | figures | goals |\n|---|---|---|---|")
    print(report.row(), flush=True)
    if mutant and (never := checker.unreached(rig.history())):
        print(f"mutant never reached: {', '.join(sorted(never))}", file=sys.stderr)
        return UNREACHED
    return int(bool(report.missed))


def _versions(servers: set[str]) -> str:
    import redis
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(VERSION_QUERIES[connection.vendor])
        database = f"{connection.display_name} {cursor.fetchone()[0].split()[0]}"
    parts = [f"{datetime.now(UTC):%Y-%m-%d}", f"Python {platform.python_version()}", f"Django {django.__version__}"]
    parts += [f"redis-py {redis.__version__}", database, *sorted(servers), f"{os.cpu_count()} cores"]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
