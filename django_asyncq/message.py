"""asynq's TaskMessage: the protobuf of the hash field `msg`, byte for byte as Go writes it.

Written by hand, for fifteen fields need no library. Source: `asynq-wire.md` section 3; developers.google.com/protocol-buffers,
"Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .exceptions import AsyncqError

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MASK_64 = (1 << 64) - 1

# number → (name, kind), in the order in which Go writes them.
FIELDS = {
    1: ("type", "string"),
    2: ("payload", "bytes"),
    3: ("id", "string"),
    4: ("queue", "string"),
    5: ("retry", "int32"),
    6: ("retried", "int32"),
    7: ("error_msg", "string"),
    8: ("timeout", "int64"),
    9: ("deadline", "int64"),
    10: ("unique_key", "string"),
    11: ("last_failed_at", "int64"),
    12: ("retention", "int64"),
    13: ("completed_at", "int64"),
    14: ("group_key", "string"),
    15: ("headers", "map"),
}


class UndecodableMessage(AsyncqError):
    """The bytes are not a TaskMessage; the message says where they break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage:
    """One message of asynq. Times are Unix seconds, durations seconds; 0 and "" stand for absent.

    retry: most retries, the first run not counted. retried: counted failures so far.
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
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes: fields in ascending number, zero and empty left out, bad text replaced."""
        out = bytearray()
        for number, (name, kind) in FIELDS.items():
            value = getattr(self, name)
            if not value:
                continue
            if kind == "map":
                for key, item in value.items():
                    out += _length_field(number, _length_field(1, _text(key)) + _length_field(2, _text(item)))
            elif kind in ("string", "bytes"):
                out += _length_field(number, value if kind == "bytes" else _text(value))
            else:
                out += _varint(number << 3 | VARINT) + _varint(value & MASK_64)
        return bytes(out)

    @classmethod
    def decode(cls, data: bytes) -> TaskMessage:
        """Read a message; fields in any order, the last of a number wins, unknown ones are dropped.

        Raises: UndecodableMessage.
        """
        found: dict[str, Any] = {}
        headers: dict[str, str] = {}
        for number, wire_type, value in _fields(data):
            if number not in FIELDS:
                continue
            name, kind = FIELDS[number]
            if (wire_type == VARINT) != (kind in ("int32", "int64")) or wire_type in (FIXED32, FIXED64):
                raise UndecodableMessage(f"field {number} ({name}) has wire type {wire_type}")
            if kind == "map":
                key, item = _map_entry(value)
                headers[key] = item
            elif kind == "string":
                found[name] = _read_text(value, name)
            elif kind == "bytes":
                found[name] = value
            else:
                found[name] = _signed(value, 32 if kind == "int32" else 64)
        return cls(**found, headers=headers)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | LENGTH) + _varint(len(value)) + value


def _text(value: str) -> bytes:
    # One message with invalid UTF-8 stops Go's recovery of every expired task of its server.
    return value.encode("utf-8", "replace")


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
    """Yield (number, wire type, value) for each field; value: int for varints, bytes otherwise."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise UndecodableMessage(f"field number 0 at byte {position}")
        if wire_type == VARINT:
            value: Any
            value, position = _read_varint(data, position)
        elif wire_type in (FIXED64, FIXED32, LENGTH):
            size = 8 if wire_type == FIXED64 else 4
            if wire_type == LENGTH:
                size, position = _read_varint(data, position)
            if position + size > len(data):
                raise UndecodableMessage(f"field {number} ends after the message")
            value, position = bytes(data[position : position + size]), position + size
        else:
            raise UndecodableMessage(f"wire type {wire_type} at byte {position}")
        yield number, wire_type, value


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise UndecodableMessage("the message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise UndecodableMessage(f"number too long at byte {position}")
