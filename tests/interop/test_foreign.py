"""The suite's own foreign server against the captures of real asynq: else both sides could share one misreading."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq.broker.message import TaskMessage, decode_message

from ..go_peer import GoPeer, Taken
from ..workers import ROOT, wait_until
from . import test_fixtures as fixtures
from .test_fixtures import CLIENT, WORKERS, assert_same, captured, contents, database, load, raw, server

__all__ = ["database", "server"]
SHOWN = [*WORKERS, "completed", "group-member-retry-forwarded"]


class PeerReplay(fixtures.Replay):
    """Do with the peer what asynq's servers did."""

    def run(self) -> None:
        """Repeat every command."""
        self.taken: dict[str, Taken] = {}
        super().run()

    @property
    def peer(self) -> GoPeer:
        """The peer, for the queue of the capture."""
        return GoPeer(self.database, self.queue)

    def extend(self) -> None:
        self.database.zadd(self.keys.lease, dict.fromkeys(self.taken, 1))
        self.peer.extend(*self.taken, "not held")

    def dequeue(self, keys: list[str], arguments: list[bytes]) -> None:
        for _ in range(2 if b"active" in self.unrecorded else 1):
            taken = self.peer.take()
            assert taken is not None
            self.taken[taken.id] = taken

    def done(self, keys: list[str], arguments: list[bytes]) -> None:
        self.peer.done(self.taken.pop(arguments[0].decode()))

    def complete(self, keys: list[str], arguments: list[bytes]) -> None:
        id = arguments[0].decode()
        (result,) = [raw(item["fields"]["result"]) for item in self.fixture["keys"] if item["key"].endswith(f":t:{id}")]
        self.peer.succeed(self.taken.pop(id), result)
        self.check_message(id, next(each for each in arguments[1:] if id.encode() in each and each != id.encode()))

    def requeue(self, keys: list[str], arguments: list[bytes]) -> None:
        self.peer.requeue(self.taken.pop(arguments[0].decode()))

    def retry(self, keys: list[str], arguments: list[bytes]) -> None:
        id, message, due, _, counted, _ = arguments
        delay = int(due) - int(self.fixture["captured_at_unix"])
        self.fail(id.decode(), message, delay, is_failure=counted == b"1")

    def archive(self, keys: list[str], arguments: list[bytes]) -> None:
        self.fail(arguments[0].decode(), arguments[1], None)

    def fail(self, id: str, message: bytes, delay: int | None, *, is_failure: bool = True) -> None:
        """Retry or archive; by the recoverer when the capture says so. delay: None to archive."""
        taken, error = self.taken.pop(id), decode_message(message).error_msg
        if error == "asynq: task lease expired":
            later = self.peer.now() + 100
            assert self.peer.recover(at=later, delay=delay or 0) == [id]
        elif delay is None:
            self.peer.archive(taken, error)
        else:
            self.peer.retry(taken, error, delay=delay, is_failure=is_failure)
        self.check_message(id, message)

    def check_message(self, id: str, expected: bytes) -> None:
        """Check what the peer wrote except the times of now; put those of the capture in their place."""
        times = decode_message(expected)
        found = self.peer.message(id)._replace(last_failed_at=times.last_failed_at, completed_at=times.completed_at)
        assert found.encode() == expected
        self.database.hset(self.peer.task_key(id), "msg", expected)

    def forward_scheduled(self, keys: list[str], arguments: list[bytes]) -> None:
        assert self.peer.forward() == 1

    def forward_retry(self, keys: list[str], arguments: list[bytes]) -> None:
        (id,) = self.peer.ids("retry")
        due = self.database.zscore(self.peer.key("retry"), id)
        assert self.peer.forward(at=int(due) - 1) == 0
        assert self.peer.forward(at=max(int(due), self.peer.now())) == 1


@pytest.mark.parametrize("name", SHOWN)
def test_the_peers_runs_leave_asynqs_keys(name: str, database: redis.Redis) -> None:
    """Every capture that shows a take, an end of a run, a recovery, an extension or a forward."""
    fixture = load(name)
    PeerReplay(database, fixture).run()
    assert_same(contents(database, time.time()), captured(fixture))


@pytest.mark.parametrize("name", CLIENT)
def test_the_peers_client_leaves_asynqs_keys(name: str, database: redis.Redis) -> None:
    """Every capture of what a client enqueues; refusals too."""
    fixture = load(name)
    for step in fixture["steps"]:
        options, printed = fixtures.options_of(step["peer"]), step["printed"][0]
        id, now = options.get("taskid") or printed["id"], time.time()
        delay = fixtures.seconds(options.get("in", "0s"))
        message = of_capture(fixture, id)
        peer = GoPeer(database, message.queue)
        fields: dict[str, Any] = message._asdict()
        for name_of_peer in ("type", "payload", "id", "queue", "unique_key", "group_key"):
            del fields[name_of_peer]
        try:
            peer.enqueue(
                message.type,
                message.payload,
                id=id,
                unique_seconds=int(fixtures.seconds(options["unique"]) + delay) if "unique" in options else 0,
                lock=message.unique_key,
                group=message.group_key,
                process_at=now + delay if delay else None,
                **fields,
            )
        except KeyError as error:
            assert printed.get(error.args[0])
        else:
            assert not (printed.get("conflict") or printed.get("duplicate"))
    ours, theirs = contents(database, time.time()), captured(fixture)
    assert_same(fixtures.with_headers_read(ours), fixtures.with_headers_read(theirs))


def of_capture(fixture: dict[str, Any], id: str) -> TaskMessage:
    """Return the message of a task in a capture; that of a refused one is that of any other."""
    found = {
        item["key"].split(":t:")[1]: decode_message(raw(item["fields"]["msg"]))
        for item in fixture["keys"]
        if ":t:" in item["key"]
    }
    return found.get(id) or next(iter(found.values()))


def test_the_server_runs_what_its_table_says(redis_client: redis.Redis, key_prefix: str, tmp_path: Path) -> None:
    """As a process: results, retries, types without a handler, and a clean stop."""
    peer, history = GoPeer(redis_client, "go", key_prefix), tmp_path / "history"
    ids = {
        type: peer.enqueue(type, retry=retry, retention=60)
        for type, retry in (("good", 0), ("flaky", 1), ("bad", 0), ("unknown", 0))
    }
    options = redis_client.connection_pool.connection_kwargs
    url = f"redis://{options['host']}:{options['port']}/{options.get('db', 0)}"
    actions = ("good=result:42", "flaky=once", "bad=fail")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.foreign", url, key_prefix, str(history), "go", "--", *actions], cwd=ROOT
    )
    try:
        expected = {"good": "completed", "flaky": "completed", "bad": "archived", "unknown": "archived"}
        wait_until(lambda: {type: peer.state(id) for type, id in ids.items()} == expected, "the end of all tasks")
        assert redis_client.hget(peer.task_key(ids["good"]), "result") == b"42"
        assert peer.message(ids["flaky"]).retried == 1
        assert peer.message(ids["unknown"]).error_msg == 'handler not found for task "unknown"'
    finally:
        process.terminate()
        assert process.wait(10) == 0
        for key in redis_client.scan_iter(f"{key_prefix}:*"):
            redis_client.delete(key)
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert sorted((line["type"], line["end"]) for line in lines) == [
        ("bad", "failed"),
        ("flaky", "failed"),
        ("flaky", "ok"),
        ("good", "ok"),
        ("unknown", "no handler"),
    ]
