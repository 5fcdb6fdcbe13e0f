"""Fixtures of all tests: keys of their own, clients, and servers that a test may kill."""

from __future__ import annotations

import inspect
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings

from django_asyncq.testing import EmbeddedRedis

from . import acl, workers
from .browsing import browser, person  # noqa: F401 - fixtures
from .proxy import Proxy

# Some minutes of kills, refusals and random sequences: `python runtests.py -m faults`.
FAULTS = {
    "test_after_machine.py",
    "test_after_races.py",
    "test_batch_faults.py",
    "test_blame.py",
    "test_bulk_kills.py",
    "test_crash.py",
    "test_inbox_faults.py",
    "test_isolated.py",
    "test_machine.py",
    "test_mixed_fleet.py",
    "test_outage.py",
    "test_refusals.py",
    "test_short.py",
    "test_standstill.py",
    "test_terminal.py",
    "test_topologies.py",
    "test_unique_machine.py",
    "test_waking_faults.py",
}

# What the docs say, typed and run, and what is built of the project: `python runtests.py -m docs`.
DOCS = {
    "test_coming_from.py",
    "test_dashboard.py",
    "test_deployment_files.py",
    "test_docs_run.py",
    "test_first_hour.py",
    "test_packaging.py",
    "test_site.py",
    "test_testing_guide.py",
}
# Slow besides those that start worker processes or a browser, which `starts` finds: `python runtests.py -m slow`.
SLOW = {
    "test_carried_values.py",
    "test_drill.py",
    "test_equality.py",
    "test_example.py",
    "test_exactly_once.py",
    "test_mixed_versions.py",
    "test_pytest_plugin.py",
    "test_typing.py",
}
STARTERS = {workers.run_workers, workers.start_workers, workers.workers}
# A fleet in the default run all the same.
NOT_SLOW = {
    "test_runs_sync_and_async_tasks_and_stores_results",
    "test_gives_up_after_the_last_attempt_and_at_once_on_give_up_on",
    "test_sigterm_drains_tasks_that_finish_in_time",
    "test_frameworks_signals_are_sent_in_the_worker",
}


def pytest_configure() -> None:
    """Refuse a name above that no file has: after a rename its tests would run with the default ones."""
    names = {path.name for path in Path(__file__).parent.rglob("test_*.py")}
    if missing := (FAULTS | DOCS | SLOW) - names:
        raise pytest.UsageError(f"tests/conftest.py: no file is called {', '.join(sorted(missing))}")


