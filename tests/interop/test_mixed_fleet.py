"""Our workers and another program's server on one queue, with kills of both: each task is run by the right side.

Four kinds of tasks: from Go for us, from us for Go (`remote`), from us for us, and from Go for Go; ids that are used
again among the first. No task is lost, none is run by the wrong side, and none is run twice without a fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings

from django_asyncq.models import TaskRecord, TaskState

from ..fleet_tasks import elsewhere, ours
from ..go_peer import GoPeer
from ..workers import ROOT, Workers, history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "shared"
SLOTS, PROCESSES = 4, 2
# Of ids that Go uses again once a task of that id is gone.
REUSES = 3
ACTIONS = ("go:remote=result:1", "go:own=ok")


class Foreign:
    """The server of another program; it may be killed and started again."""

    def __init__(self, prefix: str, path: Path) -> None:
        self.path = path
        url = settings.CACHES["default"]["LOCATION"]
        self.command = [sys.executable, "-m", "tests.foreign", url, prefix, str(path), QUEUE, "--", *ACTIONS]
        self.start()

    def start(self) -> None:
        """Start it."""
        self.process = subprocess.Popen(self.command, cwd=ROOT)

    def kill(self) -> None:
        """Kill it, wherever it is, and start it again."""
        self.process.kill()
        self.process.wait()
        self.start()

    def lines(self) -> list[dict[str, Any]]:
        """Return what it ran; a line that a kill cut off is left out."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found


@contextmanager
def foreign_server(prefix: str, path: Path) -> Iterator[Foreign]:
    """Run the other program's server; it is stopped at the end."""
    found = Foreign(prefix, path)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


class Fleet:
    """The tasks of one test, and what is known of them."""

    def __init__(self, client: redis.Redis, prefix: str, count: int) -> None:
        self.peer = GoPeer(client, QUEUE, prefix)
        self.count = count
        self.reused = 0
        self.from_go = [self.peer.enqueue("fleet:ours", payload(number)) for number in range(count)]
        self.of_go = [self.peer.enqueue("go:own", retention=3600) for _ in range(count)]
        queued = ours.using(queue_name=QUEUE)
        for number in range(count, 2 * count):
            queued.enqueue(number)
            elsewhere.enqueue(number=number)

    @property
    def expected(self) -> int:
        """How many rows there will be."""
        return 3 * self.count + REUSES

    def reuse_id(self) -> None:
        """Enqueue one more task with an id that Go uses again, when the one before it is gone."""
        if self.reused < REUSES:
            with suppress(KeyError):
                self.peer.enqueue("fleet:ours", payload(2 * self.count + self.reused), id="report")
                self.reused += 1

    def hurry(self) -> None:
        """Do as an operator with asynq's tools who does not want to wait for what has no row and was given back."""
        for id in self.of_go:
            if self.peer.state(id) in ("scheduled", "retry"):
                # Somebody else may have moved it.
                with suppress(redis.ResponseError):
                    self.peer.inspector_run(id)

    def assert_nothing_of_go_is_gone(self) -> None:
        """What has no row is never removed by us: its hash is there until its retention is over."""
        gone = [id for id in self.of_go if not self.peer.client.exists(self.peer.task_key(id))]
        assert gone == []

    def is_finished(self) -> bool:
        """Return whether all tasks have succeeded."""
        done = TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count()
        return done == self.expected and all(self.peer.state(id) == "completed" for id in self.of_go)

    def describe(self) -> str:
        """Say what is left."""
        rows = TaskRecord.objects.exclude(state=TaskState.SUCCEEDED)
        left = [
            (row.name, row.state, row.attempt, row.retry_at, [e["message"] for e in row.errors][-2:]) for row in rows
        ]
        go = Counter(self.peer.state(id) for id in self.of_go)
        return f"rows: {TaskRecord.objects.count()} of {self.expected}; left: {left[:10]}; Go's own: {go}"


def payload(number: int) -> bytes:
    """Return the arguments of one task for us."""
    return json.dumps({"number": number}).encode()


