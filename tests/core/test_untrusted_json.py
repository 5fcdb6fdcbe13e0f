"""JSON that others may have written is read, or is UNREADABLE; nothing is raised."""

from __future__ import annotations

from typing import Any

import pytest

from django_asyncq.core.payload import UNREADABLE, loads_untrusted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"{}", {}),
        ("null", None),
        (b'[[["deep"]]]', [[["deep"]]]),
        (b'["[[[[", "\\"[[[[", "]]]]{{{{"]', ["[[[[", '"[[[[', "]]]]{{{{"]),
        ('"é\\u00e9\\ud83d\\ude00"', "éé😀"),
        (b"[[], [], [], [], [], []]", [[], [], [], [], [], []]),
        ("1.5e3", 1500.0),
    ],
)
def test_json_within_the_bounds_is_parsed(text: str | bytes, value: Any) -> None:
    """Brackets within strings do not count as depth, nor do lists beside each other."""
    assert loads_untrusted(text, max_bytes=100, max_depth=3) == value


@pytest.mark.parametrize(
    "text",
    [
        b"",
        "",
        b"{",
        b"text",
        b"[1] 2",
        b"\xff\xfe",
        '"\ud800"',
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'[[[["deep"]]]]',
        b'{"a": [{"b": {}}]}',
        b'["' + b"\\" * 50_000,
        b'"' + b"x" * 1_000_000 + b'"',
        "é" * 300_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_anything_else_is_unreadable(text: str | bytes) -> None:
    """Whatever the bytes are, there is one answer, and no exception."""
    assert loads_untrusted(text, max_bytes=500_000, max_depth=3) is UNREADABLE


def test_size_is_counted_in_bytes() -> None:
    """A text of ten characters with fourteen bytes is larger than thirteen bytes."""
    text = '"éééé   x"'
    assert len(text) == 10
    assert loads_untrusted(text, max_bytes=14, max_depth=1) == "éééé   x"
    assert loads_untrusted(text, max_bytes=13, max_depth=1) is UNREADABLE


def test_unreadable_is_false_and_no_value_of_json() -> None:
    """Null is a value; UNREADABLE is not."""
    assert not UNREADABLE
    assert repr(UNREADABLE) == "UNREADABLE"
    assert loads_untrusted("null", max_bytes=10, max_depth=1) is not UNREADABLE
