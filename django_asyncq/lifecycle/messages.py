"""What a row looks like as a message of asynq."""

from __future__ import annotations

import math
import time

from ..broker import Entry, GateKeys
from ..broker.message import MessageTemplate, TaskMessage
from ..definitions.payload import json_bytes
from ..models import TaskRecord


def message_of(record: TaskRecord) -> bytes:
    """Encode the record as asynq would: counts, last error and arguments, for tools and foreign workers to read."""
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
    """Return what the broker needs to queue the record; its due time is that of the next change to come.

    gate: where its slot is to be made lasting, if it is.
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
    """Return a fence above any that can have been handed out for it: microseconds since 1970 grow faster.

    Two who give one to the same run mostly give two; Lua keeps it exact until 2255 (2**53). Above the row's own too,
    for clocks of hosts differ.
    """
    return max(time.time_ns() // 1_000, record.fence + 1)