def kill_worker(fleet: Workers) -> int:
    """Kill one worker process, if one lives; return how many were killed."""
    for pid in fleet.children()[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return 1
    return 0


def run_fleet(client: redis.Redis, prefix: str, folder: Path, count: int, seconds: float, kills: int) -> None:
    """Run so many tasks of each kind; kill one of ours and the foreign server in turns, as often as `kills` says.

    The kills are spread over the runs of our workers, so they come while there is work on a host of any speed.
    """
    log = folder / "history"
    fleet = Fleet(client, prefix, count)
    options = ("--queues", QUEUE, "--processes", str(PROCESSES), "--concurrency", str(SLOTS))
    began_at = time.monotonic()
    our_kills = go_kills = 0
    with (
        foreign_server(prefix, folder / "foreign") as foreign,
        workers(folder, *options, ASYNCQ_TEST_HISTORY=str(log)) as running,
    ):
        while not fleet.is_finished():
            now = time.monotonic()
            assert now - began_at < seconds, f"{fleet.describe()}\n{running.output()[-4000:]}"
            fleet.reuse_id()
            fleet.hurry()
            fleet.assert_nothing_of_go_is_gone()
            if len(history(log)) > (our_kills + go_kills) * 2 * count / kills:
                if our_kills > go_kills:
                    foreign.kill()
                    go_kills += 1
                else:
                    our_kills += kill_worker(running)
            time.sleep(0.1)
        lines = foreign.lines()
    assert our_kills and go_kills
    check(fleet, history(log), lines, our_kills, go_kills)


def check(fleet: Fleet, ran: list[dict[str, Any]], lines: list[dict[str, Any]], our_kills: int, go_kills: int) -> None:
    """Check that each side has run what is for it, and nothing twice without a fault."""
    by_us = Counter(line["number"] for line in ran)
    assert set(by_us) == set(range(2 * fleet.count + REUSES))
    # A kill costs at most what the process ran, and what it had finished and not yet written.
    assert sum(by_us.values()) - len(by_us) <= our_kills * 2 * SLOTS, by_us.most_common(5)
    by_go = Counter(line["id"] for line in lines if line["end"] == "ok")
    assert {line["type"] for line in lines if line["end"] == "ok"} <= {"go:remote", "go:own"}
    assert set(by_go) <= {*fleet.of_go, *(str(row.pk) for row in TaskRecord.objects.filter(is_remote=True))}
    assert len(by_go) >= 2 * fleet.count - go_kills
    assert sum(by_go.values()) - len(by_go) <= go_kills
    remote_rows = TaskRecord.objects.filter(is_remote=True)
    assert {row.return_value for row in remote_rows} == {1}
    assert not any(row.worker_ids for row in remote_rows)
    assert Counter(row.wire_id for row in TaskRecord.objects.exclude(wire_id=None)) == Counter(
        [*fleet.from_go, *["report"] * REUSES]
    )


def test_a_mixed_fleet_loses_nothing(
    own_keys: None, key_prefix: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Some hundred tasks, and some kills."""
    run_fleet(redis_client, key_prefix, tmp_path, 40, 120.0, 4)


def test_idle_workers_leave_a_task_to_the_other_program(
    own_keys: None, key_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server asks once a second, as asynq's does; ours are notified at once, and would always come first."""
    monkeypatch.setenv("ASYNCQ_TEST_FOREIGN_IDLE", "1")
    with (
        foreign_server(prefix=key_prefix, path=tmp_path / "foreign"),
        workers(tmp_path, "--queues", QUEUE, "--processes", "1") as running,
    ):
        wait_until(lambda: "started" in running.output(), "workers")
        for number in range(3):
            elsewhere.enqueue(number=number)
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 3, "the tasks", 30)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_large_mixed_fleet_loses_nothing(
    own_keys: None, key_prefix: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """5,000 tasks of each kind, and 40 kills."""
    run_fleet(redis_client, key_prefix, tmp_path, 5_000, 3_000.0, 40)
