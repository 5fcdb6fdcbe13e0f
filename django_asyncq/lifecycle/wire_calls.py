"""Call tasks with the messages of other programs, and acknowledge those as asynq does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..broker import Broker, Lease, foreign
from ..broker.decoding import UndecodableMessage, decode_message
from ..broker.foreign import ToComplete
from ..broker.message import TaskMessage
from ..definitions.payload import json_bytes
from ..definitions.wire_payload import call_of
from ..exceptions import InvalidArguments, TaskNotRunnable
from ..models import TaskRecord


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
