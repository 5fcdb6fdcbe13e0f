"""A project with many queues: idle workers wait at a wake list, the leader wakes them, and nobody asks empty queues."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq import pausing
from django_asyncq.broker import Broker, many_queues
from django_asyncq.broker.keys import drained_key, keys_of, own_queues_key, wake_list_key, wake_lists_key
from django_asyncq.broker.many_queues import FEW, queues_with
from django_asyncq.broker.wake_lists import MOST_QUEUES, Waker, WakeWait, wake_list_of
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import PauseKind, TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.wakeup import readable

from . import tasks
from .workers import Workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)
MANY = 12
# A worker that is not woken looks after five.
SOON_SECONDS = 3.0


@pytest.fixture
def queues() -> list[str]:
    """More queues than a worker waits for one by one."""
    names = [f"many-{number:03d}" for number in range(MANY)]
    Broker().client.sadd(own_queues_key(), *names)
    return names


def push(queue: str, *ids: str) -> None:
    """Put ids into a queue as any program does."""
    Broker().client.lpush(keys_of(queue).pending, *ids)


def pop(queue: str) -> None:
    Broker().client.delete(keys_of(queue).pending)


class Leader:
    """The waker of a leader, driven by the test."""

    def __init__(self, queues: list[str]) -> None:
        self.waker = Waker(Broker())
        self.queues = queues
        self.now = 1_000.0

    def begin(self) -> None:
        """Wait for all that is to be waited for."""
        self.waker.begin(lambda: self.queues, self.now)

    def turn(self, seconds: float = 0.3) -> list[str]:
        """Wait once as its thread does; return what was read, "" for the drained queues."""
        self.begin()
        sockets = self.waker.sockets
        ready = [sockets[each] for each in readable(list(sockets), seconds)] if sockets else []
        for queue in ready:
            self.waker.read(queue, self.now)
        return sorted(ready)


@contextmanager
def leading(queues: list[str]) -> Iterator[Leader]:
    """A leader that has read which wake lists there are."""
    leader = Leader(queues)
    try:
        leader.turn(0.0)
        leader.begin()
        yield leader
    finally:
        leader.waker.close()


@contextmanager
def idle(queues: list[str], count: int = 1, named: list[str] | None = None) -> Iterator[list[WakeWait]]:
    """Some workers that wait at the wake list, in their order."""
    waits = [WakeWait(Broker(), named or ()) for _ in range(count)]
    try:
        for wait in waits:
            wait.begin(queues)
        yield waits
    finally:
        for wait in waits:
            wait.close()


def is_woken(wait: WakeWait, seconds: float = 0.5) -> bool:
    """Whether it is woken within some seconds."""
    return bool(wait.socket and readable([wait.socket], seconds) and wait.read())


# --- which queues have anything


@pytest.mark.parametrize("count", [FEW, FEW + 1, 2_500])
def test_queues_with_something_in_them_are_found_at_once(redis_client: redis.Redis, count: int) -> None:
    """In their order, by few scripts; few queues are not looked at."""
    names = [f"q{number}" for number in range(count)]
    push(names[-1], "a")
    push(names[3], "a")
    before = redis_client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    found = queues_with(Broker(), names, "pending", "priority")
    calls = redis_client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0) - before
    assert found == (names if count == FEW else [names[3], names[-1]])
    assert calls <= (0 if count == FEW else 2 * count / many_queues.KEYS_PER_CALL + 1)


# --- the wake list


def test_a_push_wakes_the_worker_that_has_waited_longest(queues: list[str]) -> None:
    """And no other; when it has found the queue empty, the next push does."""
    with idle(queues, 2) as (first, second), leading(queues) as leader:
        push(queues[5], "a")
        assert leader.turn() == [queues[5]]
        assert is_woken(first) and not is_woken(second, 0.1)
        pop(queues[5])
        first.settle([queues[5]], is_full=True)
        assert leader.turn() == [""]
        push(queues[5], "b")
        assert leader.turn() == [queues[5]]
        assert is_woken(second) and not is_woken(first, 0.1)


def test_a_backlog_wakes_one_worker_until_the_queue_is_drained(queues: list[str]) -> None:
    """A worker that is full wakes the next; when nobody waits, the name waits, once."""
    with idle(queues, 2) as (first, second), leading(queues) as leader:
        push(queues[0], "a", "b")
        assert leader.turn() == [queues[0]]
        assert leader.turn() == []
        assert is_woken(first)
        first.settle([], is_full=True)
        assert is_woken(second)
        for each in (second, first):
            each.settle([], is_full=True)
            push(queues[1], "c")
            leader.turn(0.1)
        names = Broker().client.lrange(wake_list_key(list_name(), "default"), 0, -1)
        assert sorted(names) == [queues[0].encode(), queues[1].encode()]
        # Whoever becomes idle gets it at once.
        second.begin(queues)
        assert is_woken(second)


def list_name() -> str:
    """The name of the wake list of workers that serve all queues."""
    return hashlib.sha256(b"[]").hexdigest()[:16]


def test_a_worker_that_says_nothing_is_followed_by_the_next_after_a_second(queues: list[str]) -> None:
    """Its worker died, or the queue is paused."""
    with idle(queues, 2) as (first, second), leading(queues) as leader:
        push(queues[0], "a")
        leader.turn()
        assert is_woken(first)
        leader.now += 0.9
        assert leader.turn(0.1) == []
        leader.now += 0.2
        assert leader.turn() == [queues[0]]
        assert is_woken(second)


def test_a_paused_queue_wakes_nobody_else(queues: list[str]) -> None:
    """The next worker would find it paused, too."""
    with idle(queues, 2) as (first, second), leading(queues) as leader:
        push(queues[0], "a")
        leader.turn()
        assert is_woken(first)
        first.settle([], [queues[0]], is_full=True)
        assert not is_woken(second, 0.1) and leader.turn(0.1) == []


def test_a_worker_that_stops_wakes_the_next_one(queues: list[str]) -> None:
    """It had been woken and had not looked."""
    with idle(queues, 2) as (first, second), leading(queues) as leader:
        push(queues[0], "a")
        leader.turn()
        assert is_woken(first)
        first.close()
        assert is_woken(second)


def test_workers_of_other_queues_have_another_wake_list(queues: list[str]) -> None:
    """A push wakes a worker at each list whose workers serve the queue."""
    named = queues[:10]
    with idle(queues) as (everything,), idle(named, named=named) as (some,), leading(queues) as leader:
        push(queues[11], "a")
        leader.turn()
        assert is_woken(everything) and not is_woken(some, 0.1)
        everything.begin(queues)
        push(queues[1], "a")
        leader.turn()
        assert is_woken(everything) and is_woken(some)


def test_a_new_queue_or_wake_list_is_announced_to_the_leader(queues: list[str]) -> None:
    """It need not look for them."""
    with leading(queues) as leader, idle(queues) as (wait,):
        assert leader.turn() == [""]
        leader.turn(0.0)
        leader.queues = [*queues, "new"]
        push(queues[0], "a")
        leader.turn()
        assert is_woken(wait)
        wait.begin(leader.queues)
        assert "" in leader.turn()
        leader.turn(0.0)
        push("new", "a")
        assert "new" in leader.turn()


def test_wake_lists_without_workers_are_forgotten(queues: list[str], redis_client: redis.Redis) -> None:
    """And then nobody waits for their queues."""
    with idle(queues), leading(queues) as leader:
        assert len(leader.waker.sockets) == 1 + MANY
        redis_client.zadd(wake_lists_key(), {wake_list_of([]): 1.0})
        leader.now += 100
        leader.begin()
        assert len(leader.waker.sockets) == 1
        assert redis_client.zcard(wake_lists_key()) == 0


@pytest.mark.parametrize(
    "odd", [b"no JSON", b"{}", b"7", b"[1, null]", b'["other"]', b"[" * 5_000, b"\xff\xfe", b'"' + b"x" * 100_000]
)
def test_what_another_program_writes_as_a_wake_list_stops_nothing(
    queues: list[str], redis_client: redis.Redis, odd: bytes
) -> None:
    """Nor what it calls drained, or a key of another type."""
    redis_client.zadd(wake_lists_key(), {odd: 2.0**52})
    redis_client.rpush(drained_key(), odd, b"no such queue")
    with idle(queues) as (wait,), leading(queues) as leader:
        for _ in range(3):
            leader.turn()
        push(queues[2], "a")
        leader.turn()
        assert is_woken(wait)


def test_keys_of_another_type_are_set_aside(queues: list[str], redis_client: redis.Redis) -> None:
    """Who blocks there fails once; another program may have written them."""
    with idle(queues):
        own = wake_list_key(list_name())
    leader = Leader(queues)
    for key in (drained_key(), wake_lists_key(), own, keys_of(queues[0]).pending):
        redis_client.set(key, "odd")
    wait = WakeWait(Broker(), ())
    for each in (leader.turn, lambda: wait.begin(queues) or is_woken(wait), leader.turn):
        with pytest.raises(BrokerUnavailable, match="wrong kind of value"):
            each()
        leader.waker.close()
    wait.begin(queues)
    push(queues[0], "a")
    while queues[0] not in leader.turn():
        pass
    assert is_woken(wait)
    wait.close()
    leader.waker.close()
    assert len(redis_client.keys("*odd*")) == 4


def test_the_leader_waits_for_a_bounded_number_of_queues(redis_client: redis.Redis) -> None:
    """Each is a connection."""
    names = [f"q{number}" for number in range(MOST_QUEUES + 10)]
    with idle(names), leading(names) as leader:
        assert len(leader.waker.sockets) == 1 + MOST_QUEUES


def test_a_wait_whose_connection_has_died_says_that_redis_is_unreachable(
    queues: list[str], own_redis: EmbeddedRedis
) -> None:
    """On both sides, and both go on when it is back."""
    with idle(queues) as (wait,), leading(queues) as leader:
        own_redis.kill()
        with pytest.raises(BrokerUnavailable):
            wait.read()
        with pytest.raises(BrokerUnavailable):
            leader.turn()
        leader.waker.close()
        own_redis.start()
        wait.begin(queues)
        assert leader.turn() in ([], [""])
        leader.now += 100
        leader.turn(0.0)
        push(queues[0], "a")
        assert queues[0] in leader.turn()


# --- whole fleets


def blocked() -> int:
    """How many connections wait in Redis."""
    return int(Broker().client.info("clients")["blocked_clients"])


def wait_idle(*fleets: Workers) -> None:
    """Wait until each process waits at the wake list, and the leader for every queue."""

    def waits() -> bool:
        processes = sum(len(fleet.children()) for fleet in fleets)
        return processes > 0 and blocked() >= processes + all_queues() + 1

    wait_until(waits, "idle workers")


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
        pausing.pause(PauseKind.QUEUE, queues[0])
        held = tasks.stamp.using(queue_name=queues[0]).enqueue()
        other = tasks.stamp.using(queue_name=queues[1]).enqueue()
        wait_until(lambda: has_finished([other.id]), "the other task", SOON_SECONDS)
        assert not has_finished([held.id])
        pausing.resume(PauseKind.QUEUE, queues[0])
        wait_until(lambda: has_finished([held.id]), "the task of the resumed queue", SOON_SECONDS)


def test_a_burst_of_tasks_wakes_every_worker(queues: list[str], tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """The one that is woken takes what it can, and wakes the next."""
    Broker().client.sadd(own_queues_key(), *queues)
    with workers(tmp_path, "--processes", "3", "--concurrency", "1") as fleet:
        wait_idle(fleet)
        ids = [tasks.nap.using(queue_name=queues[0]).enqueue(0.8).id for _ in range(3)]
        wait_until(lambda: has_finished(ids), "all tasks", SOON_SECONDS)
        found = TaskRecord.objects.filter(pk__in=ids).values_list("worker_ids", flat=True)
        assert len({each[0] for each in found}) == 3


@pytest.mark.faults
def test_killed_workers_and_leaders_lose_no_task(queues: list[str], tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """A worker that was woken, the leader that is to wake one; Redis is emptied too."""
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
        return {name: found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "blmove", "blpop")}

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
