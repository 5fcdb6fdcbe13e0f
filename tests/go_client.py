"""What a Go program does with asynq's client and server: the same commands, with bytes that Go would write."""

from __future__ import annotations

import time
from typing import Any

import redis

from django_asyncq.broker.keys import QueueKeys, queues_key
from django_asyncq.broker.message import TaskMessage, decode_message


def enqueue(client: redis.Redis, queue: str, type: str, payload: bytes = b"", *, id: str = "go-1", **more: Any) -> bool:
    """Enqueue a message; return False when the id is in use, as asynq's client does."""
    keys = QueueKeys(queue)
    message = TaskMessage(type=type, payload=payload, id=id, queue=queue, **{"retry": 25, "timeout": 1800, **more})
    client.sadd(queues_key(), queue)
    if client.exists(keys.task(id)):
        return False
    fields: dict[Any, Any] = {"msg": message.encode(), "state": "pending", "pending_since": time.time_ns()}
    if message.unique_key:
        client.set(message.unique_key, id, ex=600)
        fields["unique_key"] = message.unique_key
    client.hset(keys.task(id), mapping=fields)
    client.lpush(keys.pending, id)
    return True


def take(client: redis.Redis, queue: str) -> str | None:
    """Claim the next message as a Go worker: no fence, no fields of ours."""
    keys = QueueKeys(queue)
    id: Any = client.rpoplpush(keys.pending, keys.active)
    if id is None:
        return None
    client.hset(keys.task(id.decode()), "state", "active")
    client.hdel(keys.task(id.decode()), "pending_since")
    client.zadd(keys.lease, {id: time.time() + 30})
    return str(id.decode())


def fail(client: redis.Redis, queue: str, id: str, *, due_at: float) -> None:
    """Put a claimed message into retry, with one attempt used up."""
    keys = QueueKeys(queue)
    message = stored(client, queue, id)
    retried = message._replace(retried=message.retried + 1, error_msg="go failed", last_failed_at=int(time.time()))
    client.lrem(keys.active, 0, id)
    client.zrem(keys.lease, id)
    client.zadd(keys.retry, {id: int(due_at)})
    client.hset(keys.task(id), mapping={"msg": retried.encode(), "state": "retry"})


def stored(client: redis.Redis, queue: str, id: str) -> TaskMessage:
    """Return the message that Redis holds."""
    data: Any = client.hget(QueueKeys(queue).task(id), "msg")
    return decode_message(data)


def contents(client: redis.Redis, queue: str) -> dict[bytes, Any]:
    """Return all keys of a queue, byte for byte."""
    return {key: client.dump(key) for key in client.scan_iter(f"{QueueKeys(queue).base}*")}


def add_to_group(
    client: redis.Redis, queue: str, group: str, type: str, payload: bytes = b"", *, id: str, **more: Any
) -> None:
    """Enqueue a message with the option `Group`."""
    keys = QueueKeys(queue)
    options = {"retry": 25, "timeout": 1800, "group_key": group, **more}
    message = TaskMessage(type=type, payload=payload, id=id, queue=queue, **options)
    client.sadd(queues_key(), queue)
    client.hset(keys.task(id), mapping={"msg": message.encode(), "state": "aggregating", "group": group})
    client.zadd(keys.group(group), {id: int(time.time())})
    client.sadd(keys.groups, group)


def age_group(client: redis.Redis, queue: str, group: str, seconds: int) -> None:
    """Have the members of a group have joined earlier."""
    key = QueueKeys(queue).group(group)
    found: Any = client.zrange(key, 0, -1, withscores=True)
    client.zadd(key, {id: score - seconds for id, score in found})
