"""More than one Redis: a cluster, and a primary with a replica and a sentinel. Real servers on loopback."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from django_asyncq.testing import EmbeddedRedis
from django_asyncq.testing.redis_server import death_signal_command, free_port, server_binary

from .workers import wait_until

SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000
SENTINEL_NAME = "primary"


class Node(EmbeddedRedis):
    """One server of a cluster."""

    def __init__(self, bus_port: int) -> None:
        self.bus_port = bus_port
        words = {"enabled": "yes", "port": str(bus_port), "node-timeout": str(NODE_TIMEOUT_MS)}
        super().__init__(*(word for name, value in words.items() for word in (f"--cluster-{name}", value)))

    def ask(self, *words: object) -> Any:
        """Return the reply to one command."""
        with redis.Redis.from_url(self.url, protocol=2, decode_responses=True) as client:
            return client.execute_command(*words)

    @property
    def id(self) -> str:
        """The node's id within the cluster."""
        return str(self.ask("CLUSTER", "MYID"))


class Cluster:
    """Three nodes with a third of the slots each; `replica` replicates the first one."""

    def __init__(self, nodes: list[Node], replica: Node | None) -> None:
        self.nodes = nodes
        self.replica = replica

    @property
    def location(self) -> str:
        """The value of LOCATION in CACHES."""
        return ",".join(node.url for node in self.nodes)

    def node_of(self, key: str) -> Node:
        """The node that had the key's slot at the start."""
        slot = int(self.nodes[0].ask("CLUSTER", "KEYSLOT", key))
        return self.nodes[slot * len(self.nodes) // SLOTS]

    def name_on(self, node: Node, name_of_key: Callable[[str], str]) -> str:
        """A name whose key is on a node."""
        return next(name for name in map("q{}".format, range(1000)) if self.node_of(name_of_key(name)) is node)

    def move(self, key: str, target: Node) -> None:
        """Move a key's slot with its content to another node, as resharding does."""
        source, slot = self.node_of(key), int(target.ask("CLUSTER", "KEYSLOT", key))
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        while names := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)


@contextmanager
def cluster(*, with_replica: bool = False) -> Iterator[Cluster]:
    """A running cluster."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(free_port())) for _ in range(4 if with_replica else 3)]
        primaries, replica = nodes[:3], nodes[3] if with_replica else None
        for number, node in enumerate(primaries):
            first, behind = -(-SLOTS * number // 3), -(-SLOTS * (number + 1) // 3)
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, behind - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        wait_until(lambda: all(knows(node, len(nodes)) for node in nodes), "a cluster")
        if replica is not None:
            replica.ask("CLUSTER", "REPLICATE", nodes[0].id)
            wait_until(lambda: "connected" in replica.ask("ROLE"), "a replica")
        yield Cluster(primaries, replica)


def knows(node: Node, count: int) -> bool:
    """Whether a node knows that many nodes and finds the cluster complete."""
    found = str(node.ask("CLUSTER", "INFO"))
    return "cluster_state:ok" in found and f"cluster_known_nodes:{count}" in found


class Monitored:
    """A primary and a replica that a sentinel monitors."""

    def __init__(self, primary: EmbeddedRedis, replica: EmbeddedRedis, sentinel_port: int) -> None:
        self.primary = primary
        self.replica = replica
        self.sentinel_port = sentinel_port

    def primary_port(self) -> int:
        """The port of the primary, as the sentinel reports it."""
        with redis.Redis(port=self.sentinel_port, protocol=2, decode_responses=True) as sentinel:
            return int(sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SENTINEL_NAME)[1])


@contextmanager
def monitored() -> Iterator[Monitored]:
    """A running primary, its replica, and a sentinel that decides alone."""
    with EmbeddedRedis() as primary, EmbeddedRedis("--replicaof", f"127.0.0.1 {primary.port}") as replica:
        with redis.Redis.from_url(primary.url, protocol=2) as client:
            wait_until(lambda: client.info("replication")["connected_slaves"] == 1, "a replica")
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            file = Path(folder) / "sentinel.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor {SENTINEL_NAME} 127.0.0.1 {primary.port} 1\n"
                f"sentinel down-after-milliseconds {SENTINEL_NAME} {NODE_TIMEOUT_MS}\n"
                f"sentinel failover-timeout {SENTINEL_NAME} 3000\n"
            )
            with (Path(folder) / "log").open("ab") as log:
                command = [*death_signal_command(), server_binary(), str(file), "--sentinel"]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                found = Monitored(primary, replica, port)
                wait_until(lambda: knows_replica(port), "a sentinel")
                yield found
            finally:
                process.terminate()
                process.wait(5)


def knows_replica(port: int) -> bool:
    """Whether the sentinel answers and has found the replica."""
    try:
        with redis.Redis(port=port, protocol=2) as sentinel:
            return len(sentinel.execute_command("SENTINEL", "REPLICAS", SENTINEL_NAME)) == 1
    except redis.ConnectionError:
        return False
