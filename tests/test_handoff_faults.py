"""Workers that stand by, as whole processes: what was handed to one that cannot begin it is run by another."""

from __future__ import annotations

import itertools
import multiprocessing
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
from django_asyncq.broker.keys import keys_of, queues_key, standby_key
from django_asyncq.lifecycle import Run
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.supervisor import Supervisor
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.execute.job import Job
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.process import WorkerProcess
from django_asyncq.worker.slot_table import SlotTable

from . import tasks
from .workers import Workers, history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def standing_by() -> list[str]:
    """The ids of all workers that may be handed a task now."""
    client = Broker().client
    found = [key.decode() for key in client.scan_iter(standby_key("*")) if client.hkeys(key) == [b""]]
    return [key.removeprefix(standby_key("")) for key in found]


def handed() -> list[str]:
    """The ids of all tasks that were handed and not read."""
    client = Broker().client
    return [id.decode() for key in client.scan_iter(standby_key("*")) for id in client.hvals(key) if id]


def stand_by(fleet: Workers) -> None:
    """Wait until all its processes do."""
    wait_until(lambda: len(standing_by()) == len(fleet.children()) > 0, "workers that stand by")


def ended(count: int) -> bool:
    return TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == count


def begun(path: Path) -> list[str]:
    """The ids of all runs, in their order."""
    return [line["id"] for line in history(path) if line["event"] == "stamp"]


def test_tasks_are_handed_to_whoever_has_rested_longest(tmp_path: Path) -> None:
    """Of two processes each is handed every second task; none was asked for."""
    with workers(tmp_path, "--processes", "2") as fleet:
        for count in range(1, 7):
            stand_by(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda count=count: ended(count), "the task")
    workers_of = [row.worker_ids for row in TaskRecord.objects.order_by("id")]
    assert all(first != second for first, second in itertools.pairwise(workers_of)), workers_of
    assert standing_by() == []


def test_what_was_handed_to_a_frozen_process_is_run_by_another(tmp_path: Path, history_path: Path) -> None:
    """Its supervisor lives, and renews nothing that it has not begun. When it wakes it lets go of the task."""
    (tmp_path / "other").mkdir()
    with workers(tmp_path, "--processes", "1") as frozen:
        stand_by(frozen)
        (pid,) = frozen.children()
        os.kill(pid, signal.SIGSTOP)
        try:
            task = tasks.stamp.enqueue()
            wait_until(lambda: handed() == [task.id], "the task in the hands of the frozen process")
            with workers(tmp_path / "other", "--processes", "1"):
                wait_until(lambda: ended(1), "the task", conf.current().lease_seconds + 15)
                os.kill(pid, signal.SIGCONT)
                wait_until(lambda: handed() == [], "its waking")
                wait_until(lambda: len(standing_by()) == 2, "both, which stand by again")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert begun(history_path) == [task.id]
    assert TaskRecord.objects.get(id=task.id).attempt == 1


def test_a_process_killed_as_it_stands_by_takes_nothing_along(tmp_path: Path, history_path: Path) -> None:
    """Whether Redis has noticed or not: no task waits for the end of a lease, which lasts a minute here."""
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LEASE="60") as fleet:
        for count in range(1, 4):
            stand_by(fleet)
            (pid,) = fleet.children()
            os.kill(pid, signal.SIGKILL)
            tasks.stamp.enqueue()
            wait_until(lambda count=count: ended(count), "the task", 20)
    assert len(begun(history_path)) == 3
    assert not list(Broker().client.scan_iter(f"{conf.current().key_prefix}:{{*}}:handed:*"))


def test_a_task_that_holds_the_interpreter_is_renewed_though_its_worker_cannot_say_that_it_has_it(
    tmp_path: Path,
) -> None:
    """It stands on the board. The other process would run it otherwise."""
    with workers(tmp_path, "--processes", "2") as fleet:
        stand_by(fleet)
        begun_at = time.monotonic()
        task = tasks.holds_gil.enqueue(2.5 * conf.current().lease_seconds)
        wait_until(lambda: handed() == [task.id], "the task in somebody's hands")
        wait_until(lambda: ended(1), "the task")
        assert time.monotonic() - begun_at > conf.current().lease_seconds
    row = TaskRecord.objects.get(id=task.id)
    assert (row.attempt, len(row.worker_ids)) == (1, 1)


def test_who_is_stopped_as_it_stands_by_leaves_nothing(tmp_path: Path, redis_client: Any, key_prefix: str) -> None:
    """Neither a task nor a key of its own."""
    with workers(tmp_path, "--processes", "2") as fleet:
        stand_by(fleet)
        tasks.stamp.enqueue()
        wait_until(lambda: ended(1), "the task")
        stand_by(fleet)
        assert fleet.stop() == 0
    tasks.stamp.enqueue()
    left = {key.decode() for key in redis_client.scan_iter(f"{key_prefix}*")}
    assert not [key for key in left if ":standby:" in key or ":handed:" in key or ":held:" in key]


