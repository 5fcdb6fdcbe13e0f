"""Each row of "Where we differ from asynq" in docs/explanation/asynq.md: what asynq leaves, and that ours is closed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, Entry
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.message import UndecodableMessage
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.storage import database_clock

from .. import tasks
from ..go_peer import GoPeer, Taken
from ..interop.test_fixtures import load
from ..left_behind import load_own, places
from ..lifecycle import test_batches
from ..runs import taken_by
from ..scheduling import test_scheduler
from . import test_broker, test_inspection

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "asynq.md"
Q = "default"


class Sides(NamedTuple):
    """Both sides on one queue. monkeypatch: of pytest."""

    client: redis.Redis
    peer: GoPeer
    broker: Broker
    keys: QueueKeys
    monkeypatch: pytest.MonkeyPatch

    def go_takes(self) -> Taken:
        """Have the Go server take the next task."""
        found = self.peer.take()
        assert found is not None
        return found

    def clear(self) -> None:
        """Forget what asynq has left."""
        for key in self.client.scan_iter(f"{self.peer.prefix}:*"):
            self.client.delete(key)


@pytest.fixture
def sides(redis_client: redis.Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Sides:
    """An empty queue."""
    return Sides(redis_client, GoPeer(redis_client, Q, key_prefix), Broker(), QueueKeys(Q), monkeypatch)


HOLES: dict[str, Callable[[Sides], None]] = {}


def hole(row: str) -> Callable[[Callable[[Sides], None]], Callable[[Sides], None]]:
    """Name the row, by its first cell, that a function shows."""

    def add(show: Callable[[Sides], None]) -> Callable[[Sides], None]:
        HOLES[row] = show
        return show

    return add


def rows() -> list[str]:
    """Return the first cells of the table."""
    section = PAGE.read_text().split("## Where we differ from asynq")[1].split("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return cells[2:]


@pytest.mark.parametrize("row", rows())
def test_a_hole_of_asynq_is_closed_here(row: str, sides: Sides) -> None:
    """A row without a test fails here."""
    HOLES[row](sides)


def test_every_test_has_its_row() -> None:
    """One whose row has gone is found."""
    assert sorted(HOLES) == sorted(rows())


# --- runs


@hole("cannot tell two runs of one id apart")
def _(sides: Sides) -> None:
    sides.peer.enqueue("t", id="a")
    first = sides.go_takes()
    sides.peer.requeue(first)
    sides.go_takes()
    sides.peer.done(first)
    assert sides.peer.state("a") == "", "the second run has lost its task"
    sides.broker.enqueue(Q, [Entry("b", b"m")])
    (stale,) = sides.broker.dequeue(Q, "one", 1, 30).leases
    sides.broker.requeue(Q, "one", [stale], raise_fence=True)
    (lease,) = sides.broker.dequeue(Q, "one", 1, 30).leases
    assert sides.broker.done(Q, "one", [stale]) == ["stale"]
    assert sides.broker.done(Q, "one", [lease]) == ["done"]


@hole("an id without a hash is claimed and stays active for ever")
def _(sides: Sides) -> None:
    sides.client.lpush(sides.keys.pending, "lost")
    sides.go_takes()
    assert sides.peer.recover(at=2**40) == []
    assert sides.peer.ids("active") == ["lost"]
    sides.clear()
    sides.client.lpush(sides.keys.pending, "lost")
    assert sides.broker.dequeue(Q, "w", 1, 30).leases == []
    assert (sides.peer.ids("pending"), sides.peer.ids("active")) == ([], [])


@hole("guards run after the first write")
def _(sides: Sides) -> None:
    sides.peer.enqueue("t", id="a")
    taken = sides.go_takes()
    sides.client.zrem(sides.keys.lease, "a")
    with pytest.raises(redis.ResponseError, match="NOT FOUND"):
        sides.peer.done(taken)
    assert (sides.peer.state("a"), sides.peer.ids("active")) == ("active", []), "it is in no list"
    sides.broker.enqueue(Q, [Entry("b", b"m")])
    (lease,) = sides.broker.dequeue(Q, "w", 1, 30).leases
    before = {key: sides.client.dump(key) for key in sides.client.scan_iter(f"{sides.keys.base}*")}
    assert sides.broker.done(Q, "w", [lease._replace(fence=lease.fence + 1)]) == ["stale"]
    assert {key: sides.client.dump(key) for key in sides.client.scan_iter(f"{sides.keys.base}*")} == before


@hole("if the write of an outcome fails, the task runs again")
def _(sides: Sides) -> None:
    sides.peer.enqueue("t", id="a")
    sides.go_takes()
    assert sides.peer.recover(at=2**40, delay=-1) == ["a"]
    assert sides.peer.forward() == 1
    assert sides.go_takes().id == "a", "it runs again"
    sides.clear()
    tasks.add.enqueue(1)
    run = taken_by("w")
    lifecycle.succeed(run, 1, database_clock.now())
    assert lifecycle.record_runs([run]) == []
    # Redis does not hear of it, and the worker is gone.
    lifecycle.recover(sides.broker, Q, "w", [run.lease], reason="it died")
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert (sides.peer.ids("pending"), sides.peer.ids("active")) == ([], [])


@hole("each worker uses its own clock")
def _(sides: Sides) -> None:
    sides.peer.enqueue("t", id="a")
    sides.go_takes()
    assert sides.peer.recover(at=sides.peer.now() + 100) == ["a"], "a server whose clock is fast takes it away"
    sides.clear()
    tasks.add.enqueue(1)
    taken_by("w")
    now = time.time()
    sides.monkeypatch.setattr(time, "time", lambda: now + 100)
    assert Reconciler(sides.broker).recover_expired() == 0
    assert TaskRecord.objects.get().state == TaskState.RUNNING


@hole("a message that cannot be decoded stops the recovery of all")
def _(sides: Sides) -> None:
    for id in ("bad", "good"):
        sides.peer.enqueue("t", id=id)
        sides.go_takes()
    sides.client.hset(sides.keys.task("bad"), "msg", b"\xff\xff")
    sides.client.zadd(sides.keys.lease, {"bad": 1})
    with pytest.raises(UndecodableMessage):
        sides.peer.recover(at=2**40)
    assert sides.peer.state("good") == "active"
    sides.clear()
    tasks.add.enqueue(1)
    run = taken_by("w")
    sides.client.lpush(sides.keys.pending, "bad")
    sides.client.hset(sides.keys.task("bad"), mapping={"msg": b"\xff\xff", "state": "pending"})
    assert len(sides.broker.dequeue(Q, "w", 1, 30).leases) == 1
    sides.client.zadd(sides.keys.lease, {"bad": 1, run.lease.id: 2})
    Reconciler(sides.broker).recover_expired()
    assert TaskRecord.objects.get().state == TaskState.QUEUED


@hole("an active id without a lease stays for ever")
def _(sides: Sides) -> None:
    sides.peer.enqueue("t", id="a")
    sides.go_takes()
    sides.client.zrem(sides.keys.lease, "a")
    assert sides.peer.recover(at=2**40) == []
    assert sides.peer.ids("active") == ["a"]
    test_inspection.test_an_active_task_without_a_lease_gets_one(
        sides.broker, Inspection("worker"), QueueKeys(test_inspection.QUEUE)
    )


# --- times


@hole("N schedulers enqueue each occurrence N times; a missed one is lost")
def _(sides: Sides) -> None:
    # Each Go scheduler enqueues by itself, with an id of its own.
    assert len({sides.peer.enqueue("report") for _ in range(2)}) == 2
    sides.clear()
    clock = test_scheduler.Clock()
    test_scheduler.schedule()
    clock.step(minutes=16)
    fired = [Scheduler(clock=clock).fire_due()[0] for _ in range(2)]
    assert [len(each) for each in fired] == [1, 0], "the missed ones are made up for as the policy says, once"
    assert TaskRecord.objects.count() == 1


@hole("a delayed task waits up to five seconds and for a whole second")
def _(sides: Sides) -> None:
    due = sides.peer.now() + 60.25
    sides.peer.enqueue("t", id="a", process_at=due)
    assert sides.client.zscore(sides.keys.scheduled, "a") == int(due)
    sides.broker.schedule(Q, [Entry("b", b"m", due_at=due)])
    assert sides.client.zscore(sides.keys.due, "b") == pytest.approx(due * 1000, abs=1)
    assert sides.client.zscore(sides.keys.scheduled, "b") == int(due) + 1, "no Go server forwards it too early"


# --- groups


@hole("an emptied set of stale members returns without the name of its group")
def _(sides: Sides) -> None:
    left = places(load("aggregation-set-reclaimed"))
    assert left["asynq:{default}:g:user:7"] == "zset"
    assert "asynq:{default}:groups" not in left
    assert places(load_own("set-reclaimed"))["asynq:{default}:groups[user:7]"] is True


@hole("a group is looked at every 7 s at most, and is ripe in whole seconds")
def _(sides: Sides) -> None:
    sides.peer.add_to_group("g", "t", id="a")
    assert sides.client.zscore(sides.keys.group("g"), "a") % 1 == 0
    sides.clear()
    test_batches.test_a_full_group_becomes_a_batch(sides.keys)
    assert sides.client.zscore(sides.keys.group_due, test_batches.GROUP) > 1e12, "in milliseconds"


@hole("a crash between the aggregation and the deletion of the members runs them twice")
def _(sides: Sides) -> None:
    sides.peer.add_to_group("g", "t", b"1", id="a")
    sides.client.rename(sides.keys.group("g"), sides.keys.group("g") + ":set")
    sides.peer.enqueue("t:aggregated", b"[1]", id="all")
    # The server dies here; another one brings the set back.
    sides.client.rename(sides.keys.group("g") + ":set", sides.keys.group("g"))
    assert (sides.peer.state("a"), sides.peer.state("all")) == ("aggregating", "pending"), "it is in both"
    sides.clear()
    test_batches.test_members_whose_batch_was_committed_are_dropped_when_they_are_taken_again(sides.keys)


@hole("a member that returns from `retry` to its group does not bring the group's name back")
def _(sides: Sides) -> None:
    for forward in (sides.peer.forward, lambda: sides.broker.forward(Q, "retry").moved):
        sides.peer.add_to_group("g", "t", id="a")
        sides.peer.inspector_run("a")
        sides.peer.retry(sides.go_takes(), "no", delay=-1)
        assert forward() == 1
        assert sides.client.zrange(sides.keys.group("g"), 0, -1) == [b"a"]
        names = sides.client.smembers(sides.keys.groups)
        sides.clear()
    assert names == {b"g"}, "after our forwarder"
    assert "asynq:{default}:groups" not in places(load("group-member-retry-forwarded"))


# --- what stays behind


@hole("trimming the archive may fail at 8,000 members")
def _(sides: Sides) -> None:
    broker, keys = sides.broker, QueueKeys(test_broker.QUEUE)
    test_broker.fill_archive(broker, keys, 8_500, int(time.time()) - 90 * 86_400 - 5)
    trim = "return redis.call('ZREM', KEYS[1], unpack(redis.call('ZRANGE', KEYS[1], 0, -1)))"
    with pytest.raises(redis.ResponseError, match="too many results to unpack"):
        sides.client.eval(trim, 1, keys.archived)
    broker.archive(test_broker.QUEUE, test_broker.WORKER, [(test_broker.taken(broker, "a")[0], b"")])
    assert sides.client.zcard(keys.archived) == 8_401


@hole("trimming the archive by hand leaves the hashes for ever")
def _(sides: Sides) -> None:
    for id in ("a", "b"):
        sides.peer.enqueue("t", id=id)
        sides.peer.inspector_archive(id)
    sides.client.zremrangebyrank(sides.keys.archived, 0, -2)  # asynq's command, with a limit of 1
    assert (sides.peer.ids("archived"), sides.peer.state("a")) == (["b"], "archived")
    sides.clear()
    test_broker.test_the_archive_drops_tasks_older_than_90_days(sides.broker, QueueKeys(test_broker.QUEUE))


@hole("an id without a hash breaks the tools' queue info")
def _(sides: Sides) -> None:
    sides.client.zadd(sides.keys.scheduled, {"gone": 2e9})
    memory = "return redis.call('MEMORY', 'USAGE', KEYS[1]) + 1"
    with pytest.raises(redis.ResponseError, match="arithmetic"):
        sides.client.eval(memory, 1, sides.keys.task("gone"))
    assert Inspector("default").queues.get(Q).queue == Q
    assert Inspection("worker").remove_dangling(Q, "scheduled", ["gone"]) == 1
    assert sides.peer.ids("scheduled") == []


@hole("a lock taken before an id conflict stays until its TTL")
def _(sides: Sides) -> None:
    lock = sides.keys.unique("t", "d")
    sides.peer.enqueue("t", id="a")
    with pytest.raises(KeyError, match="conflict"):
        sides.peer.enqueue("t", id="a", unique_seconds=60, lock=lock)
    assert sides.client.get(lock) == b"a"
    sides.client.delete(lock)
    assert sides.broker.enqueue(Q, [Entry("a", b"m", unique_key=lock, unique_seconds=60)]) == ["exists"]
    assert not sides.client.exists(lock)


@hole("deleting all pending tasks leaves their locks")
def _(sides: Sides) -> None:
    assert [place for place in places(load("deleteall-pending-lock-left")) if ":unique:" in place]
    assert not [place for place in places(load_own("purged")) if ":unique:" in place]


@hole("a result written after its task was deleted blocks the id")
def _(sides: Sides) -> None:
    sides.peer.write_result("a", b"late")
    with pytest.raises(KeyError, match="conflict"):
        sides.peer.enqueue("t", id="a")
    assert sides.broker.enqueue(Q, [Entry("a", b"m")]) == ["queued"]


def test_the_table_is_read() -> None:
    """An empty one would show nothing."""
    assert len(rows()) >= 19
    assert not [row for row in rows() if not re.search(r"\w", row)]
