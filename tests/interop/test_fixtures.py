"""The broker against captures of Go's asynq 0.26.0 (`fixtures/asynq/`), byte for byte.

Each test repeats with our Broker what asynq did, on a private server with asynq's own prefix, and compares the whole
database. Times are compared as distances from now: those of scores and TTLs, in the capture from its own now.

Intended differences, each with a test:
- the hash of a task that we dequeued has `fence`, and `worker` while it runs; a worker's tasks are in `held:…`;
- what is counted by the day is counted by the minute too, in `minutes:…`;
- the hash of a task that we failed has `settled`, by which we can tell what another program does to it later;
- a task of ours that has failed for good releases its lock with its row's key (`archived-retry-exhausted`);
- a refused task leaves no lock behind (`conflict-unique-lock-left`);
- a task that returns to its group adds the group's name to `groups` (`group-member-retry-forwarded`);
- a task of ours in retry is returned, not moved, because its row must change first (every forward out of retry).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings

from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.message import TaskMessage, decode_message
from django_asyncq.testing import EmbeddedRedis

FOLDER = Path(__file__).parent.parent / "fixtures" / "asynq"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
NEAR_SECONDS = 15
WORKER = "fixture-worker"
OUR_FIELDS = (b"fence", b"worker", b"settled")
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}

CLIENT = [
    "aggregating",
    "aggregating-unique",
    "conflict-task-id",
    "pending-all-options",
    "pending-binary-payload",
    "pending-deadline-only",
    "pending-defaults",
    "pending-empty-payload",
    "pending-order",
    "pending-subsecond-timeout",
    "pending-unique",
    "pending-unique-empty-payload",
    "scheduled",
    "scheduled-unique",
    "scheduled-with-group",
]
WORKERS = [
    "active",
    "archived-retry-exhausted",
    "archived-skip-retry",
    "done",
    "forwarded",
    "recovered-to-archive",
    "recovered-to-retry",
    "requeued-on-shutdown",
    "retry-after-cancel",
    "retry-after-failure",
    "retry-after-panic",
    "retry-after-timeout",
    "retry-deadline-passed",
    "retry-not-a-failure",
    "retry-twice",
    "revoked",
    "scheduled-with-group-forwarded",
]


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def raw(value: Any) -> bytes:
    """The bytes of a value in `keys`, or of an argument in `redis_commands`."""
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value.encode()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started


@pytest.fixture
def database(server: EmbeddedRedis, settings: Any, own_keys: None) -> Iterator[redis.Redis]:
    """An empty private server, so that keys can have the prefix that is in the messages."""
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": server.url}}
    settings.ASYNCQ = {**django_settings.ASYNCQ, "KEY_PREFIX": "asynq"}
    Broker.forget_registered()
    client = redis.Redis.from_url(server.url, protocol=2)
    client.flushall()
    yield client
    client.close()


# --- comparing


def contents(client: redis.Redis, captured_at: float) -> dict[str, Any]:
    """Return the database as {key: (type, TTL in s, contents)}; times as seconds from `captured_at`."""
    found: dict[str, Any] = {}
    for key in client.scan_iter("*"):
        if key == b"asynq:own-queues" or key.endswith(b"}:wake"):
            continue  # ours: Go does not read them
        kind = client.type(key).decode()
        ttl = client.pttl(key)
        match kind:
            case "string":
                value: Any = client.get(key)
            case "hash":
                value = client.hgetall(key)
            case "list":
                value = client.lrange(key, 0, -1)
            case "set":
                value = client.smembers(key)
            case _:
                value = dict(client.zrange(key, 0, -1, withscores=True))
        found[key.decode()] = (kind, None if ttl < 0 else ttl / 1000, relative(kind, value, captured_at))
    return found


def captured(fixture: dict[str, Any]) -> dict[str, Any]:
    """Return the fixture's database in the same form, without what a Go server writes about itself."""
    found: dict[str, Any] = {}
    today = datetime.now(UTC).date().isoformat()
    for item in fixture["keys"]:
        key, kind = item["key"], item["type"]
        if re.match(r"asynq:(servers|workers)", key):
            continue
        match kind:
            case "string":
                value: Any = raw(item["value"])
            case "hash":
                value = {field.encode(): raw(content) for field, content in item["fields"].items()}
            case "list":
                value = [raw(member) for member in item["items_left_to_right"]]
            case "set":
                value = {raw(member) for member in item["members"]}
            case _:
                value = {raw(member["member"]): float(member["score"]) for member in item["members"]}
        ttl = None if item["ttl_ms"] is None else item["ttl_ms"] / 1000
        key = re.sub(r"\d{4}-\d\d-\d\d$", today, key)
        found[key] = (kind, ttl, relative(kind, value, fixture["captured_at_unix"]))
    return found


