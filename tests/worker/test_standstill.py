"""Worker processes that live and take nothing: they are found, say what they do, and are replaced."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from django_asyncq import checks, conf
from django_asyncq.broker import Broker, clients
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.guard import LongLivedThread
from django_asyncq.core.names import ALONE
from django_asyncq.fleet import supervisor
from django_asyncq.fleet.processes import Child, Processes
from django_asyncq.fleet.recovery import blame
from django_asyncq.fleet.supervisor import SILENT_SECONDS, Standstill
from django_asyncq.lifecycle import Blame
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker import executors, fetch
from django_asyncq.worker.child_process import STACKS_SIGNAL
from django_asyncq.worker.executors import WARN_SECONDS, LoopBlock
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.slot_table import BEAT_AT, LOOKED_AT, LOOP_STUCK_SINCE, SlotTable

from .. import tasks
from ..runs import worker_process
from ..workers import wait_until, workers

STALL_SECONDS = conf.Settings().stall_seconds
NOW = 10_000.0
TASK_ID = UUID(int=7)


class Case:
    """A supervisor's look at one worker process of two slots, which looked a moment ago and has nothing to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals: list[int] = []
        self.killed: list[Child] = []
        options = WorkerOptions(concurrency=2, queues={"default": 1})
        self.processes = Processes(options, 1, on_death=self.killed.append)
        self.table = SlotTable(4)
        stack: Any = SimpleNamespace(peek=lambda: "in hangs")
        process: Any = SimpleNamespace(signal=self.signals.append)
        self.child = Child(process, self.table, None, "w", 0.0, stack)
        self.processes.children.append(self.child)
        self.standstill = Standstill(Broker(), options, self.processes)
        monkeypatch.setattr(self.processes, "kill", self.killed.append)
        self.standstill.check(1.0)
        self.times(looked=NOW, beat=NOW)

    def times(self, *, looked: float | None = None, beat: float | None = None, stuck: float | None = None) -> None:
        """Set times of the pulse."""
        for place, value in ((LOOKED_AT, looked), (BEAT_AT, beat), (LOOP_STUCK_SINCE, stuck)):
            if value is not None:
                self.table.pulse.memory[place] = value

    def occupy(self, count: int) -> None:
        """Have tasks in slots."""
        for slot in range(count):
            self.table.enter(slot, TASK_ID, 0.0)

    def reason(self) -> str:
        """Why it stands still."""
        return self.standstill.reason(self.child, NOW)


