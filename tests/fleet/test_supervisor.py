"""The supervisor's own decisions, with worker processes that never start."""

from __future__ import annotations

import logging
import multiprocessing
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Extended, servers
from django_asyncq.broker.keys import alive_key
from django_asyncq.core import guard
from django_asyncq.fleet.processes import Child, Processes, WorkersCannotStart
from django_asyncq.fleet.supervisor import Supervisor
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.options import READY, WorkerOptions
from django_asyncq.worker.slot_table import Running

from ..workers import environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers of the test process, which the supervisor replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    is_own_process = guard._is_own_process
    yield
    guard._is_own_process = is_own_process
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_burst_that_cannot_start_still_shuts_down_in_order(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises one error. The maintenance threads have stopped, and no process is left."""
    for name, value in environment(ASYNCQ_TEST_BREAK_WORKERS="1").items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor(WorkerOptions(concurrency=1), processes=3, burst=True)
    supervisor.maintenance.has_no_work = lambda backend: False  # type: ignore[method-assign]
    with pytest.raises(WorkersCannotStart):
        supervisor.run()
    assert supervisor.children == []
    assert not supervisor.maintenance.is_alive()


def test_a_process_stopped_while_it_starts_is_not_an_error(
    handlers: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A burst may finish before its processes are ready. It logs no error."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor(WorkerOptions(concurrency=1), processes=2, burst=True)
    supervisor.run()
    assert supervisor.children == []
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    wait_until(lambda: not supervisor.maintenance.is_alive(), "the maintenance threads to stop")


@pytest.mark.parametrize(
    ("exit_code", "asked", "killed", "level"),
    [
        # It ran on after a timeout; code has changed while it was starting.
        (-signal.SIGKILL, False, True, "INFO"),
        (-signal.SIGTERM, True, False, "INFO"),
        (-signal.SIGTERM, True, True, "INFO"),
        # By somebody else, or by a crash of its own in the meantime.
        (-signal.SIGKILL, True, False, "ERROR"),
        (-signal.SIGTERM, False, False, "ERROR"),
        (-signal.SIGSEGV, True, True, "ERROR"),
        (1, True, False, "ERROR"),
    ],
)
def test_only_a_death_that_the_supervisor_has_not_caused_is_an_error(
    exit_code: int, asked: bool, killed: bool, level: str, caplog: Any
) -> None:
    """It is replaced in either case, and its tasks are recovered."""
    process = SimpleNamespace(pid=1, exit_code=exit_code, has_exited=lambda: True)
    for name in ("kill_group", "close", "signal"):
        setattr(process, name, lambda *arguments: None)
    pipe = SimpleNamespace(poll=lambda: False, close=lambda: None)
    child = Child(process, None, pipe, "w", 0.0, SimpleNamespace(take=str))  # type: ignore[arg-type]
    dead: list[Child] = []
    processes = Processes(WorkerOptions(concurrency=1), 0, on_death=dead.append)
    processes.children.append(child)
    if asked:
        processes.signal_all(signal.SIGTERM)
    if killed:
        processes.kill(child)
    with caplog.at_level("INFO", "django_asyncq.fleet"):
        processes.reap(time.monotonic())
    assert dead == [child] and len(processes._vacancies) == 1
    (line,) = caplog.records
    assert line.levelname == level
    assert ("exited unexpectedly" in line.message) == (level == "ERROR")


def test_slow_start_of_isolated_tasks_is_one_warning(caplog: Any) -> None:
    """It says how long it took and how busy the host is; the next one is logged once a start was quick again."""
    processes = Processes(WorkerOptions(concurrency=1), 0, on_death=lambda child: None)
    now = time.monotonic()

    def starts(worker_id: str, seconds: float) -> None:
        ours, theirs = multiprocessing.Pipe()
        theirs.send(READY)
        child = Child(SimpleNamespace(), None, ours, worker_id, now - seconds, SimpleNamespace())  # type: ignore[arg-type]
        processes.children[:] = [child]
        processes.listen(now)
        assert child.was_ready

    for seconds in (30.0, 40.0, 0.5, 50.0):
        starts("w:1-isolated", seconds)
        starts("w:1", 90.0)
    assert [(line.levelname, line.getMessage().partition(";")[0]) for line in caplog.records] == [
        ("WARNING", "worker w:1-isolated: the process of an isolated task took 30.0 s to start"),
        ("WARNING", "worker w:1-isolated: the process of an isolated task took 50.0 s to start"),
    ]
    assert caplog.text.count("load average ") == 2


def test_running_tasks_are_reasserted_only_after_redis_lost_its_memory(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first mark of a new Redis, which may be at maxmemory. After a loss at every beat until a new mark."""
    reasserted: list[str] = []
    monkeypatch.setattr(lifecycle, "reassert", lambda broker, worker_id, ids: reasserted.append(worker_id))
    supervisor = Supervisor(WorkerOptions(queues={"default": 1}))
    running = [Running("a", 0.0)]
    supervisor.children.append(
        SimpleNamespace(worker_id="w", slot_table=SimpleNamespace(running=lambda: running))  # type: ignore[arg-type]
    )
    monkeypatch.setattr(Broker, "extend", lambda *arguments: [Extended(1, [], [])])
    seen = []
    for step in ("none", "mark", "same", "lost", "lost", "mark", "same"):
        if step == "lost":
            supervisor.broker.client.delete(alive_key())
        elif step == "mark":
            supervisor.broker.client.set(alive_key(), 100 + len(seen))
        reasserted.clear()
        supervisor.leases.renew()
        seen.append(bool(reasserted))
    assert seen == [False, False, False, True, True, True, False]


def test_a_task_that_begins_while_leases_are_renewed_is_not_reasserted(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the slot table but not among the renewed leases, and has a fresh lease all the same."""
    reasserted: list[set[str]] = []
    monkeypatch.setattr(lifecycle, "reassert", lambda broker, worker_id, ids: reasserted.append(ids))
    supervisor = Supervisor(WorkerOptions(queues={"default": 1}))
    running = [Running("a", 0.0)]
    supervisor.children.append(
        SimpleNamespace(worker_id="w", slot_table=SimpleNamespace(running=running.copy))  # type: ignore[arg-type]
    )

    def extend(*arguments: object) -> list[Extended]:
        running.append(Running("b", 0.0))
        return [Extended(1, [], [])]

    monkeypatch.setattr(Broker, "extend", extend)
    supervisor.leases.renew()
    assert reasserted == []
    supervisor.leases.renew()
    assert reasserted == [{"a", "b"}]


def test_an_outage_of_redis_costs_the_supervisor_one_timeout_a_beat(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is seconds in which it looks after nothing: no second one to show processes, none for each that stops."""
    asked: list[str] = []
    for name in ("show", "clear"):
        act = getattr(servers, name)
        monkeypatch.setattr(servers, name, lambda *values, name=name, act=act: asked.append(name) or act(*values))
    supervisor, times = Supervisor(WorkerOptions(concurrency=1)), conf.current()
    children: Any = [
        SimpleNamespace(worker_id=f"w:{pid}", process=SimpleNamespace(pid=pid), is_alone=False) for pid in (1, 2, 3)
    ]
    own_redis.kill()
    supervisor._look_after_children(0.0)
    assert supervisor.leases.is_failing and asked == []
    for child in children:
        supervisor.heartbeat.clear([child])
    assert asked == ["clear"]
    own_redis.restart()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + times.beat_retry_seconds)
    monkeypatch.setattr("django_asyncq.fleet.heartbeat.time", clock)
    supervisor._look_after_children(0.0)
    assert asked == ["clear", "show"]
    supervisor.heartbeat.clear(children[:1])
    assert asked == ["clear", "show", "clear"]


def test_an_outage_of_redis_is_logged_once_and_retried_soon(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many beats fail: one line at the start of the outage, one at its end."""
    caplog.set_level(logging.INFO, logger="django_asyncq.fleet")
    supervisor, times = Supervisor(WorkerOptions(concurrency=1)), conf.current()
    clock, renewals = SimpleNamespace(now=1000.0), []
    renew = supervisor.leases.renew
    monkeypatch.setattr("django_asyncq.fleet.heartbeat.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(supervisor.leases, "renew", lambda: renewals.append(clock.now) or renew())

    def beat_after(seconds: float) -> bool:
        """Return whether a beat renews leases so many seconds after the last one."""
        before = len(renewals)
        clock.now += seconds
        supervisor.leases.beat()
        return len(renewals) > before

    assert beat_after(0)
    assert not beat_after(times.beat_seconds - 1)
    own_redis.kill()
    assert beat_after(1)
    for _ in range(2):
        assert beat_after(times.beat_retry_seconds)
    own_redis.restart()
    assert beat_after(times.beat_retry_seconds)
    assert not beat_after(times.beat_seconds - 1)
    words = [re.split("[:,]", record.getMessage())[0] for record in caplog.records]
    assert words == ["leases cannot be renewed", "leases are renewed again"]
