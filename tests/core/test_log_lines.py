"""The log lines of a task: what a run logs is kept with its outcome, cut, and without secrets."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core import run_log
from django_asyncq.core.payload import progress_value
from django_asyncq.core.run_log import Line, RunLog
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.models import TaskLogLine, TaskRecord, TaskState
from django_asyncq.testing import run_tasks

from .. import observed_tasks as tasks
from ..workers import run_workers, wait_until, workers

LIMIT = 2_048
KIT = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


def texts(result: Any) -> list[str]:
    """The texts that are kept with a task."""
    return [line.text for line in result.logs()]


# --- the test kit


class InTheKit(TestCase):
    """Under `run_tasks` lines are kept as by a worker."""

    def run_one(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a task, and return its result."""
        with self.settings(TASKS=KIT):
            result = task.enqueue(*args, **kwargs)
            run_tasks()
            result.refresh()
            return result

    def test_line_says_what_was_logged(self) -> None:
        """Attempt, time, level, logger and text."""
        begun = timezone.now()
        result = self.run_one(tasks.logs, ["one", "two"])
        first, second = result.logs()
        self.assertEqual((first.attempt, first.level_name, first.logger, first.text), (1, "INFO", "shop.orders", "one"))
        self.assertEqual(second.text, "two")
        self.assertLess(abs(first.logged_at - begun), timedelta(minutes=1))

    def test_last_lines_are_kept(self) -> None:
        """As many as the task says; their numbers say how many there were before."""
        result = self.run_one(tasks.logs, [f"line {number}" for number in range(1, 10)])
        self.assertEqual(texts(result), [f"line {number}" for number in range(5, 10)])
        self.assertEqual(list(TaskLogLine.objects.values_list("number", flat=True)), [5, 6, 7, 8, 9])

    def test_each_attempt_has_lines_of_its_own(self) -> None:
        """Those of one that failed stay."""
        result = self.run_one(tasks.logs, ["again"], fails=1)
        self.assertEqual([(line.attempt, line.text) for line in result.logs()], [(1, "again"), (2, "again")])

    def test_one_call_may_ask_for_more_or_none(self) -> None:
        """`using` wins over the task, and the task over the settings."""
        self.assertEqual(len(texts(self.run_one(tasks.logs.using(keep_logs=7), ["x"] * 9))), 7)
        self.assertEqual(texts(self.run_one(tasks.logs.using(keep_logs=0), ["x"])), [])
        self.assertEqual(texts(self.run_one(tasks.logs_plainly, "x")), [])
        from django.conf import settings

        with self.settings(ASYNCQ={**settings.ASYNCQ, "KEEP_LOGS": 1}):
            self.assertEqual(texts(self.run_one(tasks.logs_plainly, "x")), ["x"])
            self.assertEqual(len(texts(self.run_one(tasks.logs, ["x"] * 9))), 5)

    def test_coroutine_and_its_threads_are_one_run(self) -> None:
        """What they log is in the order in which it was logged."""
        result = self.run_one(tasks.alogs, ["a", "b"])
        expected = [f"{name}: {place}" for name in "ab" for place in ("coroutine", "thread", "synchronous")]
        self.assertEqual(texts(result), expected)

    def test_lines_after_the_completion_are_kept(self) -> None:
        """The outcome is recorded before the function returns."""
        self.assertEqual(texts(self.run_one(tasks.logs_after_completion)), ["before", "in", "after"])

    def test_secrets_are_masked(self) -> None:
        """By the rule for the admin pages."""
        (text,) = texts(self.run_one(tasks.logs_odd_lines, "secrets"))
        for secret in ("abc", "hunter2", "t0ps3cret"):
            self.assertNotIn(secret, text)
        self.assertIn('"n": 1', text)

    def test_secret_at_the_cut_is_masked(self) -> None:
        """What makes it a secret lies beyond the cut."""
        (text,) = texts(self.run_one(tasks.logs_odd_lines, "secret at the cut"))
        self.assertNotIn("hunter", text)
        self.assertLessEqual(len(text.encode()), LIMIT)

    def test_long_line_is_cut(self) -> None:
        """At a whole character, and it says so."""
        (text,) = texts(self.run_one(tasks.logs_odd_lines, "megabyte"))
        self.assertTrue(text.startswith("password=•"))
        self.assertTrue(text.endswith("é…"))
        self.assertLessEqual(len(text.encode()), LIMIT)
        self.assertGreater(len(text.encode()), LIMIT - 3)

    def test_characters_that_databases_refuse_are_replaced(self) -> None:
        """On every database alike."""
        # Not to pytest's own handler: half a character in its report would end pytest-xdist.
        with mock.patch.object(tasks.logger, "propagate", False):
            kept = texts(self.run_one(tasks.logs_odd_lines, "NUL and half a character"))
        self.assertEqual(kept, ["a\ufffdb \ufffd c"])

    def test_colours_are_left_out(self) -> None:
        """They hid a secret's key from its value; no terminal obeys what a log line says."""
        (text,) = texts(
            self.run_one(
                tasks.logs, ["\x1b[36mpassword\x1b[0m=\x1b[35mhunter2\x1b[0m, \x1b]0;title\x07a\r\nb\x1b[2J\x08"]
            )
        )
        self.assertEqual(text, "password=••••••, a\nb\ufffd")

    def test_end_of_a_traceback_is_kept(self) -> None:
        """The last line says what happened; its secrets are masked."""
        (text,) = texts(self.run_one(tasks.logs_odd_lines, "traceback"))
        self.assertTrue(text.startswith("it failed\n"))
        self.assertIn("ValueError: last words, token=•", text)
        self.assertNotIn("s3cret", text)
        self.assertLessEqual(len(text.encode()), LIMIT)
        (text,) = texts(self.run_one(tasks.logs_odd_lines, "long message, short traceback"))
        self.assertTrue(text.startswith("begin yyy"))
        self.assertTrue(text.endswith("\nValueError: last words"))
        self.assertLessEqual(len(text.encode()), LIMIT)

    def test_line_that_cannot_be_made_stops_nothing(self) -> None:
        """As each handler of `logging` goes on."""
        for name in ("unprintable", "wrong arguments"):
            raises, logging.raiseExceptions = logging.raiseExceptions, False
            try:
                result = self.run_one(tasks.logs_odd_lines, name)
            finally:
                logging.raiseExceptions = raises
            self.assertEqual((result.status, texts(result)), ("SUCCESSFUL", ["goes on"]))

    def test_odd_level_and_name_are_stored(self) -> None:
        """They fit the columns."""
        (line,) = self.run_one(tasks.logs_odd_lines, "odd level and name").logs()
        self.assertEqual((line.level, line.logger), (32_767, "n" * 200))

    def test_logger_that_does_not_propagate_is_kept_once(self) -> None:
        """Its lines do not reach the root logger."""
        self.assertEqual(texts(self.run_one(tasks.logs_odd_lines, "apart")), ["a logger that does not propagate"])

    def test_hundred_thousand_lines(self) -> None:
        """The last ones are kept, in bounded memory and time."""
        result = self.run_one(tasks.logs_odd_lines, "many")
        kept = texts(result)
        self.assertEqual((len(kept), kept[0], kept[-1]), (2000, "line 98000 of many", "line 99999 of many"))

    def test_run_that_logs_nothing_writes_nothing(self) -> None:
        """No statement for its lines."""
        with self.settings(TASKS=KIT):
            tasks.logs_odd_lines.enqueue("nothing")
            with CaptureQueriesContext(connection) as captured:
                run_tasks()
        self.assertFalse([query for query in captured if "tasklogline" in query["sql"]])
        self.assertFalse(TaskLogLine.objects.exists())

    def test_asynchronous_reader(self) -> None:
        """`alogs` returns what `logs` does."""
        result = self.run_one(tasks.logs, ["one"])
        self.assertEqual(async_to_sync(result.alogs)(), result.logs())