def relative(kind: str, value: Any, now: float) -> Any:
    if kind == "zset":
        return {member: score - now for member, score in value.items()}
    if kind == "hash" and b"pending_since" in value:
        assert re.fullmatch(rb"\d{19}", value[b"pending_since"]), "whole nanoseconds"
        return {**value, b"pending_since": int(value[b"pending_since"]) / 1e9 - now}
    return value


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare two databases; numbers that are times may differ by NEAR_SECONDS."""
    assert sorted(ours) == sorted(theirs)
    for key, (kind, ttl, value) in theirs.items():
        assert ours[key][0] == kind, key
        assert (ours[key][1] is None) == (ttl is None), key
        assert ttl is None or ours[key][1] == pytest.approx(ttl, abs=NEAR_SECONDS), key
        if kind in ("hash", "zset"):
            assert set(ours[key][2]) == set(value), key
            for field, content in value.items():
                near = isinstance(content, float)
                expected = pytest.approx(content, abs=NEAR_SECONDS) if near else content
                assert ours[key][2][field] == expected, (key, field)
        else:
            assert ours[key][2] == value, key


def without_ours(found: dict[str, Any]) -> dict[str, Any]:
    """Remove our own keys and hash fields; no other of ours may exist."""
    kept = {}
    for key, (kind, ttl, value) in found.items():
        if ":held:" in key or ":minutes:" in key:
            continue
        if kind == "hash":
            value = {field: content for field, content in value.items() if field not in OUR_FIELDS}
        kept[key] = (kind, ttl, value)
    return kept


# --- messages


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_encoded_again_to_the_same_bytes(name: str) -> None:
    """Several headers are in random order in Go, so they are compared as values."""
    fixture = load(name)
    found = [raw(item["fields"]["msg"]) for item in fixture["keys"] if "msg" in item.get("fields", {})]
    for command in fixture["redis_commands"]:
        for call in command.get("calls_inside", []):
            if call[0] == "HSET" and "msg" in call[2::2]:
                found.append(raw(call[call.index("msg", 2) + 1]))
    for data in found:
        message = decode_message(data)
        if len(message.headers) > 1:
            assert decode_message(message.encode()) == message
            assert len(message.encode()) == len(data)
        else:
            assert message.encode() == data


def test_all_fixtures_exist() -> None:
    """All 58 captures are in the repository."""
    assert len(NAMES) == 58
    assert set(CLIENT) | set(WORKERS) < set(NAMES)


# --- what a client does


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\D+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def options_of(arguments: list[str]) -> dict[str, str]:
    """Read the command line of the program that made the fixtures."""
    options, rest = {}, list(arguments[1:])
    while rest:
        name = rest.pop(0).removeprefix("-")
        options[name] = "" if name == "nil-payload" else rest.pop(0)
    return options


def enqueue(options: dict[str, str], id: str, now: float) -> str:
    """Do with our Broker what asynq's client does with these options; return the reply word."""
    queue = options.get("queue", "default")
    keys = QueueKeys(queue)
    payload = base64.b64decode(options["payload-b64"]) if "payload-b64" in options else b""
    payload = payload or options.get("payload", "").encode()
    timeout = int(seconds(options["timeout"])) if "timeout" in options else 0
    if "timeout" not in options and "deadline" not in options:
        timeout = 1800
    digest = "" if "nil-payload" in options else hashlib.md5(payload).hexdigest()
    lock = keys.unique(options["type"], digest) if "unique" in options else ""
    delay = seconds(options.get("in", "0s"))
    message = TaskMessage(
        type=options["type"],
        payload=payload,
        id=id,
        queue=queue,
        retry=int(options.get("retry", 25)),
        timeout=timeout,
        deadline=int(options.get("deadline", 0)),
        unique_key=lock,
        retention=int(seconds(options.get("retention", "0s"))),
        group_key=options.get("group", ""),
        headers=json.loads(options.get("headers", "{}")),
    )
    ttl = int(seconds(options["unique"]) + delay) if lock else 0
    entry = Entry(id, message.encode(), unique_key=lock, unique_seconds=ttl)
    broker = Broker("producer")
    broker.register_queue(queue)
    if delay:
        return broker.schedule(queue, [entry._replace(due_at=int(now + delay))])[0]
    if "group" in options:
        return Groups("producer").add(queue, options["group"], [entry], rules="")[0]
    return broker.enqueue(queue, [entry])[0]


