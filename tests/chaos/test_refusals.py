"""Redis answers and refuses: OOM, READONLY, LOADING, MISCONF, BUSY, NOSCRIPT, a policy that evicts.

A refusal is an outage: requests succeed, running tasks go on, and what was refused is done afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings

from django_asyncq import lifecycle
from django_asyncq.lifecycle import dispatching
from django_asyncq.models import TaskRecord, TaskState
from tests import tasks
from tests.workers import Workers, history, start_workers, wait_until, workers

from . import log_lines
from .rig import Server, free_port

pytestmark = pytest.mark.django_db(transaction=True)
# Shorter than the lease of 2 s: a lease that is renewed before and after the refusal does not expire.
REFUSES_SECONDS = 1.2
SHUT_PORT = 1


@pytest.fixture
def server(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of this test alone, with RDB persistence, so that saving can be made to fail."""
    found = Server(free_port(), tmp_path / "redis", "valkey", "RDB")
    found.extra = ["--enable-protected-configs", "local"]
    found.start()
    monkeypatch.setenv("ASYNCQ_TEST_REDIS_URL", found.url)
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": found.url}}
    yield found
    found.kill()


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@contextmanager
def out_of_memory(server: Server) -> Iterator[None]:
    """OOM: set `maxmemory` below what is used, with a policy that evicts nothing."""
    with server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextmanager
def replica(server: Server) -> Iterator[None]:
    """READONLY: make it the replica of an unreachable primary."""
    with server.client() as client:
        client.config_set("replica-serve-stale-data", "yes")
        client.replicaof("127.0.0.1", SHUT_PORT)
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def disk_full(server: Server) -> Iterator[None]:
    """MISCONF: put a folder where the dump is to be written, so that saving fails."""
    dump = server.folder / "nowhere.rdb"
    dump.mkdir()
    with server.client() as client:
        client.config_set("dbfilename", dump.name)
        _save(client)
        yield
        dump.rmdir()
        _save(client)


def _save(client: redis.Redis) -> None:
    """Save in the background, and wait until that has succeeded or failed."""
    wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "an earlier save")
    client.bgsave()
    wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "the save")


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """BUSY: run a script that never returns."""
    with server.client() as client:
        client.config_set("busy-reply-threshold", 50)

    def spin() -> None:
        with suppress(redis.RedisError), server.client(socket_timeout=60) as client:
            client.eval("while true do end", 0)

    thread = threading.Thread(target=spin)
    thread.start()
    time.sleep(0.2)
    yield
    with server.client(socket_timeout=60) as client:
        client.execute_command("SCRIPT KILL")
    thread.join()


@contextmanager
def asleep(server: Server) -> Iterator[None]:
    """Silence instead of a refusal: DEBUG SLEEP, like a slow command."""

    def sleep() -> None:
        with suppress(redis.RedisError), server.client(socket_timeout=60) as client:
            client.execute_command("DEBUG", "SLEEP", str(REFUSES_SECONDS))

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.05)
    yield
    thread.join()


def complaints(fleet: Workers) -> Counter[str]:
    """Count the lines of the log that complain, by their text."""
    lines = fleet.output().splitlines()
    return Counter(text for line in lines for text in log_lines.COMPLAINTS if text in line)


