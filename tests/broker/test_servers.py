"""Worker processes as asynq's tools show them: the bytes, the keys, what reads them, and requests to drain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from django_asyncq.broker import Broker, Entry, servers
from django_asyncq.broker.keys import (
    drain_key,
    server_key,
    server_running_key,
    servers_key,
    worker_info_key,
)
from django_asyncq.broker.message import (
    RunningInfo,
    ServerInfo,
    TaskMessage,
    UndecodableMessage,
    decode_running,
    decode_server,
    decode_type,
)
from django_asyncq.broker.servers import Details, ShownWorker

FIXTURES = Path(__file__).parent.parent / "fixtures" / "asynq"
NOON = datetime(2026, 11, 21, 12, 0, 0, 5, tzinfo=UTC)
SERVER = ServerInfo(
    host="h",
    pid=7,
    server_id=servers.server_id_of("h:1:7:x"),
    concurrency=8,
    queues={"default": 3, "mail": 0},
    is_strict=True,
    status="active",
    started_at=NOON,
    active=1,
)
RUNNING = RunningInfo(
    host="h",
    pid=7,
    server_id=SERVER.server_id,
    id="t-1",
    type="a.task",
    payload=b"{}",
    queue="default",
    started_at=NOON,
    deadline=NOON + timedelta(minutes=1),
)
DETAILS = Details(worker_id="h:1:7:x", version="1", tasks=("a.task",), rss_bytes=5, is_leader=True)
SHOWN = ShownWorker(SERVER, DETAILS, [RUNNING])


def captured(fixture: str, message: str) -> list[bytes]:
    """Return all captured bytes of one kind of message."""
    found = []
    for key in json.loads((FIXTURES / f"{fixture}.json").read_text())["keys"]:
        if message == "ServerInfo" and "servers:{" in key["key"]:
            found.append(bytes.fromhex(key["value"]["hex"]))
        elif message == "WorkerInfo" and "workers:{" in key["key"]:
            found += [bytes.fromhex(value["hex"]) for value in key["fields"].values()]
    assert found
    return found


def cut_times(data: bytes) -> bytes:
    """Cut the times in a message from Go's nanoseconds to the microseconds that Python has; they have the same size."""
    out, at = bytearray(data), 0
    # A timestamp: field 8 or 9, its length, seconds (field 1), nanoseconds (field 2, five bytes for these).
    while (at := min((i for i in (out.find(b"B\x0c\x08", at), out.find(b"J\x0c\x08", at)) if i >= 0), default=-1)) >= 0:
        start = at + 9
        nanos = sum((byte & 0x7F) << 7 * shift for shift, byte in enumerate(out[start : start + 5]))
        nanos -= nanos % 1000
        out[start : start + 5] = bytes((nanos >> 7 * shift & 0x7F) | (0x80 if shift < 4 else 0) for shift in range(5))
        at = start
    return bytes(out)


@pytest.mark.parametrize("fixture", ["active", "server-idle"])
def test_a_server_is_written_as_go_writes_it(fixture: str) -> None:
    """Byte for byte, with the queues in the order in which Go wrote them."""
    for data in captured(fixture, "ServerInfo"):
        assert decode_server(data).encode() == cut_times(data)


def test_a_running_task_is_written_as_go_writes_it() -> None:
    """Byte for byte."""
    found = [decode_running(data) for data in captured("active", "WorkerInfo")]
    assert [each.encode() for each in found] == [cut_times(data) for data in captured("active", "WorkerInfo")]
    assert sorted((each.id, each.type, each.payload, each.queue) for each in found) == [
        ("t-1", "slow", b'{"k":1}', "critical"),
        ("t-2", "slow", b'{"k":2}', "critical"),
    ]
    assert all(each.deadline is not None for each in found)


def test_what_was_written_is_read() -> None:
    """Every field survives; a task without a deadline has Go's zero time, which is read as none."""
    assert decode_server(SERVER.encode()) == SERVER
    assert decode_running(RUNNING.encode()) == RUNNING
    endless = replace(RUNNING, deadline=None, payload=b"", id="ä")
    assert decode_running(endless.encode()) == endless


