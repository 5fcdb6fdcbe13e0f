"""Several queues at once, one call of each in turn: `python -m tests.benchmarks beside --help`.

`compare` gives each queue the whole machine for some seconds, and the machine changes between its rounds. Here all
queues run at once. Each turn makes one call of each queue, in a new random order, so a disturbance of the machine hits
all of them alike. Between two calls of one queue the others run: caches are cold, as in a process that does other work.
--trees compares working trees of django_asyncq, for instance of two commits. Needs what `compare` needs.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from . import compare
from .figures import percentile, ratio_between
from .inside.layout import TIMES
from .measures.waiting import REST_SECONDS, WARM
from .peers import ALL, OURS, Peer
from .peers.django_asyncq import DjangoAsyncq
from .rig import ROOT, Producer, Rig
from .servers import PostgresServer, RedisServer

MEASURES = ("latency", "enqueue", "transaction")
WAIT_SECONDS = 60.0
# In a turn of `enqueue`: enough to hide the cost of an order, and few enough that the machine stays the same.
CALLS_IN_TURN = 20
PER_TRANSACTION = 100
SAY_EVERY = 100

# For each queue, by name: one value a turn, in milliseconds.
PerTurn = dict[str, list[float]]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.benchmarks beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--measure", nargs="+", choices=MEASURES, default=["latency"], metavar="NAME")
    made.add_argument("--peers", nargs="*", choices=list(ALL), default=[], metavar="NAME", help=", ".join(ALL))
    made.add_argument("--trees", nargs="*", type=Path, default=[], metavar="FOLDER", help="more of ours")
    made.add_argument("--turns", type=int, default=1000)
    made.add_argument("--pause", type=float, default=0.02, metavar="SECONDS", help="after each call of `latency`")
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
    made = parser()
    options = made.parse_args(arguments)
    if WARM + options.turns > TIMES // (1 + len(options.peers) + len(options.trees)):
        made.error("--turns: the shared file holds too few tasks")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, compare.interrupt)
    peers = [ALL[name] for name in dict.fromkeys([OURS, *options.peers])]
    trees = {peer.name: ROOT for peer in peers}
    for folder in [folder.resolve() for folder in options.trees]:
        if not (folder / OURS).is_dir() or f"{OURS}@{folder.name}" in trees:
            made.error(f"--trees: {folder} has no package {OURS}, or the name of another")
        peers.append(tree_named(f"{OURS}@{folder.name}"))
        trees[peers[-1].name] = folder
    homes, refused = compare.prepare([peer.name for peer in peers if peer.name in ALL], options.environments)
    if refused:
        made.error("; ".join(f"{name}: {why}" for name, why in refused.items()))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncq-bench-")))
        rig = Rig(
            stack.enter_context(RedisServer()), stack.enter_context(PostgresServer()), folder.resolve(), homes, trees
        )
        stack.callback(rig.close)
        print(f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {options.turns} turns\n")
        for measure in options.measure:
            taking = [peer for peer in peers if peer.measures(measure)]
            rig.reset_all(taking)
            for what, turns in TAKEN[measure](rig, taking, options.turns, options.pause):
                print(table(what, turns))


def tree_named(name: str) -> Peer:
    """Return django_asyncq as a peer with another name."""
    return type("Tree", (DjangoAsyncq,), {"name": name})()


def latency(rig: Rig, peers: Sequence[Peer], turns: int, pause_seconds: float) -> list[tuple[str, PerTurn]]:
    """Time from before the enqueue call to the first line of the body, workers idle; and the time of the call."""
    calls: PerTurn = {peer.name: [] for peer in peers}
    # Where the numbers of each queue's tasks begin.
    first = {peer.name: place * (TIMES // len(peers)) for place, peer in enumerate(peers)}
    with ExitStack() as stack:
        fleets = [stack.enter_context(rig.workers(peer, "latency")) for peer in peers]

        def wait_for(count: int) -> None:
            for fleet in fleets:
                rig.wait(lambda: rig.probe.count >= count, "all tasks", fleet, WAIT_SECONDS)

        producers = {peer.name: stack.enter_context(rig.producer(peer)) for peer in peers}
        for name, producer in producers.items():
            producer.do("paced", kind="stamp", first=first[name], count=WARM, per_second=1 / pause_seconds)
            first[name] += WARM
        wait_for(len(peers) * WARM)
        time.sleep(REST_SECONDS)

        def call(turn: int, name: str, producer: Producer) -> None:
            answer = producer.do("paced", kind="stamp", first=first[name] + turn, count=1, per_second=1)
            calls[name].append(answer["call_seconds"] * 1e3)
            time.sleep(pause_seconds * random.uniform(0.8, 1.2))

        in_turns(turns, producers, call)
        wait_for(len(peers) * (WARM + turns))
    found = {name: [rig.probe.times(first[name] + turn) for turn in range(turns)] for name in first}
    waits = {name: [(task.begun_ns - task.enqueued_ns) / 1e6 for task in tasks] for name, tasks in found.items()}
    return [("pick-up, ms", waits), ("of which the call, ms", calls)]


def enqueue(rig: Rig, peers: Sequence[Peer], turns: int, pause_seconds: float) -> list[tuple[str, PerTurn]]:
    """Enqueue one by one, a few tasks of each queue in a turn; no worker runs."""
    return [("enqueue, ms", _enqueueing(rig, peers, turns, CALLS_IN_TURN))]


def transaction(rig: Rig, peers: Sequence[Peer], turns: int, pause_seconds: float) -> list[tuple[str, PerTurn]]:
    """Enqueue 100 tasks in one transaction, one transaction of each queue in a turn; no worker runs."""
    more = {"per_transaction": PER_TRANSACTION}
    return [("enqueue in a transaction of 100, ms", _enqueueing(rig, peers, turns, PER_TRANSACTION, **more))]


TAKEN: dict[str, Callable[[Rig, Sequence[Peer], int, float], list[tuple[str, PerTurn]]]] = {
    "latency": latency,
    "enqueue": enqueue,
    "transaction": transaction,
}


def _enqueueing(rig: Rig, peers: Sequence[Peer], turns: int, count: int, **more: int) -> PerTurn:
    taken: PerTurn = {peer.name: [] for peer in peers}
    with ExitStack() as stack:
        producers = {peer.name: stack.enter_context(rig.producer(peer)) for peer in peers}
        for producer in producers.values():
            producer.do("one_by_one", kind="noop", first=0, count=count, **more)

        def call(turn: int, name: str, producer: Producer) -> None:
            answer = producer.do("one_by_one", kind="noop", first=turn * count, count=count, **more)
            taken[name].append(answer["seconds"] / count * 1e3)

        in_turns(turns, producers, call)
    return taken


def in_turns(turns: int, producers: dict[str, Producer], call: Callable[[int, str, Producer], None]) -> None:
    """Call each producer once per turn, in a new random order."""
    names = list(producers)
    for turn in range(turns):
        if turn and turn % SAY_EVERY == 0:
            compare.say(f"{turn} of {turns} turns")
        for name in random.sample(names, len(names)):
            call(turn, name, producers[name])


def table(what: str, turns: PerTurn) -> str:
    """Return a table of one measure; the others are compared with the first queue."""
    ours = next(iter(turns.values()))
    head = f"| {what} | p10 | p50 | mean | p90 | p99 | the first to this, of p50 (95 %) |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for name, values in turns.items():
        p10, p50, p90, p99 = (percentile(values, share) for share in (0.1, 0.5, 0.9, 0.99))
        shares = " | ".join(f"{value:.3f}" for value in (p10, p50, fmean(values), p90, p99))
        ratio = "" if values is ours else "{:.2f} ({:.2f}–{:.2f})".format(*ratio_between(ours, values))
        lines.append(f"| {name} | {shares} | {ratio} |")
    return "\n".join([*lines, ""])
