"""A Redis user without a right: every refusal names it, nothing is lost, and no log is flooded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from redis.exceptions import NoPermissionError, ResponseError

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, clients
from django_asyncq.broker.keys import keys_of
from django_asyncq.core.guard import get_logger
from django_asyncq.exceptions import BrokerPermissionDenied, BrokerUnavailable, GateUnavailable
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.leadership.coordinator import StartupTaskCoordinator
from django_asyncq.lifecycle import dispatching
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage.errors import Faults
from django_asyncq.testing import EmbeddedRedis

from .. import acl, tasks, topologies
from ..redis_state import pending
from ..workers import start_workers

pytestmark = pytest.mark.django_db(transaction=True)

# Valkey and newer Redis; Redis 7.0, which names no command of a script.
COMMAND = "'{}' command|can't run this command"
KEY = "permissions to access (?:a key|one of the keys)"
CHANNEL = "permissions to access (?:a channel|one of the channels)"
Limit = Callable[..., redis.Redis]


@pytest.fixture
def limit(own_redis: EmbeddedRedis, own_keys: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Give the user of the package the guide's rights without some, under the default prefixes."""
    monkeypatch.setenv("ASYNCQ_TEST_PREFIX", acl.PREFIX)
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": acl.PREFIX}
    admin = redis.Redis.from_url(own_redis.url, protocol=2)

    def give(*missing: str, user: str = "worker") -> redis.Redis:
        rules = acl.rules(user)
        assert set(missing) <= set(rules)
        admin.execute_command("ACL", "SETUSER", "limited", *(word for word in rules if word not in missing))
        settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": acl.url_as("limited", own_redis.url)}}
        Broker.forget_registered()
        return admin

    return give


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("+evalsha", "'evalsha' command"),
        ("+zmscore", COMMAND.format("zmscore")),
        ("~asynch:qgate:*", rf"{KEY}.*asynch:qgate:g,"),
    ],
)
@pytest.mark.parametrize("user", ["producer", "worker"])
def test_a_gated_enqueue_says_which_right_is_missing_and_writes_nothing(
    limit: Limit, user: str, missing: str, named: str
) -> None:
    """A command, one of a script, a key: the refusal is one of those that a caller of `enqueue` handles."""
    limit(missing, user=user)
    with pytest.raises(GateUnavailable, match=rf"(?:{named}).*docs/guides/redis\.md") as refused:
        tasks.gated.enqueue("g")
    assert isinstance(refused.value.__cause__, BrokerPermissionDenied)
    assert not TaskRecord.objects.exists()