def replay_client(fixture: dict[str, Any]) -> list[str]:
    words = []
    for step in fixture["steps"]:
        options = options_of(step["peer"])
        id = options.get("taskid") or step["printed"][0]["id"]
        words.append(enqueue(options, id, time.time()))
        printed = step["printed"][0]
        refusal = {True: "exists"}.get(printed.get("conflict")) or {True: "duplicate"}.get(printed.get("duplicate"))
        assert refusal is None or words[-1] == refusal
        assert refusal is not None or words[-1] in ("queued", "scheduled", "grouped")
    return words


def with_headers_read(found: dict[str, Any]) -> dict[str, Any]:
    """Replace a message with several headers by its values and its length: Go orders them at random."""
    for _, _, value in found.values():
        if isinstance(value, dict) and b"msg" in value and len(decode_message(value[b"msg"]).headers) > 1:
            value[b"msg"] = (decode_message(value[b"msg"]), len(value[b"msg"]))
    return found


@pytest.mark.parametrize("name", CLIENT)
def test_the_same_input_leaves_the_same_keys(name: str, database: redis.Redis) -> None:
    """With the same options the database is the same, without any field of our own, and of keys only the tokens."""
    fixture = load(name)
    replay_client(fixture)
    assert_same(with_headers_read(contents(database, time.time())), with_headers_read(captured(fixture)))


def test_a_refused_task_leaves_no_lock(database: redis.Redis) -> None:
    """Unlike asynq: the next task that wants the lock gets it."""
    fixture = load("conflict-unique-lock-left")
    assert replay_client(fixture) == ["queued", "exists"]
    theirs = captured(fixture)
    lock = next(key for key in theirs if ":unique:" in key)
    ours = contents(database, time.time())
    assert lock not in ours
    del theirs[lock]
    assert_same(without_ours(ours), theirs)


# --- what a worker does


