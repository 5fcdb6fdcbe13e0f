"""Another program on the queues: does with plain Redis commands what the Go library asynq does, and nothing of ours.

Each verb of asynq is one script there; so it is here, with the same guards, commands and order. The clock is Redis's.
Messages are written by `TaskMessage`, whose bytes the fixtures of real servers confirm.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, datetime
from typing import NamedTuple

import redis

from django_asyncq.broker.message import TaskMessage, decode_message

LEASE_SECONDS = 30
RECOVERER_GRACE_SECONDS = 30
ARCHIVE_SECONDS = 90 * 86_400
COUNTER_SECONDS = 90 * 86_400

TAKE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return nil end
local id = redis.call('RPOPLPUSH', KEYS[2], KEYS[3])
if not id then return nil end
local key = ARGV[1] .. id
redis.call('HSET', key, 'state', 'active')
redis.call('HDEL', key, 'pending_since')
redis.call('ZADD', KEYS[4], ARGV[2], id)
return {id, redis.call('HGET', key, 'msg')}
"""
# Each ending of a run begins with the two guards.
GUARDS = """
if redis.call('LREM', KEYS[1], 0, ARGV[2]) == 0 then return redis.error_reply('NOT FOUND') end
if redis.call('ZREM', KEYS[2], ARGV[2]) == 0 then return redis.error_reply('NOT FOUND') end
local key = ARGV[1] .. ARGV[2]
local function count(kind)
  local day = ARGV[4] .. kind .. ':' .. ARGV[5]
  if redis.call('INCR', day) == 1 then redis.call('EXPIREAT', day, ARGV[3] + COUNTER_SECONDS) end
  redis.call('INCR', ARGV[4] .. kind)
end
local function unlock()
  if ARGV[8] ~= '' and redis.call('GET', ARGV[8]) == ARGV[2] then redis.call('DEL', ARGV[8]) end
end
""".replace("COUNTER_SECONDS", str(COUNTER_SECONDS))
DONE = (
    GUARDS
    + """
if redis.call('DEL', key) == 0 then return redis.error_reply('NOT FOUND') end
count('processed')
unlock()
return 1
"""
)
COMPLETE = (
    GUARDS
    + """
if redis.call('ZADD', KEYS[3], ARGV[7], ARGV[2]) == 0 then return redis.error_reply('INTERNAL') end
redis.call('HSET', key, 'msg', ARGV[6], 'state', 'completed')
count('processed')
unlock()
return 1
"""
)
REQUEUE = (
    GUARDS
    + """
redis.call('RPUSH', KEYS[3], ARGV[2])
redis.call('HSET', key, 'state', 'pending')
return 1
"""
)
RETRY = (
    GUARDS
    + """
redis.call('ZADD', KEYS[3], ARGV[7], ARGV[2])
redis.call('HSET', key, 'msg', ARGV[6], 'state', 'retry')
if ARGV[9] == '1' then count('processed') count('failed') end
return 1
"""
)
ARCHIVE = (
    GUARDS
    + """
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[2])
redis.call('HSET', key, 'msg', ARGV[6], 'state', 'archived')
count('processed')
count('failed')
return 1
"""
)
FORWARD = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[2], 'LIMIT', 0, 100)
for _, id in ipairs(ids) do
  local key = ARGV[1] .. id
  local group = redis.call('HGET', key, 'group')
  if group and group ~= '' then
    redis.call('ZADD', ARGV[3] .. group, ARGV[2], id)
    redis.call('ZREM', KEYS[1], id)
    redis.call('HSET', key, 'state', 'aggregating')
  else
    redis.call('LPUSH', KEYS[2], id)
    redis.call('ZREM', KEYS[1], id)
    redis.call('HSET', key, 'state', 'pending', 'pending_since', ARGV[4])
  end
end
return #ids
"""
# ARGV: prefix, id, message, lock ("" for none), lock seconds, now in nanoseconds, due (seconds), group
ADD = """
local key = ARGV[1] .. ARGV[2]
if ARGV[4] ~= '' and not redis.call('SET', ARGV[4], ARGV[2], 'NX', 'EX', ARGV[5]) then return -1 end
if redis.call('EXISTS', key) == 1 then return 0 end
if ARGV[8] ~= '' then
  redis.call('HSET', key, 'msg', ARGV[3], 'state', 'aggregating', 'group', ARGV[8])
  redis.call('ZADD', KEYS[3], string.sub(ARGV[6], 1, -10), ARGV[2])
  redis.call('SADD', KEYS[4], ARGV[8])
  return 1
