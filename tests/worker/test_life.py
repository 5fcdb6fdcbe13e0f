"""What a project does at the start and at the end of a worker process: its signals, and its exit functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker.life import EXIT_SECONDS

from .. import isolated_tasks, tasks
from ..workers import history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tasks and receivers note what they do."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def told(path: Path) -> dict[int, list[str]]:
    """What each worker process has done, in its order, by its pid."""
    lines = history(path)
    processes = [line["pid"] for line in lines if line["event"] == "started"]
    return {pid: [line["event"] for line in lines if line["pid"] == pid] for pid in processes}


def succeeded() -> int:
    return TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count()


@pytest.mark.parametrize(
    "options",
    [["--burst"], ["--max-tasks", "3"], ["--max-memory-mb", "1"], []],
    ids=["burst", "tasks", "memory", "stop"],
)
def test_a_process_that_ends_in_order_says_goodbye(options: Sequence[str], tmp_path: Path, history_path: Path) -> None:
    """Whatever ends it: the receivers are called around its tasks, then its exit functions."""
    for _ in range(9):
        tasks.nap.enqueue(0)
    with workers(tmp_path, "--processes", "1", "--concurrency", "1", *options, ASYNCQ_TEST_LIFE="well") as fleet:
        wait_until(lambda: succeeded() == 9, "nine tasks")
        if "--burst" in options:
            assert fleet.process.wait(60) == 0, fleet.output()
    lives = told(history_path)
    assert len(lives) >= (3 if "--max-tasks" in options else 1)
    for events in lives.values():
        assert events[0] == "started" and events[-2:] == ["stopping", "at exit"], events
        assert not {"started", "stopping", "at exit"}.intersection(events[1:-2])


def test_the_process_of_an_isolated_task_says_that_it_runs_one(tmp_path: Path, history_path: Path) -> None:
    """So that a receiver can leave it without what only many tasks need."""
    isolated_tasks.plain.enqueue("returns", 1)
    with workers(tmp_path, "--processes", "1", "--queues", "default", ASYNCQ_TEST_LIFE="well"):
        wait_until(lambda: succeeded() == 1, "the task")
    lines = history(history_path)
    started = [(line["runs_one_task"], line["queues"]) for line in lines if line["event"] == "started"]
    assert Counter(one for one, _ in started) == {True: 1, False: 1}
    assert all(queues == ["default"] for one, queues in started if not one)
    assert Counter(events[-1] for events in told(history_path).values()) == {"at exit": 2}


def test_receivers_that_fail_change_nothing(tmp_path: Path, history_path: Path) -> None:
    """Not even with an error that would end a thread."""
    tasks.add.enqueue(1)
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LIFE="fails") as fleet:
        wait_until(lambda: succeeded() == 1, "the task")
        assert fleet.stop() == 0
        assert fleet.output().count("a receiver of a signal about it has failed") == 2
    assert [events[-1] for events in told(history_path).values()] == ["at exit"]


@pytest.mark.slow
def test_a_receiver_that_hangs_is_given_up(tmp_path: Path, history_path: Path) -> None:
    """The process exits all the same, before its supervisor kills it."""
    tasks.add.enqueue(1)
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LIFE="hangs") as fleet:
        wait_until(lambda: succeeded() == 1, "the task")
        asked_at = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - asked_at >= EXIT_SECONDS
        assert "exits before its exit functions" in fleet.output()
        assert "killed" not in fleet.output()
    assert [events[-1] for events in told(history_path).values()] == ["stopping"]
