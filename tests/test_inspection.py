"""What does not agree within Redis: each script of the sweeps, and that it leaves alone what agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_asyncq.broker import Broker, Entry, Lease, scripts
from django_asyncq.broker.inspection import EntryState, Inspection
from django_asyncq.broker.keys import QueueKeys

QUEUE = "q"
WORKER = "w-1"
LEASE_SECONDS = 30


@pytest.fixture
def broker() -> Broker:
    """A broker of a worker."""
    return Broker()


@pytest.fixture
def sweeping() -> Inspection:
    """What finds and mends."""
    return Inspection()


@pytest.fixture
def keys(own_keys: None) -> QueueKeys:
    """The keys of the queue."""
    return QueueKeys(QUEUE)


@pytest.fixture
def dump(redis_client: Any, key_prefix: str) -> Callable[[], dict[bytes, bytes]]:
    """All that is in Redis of this test."""
    return lambda: {key: redis_client.dump(key) for key in sorted(redis_client.scan_iter(f"{key_prefix}*"))}


def fill(broker: Broker) -> list[Lease]:
    """Put a task into every place: the last two are active, taken by us."""
    broker.enqueue(QUEUE, [Entry("one", b"m"), Entry("two", b"m")])
    leases = broker.dequeue(QUEUE, WORKER, 2, LEASE_SECONDS).leases
    broker.enqueue(QUEUE, [Entry("pending", b"m"), Entry("first", b"m", priority=5)])
    broker.schedule(QUEUE, [Entry("scheduled", b"m", due_at=2e9), Entry("between", b"m", due_at=2e9 + 0.5)])
    broker.park(QUEUE, [Entry("retry", b"m", due_at=2e9)])
    return leases


def every_id(sweeping: Inspection) -> list[str]:
    """All hashes of the queue."""
    return [id for page in sweeping.hashes() for id in page.tasks.get(QUEUE, [])]


def sweep_all(sweeping: Inspection) -> list[int]:
    """Every mending, over all there is."""
    found = [
        sweeping.remove_dangling(QUEUE, page.place, [task.id for task in page.tasks]) for page in sweeping.pages(QUEUE)
    ]
    ids = every_id(sweeping)
    found += [sweeping.grant_leases(QUEUE, ids, LEASE_SECONDS), sweeping.repair_orphans(QUEUE, ids)]
    return [*found, sweeping.prune_held(QUEUE, WORKER)]


def test_nothing_that_agrees_is_touched(broker: Broker, sweeping: Inspection, dump: Any) -> None:
    """Every mending over every place changes nothing, nor do suspicions arise."""
    fill(broker)
    before = dump()
    assert not any(sweep_all(sweeping))
    assert sweeping.misplaced(QUEUE, every_id(sweeping)) == ([], [])
    assert dump() == before


def test_the_walk_sees_every_place_in_pages(broker: Broker, sweeping: Inspection) -> None:
    """Each task with its state and fence, more than one page of them too."""
    fill(broker)
    seen = {(page.place, task) for page in sweeping.pages(QUEUE) for task in page.tasks}
    assert seen == {
        ("pending", EntryState("pending", "pending", "")),
        ("priority", EntryState("first", "pending", "")),
        ("scheduled", EntryState("scheduled", "scheduled", "")),
        ("scheduled", EntryState("between", "scheduled", "")),
        ("retry", EntryState("retry", "retry", "0")),
        ("active", EntryState("one", "active", "1")),
        ("active", EntryState("two", "active", "1")),
    }
    broker.enqueue(QUEUE, [Entry(f"n{number}", b"m") for number in range(1200)])
    assert sum(len(page.tasks) for page in sweeping.pages(QUEUE) if page.place == "pending") == 1201


def test_the_walk_over_hashes_tells_queues_and_workers_apart(broker: Broker, sweeping: Inspection) -> None:
    """Other keys with the same tag are neither."""
    fill(broker)
    broker.enqueue("other", [Entry("with:colon}:t:x", b"m")])
    tasks: dict[str, set[str]] = {}
    workers: dict[str, set[str]] = {}
    for page in sweeping.hashes():
        for queue, ids in page.tasks.items():
            tasks.setdefault(queue, set()).update(ids)
        for queue, ids in page.workers.items():
            workers.setdefault(queue, set()).update(ids)
    assert tasks[QUEUE] == {"one", "two", "pending", "first", "scheduled", "between", "retry"}
    assert tasks["other"] == {"with:colon}:t:x"}
    assert workers == {QUEUE: {WORKER}}


@pytest.mark.parametrize("place", ["pending", "priority", "scheduled", "retry", "active"])
def test_ids_without_a_hash_go(broker: Broker, sweeping: Inspection, keys: QueueKeys, place: str) -> None:
    """A foreign one too, for it is no task; one with a message stays."""
    fill(broker)
    there = next(page.tasks[0].id for page in sweeping.pages(QUEUE) if page.place == place)
    key = getattr(keys, place)
    if place in ("pending", "active"):
        broker.client.rpush(key, "gone", "gone")
    else:
        broker.client.zadd(key, {"gone": 1})
    assert sweeping.remove_dangling(QUEUE, place, ["gone", there]) == 1
    assert sweeping.remove_dangling(QUEUE, place, ["gone", there]) == 0
    left = broker.client.lrange(key, 0, -1) if place in ("pending", "active") else broker.client.zrange(key, 0, -1)
    assert b"gone" not in left
    assert there.encode() in left


def test_active_without_a_lease_gets_one(broker: Broker, sweeping: Inspection, keys: QueueKeys) -> None:
    """A live worker goes on with its fence, renewing it; what a Go server has taken is left to it."""
    leases = fill(broker)
    broker.client.delete(keys.lease, keys.active, keys.held(WORKER))
    broker.client.hset(keys.task("go"), mapping={"msg": "m", "state": "active"})
    broker.client.lpush(keys.active, "go")
    assert sweeping.misplaced(QUEUE, ["one", "two", "go", "pending"]).leaseless == ["one", "two"]
    assert sweeping.grant_leases(QUEUE, ["one", "two", "go", "pending"], LEASE_SECONDS) == 2
    assert sweeping.grant_leases(QUEUE, ["one", "two", "go", "pending"], LEASE_SECONDS) == 0
    assert sorted(broker.client.lrange(keys.active, 0, -1)) == [b"go", b"one", b"two"]
    assert broker.client.zcard(keys.lease) == 2
    assert broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0] == (2, [])
    assert broker.done(QUEUE, WORKER, leases) == ["done", "done"]


def test_hashes_that_stand_nowhere_are_mended(broker: Broker, sweeping: Inspection, keys: QueueKeys) -> None:
    """Pending ones are taken next, by their priority; those whose time only the row knows are deleted."""
    fill(broker)
    broker.client.delete(keys.pending, keys.priority, keys.scheduled, keys.retry)
    orphans = sweeping.misplaced(QUEUE, every_id(sweeping)).orphans
    assert sorted(orphans) == ["between", "first", "pending", "retry", "scheduled"]
    assert sweeping.repair_orphans(QUEUE, [*orphans, "one"]) == 5
    assert sweeping.repair_orphans(QUEUE, [*orphans, "one"]) == 0
    assert sorted(every_id(sweeping)) == ["first", "one", "pending", "two"]
    assert [lease.id for lease in broker.dequeue(QUEUE, WORKER, 5, LEASE_SECONDS).leases] == ["first", "pending"]


def test_a_pending_orphan_is_suspected_when_its_turn_has_come(
    broker: Broker, sweeping: Inspection, keys: QueueKeys
) -> None:
    """Not while older ones wait before it: nobody misses it until then."""
    for id in ("older", "orphan", "younger"):
        broker.enqueue(QUEUE, [Entry(id, b"m")])
    broker.client.lrem(keys.pending, 0, "orphan")
    assert sweeping.misplaced(QUEUE, ["older", "orphan", "younger"]).orphans == []
    broker.dequeue(QUEUE, WORKER, 1, LEASE_SECONDS)
    assert sweeping.misplaced(QUEUE, ["older", "orphan", "younger"]).orphans == ["orphan"]


def test_orphans_in_a_group_are_left(broker: Broker, sweeping: Inspection) -> None:
    """Which set of an aggregation holds them is not known."""
    broker.add_to_group(QUEUE, "g", [Entry("grouped", b"m")])
    broker.client.delete(QueueKeys(QUEUE).group("g"))
    assert sweeping.misplaced(QUEUE, ["grouped"]) == ([], [])
    assert sweeping.repair_orphans(QUEUE, ["grouped"]) == 0


def test_what_a_worker_does_not_hold_any_more_is_forgotten(
    broker: Broker, sweeping: Inspection, keys: QueueKeys
) -> None:
    """Taken by another, ended, or gone; what it holds with its fence stays."""
    fill(broker)
    broker.client.hset(keys.held(WORKER), mapping={"one": "0", "pending": "1", "gone": "1"})
    assert sweeping.prune_held(QUEUE, WORKER) == 3
    assert sweeping.prune_held(QUEUE, WORKER) == 0
    assert broker.held(QUEUE, WORKER) == [Lease("two", 1)]
    broker.client.hset(keys.held("gone"), "two", "1")
    assert sweeping.prune_held(QUEUE, "gone") == 1
    assert broker.client.exists(keys.held("gone")) == 0


def test_waiting_entries_are_discarded_only_as_they_were_seen(
    broker: Broker, sweeping: Inspection, keys: QueueKeys, dump: Any
) -> None:
    """What has another fence by now, or was taken, stays; a lock of its own goes with the task."""
    fill(broker)
    before = dump()
    changed = [EntryState("pending", "pending", "7"), EntryState("one", "pending", "1")]
    assert sweeping.remove_waiting(QUEUE, changed) == 0
    assert dump() == before
    waiting = [task for page in sweeping.pages(QUEUE) if page.place != "active" for task in page.tasks]
    assert sweeping.remove_waiting(QUEUE, waiting) == 5
    assert sorted(every_id(sweeping)) == ["one", "two"]
    for place in (keys.pending, keys.priority, keys.scheduled, keys.retry, keys.due):
        assert broker.client.exists(place) == 0
    broker.enqueue(QUEUE, [Entry("locked", b"m", unique_key=keys.unique("x", ""), unique_seconds=60)])
    assert sweeping.remove_waiting(QUEUE, [EntryState("locked", "pending", "")]) == 1
    assert broker.client.exists(keys.unique("x", "")) == 0


def test_a_task_handed_back_after_a_loss_returns_to_its_priority(broker: Broker, keys: QueueKeys) -> None:
    """`reassert` knows it from the row, `requeue` from the hash."""
    broker.reassert(QUEUE, WORKER, [Entry("low", b"m", fence=7, priority=-5)], LEASE_SECONDS)
    assert broker.requeue(QUEUE, WORKER, [Lease("low", 7)]) == ["requeued"]
    assert broker.client.zrange(keys.priority, 0, -1, withscores=True) == [(b"low", 5.0)]


def test_every_script_of_the_sweeps_says_what_it_is() -> None:
    """Each has a header with KEYS, ARGV, Returns and Invariant."""
    names = "entry_states remove_dangling grant_lease misplaced repair_orphans prune_held remove_waiting"
    for name in names.split():
        text = scripts.script(name).text
        assert all(word in text for word in ("KEYS:", "ARGV:", "Returns", "Invariant:")), name
