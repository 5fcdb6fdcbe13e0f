"""Idle workers as whole processes: what is pushed to them is run, whatever happens to one of them.

Tests with `variant` hold for both: with handoff, and for the plain variant, in which pushes only wake.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Dequeued
from django_asyncq.broker.keys import handoff_key, keys_of, own_queues_key
from django_asyncq.lifecycle import Run
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.supervisor.memory import MemorySampler
from django_asyncq.supervisor.processes import Child
from django_asyncq.supervisor.recovery import Recovery
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.execute.job import Job, JobPhase
from django_asyncq.worker.fetch.pacing import LONGEST_BACKOFF_SECONDS, Pacing
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.process import WorkerProcess
from django_asyncq.worker.slot_table import SlotTable
from django_asyncq.worker.wakeup import Reason

from . import tasks
from .clock import Clock
from .runs import worker_process
from .workers import Workers, history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


@pytest.fixture(params=["handoff", "plain"])
def variant(
    request: pytest.FixtureRequest, own_redis: EmbeddedRedis, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The variant under test, in this process and in those it starts."""
    is_on = request.param == "handoff"
    settings.ASYNCQ = {**settings.ASYNCQ, "HANDOFF": is_on}
    monkeypatch.setenv("ASYNCQ_TEST_HANDOFF", str(int(is_on)))
    found: str = request.param
    return found


def ready_workers() -> list[str]:
    """The ids of all workers that are ready to be handed a task."""
    client = Broker().client
    found = [key.decode() for key in client.scan_iter(handoff_key("*")) if client.hkeys(key) == [b""]]
    return [key.removeprefix(handoff_key("")) for key in found]


def handed() -> list[str]:
    """The ids of all tasks that were handed to a worker and not read."""
    client = Broker().client
    return [id.decode() for key in client.scan_iter(handoff_key("*")) for id in client.hvals(key) if id]


def waits() -> int:
    """How many queues are waited for, by all workers of the server."""
    # The leader blocks in another command, on the names of drained queues.
    return sum("b" in each["flags"] and each["cmd"] != "blpop" for each in Broker().client.client_list())


def served(queues: int) -> int:
    """How many queues a process waits for: those of tasks with a wire name are served from the start."""
    return max(queues, len(Broker().queues()))


def wait_ready(fleet: Workers) -> None:
    """Wait until all its processes are ready to be handed a task."""
    wait_until(lambda: len(ready_workers()) == len(fleet.children()) > 0, "ready workers")


def wait_idle(fleet: Workers, *, queues: int = 1) -> None:
    """Wait until all its processes wait for each queue; where there is handoff, until they are ready, too."""

    wait_until(lambda: waits() == served(queues) * len(fleet.children()) > 0, "idle workers")
    if conf.current().handoff:
        wait_ready(fleet)


def succeeded(count: int) -> bool:
    return TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == count


def begun(path: Path) -> list[str]:
    """The ids of all runs, in their order."""
    return [line["id"] for line in history(path) if line["event"] == "stamp"]


# --- both variants