@pytest.fixture
def case(own_keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A process that has taken nothing for too long, and a task that is due."""
    found = Case(monkeypatch)
    found.times(looked=NOW - STALL_SECONDS - 1)
    clients.client("worker").lpush(QueueKeys("default").pending, "id")
    return found


def pause(case: Case) -> None:
    """Pause the queue."""
    clients.client("worker").set(QueueKeys("default").paused, 1)


def empty(case: Case) -> None:
    """Leave nothing due."""
    clients.client("worker").delete(QueueKeys("default").pending)


def isolate(case: Case) -> None:
    """Make it a quarantine process."""
    case.child.worker_id += ALONE


REASONS: dict[str, Callable[[Case], object]] = {
    "it looked": lambda case: case.times(looked=NOW - STALL_SECONDS + 1),
    "it has not begun to look": lambda case: case.times(looked=0.0),
    "nothing is due": empty,
    "the queue is paused": pause,
    "no slot is free": lambda case: case.occupy(2),
    "a task holds the interpreter": lambda case: (case.occupy(1), case.times(beat=NOW - SILENT_SECONDS - 1)),
    "it is in quarantine": isolate,
    "the supervisor stood still too": lambda case: case.standstill.check(NOW),
}


def test_process_that_takes_nothing_stands_still(case: Case) -> None:
    """With a task running or without, and when not even its heartbeat runs though no task can be the reason."""
    assert "it has not looked for 61 s" in case.reason()
    case.occupy(1)
    assert case.reason()
    case.table.leave(0)
    case.times(beat=NOW - SILENT_SECONDS - 1)
    assert case.reason()


def test_a_task_with_a_priority_is_due_too(case: Case) -> None:
    """It waits in a list of its own."""
    empty(case)
    clients.client("worker").zadd(QueueKeys("default").priority, {"id": -5})
    assert case.reason()


@pytest.mark.parametrize("name", REASONS)
def test_process_that_has_a_reason_does_not(case: Case, name: str) -> None:
    """Each by itself."""
    REASONS[name](case)
    assert case.reason() == ""


def test_event_loop_that_keeps_tasks_waiting_stands_still(case: Case) -> None:
    """Though the main thread looks; unless a task holds the interpreter."""
    case.times(looked=NOW, stuck=NOW - STALL_SECONDS - 1)
    case.occupy(1)
    assert "async tasks have waited for its event loop for 61 s" in case.reason()
    case.times(stuck=NOW - STALL_SECONDS + 1)
    assert case.reason() == ""
    case.times(stuck=NOW - STALL_SECONDS - 1, beat=NOW - SILENT_SECONDS - 1)
    assert case.reason() == ""


def test_it_says_what_it_does_is_asked_to_stop_and_is_killed(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step a second, and the grace period before the last."""
    case.standstill.check(NOW - 1)
    monkeypatch.setattr(case.standstill, "_since", 0.0)
    case.standstill.check(NOW)
    assert case.signals == [STACKS_SIGNAL]
    assert "worker w stands still: a task is due" in caplog.text
    case.standstill.check(NOW + 0.5)
    assert case.signals == [STACKS_SIGNAL]
    case.standstill.check(NOW + 1)
    assert case.signals == [STACKS_SIGNAL, signal.SIGTERM]
    assert "its threads:\nin hangs" in caplog.text
    deadline = NOW + 1 + conf.current().shutdown_grace_seconds + supervisor.EXIT_MARGIN_SECONDS
    second = NOW + 2
    while second < deadline:
        case.standstill.check(second)
        second += 1
    assert case.killed == []
    case.standstill.check(deadline)
    assert case.killed == [case.child]


def test_a_process_that_goes_on_is_left_alone(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its stacks and SIGTERM; it may stand still again later."""
    case.standstill.check(NOW - 1)
    monkeypatch.setattr(case.standstill, "_since", 0.0)
    case.standstill.check(NOW)
    case.times(looked=NOW)
    case.standstill.check(NOW + 1)
    assert case.signals == [STACKS_SIGNAL]
    assert "worker w goes on" in caplog.text
    assert not case.child.is_stalled


@pytest.mark.parametrize(
    ("exit_code", "found"),
    [(0, Blame()), (-9, Blame(suspects=frozenset({str(TASK_ID)})))],
)
def test_no_crash_is_counted(case: Case, exit_code: int, found: Blame) -> None:
    """What it had begun is lost, if it could not drain."""
    case.occupy(1)
    case.child.is_stalled, case.child.was_killed, case.child.exit_code = True, exit_code != 0, exit_code
    case.child.said_exit = 0 if exit_code == 0 else None
    assert blame(case.child) == found


# --- what the process notes


def test_a_process_notes_a_look_when_it_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that comes with the first one may stop the main thread before that look has returned."""

    class Ready(Exception):
        """Ends the test in place of the work that follows."""

    def send(message: object) -> None:
        raise Ready

    with worker_process() as process:
        monkeypatch.setattr("django_asyncq.worker.process.own_process", lambda: None)
        monkeypatch.setattr(process, "install_signals", lambda: None)
        monkeypatch.setattr(process.reporter, "start", lambda: None)
        monkeypatch.setattr(process.heartbeat, "start", lambda: None)
        monkeypatch.setattr(process, "supervisor", SimpleNamespace(send=send))
        with pytest.raises(Ready):
            process.run()
        assert process.pulse.looked_at > 0


def test_worker_notes_that_it_looks_and_that_it_has_a_reason_not_to() -> None:
    """Not when outcomes pile up, which for long only a reporter that hangs can be the reason for."""
    with worker_process() as process:
        pulse = process.pulse
        assert pulse.looked_at == 0
        process.reporter.unwritten = fetch.MOST_UNWRITTEN
        assert process.fetcher.to_fetch() == 0
        assert pulse.looked_at == 0
        process.reporter.is_database_unreachable = True
        assert process.fetcher.to_fetch() == 0
        assert pulse.looked_at > 0
        process.reporter.is_database_unreachable, process.reporter.unwritten = False, 0
        pulse.memory[LOOKED_AT] = 0.0
        process.fetcher.fetch()
        assert pulse.looked_at > 0
        pulse.memory[LOOKED_AT] = 0.0
        process.capacity.max_tasks = process.capacity.finished = 1
        assert process.fetcher.to_fetch() == 0
        assert pulse.looked_at > 0


@pytest.fixture
def executor() -> Iterator[Any]:
    """An event loop in a thread, which runs a task."""
    loop = asyncio.new_event_loop()
    thread = LongLivedThread("loop", loop.run_forever)
    thread.start()
    yield SimpleNamespace(loop=loop, thread=thread, is_busy=True, waiting_since=0.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_blocked_event_loop_is_warned_of_once(executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With the stack of what blocks it; and again when it is blocked again."""
    block = LoopBlock(executor)

    def checks_while_blocked(start: float) -> list[float]:
        """Check once a second for 9 s, while the loop is blocked."""
        release, begun = threading.Event(), threading.Event()
        executor.loop.call_soon_threadsafe(lambda: (begun.set(), release.wait()))
        begun.wait()
        executor.waiting_since = start
        found = [block.check(start + second) for second in range(9)]
        release.set()
        wait_until(lambda: not block._asked_at, "answer of the event loop")
        executor.waiting_since = 0.0
        return found

    assert checks_while_blocked(100.0) == [0.0] * 5 + [100.0] * 4
    assert caplog.text.count("has blocked the event loop for 5 s") == 1
    assert "release.wait()" in caplog.text
    assert block.check(110.0) == 0.0
    wait_until(lambda: not block._asked_at, "answer of the event loop")
    checks_while_blocked(111.0)
    assert caplog.text.count("has blocked the event loop for 5 s") == 2


def test_held_interpreter_is_no_blocked_event_loop(executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeat thread could not run either, so the event loop had no time to answer."""
    block = LoopBlock(executor)
    release, begun = threading.Event(), threading.Event()
    executor.loop.call_soon_threadsafe(lambda: (begun.set(), release.wait()))
    begun.wait()
    for second in (100.0, 101.0, 101.0 + WARN_SECONDS + executors.LONGEST_GAP_SECONDS):
        block.check(second)
    release.set()
    assert caplog.text == ""


def test_idle_event_loop_is_not_asked(executor: Any) -> None:
    """A process without async tasks does not wake it each second."""
    executor.is_busy = False
    block = LoopBlock(executor)
    block.check(time.monotonic())
    assert block._asked_at == 0.0


def test_a_stall_shorter_than_an_idle_worker_sleeps_is_refused(settings: Any) -> None:
    """Otherwise idle workers would be replaced."""
    settings.ASYNCQ = {**settings.ASYNCQ, "STALL_SECONDS": 2 * fetch.IDLE_LOOK_SECONDS - 1}
    assert [message.id for message in checks.check_settings()] == ["asyncq.E140"]


# --- real processes


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def log_of(folder: Path, **environment: str) -> str:
    """Run workers until both tasks have succeeded, without a crash; return their log.

    Not a burst: standing still, the stop and the start of another process take half a minute on a busy machine.
    """
    with workers(folder, "--concurrency", "2", ASYNCQ_TEST_STALL="10", **environment) as running:
        rows = TaskRecord.objects.values_list("state", "crash_count")
        finished = TaskRecord.objects.filter(finished_at__isnull=False)
        # What never comes must be said: the log is lost when the time of the test is over.
        try:
            wait_until(lambda: finished.count() == 2, "end of both tasks", 100)
        except AssertionError as error:
            raise AssertionError(f"{error}; {list(rows)}\n{running.output()[-6000:]}") from error
        assert list(rows) == [(TaskState.SUCCEEDED, 0)] * 2, running.output()
    return running.output()


@pytest.mark.django_db(transaction=True)
def test_worker_whose_main_thread_hangs_is_replaced(history_path: Path) -> None:
    """Its supervisor logs where it hangs; the task that is due runs in another process."""
    tasks.hangs_the_main_thread.enqueue()
    log = log_of(history_path.parent, ASYNCQ_TEST_HANG="1", ASYNCQ_TEST_SHUTDOWN_GRACE="0")
    assert "stands still: a task is due and a slot is free" in log
    assert "in _hang" in log
    assert "did not stop in time and is killed" in log


@pytest.mark.django_db(transaction=True)
def test_worker_whose_event_loop_is_blocked_is_replaced(history_path: Path) -> None:
    """While another async task waits; the log names the coroutine."""
    tasks.blocks_the_loop.enqueue(120.0)
    log = log_of(history_path.parent, ASYNCQ_TEST_SHUTDOWN_GRACE="1")
    assert "a coroutine has blocked the event loop" in log
    assert "in blocks_the_loop" in log
    assert "async tasks have waited for its event loop" in log
