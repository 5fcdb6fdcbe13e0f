"""TaskMessage as bytes and back. `test_fixtures.py` compares the bytes with those that Go writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from django_asyncq.broker.message import (
    DEEPEST_GROUP,
    FIELDS,
    MessageTemplate,
    TaskMessage,
    UndecodableMessage,
    decode_message,
)

# Any text that UTF-8 can encode; lone surrogates have a test of their own.
text = st.text(st.characters(codec="utf-8"))
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
messages = st.builds(
    TaskMessage,
    type=text,
    payload=st.binary(),
    id=text,
    queue=text,
    retry=int32,
    retried=int32,
    error_msg=text,
    timeout=int64,
    deadline=int64,
    unique_key=text,
    last_failed_at=int64,
    retention=int64,
    completed_at=int64,
    group_key=text,
    headers=st.dictionaries(text, text, max_size=4),
)


@given(messages)
def test_an_encoded_message_is_decoded_to_the_same_values(message: TaskMessage) -> None:
    """Every message survives encoding and decoding, and has only one form."""
    assert decode_message(message.encode()) == message
    assert decode_message(message.encode()).encode() == message.encode()


nonempty = st.text(st.characters(codec="utf-8"), min_size=1)


@given(nonempty, st.binary(min_size=1, max_size=300), nonempty, nonempty, int32, int64, int64)
@example("a.task", b"{}", "an id", "default", 0, 0, 86_400)
def test_a_template_encodes_the_same_bytes_as_the_message(
    type: str, payload: bytes, id: str, queue: str, retry: int, timeout: int, retention: int
) -> None:
    """Byte for byte, for any values."""
    whole = TaskMessage(
        type=type, payload=payload, id=id, queue=queue, retry=retry, timeout=timeout, retention=retention
    )
    assert MessageTemplate.of(type, queue, retry, timeout, retention).encode(payload, id) == whole.encode()


@given(st.binary(max_size=200))
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x0b" * 100_000)
def test_any_bytes_are_a_message_or_undecodable(data: bytes) -> None:
    """No input raises anything but UndecodableMessage."""
    try:
        decode_message(data)
    except UndecodableMessage:
        return


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_undecodable(message: TaskMessage, data: st.DataObject) -> None:
    """The same holds for a real message that was cut short, or in which one byte was changed."""
    encoded = bytearray(message.encode())
    if encoded:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = encoded[: data.draw(st.integers(0, len(encoded)))]
    for broken in (bytes(encoded), bytes(cut)):
        try:
            decode_message(broken)
        except UndecodableMessage:
            continue


def test_the_fields_of_a_message_are_in_the_order_in_which_go_writes_them() -> None:
    """`encode` walks the values and `FIELDS` side by side."""
    assert TaskMessage._fields == tuple(field.name for field in FIELDS.values())


def test_zero_and_empty_values_are_not_written() -> None:
    """As in Go; an empty message has no bytes."""
    assert TaskMessage().encode() == b""
    assert decode_message(b"") == TaskMessage()


def test_bytes_are_those_of_protobuf() -> None:
    """One message, spelled out field by field; a negative number takes ten bytes."""
    message = TaskMessage(type="a", payload=b"\x00", retry=-1, timeout=300, headers={"k": ""})
    assert message.encode() == (
        b"\x0a\x01a"
        + b"\x12\x01\x00"
        + b"\x28"
        + b"\xff" * 9
        + b"\x01"
        + b"\x40\xac\x02"
        + b"\x7a\x05\x0a\x01k\x12\x00"
    )


def test_explicit_zeros_and_any_order_are_read() -> None:
    """Other writers may order fields in any way; the last one of a number wins."""
    data = b"\x28\x00" + b"\x1a\x01x" + b"\x0a\x01a" + b"\x0a\x01b" + b"\x12\x00"
    assert decode_message(data) == TaskMessage(type="b", id="x")


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(b"\x80\x01\x05", id="number 16"),
        pytest.param(b"\x85\x01\x01\x02\x03\x04", id="four bytes"),
        pytest.param(b"\x81\x01\x01\x02\x03\x04\x05\x06\x07\x08", id="eight bytes"),
        pytest.param(b"\x82\x01\x02hi", id="text"),
        pytest.param(b"\x83\x01\x0a\x01z\x84\x01", id="group"),
        pytest.param(b"\x08\x05", id="known number, other wire type"),
    ],
)
def test_unknown_fields_are_dropped(unknown: bytes) -> None:
    """As in Go: fields of a newer writer do no harm, and are lost at the next rewrite."""
    assert decode_message(b"\x0a\x01a" + unknown + b"\x1a\x01x") == TaskMessage(type="a", id="x")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a", id="no length"),
        pytest.param(b"\x0a\x02a", id="cut short"),
        pytest.param(b"\x28\xff", id="number cut short"),
        pytest.param(b"\x28" + b"\xff" * 10 + b"\x01", id="number of eleven bytes"),
        pytest.param(b"\x28" + b"\xff" * 9 + b"\x02", id="number of 65 bits"),
        pytest.param(b"\x02\x00", id="field 0"),
        pytest.param(b"\x82\x80\x80\x80\x10\x00", id="field 2**29"),
        pytest.param(b"\x0e", id="wire type 6"),
        pytest.param(b"\x0a\x01\xff", id="text that is not UTF-8"),
        pytest.param(b"\x7a\x03\x0a\x01\xff", id="header that is not UTF-8"),
        pytest.param(b"\x7a\x02\x0a\x05", id="header cut short"),
        pytest.param(b"\x8b\x01", id="group that is not closed"),
        pytest.param(b"\x8c\x01", id="end of a group that is not open"),
        pytest.param(b"\x8b\x01\x94\x01", id="end of another group"),
        pytest.param(b"\x8b\x01" * (DEEPEST_GROUP + 1), id="groups too deep"),
    ],
)
def test_broken_bytes_are_refused(data: bytes) -> None:
    """Bytes that Go's reader refuses are refused here too."""
    with pytest.raises(UndecodableMessage):
        decode_message(data)


@given(st.text(st.characters()))
def test_text_is_cleaned_before_it_is_written(words: str) -> None:
    """Invalid UTF-8 would stop a Go server's recovery: lone surrogates become question marks, all else stays."""
    written = decode_message(TaskMessage(error_msg=words).encode()).error_msg
    assert written == words.encode("utf-8", "replace").decode()


def test_only_lone_surrogates_become_question_marks() -> None:
    """Other characters outside ASCII stay."""
    assert decode_message(TaskMessage(error_msg="a\ud800ü😀\udfff").encode()).error_msg == "a?ü😀?"


@pytest.mark.parametrize(
    ("field", "given_value", "written"),
    [
        ("retry", 2**40, 2**31 - 1),
        ("retry", -(2**40), -(2**31)),
        ("timeout", 2**70, 2**63 - 1),
        ("deadline", -(2**70), -(2**63)),
    ],
)
def test_a_number_too_large_becomes_the_largest(field: str, given_value: int, written: int) -> None:
    """Dropping the high bits would turn a long timeout into a short one."""
    options: dict[str, Any] = {field: given_value}
    assert getattr(decode_message(TaskMessage(**options).encode()), field) == written
