"""What a measure runs in: empty servers, a producer, workers. Every wait has a time limit."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import processes
from .costs import Meter
from .peers import Peer
from .probing import Probe
from .servers import DATABASE, ROLE, PostgresServer, RedisServer

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 60.0
SETTLE_SECONDS = 60.0
ORDER_SECONDS = 1800.0
MIGRATE_SECONDS = 120
LOOK_SECONDS = 0.005


class MeasureFailed(RuntimeError):
    """A measure did not finish; the message says how far it came, and which log to read."""


class Producer:
    """The process in the peer's environment that enqueues on demand."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self._pending: str | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def order(self, order: str, **more: Any) -> None:
        """Send an order without waiting for its answer."""
        assert self.process.stdin is not None
        self._pending = order
        self.process.stdin.write(json.dumps({"order": order, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = ORDER_SECONDS) -> dict[str, float]:
        """Wait for the answer; return what the order took. Raises: MeasureFailed."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(seconds) else ""
        if not line:
            raise MeasureFailed(f"the producer did not answer to {self._pending or 'its start'}, see {self._log}")
        return dict(json.loads(line))

    def do(self, order: str, **more: Any) -> dict[str, float]:
        """Send an order and wait for its answer."""
        self.order(order, **more)
        return self.answer()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The started workers."""

    started: list[subprocess.Popen[str]]
    started_ns: int
    log: Path

    @property
    def sessions(self) -> list[int]:
        """The ids of their sessions, for `processes.session_members`."""
        return [process.pid for process in self.started]

    def check(self) -> None:
        """Raise MeasureFailed when one has exited."""
        if any(process.poll() is not None for process in self.started):
            raise MeasureFailed(f"workers exited: {[process.returncode for process in self.started]}, see {self.log}")


@dataclass(frozen=True, slots=True)
class Seat:
    """The databases in which a peer keeps its tasks."""

    database: str = DATABASE
    redis_database: int = 0


class Rig:
    """The servers, producers and workers of the measures."""

    def __init__(
        self,
        redis: RedisServer,
        postgres: PostgresServer,
        folder: Path,
        homes: dict[str, Path],
        trees: Mapping[str, Path] | None = None,
    ) -> None:
        """homes: environments by the name of their requirements. trees: of ours, by peer, where it is not this one."""
        self.redis, self.postgres, self.folder = redis, postgres, folder
        self.probe = Probe(folder / "probe")
        self.meter = Meter(redis, postgres, self.probe)
        self._homes = homes
        self._trees = trees or {}
        self._seats: dict[str, Seat] = {}
        self._templates: set[str] = set()
        self._own_transactions = 0

    # --- what peers ask of the servers (peers.base.Stores)

    def sql(self, statement: str) -> Any:
        """Return the first value of a query in the peer's database."""
        self._own_transactions += 1
        return self.postgres.ask(statement, DATABASE)[0][0]

    def ask_redis(self, *words: Any) -> Any:
        """Send Redis one command."""
        return self.redis.ask(*words)

    # --- a measure

    def reset(self, peer: Peer) -> None:
        """Empty everything; the peer's tables are there and empty."""
        self._seats = {}
        self.postgres.reset(self._template(peer))
        self.redis.reset()
        self.probe.clear()

    def reset_all(self, peers: Sequence[Peer]) -> None:
        """Empty everything, and give each peer databases of its own, so that all can run at once."""
        self._seats = {peer.name: Seat(f"{DATABASE}_{number}", number) for number, peer in enumerate(peers, 1)}
        for peer in peers:
            self.postgres.create(self._seats[peer.name].database, self._template(peer))
        self.redis.reset()
        self.probe.clear()

    def _template(self, peer: Peer) -> str:
        """Return the database that has the peer's tables, made when first asked for."""
        if not peer.uses_postgres:
            return "template1"
        template = "template_" + re.sub(r"\W", "_", peer.name)
        if template not in self._templates:
            self.postgres.create(template)
            for command in peer.migrations():
                self._run(peer, command, template)
            self._templates.add(template)
        return template

    def analyze(self, peer: Peer) -> None:
        """Analyze the tables, as autovacuum would while a backlog grows."""
        if peer.uses_postgres:
            self.postgres.ask("VACUUM ANALYZE", DATABASE)
            self.postgres.disconnect(DATABASE)

    def fill(self, peer: Peer, kind: str, count: int) -> None:
        """Enqueue a backlog; it is not timed."""
        with self.producer(peer) as producer:
            producer.do("fill", kind=kind, first=0, count=count)
        self.analyze(peer)

    @contextmanager
    def producer(self, peer: Peer) -> Iterator[Producer]:
        """Run a producer."""
        log = self.folder / f"{peer.name}-producer.log"
        command = self._command(peer, ["python", str(INSIDE / "producer.py"), peer.application])
        process = processes.launch(command, self._environment(peer, ""), self.folder, log, with_pipes=True)
        try:
            producer = Producer(process, log)
            producer.answer(START_SECONDS)
            yield producer
            assert process.stdin is not None
            process.stdin.close()
            process.wait(START_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired) as error:
            raise MeasureFailed(f"the producer ended early or not at all, see {log}") from error
        finally:
            processes.end([process], 1)

    @contextmanager
    def workers(self, peer: Peer, profile: str) -> Iterator[Fleet]:
        """Run the workers of a profile."""
        log = self.folder / f"{peer.name}-{profile}.log"
        environment = self._environment(peer, profile)
        fleet = Fleet([], time.monotonic_ns(), log)
        try:
            for command in peer.workers(profile):
                fleet.started.append(processes.launch(self._command(peer, command), environment, self.folder, log))
            yield fleet
        finally:
            processes.end(fleet.started)

    def wait(self, condition: Callable[[], Any], what: str, fleet: Fleet, seconds: float, **more: Any) -> None:
        """Wait until a condition holds. meanwhile: called at each look. Raises: MeasureFailed."""
        deadline = time.monotonic() + seconds
        meanwhile = more.get("meanwhile")
        while not condition():
            fleet.check()
            if time.monotonic() > deadline:
                raise MeasureFailed(
                    f"{what}: not within {seconds:.0f} s, {self.probe.count} tasks finished; {fleet.log}"
                )
            if meanwhile is not None:
                meanwhile()
            time.sleep(LOOK_SECONDS)

    def wait_settled(self, peer: Peer, fleet: Fleet, tasks: int) -> None:
        """Wait until the peer's own records say that all is finished."""
        stores = _Stores(self)
        self.wait(lambda: peer.is_settled(stores, tasks), "its own records", fleet, SETTLE_SECONDS)
        self.postgres.disconnect(DATABASE)

    def count_transactions(self) -> int:
        """Return the transactions of the peer so far; call it after its processes have exited."""
        return self.meter.transactions() - self._own_transactions

    def close(self) -> None:
        """Close what is open."""
        self.probe.close()

    # --- processes

    def _run(self, peer: Peer, command: list[str], database: str) -> None:
        environment = self._environment(peer, "", database)
        log = self.folder / f"{peer.name}-migrate.log"
        process = processes.launch(self._command(peer, command), environment, self.folder, log)
        try:
            if process.wait(MIGRATE_SECONDS):
                raise MeasureFailed(f"its tables could not be made, see {log}")
        except subprocess.TimeoutExpired as error:
            raise MeasureFailed(f"making its tables took too long, see {log}") from error
        finally:
            processes.end([process], 0)

    def _command(self, peer: Peer, words: list[str]) -> list[str]:
        return [str(self._homes[peer.requirements] / "bin" / words[0]), *words[1:]]

    def _environment(self, peer: Peer, profile: str, database: str = "") -> dict[str, str]:
        bin = self._homes[peer.requirements] / "bin"
        port = str(self.postgres.port)
        seat = self._seats.get(peer.name, Seat())
        database = database or seat.database
        return {
            "PATH": f"{bin}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONPATH": f"{INSIDE}:{self._trees.get(peer.name, ROOT)}",
            "BENCH_PROBE": str(self.probe.path),
            "BENCH_LOCKS": str(self.folder / f"locks-{database}"),
            "BENCH_REDIS_URL": f"redis://127.0.0.1:{self.redis.port}/{seat.redis_database}",
            "BENCH_POSTGRES_HOST": "127.0.0.1",
            "BENCH_POSTGRES_PORT": port,
            "BENCH_POSTGRES_USER": ROLE,
            "BENCH_POSTGRES_DATABASE": database,
            "BENCH_POSTGRES_CONNINFO": f"postgresql://{ROLE}@127.0.0.1:{port}/{database}",
            **peer.environment(profile),
        }


class _Stores:
    """What peers see of the rig."""

    def __init__(self, rig: Rig) -> None:
        self.redis, self.sql = rig.ask_redis, rig.sql
