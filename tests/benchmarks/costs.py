"""What a measure cost: CPU, Redis commands, SQL, WAL, memory, between two readings, for each task.

Redis counts commands inside scripts like all others (INFO commandstats). `inside/probe.py` counts what redis-py sends
from the peer's processes: commands, and round trips (a pipeline is one). What Redis counts beyond those and beyond the
harness's own commands ran inside scripts. As a check, the raw figures hold Redis's count of reads from sockets
(`total_reads_processed`).
Statements are those of pg_stat_statements by the peer's role (BEGIN and COMMIT are statements), exact at any instant.
Transactions are pg_stat_database's. A session reports them when it ends, at the latest, so they are read before the
workers start and after they stopped; those of start and stop are included.
Source: https://redis.io/docs/latest/commands/info/, PostgreSQL manual, chapter "The Cumulative Statistics System".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import processes
from .probing import Probe
from .servers import DATABASE, ROLE, PostgresServer, RedisServer

MEMORY_SECONDS = 0.5
QUIET_SECONDS = 0.5
# A figure is marked, or taken again, when other programs used more than this share of the machine.
FOREIGN_LIMIT = 0.15
MIB = 2**20
STATEMENTS = (
    "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements "
    f"WHERE userid = '{ROLE}'::regrole AND dbid = (SELECT oid FROM pg_database WHERE datname = '{DATABASE}')"
)
TRANSACTIONS = f"SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = '{DATABASE}'"
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one instant; all only grow. CPU in seconds."""

    at: float
    tasks: int
    worker_cpu: float
    client_cpu: float
    redis_cpu: float
    database_cpu: float
    harness_cpu: float
    machine_cpu: float
    redis_commands: int
    redis_reads: int
    sent_commands: int
    round_trips: int
    statements: int
    wal_bytes: int


class Meter:
    """Reads the counters of the two servers and of given processes."""

    def __init__(self, redis: RedisServer, postgres: PostgresServer, probe: Probe) -> None:
        self._redis, self._postgres, self._probe = redis, postgres, probe

    def read(self, workers: Iterable[int] = (), client: int | None = None) -> Reading:
        """Take all counters. workers: ids of sessions; client: the producer's process id."""
        info, asked = self._redis.info()
        commands = sum(stat["calls"] for name, stat in info.items() if name.startswith("cmdstat_"))
        statements = self._postgres.ask(STATEMENTS)[0][0] if self._postgres.has_statements else 0
        return Reading(
            at=time.monotonic(),
            tasks=self._probe.count,
            worker_cpu=processes.cpu_seconds(processes.session_members(workers)),
            client_cpu=processes.cpu_seconds([client] if client else []),
            redis_cpu=processes.cpu_seconds([self._redis.pid]),
            database_cpu=processes.family_cpu_seconds(self._postgres.pid),
            harness_cpu=time.process_time(),
            machine_cpu=processes.machine_cpu_seconds(),
            redis_commands=commands - asked,
            redis_reads=int(info["total_reads_processed"]) - asked,
            sent_commands=self._probe.redis_commands,
            round_trips=self._probe.round_trips,
            statements=int(statements),
            wal_bytes=int(self._postgres.ask(WAL)[0][0]),
        )

    def transactions(self) -> int:
        """Return how many transactions the sessions of the peer's database have reported."""
        return int(self._postgres.ask(TRANSACTIONS)[0][0])


def between(before: Reading, after: Reading, tasks: float) -> dict[str, float]:
    """Return the costs of one of `tasks` tasks; CPU in microseconds. `foreign` is no cost: see `foreign_share`."""
    each = 1 / max(tasks, 1)
    sent = after.sent_commands - before.sent_commands
    commands = after.redis_commands - before.redis_commands
    return {
        "worker_cpu_us": (after.worker_cpu - before.worker_cpu) * 1e6 * each,
        "client_cpu_us": (after.client_cpu - before.client_cpu) * 1e6 * each,
        "redis_cpu_us": (after.redis_cpu - before.redis_cpu) * 1e6 * each,
        "database_cpu_us": (after.database_cpu - before.database_cpu) * 1e6 * each,
        "redis_commands": commands * each,
        "redis_sent": sent * each,
        "redis_in_scripts": max(0, commands - sent) * each,
        "round_trips": (after.round_trips - before.round_trips) * each,
        "redis_reads": (after.redis_reads - before.redis_reads) * each,
        "statements": (after.statements - before.statements) * each,
        "wal_bytes": (after.wal_bytes - before.wal_bytes) * each,
        "foreign": foreign_share(before, after),
    }


def foreign_share(before: Reading, after: Reading, processors: int | None = None) -> float:
    """Return which share of the machine other programs used meanwhile, from 0 to 1."""
    seconds = (after.at - before.at) * (processors or os.cpu_count() or 1)
    parts = ("worker_cpu", "client_cpu", "redis_cpu", "database_cpu", "harness_cpu")
    ours = sum(getattr(after, part) - getattr(before, part) for part in parts)
    return max(0.0, after.machine_cpu - before.machine_cpu - ours) / seconds if seconds > 0 else 0.0


def wait_quiet(patience_seconds: float) -> bool:
    """Wait until other programs use little of the machine; return whether they do. No peer may run meanwhile."""
    deadline = time.monotonic() + patience_seconds
    while patience_seconds:
        at, used = time.monotonic(), processes.machine_cpu_seconds()
        time.sleep(QUIET_SECONDS)
        share = (processes.machine_cpu_seconds() - used) / (time.monotonic() - at) / (os.cpu_count() or 1)
        if share <= FOREIGN_LIMIT:
            return True
        if time.monotonic() > deadline:
            return False
    return True


@dataclass(slots=True)
class Memory:
    """The most that the workers' processes were seen to use, shared pages counted in equal parts (PSS)."""

    sessions: Sequence[int]
    largest_bytes: int = 0
    together_bytes: int = 0
    last_bytes: int = 0
    _next_at: float = field(default=0.0)

    def look(self, *, now: bool = False) -> None:
        """Look every half second: the kernel walks all pages for it."""
        if not now and time.monotonic() < self._next_at:
            return
        sizes = [processes.pss_bytes(pid) for pid in processes.session_members(self.sessions)]
        self.largest_bytes = max([self.largest_bytes, *sizes])
        self.last_bytes = sum(sizes)
        self.together_bytes = max(self.together_bytes, self.last_bytes)
        self._next_at = time.monotonic() + MEMORY_SECONDS

    def values(self) -> dict[str, float]:
        """In MiB."""
        return {"process_pss_mib": self.largest_bytes / MIB, "workers_pss_mib": self.together_bytes / MIB}