@pytest.mark.usefixtures("variant")
class TestBothVariants:
    """What holds with handoff and without."""

    def test_single_tasks_start_in_an_idle_fleet(self, tmp_path: Path, history_path: Path) -> None:
        """Each once, long before a worker would look by itself."""
        ids = []
        with workers(tmp_path, "--processes", "2") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                ids.append(tasks.stamp.enqueue().id)
                wait_until(lambda count=count: succeeded(count), "the task", 4)
        assert begun(history_path) == ids

    def test_tasks_of_several_queues_start(self, tmp_path: Path, history_path: Path) -> None:
        """A worker waits for all its queues at once; those that come at the same time are all run."""
        with workers(tmp_path, "--processes", "1", "--queues", "a=3,b=2,c") as fleet:
            for count in (1, 2):
                wait_idle(fleet, queues=3)
                for queue in "cab":
                    tasks.stamp.using(queue_name=queue).enqueue()
                wait_until(lambda count=count: succeeded(3 * count), "the tasks", 4)
        assert len(begun(history_path)) == 6

    @pytest.mark.parametrize("priority", [7, -7])
    def test_a_task_with_a_priority_starts(self, priority: int, tmp_path: Path) -> None:
        """Its push does not end a wait; a channel announces it."""
        with workers(tmp_path, "--processes", "1") as fleet:
            wait_idle(fleet)
            tasks.stamp.using(priority=priority).enqueue()
            wait_until(lambda: succeeded(1), "the task", 4)

    def test_a_task_pushed_to_a_frozen_process_is_run_by_another(self, tmp_path: Path, history_path: Path) -> None:
        """With handoff, its supervisor renews nothing that it has not begun. When it wakes, it drops the task."""
        (tmp_path / "other").mkdir()
        with workers(tmp_path, "--processes", "1") as frozen:
            wait_idle(frozen)
            (pid,) = frozen.children()
            os.kill(pid, signal.SIGSTOP)
            try:
                task = tasks.stamp.enqueue()
                if conf.current().handoff:
                    wait_until(lambda: handed() == [task.id], "task in the hands of the frozen process")
                with workers(tmp_path / "other", "--processes", "1"):
                    wait_until(lambda: succeeded(1), "the task", conf.current().lease_seconds + 15)
                    os.kill(pid, signal.SIGCONT)
                    wait_until(lambda: handed() == [], "waking of the frozen process")
                    wait_until(lambda: waits() == 2 * served(queues=1), "waits of both processes")
            finally:
                os.kill(pid, signal.SIGCONT)
        assert begun(history_path) == [task.id]
        assert TaskRecord.objects.get(id=task.id).attempt == 1

    def test_an_idle_process_that_is_killed_takes_no_task_along(self, tmp_path: Path, history_path: Path) -> None:
        """Whether Redis has noticed or not: no task waits for the end of a lease, which lasts a minute here."""
        with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LEASE="60") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                (pid,) = fleet.children()
                os.kill(pid, signal.SIGKILL)
                tasks.stamp.enqueue()
                wait_until(lambda count=count: succeeded(count), "the task", 20)
        assert len(begun(history_path)) == 3
        assert not list(Broker().client.scan_iter(f"{conf.current().key_prefix}:{{*}}:handed:*"))

    def test_workers_whose_connections_were_cut_wait_again(self, tmp_path: Path, history_path: Path) -> None:
        """What is pushed at that moment is run, too."""
        with workers(tmp_path, "--processes", "2") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                Broker().client.client_kill_filter(_type="normal", skipme=True)
                tasks.stamp.enqueue()
                wait_until(lambda count=count: succeeded(count), "the task", 10)
        assert len(begun(history_path)) == 3

    def test_workers_wait_again_after_redis_was_restarted(
        self, tmp_path: Path, history_path: Path, own_redis: EmbeddedRedis
    ) -> None:
        """It has lost its memory, and with it what it knew of ready workers."""
        with workers(tmp_path, "--processes", "2") as fleet:
            wait_idle(fleet)
            own_redis.kill()
            own_redis.restart()
            wait_idle(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda: succeeded(1), "the task", 4)
        assert len(begun(history_path)) == 1

    def test_a_paused_queue_is_run_once_it_is_resumed(self, tmp_path: Path, history_path: Path) -> None:
        """What was pushed meanwhile waits, and another queue is not held up."""
        paused = keys_of("a").paused
        with workers(tmp_path, "--processes", "1", "--queues", "a,b") as fleet:
            wait_idle(fleet, queues=2)
            Broker().client.set(paused, 1)
            task = tasks.stamp.using(queue_name="a").enqueue()
            other = tasks.stamp.using(queue_name="b").enqueue()
            wait_until(lambda: succeeded(1), "the task of the other queue", 10)
            Broker().client.delete(paused)
            wait_until(lambda: succeeded(2), "the task", 10)
        assert begun(history_path) == [other.id, task.id]

    def test_a_removed_queue_is_no_longer_waited_for(self, tmp_path: Path) -> None:
        """Queues may come and go."""
        Broker().register_queue("gone")
        with workers(tmp_path, "--processes", "1") as fleet:
            wait_idle(fleet, queues=2)
            before = waits()
            Broker().client.srem(own_queues_key(), "gone")
            wait_until(lambda: waits() == before - 1, "end of one of the waits")
            tasks.stamp.enqueue()
            wait_until(lambda: succeeded(1), "the task")

    def test_a_stopped_fleet_leaves_nothing(self, tmp_path: Path, key_prefix: str) -> None:
        """Neither a task nor a key of its own."""
        with workers(tmp_path, "--processes", "2") as fleet:
            wait_idle(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda: succeeded(1), "the task")
            wait_idle(fleet)
            assert fleet.stop() == 0
        tasks.stamp.enqueue()
        left = {key.decode() for key in Broker().client.scan_iter(f"{key_prefix}*")}
        assert not [key for key in left if ":handoff:" in key or ":handed:" in key or ":held:" in key]


# --- handoff alone