class Replay:
    """Do with our Broker what asynq's scripts did, in their order."""

    def __init__(self, database: redis.Redis, fixture: dict[str, Any]) -> None:
        self.database = database
        self.fixture = fixture
        self.broker = Broker()
        self.leases: dict[str, Lease] = {}
        self.queue = "default"

    def run(self) -> None:
        """Repeat every command, and what the capture lacks.

        That is registering and pausing the queue, and the second task of two, which comes after the first.
        """
        for item in self.fixture["keys"]:
            if item["key"] == "asynq:queues":
                self.queue = raw(item["members"][0]).decode()
                self.broker.register_queue(self.queue)
            elif item["key"].endswith(":paused"):
                self.database.set(item["key"], raw(item["value"]))
        self.keys = QueueKeys(self.queue)
        recorded = json.dumps(self.fixture["redis_commands"])
        self.unrecorded = {
            raw(item["fields"]["state"]): Entry(item["key"].split(":t:")[1], raw(item["fields"]["msg"]))
            for item in self.fixture["keys"]
            if ":t:" in item["key"] and raw(item["fields"]["msg"]).hex() not in recorded
        }
        for command in self.fixture["redis_commands"]:
            if "script" in command:
                self.script(command["script"])
            elif command["command"][0] == "zadd" and command["command"][1] == self.keys.lease:
                self.extend()

    def extend(self) -> None:
        extended = self.broker.extend(self.queue, [WORKER], 30)[0]
        assert extended == (len(self.leases), [], [], ())

    def script(self, script: dict[str, Any]) -> None:
        """Find out by its keys which script it was."""
        base = self.keys.base
        names = []
        for key in script["keys"]:
            name = re.sub(r"^(t|g|unique|processed|failed):.*", r"\1:", key.removeprefix(base))
            names.append(name)
        arguments = [raw(argument) for argument in script["args"]]
        sequence = " ".join(names)
        if "asynq:servers" in sequence or sequence == "lease":
            return  # a heartbeat, or a search for expired leases
        action = {
            "t: pending": self.enqueue,
            "unique: t: pending": self.enqueue_unique,
            "t: scheduled": self.schedule,
            "t: g: groups": self.add_to_group,
            "t: pending groups": self.run_by_hand,
            "pending paused active lease": self.dequeue,
            "active lease t: processed: processed": self.done,
            "active lease t: processed: processed unique:": self.done,
            "active lease completed t: processed: processed unique:": self.complete,
            "active lease pending t:": self.requeue,
            "t: active lease retry processed: failed: processed failed": self.retry,
            "t: active lease archived processed: failed: processed failed t:": self.archive,
            "scheduled pending": self.forward_scheduled,
            "retry pending": self.forward_retry,
        }[sequence]
        action(script["keys"], arguments)

    def enqueue(self, keys: list[str], arguments: list[bytes]) -> None:
        entries = [Entry(arguments[1].decode(), arguments[0]), *self.unrecorded.values()]
        assert self.broker.enqueue(self.queue, entries) == ["queued"] * len(entries)

    def enqueue_unique(self, keys: list[str], arguments: list[bytes]) -> None:
        id, ttl, message, _ = arguments
        entry = Entry(id.decode(), message, unique_key=keys[0], unique_seconds=int(ttl))
        assert self.broker.enqueue(self.queue, [entry]) == ["queued"]

    def schedule(self, keys: list[str], arguments: list[bytes]) -> None:
        entry = Entry(arguments[2].decode(), arguments[0], due_at=int(arguments[1]))
        assert self.broker.schedule(self.queue, [entry]) == ["scheduled"]

    def add_to_group(self, keys: list[str], arguments: list[bytes]) -> None:
        entry = Entry(arguments[1].decode(), arguments[0])
        assert Groups().add(self.queue, arguments[3].decode(), [entry], rules="") == ["grouped"]

    def run_by_hand(self, keys: list[str], arguments: list[bytes]) -> None:
        """Do what asynq's Inspector does for "run" of a grouped task; we have no such operation."""
        group = self.database.hget(keys[0], "group").decode()
        self.database.zrem(self.keys.group(group), arguments[0])
        self.database.srem(self.keys.groups, group)
        self.database.lpush(self.keys.pending, arguments[0])
        self.database.hset(keys[0], "state", "pending")

    def dequeue(self, keys: list[str], arguments: list[bytes]) -> None:
        taken = self.broker.dequeue(self.queue, WORKER, 2 if b"active" in self.unrecorded else 1, 30)
        assert not taken.paused
        self.leases |= {lease.id: lease for lease in taken.leases}

    def lease(self, id: bytes) -> Lease:
        return self.leases.pop(id.decode())

    def done(self, keys: list[str], arguments: list[bytes]) -> None:
        assert self.broker.done(self.queue, WORKER, [self.lease(arguments[0])]) == ["done"]

    def complete(self, keys: list[str], arguments: list[bytes]) -> None:
        raise AssertionError("a run of a task of ours has left it completed: only asynq keeps what has succeeded")

    def requeue(self, keys: list[str], arguments: list[bytes]) -> None:
        assert self.broker.requeue(self.queue, WORKER, [self.lease(arguments[0])]) == ["requeued"]

    def retry(self, keys: list[str], arguments: list[bytes]) -> None:
        id, message, due, _, counted, _ = arguments
        # The capture's times have passed; what is due in an hour there is due in an hour here.
        due_at = int(due) + int(time.time() - self.fixture["captured_at_unix"])
        if int(due) <= self.fixture["captured_at_unix"]:
            due_at = int(due)
        items = [(self.lease(id), message, due_at)]
        assert self.broker.retry(self.queue, WORKER, items, counted=counted == b"1") == ["retried"]

    def archive(self, keys: list[str], arguments: list[bytes]) -> None:
        items = [(self.lease(arguments[0]), arguments[1])]
        assert self.broker.archive(self.queue, WORKER, items) == ["archived"]

    def forward_scheduled(self, keys: list[str], arguments: list[bytes]) -> None:
        assert self.broker.forward(self.queue, "scheduled") == (1, [], None)

    def forward_retry(self, keys: list[str], arguments: list[bytes]) -> None:
        """A task of ours is only returned; without our fence, as a Go worker leaves it, it is moved."""
        id = self.database.zrange(self.keys.retry, 0, 0)[0].decode()
        assert self.broker.forward(self.queue, "retry") == (0, [id], None)
        self.database.hdel(self.keys.task(id), "fence")
        assert self.broker.forward(self.queue, "retry") == (1, [], None)


