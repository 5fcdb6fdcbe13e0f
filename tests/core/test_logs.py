"""What is logged about tasks: the keys of each line, one ERROR for a final failure, plurals, and the current task."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connections
from django.utils import timezone

from django_asyncq import __version__, conf, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.entries import due_of
from django_asyncq.context import current_task
from django_asyncq.core.logs import (
    FRAMEWORK_LOGGERS,
    CurrentTask,
    FrameworkFilter,
    TaskLogFilter,
    about,
    enter_run,
    leave_run,
    log_extra,
)
from django_asyncq.core.masking import log_to_stderr, stderr_verbosity
from django_asyncq.exceptions import TaskNotRegistered
from django_asyncq.lifecycle.base import log_failed
from django_asyncq.management.commands.runworkers import Command
from django_asyncq.models import TaskRecord, TaskState

from .. import tasks
from ..runs import claimed
from ..workers import ROOT, environment, run_workers, wait_until, workers

# --- the keys


def test_the_keys_are_none_of_logging() -> None:
    """Logging refuses an `extra` with the name of an attribute of its own."""
    own = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime", "taskName"}
    assert not own & {*CurrentTask._fields, "task_ids"}


def test_the_extra_of_one_task_and_of_several() -> None:
    """Five keys for one; the ids for several, and of thousands only the first."""
    rows = [TaskRecord(name="app.work", queue_name="mail", attempt=2) for _ in range(150)]
    id = str(rows[0].id)
    assert log_extra(rows[0]) == {"task_id": id, "task": "app.work", "queue": "mail", "attempt": 2, "trace_id": id}
    assert log_extra(*rows[:2]) == {"task_ids": [str(row.id) for row in rows[:2]]}
    assert len(log_extra(*rows)["task_ids"]) == 100  # type: ignore[arg-type]


# --- the current task


@pytest.fixture
def running() -> Iterator[TaskRecord]:
    """The row of a task whose body this test is."""
    row = TaskRecord(name="app.work", queue_name="mail", attempt=1)
    enter_run(row)
    yield row
    leave_run()


def filtered(**extra: Any) -> dict[str, Any]:
    """Return the keys of a line that has passed the filter."""
    line = logging.makeLogRecord(extra)
    assert TaskLogFilter(default="-").filter(line)
    return {key: line.__dict__[key] for key in CurrentTask._fields}


def test_the_filter_adds_the_keys_of_the_run(running: TaskRecord) -> None:
    """To every line that has none; after the run they are there, without a value."""
    assert filtered() == log_extra(running)
    assert filtered(queue="own") == {**log_extra(running), "queue": "own"}
    leave_run()
    assert filtered() == dict.fromkeys(CurrentTask._fields, "-")
    assert current_task() is None


def test_the_filter_mixes_no_two_tasks(running: TaskRecord) -> None:
    """A line about another task keeps what it has, and gets nothing of this one."""
    assert filtered(task_id="other") == {"task_id": "other", "task": "-", "queue": "-", "attempt": "-", "trace_id": "-"}


@pytest.mark.django_db(transaction=True)
def test_a_body_knows_its_task_wherever_it_runs() -> None:
    """A `def`, an `async def`, and threads of `sync_to_async` and `asyncio.to_thread`."""
    results = [tasks.names_itself.enqueue(), tasks.names_itself_async.enqueue(), tasks.names_itself.enqueue()]
    run_workers("--concurrency", "1")
    rows = {str(row.id): row for row in TaskRecord.objects.all()}
    for result in results:
        row = rows[result.id]
        expected = [str(row.id), row.name, "default", 1, str(row.id)]
        assert row.return_value, row.errors
        assert all(found == expected for found in row.return_value), row.return_value


# --- failures


@pytest.mark.django_db(transaction=True)
def test_a_task_that_cannot_run_fails_with_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Its code is not registered: an ERROR, and no attempt in its text."""
    run = claimed()
    run.record.attempt = 0
    lifecycle.refuse(Broker(), run, TaskNotRegistered("no such task"))
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert line.name == "django_asyncq.runs"
    assert line.getMessage().startswith(f"task {run.record.id} {run.record.name}: failed; it is not retried: ")
    assert line.task_id == str(run.record.id)  # type: ignore[attr-defined]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("crashes", [0, 2])
