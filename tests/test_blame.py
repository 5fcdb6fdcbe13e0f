"""Who is to blame when a worker process dies: the task that took it down, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_asyncq.models import TaskRecord, TaskState

from . import tasks
from .workers import history, run_workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def history_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the tasks leave a line each time they begin."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def record_of(result: Any) -> TaskRecord:
    return TaskRecord.objects.get(id=result.id)


def begun(path: Path, event: str = "begin") -> list[str]:
    return [line["id"] for line in history(path) if line["event"] == event]


def test_poison_beside_three_sleepers_fails_alone(history_path: Path) -> None:
    """One process with four slots: the poison is FAILED after three losses alone, and the sleepers succeed."""
    sleepers = [tasks.nap.enqueue(1.0) for _ in range(3)]
    poison = tasks.dies.enqueue()
    run_workers("--concurrency", "4")
    record = record_of(poison)
    assert (record.state, record.crash_count, record.attempt) == (TaskState.FAILED, 3, 0)
    messages = [error["message"] for error in record.errors]
    assert "lost together with 3 others" in messages[0]
    assert ["lost alone" in message for message in messages] == [False, True, True, True]
    assert all("SIGKILL" in message and "MB of memory" in message for message in messages[1:])
    for sleeper in map(record_of, sleepers):
        assert (sleeper.state, sleeper.crash_count, sleeper.attempt) == (TaskState.SUCCEEDED, 0, 1)
        assert not sleeper.is_suspect
        assert "lost together with 3 others" in sleeper.errors[0]["message"]
        assert sleeper.worker_ids[-1].endswith("-alone")
