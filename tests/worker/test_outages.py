"""The database is unreachable while tasks finish: none of them runs again, whether the worker waits or must stop."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.task_entries import SpilledOutcomes
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker import fetch
from django_asyncq.worker import process as process_module
from django_asyncq.worker import report as reporter_module
from django_asyncq.worker.job import Job, Outcome
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.wakeup import Wakeup

from .. import tasks
from ..gates.test_gate import holders
from ..proxy import Proxy
from ..redis_state import stored
from ..runs import worker_process
from ..workers import environment, history, run_workers, wait_until, workers
from .test_outcomes import taken_run

pytestmark = pytest.mark.django_db(transaction=True)

TASKS = 20


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


class Outage(NamedTuple):
    """A database that workers reach by `url` until `begin` is called, and again after `end`."""

    url: str
    begin: Callable[[], None]
    end: Callable[[], None]


@pytest.fixture
def outage() -> Iterator[Outage]:
    """PostgreSQL behind a proxy that breaks every connection; SQLite's file locked by another connection."""
    url = environment()["DATABASE_URL"]
    if connection.vendor == "sqlite":
        other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None, timeout=30)
        yield Outage(url, lambda: other.execute("BEGIN EXCLUSIVE") and None, other.rollback)
        other.close()
        return
    parts = urlsplit(url)
    with Proxy((parts.hostname or "127.0.0.1", parts.port or 5432)) as proxy:
        netloc = f"{parts.netloc.rpartition('@')[0]}@{proxy.host}:{proxy.port}"
        yield Outage(urlunsplit(parts._replace(netloc=netloc)), proxy.go_away, proxy.come_back)


def count_of(path: Path, event: str) -> int:
    """Return how many lines of the history have this event."""
    return sum(line["event"] == event for line in history(path))


def finish_without_database(outage: Outage, path: Path, seconds: float) -> list[Any]:
    """Have 20 tasks begin, make the database unreachable, and wait until all functions have returned."""
    results = [tasks.gated.using(queue_limit=TASKS).enqueue("g", seconds) for _ in range(TASKS)]
    wait_until(lambda: count_of(path, "begin") == TASKS, "20 tasks that have begun")
    outage.begin()
    wait_until(lambda: count_of(path, "end") == TASKS, "20 tasks that have returned")
    return results


def assert_all_ran_once(path: Path) -> None:
    """Assert that all tasks succeeded in their first and only run, and that the gate is empty."""
    rows = TaskRecord.objects.values_list("state", "attempt", "crash_count")
    assert list(rows) == [(TaskState.SUCCEEDED, 1, 0)] * TASKS
    assert count_of(path, "begin") == TASKS
    assert holders("g") == set()


def test_outcomes_wait_while_the_database_is_unreachable(outage: Outage, history_path: Path, tmp_path: Path) -> None:
    """20 tasks finish during an outage of 5 s: each runs once and is recorded."""
    with workers(tmp_path, "--concurrency", str(TASKS), DATABASE_URL=outage.url):
        finish_without_database(outage, history_path, 2.0)
        time.sleep(5)  # the outage itself
        outage.end()
        wait_until(lambda: TaskRecord.objects.succeeded().count() == TASKS, "20 recorded successes")
        wait_until(lambda: not holders("g"), "an empty gate")
    assert_all_ran_once(history_path)


def test_sigterm_while_the_database_is_unreachable_runs_nothing_again(
    outage: Outage, history_path: Path, tmp_path: Path
) -> None:
    """The outcomes are spilled to Redis; the next workers record them and release the gate slots."""
    with workers(tmp_path, "--concurrency", str(TASKS), DATABASE_URL=outage.url) as fleet:
        finish_without_database(outage, history_path, 2.0)
        assert fleet.stop() == 0
        assert f"outcomes spilled to Redis: {TASKS} of {TASKS}" in fleet.output()
    outage.end()
    assert TaskRecord.objects.succeeded().count() == 0
    run_workers()
    assert_all_ran_once(history_path)
    keys = QueueKeys("default")
    assert Broker().client.llen(keys.active) == Broker().client.zcard(keys.lease) == 0


