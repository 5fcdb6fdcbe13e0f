"""Read asynq's messages, for tests that compare what the package writes with what Go reads.

Source: `asynq-wire.md` section 3; protobuf.dev, "Encoding"; Go's `protowire`, for what a reader accepts and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django_asyncq.broker.message import FIELDS, LENGTH, MASK_64, VARINT, TaskMessage
from django_asyncq.exceptions import AsyncqError

FIXED64, GROUP, GROUP_END, FIXED32 = 1, 3, 4, 5
HIGHEST_NUMBER = (1 << 29) - 1
DEEPEST_GROUP = 100


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
