"""Encode asynq's messages: the protobuf of the hash field `msg`, and of schedules, byte for byte as Go writes them.

Written by hand: some twenty fields need no library. Must not know what a payload holds.
Source: asynq's `internal/proto/asynq.proto`; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.time import EPOCH
from ..exceptions import AsyncqError

VARINT, LENGTH = 0, 2
MASK_64 = (1 << 64) - 1
# 0001-01-01 00:00 UTC: Go's zero time, which means "no time".
GO_ZERO_SECONDS = -62_135_596_800


class Field(NamedTuple):
    """Name a field of the message and how it is written. bits: width of a number, 0 for other fields."""

    name: str
    wire_type: int
    bits: int = 0


# number → field, in the order in which Go writes them.
FIELDS = {
    1: Field("type", LENGTH),
    2: Field("payload", LENGTH),
    3: Field("id", LENGTH),
    4: Field("queue", LENGTH),
    5: Field("retry", VARINT, 32),
    6: Field("retried", VARINT, 32),
    7: Field("error_msg", LENGTH),
    8: Field("timeout", VARINT, 64),
    9: Field("deadline", VARINT, 64),
    10: Field("unique_key", LENGTH),
    11: Field("last_failed_at", VARINT, 64),
    12: Field("retention", VARINT, 64),
    13: Field("completed_at", VARINT, 64),
    14: Field("group_key", LENGTH),
    15: Field("headers", LENGTH),
}


# Every number below 0x80 as one byte; then, for each field, the byte before its value: number and wire type.
_SHORT = tuple(bytes([number]) for number in range(0x80))
_KEYS = {number: _SHORT[number << 3 | wire_type] for number, (_, wire_type, _) in FIELDS.items()}


class TaskMessage(NamedTuple):
    """Hold the values of one message, in the order of `FIELDS`; 0 and "" mean absent.

    Times are Unix seconds, durations seconds. retry: most retries, not counting the first run. retried: counted
    failures so far. headers: str → str.
    """

    type: str = ""
    payload: bytes = b""
    id: str = ""
    queue: str = ""
    retry: int = 0
    retried: int = 0
    error_msg: str = ""
    timeout: int = 0
    deadline: int = 0
    unique_key: str = ""
    last_failed_at: int = 0
    retention: int = 0
    completed_at: int = 0
    group_key: str = ""
    headers: Mapping[str, str] = MappingProxyType({})

    def encode(self) -> bytes:
        """Return the bytes: fields in ascending number, without those that are zero or empty.

        A lone surrogate in a text becomes "?". A number too large for its field becomes the largest possible one.
        """
        out = bytearray()
        values: tuple[Any, ...] = self
        for (number, (_, _, bits)), value in zip(FIELDS.items(), values, strict=True):
            if not value:
                continue
            if bits:
                out += _KEYS[number] + _varint(_within(value, bits) & MASK_64)
            elif isinstance(value, str):
                out += _length_field(number, value.encode("utf-8", "replace"))
            elif isinstance(value, bytes):
                out += _length_field(number, value)
            else:
                for key, item in value.items():
                    # Go writes both key and value of a header, even when they are empty.
                    out += _length_field(number, _length_field(1, _text(key)) + _length_field(2, _text(item)))
        return bytes(out)


class MessageTemplate(NamedTuple):
    """Hold the encoded bytes that the messages of all new tasks of one kind share.

    head: what comes before payload and id. tail: what comes after them.
    """

    head: bytes
    tail: bytes

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, type: str, queue: str, retry: int, timeout: int, retention: int) -> MessageTemplate:
        """Return the template of one kind of task; the arguments are fields of TaskMessage."""
        tail = TaskMessage(queue=queue, retry=retry, timeout=timeout, retention=retention)
        return cls(TaskMessage(type=type).encode(), tail.encode())

    def encode(self, payload: bytes, id: str) -> bytes:
        """Return the same bytes as `TaskMessage.encode`, without a pass over all fields. payload, id: not empty."""
        return self.head + _length_field(2, payload) + _length_field(3, id.encode()) + self.tail


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEntry:
    """Describe a schedule as asynq's tools list it.

    options: such as `Queue("mail")`; each must contain a "(". next_at, previous_at: aware; previous_at is None when
    the schedule never fired, next_at only when another program does not say it.
    """

    id: str
    spec: str
    type: str
    payload: bytes
    options: tuple[str, ...]
    next_at: datetime | None
    previous_at: datetime | None

    def encode(self) -> bytes:
        """Return the bytes, as Go writes them."""
        out = bytearray()
        for number, text in ((1, self.id), (2, self.spec), (3, self.type)):
            out += _length_field(number, _text(text))
        out += _length_field(4, self.payload)
        for option in self.options:
            out += _length_field(5, _text(option))
        out += _length_field(6, _timestamp(self.next_at))
        out += _length_field(7, _timestamp(self.previous_at))
        return bytes(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEnqueueEvent:
    """One firing of a schedule as asynq's tools list it. enqueued_at: aware."""

    task_id: str
    enqueued_at: datetime

    def encode(self) -> bytes:
        """Return the bytes, as Go writes them."""
        return _length_field(1, _text(self.task_id)) + _length_field(2, _timestamp(self.enqueued_at))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Describe a worker process as asynq describes a server.

    queues: name → weight. status: asynq's word, see `servers`. active: how many tasks it runs. started_at: aware.
    """

    host: str
    pid: int
    server_id: str
    concurrency: int
    queues: Mapping[str, int]
    is_strict: bool
    status: str
    started_at: datetime
    active: int = 0

    def encode(self) -> bytes:
        """Return the bytes, as Go writes them; Go gives the queues in any order."""
        out = bytearray(_identity_fields(self.host, self.pid, self.server_id) + _number_field(4, self.concurrency))
        for name, weight in self.queues.items():
            # Go writes both key and value of a queue, even when they are empty or 0.
            value = _varint(2 << 3 | VARINT) + _varint(_within(weight, 32) & MASK_64)
            out += _length_field(5, _length_field(1, _text(name)) + value)
        out += _number_field(6, int(self.is_strict)) + _filled_field(7, _text(self.status))
        return bytes(out + _length_field(8, _timestamp(self.started_at)) + _number_field(9, self.active))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInfo:
    """Describe a running task as asynq's WorkerInfo does. started_at, deadline: aware; deadline is None for none."""

    host: str
    pid: int
    server_id: str
    id: str
    type: str
    payload: bytes
    queue: str
    started_at: datetime
    deadline: datetime | None

    def encode(self) -> bytes:
        """Return the bytes, as Go writes them."""
        out = bytearray(_identity_fields(self.host, self.pid, self.server_id))
        values = (_text(self.id), _text(self.type), self.payload, _text(self.queue))
        for number, value in enumerate(values, 4):
            out += _filled_field(number, value)
        return bytes(out + _length_field(8, _timestamp(self.started_at)) + _length_field(9, _timestamp(self.deadline)))


