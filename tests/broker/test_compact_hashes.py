"""The limit of the server below which the hash of a task is compact, and the one line about it."""

from __future__ import annotations

import logging
from io import StringIO
from typing import Any

import pytest
import redis

from django_asyncq.broker import Broker
from django_asyncq.broker.startup_checks import ADVISED_BYTES, NAMES, Limit, too_low_limit
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.management.commands.runworkers import Command
from django_asyncq.testing import EmbeddedRedis

from .. import acl, tasks


@pytest.fixture
def admin(own_redis: EmbeddedRedis, own_keys: None) -> Any:
    """A client with all rights of a server of this test's own."""
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        yield client


def allow_config(admin: redis.Redis) -> None:
    """Let the user under which the suite runs ask for the limit."""
    if acl.user():
        admin.execute_command("ACL", "SETUSER", acl.user(), "+config|get")


def lines_of_start(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the check of Redis logs when `runworkers` starts; it prints nothing."""
    caplog.set_level(logging.INFO, logger="django_asyncq")
    stderr = StringIO()
    command = Command(stderr=stderr)
    command._verbosity = 1
    command._check_redis("default")
    assert stderr.getvalue() == ""
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_the_default_is_too_low_and_the_line_says_what_to_run(
    admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, at INFO; none after its command was run."""
    allow_config(admin)
    (line,) = lines_of_start(caplog)
    command = f"CONFIG SET {NAMES[0]} {ADVISED_BYTES}"
    assert line.startswith("INFO ") and f"redis-cli {command} (it is 64)" in line
    admin.execute_command(*command.split())
    caplog.clear()
    assert lines_of_start(caplog) == []


@pytest.mark.parametrize(("value", "found"), [(64, Limit(NAMES[0], 64)), (511, Limit(NAMES[0], 511)), (512, None)])
def test_the_limit_is_returned_when_it_is_below_the_advised_one(
    admin: redis.Redis, value: int, found: Limit | None
) -> None:
    """The present name of the setting, not the old one that means the same."""
    allow_config(admin)
    admin.config_set(NAMES[0], value)
    assert too_low_limit() == found


@pytest.mark.django_db(transaction=True)
def test_a_plain_task_is_compact_with_the_advised_limit(admin: redis.Redis) -> None:
    """And not with the server's default, so the advice has an effect."""
    found = []
    for value in (64, ADVISED_BYTES):
        admin.config_set(NAMES[0], value)
        id = tasks.add.enqueue(1, 2).id
        found.append(admin.object("encoding", Broker("worker").keys("default").task(id)))
    assert found == [b"hashtable", b"listpack"]


def test_a_user_that_may_not_ask_is_told_nothing(
    admin: redis.Redis, own_redis: EmbeddedRedis, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The guide's user may not, since the right shows passwords; its `runworkers` starts as with all rights."""
    admin.execute_command("ACL", "SETUSER", "worker", *acl.rules("worker"))
    location = acl.url_as("worker", own_redis.url)
    settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": location}}
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": "asynq"}
    assert lines_of_start(caplog) == []
    assert "config|get" in {entry["object"] for entry in admin.acl_log()}


def test_a_server_without_the_command_is_told_nothing(settings: Any, own_keys: None) -> None:
    """As managed servers are: CONFIG is no command of theirs."""
    with EmbeddedRedis("--rename-command", "CONFIG", "") as server:
        settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": server.url}}
        assert too_low_limit() is None


def test_an_unreachable_server_is_unavailable(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """So `runworkers` says that it waits, as for any other call of the start."""
    own_redis.stop()
    with pytest.raises(BrokerUnavailable):
        too_low_limit()
