"""Odd data that any program with access to Redis may write: types, values, scores, and a way to write them."""

from __future__ import annotations

from typing import Any

# The types of keys; "stream" is one that nothing of ours uses.
TYPES = ("string", "list", "set", "zset", "hash", "stream")
VALUES = {
    "empty": b"",
    "text": b"x",
    "negative": b"-1",
    "zero": b"0",
    "fraction": b"1.5",
    "hexadecimal": b"0x10",
    "beyond 53 bits": b"9007199254740991",
    "beyond 64 bits": b"9223372036854775808",
    "huge": b"9" * 400,
    "infinite": b"inf",
    "no number": b"nan",
    "not UTF-8": b"\xff\xfe\x80",
    "NUL": b"\x00",
    "deep": b"[" * 100_000,
    "wrong protobuf": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
}
SCORES = {"negative": -1.0, "zero": 0.0, "huge": 1e300, "infinite": float("inf"), "minus infinite": float("-inf")}


def write(client: Any, key: str, kind: str, value: bytes = b"x", score: float = 1.0) -> None:
    """Put a key of a type in the place of whatever has this name."""
    # Together: a process of the fleet may make the key anew in between.
    with client.pipeline(transaction=True) as pipeline:
        pipeline.delete(key)
        _write(pipeline, key, kind, value, score)
        pipeline.execute()


def _write(client: Any, key: str, kind: str, value: bytes, score: float) -> None:
    if kind == "string":
        client.set(key, value)
    elif kind == "list":
        client.rpush(key, value)
    elif kind == "set":
        client.sadd(key, value)
    elif kind == "zset":
        client.zadd(key, {value: score})
    elif kind == "hash":
        client.hset(key, value, value)
    else:
        client.xadd(key, {b"field": value})
