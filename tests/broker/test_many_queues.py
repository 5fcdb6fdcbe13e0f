"""A project with many queues: an idle worker waits for all of them on one connection, and nobody asks empty queues."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq import control
from django_asyncq.broker import Broker, access
from django_asyncq.broker.access import FEW, queues_with
from django_asyncq.broker.keys import keys_of, own_queues_key
from django_asyncq.models import PauseKind, TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..workers import Workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 12
# Far less than a look of a worker's own is away.
SOON_SECONDS = 30


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no worker look by itself before a test is over."""
    monkeypatch.setenv("ASYNCQ_TEST_LOOK", "120")


@pytest.fixture
def queues() -> list[str]:
    """More queues than are asked without a look."""
    names = [f"many-{number:03d}" for number in range(MANY)]
    Broker().client.sadd(own_queues_key(), *names)
    return names


def push(queue: str, *ids: str) -> None:
    """Put ids into a queue as any program does."""
    Broker().client.lpush(keys_of(queue).pending, *ids)


# --- which queues have anything


@pytest.mark.parametrize("count", [FEW, FEW + 1, 2_500])
def test_queues_with_something_in_them_are_found_at_once(redis_client: redis.Redis, count: int) -> None:
    """In their order, by few scripts; few queues are not looked at."""
    names = [f"q{number}" for number in range(count)]
    push(names[-1], "a")
    push(names[0], "a")
    before = redis_client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    found = queues_with(Broker(), names, "pending", "priority")
    calls = redis_client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0) - before
    assert found == (names if count == FEW else [names[0], names[-1]])
    assert calls <= (0 if count == FEW else 2 * count / access.KEYS_PER_CALL + 1)


# --- whole fleets


def blocked() -> int:
    """How many connections wait in Redis."""
    return int(Broker().client.info("clients")["blocked_clients"])


def wait_idle(*fleets: Workers) -> None:
    """Wait until each process waits, on one connection."""
    wait_until(lambda: blocked() == sum(len(fleet.children()) for fleet in fleets) > 0, "idle workers")


def all_queues() -> int:
    return len(Broker().queues())


def has_finished(ids: list[str]) -> bool:
    return TaskRecord.objects.filter(pk__in=ids, state=TaskState.SUCCEEDED).count() == len(ids)