end
if ARGV[7] ~= '' then
  redis.call('HSET', key, 'msg', ARGV[3], 'state', 'scheduled')
  redis.call('ZADD', KEYS[2], ARGV[7], ARGV[2])
else
  redis.call('HSET', key, 'msg', ARGV[3], 'state', 'pending', 'pending_since', ARGV[6])
  redis.call('LPUSH', KEYS[1], ARGV[2])
end
if ARGV[4] ~= '' then redis.call('HSET', key, 'unique_key', ARGV[4]) end
return 1
"""
# The Inspector's verbs. ARGV: prefix, id, group prefix, queue prefix, now, verb.
INSPECT = """
local key = ARGV[1] .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return 0 end
local state, group, lock = unpack(redis.call('HMGET', key, 'state', 'group', 'unique_key'))
local verb = ARGV[6]
if verb == 'run' and (state == 'active' or state == 'pending') then return state == 'active' and -1 or -2 end
if verb == 'archive' and (state == 'active' or state == 'archived') then return state == 'active' and -2 or -1 end
if verb == 'delete' and state == 'active' then return -1 end
local gone
if state == 'pending' then
  gone = redis.call('LREM', ARGV[4] .. 'pending', verb == 'delete' and 0 or 1, ARGV[2])
elseif state == 'aggregating' then
  gone = redis.call('ZREM', ARGV[3] .. group, ARGV[2])
  if redis.call('ZCARD', ARGV[3] .. group) == 0 then redis.call('SREM', ARGV[4] .. 'groups', group) end
else
  gone = redis.call('ZREM', ARGV[4] .. state, ARGV[2])
end
if gone == 0 then return redis.error_reply('task is not where its state says: ' .. state) end
if verb == 'run' then
  redis.call('LPUSH', ARGV[4] .. 'pending', ARGV[2])
  redis.call('HSET', key, 'state', 'pending')
elseif verb == 'archive' then
  redis.call('ZADD', ARGV[4] .. 'archived', ARGV[5], ARGV[2])
  redis.call('HSET', key, 'state', 'archived')
else
  if lock and redis.call('GET', lock) == ARGV[2] then redis.call('DEL', lock) end
  redis.call('DEL', key)
