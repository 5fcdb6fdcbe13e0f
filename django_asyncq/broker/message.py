"""Encode asynq's messages: the protobuf of the hash field `msg`, and of schedules, byte for byte as Go writes them.

Written by hand: some twenty fields need no library. Must not know what a payload holds.
Source: `asynq-wire.md` section 3; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

VARINT, LENGTH = 0, 2
MASK_64 = (1 << 64) - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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
    the schedule never fired.
    """

    id: str
    spec: str
    type: str
    payload: bytes
    options: tuple[str, ...]
    next_at: datetime
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