def test_a_lost_worker_is_an_error_of_the_task_when_it_has_failed(
    crashes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With crashes left it runs again and no line says that it failed."""
    run = claimed()
    TaskRecord.objects.update(crash_count=crashes)
    blame = lifecycle.Blame(named=frozenset([run.lease.id]))
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="it died", blame=blame)
    row = TaskRecord.objects.get()
    assert row.state == (TaskState.FAILED if crashes else TaskState.QUEUED)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert lines == [
        f"task {row.id} {row.name}: failed; it is not retried: django_asyncq.exceptions.WorkerLost: "
        f"{row.errors[-1]['message']}"
    ] * bool(crashes)


@pytest.mark.django_db(transaction=True)
def test_an_abandoned_run_that_has_failed_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """The reconciler closes it, and its worker was in quarantine."""
    run = claimed("w:1:2:t")
    TaskRecord.objects.update(crash_count=2, suspicion=2, worker_ids=["w:1:2:t-alone"])
    assert lifecycle.abandon(TaskRecord.objects.get(), "nobody knows it")
    assert TaskRecord.objects.get().is_final
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert line.task_id == str(run.record.id)  # type: ignore[attr-defined]


def test_a_failure_is_one_line_whatever_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """Line ends in the message of an exception begin no line of their own, and a huge text is cut."""
    run = lifecycle.Run(TaskRecord(name="app.work", attempt=1, max_attempts=1), None)  # type: ignore[arg-type]
    lifecycle.fail(run, ValueError("a\n2026 ERROR b" + "x" * 2000), "", timezone.now(), retry_at=None)
    log_failed(run.record)
    (message,) = caplog.messages
    assert message.startswith(
        f"task {run.record.id} app.work: attempt 1 of 1 failed; it is not retried: ValueError: a "
    )
    assert "\n" not in message
    assert len(message) < 700


# --- what `runworkers` says


def lines_at(log: str, level: str) -> list[str]:
    """Return the lines at a level, in the format of the handler that `runworkers` installs."""
    return re.findall(rf"^\S+ \S+ {level} +\S.*$", log, re.MULTILINE)


@pytest.mark.django_db(transaction=True)
def test_the_banner_says_what_runs_and_where(tmp_path: Path) -> None:
    """Version, alias, queues, Redis and database without a password, processes, slots, tasks, leader, ready."""
    with workers(tmp_path, "--concurrency", "3", "--processes", "2", "--queues", "default=2,mail=1") as fleet:
        wait_until(lambda: "Ready. Press Ctrl-C to stop" in fleet.output(), "ready line")
        out = wait_until(lambda: "Leader: " in fleet.output() and fleet.output(), "leader line")
    assert f"django_asyncq {__version__} runs the tasks of TASKS['default']" in out
    assert "queues   default=2, mail=1\n" in out
    assert re.search(rf"redis    \S*:\d+/\d+, keys begin with {re.escape(conf.current().key_prefix)}:", out)
    assert f"database {connections['default'].vendor} 'default': " in out
    assert "workers  2 processes, each with 3 slots\n" in out
    assert re.search(r"tasks    \d+ tasks registered\n", out)
    assert "Leader: this process." in out
    assert "tests.tasks.add" not in out
    password = connections["default"].settings_dict["PASSWORD"]
    for secret in (password, urlsplit(settings.CACHES["default"]["LOCATION"]).password):
        assert not secret or secret not in out


@pytest.mark.parametrize(
    ("retry_at", "shown"),
    [
        (datetime(2026, 11, 26, 23, 59, 59, 20_000, UTC), "2026-11-27T00:00:00Z"),
        (datetime(2026, 11, 26, 23, 59, 59, 999_999, UTC), "2026-11-27T00:00:00Z"),
        (datetime(2026, 11, 26, 23, 59, 59, 0, UTC), "2026-11-26T23:59:59Z"),
    ],
)
def test_the_time_of_the_next_attempt_is_the_one_that_redis_has(retry_at: datetime, shown: str, caplog: Any) -> None:
    """Rounded up, as asynq needs whole seconds: no attempt begins before the time that was announced."""
    entry = {"exception": "builtins.ValueError", "message": "no"}
    record = TaskRecord(name="a.b", attempt=1, max_attempts=2, state=TaskState.FAILED, retry_at=retry_at)
    record.errors = [entry]
    log_failed(record)
    assert f"next attempt at {shown}: ValueError: no" in caplog.text
    assert due_of(retry_at.timestamp())[0] == datetime.fromisoformat(shown).timestamp()


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The history file, in which a task finds how often it has run."""
    path = tmp_path / "history"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verbosity", [0, 1, 2, 3])
def test_verbosity_is_obeyed(verbosity: int, history_path: Path) -> None:
    """0: errors only. 1: the banner, and what matters. 2: names, runs and tracebacks of retries too. 3: all."""
    retried, fatal = tasks.fail_until.enqueue(2), tasks.fail_until.enqueue(9, fatal=True)
    done = run_workers("-v", str(verbosity))
    assert ("Ready." in done.stdout) == (verbosity > 0)
    assert ("    tests.tasks.add\n" in done.stdout) == (verbosity > 1)
    (error,) = lines_at(done.stderr, "ERROR")
    name = "tests.tasks.fail_until"
    assert f"task {fatal.id} {name}: attempt 1 of 3 failed; it is not retried: tests.tasks.Fatal" in error
    assert re.match(r"\S+ \S+ ERROR +worker \d+: ", error)
    retry = f"task {retried.id} {name}: attempt 1 of 3 failed; next attempt at "
    assert sum(retry in line for line in lines_at(done.stderr, "WARNING")) == (verbosity > 0)
    assert bool(lines_at(done.stderr, "INFO")) == (verbosity > 0)
    assert done.stderr.count("Traceback (most recent call last)") == (1 if verbosity < 2 else 2)
    debug = lines_at(done.stderr, "DEBUG")
    returned = f"task {retried.id} {name}: attempt 2 of 3 returned after"
    assert any(returned in line for line in debug) == (verbosity > 1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-"])
def test_a_closed_output_stops_no_worker(redirection: str) -> None:
    """As under a daemon that closes both; a warning of the start is written too."""
    result = tasks.add.enqueue(1, 2)
    command = f'exec "{sys.executable}" -m django runworkers --burst --concurrency 3 {redirection}'
    done = subprocess.run(["sh", "-c", command], env=environment(), cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
    result.refresh()
    assert result.return_value == 3


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_text_that_cannot_be_printed_is_dropped(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it where the output is closed; where its encoding lacks a letter, workers matter more."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    command = Command(no_color=True)
    command.say("database é")
    command.warn("database é")


@pytest.mark.django_db(transaction=True)
def test_a_stop_says_how_long_running_tasks_have(tmp_path: Path) -> None:
    """Otherwise a person at the terminal sees nothing for as long as the longest task runs. A burst says nothing."""
    with workers(tmp_path) as fleet:
        wait_until(lambda: "Ready." in fleet.output(), "ready line")
        assert fleet.stop(signal.SIGINT) == 0
        seconds = conf.current().shutdown_grace_seconds
        assert fleet.output().count(f"Stopping: running tasks may finish within {seconds:g} s.") == 1
    assert "Stopping" not in run_workers().stdout


@pytest.mark.django_db(transaction=True)
def test_logging_that_is_configured_is_left_alone(tmp_path: Path) -> None:
    """The project's handler gets the lines of the supervisor and of the workers, and standard error none."""
    log = tmp_path / "own.log"
    tasks.raises_spite.enqueue("SystemExit")
    done = run_workers("-v", "3", ASYNCQ_TEST_LOG=str(log))
    assert done.stderr == ""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(datetime.fromisoformat(each["time"]).utcoffset() == timedelta() for each in records)
    assert any(record.get("task") == "tests.tasks.raises_spite" for record in records)
    assert {record["level"] for record in records} == {"INFO", "ERROR"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("task", "arguments", "exception", "frameworks"),
    [
        (tasks.raises_spite, ("SystemExit",), "SystemExit", 1),
        (tasks.overruns, (True,), "TaskTimeout", 1),
        (tasks.overruns, (False,), "TaskTimeout", 0),
        (tasks.overruns_async, (), "TaskTimeout", 1),
        (tasks.kills_its_process, (), "WorkerLost", 0),
    ],
)
def test_a_final_failure_is_one_error_of_all_loggers(
    task: Any, arguments: Any, exception: str, frameworks: int, tmp_path: Path
) -> None:
    """One line, with the name and the id; Django's own line says at INFO that the task has failed."""
    log = tmp_path / "own.log"
    result = task.using(max_attempts=1).enqueue(*arguments)
    run_workers(ASYNCQ_TEST_LOG=str(log), ASYNCQ_TEST_TIMEOUT_GRACE="0.5", ASYNCQ_TEST_PATIENCE="0")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    errors = [record for record in records if record["level"] == "ERROR"]
    if exception == "WorkerLost":
        # What it lost in the company of others is no failure of the task yet.
        errors = [
            error for error in errors if "exited unexpectedly" not in error["message"] or "alone" in error["message"]
        ]
    (error,) = errors
    row = TaskRecord.objects.get()
    assert row.state == TaskState.FAILED
    assert error["logger"] == "django_asyncq.runs" and exception in error["message"]
    assert (error["task_id"], error["task"]) == (result.id, row.name)
    assert ("traceback" in error) == bool(frameworks)
    found = [each for each in records if each["logger"] in FRAMEWORK_LOGGERS and "FAILED" in each["message"]]
    assert [each["level"] for each in found] == ["INFO"] * frameworks
    assert not any("traceback" in each for each in found)


def test_the_line_of_another_backend_is_left_as_it_is() -> None:
    """Only what is sent about a task of this package is lowered; where the logger takes no INFO, it is dropped."""
    line = logging.makeLogRecord({"name": "django.tasks", "levelno": logging.ERROR, "levelname": "ERROR"})
    assert FrameworkFilter().filter(line) and line.levelname == "ERROR"
    framework = logging.getLogger("django.tasks")
    assert any(isinstance(each, FrameworkFilter) for each in framework.filters)
    before = framework.level
    framework.setLevel(logging.WARNING)
    try:
        with about(TaskRecord()):
            assert not FrameworkFilter().filter(line)
    finally:
        framework.setLevel(before)


def test_a_command_called_as_a_function_changes_no_logging() -> None:
    """Only a program of its own installs the handler, and only where no other would take the lines."""
    logger = logging.getLogger("django_asyncq")
    assert logger.hasHandlers()
    log_to_stderr("worker", 3)
    assert logger.handlers == []
    assert stderr_verbosity() is None


def test_the_configuration_of_the_guide_works() -> None:
    """Its LOGGING is accepted, and a line of the project's own names the task whose body runs."""
    code = """
import logging, logging.config
from pathlib import Path
from tests.json_log import block_with
from django_asyncq.core.logs import enter_run
from types import SimpleNamespace
found = {}
exec(block_with("LOGGING = "), found)
logging.config.dictConfig(found["LOGGING"])
logging.getLogger("shop").info("one")
enter_run(SimpleNamespace(id="7", name="shop.tasks.charge", queue_name="mail", attempt=1, headers=None))
logging.getLogger("shop").info("two")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert lines == ["INFO [- -] shop: one", "INFO [7 shop.tasks.charge] shop: two"]
