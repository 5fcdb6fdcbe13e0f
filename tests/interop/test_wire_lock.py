"""asynq's unique lock goes with the task of the program that took it; tasks of ours neither take it nor ask for it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import redis

from django_asyncq import interop, lifecycle, remote
from django_asyncq.broker import Broker
from django_asyncq.models import TaskRecord
from django_asyncq.storage import database_clock

from .. import go_client, wire_tasks

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "mail"
PAYLOAD = b'{"to":"a"}'


def lock(type: str = "email:deliver") -> str:
    """Return the name that Go's client gives the lock of a message."""
    return Broker().keys(QUEUE).unique(type, hashlib.md5(PAYLOAD).hexdigest())


@pytest.mark.parametrize("task", [wire_tasks.deliver, remote("lock:deliver", queue_name=QUEUE)])
def test_a_task_of_ours_neither_takes_nor_asks_it(task: Any, redis_client: redis.Redis) -> None:
    """Among ours the row decides."""
    name = lock(task.wire_name or task.name)
    redis_client.set(name, "go-1")
    result = task.using(queue_name=QUEUE, unique=True).enqueue(to="a")
    assert redis_client.get(name) == b"go-1"
    assert redis_client.hget(Broker().keys(QUEUE).task(result.id), "unique_key") is None


@pytest.mark.parametrize("has_thief", [False, True])
def test_an_emptied_redis_gets_the_lock_again(redis_client: redis.Redis, key_prefix: str, *, has_thief: bool) -> None:
    """With the push of the row; if another program has it by then, the committed row runs without it."""
    go_client.enqueue(redis_client, QUEUE, "email:deliver", PAYLOAD, unique_key=lock())
    assert len(interop.claim(Broker(), QUEUE, "w", 1, "default").runs) == 1
    for key in redis_client.scan_iter(f"{key_prefix}*"):
        redis_client.delete(key)
    if has_thief:
        redis_client.set(lock(), "go-2")
    lifecycle.dispatch([TaskRecord.objects.get()], again=True)
    assert redis_client.get(lock()) == (b"go-2" if has_thief else b"go-1")
    if not has_thief:
        assert 80_000 < redis_client.ttl(lock()) <= 86_400
    (found,) = interop.claim(Broker(), QUEUE, "w", 1, "default").runs
    lifecycle.begin(found, "w", database_clock.now())
    lifecycle.succeed(found, None, database_clock.now())
    assert lifecycle.record_runs([found]) == []
    lifecycle.acknowledge(Broker(), "w", [found])
    assert redis_client.get(lock()) == (b"go-2" if has_thief else None)
