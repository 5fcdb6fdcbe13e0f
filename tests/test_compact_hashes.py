"""Whether Redis holds waiting tasks in their compact form, and the line of advice about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_asyncq.broker import Broker
from django_asyncq.broker.compact_hashes import ADVISED_BYTES, Limit, too_low_limit
from django_asyncq.broker.keys import keys_of
from django_asyncq.testing import EmbeddedRedis

from . import acl, tasks
from .workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)
NAME = "hash-max-listpack-value"


def encoding(id: str) -> bytes:
    """How Redis holds the hash of a task."""
    found: bytes = acl.unrestricted(Broker().client).object("ENCODING", keys_of("default").task(id))
    return found


def test_the_advised_limit_makes_the_hash_of_a_task_compact(own_redis: EmbeddedRedis) -> None:
    """The standard one does not; what is in Redis already stays as it is."""
    admin = acl.unrestricted(Broker().client)
    before = tasks.add.enqueue(1, 2)
    assert encoding(before.id) == b"hashtable"
    admin.config_set(NAME, ADVISED_BYTES)
    after = tasks.add.enqueue(1, 2)
    assert (encoding(before.id), encoding(after.id)) == (b"hashtable", b"listpack")


@pytest.mark.skipif(bool(acl.user()), reason="the guide's users may not ask for it")
def test_a_limit_that_is_too_low_is_found(own_redis: EmbeddedRedis) -> None:
    """And one that is enough is not."""
    assert too_low_limit() == Limit(NAME, 64)
    Broker().client.config_set(NAME, ADVISED_BYTES)
    assert too_low_limit() is None


def test_a_server_that_does_not_say_it_is_not_asked_again(own_redis: EmbeddedRedis, settings: Any) -> None:
    """Managed servers refuse CONFIG, and so do rights; nothing is logged about that."""
    admin = acl.unrestricted(Broker().client)
    admin.execute_command("ACL", "SETUSER", "fleet", "on", f">{acl.PASSWORD}", "~*", "&*", "+@all", "-config")
    settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": acl.url_as("fleet", own_redis.url)}}
    assert too_low_limit() is None


@pytest.mark.skipif(bool(acl.user()), reason="the guide's users may not ask for it")
def test_runworkers_says_it_once_when_it_starts(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    """With the command that helps, as information: nothing is wrong."""
    line = f"INFO     supervisor: Redis would hold waiting tasks in less memory after: redis-cli CONFIG SET {NAME} 512"
    with workers(tmp_path) as fleet:
        wait_until(lambda: "started:" in fleet.output(), "a worker")
        assert fleet.output().count(line.partition(": ")[2]) == 1
    Broker().client.config_set(NAME, ADVISED_BYTES)
    with workers(tmp_path) as again:
        wait_until(lambda: again.output().count("started:") == 2, "a worker")
        assert again.output().count("in less memory") == 1