def test_thread_that_is_left_behind_adds_nothing(tmp_path: Path) -> None:
    """The run has finished; its slot may have the next one."""
    log = RunLog(uuid4(), 1, 1, 3)

    def logs_now(text: str) -> None:
        contextvars.copy_context().run(lambda: (run_log.keep_in(log), tasks.logger.info(text)))

    logs_now("in time")
    log.close()
    logs_now("late")
    assert [line.text for line in log.lines] == ["in time"]


def test_warning_that_reaches_no_handler_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`logging` prints it to standard error by itself; a handler of ours must not silence it."""
    logger = logging.getLogger("shop.silent")
    logger.propagate = False
    try:
        contextvars.copy_context().run(
            lambda: (run_log.keep_in(RunLog(uuid4(), 1, 1, 3)), logger.warning("look"), logger.info("no"))
        )
    finally:
        logger.handlers.clear()
    assert capsys.readouterr().err == "look\n"


def test_traceback_is_formatted_by_each_handler_for_itself() -> None:
    """A formatter of the project may mask secrets in it; what we have formatted must not be in its way."""
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("a", 40, "", 0, "m", (), (type(error), error, error.__traceback__))
    assert run_log.line_text(record).endswith("ValueError: x")
    assert record.exc_text is None


# --- rows


def line(number: int, text: str) -> Line:
    """One line."""
    return Line(number, 1_700_000_000.5, logging.INFO, "shop", text)


def kept(id: UUID, *lines: Line, fence: int = 1) -> RunLog:
    """The lines of one run."""
    return RunLog.of_lines(id, fence, 1, lines)


@pytest.mark.django_db(transaction=True)
def test_lines_are_stored_once() -> None:
    """A worker may repeat a write whose answer was lost; the next run of the attempt has lines of its own."""
    id = UUID(tasks.logs.enqueue([]).id)
    for _ in range(2):
        lifecycle.record_log_lines([kept(id, line(1, "a"), line(2, "b"))])
    lifecycle.record_log_lines([kept(id, line(1, "next"), fence=2)])
    assert texts(tasks.logs.get_result(str(id))) == ["a", "b", "next"]
    assert TaskLogLine.objects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_plain_outcomes_write_no_statement_for_lines(django_assert_num_queries: Any) -> None:
    """Nothing is asked of the table."""
    with django_assert_num_queries(0):
        lifecycle.record_log_lines([])
        lifecycle.record_log_lines([kept(uuid4())])


@pytest.mark.django_db(transaction=True)
def test_lines_are_deleted_with_the_row() -> None:
    """By a person, by the pruner, and those that came after it."""
    ids = [UUID(tasks.logs.enqueue([]).id) for _ in range(4)]
    lifecycle.record_log_lines([kept(id, line(1, "x")) for id in ids])
    TaskRecord.objects.filter(id=ids[0]).delete()
    assert set(TaskLogLine.objects.values_list("task_id", flat=True)) == set(ids[1:])
    long_ago = timezone.now() - timedelta(days=100)
    TaskRecord.objects.filter(id=ids[1]).update(
        state=TaskState.SUCCEEDED, finished_at=long_ago, id=UUID(int=ids[1].int & (2**80 - 1))
    )
    TaskLogLine.objects.filter(task_id=ids[1]).update(task_id=UUID(int=ids[1].int & (2**80 - 1)))
    assert sum(Pruner(Broker()).prune_tasks()) == 1
    assert set(TaskLogLine.objects.values_list("task_id", flat=True)) == set(ids[2:])
    TaskRecord.objects.filter(id=ids[2])._raw_delete(connection.alias)
    assert sum(Pruner(Broker()).prune_leftovers(TaskLogLine, "task_id")) == 1
    assert set(TaskLogLine.objects.values_list("task_id", flat=True)) == {ids[3]}


# --- workers


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file that lets the body go on; made at the end, whatever happens."""
    path = tmp_path / "go"
    yield path
    path.touch()


