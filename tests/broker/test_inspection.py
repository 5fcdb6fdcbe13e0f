"""Entries that do not agree: each repair script repairs them, and changes no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_asyncq.broker import Broker, Entry, Lease, scripts
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.inspection import EntryState, Inspection
from django_asyncq.broker.keys import QueueKeys

QUEUE = "q"
WORKER = "w-1"
LEASE_SECONDS = 30


@pytest.fixture
def broker() -> Broker:
    """A broker with the worker's role."""
    return Broker()


@pytest.fixture
def inspection() -> Inspection:
    """The part that finds and repairs."""
    return Inspection()


@pytest.fixture
def keys(own_keys: None) -> QueueKeys:
    """The keys of the queue."""
    return QueueKeys(QUEUE)


@pytest.fixture
def dump(redis_client: Any, key_prefix: str) -> Callable[[], dict[bytes, bytes]]:
    """All keys of this test in Redis, with their contents."""
    return lambda: {key: redis_client.dump(key) for key in sorted(redis_client.scan_iter(f"{key_prefix}*"))}


def fill(broker: Broker) -> list[Lease]:
    """Put tasks into every list and zset: the last two are active, dequeued by us."""
    broker.enqueue(QUEUE, [Entry("one", b"m"), Entry("two", b"m")])
    leases = broker.dequeue(QUEUE, WORKER, 2, LEASE_SECONDS).leases
    broker.enqueue(QUEUE, [Entry("pending", b"m"), Entry("first", b"m", priority=5)])
    broker.schedule(QUEUE, [Entry("scheduled", b"m", due_at=2e9), Entry("between", b"m", due_at=2e9 + 0.5)])
    broker.park(QUEUE, [Entry("retry", b"m", due_at=2e9)])
    return leases


def every_id(inspection: Inspection) -> list[str]:
    """All task hashes of the queue."""
    return [id for page in inspection.hashes() for id in page.tasks.get(QUEUE, [])]


def repair_all(inspection: Inspection) -> list[int]:
    """Run every repair over all tasks."""
    found = [
        inspection.remove_dangling(QUEUE, page.place, [task.id for task in page.tasks])
        for page in inspection.pages(QUEUE)
    ]
    ids = every_id(inspection)
    found += [inspection.grant_leases(QUEUE, ids, LEASE_SECONDS), inspection.repair_orphans(QUEUE, ids)]
    return [*found, inspection.prune_held(QUEUE, WORKER)]


def test_entries_that_agree_are_not_changed(broker: Broker, inspection: Inspection, dump: Any) -> None:
    """Every repair over every list changes nothing, and nothing is reported as misplaced."""
    fill(broker)
    before = dump()
    assert not any(repair_all(inspection))
    assert inspection.misplaced(QUEUE, every_id(inspection)) == ([], [])
    assert dump() == before


def test_pages_cover_every_list(broker: Broker, inspection: Inspection) -> None:
    """Each task with its state and fence, also when there is more than one page."""
    fill(broker)
    seen = {(page.place, task) for page in inspection.pages(QUEUE) for task in page.tasks}
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
    assert sum(len(page.tasks) for page in inspection.pages(QUEUE) if page.place == "pending") == 1201


def test_hashes_are_listed_by_queue_as_tasks_or_workers(broker: Broker, inspection: Inspection) -> None:
    """Other keys with the same hash tag are neither."""
    fill(broker)
    broker.enqueue("other", [Entry("with:colon}:t:x", b"m")])
    tasks: dict[str, set[str]] = {}
    workers: dict[str, set[str]] = {}
    for page in inspection.hashes():
        for queue, ids in page.tasks.items():
            tasks.setdefault(queue, set()).update(ids)
        for queue, ids in page.workers.items():
            workers.setdefault(queue, set()).update(ids)
    assert tasks[QUEUE] == {"one", "two", "pending", "first", "scheduled", "between", "retry"}
    assert tasks["other"] == {"with:colon}:t:x"}
    assert workers == {QUEUE: {WORKER}}


@pytest.mark.parametrize("place", ["pending", "priority", "scheduled", "retry", "active"])
def test_ids_without_a_message_are_removed(broker: Broker, inspection: Inspection, keys: QueueKeys, place: str) -> None:
    """A foreign one too, because it is not a task; an id with a message stays."""
    fill(broker)
    there = next(page.tasks[0].id for page in inspection.pages(QUEUE) if page.place == place)
    key = getattr(keys, place)
    if place in ("pending", "active"):
        broker.client.rpush(key, "gone", "gone")
    else:
        broker.client.zadd(key, {"gone": 1})
    assert inspection.remove_dangling(QUEUE, place, ["gone", there]) == 1
    assert inspection.remove_dangling(QUEUE, place, ["gone", there]) == 0
    left = broker.client.lrange(key, 0, -1) if place in ("pending", "active") else broker.client.zrange(key, 0, -1)
    assert b"gone" not in left
    assert there.encode() in left


def test_an_active_task_without_a_lease_gets_one(broker: Broker, inspection: Inspection, keys: QueueKeys) -> None:
    """A live worker continues with its fence and renews it; a task of a Go server is left to that server."""
    leases = fill(broker)
    broker.client.delete(keys.lease, keys.active, keys.held(WORKER))
    broker.client.hset(keys.task("go"), mapping={"msg": "m", "state": "active"})
    broker.client.lpush(keys.active, "go")
    assert inspection.misplaced(QUEUE, ["one", "two", "go", "pending"]).leaseless == ["one", "two"]
    assert inspection.grant_leases(QUEUE, ["one", "two", "go", "pending"], LEASE_SECONDS) == 2
    assert inspection.grant_leases(QUEUE, ["one", "two", "go", "pending"], LEASE_SECONDS) == 0
    assert sorted(broker.client.lrange(keys.active, 0, -1)) == [b"go", b"one", b"two"]
    assert broker.client.zcard(keys.lease) == 2
    assert broker.extend(QUEUE, [WORKER], LEASE_SECONDS)[0] == (2, [], [], ())
    assert broker.done(QUEUE, WORKER, leases) == ["done", "done"]


