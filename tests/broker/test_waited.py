"""Tasks that are waited for, on a real server: they are announced when they are over, others cost no command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker, Entry, waits
from django_asyncq.broker.inspection import EntryState, Inspection
from django_asyncq.broker.keys import QueueKeys, over_channel
from django_asyncq.broker.waits import OverListener, mark_waited
from django_asyncq.testing import EmbeddedRedis

from ..workers import wait_until

QUEUE, WORKER = "q", "w-1"
PATIENCE_SECONDS = 10.0


@pytest.fixture
def broker(own_keys: None) -> Broker:
    return Broker()


@pytest.fixture
def heard(own_keys: None, redis_client: redis.Redis) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the ids announced since the last call."""
    with redis_client.pubsub() as subscription:
        subscription.subscribe(over_channel())
        assert subscription.get_message(timeout=PATIENCE_SECONDS)["type"] == "subscribe"

        def announced() -> list[str]:
            redis_client.publish(over_channel(), "last")
            found = []
            while (id := subscription.get_message(timeout=PATIENCE_SECONDS)["data"].decode()) != "last":
                found.append(id)
            return found

        yield announced


def enqueue(broker: Broker, *ids: str) -> None:
    broker.enqueue(QUEUE, [Entry(id, b"m") for id in ids])


def finish(broker: Broker, *, archived: bool = False) -> None:
    """Dequeue all tasks, and finish them."""
    leases = broker.dequeue(QUEUE, WORKER, 100, 30).leases
    if archived:
        broker.archive(QUEUE, WORKER, [(lease, b"m") for lease in leases])
    else:
        broker.done(QUEUE, WORKER, leases)


def test_only_a_task_with_a_message_is_marked(broker: Broker, redis_client: redis.Redis) -> None:
    """A stub of a hash would keep the task from being pushed."""
    enqueue(broker, "a")
    assert mark_waited("default", QUEUE, ["a", "b"]) == {"a"}
    keys = QueueKeys(QUEUE)
    assert redis_client.hget(keys.task("a"), "waited") == b"1"
    assert not redis_client.exists(keys.task("b"))


def test_many_tasks_are_marked_in_some_calls(broker: Broker) -> None:
    """Redis is never busy for long."""
    ids = [f"id-{number}" for number in range(waits.IDS_PER_CALL + 1)]
    enqueue(broker, *ids)
    assert mark_waited("default", QUEUE, ids) == set(ids)


@pytest.mark.parametrize("archived", [False, True])
def test_a_task_that_is_over_is_announced(broker: Broker, heard: Any, archived: bool) -> None:
    """It has succeeded or failed; nobody waits for the second one."""
    enqueue(broker, "a", "b")
    mark_waited("default", QUEUE, ["a"])
    assert heard() == []
    finish(broker, archived=archived)
    assert heard() == ["a"]


def test_a_task_that_is_removed_is_announced(broker: Broker, heard: Any) -> None:
    """Its row was deleted, or is final."""
    enqueue(broker, "a", "b")
    mark_waited("default", QUEUE, ["a"])
    broker.remove(QUEUE, ["a", "b", "missing"])
    assert heard() == ["a"]
    enqueue(broker, "c", "d")
    mark_waited("default", QUEUE, ["c"])
    Inspection().remove_waiting(QUEUE, [EntryState("c", "pending", ""), EntryState("d", "pending", "")])
    assert heard() == ["c"]


def test_a_task_that_is_retried_stays_marked(broker: Broker, heard: Any, redis_client: redis.Redis) -> None:
    """A retry is not the end, and the mark outlives it."""
    enqueue(broker, "a")
    mark_waited("default", QUEUE, ["a"])
    (lease,) = broker.dequeue(QUEUE, WORKER, 1, 30).leases
    broker.retry(QUEUE, WORKER, [(lease, b"m", 0.0)])
    assert heard() == []
    assert redis_client.hget(QueueKeys(QUEUE).task("a"), "waited") == b"1"


def test_a_task_nobody_waits_for_costs_no_command_more(broker: Broker, own_redis: EmbeddedRedis) -> None:
    """The scripts read the mark with what they read anyway."""

    def commands_of(*, wait: bool) -> dict[str, int]:
        client = Broker("worker").client
        client.config_resetstat()
        enqueue(broker, "a")
        if wait:
            mark_waited("default", QUEUE, ["a"])
        finish(broker)
        stats = client.info("commandstats")
        names = ("cmdstat_hmget", "cmdstat_evalsha", "cmdstat_publish")
        return {name: stats[name]["calls"] for name in names if name in stats}

    commands_of(wait=False)  # registers the queue, and loads the scripts
    commands_of(wait=True)
    plain, waited_for = commands_of(wait=False), commands_of(wait=True)
    assert "cmdstat_publish" not in plain
    assert waited_for == {**plain, "cmdstat_evalsha": plain["cmdstat_evalsha"] + 1, "cmdstat_publish": 1}


def test_the_listener_hears_once_the_server_has_confirmed(broker: Broker) -> None:
    """Its event is set then; it stops when nobody needs it."""
    found: list[str] = []
    event, is_needed = threading.Event(), threading.Event()
    is_needed.set()
    listener = OverListener(found.append, event, is_needed=is_needed.is_set, on_death=found.append)
    assert not listener.is_listening
    listener.start()
    assert event.wait(PATIENCE_SECONDS) and listener.is_listening and listener.is_current
    enqueue(broker, "a")
    mark_waited("default", QUEUE, ["a"])
    finish(broker)
    wait_until(lambda: found == ["a"], "announcement")
    is_needed.clear()
    wait_until(lambda: not listener.is_listening, "end of the listener")
    assert not listener.has_died