@pytest.mark.django_db(transaction=True)
def test_workers_keep_lines() -> None:
    """Of `def` and `async def`, in a batch with tasks that keep none."""
    plain = tasks.logs_plainly.enqueue("nobody keeps it")
    first, second = tasks.logs.enqueue(["a", "b"], fails=1), tasks.alogs.enqueue(["x"])
    completed = tasks.logs_after_completion.enqueue()
    run_workers()
    assert [(line.attempt, line.text) for line in first.logs()] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert texts(second) == ["x: coroutine", "x: thread", "x: synchronous"]
    assert texts(completed) == ["before", "in", "after"]
    assert texts(plain) == []


@pytest.mark.django_db(transaction=True)
def test_lines_of_a_run_that_is_stopped_are_kept(tmp_path: Path) -> None:
    """After its timeout, and when it is cancelled."""
    late = tasks.logs_and_sleeps.using(timeout=0.5).enqueue("late")
    cancelled = tasks.logs_and_sleeps.enqueue("cancelled")
    with workers(tmp_path, "--concurrency", "2"):
        wait_until(lambda: TaskRecord.objects.get(id=cancelled.id).state == TaskState.RUNNING, "run")
        cancelled.cancel()
        wait_until(lambda: all(record.is_final for record in TaskRecord.objects.all()), "outcomes")
        wait_until(lambda: TaskLogLine.objects.count() == 2, "lines")
    assert (texts(late), texts(cancelled)) == (["late"], ["cancelled"])