def test_tasks_are_handed_to_the_worker_that_has_waited_longest(tmp_path: Path) -> None:
    """Of two processes each is handed every second task; none had to ask."""
    with workers(tmp_path, "--processes", "2") as fleet:
        for count in range(1, 7):
            wait_ready(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda count=count: succeeded(count), "the task")
    workers_of = [row.worker_ids for row in TaskRecord.objects.order_by("id")]
    assert all(first != second for first, second in itertools.pairwise(workers_of)), workers_of
    assert ready_workers() == []


def test_a_handed_task_that_holds_the_interpreter_is_renewed_though_its_worker_cannot_report_that_it_was_read(
    tmp_path: Path,
) -> None:
    """It is in the slot table. Otherwise the other process would run it."""
    with workers(tmp_path, "--processes", "2") as fleet:
        wait_ready(fleet)
        begun_at = time.monotonic()
        task = tasks.holds_gil.enqueue(2.5 * conf.current().lease_seconds)
        wait_until(lambda: handed() == [task.id], "task in the hands of a worker")
        wait_until(lambda: succeeded(1), "the task")
        assert time.monotonic() - begun_at > conf.current().lease_seconds
    row = TaskRecord.objects.get(id=task.id)
    assert (row.attempt, len(row.worker_ids)) == (1, 1)


# --- one step of a worker, or of its supervisor


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A worker process whose main thread is the test's; nothing sleeps but the test."""
    with worker_process() as found:
        yield found


def dequeue(process: WorkerProcess) -> Dequeued:
    """Enqueue a task and dequeue it for the process, as if it had been handed."""
    tasks.stamp.enqueue()
    return process.broker.dequeue("default", process.worker_id, 1, conf.current().lease_seconds)


def test_a_task_handed_too_long_ago_is_not_begun(process: WorkerProcess, history_path: Path) -> None:
    """The process stood still after it began to wait: another may have the task by now."""
    process.fetcher.receive("default", dequeue(process), time.monotonic() - conf.current().lease_seconds)
    (job,) = process.jobs.waiting
    assert not job.run.begun
    process.fetcher.receive("default", dequeue(process), time.monotonic())
    wait_until(lambda: len(begun(history_path)) == 1, "run of the other task")
    assert (list(process.jobs.waiting), job.phase) == ([job], JobPhase.WAITING)


def test_a_process_that_runs_something_is_not_ready_and_is_woken_when_it_has_finished(process: WorkerProcess) -> None:
    """Its main thread sleeps meanwhile, and would otherwise be ready only when it next looks."""
    assert process.fetcher.is_ready()
    dequeued = dequeue(process)
    run = Run(lifecycle.load_rows([dequeued.leases[0].id])[dequeued.leases[0].id], dequeued.leases[0])
    job = Job(run, tasks.stamp, time.monotonic())
    process.jobs.busy.add(job)
    assert not process.fetcher.is_ready()
    process.wakeup.expect(Reason.IDLE)
    process.capacity.slot_freed()
    assert process.wakeup.wait(0).reasons == set()
    process.executors.threads.leave_slot(job)
    assert Reason.IDLE in process.wakeup.wait(0).reasons
    process.fetcher.pacing.fail()
    process.fetcher.pacing.fail()
    assert not process.fetcher.is_ready()


def test_a_process_that_has_dequeued_tasks_reports_anew_that_it_is_ready(
    process: WorkerProcess, history_path: Path
) -> None:
    """The script that dequeues has removed that from Redis."""
    handoff = process.fetcher.waits.handoff
    handoff.report_ready(ready=True)
    handoff.wait_for("other")
    assert not handoff.could_be_ready
    tasks.stamp.enqueue()
    process.fetcher.fetch()
    assert handoff.could_be_ready
    wait_until(lambda: len(begun(history_path)) == 1, "the run")


def test_a_process_that_looks_for_what_it_holds_requeues_what_was_moved_for_it(process: WorkerProcess) -> None:
    """The connection that broke in between was its own."""
    keys = keys_of("default")
    process.broker.client.rpush(keys.handed(process.worker_id), "id")
    process.fetcher.adopt("default")
    assert process.broker.client.lrange(keys.pending, 0, -1) == [b"id"]