@pytest.mark.parametrize("refusal", [out_of_memory, replica, disk_full, busy, asleep])
def test_refusing_server_costs_no_request_and_no_run(
    refusal: Callable[[Server], Any],
    server: Server,
    history_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running tasks go on and finish once; a request is accepted in time, and its task runs afterwards.

    The refusal is shorter than a lease; a longer one may cost a second run (see `reliability.md`).
    """
    monkeypatch.setenv("ASYNCQ_TEST_LEASE", "10")
    running = [tasks.nap.enqueue(seconds) for seconds in (0.8, 3.0)]
    with workers(tmp_path, "--concurrency", "4") as fleet:
        wait_until(lambda: len(history(history_path)) == 2, "running tasks")
        with refusal(server):
            began = time.monotonic()
            late = tasks.nap.enqueue(0)
            assert time.monotonic() - began < 1.1
            assert TaskRecord.objects.get(id=late.id).state == TaskState.QUEUED
            time.sleep(REFUSES_SECONDS)
        dispatching._breaker_closes_at = 0.0
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 3, "three tasks that succeeded")
        assert "Traceback" not in fleet.output()
        assert max(complaints(fleet).values(), default=0) <= 4
    begun = Counter(line["id"] for line in history(history_path) if line["event"] == "begin")
    assert set(begun.values()) == {1}
    assert {result.id for result in (*running, late)} == set(begun)
    with server.client() as client:
        assert not list(client.scan_iter("*:held:*"))


def test_out_of_memory_for_longer_than_the_lease_renews_and_acknowledges(
    server: Server, history_path: Path, tmp_path: Path
) -> None:
    """Renewals and acknowledgements need no memory: no lease expires, and a finished task leaves Redis meanwhile."""
    ending, going_on = tasks.nap.enqueue(3.0), tasks.nap.enqueue(7.0)
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: len(history(history_path)) == 2, "running tasks")
        with out_of_memory(server), server.client() as client:
            wait_until(lambda: TaskRecord.objects.get(id=ending.id).state == TaskState.SUCCEEDED, "the shorter one")
            wait_until(lambda: not client.exists(f"{_base()}t:{ending.id}"), "its acknowledgement", 3)
            time.sleep(2.0)
            lease_end = client.zscore(f"{_base()}lease", going_on.id)
            assert lease_end is not None
            assert lease_end > client.time()[0] - 1
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 2, "the longer one")
        assert complaints(fleet)[log_lines.LEASES_NOT_RENEWED] == 0
    begun = Counter(line["id"] for line in history(history_path) if line["event"] == "begin")
    assert begun == {ending.id: 1, going_on.id: 1}


def _base() -> str:
    from django_asyncq.broker.keys import QueueKeys

    return QueueKeys("default").base


def test_server_that_is_loading_is_waited_for(server: Server, history_path: Path, tmp_path: Path) -> None:
    """LOADING: a request is accepted while a restarted server loads its dump, and its task runs afterwards."""
    with workers(tmp_path) as fleet:
        first = tasks.nap.enqueue(0)
        wait_until(lambda: TaskRecord.objects.get(id=first.id).state == TaskState.SUCCEEDED, "a first task")
        with server.client() as client:
            with client.pipeline(transaction=False) as pipeline:
                for number in range(2000):
                    pipeline.set(f"ballast:{number}", "x")
                pipeline.execute()
            _save(client)
        server.kill()
        # 1 ms for each key makes two seconds of loading; the server serves clients after each KiB.
        server.extra += ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]
        server.launch()
        wait_until(lambda: _says_loading(server), "a server that is loading")
        began = time.monotonic()
        late = tasks.nap.enqueue(0)
        assert time.monotonic() - began < 1.1
        dispatching._breaker_closes_at = 0.0
        wait_until(lambda: TaskRecord.objects.get(id=late.id).state == TaskState.SUCCEEDED, "the late task")
        assert "Traceback" not in fleet.output()


def _says_loading(server: Server) -> bool:
    try:
        with server.client() as client:
            client.get("x")
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.RedisError:
        return False
    return False


def test_scripts_that_redis_forgets_repeatedly_are_loaded_again(
    server: Server, history_path: Path, tmp_path: Path
) -> None:
    """NOSCRIPT: SCRIPT FLUSH each 20 ms disturbs no task and logs nothing."""
    with workers(tmp_path) as fleet, server.client() as client:
        for number in range(100):
            tasks.add.enqueue(number)
            client.script_flush()
            time.sleep(0.02)
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 100, "all tasks")
        assert complaints(fleet) == {}
    assert len(history(history_path)) == 100


def test_policy_that_evicts_is_reported_at_start(server: Server) -> None:
    """A worker reports a policy that may evict keys, and which one to set."""
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    done = start_workers("--burst")
    assert done.returncode == 0
    assert "noeviction" in done.stdout + done.stderr


def test_dispatch_tries_again_only_after_a_pause(server: Server) -> None:
    """After one refusal the breaker lets the next requests skip Redis, so that they do not wait for it."""
    with out_of_memory(server):
        tasks.add.enqueue(1)
        record = TaskRecord.objects.get()
        with server.client() as client:
            before = client.info("stats")["total_commands_processed"]
            for _ in range(100):
                lifecycle.dispatch([record])
            asked = client.info("stats")["total_commands_processed"] - before
        # Only the look before, and what a pause that is over lets through.
        assert asked < 10, asked
