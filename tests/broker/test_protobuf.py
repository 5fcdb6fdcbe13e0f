"""Our encoder and decoder against the protobuf library, which must accept, refuse and read the same.

The descriptor is built here, from asynq's `asynq.proto`, not from our code.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from django_asyncq.broker.message import TaskMessage, UndecodableMessage, decode_message

FieldProto = descriptor_pb2.FieldDescriptorProto
STRING, BYTES, INT32, INT64 = (
    FieldProto.TYPE_STRING,
    FieldProto.TYPE_BYTES,
    FieldProto.TYPE_INT32,
    FieldProto.TYPE_INT64,
)
COLUMNS = {
    "type": STRING,
    "payload": BYTES,
    "id": STRING,
    "queue": STRING,
    "retry": INT32,
    "retried": INT32,
    "error_msg": STRING,
    "timeout": INT64,
    "deadline": INT64,
    "unique_key": STRING,
    "last_failed_at": INT64,
    "retention": INT64,
    "completed_at": INT64,
    "group_key": STRING,
}
MESSAGES, MUTATIONS = 4_000, 40_000
# Of every kind that a varint, a length or a text can have.
TEXTS = ("", "a", "default", "email:deliver", "ä€𝄞", "\x00", "x" * 127, "y" * 128, "z" * 20_000)
NUMBERS = (0, 1, -1, 127, 128, 2**31 - 1, -(2**31))
LONG_NUMBERS = (*NUMBERS, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, -(2**63))


def build() -> Any:
    """Return the class of asynq's TaskMessage, made by the library."""
    file = descriptor_pb2.FileDescriptorProto(name="asynq.proto", package="asynq", syntax="proto3")
    message = file.message_type.add(name="TaskMessage")
    for number, (name, kind) in enumerate(COLUMNS.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=FieldProto.LABEL_OPTIONAL)
    entry = message.nested_type.add(name="HeadersEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=STRING, label=FieldProto.LABEL_OPTIONAL)
    message.field.add(
        name="headers",
        number=15,
        type=FieldProto.TYPE_MESSAGE,
        type_name=".asynq.TaskMessage.HeadersEntry",
        label=FieldProto.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("asynq.TaskMessage"))


Message = build()


def values_of(found: Any) -> dict[str, Any]:
    """Return the values of a message of either kind."""
    return {**{name: getattr(found, name) for name in COLUMNS}, "headers": dict(found.headers)}


def random_message(choice: random.Random) -> TaskMessage:
    """Return a message of which each field is set in half of the cases."""
    fields: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        if choice.random() < 0.5:
            fields[name] = {
                STRING: lambda: choice.choice(TEXTS),
                BYTES: lambda: choice.randbytes(choice.choice((0, 1, 127, 128, 300))),
                INT32: lambda: choice.choice(NUMBERS),
                INT64: lambda: choice.choice(LONG_NUMBERS),
            }[kind]()
    count = choice.choice((0, 0, 1, 3))
    headers = {f"{choice.choice(TEXTS[:6])}{number}": choice.choice(TEXTS) for number in range(count)}
    return TaskMessage(**fields, headers=headers)


def verdict(data: bytes) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return what the library and our decoder read; None for what one of them refuses."""
    found: list[dict[str, Any] | None] = []
    for read in (Message.FromString, decode_message):
        try:
            found.append(values_of(read(data)))
        except (DecodeError, UndecodableMessage):
            found.append(None)
    return found[0], found[1]


def test_random_messages_are_the_same_in_both_ways() -> None:
    """What we write, the library reads; what it writes, we read; and one header or none has the same bytes."""
    choice = random.Random(33)
    for _ in range(MESSAGES):
        ours = random_message(choice)
        data, values = ours.encode(), values_of(ours)
        theirs = Message(**values)
        assert values_of(Message.FromString(data)) == values
        assert values_of(decode_message(theirs.SerializeToString())) == values
        if len(ours.headers) < 2:
            assert theirs.SerializeToString() == data


def mutated(choice: random.Random, data: bytes) -> bytes:
    """Return the bytes with one to three changes: a bit, a byte, a cut, a part twice, a part of nothing sensible."""
    out = bytearray(data)
    for _ in range(choice.randint(1, 3)):
        at = choice.randrange(len(out) + 1)
        match choice.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << choice.randrange(8)
            case 1 if at < len(out):
                out[at] = choice.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = choice.randbytes(choice.randint(1, 12))
            case 4:
                out[at:at] = out[at : at + choice.randint(1, 40)]
            case _:
                # A field of any number and wire type: unknown ones, known ones of another type, groups.
                out += bytes([choice.randrange(1, 200)]) + choice.randbytes(choice.randint(0, 9))
    return bytes(out)


# Where the library (upb) is not like Go's, which decides: what makes the difference, the bytes, what Go and we read.
DIFFERENCES = {
    "a number of more than 64 bits: Go refuses it, upb drops the upper bits": (b"\x28" + b"\xff" * 9 + b"\x02", None),
    "an unknown field within a header: Go skips the field, upb the header": (
        b"\x7a\x09\x0a\x01k\x12\x01v\x1a\x01x",
        {"k": "v"},
    ),
}


def is_known_difference(data: bytes, theirs: dict[str, Any] | None, ours: dict[str, Any] | None) -> bool:
    """Return whether a difference is one of those above."""
    if theirs is None:
        return False
    if ours is None:
        with pytest.raises(UndecodableMessage, match="is too long"):
            decode_message(data)
        return True
    same = {name: ours[name] == theirs[name] for name in ours}
    return all(same[name] for name in COLUMNS) and theirs["headers"].items() <= ours["headers"].items()


@pytest.mark.parametrize("why", DIFFERENCES)
def test_where_the_library_is_not_like_go(why: str) -> None:
    """Source: protowire.ConsumeVarint, and impl.consumeMap of google.golang.org/protobuf."""
    data, headers = DIFFERENCES[why]
    theirs, ours = verdict(data)
    assert theirs is not None and theirs["headers"] == {}
    assert (None if ours is None else ours["headers"]) == headers
    assert is_known_difference(data, theirs, ours)


def test_mutated_bytes_are_read_or_refused_by_both() -> None:
    """Both read the same values, or both refuse, but for the differences above. Enough of both kinds are among them."""
    choice = random.Random(34)
    small = [message.encode() for message in (random_message(choice) for _ in range(400))]
    bases = [data for data in small if 0 < len(data) < 600]
    accepted, known = 0, 0
    for _ in range(MUTATIONS):
        data = mutated(choice, choice.choice(bases))
        theirs, ours = verdict(data)
        accepted += theirs is not None
        if theirs != ours:
            assert is_known_difference(data, theirs, ours), data.hex()
            known += 1
    assert known < MUTATIONS / 200
    assert MUTATIONS / 10 < accepted < MUTATIONS * 9 / 10
