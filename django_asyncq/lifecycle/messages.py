"""Turn a row into an asynq message and into an entry for the broker."""

from __future__ import annotations

import math

from ..broker import Entry, GateKeys
from ..broker.message import MessageTemplate, TaskMessage
from ..definitions.payload import json_bytes
from ..models import TaskRecord
from ..storage import database_clock


def message_of(record: TaskRecord) -> bytes:
    """Encode the row as asynq does: counts, last error and arguments, for tools and foreign workers to read."""
    most_retries = max(record.max_attempts - 1, 0)
    payload = json_bytes({"args": record.args, "kwargs": record.kwargs})
    timeout = math.ceil(record.timeout_seconds or 0)
    if not record.attempt and not record.errors:
        return MessageTemplate.of(record.name, record.queue_name, most_retries, timeout).encode(payload, str(record.id))
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
        last_failed_at=int(failed_at.timestamp()) if failed_at else 0,
    ).encode()


def entry_of(record: TaskRecord, *, fence: int = 0, gate: GateKeys | None = None) -> Entry:
    """Return what the broker needs to queue the task. Its due time is `retry_at`, or else `run_after`.

    gate: the gate whose slot the script confirms, if any.
    """
    due = record.retry_at or record.run_after
    return Entry(
        id=str(record.id),
        message=message_of(record),
        fence=fence,
        priority=record.priority,
        due_at=due.timestamp() if due else None,
        gate=gate,
    )


def later_fence(record: TaskRecord) -> int:
    """Return a fence above every one that was handed out for the task: microseconds since 1970.

    Fences otherwise grow by one for each run, so they never catch up. Two processes mostly get different values. Lua
    numbers are exact up to 2**53, which is the year 2255. The clock is the database's, the same for all hosts; because
    it may be set back, the fence is also above the row's.
    """
    return max(int(database_clock.unix_seconds() * 1_000_000), record.fence + 1)