@pytest.mark.parametrize("name", WORKERS)
def test_the_same_runs_leave_the_same_keys(name: str, database: redis.Redis) -> None:
    """After the same operations of a worker, the database differs by our own fields, and by a lock that we release."""
    fixture = load(name)
    Replay(database, fixture).run()
    theirs = captured(fixture)
    locks = [key for key in theirs if ":unique:" in key]
    if name == "archived-retry-exhausted":
        assert locks
        theirs = {key: value for key, value in theirs.items() if key not in locks}
    assert_same(without_ours(contents(database, time.time())), theirs)


def test_a_running_task_has_our_fields(database: redis.Redis) -> None:
    """It has a fence and a worker, and the worker holds it."""
    Replay(database, load("active")).run()
    keys = QueueKeys("critical")
    assert database.hget(keys.task("t-1"), "fence") == b"1"
    assert database.hget(keys.task("t-1"), "worker") == WORKER.encode()
    assert database.hgetall(keys.held(WORKER)) == {b"t-1": b"1", b"t-2": b"1"}


def test_a_task_that_returns_to_its_group_can_be_found_there(database: redis.Redis) -> None:
    """Unlike asynq: the group's name is added to the groups set again."""
    fixture = load("group-member-retry-forwarded")
    Replay(database, fixture).run()
    ours, theirs = without_ours(contents(database, time.time())), captured(fixture)
    groups = QueueKeys("default").groups
    assert groups not in theirs
    assert ours.pop(groups) == ("set", None, {b"g"})
    assert_same(ours, theirs)


# --- what the janitor does


def test_our_janitor_leaves_the_same_keys_as_asynqs(database: redis.Redis) -> None:
    """After a Go worker's own commands, our janitor removes one expired task, and then none."""
    fixture = load("completed-expired")
    later = int(time.time() - fixture["captured_at_unix"])
    broker, pruned = Broker(), []
    broker.register_queue("default")
    for command in fixture["redis_commands"]:
        if command["script"]["keys"] == [QueueKeys("default").completed]:
            pruned.append(broker.prune_completed("default"))
            continue
        for call in command["calls_inside"]:
            word, key, *rest = [raw(argument) for argument in call]
            key = re.sub(rb"\d{4}-\d\d-\d\d$", datetime.now(UTC).date().isoformat().encode(), key)
            if word in (b"ZADD", b"EXPIREAT"):
                rest[0] = b"%d" % (int(rest[0]) + later)
            database.execute_command(word, key, *rest)
    assert pruned == [1, 0]
    assert_same(contents(database, time.time()), captured(fixture))