@pytest.mark.parametrize("missing", ["+lpush", "&asynq:*", "+sadd", "~asynq:*"])
def test_a_push_that_is_refused_is_logged_once_and_made_later(
    limit: Limit, missing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage: the rows stay QUEUED, and the reconciler pushes them when the right is there.

    A script that was refused in its middle has left a hash in no list, which the sweep finds.
    """
    monkeypatch.setattr(dispatching, "BREAKER_SECONDS", 0.0)
    limit(missing, user="producer")
    ids = [tasks.add.enqueue(number).id for number in range(5)]
    lines = [record for record in caplog.records if "the reconciler will retry" in record.message]
    assert [record.levelno for record in lines] == [logging.ERROR]
    assert "Remedy: correct the rights of the user" in lines[0].message
    assert TaskRecord.objects.filter(state=TaskState.QUEUED).count() == 5
    limit()
    assert set(pending()) < set(ids)
    for _ in Reconciler(Broker()).sweep_steps(is_rebuild=True):
        pass
    assert sorted(pending()) == sorted(ids)


def test_a_failed_push_is_logged_again_after_a_minute_or_with_another_cause(caplog: pytest.LogCaptureFixture) -> None:
    """An outage of an hour is not forgotten, a new cause is told at once, and two in turns are no flood."""
    one, other = BrokerUnavailable("one"), GateUnavailable("g")
    calls = [(one, 100.0), (one, 159.0), (one, 161.0), (other, 162.0), (one, 163.0), (other, 164.0), (other, 223.0)]
    logged = []
    for error, now in calls:
        caplog.clear()
        dispatching.log_failed_push(error, [TaskRecord()], now)
        logged += [now] * len(caplog.records)
    assert logged == [100.0, 161.0, 162.0, 223.0]


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("+smembers", "'smembers' command"),
        ("+blpop", "'blpop' command"),
        ("+hgetall", COMMAND.format("hgetall")),
        ("&asynq:*", CHANNEL),
        ("~task_lock:*", KEY),
    ],
)
def test_runworkers_exits_when_its_user_lacks_a_basic_right(limit: Limit, missing: str, named: str) -> None:
    """With code 1 and one line that names it; no worker process starts."""
    limit(missing)
    done = start_workers("--burst")
    assert done.returncode == 1
    assert (len(re.findall(named, done.stderr)), done.stderr.count("Traceback")) == (1, 0)
    assert "docs/guides/redis.md" in done.stderr


def test_asyncq_says_that_a_right_is_missing(limit: Limit) -> None:
    """Not that Redis is unreachable."""
    limit("+ping")
    with pytest.raises(CommandError, match=r"^Redis at .* refuses a command to its user .*'ping' command"):
        call_command("asyncq", "rebuild")


def test_a_loop_logs_a_missing_right_once_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Also when an outage came first; after a success it may be logged again."""
    faults = Faults(get_logger("tests"), "no beat", over="a beat", failed="a beat failed")
    for error in (
        BrokerUnavailable("away"),
        BrokerPermissionDenied("Redis", "refuses", "no", "the rights"),
        BrokerPermissionDenied("Redis", "refuses", "no", "the rights"),
    ):
        faults.note(error)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    faults.clear()
    faults.note(BrokerPermissionDenied("Redis", "refuses", "no", "the rights"))
    assert len(caplog.records) == 3


def test_a_coordinator_without_rights_takes_no_lock_file_instead(
    limit: Limit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing right is no outage: on another host, another process may hold the lock in Redis."""
    limit("~task_lock:*")
    coordinator = StartupTaskCoordinator(lock_dir=tmp_path / "locks", single_instance=False)
    assert [coordinator.acquire("a", 30) for _ in range(3)] == [False] * 3
    assert len(re.findall(KEY, caplog.text)) == 1
    assert (coordinator.uses_files, coordinator.is_held("a")) == (None, False)
    limit()
    assert coordinator.acquire("a", 30)
    assert coordinator.uses_files is False


def test_a_task_that_a_refused_script_has_dropped_comes_back(limit: Limit) -> None:
    """A worker loses a right in the middle of a dequeue; the sweep finds the hash that is in no list."""
    limit()
    id = tasks.add.enqueue(1).id
    limit("+hmget")
    with pytest.raises(BrokerPermissionDenied, match="script dequeue"):
        Broker().dequeue("default", "w", 1, 30)
    limit()
    assert pending() == []
    for _ in Reconciler(Broker()).sweep_steps(is_rebuild=True):
        pass
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    assert str(run.record.id) == id


def test_a_cluster_needs_three_rights_more(settings: Any, own_keys: None) -> None:
    """Those that the guide names; redis-py reports a refusal as a node that belongs to no cluster."""
    (line,) = re.findall(r"^- \*\*Cluster\.\*\* Add `([^`]+)`", acl.GUIDE.read_text(), re.MULTILINE)
    settings.ASYNCQ = {
        "KEY_PREFIX": acl.PREFIX,
        "CLIENT_FACTORY": "django_asyncq.broker.cluster.client",
        "REDIS_IS_FOR_TESTS": True,
    }
    with topologies.cluster() as found:
        location = [acl.url_as("worker", node.url) for node in found.nodes]
        for missing in line.split():
            for node in found.nodes:
                rights = [word for word in line.split() if word != missing]
                node.ask("ACL", "SETUSER", "worker", *acl.rules("worker"), *rights)
            settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": location}}
            if missing != "+asking":  # needed only while a slot moves
                with pytest.raises(BrokerPermissionDenied, match="refuses a command to its user"):
                    Broker().ping()
        for node in found.nodes:
            node.ask("ACL", "SETUSER", "worker", *line.split())
            node.ask("ACL", "LOG", "RESET")
        settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": location}}
        id = tasks.gated.enqueue("g").id
        found.move(keys_of("default").pending, found.nodes[0])
        (lease,) = Broker().dequeue("default", "w", 1, 30).leases
        assert (lease.id, Broker().done("default", "w", [lease])) == (id, ["done"])
        refused = [
            entry for node in found.nodes for entry in node.ask("ACL", "LOG") if not set(acl.IGNORED) & set(entry)
        ]
        assert refused == []


@pytest.mark.parametrize(
    "error",
    [
        NoPermissionError("this user has no permissions to run the 'get' command or its subcommand"),
        NoPermissionError("No permissions to access a key"),
        ResponseError("ACL failure in script: No permissions to access a channel script: on @user_script:1."),
        ResponseError(
            "Error running script (call to f_1): @user_script:1: @user_script: 1: The user executing the script can't "
            "run this command or subcommand"
        ),
    ],
)
def test_every_version_of_redis_is_understood(error: ResponseError) -> None:
    """Valkey and Redis 7 have other words than Redis 6.2, and scripts other words than plain commands."""
    with (
        pytest.raises(
            BrokerPermissionDenied, match=r"^Redis refuses a command to its user \(.*\)\. Remedy: correct the rights"
        ),
        clients.broker_errors(),
    ):
        raise error