def uses(function: Any) -> list[Any]:
    """Return the functions that a function of the tests uses by a global name."""
    codes, names = [inspect.unwrap(function).__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    known = inspect.unwrap(function).__globals__
    return [known[name] for name in names if inspect.isfunction(known.get(name))]


def starts(functions: list[Any]) -> bool:
    """Whether functions of the tests start worker processes, themselves or by other functions."""
    waiting, seen = list(functions), set[Any]()
    while waiting:
        function = waiting.pop()
        if function in STARTERS:
            return True
        if inspect.isfunction(function) and function not in seen and function.__module__.startswith("tests."):
            seen.add(function)
            waiting += uses(function)
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the files above, except those that are marked `long`.

    Under a router the tests use all databases.
    """
    # First what counts calls, because the patches of Sentry's SDK stay; then the longest, which run beside others then.
    first = {"test_budget.py": 0, "test_machine.py": 1}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))
    for item in items:
        assert isinstance(item, pytest.Function)
        functions = [item.function, *(each[-1].func for each in item._fixtureinfo.name2fixturedefs.values())]
        functions = [getattr(each, "__func__", each) for each in functions]
        if "browser" in item.fixturenames or (item.originalname not in NOT_SLOW and starts(functions)):
            item.add_marker("slow")
        for marker, files in (("faults", FAULTS), ("docs", DOCS), ("slow", SLOW)):
            if item.path.name in files and item.get_closest_marker("long") is None:
                item.add_marker(marker)
        if django_settings.DATABASE_ROUTERS and (mark := item.get_closest_marker("django_db")):
            item.add_marker(pytest.mark.django_db(*mark.args, **{**mark.kwargs, "databases": "__all__"}), append=False)


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A plain client of the suite's server."""
    client = redis.Redis.from_url(os.environ["ASYNCQ_TEST_REDIS_URL"], protocol=2)
    yield client
    client.close()


@pytest.fixture
def key_prefix() -> str:
    """The first part of this test's keys."""
    name = f"t{uuid.uuid4().hex[:12]}"
    return f"{acl.PREFIX}:{name}" if acl.user() else name


@pytest.fixture(scope="session")
def cleaning_client() -> Iterator[redis.Redis]:
    """The client with which each test's keys are deleted; a connection for each test took a third of its overhead."""
    client = redis.Redis.from_url(os.environ["ASYNCQ_TEST_REDIS_URL"], protocol=2)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the read of a column that a statement has left out: one statement more for each row, by Django's alias."""
    from django_asyncq.models import TaskRecord

    refresh = TaskRecord.refresh_from_db

    def refuse(self: TaskRecord, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1)
        if caller.f_code.co_name in ("__get__", "fetch_one"):
            raise AssertionError(f"{kwargs['fields']} of a task is read, which .only(…) has left out")
        refresh(self, *args, **kwargs)

    monkeypatch.setattr(TaskRecord, "refresh_from_db", refuse)


@pytest.fixture(autouse=True)
def measured_clock(request: pytest.FixtureRequest, django_db_blocker: Any) -> None:
    """Let no test count a statement that only asks for the time: one is sent a minute, in whichever test it is due."""
    from django_asyncq.core.time import steady_seconds
    from django_asyncq.storage import database_clock

    if request.node.get_closest_marker("django_db"):
        request.getfixturevalue("django_db_setup")
        if not database_clock._clocks:
            with django_db_blocker.unblock():
                database_clock.measure()
    for clock in database_clock._clocks.values():
        if clock.measurement:
            clock.measurement = clock.measurement._replace(at=steady_seconds())


@pytest.fixture(autouse=True)
def own_keys(
    settings: Any,
    key_prefix: str,
    cleaning_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Give the test keys of its own, in this process and in the processes it starts; delete them afterwards."""
    from django_asyncq.lifecycle import dispatching
    from django_asyncq.storage import identity

    monkeypatch.setenv("ASYNCQ_TEST_PREFIX", key_prefix)
    lock_folder = os.environ.get("ASYNCQ_TEST_LOCK_DIR") or str(tmp_path_factory.getbasetemp() / "locks")
    monkeypatch.setenv("ASYNCQ_TEST_LOCK_DIR", lock_folder)
    monkeypatch.setattr(dispatching, "_breaker_closes_at", 0.0)
    monkeypatch.setattr(dispatching, "_logged", {})
    monkeypatch.setattr(dispatching, "_ask_from", {})
    monkeypatch.setattr(dispatching, "settled_until", {})
    monkeypatch.setattr(dispatching, "_refused", {})
    # Each test is a process that has read nothing yet.
    monkeypatch.setattr(identity, "_remembered", {})
    settings.ASYNCQ = {
        **django_settings.ASYNCQ,
        "KEY_PREFIX": key_prefix,
        "TASK_LOCK_DIR": lock_folder,
        # A test looks into Redis right after enqueuing. The processes that it starts batch pushes as any project does.
        "PUSH_BATCH_SECONDS": 0,
    }
    yield
    for pattern in (f"{key_prefix}*", f"{{{key_prefix}*"):
        # All at once: some tests leave ten thousand keys.
        if keys := list(cleaning_client.scan_iter(pattern, count=1000)):
            cleaning_client.delete(*keys)


@pytest.fixture
def long_leases(own_keys: None, settings: Any) -> None:
    """Leases that last longer than any pause of a busy machine, for tests without worker processes.

    The short ones of the settings run out within a test that only means to claim.
    """
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 60}


@pytest.fixture
def own_redis(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """A server for this test alone, which it may kill or flush."""
    with EmbeddedRedis(*acl.server_settings()) as server:
        monkeypatch.setenv("ASYNCQ_TEST_REDIS_URL", server.url)
        settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": acl.package_url(server.url)}}
        yield server


@pytest.fixture
def redis_proxy(redis_client: redis.Redis) -> Iterator[Proxy]:
    """A relay in front of the suite's server that can drop replies or hold all data back."""
    address = redis_client.connection_pool.connection_kwargs
    with Proxy((address["host"], address["port"])) as proxy:
        yield proxy