def test_a_queue_that_was_removed_is_waited_for_no_longer(tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """Queues may come and go."""
    Broker().register_queue("gone")
    with workers(tmp_path, "--processes", "1"), redis.Redis.from_url(own_redis.url, protocol=2) as client:
        wait_until(lambda: client.info("clients")["blocked_clients"] == 2, "a wait for each queue")
        client.srem(queues_key(), "gone")
        wait_until(lambda: client.info("clients")["blocked_clients"] == 1, "the end of one of them")
        tasks.stamp.enqueue()
        wait_until(lambda: ended(1), "a task")


# --- one step of a worker, or of its supervisor


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A worker process whose main thread is the test's; nothing sleeps but the test."""
    _ours, theirs = multiprocessing.Pipe()
    found = WorkerProcess(WorkerOptions(concurrency=2, queues={"default": 1}), SlotTable(4), theirs)
    yield found
    found.fetching.standby.close()
    if found.fetching.watch is not None:
        found.fetching.watch.stop()


def take(process: WorkerProcess) -> Dequeued:
    """Enqueue a task and take it for the process, as if it had been handed."""
    tasks.stamp.enqueue()
    return process.broker.dequeue("default", process.worker_id, 1, conf.current().lease_seconds)


def test_what_was_handed_too_long_ago_is_not_begun(process: WorkerProcess, history_path: Path) -> None:
    """The process stood still after it began to wait: others may have the task by now."""
    process.fetching._receive("default", take(process), time.monotonic() - conf.current().lease_seconds)
    (job,) = process.threads.waiting
    assert not job.run.begun
    process.fetching._receive("default", take(process), time.monotonic())
    wait_until(lambda: len(begun(history_path)) == 1, "the other one's run")
    assert list(process.threads.waiting) == [job]


def test_who_runs_something_may_not_be_handed_a_task_and_is_woken_when_it_has_ended(process: WorkerProcess) -> None:
    """Its main thread sleeps meanwhile, and would else stand by only when it next looks."""
    assert process.fetching._may_stand_by()
    taken = take(process)
    job = Job(
        Run(lifecycle.load_rows(taken.leases)[taken.leases[0].id], taken.leases[0]), tasks.stamp, time.monotonic()
    )
    process.threads.busy.add(job)
    assert not process.fetching._may_stand_by()
    process._waits_until_idle = True
    process._slot_is_free()
    assert not process.alarm.wait(0)
    process.threads.busy.discard(job)
    process._slot_is_free()
    assert process.alarm.wait(0)
    process.fetching.turns.fail()
    process.fetching.turns.fail()
    assert not process.fetching._may_stand_by()


def test_who_has_taken_tasks_itself_stands_by_anew(process: WorkerProcess, history_path: Path) -> None:
    """Redis has forgotten that it did."""
    process.fetching.standby.stand_by(may_be_handed=True)
    process.fetching.standby.wait_for("other")
    assert not process.fetching.standby.could_stand_by
    tasks.stamp.enqueue()
    process.fetching.fetch()
    assert process.fetching.standby.could_stand_by
    wait_until(lambda: len(begun(history_path)) == 1, "the run")


def test_who_looks_for_what_it_holds_puts_back_what_was_moved_for_it(process: WorkerProcess) -> None:
    """A connection that ended between the two is its own."""
    keys = keys_of("default")
    process.broker.client.rpush(keys.handed(process.worker_id), "id")
    process.fetching._adopt("default")
    assert process.broker.client.lrange(keys.pending, 0, -1) == [b"id"]


def test_who_stops_gives_back_what_was_handed_at_the_last_moment(
    process: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its supervisor, which may be gone."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    process.reporter.start()
    process.fetching.standby.stand_by(may_be_handed=True)
    process.fetching.standby.wait_for("default")
    result = tasks.stamp.enqueue()
    wait_until(lambda: handed() == [result.id], "the task in its hands")
    process._shut_down(0)
    assert exits == [0]
    client, keys = process.broker.client, keys_of("default")
    assert client.lrange(keys.pending, 0, -1) == [result.id.encode()]
    assert not client.exists(standby_key(process.worker_id), keys.held(process.worker_id), keys.lease)


def test_a_queue_that_was_removed_is_left(process: WorkerProcess) -> None:
    """When its wait has ended; one that is known is waited for again."""
    for queue in ("default", "gone"):
        process.fetching.standby.wait_for(queue)
    while sockets := process.fetching.standby.sockets:
        for descriptor in select.select(list(sockets), [], [], 10)[0]:
            process.fetching.hear(sockets[descriptor])
    assert list(process.fetching.standby._links) == ["default"]
    assert process.fetching.waiting.pause_seconds() is not None


def test_a_supervisor_takes_back_what_a_dead_worker_was_to_be_handed() -> None:
    """First of all Redis hands it nothing more."""
    broker, keys = Broker(), keys_of("default")
    supervisor = Supervisor(WorkerOptions(queues={"default": 1}))
    broker.stand_by("", "w", may_be_handed=True)
    broker.client.rpush(keys.handed("w"), "id")
    board = SimpleNamespace(running=list)
    supervisor.recover(SimpleNamespace(worker_id="w", slot_table=board), -9)  # type: ignore[arg-type]
    assert standing_by() == []
    assert broker.client.lrange(keys.pending, 0, -1) == [b"id"]
