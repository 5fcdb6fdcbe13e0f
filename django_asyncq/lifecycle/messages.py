"""Turn a row into an asynq message and into an entry for the broker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..broker import Broker, Entry, GateKeys, Lease, foreign
from ..broker.foreign import ToComplete, ToRestore
from ..broker.message import MessageTemplate, TaskMessage, UndecodableMessage, decode_message
from ..core import fairness
from ..core.calls import call_of
from ..core.masking import masker_of
from ..core.payload import json_bytes
from ..exceptions import InvalidArguments, TaskNotRunnable
from ..models import TaskRecord
from ..storage import database_clock

# As long as a Go server keeps what it has finished. asynq's lock needs an end; a task that lasts longer loses it.
LOCK_SECONDS = 86_400
LONGEST_ERROR = 1_000


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
    retention = foreign.WIRE_RETENTION_SECONDS
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
        error_msg=_shown_error(record) if last_error else "",
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
        retention=foreign.WIRE_RETENTION_SECONDS,
        headers=record.headers or {},
    ).encode()


def _shown_error(record: TaskRecord) -> str:
    """Return the text of the last error as Redis may show it to anybody: without secrets."""
    return masker_of(record).text(str(record.errors[-1]["message"]))[:LONGEST_ERROR]


def asks_retention(record: TaskRecord) -> bool:
    """Return whether another program has enqueued the task, and wants to read its result when it has succeeded."""
    if record.wire_id is None or record.wire_message is None:
        return False
    return decode_message(bytes(record.wire_message)).retention > 0


def _foreign_message_of(record: TaskRecord) -> bytes:
    message = decode_message(bytes(record.wire_message or b""))
    if not message.retention:
        # As for ours: the task may return to its program, which would leave no trace of a run that has succeeded.
        message = message._replace(retention=foreign.WIRE_RETENTION_SECONDS)
    if not record.errors:
        return message.encode()
    failed_at = record.last_attempted_at
    return message._replace(
        # asynq's own count may be higher: another program has run it too.
        retried=max(message.retried, min(record.attempt, max(message.retry, 0))),
        error_msg=_shown_error(record),
        last_failed_at=int(failed_at.timestamp()) if failed_at else message.last_failed_at,
    ).encode()


def entry_of(record: TaskRecord, *, fence: int = 0, gate: GateKeys | None = None) -> Entry:
    """Return what the broker needs to queue the task. Its due time is `retry_at`, or else `run_after`.

    gate: the gate whose slot the script confirms, if any.
    """
    due = record.retry_at or record.run_after
    due_at = due.timestamp() if due else None
    # asynq's unique lock, if the program that has enqueued the task took it. Among ours the row decides.
    lock = "" if record.wire_id is None else decode_message(bytes(record.wire_message or b"")).unique_key
    return Entry(
        id=record.redis_id,
        message=message_of(record),
        fence=fence,
        priority=record.priority,
        due_at=due_at,
        gate=gate,
        unique_key=lock,
        unique_seconds=LOCK_SECONDS + max(int((due_at or 0) - database_clock.unix_seconds()), 0) if lock else 0,
        row="" if record.wire_id is None else str(record.id),
        fair=_fair_of(record) if record.name in fairness.declared else "",
    )


def _fair_of(record: TaskRecord) -> str:
    share = fairness.share_of(record)
    return "" if share is None else share.text


def named_rows(records: Iterable[TaskRecord]) -> dict[str, str]:
    """Return what the hashes of these tasks name as their rows, by the ids in Redis; our own tasks' name none."""
    return {record.redis_id: str(record.id) for record in records if record.wire_id is not None}


def restore(broker: Broker, queue: str, worker_id: str, entries: Sequence[Lease | str]) -> list[str]:
    """Restore entries without a row, for any program. entries: leases, or the ids of those that wait in retry.

    Returns, for each: "restored", "stale" or "missing". Raises: BrokerUnavailable.
    """
    back = [ToRestore(each, "") if isinstance(each, str) else ToRestore(each.id, each.fence) for each in entries]
    return foreign.restore(broker, queue, worker_id, back) if back else []


def later_fence(record: TaskRecord) -> int:
    """Return a fence above every one that was handed out for the task until now: microseconds since 1970.

    It orders entries of Redis. No row may be judged by that order: what has this fence may be committed after later
    ones were handed out.

    Fences otherwise grow by one for each run, so they never catch up. Two processes mostly get different values. Lua
    numbers are exact up to 2**53, which is the year 2255. The clock is the database's, the same for all hosts; because
    it may be set back, the fence is also above the row's.
    """
    return max(int(database_clock.unix_seconds() * 1_000_000), record.fence + 1)


# --- Call tasks with the messages of other programs, and acknowledge those as asynq does.


class WireCall(NamedTuple):
    """What another program's message asks for. type: the type that it has written."""

    type: str
    args: list[Any]
    kwargs: dict[str, Any]


def wire_call_of(record: TaskRecord, task: Any) -> WireCall | None:
    """Return what the message of a task asks for; None for a task that was enqueued here.

    Raises: TaskNotRunnable when the function cannot be called with its payload.
    """
    message = _message_of(record)
    if message is None:
        return None
    try:
        return WireCall(message.type, *call_of(task, message.payload))
    except InvalidArguments as error:
        raise TaskNotRunnable(str(error)) from error


def _message_of(record: TaskRecord) -> TaskMessage | None:
    """Return the message that another program has written for a task; None for a task of our own."""
    if record.wire_id is None or record.wire_message is None:
        return None
    try:
        return decode_message(bytes(record.wire_message))
    except UndecodableMessage as error:
        raise TaskNotRunnable(f"the row's message is none of asynq's: {error}") from error


def acknowledge_done(
    broker: Broker, queue: str, worker_id: str, finished: Sequence[tuple[TaskRecord | None, Lease]]
) -> None:
    """Remove the entries of finished tasks; one that succeeded, and whose message asks for it, stays in `completed`.

    finished: with the row, if it is the outcome of this lease. Raises: BrokerUnavailable.
    """
    kept: list[ToComplete] = []
    done: list[Lease] = []
    for record, lease in finished:
        item = None if record is None or record.wire_id is None else _to_complete(record, lease)
        if item is None:
            done.append(lease)
        else:
            kept.append(item)
    if done:
        broker.done(queue, worker_id, done)
    if kept:
        foreign.complete(broker, queue, worker_id, kept)


def _to_complete(record: TaskRecord, lease: Lease) -> ToComplete | None:
    message = _message_of(record)
    if message is None or message.retention <= 0 or record.finished_at is None or record.retry_at is not None:
        return None
    if record.reason:
        return None
    result = b"" if record.return_value is None else json_bytes(record.return_value)
    encoded = message._replace(completed_at=foreign.completed_at()).encode()
    return ToComplete(lease, encoded, message.retention, result)
