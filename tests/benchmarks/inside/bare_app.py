"""A row and a push, and nothing else. `python -m bare_app` makes the table, with `run` it runs what comes."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import kinds
import probe
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
SELECT = "SELECT args FROM bare_task WHERE id = %s"
# Whoever takes a task must be found out if he dies.
LEASE = "return redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + 30, ARGV[1])"
PENDING, LEASES = "bare:pending", "bare:lease"

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


def run() -> None:
    """Take ids as they come, lease them, read their rows, note that they began; one after the other, for ever."""
    client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"], protocol=2, socket_timeout=None)
    lease = str(client.script_load(LEASE))
    with psycopg.connect(os.environ["BENCH_POSTGRES_CONNINFO"], autocommit=True) as connection:
        while True:
            _, id = client.blpop(PENDING, 0)
            client.evalsha(lease, 1, LEASES, id)
            with connection.cursor() as cursor:
                row = cursor.execute(SELECT, [id.decode()]).fetchone()
            probe.stamp(row[0]["n"])


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run()
    with psycopg.connect(os.environ["BENCH_POSTGRES_CONNINFO"], autocommit=True) as connection:
        connection.execute(TABLE)
