"""Turn a row into an asynq message and into an entry for the broker."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .. import conf
from ..broker import Entry, GateKeys
from ..broker.decoding import decode_message
from ..broker.message import MessageTemplate, TaskMessage
from ..definitions.payload import json_bytes
from ..models import TaskRecord
from ..storage import database_clock
from .wire_locks import lock_of


def message_of(record: TaskRecord) -> bytes:
    """Encode the row as asynq does: counts, last error and arguments, for tools and foreign workers to read.

    A message that another program wrote, or that is for one, keeps all else: only counts and error change.
    """
    if record.wire_message is not None:
        return _foreign_message_of(record)
    most_retries = max(record.max_attempts - 1, 0)
    payload = json_bytes({"args": record.args, "kwargs": record.kwargs})
    timeout = math.ceil(record.timeout_seconds or 0)
    # Without it, another program would delete the task that it has run, and nobody could tell that from a lost one.
    retention = math.ceil(conf.current().wire_retention_seconds)
    # Rounded down: a foreign worker must not run it for longer.
    deadline = 0 if record.deadline is None else max(int(record.deadline.timestamp()), 1)
    if not (record.attempt or record.errors or deadline or record.headers):
        return MessageTemplate.of(record.name, record.queue_name, most_retries, timeout, retention).encode(
            payload, str(record.id)
        )
    last_error = record.errors[-1] if record.errors else None
    failed_at = record.last_attempted_at if last_error else None
    return TaskMessage(
        type=record.name,
        payload=payload,
        id=str(record.id),
        queue=record.queue_name,
        retry=most_retries,
        retried=min(record.attempt, most_retries),
        error_msg=str(last_error["message"])[:1000] if last_error else "",
        timeout=timeout,
        deadline=deadline,
        last_failed_at=int(failed_at.timestamp()) if failed_at else 0,
        retention=retention,
        headers=record.headers or {},
    ).encode()


def remote_message_of(record: TaskRecord, payload: bytes) -> bytes:
    """Encode the message of a new task that only another program runs. payload: as that program expects it."""
    return TaskMessage(
        type=record.name,
        payload=payload,
        id=str(record.id),
        queue=record.queue_name,
        group_key=record.group,
        retry=max(record.max_attempts - 1, 0),
        timeout=math.ceil(record.timeout_seconds or 0),
        deadline=0 if record.deadline is None else max(int(record.deadline.timestamp()), 1),
        retention=math.ceil(conf.current().wire_retention_seconds),
        headers=record.headers or {},
    ).encode()


def asks_retention(record: TaskRecord) -> bool:
    """Return whether another program has enqueued the task, and wants to read its result when it has succeeded."""
    if record.wire_id is None or record.wire_message is None:
        return False
    return decode_message(bytes(record.wire_message)).retention > 0


def _foreign_message_of(record: TaskRecord) -> bytes:
    message = decode_message(bytes(record.wire_message or b""))
    if not message.retention:
        # As for ours: the task may return to its program, which would leave no trace of a run that has succeeded.
        message = message._replace(retention=math.ceil(conf.current().wire_retention_seconds))
    if not record.errors:
        return message.encode()
    failed_at = record.last_attempted_at
    return message._replace(
        # asynq's own count may be higher: another program has run it too.
        retried=max(message.retried, min(record.attempt, max(message.retry, 0))),
        error_msg=str(record.errors[-1]["message"])[:1000],
        last_failed_at=int(failed_at.timestamp()) if failed_at else message.last_failed_at,
    ).encode()


def entry_of(record: TaskRecord, *, fence: int = 0, gate: GateKeys | None = None) -> Entry:
    """Return what the broker needs to queue the task. Its due time is `retry_at`, or else `run_after`.

    gate: the gate whose slot the script confirms, if any.
    """
    due = record.retry_at or record.run_after
    lock = lock_of(record) if record.unique_key or record.wire_message is not None else None
    return Entry(
        id=record.redis_id,
        message=message_of(record),
        fence=fence,
        priority=record.priority,
        due_at=due.timestamp() if due else None,
        gate=gate,
        unique_key=lock.key if lock else "",
        unique_seconds=lock.seconds if lock else 0,
        row="" if record.wire_id is None else str(record.id),
    )


def named_rows(records: Iterable[TaskRecord]) -> dict[str, str]:
    """Return what the hashes of these tasks name as their rows, by the ids in Redis; our own tasks' name none."""
    return {record.redis_id: str(record.id) for record in records if record.wire_id is not None}


def later_fence(record: TaskRecord) -> int:
    """Return a fence above every one that was handed out for the task: microseconds since 1970.

    Fences otherwise grow by one for each run, so they never catch up. Two processes mostly get different values. Lua
    numbers are exact up to 2**53, which is the year 2255. The clock is the database's, the same for all hosts; because
    it may be set back, the fence is also above the row's.
    """
    return max(int(database_clock.unix_seconds() * 1_000_000), record.fence + 1)
