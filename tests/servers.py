"""A pytest plugin: the servers of a test process, and a summary of the skipped tests. `runtests.py` loads it.

It is no part of conftest.py: the addresses must stand in the environment before Django's settings are imported, and
pytest-django imports them before any conftest.py.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from . import acl

BYTECODE = Path(__file__).parent.parent / ".pytest_cache" / "bytecode"


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start the servers, except in the process that only distributes tests to others."""
    if not distributes(early_config):
        stack = ExitStack()
        early_config.add_cleanup(stack.close)
        start(stack)
    yield


def distributes(config: pytest.Config) -> bool:
    """Return whether this process hands the tests to worker processes of pytest-xdist."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return not is_worker and bool(getattr(config.known_args_namespace, "numprocesses", None))


def start(stack: ExitStack) -> None:
    """Start what the environment does not name, and name it there for this process and those it starts."""
    from django_asyncq.testing import EmbeddedRedis

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncq-test-", ignore_cleanup_errors=True))
    if not os.environ.get("ASYNCQ_TEST_REDIS_URL"):
        os.environ["ASYNCQ_TEST_REDIS_URL"] = stack.enter_context(EmbeddedRedis(*acl.server_settings())).url
    if not os.environ.get("DATABASE_URL"):
        os.environ["DATABASE_URL"] = f"sqlite:///{folder}/tests.sqlite3"
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Tests start hundreds of processes, each of which would compile the package: a fifth of its start. The folder
        # stays for the next tests: the first process would compile Django too, for 20 seconds on a busy machine.
        os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print why tests were skipped: one line for each reason, with the number of tests."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.section("skipped tests")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