end
return 1
"""


class Taken(NamedTuple):
    """A task that the peer runs. id: as in the list, also when there is no message."""

    id: str
    message: TaskMessage


class GoPeer:
    """One Go server with its client and its command line, for one queue."""

    def __init__(
        self,
        client: redis.Redis,
        queue: str,
        prefix: str = "asynq",
        *,
        lease_seconds: int = LEASE_SECONDS,
        grace_seconds: int = RECOVERER_GRACE_SECONDS,
    ) -> None:
        """prefix: first part of all keys; with the real library it is always "asynq".

        lease_seconds, grace_seconds: of the recoverer; the real library has those of the default.
        """
        self.lease_seconds = lease_seconds
        self.grace_seconds = grace_seconds
        self.client = client
        self.queue = queue
        self.prefix = prefix
        self.base = f"{prefix}:{{{queue}}}:"
        self.task_prefix = self.base + "t:"

    # --- reading

    def key(self, place: str) -> str:
        """Return the key of a list or set of the queue, such as "pending"."""
        return self.base + place

    def task_key(self, id: str) -> str:
        """Return the key of a task's hash."""
        return self.task_prefix + id

    def state(self, id: str) -> str:
        """Return the state of a task; "" when its hash is missing."""
        return (self.client.hget(self.task_key(id), "state") or b"").decode()

    def message(self, id: str) -> TaskMessage:
        """Return the message of a task as it is now."""
        return decode_message(self.client.hget(self.task_key(id), "msg"))

    def ids(self, place: str) -> list[str]:
        """Return the ids of a list or sorted set, in its order."""
        read = self.client.lrange if place in ("pending", "active") else self.client.zrange
        return [id.decode() for id in read(self.key(place), 0, -1)]

    def now(self) -> int:
        """Return the Unix seconds."""
        return int(self.client.time()[0])

    def _now_ns(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 10**9 + int(micros) * 1000

    # --- client

    def enqueue(
        self,
        type: str,
        payload: bytes = b"{}",
        *,
        id: str | None = None,
        unique_seconds: int = 0,
        group: str = "",
        process_at: float | None = None,
        lock: str = "",
        **fields: object,
    ) -> str:
        """Enqueue a task and return its id. fields: of TaskMessage, such as retry, timeout, retention, headers.

        lock: the key of its unique lock, where that is not asynq's for a payload.

        Raises: KeyError("duplicate") when another task holds its unique lock, KeyError("conflict") for a known id.
        """
        self.client.sadd(f"{self.prefix}:queues", self.queue)
        id = str(uuid.uuid4()) if id is None else id
        if unique_seconds and not lock:
            lock = f"{self.base}unique:{type}:{hashlib.md5(payload).hexdigest()}"
        values = {"retry": 25, "timeout": 1800, **fields}
        message = TaskMessage(
            type=type, payload=payload, id=id, queue=self.queue, unique_key=lock, group_key=group, **values
        )
        due = "" if process_at is None or process_at <= self.now() else str(int(process_at))
        keys = [self.key("pending"), self.key("scheduled"), self.key(f"g:{group}"), self.key("groups")]
        # A task with a process time is scheduled; its group is in the message only.
        words = [
            self.task_prefix,
            id,
            message.encode(),
            lock,
            unique_seconds,
            self._now_ns(),
            due,
            "" if due else group,
        ]
        reply = self.client.eval(ADD, len(keys), *keys, *words)
        if reply != 1:
            raise KeyError("duplicate" if reply == -1 else "conflict")
        return id

    def enqueue_unique(self, type: str, payload: bytes = b"{}", *, seconds: int = 3600, **fields: object) -> str:
        """Enqueue a task that holds asynq's unique lock of its type and payload. Raises: as `enqueue`."""
        return self.enqueue(type, payload, unique_seconds=seconds, **fields)

    def add_to_group(self, group: str, type: str, payload: bytes = b"{}", **fields: object) -> str:
        """Add a task to a group, and return its id."""
        return self.enqueue(type, payload, group=group, **fields)

    # --- server

    def take(self) -> Taken | None:
        """Take the next task, with a lease of 30 s; None when the queue is empty or paused."""
        keys = [self.key(place) for place in ("paused", "pending", "active", "lease")]
        found = self.client.eval(TAKE, len(keys), *keys, self.task_prefix, self.now() + self.lease_seconds)
        if not found:
            return None
        return Taken(found[0].decode(), decode_message(found[1]) if found[1] else TaskMessage())

    def write_result(self, id: str, result: bytes) -> None:
        """Write what the handler gives to its result writer."""
        self.client.hset(self.task_key(id), "result", result)

    def succeed(self, taken: Taken, result: bytes | None = None) -> None:
        """End a run as a server does: keep the task when its message says so, else delete it."""
        if result is not None:
            self.write_result(taken.id, result)
        self.complete(taken) if taken.message.retention > 0 else self.done(taken)

    def done(self, taken: Taken) -> None:
        """Delete a task that has succeeded. Raises: redis.ResponseError("NOT FOUND") when it has lost the task."""
        self._end(DONE, taken, "pending")

    def complete(self, taken: Taken) -> None:
        """Keep a task that has succeeded until its retention is over. Raises: as `done`."""
        now = self.now()
        message = taken.message._replace(completed_at=now)
        self._end(COMPLETE, taken, "completed", message, now + taken.message.retention)

    def requeue(self, taken: Taken) -> None:
        """Give a task back at a shutdown. Raises: as `done`."""
        self._end(REQUEUE, taken, "pending")

    def fail(self, taken: Taken, error: str, *, delay: int = 30) -> None:
        """End a run with an error: retry, or archive when no retry is left. Raises: as `done`."""
        is_last = taken.message.retried >= taken.message.retry
        self.archive(taken, error) if is_last else self.retry(taken, error, delay=delay)

    def fail_without_handler(self, taken: Taken, *, delay: int = 30) -> None:
        """End a run as a server without a handler for the type does. Raises: as `done`."""
        self.fail(taken, f'handler not found for task "{taken.message.type}"', delay=delay)

    def retry(self, taken: Taken, error: str, *, delay: int = 30, is_failure: bool = True) -> None:
        """Move a task to retry. is_failure: whether it costs a retry. Raises: as `done`."""
        message = taken.message._replace(
            retried=taken.message.retried + is_failure, error_msg=error, last_failed_at=self.now()
        )
        self._end(RETRY, taken, "retry", message, self.now() + delay, is_counted=is_failure)

    def archive(self, taken: Taken, error: str) -> None:
        """Archive a task that has failed for the last time. Raises: as `done`."""
        message = taken.message._replace(error_msg=error, last_failed_at=self.now())
        self._end(ARCHIVE, taken, "archived", message)

    def _end(
        self,
        script: str,
        taken: Taken,
        target: str,
        message: TaskMessage | None = None,
        score: int = 0,
        *,
        is_counted: bool = False,
    ) -> None:
        keys = [self.key(place) for place in ("active", "lease", target)]
        now = self.now()
        day = datetime.fromtimestamp(now, UTC).date().isoformat()
        words: list[object] = [self.task_prefix, taken.id, now, self.base, day]
        words += [b"" if message is None else message.encode(), score, taken.message.unique_key, int(is_counted)]
        self.client.eval(script, len(keys), *keys, *words)

    def extend(self, *ids: str) -> None:
        """Extend the leases of running tasks, as each heartbeat does."""
        self.client.zadd(self.key("lease"), {id: self.now() + self.lease_seconds for id in ids}, xx=True)

    def recover(self, *, at: int | None = None, delay: int = 30) -> list[str]:
        """Retry or archive tasks whose lease is over by 30 s; return their ids. at: the time, instead of now."""
        cutoff = (self.now() if at is None else at) - self.grace_seconds
        recovered = []
        for id in self.client.zrangebyscore(self.key("lease"), "-inf", cutoff):
            message = self.client.hget(self.task_prefix.encode() + id, "msg")
            if message:
                self.fail(Taken(id.decode(), decode_message(message)), "asynq: task lease expired", delay=delay)
                recovered.append(id.decode())
        return recovered

    def forward(self, *, at: int | None = None) -> int:
        """Move due tasks of scheduled and retry to pending; return how many. at: the time, instead of now."""
        moved = 0
        for place in ("scheduled", "retry"):
            words = [self.task_prefix, self.now() if at is None else at, self.base + "g:", self._now_ns()]
            moved += int(self.client.eval(FORWARD, 2, self.key(place), self.key("pending"), *words))
        return moved

    def delete_expired_completed(self, *, at: int | None = None) -> int:
        """Delete completed tasks whose retention is over; return how many. at: the time, instead of now."""
        ids = self.client.zrangebyscore(self.key("completed"), "-inf", self.now() if at is None else at)
        for id in ids:
            self.client.delete(self.task_prefix.encode() + id)
            self.client.zrem(self.key("completed"), id)
        return len(ids)

    # --- the command line and the Inspector

    def cancel(self, id: str) -> int:
        """Ask every server to cancel a running task; return how many processes were told."""
        return int(self.client.publish(f"{self.prefix}:cancel", id))

    def pause(self) -> bool:
        """Pause the queue; return whether it was not paused."""
        return bool(self.client.setnx(self.key("paused"), self.now()))

    def unpause(self) -> bool:
        """Resume the queue; return whether it was paused."""
        return bool(self.client.delete(self.key("paused")))

    def inspector_run(self, id: str) -> int:
        """Make a waiting task pending. Returns 1; 0 not found; -1 active; -2 pending already."""
        return self._inspect(id, "run")

    def inspector_archive(self, id: str) -> int:
        """Archive a waiting task. Returns 1; 0 not found; -1 archived already; -2 active."""
        return self._inspect(id, "archive")

    def inspector_delete(self, id: str) -> int:
        """Delete a task that does not run. Returns 1; 0 not found; -1 active."""
        return self._inspect(id, "delete")

    def _inspect(self, id: str, verb: str) -> int:
        words = [self.task_prefix, id, self.base + "g:", self.base, self.now(), verb]
        return int(self.client.eval(INSPECT, 0, *words))
