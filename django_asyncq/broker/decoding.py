"""Read asynq's messages: those of other programs, which may hold anything.

Source: `asynq-wire.md` section 3; protobuf.dev, "Encoding"; Go's `protowire`, for what a reader accepts and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from ..exceptions import AsyncqError
from .message import EPOCH, FIELDS, GO_ZERO_SECONDS, LENGTH, MASK_64, VARINT, RunningInfo, ServerInfo, TaskMessage

FIXED64, GROUP, GROUP_END, FIXED32 = 1, 3, 4, 5
HIGHEST_NUMBER = (1 << 29) - 1
DEEPEST_GROUP = 100
# number → wire type, of what asynq calls ServerInfo and WorkerInfo.
SERVER_FIELDS = {1: LENGTH, 2: VARINT, 3: LENGTH, 4: VARINT, 5: LENGTH, 6: VARINT, 7: LENGTH, 8: LENGTH, 9: VARINT}
RUNNING_FIELDS = {1: LENGTH, 2: VARINT, 3: LENGTH, 4: LENGTH, 5: LENGTH, 6: LENGTH, 7: LENGTH, 8: LENGTH, 9: LENGTH}


class UndecodableMessage(AsyncqError):
    """The bytes are not a TaskMessage; the text says where they break."""


def decode_message(data: bytes) -> TaskMessage:
    """Read a message; fields may be in any order, and the last one of a number wins.

    As in Go, an unknown field is dropped, and so is a known one with another wire type.
    Raises: UndecodableMessage.
    """
    found: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for number, wire_type, value in _fields(data):
        known = FIELDS.get(number)
        if known is None or known.wire_type != wire_type:
            continue
        if known.bits:
            found[known.name] = _signed(value, known.bits)
        elif known.name == "headers":
            key, item = _map_entry(value)
            headers[key] = item
        else:
            found[known.name] = value if known.name == "payload" else _read_text(value, known.name)
    return TaskMessage(**found, headers=headers)


def decode_type(head: bytes) -> str:
    """Return the type of a message of which there is only the beginning; "" when it does not say it.

    Go and this package write the type first.
    """
    try:
        return next((_read_text(value, "type") for number, _, value in _fields(head) if number == 1), "")
    except UndecodableMessage:
        return ""


def decode_server(data: bytes) -> ServerInfo:
    """Read what asynq's servers write about themselves; without a start time it is 1970. Raises: UndecodableMessage."""
    values: dict[int, Any] = {}
    queues: dict[str, int] = {}
    for number, wire_type, value in _fields(data):
        if SERVER_FIELDS.get(number) != wire_type:
            continue
        if number == 5:
            name, weight = _queue_entry(value)
            queues[name] = weight
        values[number] = value
    return ServerInfo(
        host=_read_text(values.get(1, b""), "host"),
        pid=_signed(values.get(2, 0), 32),
        server_id=_read_text(values.get(3, b""), "server_id"),
        concurrency=_signed(values.get(4, 0), 32),
        queues=queues,
        is_strict=bool(values.get(6, 0)),
        status=_read_text(values.get(7, b""), "status"),
        started_at=_read_time(values.get(8, b"")) or EPOCH,
        active=_signed(values.get(9, 0), 32),
    )


def decode_running(data: bytes) -> RunningInfo:
    """Read what asynq's servers write about a task that they run. Raises: UndecodableMessage."""
    values = {number: value for number, wire_type, value in _fields(data) if RUNNING_FIELDS.get(number) == wire_type}
    return RunningInfo(
        host=_read_text(values.get(1, b""), "host"),
        pid=_signed(values.get(2, 0), 32),
        server_id=_read_text(values.get(3, b""), "server_id"),
        id=_read_text(values.get(4, b""), "task_id"),
        type=_read_text(values.get(5, b""), "task_type"),
        payload=values.get(6, b""),
        queue=_read_text(values.get(7, b""), "queue"),
        started_at=_read_time(values.get(8, b"")) or EPOCH,
        deadline=_read_time(values.get(9, b"")),
    )


def _queue_entry(data: bytes) -> tuple[str, int]:
    entry: dict[int, Any] = {1: b"", 2: 0}
    for number, wire_type, value in _fields(data):
        if wire_type == (LENGTH if number == 1 else VARINT) and number in entry:
            entry[number] = value
    return _read_text(entry[1], "queues"), _signed(entry[2], 32)


def _read_time(data: bytes) -> datetime | None:
    """Return an aware time; None for Go's zero time and for what no datetime can hold."""
    values = {number: value for number, wire_type, value in _fields(data) if wire_type == VARINT}
    seconds, nanos = _signed(values.get(1, 0), 64), _signed(values.get(2, 0), 32)
    if seconds == GO_ZERO_SECONDS and not nanos:
        return None
    try:
        return EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000)
    except OverflowError:
        return None


def _read_text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UndecodableMessage(f"field {name} is not UTF-8") from error


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _map_entry(data: bytes) -> tuple[str, str]:
    entry = {1: b"", 2: b""}
    for number, wire_type, value in _fields(data):
        if wire_type == LENGTH and number in entry:
            entry[number] = value
    return _read_text(entry[1], "headers"), _read_text(entry[2], "headers")


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) for each field; value: int for varints, bytes otherwise.

    Groups are skipped with all that they contain: proto3 has none, but Go's reader still accepts them.
    """
    position = 0
    groups: list[int] = []
    while position < len(data):
        key, position = _read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if not 0 < number <= HIGHEST_NUMBER:
            raise UndecodableMessage(f"field number {number} before byte {position}")
        if wire_type == GROUP and len(groups) < DEEPEST_GROUP:
            groups.append(number)
        elif wire_type == GROUP_END and groups and groups[-1] == number:
            groups.pop()
        else:
            value, position = _read_value(data, position, wire_type)
            if not groups:
                yield number, wire_type, value
    if groups:
        raise UndecodableMessage(f"group {groups[-1]} is not closed")


def _read_value(data: bytes, position: int, wire_type: int) -> tuple[int | bytes, int]:
    """Return a field's value and the position after it."""
    if wire_type == VARINT:
        return _read_varint(data, position)
    if wire_type == LENGTH:
        size, position = _read_varint(data, position)
    elif wire_type in (FIXED32, FIXED64):
        size = 4 if wire_type == FIXED32 else 8
    else:
        raise UndecodableMessage(f"wire type {wire_type} before byte {position}")
    stop = position + size
    if stop > len(data):
        raise UndecodableMessage(f"the field at byte {position} is longer than the message")
    return bytes(data[position:stop]), stop


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of at most ten bytes and 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise UndecodableMessage("the message stops within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MASK_64:
                break
            return value, position
    raise UndecodableMessage(f"the number before byte {position} is too long")