# --- the parts


def ended(run: lifecycle.Run, value: object) -> Outcome:
    """The outcome of a run as a slot reports it."""
    return Outcome(Job(run, registered("tests.tasks.add"), time.monotonic()), timezone.now(), value)


def test_reporter_leaves_outcomes_it_never_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """Those still in line when the process must end are not forgotten; those being handed back are."""
    reporter = Reporter(Broker(), "w", Wakeup(), threading.Event())
    kept, dropped = ended(taken_run(), 1), ended(taken_run(), 2)
    reporter.report(kept)
    reporter.report(dropped)
    reporter.abandon([dropped.job])
    reporter.spill_outcomes()
    assert list(stored(kept.job.run.lease.id, dropped.job.run.lease.id)) == [kept.job.run.lease.id]
    assert "outcomes spilled to Redis: 1 of 1" in caplog.text


def test_end_of_an_outage_is_said_by_the_reporter(caplog: pytest.LogCaptureFixture) -> None:
    """With how long it took: whoever saw the warning need not ask whether it is over."""
    caplog.set_level(logging.INFO, "django_asyncq.worker")
    reporter = Reporter(Broker(), "w", Wakeup(), threading.Event())
    errors = [OperationalError("away"), OperationalError("away")]

    def write() -> str:
        if errors:
            raise errors.pop()
        return "written"

    assert reporter._write_until_done(write) == reporter._write_until_done(write) == "written"
    begun, over = caplog.messages
    assert begun == "outcomes wait for the database: away"
    assert re.fullmatch(r"outcomes are recorded again, after \d+\.\d s", over)


def test_end_of_an_outage_is_said_by_the_fetcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, by a fetch that succeeds; a single failure was not said, and neither is its end."""
    caplog.set_level(logging.INFO, "django_asyncq.worker")
    with worker_process() as process:
        fetch = process.fetcher
        for failures in (1, 2):
            errors: list[Exception] = [BrokerUnavailable("away")] * failures

            def dequeue(wanted: int, errors: list[Exception] = errors) -> tuple[int, bool]:
                if errors:
                    raise errors.pop()
                return 0, False

            monkeypatch.setattr(fetch, "_dequeue", dequeue)
            while fetch.faults.is_failing or errors:
                fetch.pacing.note_push()
                fetch._fetch()
    found = [message for message in caplog.messages if "fetch" in message]
    assert [re.sub(r"^worker \S+ |[:,].*", "", message) for message in found] == ["cannot fetch", "fetches again"]


def test_redis_away_too_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As before: the tasks run again."""

    def away(*arguments: Any) -> list[str]:
        raise BrokerUnavailable("away")

    reporter = Reporter(Broker(), "w", Wakeup(), threading.Event())
    reporter.report(ended(taken_run(), 1))
    monkeypatch.setattr(SpilledOutcomes, "write", away)
    reporter.spill_outcomes()
    assert ("django_asyncq.worker", logging.ERROR) in [record[:2] for record in caplog.record_tuples]
    assert "their tasks run again" in caplog.text


def test_nothing_is_fetched_while_outcomes_cannot_be_written() -> None:
    """Neither while the database is away nor with as many outcomes in memory as it may hold."""
    with worker_process() as process:
        assert process.fetcher.to_fetch() > 0
        process.reporter.is_database_unreachable = True
        assert process.fetcher.to_fetch() == 0
        process.reporter.is_database_unreachable = False
        process.reporter.unwritten = fetch.MOST_UNWRITTEN
        assert process.fetcher.to_fetch() == 0
    assert reporter_module.GIVE_UP_SECONDS + process_module.REPORT_SECONDS < 8
