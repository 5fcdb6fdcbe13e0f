"""Redis unreachable for longer than the leases: frozen, or killed and restarted with what it had written."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from django_asyncq.models import TaskRecord
from tests import tasks
from tests.workers import history, wait_until, workers

from . import log_lines
from .rig import Server, free_port

pytestmark = pytest.mark.django_db(transaction=True)
# The lease is 2 s; the tasks run longer than the outage, so each is still running when Redis is back.
OUTAGE_SECONDS = 5.0
TASK_SECONDS = 9.0


@pytest.fixture
def server(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of this test alone that persists every write."""
    found = Server(free_port(), tmp_path / "redis", "valkey", "AOF always")
    found.start()
    monkeypatch.setenv("ASYNCQ_TEST_REDIS_URL", found.url)
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": found.url}}
    yield found
    found.kill()


def stopped(server: Server) -> None:
    """Freeze the server: connections stay open, and nothing is answered."""
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)


def killed(server: Server) -> None:
    """Kill the server, and restart it with what it had written."""
    server.kill()
    time.sleep(OUTAGE_SECONDS)
    server.start()


@pytest.mark.parametrize("outage", [stopped, killed])
def test_outage_beyond_the_leases_repeats_nothing(
    outage: Callable[[Server], None], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of all three fleets go on and run once; each fleet logs the outage at most once."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    monkeypatch.setenv("SINGLE_INSTANCE_MODE", "false")
    results = [tasks.nap.enqueue(TASK_SECONDS) for _ in range(6)]
    with ExitStack() as stack:
        fleets = []
        for number in range(3):
            (folder := tmp_path / str(number)).mkdir()
            fleets.append(stack.enter_context(workers(folder, "--concurrency", "2", "--worker-id", f"w{number}")))
        wait_until(lambda: len(history(path)) == len(results), "running tasks")
        outage(server)
        wait_until(lambda: TaskRecord.objects.succeeded().count() == len(results), "the success of all")
        for fleet in fleets:
            assert fleet.output().count(log_lines.LEASES_NOT_RENEWED) <= 1
            assert fleet.output().count(log_lines.WAITS_FOR_A_STORE % "repairs") <= 1
            assert "Traceback" not in fleet.output()
    begun = Counter(line["id"] for line in history(path) if line["event"] == "begin")
    assert begun == {result.id: 1 for result in results}
