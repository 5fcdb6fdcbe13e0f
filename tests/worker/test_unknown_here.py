"""A worker leaves a task that its code does not have to the workers whose code has it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, servers
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.models import TaskRecord, TaskState

from .. import tasks
from ..workers import history, wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_keys")]

QUEUE = "default"
OLD, OTHER_OLD, NEW = "a" * 16, "b" * 16, "c" * 16


def worker_of(code: str) -> Broker:
    """The broker of a worker with this code."""
    broker = Broker()
    broker.code = code
    return broker


def claim(code: str, count: int = 10) -> list[lifecycle.Run]:
    """Claim tasks as a worker with this code."""
    return lifecycle.claim(worker_of(code), QUEUE, f"w:{code}", count, "default").runs


def leave(code: str, runs: list[lifecycle.Run]) -> None:
    """Leave tasks to workers with other code."""
    lifecycle.leave_to_others(worker_of(code), f"w:{code}", runs, 15)


def ids(runs: list[lifecycle.Run]) -> list[str]:
    """The ids of runs, in their order."""
    return [str(run.record.id) for run in runs]


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_what_is_left_to_others_keeps_its_place_and_keeps_nobody_waiting(priority: int) -> None:
    """The same code passes over it and takes what is behind; other code gets all in their order."""
    first = [tasks.add.using(priority=priority).enqueue(number) for number in range(3)]
    leave(OLD, claim(OLD))
    behind = tasks.add.using(priority=priority).enqueue(3)
    assert ids(claim(OLD)) == [behind.id]
    dequeued = worker_of(OLD).dequeue(QUEUE, "w", 10, 30)
    assert (dequeued.leases, dequeued.paused, dequeued.is_drained) == ([], True, False)
    runs = claim(NEW)
    assert ids(runs) == [each.id for each in first]
    assert {run.record.attempt for run in runs} == {0}


def test_two_codes_that_do_not_know_a_task_do_not_pass_it_to_and_fro() -> None:
    """Each takes it once, until the time is over."""
    result = tasks.add.enqueue(1)
    for code in (OLD, OTHER_OLD):
        leave(code, claim(code))
    assert [claim(OLD), claim(OTHER_OLD)] == [[], []]
    key = QueueKeys(QUEUE).task(result.id)
    Broker().client.hset(key, "left_until", f"{int(time.time()) - 1} {OLD} {OTHER_OLD}")
    (run,) = claim(OLD)
    leave(OLD, [run])
    assert ids(claim(OTHER_OLD)) == [result.id]


def test_a_task_that_is_left_to_others_wakes_no_worker_again_and_again() -> None:
    """One that does not know it takes its token, and passes none on."""
    tasks.add.enqueue(1)
    leave(OLD, claim(OLD))
    broker, keys = worker_of(OLD), QueueKeys(QUEUE)
    broker.client.delete(keys.wake)
    assert claim(OLD) == []
    assert (broker.client.llen(keys.pending), broker.client.llen(keys.wake)) == (1, 0)


def test_patience_begins_anew_when_nobody_knows_a_task_any_more() -> None:
    """The time in which somebody knew it does not count."""
    tasks.add.enqueue(1)
    runs = claim(OLD)
    lifecycle.postpone(Broker(), f"w:{OLD}", runs, 0)
    key = QueueKeys(QUEUE).task(str(runs[0].record.id))
    Broker().client.hset(key, "parked_at", int(time.time()) - 599)
    Broker().forward(QUEUE, "scheduled")
    leave(OLD, claim(OLD))
    assert lifecycle.postpone(Broker(), f"w:{NEW}", (again := claim(NEW)), 15) == {again[0].record.id: 0}


def test_tasks_that_only_new_code_has_begin_there_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """Though the old worker is idle and first in line; it postpones none and does not spin."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with workers(tmp_path / "old", ASYNCQ_TEST_OLD_CODE="1") as old:
        wait_until(lambda: len(servers.workers()) == 1, "the old worker")
        with workers(tmp_path / "new") as new:
            wait_until(lambda: len(servers.workers()) == 2, "the heartbeat of the new worker")
            wait_until(lambda: "Ready." in new.output(), "the new worker")
            began = time.monotonic()
            results = [tasks.new_task.enqueue() for _ in range(50)]
            # A task that is postponed waits for 15 s.
            wait_until(lambda: len(history(path)) == 50, "fifty tasks that begin", 14)
            print(f"after {max(line['at'] for line in history(path)) - began:.2f} s")
            assert {line["pid"] for line in history(path)} == set(new.children())
            known = tasks.nap.enqueue(0)
            wait_until(lambda: TaskRecord.objects.succeeded().count() == 51, "all tasks")
        assert "postponed" not in old.output()
        assert old.output().count("tasks left to workers") <= 50
    assert known.id not in {result.id for result in results}
    assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()
