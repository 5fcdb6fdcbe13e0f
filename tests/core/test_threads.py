"""No thread dies alone: what ends one is logged, and its process is replaced."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from django_asyncq.core.guard import EX_SOFTWARE, LongLivedThread
from django_asyncq.models import TaskRecord, TaskState

from .. import tasks
from ..workers import PATIENCE_SECONDS, ROOT, environment, run_workers


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


# --- one thread


def ended(work: Any, **options: Any) -> tuple[LongLivedThread, list[str]]:
    """Return a thread that has ended, and the names that its `on_death` was called with."""
    died: list[str] = []
    thread = LongLivedThread("example", work, on_death=died.append, **options)
    thread.start()
    thread.join()
    return thread, died


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, tasks.Uncommon, ValueError])
def test_whatever_ends_a_thread_is_logged_and_reported(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """`threading` itself says nothing of a SystemExit."""

    def work() -> None:
        raise kind

    thread, died = ended(work)
    assert (thread.has_died, died) == (True, ["example"])
    (line,) = caplog.records
    assert (line.levelno, line.getMessage()) == (logging.CRITICAL, "thread example has died")
    assert line.exc_info
    assert line.exc_info[0] is kind


def test_a_thread_may_finish_unless_it_is_endless(caplog: pytest.LogCaptureFixture) -> None:
    """The reporter's returns when it is closed; the event loop's must not."""
    thread, died = ended(lambda: None)
    assert (thread.has_died, died, caplog.records) == (False, [], [])
    thread, died = ended(lambda: None, is_endless=True)
    assert (thread.has_died, died) == (True, ["example"])
    assert "its work has returned" in caplog.text


EXIT = """
import logging, sys, threading
from django_asyncq.core import guard as threads
threads.LAST_LINE_SECONDS = 0.2
def last_words(): {last_words}
threading.Thread(target=threads.exit_process, args=(last_words,)).start()
threading.Event().wait(30)
"""


@pytest.mark.parametrize(
    "last_words",
    ["print('why', file=sys.stderr)", "raise SystemExit(1)", "threading.Event().wait(30)", "sys.stderr.close()"],
)
def test_a_process_exits_whatever_its_last_words_do(last_words: str) -> None:
    """Those that raise, and those that hang, as a log handler may."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(last_words=last_words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == EX_SOFTWARE
    assert ("why" in done.stderr) == ("why" in last_words)


# --- the threads of a worker process


def assert_all_succeeded(count: int) -> None:
    """Every task has succeeded, and no crash is counted."""
    rows = TaskRecord.objects.values_list("name", "state", "crash_count", "errors")
    assert [row for row in rows if row[1:3] != (TaskState.SUCCEEDED, 0)] == []
    assert len(rows) == count


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("thread", "kind"),
    [
        ("reporter", "SystemExit"),
        ("reporter", "Uncommon"),
        ("loop", "SystemExit"),
        ("slot", "Uncommon"),
        ("listener", "SystemExit"),
    ],
)
def test_worker_whose_thread_dies_is_replaced(history_path: Path, thread: str, kind: str) -> None:
    """It exits at once and says what it ran; the tasks finish in another process."""
    result = tasks.ends_thread.enqueue(thread, kind)
    log = run_workers("--concurrency", "3").stderr
    assert f"thread {thread}" in log
    assert f"exits with code {EX_SOFTWARE}, since its thread {thread}" in log
    assert f"{result.id} tests.tasks.ends_thread" in log
    assert f"a thread of its process died, so the process exited with code {EX_SOFTWARE}" in log
    assert_all_succeeded(2 if thread in ("slot", "loop") else 1)


@pytest.mark.django_db(transaction=True)
def test_worker_whose_main_thread_fails_drains_and_is_replaced(
    history_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can still write outcomes, so what runs has the grace period."""
    monkeypatch.setenv("ASYNCQ_TEST_SHUTDOWN_GRACE", "1")
    result = tasks.ends_thread.enqueue("MainThread", "SystemExit")
    log = run_workers("--concurrency", "2").stderr
    assert "failed; draining" in log
    assert f"code {EX_SOFTWARE}" in log
    assert_all_succeeded(1)
    assert TaskRecord.objects.get(id=result.id).crash_count == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("how", ["exit", "stop"])
def test_task_that_ends_the_event_loop_costs_the_others_nothing(history_path: Path, how: str) -> None:
    """A child task that calls `sys.exit()`, and `loop.stop()`: the log names what ran."""
    poison, other = tasks.exits_in_a_child.enqueue(how), tasks.lasts_at_first.enqueue()
    log = run_workers("--concurrency", "2").stderr
    assert "since its thread loop has died" in log
    assert f"{poison.id} tests.tasks.exits_in_a_child" in log
    assert_all_succeeded(2)
    record = TaskRecord.objects.get(id=other.id)
    assert "lost together with 1 other" in record.errors[0]["message"]


@pytest.mark.django_db(transaction=True)
def test_task_that_cancels_all_others_takes_no_slot_along(history_path: Path) -> None:
    """Those that have not begun begin anew; those that run fail by the cancellation."""
    for _ in range(2):
        tasks.cancels_the_others.enqueue()
        tasks.nap_async.enqueue_many([(0.0,) for _ in range(8)])
    run_workers("--concurrency", "4")
    states = TaskRecord.objects.values_list("name", "state", "errors")
    for name, state, errors in states:
        assert state == TaskState.SUCCEEDED or "CancelledError" in errors[0]["exception"], name
    assert len(states) == 18


# --- the threads of a supervisor


@pytest.mark.django_db(transaction=True)
def test_supervisor_whose_thread_dies_stops_in_order_and_exits() -> None:
    """What started it starts it anew; its workers drain first."""
    result = tasks.nap.enqueue(0.5)
    done = subprocess.run(
        [sys.executable, "-m", "tests.thread_mutant"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == EX_SOFTWARE, done.stderr
    assert "thread forwarder has died" in done.stderr
    assert "the supervisor stops, since its thread forwarder has died" in done.stderr
    assert "supervisor" in done.stderr
    assert TaskRecord.objects.get(id=result.id).state in (TaskState.QUEUED, TaskState.SUCCEEDED)


def test_no_thread_of_a_test_is_left() -> None:
    """Those above have ended."""
    assert [thread.name for thread in threading.enumerate() if thread.name == "example"] == []