def test_odd_bytes_are_refused_or_read_as_go_reads_them() -> None:
    """A server without a start time is of 1970; a time that no datetime can hold is none."""
    assert decode_server(b"").started_at == datetime(1970, 1, 1, tzinfo=UTC)
    beyond = b"\x4a\x0b\x08" + b"\xff" * 9 + b"\x01"
    assert decode_running(beyond).deadline == datetime(1970, 1, 1, tzinfo=UTC) - timedelta(seconds=1)
    assert decode_running(b"\x4a\x07\x08" + b"\xff" * 5 + b"\x7f").deadline is None
    for data in (b"\x0a\xff", b"\x0a\x01\xff"):
        with pytest.raises(UndecodableMessage):
            decode_server(data)


def test_the_type_of_a_long_message_is_read_from_its_beginning() -> None:
    """Of a message that is cut within its payload."""
    message = TaskMessage(type="a.task", payload=b"x" * 20_000, id="1").encode()
    assert decode_type(message[:1024]) == "a.task"
    assert decode_type(b"\x0a\xff\xff") == decode_type(b"") == ""


# --- the keys


@pytest.fixture
def broker(own_keys: None) -> Iterator[Broker]:
    """A broker with keys of its own."""
    yield Broker()


def test_a_server_has_asynqs_keys_until_two_beats_later(broker: Broker) -> None:
    """As `server-idle` and `active` show them: both sets, the string and the hash, each with the TTL."""
    assert servers.show("default", [SHOWN], 10) == {}
    name = f"h:7:{SERVER.server_id}"
    client, prefix = broker.client, broker.prefix
    assert client.get(f"{prefix}:servers:{{{name}}}") == SERVER.encode()
    assert client.hgetall(f"{prefix}:workers:{{{name}}}") == {b"t-1": RUNNING.encode()}
    now = client.time()[0]
    for kind in ("servers", "workers"):
        ((member, score),) = client.zrange(f"{prefix}:{kind}", 0, -1, withscores=True)
        assert member.decode() == f"{prefix}:{kind}:{{{name}}}"
        assert now + 9 <= score <= now + 10
        assert 8 < client.ttl(member) <= 10
    assert 8 < client.ttl(worker_info_key(name)) <= 10
    servers.show("default", [ShownWorker(SERVER, DETAILS, [])], 10)
    assert not client.exists(server_running_key(name))


def test_a_clean_stop_removes_its_own_and_nothing_else(broker: Broker) -> None:
    """As `server-stopped` shows it; twice does no harm."""
    other = ShownWorker(replace(SERVER, pid=8), DETAILS, [])
    servers.show("default", [SHOWN, other], 10)
    for _ in range(2):
        servers.clear("default", [SHOWN.name])
        assert [worker.pid for worker in servers.workers()] == [8]
    servers.clear("default", [other.name])
    assert list(broker.client.scan_iter(f"{broker.prefix}:*", count=1000)) == []


def test_servers_whose_time_is_over_are_no_longer_listed(broker: Broker) -> None:
    """The next heartbeat of any process removes them from both sets, as asynq's readers do."""
    broker.client.zadd(servers_key(), {server_key("gone"): 5})
    servers.show("default", [SHOWN], 10)
    assert broker.client.zrange(servers_key(), 0, -1) == [server_key(SHOWN.name).encode()]


def test_each_alias_has_its_own(own_keys: None) -> None:
    """Under its prefix."""
    servers.show("other", [SHOWN], 10)
    assert servers.workers("default") == []
    assert [worker.pid for worker in servers.workers("other")] == [7]


# --- reading