@pytest.mark.django_db(transaction=True)
def test_run_of_a_killed_process_leaves_no_lines(go: Path, tmp_path: Path) -> None:
    """They were in that process; the next run of the same attempt has its own, and the row ends rightly."""
    result = tasks.logs.enqueue(["one", "two"], str(go))
    with workers(tmp_path, "--concurrency", "2") as running:
        wait_until(lambda: TaskRecord.objects.get().state == TaskState.RUNNING, "run")
        (pid,) = running.children()
        os.kill(pid, signal.SIGKILL)
        go.touch()
        wait_until(lambda: TaskRecord.objects.get().is_final, "outcome")
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert [(line.attempt, line.text) for line in result.logs()] == [(1, "one"), (1, "two")]


@pytest.mark.django_db(transaction=True)
def test_run_that_is_requeued_at_shutdown_leaves_no_lines(go: Path, tmp_path: Path) -> None:
    """The process exits without an outcome of it."""
    result = tasks.logs.enqueue(["one"], str(go))
    with workers(tmp_path, "--concurrency", "2", ASYNCQ_TEST_SHUTDOWN_GRACE="0.2") as running:
        wait_until(lambda: TaskRecord.objects.get().state == TaskState.RUNNING, "run")
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        running.stop()
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert texts(result) == []


# --- the admin


@pytest.mark.django_db(transaction=True)
def test_page_of_a_task_shows_progress_and_lines(admin_client: Any) -> None:
    """Escaped, and with secrets masked; a task without either has no such section."""
    result = tasks.logs.enqueue([])
    url = f"/admin/django_asyncq/taskrecord/{result.id}/change/"
    page = admin_client.get(url).content.decode()
    assert 'id="asyncq-progress"' not in page
    assert 'id="asyncq-log"' not in page
    message = "<b>half</b> password=hunter2"
    TaskRecord.objects.update(progress=progress_value(1_500, 3_000, message, {"api_key": "k3y0fapi", "file": "<i>"}))
    lifecycle.record_log_lines([kept(UUID(result.id), line(1, "<script>alert(1)</script> token=s3cret"))])
    page = admin_client.get(url).content.decode()
    assert '<progress value="1500" max="3000"' in page
    assert "1,500 / 3,000" in page
    assert "&lt;b&gt;half&lt;/b&gt; password=•" in page
    assert "INFO shop: &lt;script&gt;alert(1)&lt;/script&gt; token=•" in page
    for secret in ("hunter2", "k3y0fapi", "s3cret", "<script>alert", "<b>half", '"<i>"'):
        assert secret not in page
    TaskRecord.objects.update(progress=progress_value(0.5, None, "", {}))
    page = admin_client.get(url).content.decode()
    assert "<progress" not in page
    assert "<bdi>0.5</bdi>" in page


@pytest.mark.django_db(transaction=True)
def test_page_of_a_task_reads_only_the_lines_it_shows(admin_client: Any) -> None:
    """The latest ones, and how many there are before them; secrets are not sought in 100 MB."""
    result = tasks.logs.enqueue([])
    url = f"/admin/django_asyncq/taskrecord/{result.id}/change/"
    lifecycle.record_log_lines([kept(UUID(result.id), *(line(number, f"line {number};") for number in range(1, 1001)))])
    with CaptureQueriesContext(connection) as queries:
        page = admin_client.get(url).content.decode()
    assert len([query for query in queries if "LIMIT" in query["sql"] and "tasklogline" in query["sql"]]) == 1
    assert "line 1000;" in page and "line 801;" in page and "line 800;" not in page and "line 500;" not in page
    assert "line 500;" in admin_client.get(url, {"full": ""}).content.decode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_of_a_run_keeps_no_lines() -> None:
    """Another thread may hold the lock at the fork, which nobody releases in the child."""
    log = RunLog(uuid4(), 1, 1, 5)
    token = run_log._log.set(log)
    try:
        run_log.keep_in(log)
        with log._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                logging.getLogger("shop").error("in the child")
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        run_log._log.reset(token)
