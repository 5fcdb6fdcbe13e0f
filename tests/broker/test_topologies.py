"""More than one Redis: Redis Cluster, and a primary and a replica with a sentinel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.utils import timezone
from redis.cluster import RedisCluster

from django_asyncq import GateUnavailable, QueueFull, gates
from django_asyncq.broker import clients
from django_asyncq.broker.keys import alive_key, keys_of
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..topologies import Cluster, Monitored, cluster, monitored
from ..workers import run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

FACTORY = "django_asyncq.broker.cluster.client"


@pytest.fixture
def use_cluster(settings: Any, monkeypatch: pytest.MonkeyPatch, own_keys: None) -> Any:
    """Make this process, and those it starts, use a cluster."""

    def use(found: Cluster, location: str | None = None) -> None:
        monkeypatch.setenv("ASYNCQ_TEST_CLIENT_FACTORY", FACTORY)
        settings.ASYNCQ = {**settings.ASYNCQ, "CLIENT_FACTORY": FACTORY}
        settings.CACHES = {
            "default": {**django_settings.CACHES["default"], "LOCATION": location or found.location},
        }

    return use


@pytest.fixture
def three(use_cluster: Any) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster() as found:
        use_cluster(found)
        yield found
        clients.reset_clients()


@pytest.fixture
def sentinel(settings: Any, monkeypatch: pytest.MonkeyPatch, own_keys: None) -> Iterator[Monitored]:
    """A primary, its replica, and the sentinel that monitors them."""
    with monitored() as found:
        monkeypatch.setenv("ASYNCQ_TEST_SENTINEL_PORT", str(found.sentinel_port))
        options = {
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", found.sentinel_port)],
        }
        location = "redis://primary/0"
        settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": location, "OPTIONS": options}}
        yield found
        clients.reset_clients()


def pending_of(queue: str) -> str:
    """The pending key of a queue."""
    return keys_of(queue).pending


def all_finished() -> bool:
    """Whether every task is in a final state."""
    ended = (TaskState.SUCCEEDED, TaskState.FAILED)
    return not TaskRecord.objects.exclude(state__in=ended).exists()


def assert_all_succeeded(count: int) -> None:
    """Every task succeeded, and there are `count` of them."""
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == count == TaskRecord.objects.count()


def command(*words: str) -> Any:
    """What `manage.py asyncq` prints as JSON."""
    output = StringIO()
    call_command("asyncq", *words, stdout=output)
    return json.loads(output.getvalue())


# --- Cluster


@pytest.mark.parametrize("role", ["producer", "worker", "blocking"])
def test_one_address_is_enough_and_every_node_has_our_options(three: Cluster, use_cluster: Any, role: Any) -> None:
    """Neither OPTIONS nor the URL override our timeouts; all other options are kept."""
    use_cluster(three, f"{three.nodes[1].url}?socket_timeout=88&client_name=x")
    client = clients.client(role)
    assert isinstance(client, RedisCluster)
    assert {node.port for node in client.get_nodes()} == {node.port for node in three.nodes}
    for node in three.nodes:
        key = next(key for key in map(str, range(1000)) if three.node_of(key) is node)
        client.get(key)
        found = clients.pool_for(client, key).connection_kwargs
        assert found["port"] == node.port
        assert (found["socket_connect_timeout"], found["socket_timeout"]) == clients.TIMEOUTS[role]
        assert (found["protocol"], found["client_name"]) == (2, "x")


def test_queues_and_gates_on_several_nodes(three: Cluster) -> None:
    """Tasks with any options run, and leave nothing behind on any node."""
    queues = [three.name_on(node, pending_of) for node in three.nodes]
    gated = three.name_on(three.nodes[2], lambda name: gates.keys(name)[0])
    for queue in queues:
        tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(20)])
        tasks.add_async.using(queue_name=queue, priority=5).enqueue(1)
        tasks.add.using(queue_name=queue, run_after=timezone.now() + timedelta(seconds=1)).enqueue(1)
        tasks.fail_until.using(queue_name=queue).enqueue(2)
        tasks.gated.using(queue_name=queue).enqueue(gated)
    with pytest.raises(QueueFull):
        tasks.gated.enqueue_many([(gated,)] * 3)
    stats = command("stats", "--json")
    assert {queue["queue"]: queue["pending"] for queue in stats["queues"]} == dict.fromkeys(queues, 23)
    assert [found["occupancy"] for found in stats["gates"]] == [3]
    run_workers("--queues", ",".join(queues), "--processes", "2")
    assert_all_succeeded(3 * 24)
    assert gates.slots(gated) == []
    left = {key for node in three.nodes for key in node.ask("KEYS", "*:t:*") + node.ask("KEYS", "*:held:*")}
    assert left == set()


def test_idle_workers_are_woken_and_stop_at_once(three: Cluster, tmp_path: Path) -> None:
    """They block on the node of each queue, as they would on a single server."""
    queues = [three.name_on(node, pending_of) for node in three.nodes]
    # Neither the end of a wait nor a look is near.
    far = {"ASYNCQ_TEST_BLOCK": "90", "ASYNCQ_TEST_LOOK": "90"}
    with workers(tmp_path, "--queues", ",".join(queues), **far) as running:
        for queue in queues:
            tasks.add.using(queue_name=queue).enqueue(1)
        wait_until(all_finished, "all tasks")
        for queue, node in zip(queues, three.nodes, strict=True):
            wait_until(lambda node=node: blocked(node) >= 1, "a worker that waits")
            before = time.monotonic()
            tasks.add.using(queue_name=queue).enqueue(1)
            wait_until(all_finished, "the task")
            assert time.monotonic() - before < clients.BLOCK_SECONDS / 2
        before = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - before < 30
    assert_all_succeeded(6)


def blocked(node: EmbeddedRedis) -> int:
    """How many clients are blocked on a node."""
    with redis.Redis.from_url(node.url, protocol=2) as client:
        return sum("b" in each["flags"] for each in client.client_list())


def test_workers_follow_a_slot_that_moves(three: Cluster, tmp_path: Path) -> None:
    """A worker that blocks on the old node blocks on the new one afterwards."""
    source, target = three.nodes[:2]
    queue = three.name_on(source, pending_of)
    with workers(tmp_path, "--queues", queue):
        tasks.add.using(queue_name=queue).enqueue(1)
        wait_until(all_finished, "the first task")
        wait_until(lambda: blocked(source) >= 1, "a worker that waits")
        three.move(pending_of(queue), target)
        wait_until(lambda: blocked(target) >= 1, "a worker that waits at the other node")
        tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(5)])
        wait_until(all_finished, "tasks after the move")
    assert_all_succeeded(6)


@pytest.mark.parametrize("has_mark", [True, False])
def test_a_node_that_comes_back_empty_loses_nothing(three: Cluster, tmp_path: Path, has_mark: bool) -> None:
    """The rows are pushed again, also when the alive mark is on another node, which forgot nothing."""
    node = next(node for node in three.nodes if (node is three.node_of(alive_key())) == has_mark)
    queue = three.name_on(node, pending_of)
    tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(30)])
    node.kill()
    tasks.add.using(queue_name=queue).enqueue(1)
    node.restart()
    wait_until(lambda: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster")
    with workers(tmp_path, "--queues", queue):
        wait_until(all_finished, "all tasks")
    assert_all_succeeded(31)


def test_a_replica_is_promoted_and_nothing_is_lost(use_cluster: Any, tmp_path: Path) -> None:
    """Tasks that are enqueued while no node has the slot are accepted, and run when one has."""
    with cluster(with_replica=True) as found:
        use_cluster(found)
        queue = found.name_on(found.nodes[0], pending_of)
        with workers(tmp_path, "--queues", queue):
            tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(10)])
            wait_until(all_finished, "the tasks before")
            found.nodes[0].kill()
            tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(10)])
            wait_until(all_finished, "the tasks meanwhile")
            assert found.replica is not None
            assert found.replica.ask("ROLE")[0] == "master"
            tasks.add.using(queue_name=queue).enqueue_many([(n,) for n in range(10)])
            wait_until(all_finished, "the tasks after")
        assert_all_succeeded(30)
        clients.reset_clients()


def test_no_node_answers(three: Cluster, tmp_path: Path) -> None:
    """A process that starts during the outage accepts tasks; workers wait for the cluster, and then run them."""
    for node in three.nodes:
        node.kill()
    queue = "q"
    before = time.monotonic()
    tasks.add.using(queue_name=queue).enqueue(1)
    assert time.monotonic() - before < 1
    with pytest.raises(GateUnavailable):
        tasks.gated.using(queue_name=queue).enqueue("g")
    with workers(tmp_path, "--queues", queue) as running:
        wait_until(lambda: "is unreachable" in running.output(), "a line in the log")
        for node in three.nodes:
            node.restart()
        wait_until(all_finished, "the task")
        assert running.stop() == 0
    assert_all_succeeded(1)


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1/1", "unix:///tmp/redis.sock", "redis:///0"])
def test_an_address_that_cannot_be_a_node_is_refused(settings: Any, address: str) -> None:
    """The error shows what to write instead."""
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": address}}
    settings.ASYNCQ = {**settings.ASYNCQ, "CLIENT_FACTORY": FACTORY}
    with pytest.raises(ImproperlyConfigured, match=r"redis://10\.0\.0\.1:6379"):
        clients.client("producer")


def test_a_server_outside_a_cluster_is_refused_as_such(settings: Any) -> None:
    """It answers, so "is unreachable" would be misleading."""
    settings.ASYNCQ = {**settings.ASYNCQ, "CLIENT_FACTORY": FACTORY}
    with pytest.raises(ImproperlyConfigured, match="not a cluster node: remove ASYNCQ"):
        clients.client("producer")


# --- Sentinel


def role_of(server: EmbeddedRedis) -> bytes:
    """The role that a server reports; a demoted server closes its connections."""
    try:
        with redis.Redis.from_url(server.url, protocol=2) as client:
            return bytes(client.execute_command("ROLE")[0])
    except redis.ConnectionError:
        return b""


@pytest.mark.parametrize("how", ["killed", "demoted"])
def test_another_primary_is_found_and_nothing_is_lost(sentinel: Monitored, tmp_path: Path, how: str) -> None:
    """A primary that dies, and one that lives on as a replica and refuses to write."""
    with workers(tmp_path, "--processes", "2") as running:
        tasks.add.enqueue_many([(n,) for n in range(20)])
        wait_until(all_finished, "the tasks before")
        if how == "killed":
            sentinel.primary.kill()
        else:
            with redis.Redis(port=sentinel.sentinel_port, protocol=2) as client:
                client.execute_command("SENTINEL", "FAILOVER", "primary")
        for n in range(20):
            tasks.add.enqueue(n)
        wait_until(lambda: sentinel.primary_port() == sentinel.replica.port, "another primary")
        for n in range(20):
            tasks.add.enqueue(n)
        wait_until(all_finished, "the tasks meanwhile")
        if how == "demoted":
            # A sentinel names the new primary some seconds before the old one learns of it.
            wait_until(lambda: role_of(sentinel.primary) == b"slave", "the old primary's new role")
        tasks.add.enqueue(1)
        wait_until(all_finished, "the last task")
        assert running.stop() == 0
    assert_all_succeeded(61)
    assert clients.client("producer").info("server")["tcp_port"] == sentinel.replica.port
