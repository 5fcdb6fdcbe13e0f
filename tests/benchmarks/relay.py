"""What the machine alone makes of a pick-up: `python -m tests.benchmarks.relay --help`.

No queue and no server, a loop and pipes alone: five processes hand a token on, fifty times a second, the way a task
takes (producer, database, producer, Redis, worker, database, worker), and each counts for a while before it does. How
far they count is chosen so that the middle token arrives after --p50 milliseconds, as the middle task of a queue does;
what the slowest take longer is then what waking processes costs on this machine, and the processor that a hypervisor
takes away. With --disk the first database also writes 8 KiB and waits until the disk has them, as a COMMIT does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from .bare import received
from .figures import percentile

# Who has the token, stage by stage; the first and the third stage are played by who measures.
PRODUCER, DATABASE, REDIS, WORKER, OTHER_DATABASE = range(5)
ROUTE = (PRODUCER, DATABASE, PRODUCER, REDIS, WORKER, OTHER_DATABASE, WORKER)
PER_SECOND = 50.0
COUNT = 500
# So many tokens tell the middle well enough to choose how far to count.
TRIED = 100
TRIES = 3
PAGE = bytes(8192)
WAIT_SECONDS = 60.0


class Times(NamedTuple):
    """Milliseconds from before a token is made until it has arrived."""

    p50: float
    p95: float
    p99: float
    longest: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p50", type=float, default=2.5, metavar="MS", help="of the middle token")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--disk", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "page" if options.disk else None) as relay:
        found = []
        for _ in range(options.rounds):
            # Anew, for no machine is as fast as it was a moment ago.
            try:
                steps = relay.steps_for(options.p50)
            except ValueError as error:
                parser.error(f"--p50: {error}")
            found.append(relay.measure(COUNT, steps))
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    print(f"{stamp}, Python {platform.python_version()}, processors {os.cpu_count()}\n")
    print("| ms | least | middle | largest |\n|---|---:|---:|---:|")
    for name, values in zip(Times._fields, zip(*found, strict=True), strict=True):
        print(f"| {name} | {min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f} |")


@contextmanager
def running(page: Path | None) -> Iterator[Relay]:
    """Start the processes, and end them. page: the file that is written and synced, if any is."""
    context = multiprocessing.get_context("spawn")
    inboxes = [context.Pipe(duplex=False) for _ in range(len(set(ROUTE)))]
    arrivals, arrived = context.Pipe(duplex=False)
    writers = [writer for _, writer in inboxes]
    others = [
        context.Process(
            target=_hand_on,
            args=(inboxes[who][0], writers, arrived, page if who == DATABASE else None),
            daemon=True,
        )
        for who in range(1, len(inboxes))
    ]
    for process in others:
        process.start()
    try:
        yield Relay(inboxes[PRODUCER][0], writers, arrivals)
    finally:
        for process in others:
            process.terminate()
            process.join(WAIT_SECONDS)


class Relay:
    """The producer's part."""

    def __init__(self, inbox: Connection, writers: Sequence[Connection], arrivals: Connection) -> None:
        self._inbox = inbox
        self._writers = writers
        self._arrivals = arrivals
        self.measure(1, 0)  # all have started

    def steps_for(self, p50_ms: float) -> int:
        """Return how far each stage is to count. Raises: ValueError, when handing on alone takes longer."""
        least = self.measure(TRIED, 0).p50
        if least >= p50_ms:
            raise ValueError(f"handing a token on takes {least:.2f} ms on this machine: choose more than {p50_ms:g}")
        steps = 1000
        for _ in range(TRIES):
            took = self.measure(TRIED, steps).p50
            steps = max(round(steps * (p50_ms - least) / max(took - least, 0.01)), 1)
        return steps

    def measure(self, count: int, steps: int) -> Times:
        """Send so many tokens, on whose way each stage counts so far."""
        due, found = time.monotonic(), []
        for _ in range(count):
            due += 1 / PER_SECOND
            time.sleep(max(0.0, due - time.monotonic()))
            begun = time.monotonic()
            work(steps)
            _send(self._writers, 1, steps)
            stage, _ = received(self._inbox)
            work(steps)
            _send(self._writers, stage + 1, steps)
            found.append((received(self._arrivals) - begun) * 1e3)
        return Times(*(percentile(found, share) for share in (0.5, 0.95, 0.99)), max(found))


def _hand_on(inbox: Connection, writers: Sequence[Connection], arrived: Connection, page: Path | None) -> None:
    """Play all stages of one process. It ends with its parent, or when it is told nothing for long."""
    file = os.open(page, os.O_RDWR | os.O_CREAT) if page else None
    while inbox.poll(WAIT_SECONDS):
        stage, steps = inbox.recv()
        work(steps)
        if file is not None:
            os.pwrite(file, PAGE, 0)
            os.fdatasync(file)
        if stage + 1 < len(ROUTE):
            _send(writers, stage + 1, steps)
        else:
            arrived.send(time.monotonic())


def work(steps: int) -> int:
    """Count."""
    total = 0
    for step in range(steps):
        total += step * step % 7
    return total


def _send(writers: Sequence[Connection], stage: int, steps: int) -> None:
    writers[ROUTE[stage]].send((stage, steps))


if __name__ == "__main__":
    main()