def test_ours_and_those_of_go_are_read(broker: Broker) -> None:
    """Go's servers have no details; what both run is there."""
    servers.show("default", [SHOWN], 10)
    fixture = json.loads((FIXTURES / "active.json").read_text())
    now = broker.client.time()[0]
    for key in fixture["keys"]:
        name = key["key"].replace("asynq:", f"{broker.prefix}:", 1)
        if "servers:{" in name:
            broker.client.set(name, bytes.fromhex(key["value"]["hex"]))
            broker.client.zadd(servers_key(), {name: now + 10})
        elif "workers:{" in name:
            for field, value in key["fields"].items():
                broker.client.hset(name, field, bytes.fromhex(value["hex"]))
    go, ours = servers.workers()
    assert (go.host, go.details, go.concurrency, go.busy, dict(go.queues)) == (
        "fixture-host",
        None,
        7,
        2,
        {"critical": 6, "default": 3, "low": 1},
    )
    assert [task.id for task in go.running] == ["t-1", "t-2"]
    assert (ours.details, ours.running, ours.started_at) == (DETAILS, [RUNNING], NOON)


@pytest.mark.parametrize("written", [b"[]", b"{", b'{"version": 5, "tasks": 1, "x": 2}', b"[" * 100_000, b"\xff"])
def test_rubbish_is_skipped(broker: Broker, written: bytes) -> None:
    """Members that are no server's, servers and tasks that do not decode, details of any shape."""
    servers.show("default", [SHOWN], 10)
    client, now = broker.client, broker.client.time()[0]
    client.zadd(servers_key(), {b"\xff\xfe": now + 9, f"{servers_key()}:{{x": now + 9, server_key("none"): now + 9})
    client.zadd(servers_key(), {server_key("broken"): now + 9})
    client.set(server_key("broken"), b"\x0a\xff")
    client.hset(server_running_key(SHOWN.name), "odd", b"\x0a\xff")
    client.set(worker_info_key(SHOWN.name), written)
    (worker,) = servers.workers()
    assert worker.running == [RUNNING]
    assert worker.details is None or worker.details == Details()


# --- requests to drain


def test_a_request_to_drain_is_seen_with_the_next_heartbeat(broker: Broker) -> None:
    """By worker id, by server id, or for a whole host; until it is withdrawn."""
    servers.show("default", [SHOWN], 10)
    for name in ("h:1:7:x", SERVER.server_id, "h"):
        assert [worker.pid for worker in servers.drain(name)] == [7]
        requests = servers.show("default", [SHOWN], 10)
        assert servers.are_drained(requests, [name])
        assert not servers.are_drained(requests, ["another"])
        assert servers.resume(name)
        assert not servers.resume(name)
        assert servers.show("default", [SHOWN], 10) == {} == servers.read_requests()


def test_a_request_for_nobody_writes_nothing(broker: Broker) -> None:
    """A name that no process has, or that only a server of asynq has."""
    servers.show("default", [SHOWN], 10)
    broker.client.delete(worker_info_key(SHOWN.name))
    assert servers.drain("h") == servers.drain("nobody") == []
    assert not broker.client.exists(drain_key())


def test_a_request_that_has_run_out_counts_no_more(broker: Broker) -> None:
    """Also while a later one keeps the key; and what is no time is no request."""
    now = broker.client.time()[0]
    broker.client.hset(drain_key(), mapping={"old": now - 5, "odd": "soon", "new": now + 60})
    requests = servers.read_requests()
    assert [name for name in ("old", "odd", "new") if servers.are_drained(requests, [name])] == ["new"]


# --- what runs is read with the renewal of the leases


def test_the_messages_of_running_tasks_come_with_the_renewal(broker: Broker) -> None:
    """Only those that are asked for, by the ids of their rows; of a long one only its beginning."""
    broker.enqueue("q", [Entry("a", b"A"), Entry("b", b"B"), Entry("foreign id", b"F"), Entry("c", b"C" * 20_000)])
    broker.client.hset(broker.keys("q").task("foreign id"), "row", "row-1")
    assert len(broker.dequeue("q", "w", 9, 30).leases) == 4
    (extended,) = broker.extend("q", ["w"], 30, ["a", "row-1", "c", "not held"])
    assert extended.kept == 4
    assert sorted(extended.messages) == [
        ("a", "a", b"A"),
        ("c", "c", b"C" * 1024),
        ("row-1", "foreign id", b"F"),
    ]
    assert broker.extend("q", ["w"], 30)[0].messages == ()
