"""A row and a push, and nothing else. `python -m bare_app` makes the table."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import kinds
import psycopg
import redis

TABLE = """
CREATE TABLE bare_task (
    id uuid PRIMARY KEY, name text NOT NULL, args jsonb NOT NULL, state smallint NOT NULL,
    enqueued_at timestamptz NOT NULL
);
CREATE INDEX bare_task_state ON bare_task (state);
"""
INSERT = "INSERT INTO bare_task VALUES (%s, %s, %s, 0, now())"
PUSH = """
for i = 1, #ARGV, 2 do
  redis.call('HSET', 'bare:t:' .. ARGV[i], 'msg', ARGV[i + 1], 'state', 'pending')
  redis.call('LPUSH', KEYS[1], ARGV[i])
end
"""
PENDING = "bare:pending"

_connection: psycopg.Connection[tuple[object, ...]]
_client: redis.Redis
_digest: str
# What the transaction under way will push; None outside of one.
_gathered: list[str] | None = None


def open() -> None:
    """Connect, and send the script once."""
    global _connection, _client, _digest
    # As Django's: each statement outside a transaction commits. psycopg prepares the INSERT by itself.
    _connection = psycopg.connect(os.environ["BENCH_POSTGRES_CONNINFO"], autocommit=True)
    _client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"], protocol=2)
    _digest = str(_client.script_load(PUSH))


def enqueue(kind: str, number: int) -> None:
    """One row; pushed at once, or at the end of the transaction."""
    id, arguments = UUID(int=time.time_ns() << 64 | random.getrandbits(64)), json.dumps(kinds.arguments(kind, number))
    with _connection.cursor() as cursor:
        cursor.execute(INSERT, [id, kind, arguments])
    if _gathered is None:
        _client.evalsha(_digest, 1, PENDING, str(id), arguments)
    else:
        _gathered.extend((str(id), arguments))


@contextmanager
def transaction() -> Iterator[None]:
    """Push all of a transaction's rows by one call after it."""
    global _gathered
    _gathered = []
    try:
        with _connection.transaction():
            yield
        _client.evalsha(_digest, 1, PENDING, *_gathered)
    finally:
        _gathered = None


if __name__ == "__main__":
    with psycopg.connect(os.environ["BENCH_POSTGRES_CONNINFO"], autocommit=True) as connection:
        connection.execute(TABLE)