def test_tasks_of_any_queue_start_at_once(queues: list[str], tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """Long before a worker would look; a queue that is new, paused or resumed as well."""
    Broker().client.sadd(own_queues_key(), *queues)
    with workers(tmp_path, "--processes", "2") as fleet:
        wait_idle(fleet)
        began = time.monotonic()
        ids = [tasks.stamp.using(queue_name=queue).enqueue().id for queue in queues]
        wait_until(lambda: has_finished(ids), "the first tasks", SOON_SECONDS)
        for queue in (queues[3], "quite-new", "quite-new"):
            result = tasks.stamp.using(queue_name=queue).enqueue()
            wait_until(lambda id=result.id: has_finished([id]), f"the task of {queue}", SOON_SECONDS)
        assert time.monotonic() - began < 4 * SOON_SECONDS
        control.pause(PauseKind.QUEUE, queues[0])
        held = tasks.stamp.using(queue_name=queues[0]).enqueue()
        other = tasks.stamp.using(queue_name=queues[1]).enqueue()
        wait_until(lambda: has_finished([other.id]), "the other task", SOON_SECONDS)
        assert not has_finished([held.id])
        control.resume(PauseKind.QUEUE, queues[0])
        wait_until(lambda: has_finished([held.id]), "the task of the resumed queue", SOON_SECONDS)


def test_a_burst_of_tasks_wakes_every_worker(queues: list[str], tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """Each takes what it can."""
    Broker().client.sadd(own_queues_key(), *queues)
    with workers(tmp_path, "--processes", "3", "--concurrency", "1") as fleet:
        wait_idle(fleet)
        ids = [tasks.nap.using(queue_name=queues[0]).enqueue(0.8).id for _ in range(3)]
        wait_until(lambda: has_finished(ids), "all tasks", SOON_SECONDS)
        found = TaskRecord.objects.filter(pk__in=ids).values_list("worker_ids", flat=True)
        assert len({each[0] for each in found}) == 3


@pytest.mark.faults
def test_killed_workers_and_leaders_lose_no_task(queues: list[str], tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """A worker that was woken, the leader; Redis is emptied too."""
    Broker().client.sadd(own_queues_key(), *queues)
    ids: list[str] = []
    with ExitStack() as stack:
        folders = [tmp_path / name for name in "abc"]
        for folder in folders:
            folder.mkdir()
        fleets = [stack.enter_context(workers(each, "--processes", "2")) for each in folders[:2]]
        wait_idle(*fleets)
        for turn in range(20):
            ids += [tasks.stamp.using(queue_name=queues[(turn + each) % MANY]).enqueue().id for each in range(5)]
            if turn == 10:
                fleets[0].process.kill()
                fleets.append(stack.enter_context(workers(folders[2], "--processes", "2")))
            elif turn == 15:
                Broker().client.flushall()
            elif pids := fleets[-1].children():
                os.kill(pids[turn % len(pids)], signal.SIGKILL)
            time.sleep(0.2)
        wait_until(lambda: has_finished(ids), "all tasks", 90)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_an_idle_fleet_costs(tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """200 queues: connections and commands of one process, and of 50 under 5 supervisors; prints them. By hand."""
    names = [f"many-{number:03d}" for number in range(200)]
    client = Broker().client
    client.sadd(own_queues_key(), *names)
    with ExitStack() as stack:
        fleets: list[Workers] = []
        for number, processes in enumerate([1, 9, 10, 10, 10, 10]):
            folder = tmp_path / str(number)
            folder.mkdir()
            fleets.append(stack.enter_context(workers(folder, "--processes", str(processes), "--concurrency", "4")))
            if number in (0, 5):
                wait_until(lambda: ready(fleets) == sum([1, 9, 10, 10, 10, 10][: len(fleets)]), "the fleet", 120)
                time.sleep(10)
                print("\n" + figures(client, fleets))
                print(latencies(names))
    assert client.info("clients")["connected_clients"] < 1_000


def ready(fleets: list[Workers]) -> int:
    """How many processes have started."""
    return sum(fleet.output().count(" started: ") for fleet in fleets)


def figures(client: Any, fleets: list[Workers], seconds: float = 20.0) -> str:
    """Return what a fleet sends while nothing happens."""

    def calls() -> dict[str, int]:
        found = client.info("commandstats")
        return {name: found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "blpop")}

    before, cpu = calls(), client.info("cpu")
    time.sleep(seconds)
    after, cpu_after = calls(), client.info("cpu")
    used = sum(cpu_after[f"used_cpu_{each}"] - cpu[f"used_cpu_{each}"] for each in ("user", "sys"))
    rates = ", ".join(f"{name} {(after[name] - before[name]) / seconds:.1f}/s" for name in before)
    clients = client.info("clients")
    return (
        f"{sum(len(each.children()) for each in fleets)} processes, {all_queues()} queues: "
        f"{clients['connected_clients']} connections, {rates}, Redis {100 * used / seconds:.2f} % of a core"
    )


def latencies(names: list[str]) -> str:
    """Return how long tasks wait that come one by one."""
    found = []
    for number in range(60):
        result = tasks.stamp.using(queue_name=names[number * 3]).enqueue()
        wait_until(lambda id=result.id: has_finished([id]), "a task", 20)
        row = TaskRecord.objects.get(pk=result.id)
        assert row.started_at and row.enqueued_at
        found.append(1_000 * (row.started_at - row.enqueued_at).total_seconds())
        time.sleep(0.05)
    found.sort()
    return f"enqueued to begun: median {found[30]:.1f} ms, 90 % {found[54]:.1f}, most {found[-1]:.1f}"
