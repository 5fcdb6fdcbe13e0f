"""A test run refuses a Redis that is not the tests' own, where the developer sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.core import mail
from django.core.management import CommandError, call_command
from django.test import RequestFactory

from django_asyncq import AsyncqError
from django_asyncq.broker import clients
from django_asyncq.core import test_run
from django_asyncq.exceptions import RedisNotForTests
from django_asyncq.models import TaskRecord
from django_asyncq.observe import health
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..workers import ROOT, environment

REMEDIES = ("django_asyncq.testing.TestBackend", "asyncq_redis", "EmbeddedRedis", "ASYNCQ['REDIS_IS_FOR_TESTS'] = True")


@pytest.fixture
def foreign(settings: Any, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> str:
    """The suite's server, as if the tests had not started it; what it is called in messages."""
    monkeypatch.delenv(test_run.SERVERS_VARIABLE, raising=False)
    settings.ASYNCQ = {**django_settings.ASYNCQ, "REDIS_IS_FOR_TESTS": False}
    address = redis_client.connection_pool.connection_kwargs
    return f"Redis at {address['host']}:{address['port']}/{address.get('db') or 0}"


def keys(client: redis.Redis, prefix: str) -> list[bytes]:
    """Return what a test has left."""
    return list(client.scan_iter(f"*{prefix}*"))


@pytest.mark.django_db(transaction=True)
def test_push_is_refused_and_the_test_sees_it(foreign: str, redis_client: redis.Redis, key_prefix: str) -> None:
    """The error of the commit hook is raised, names the server and has the remedies; Redis is not touched."""
    with pytest.raises(RedisNotForTests) as raised:
        tasks.add.enqueue(1)
    assert isinstance(raised.value, AsyncqError)
    assert raised.value.server == foreign and foreign in str(raised.value)
    assert [remedy for remedy in REMEDIES if remedy not in str(raised.value)] == []
    assert keys(redis_client, key_prefix) == []


@pytest.mark.django_db
def test_the_test_backend_needs_no_redis_to_be_looked_at(foreign: str, settings: Any) -> None:
    """The health and the numbers are those of the database; no supervisor is known, and none is asked for."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
    tasks.add.using(gate="g", queue_limit=3).enqueue(1)
    health._kept.clear()
    try:
        answer = health.health_view(RequestFactory().get("/", {"max_silence": "60"}))
    finally:
        health._kept.clear()
    assert answer.status_code == 200
    out = StringIO()
    call_command("asyncq", "health", stdout=out)
    assert out.getvalue().strip() == "healthy: 1 task waiting"
    with pytest.raises(CommandError, match="unhealthy: 1 tasks are waiting, more than 0"):
        call_command("asyncq", "health", "--max-waiting", "0")
    out = StringIO()
    call_command("asyncq", "stats", "--json", stdout=out)
    found = json.loads(out.getvalue())
    assert [(each["queue"], each["queued"], each["pending"]) for each in found["queues"]] == [("default", 1, 0)]
    assert [(each["gate"], each["occupancy"], each["live"]) for each in found["gates"]] == [("g", 1, 1)]
    assert found["clock_difference_seconds"] is None
    out = StringIO()
    call_command("asyncq", "stats", stdout=out)
    assert "clocks" not in out.getvalue() and "default" in out.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_test_may_change_the_allowed_hosts(foreign: str, settings: Any) -> None:
    """It is still a test, although the host of the test client is not allowed."""
    settings.ALLOWED_HOSTS = ["example.com"]
    with pytest.raises(RedisNotForTests):
        tasks.add.enqueue(1)


@pytest.mark.django_db(transaction=True)
def test_batched_push_is_refused_too(foreign: str, settings: Any) -> None:
    """The second of a stream would be pushed by a thread, whose errors are only logged."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "PUSH_BATCH_SECONDS": 1}
    for number in range(3):
        with pytest.raises(RedisNotForTests):
            tasks.add.enqueue(number)


@pytest.mark.django_db
def test_nothing_is_refused_that_would_not_be_pushed(foreign: str) -> None:
    """In a `TestCase` the transaction is never committed."""
    tasks.add.enqueue(1)
    assert TaskRecord.objects.count() == 1


@pytest.mark.django_db
def test_gate_of_a_foreign_redis_is_not_asked(foreign: str) -> None:
    """It is asked before the commit, so a `TestCase` is refused too, and nothing is written."""
    with pytest.raises(RedisNotForTests):
        tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    assert TaskRecord.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_workers_are_refused(foreign: str) -> None:
    """`runworkers` ends before it starts a process."""
    with pytest.raises(RedisNotForTests):
        call_command("runworkers", burst=True)


def test_embedded_server_of_the_tests_is_used(foreign: str, settings: Any) -> None:
    """Until it stops, in this process and in those that it starts."""
    with EmbeddedRedis() as server:
        settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": server.url}}
        assert clients.client("producer").ping()
        code = "from django_asyncq.core.test_run import embedded_ports; print(embedded_ports())"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert done.stdout.strip() == str({server.port})
    settings.CACHES = {**django_settings.CACHES}
    with pytest.raises(RedisNotForTests):
        clients.client("producer")


@pytest.mark.parametrize("host", ["192.0.2.1", "redis.example"])
def test_same_port_on_another_host_is_foreign(host: str, foreign: str, settings: Any) -> None:
    """Only loopback addresses are those of embedded servers."""
    test_run.add_embedded_port(6399)
    url = f"redis://user:s3cret@{host}:6399/2"
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": url}}
    with pytest.raises(RedisNotForTests, match=rf"Redis at {host}:6399/2, which") as raised:
        clients.client("producer")
    assert "s3cret" not in str(raised.value)


def test_client_of_a_factory_is_refused_by_its_name(foreign: str, settings: Any) -> None:
    """Only a connection would show where it leads."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "CLIENT_FACTORY": "tests.testing.test_server_of_tests.keys"}
    with pytest.raises(RedisNotForTests, match="CLIENT_FACTORY"):
        clients.client("producer")


def test_process_without_tests_is_asked_nothing(foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no `mail.outbox`, or no host of the test client, is no test run."""
    monkeypatch.setattr(test_run, "_has_changed_hosts", False)
    assert test_run.is_test_run()
    with monkeypatch.context() as patch:
        patch.delattr(mail, "outbox")
        assert not test_run.is_test_run() and clients.client("producer").ping()
    django_settings.ALLOWED_HOSTS, hosts = ["example.com"], django_settings.ALLOWED_HOSTS
    try:
        assert not test_run.is_test_run()
    finally:
        django_settings.ALLOWED_HOSTS = hosts
    code = "import django; django.setup(); from django_asyncq.core.test_run import is_test_run; print(is_test_run())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
