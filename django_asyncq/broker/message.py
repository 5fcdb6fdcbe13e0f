"""asynq's messages: the protobuf of the hash field `msg`, and of schedules, byte for byte as Go writes them.

Written by hand, for some twenty fields need no library. It must not know what a payload holds. Source:
`asynq-wire.md` section 3; protobuf.dev, "Encoding"; Go's `protowire`, for what a reader accepts and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from ..exceptions import AsyncqError

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = range(6)
MASK_64 = (1 << 64) - 1
HIGHEST_NUMBER = (1 << 29) - 1
DEEPEST_GROUP = 100
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# 0001-01-01 00:00 UTC, which Go takes for "no time".
GO_ZERO_SECONDS = -62_135_596_800


class Field(NamedTuple):
    """A field of the message: its name and how it is written. bits: of a number, else 0."""

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


# Every number of one byte; and what stands before each field: its number and wire type.
_SHORT = tuple(bytes([number]) for number in range(0x80))
_KEYS = {number: _SHORT[number << 3 | wire_type] for number, (_, wire_type, _) in FIELDS.items()}


class UndecodableMessage(AsyncqError):
    """The bytes are not a TaskMessage; the text says where they break."""


class TaskMessage(NamedTuple):
    """One message of asynq, in the order of `FIELDS`. Times: Unix seconds, durations: seconds; 0, "": absent.

    retry: most retries, the first run not counted. retried: counted failures so far. headers: str → str.
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
        """Return the bytes: fields in ascending number, zero and empty left out.

        Text that UTF-8 cannot carry is replaced, and a number too large for its field becomes the largest.
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
                    # Go writes both halves of an entry, even empty ones.
                    out += _length_field(number, _length_field(1, _text(key)) + _length_field(2, _text(item)))
        return bytes(out)

    @classmethod
    def decode(cls, data: bytes) -> TaskMessage:
        """Read a message; fields in any order, the last of a number wins.

        As in Go, an unknown field is dropped, and so is a known one of another wire type.
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
        return cls(**found, headers=headers)


class Envelope(NamedTuple):
    """What the messages of new tasks of one kind have in common, encoded: before payload and id, and behind them."""

    head: bytes
    tail: bytes

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, type: str, queue: str, retry: int, timeout: int) -> Envelope:
        """Return the envelope of a kind of task; the fields are those of TaskMessage."""
        return cls(TaskMessage(type=type).encode(), TaskMessage(queue=queue, retry=retry, timeout=timeout).encode())

    def around(self, payload: bytes, id: str) -> bytes:
        """Return what TaskMessage encodes of all of it, without going through its fields. payload, id: not empty."""
        return self.head + _length_field(2, payload) + _length_field(3, id.encode()) + self.tail


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEntry:
    """A schedule as asynq's tools list it. options: such as `Queue("mail")`; each must hold a "(".

    next_at, previous_at: aware; previous_at None when it never fired.
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


def clean_text(text: str) -> str:
    """Return the text with what UTF-8 cannot carry, a lone surrogate, replaced by "?".

    One message with invalid UTF-8 stops Go's recovery of every expired task of its server.
    """
    return _text(text).decode()


def _text(value: str) -> bytes:
    return value.encode("utf-8", "replace")


def _read_text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UndecodableMessage(f"field {name} is not UTF-8") from error


def _within(value: int, bits: int) -> int:
    if 0 <= value <= 0x7F:
        return value
    largest = (1 << bits - 1) - 1
    return max(-largest - 1, min(value, largest))


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


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


def _map_entry(data: bytes) -> tuple[str, str]:
    entry = {1: b"", 2: b""}
    for number, wire_type, value in _fields(data):
        if wire_type == LENGTH and number in entry:
            entry[number] = value
    return _read_text(entry[1], "headers"), _read_text(entry[2], "headers")


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) for each field; value: int for varints, bytes otherwise.

    Groups, which proto3 has no more but Go's reader still passes over, are passed over with all in them.
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
        raise UndecodableMessage(f"group {groups[-1]} does not end")


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
    end = position + size
    if end > len(data):
        raise UndecodableMessage(f"the field at byte {position} ends after the message")
    return bytes(data[position:end]), end


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of at most ten bytes and 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise UndecodableMessage("the message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MASK_64:
                break
            return value, position
    raise UndecodableMessage(f"the number before byte {position} is too long")
