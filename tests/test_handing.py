"""Workers that stand by, as whole processes: what was handed to one that cannot begin it is run by another."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from django_asyncq import conf
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import standby_key
from django_asyncq.models import TaskRecord, TaskState

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
