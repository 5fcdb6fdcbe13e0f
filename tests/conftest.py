"""Fixtures for every test: a key space of its own, clients, and servers that may be killed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings

from django_asyncq.testing import EmbeddedRedis

from .proxy import Proxy


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A plain client of the suite's server."""
    client = redis.Redis.from_url(os.environ["ASYNCQ_TEST_REDIS_URL"], protocol=2)
    yield client
    client.close()


@pytest.fixture
def key_prefix() -> str:
    """The first part of this test's keys."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def own_keys(
    settings: Any, key_prefix: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Give the test keys of its own, in this process and in those it starts; remove them afterwards.

    A lock's key has no prefix: tests put theirs into its name. Of the others that appeared meanwhile
    (the upkeep of workers), those of this process and of dead ones are removed.
    """
    from django_asyncq.lifecycle import entering

    monkeypatch.setenv("ASYNCQ_TEST_PREFIX", key_prefix)
    monkeypatch.setattr(entering, "_breaker_closes_at", 0.0)
    settings.ASYNCQ = {
        **django_settings.ASYNCQ,
        "KEY_PREFIX": key_prefix,
        "GATE_PREFIX": f"{key_prefix}:qgate:",
    }
    locks_before = set(redis_client.scan_iter("task_lock:*"))
    yield
    for pattern in (f"{key_prefix}*", f"{{{key_prefix}*", f"task_lock:{key_prefix}*"):
        for key in redis_client.scan_iter(pattern):
            redis_client.delete(key)
    for key in set(redis_client.scan_iter("task_lock:*")) - locks_before:
        delete_lock_left_over(redis_client, key)


def delete_lock_left_over(client: redis.Redis, key: bytes) -> None:
    """Delete a lock that this process holds, or one that is dead; another test run's stays."""
    import socket

    from django_asyncq.coordinator import Owner

    witness = Owner.of_this_process(socket.gethostname())
    owner = Owner.read((client.get(key) or b"").decode())
    if owner is not None and (owner.pid == os.getpid() or owner.is_provably_dead(witness)):
        client.delete(key)


@pytest.fixture
def own_redis(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """A server for this test alone, which it may kill or empty."""
    with EmbeddedRedis() as server:
        monkeypatch.setenv("ASYNCQ_TEST_REDIS_URL", server.url)
        settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": server.url}}
        yield server


@pytest.fixture
def redis_proxy(redis_client: redis.Redis) -> Iterator[Proxy]:
    """A relay before the suite's server that can lose replies or hold everything back."""
    address = redis_client.connection_pool.connection_kwargs
    with Proxy((address["host"], address["port"])) as proxy:
        yield proxy