def error_field(text: str) -> bytes:
    """Return the field `error_msg` alone; appended to a message, it replaces the one that the message has."""
    return _length_field(7, _text(text))


def _text(value: str) -> bytes:
    return value.encode("utf-8", "replace")


def _within(value: int, bits: int) -> int:
    if 0 <= value <= 0x7F:
        return value
    largest = (1 << bits - 1) - 1
    return max(-largest - 1, min(value, largest))


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return _SHORT[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length_field(number: int, value: bytes) -> bytes:
    size = len(value)
    return _SHORT[number << 3 | LENGTH] + (_SHORT[size] if size <= 0x7F else _varint(size)) + value


def _filled_field(number: int, value: bytes) -> bytes:
    return _length_field(number, value) if value else b""


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(_within(value, 32) & MASK_64) if value else b""


def _identity_fields(host: str, pid: int, server_id: str) -> bytes:
    """Return what the entries of a server and of its running tasks begin with."""
    return _filled_field(1, _text(host)) + _number_field(2, pid) + _filled_field(3, _text(server_id))


def _timestamp(moment: datetime | None) -> bytes:
    """Return the body of a google.protobuf.Timestamp; None is Go's zero time."""
    seconds, nanos = GO_ZERO_SECONDS, 0
    if moment is not None:
        since = moment - EPOCH
        seconds, nanos = since.days * 86_400 + since.seconds, since.microseconds * 1000
    out = b""
    for number, value in ((1, seconds), (2, nanos)):
        if value:
            out += _varint(number << 3 | VARINT) + _varint(value & MASK_64)
    return out


# --- Read asynq's messages: those of other programs, which may hold anything.
#
# Source: asynq's `asynq.proto`; protobuf.dev, "Encoding"; Go's `protowire`, for what a reader accepts and
# refuses.

FIXED64, GROUP, GROUP_END, FIXED32 = 1, 3, 4, 5
HIGHEST_NUMBER = (1 << 29) - 1
DEEPEST_GROUP = 100
# number → wire type, of what asynq calls ServerInfo and WorkerInfo.
SERVER_FIELDS = {1: LENGTH, 2: VARINT, 3: LENGTH, 4: VARINT, 5: LENGTH, 6: VARINT, 7: LENGTH, 8: LENGTH, 9: VARINT}
SCHEDULER_FIELDS = dict.fromkeys(range(1, 8), LENGTH)
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


def decode_scheduler_entry(data: bytes) -> SchedulerEntry:
    """Read what a scheduler writes about one of its schedules. Raises: UndecodableMessage."""
    values: dict[int, bytes] = {}
    options: list[str] = []
    for number, wire_type, value in _fields(data):
        if SCHEDULER_FIELDS.get(number) == wire_type:
            values[number] = value
            options += [_read_text(value, "enqueue_options")] if number == 5 else []
    return SchedulerEntry(
        id=_read_text(values.get(1, b""), "id"),
        spec=_read_text(values.get(2, b""), "spec"),
        type=_read_text(values.get(3, b""), "task_type"),
        payload=values.get(4, b""),
        options=tuple(options),
        next_at=_read_time(values.get(6, b"")),
        previous_at=_read_time(values.get(7, b"")),
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