def test_hashes_in_no_list_are_repaired(broker: Broker, inspection: Inspection, keys: QueueKeys) -> None:
    """A pending one is the next to run, by its priority; one whose time only the row knows is deleted."""
    fill(broker)
    broker.client.delete(keys.pending, keys.priority, keys.scheduled, keys.retry)
    orphans = inspection.misplaced(QUEUE, every_id(inspection)).orphans
    assert sorted(orphans) == ["between", "first", "pending", "retry", "scheduled"]
    assert inspection.repair_orphans(QUEUE, [*orphans, "one"]) == 5
    assert inspection.repair_orphans(QUEUE, [*orphans, "one"]) == 0
    assert sorted(every_id(inspection)) == ["first", "one", "pending", "two"]
    assert [lease.id for lease in broker.dequeue(QUEUE, WORKER, 5, LEASE_SECONDS).leases] == ["first", "pending"]


def test_a_pending_orphan_is_reported_when_the_next_task_is_younger(
    broker: Broker, inspection: Inspection, keys: QueueKeys
) -> None:
    """Not while older tasks wait before it: until then it is not late."""
    for id in ("older", "orphan", "younger"):
        broker.enqueue(QUEUE, [Entry(id, b"m")])
    broker.client.lrem(keys.pending, 0, "orphan")
    assert inspection.misplaced(QUEUE, ["older", "orphan", "younger"]).orphans == []
    broker.dequeue(QUEUE, WORKER, 1, LEASE_SECONDS)
    assert inspection.misplaced(QUEUE, ["older", "orphan", "younger"]).orphans == ["orphan"]


def test_a_task_of_ours_leaves_a_group(broker: Broker, inspection: Inspection) -> None:
    """It has no rules, so another program wrote its `group`. Tasks of Go programs have no row and are left."""
    Groups().add(QUEUE, "g", [Entry("grouped", b"m"), Entry("of Go", b"m")], rules="")
    assert inspection.misplaced(QUEUE, ["grouped"]) == ([], ["grouped"])
    assert inspection.repair_orphans(QUEUE, ["grouped"]) == 1
    assert broker.client.zrange(QueueKeys(QUEUE).group("g"), 0, -1) == [b"of Go"]
    assert every_id(inspection) == ["of Go"]


def test_tasks_that_a_worker_no_longer_holds_are_removed(
    broker: Broker, inspection: Inspection, keys: QueueKeys
) -> None:
    """Dequeued by another, finished or deleted; what it holds with its fence stays."""
    fill(broker)
    broker.client.hset(keys.held(WORKER), mapping={"one": "0", "pending": "1", "gone": "1"})
    assert inspection.prune_held(QUEUE, WORKER) == 3
    assert inspection.prune_held(QUEUE, WORKER) == 0
    assert broker.held(QUEUE, WORKER) == [Lease("two", 1)]
    broker.client.hset(keys.held("gone"), "two", "1")
    assert inspection.prune_held(QUEUE, "gone") == 1
    assert broker.client.exists(keys.held("gone")) == 0


def test_waiting_entries_are_removed_only_as_they_were_seen(
    broker: Broker, inspection: Inspection, keys: QueueKeys, dump: Any
) -> None:
    """One with another fence by now, or an active one, stays; the task's own lock is removed with it."""
    fill(broker)
    before = dump()
    changed = [EntryState("pending", "pending", "7"), EntryState("one", "pending", "1")]
    assert inspection.remove_waiting(QUEUE, changed) == 0
    assert dump() == before
    waiting = [task for page in inspection.pages(QUEUE) if page.place != "active" for task in page.tasks]
    assert inspection.remove_waiting(QUEUE, waiting) == 5
    assert sorted(every_id(inspection)) == ["one", "two"]
    for place in (keys.pending, keys.priority, keys.scheduled, keys.retry, keys.due):
        assert broker.client.exists(place) == 0
    broker.enqueue(QUEUE, [Entry("locked", b"m", unique_key=keys.unique("x", ""), unique_seconds=60)])
    assert inspection.remove_waiting(QUEUE, [EntryState("locked", "pending", "")]) == 1
    assert broker.client.exists(keys.unique("x", "")) == 0


def test_a_task_requeued_after_a_loss_keeps_its_priority(broker: Broker, keys: QueueKeys) -> None:
    """`reassert` has it from the row, `requeue` from the hash."""
    broker.reassert(QUEUE, WORKER, [Entry("low", b"m", fence=7, priority=-5)], LEASE_SECONDS)
    assert broker.requeue(QUEUE, WORKER, [Lease("low", 7)]) == ["requeued"]
    assert broker.client.zrange(keys.priority, 0, -1, withscores=True) == [(b"low", 5.0)]


def test_every_repair_script_has_a_header() -> None:
    """Each states KEYS, ARGV, Returns and Invariant."""
    names = "entry_states remove_dangling grant_lease misplaced repair_orphans prune_held remove_waiting"
    for name in names.split():
        text = scripts.script(name).text
        assert all(word in text for word in ("KEYS:", "ARGV:", "Returns", "Invariant:")), name