def test_a_process_that_stops_requeues_what_was_handed_at_the_last_moment(
    process: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its supervisor, which may be dead."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    process.reporter.start()
    process.fetcher.waits.handoff.report_ready(ready=True)
    process.fetcher.waits.handoff.wait_for("default")
    result = tasks.stamp.enqueue()
    wait_until(lambda: handed() == [result.id], "task in its hands")
    process.shut_down(0)
    assert exits == [0]
    client, keys = process.broker.client, keys_of("default")
    assert client.lrange(keys.pending, 0, -1) == [result.id.encode()]
    assert not client.exists(handoff_key(process.worker_id), keys.held(process.worker_id), keys.lease)


def test_a_process_stops_waiting_for_a_removed_queue(process: WorkerProcess) -> None:
    """When its wait has ended; a queue that is known is waited for again."""
    handoff = process.fetcher.waits.handoff
    for queue in ("default", "gone"):
        handoff.wait_for(queue)
    while sockets := handoff.sockets:
        for descriptor in select.select(list(sockets), [], [], 10)[0]:
            process.fetcher.read_wait(sockets[descriptor])
    assert handoff.queues == ["default"]
    assert process.fetcher.to_wait_for == {"default"}


def test_a_supervisor_requeues_what_a_dead_worker_was_about_to_be_handed() -> None:
    """First of all Redis hands it nothing more."""
    broker, keys = Broker(), keys_of("default")
    recovery = Recovery(broker, WorkerOptions(queues={"default": 1}), MemorySampler())
    broker.handoff_ready("", "w", ready=True)
    broker.client.rpush(keys.handed("w"), "id")
    process = SimpleNamespace(pid=None)
    child = Child(process, SlotTable(1), None, "w", 0.0, None)  # type: ignore[arg-type]
    child.exit_code = -9
    recovery.recover(child)
    assert ready_workers() == []
    assert broker.client.lrange(keys.pending, 0, -1) == [b"id"]


def test_waits_that_fail_are_logged_once_and_begun_again(
    own_redis: EmbeddedRedis, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when they fail for the second time, one when Redis answers again; nothing waits in between."""
    caplog.set_level("INFO", logger="django_asyncq.worker")
    with worker_process() as process:
        fetcher, clock = process.fetcher, Clock()
        fetcher.pacing = Pacing(clock)
        fetcher.to_wait_for = {"a", "b"}
        fetcher.begin_waits()
        assert sorted(fetcher.sockets.values()) == ["a", "b"]
        assert not fetcher.to_wait_for
        with redis.Redis.from_url(own_redis.url, protocol=2) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        for queue in ("a", "b"):
            fetcher.read_wait(queue)
        assert (fetcher.uncertain, fetcher.pacing.wait_failures) == ({"a", "b"}, 1)
        own_redis.kill()
        fetcher.to_wait_for = {"a", "b"}
        for failures in range(2, 6):
            clock.now += LONGEST_BACKOFF_SECONDS
            fetcher.begin_waits()
            assert fetcher.pacing.wait_failures == failures
            assert not fetcher.sockets
            fetcher.begin_waits()
            assert fetcher.pacing.wait_failures == failures, "it is too early"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        own_redis.restart()
        clock.now += LONGEST_BACKOFF_SECONDS
        fetcher.begin_waits()
        assert sorted(fetcher.sockets.values()) == ["a", "b"]
        tasks.stamp.using(queue_name="a").enqueue()
        assert select.select(list(fetcher.sockets), [], [], 10)[0]
        fetcher.read_wait("a")
        assert fetcher.pacing.wait_failures == 0
        assert fetcher.pacing.is_due()
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_wait_that_is_in_progress_goes_on(process: WorkerProcess) -> None:
    """A queue that is found empty again keeps its wait; a new wait begins only after its pause."""
    fetcher, clock = process.fetcher, Clock()
    fetcher.pacing = Pacing(clock)
    fetcher.pacing.begin()
    fetcher.pacing.finish(0, is_more_left=False, look_seconds=5.0)
    fetcher.to_wait_for = {"default"}
    fetcher.pacing.wait_later(0.5)
    assert fetcher.sleep_seconds(0.04) == pytest.approx(0.5)
    fetcher.begin_waits()
    assert not fetcher.sockets
    clock.now += 0.6
    assert fetcher.sleep_seconds(0.04) == 0
    fetcher.begin_waits()
    sockets = fetcher.sockets
    assert list(sockets.values()) == ["default"]
    fetcher.to_wait_for = {"default"}
    fetcher.begin_waits()
    assert fetcher.sockets == sockets


def test_a_process_reports_that_it_is_ready_once_and_when_that_matters(process: WorkerProcess) -> None:
    """Not before it waits for a queue; and, while it waits, once it has finished what it ran."""
    fetcher = process.fetcher
    fetcher.begin_waits()
    assert ready_workers() == []
    job = object()
    process.jobs.busy.add(job)  # type: ignore[arg-type]
    fetcher.to_wait_for = {"default"}
    fetcher.begin_waits()
    assert fetcher.could_be_ready
    assert ready_workers() == []
    process.jobs.busy.clear()
    fetcher.begin_waits()
    assert not fetcher.could_be_ready
    assert ready_workers() == [process.worker_id]
