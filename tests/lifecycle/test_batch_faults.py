"""Batches whose worker processes are killed: every call succeeds, except the one that takes its process down."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from django_asyncq.models import FailureReason, TaskRecord, TaskState

from .. import batch_tasks
from ..workers import Workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


def left() -> int:
    """How many calls have not finished."""
    return TaskRecord.objects.filter(batch_size=None, finished_at__isnull=True).count()


def kill_one(fleet: Workers, chance: random.Random) -> None:
    """Kill a worker process that may run a batch."""
    pids = wait_until(fleet.children, "a worker process")
    with suppress(ProcessLookupError):  # the poison was faster
        os.kill(chance.choice(pids), signal.SIGKILL)


def check(count: int, kills: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calls, one of which kills its process, while processes are killed from outside."""
    slow = tmp_path / "slow"
    slow.touch()
    monkeypatch.setenv("ASYNCQ_TEST_SLOW", str(slow))
    poison = batch_tasks.poisoned.enqueue(poison=True)
    batch_tasks.poisoned.enqueue_many([{"number": number} for number in range(count - 1)])
    chance = random.Random(7)
    with workers(tmp_path, "--processes", "2", "--concurrency", "2") as fleet:
        for _ in range(kills):
            before = left()
            wait_until(lambda before=before: left() < before or before == 0, "a batch that has finished", seconds)
            kill_one(fleet, chance)
        slow.unlink()
        wait_until(lambda: not left(), "the end of all calls", seconds)
        fleet.stop()
    states = Counter(TaskRecord.objects.filter(batch_size=None).values_list("state", flat=True))
    assert states == {TaskState.SUCCEEDED: count - 1, TaskState.FAILED: 1}
    poison.refresh()
    row = TaskRecord.objects.get(id=poison.id)
    assert (row.state, row.reason) == (TaskState.FAILED, FailureReason.WORKER_LOST)
    assert not TaskRecord.objects.filter(batch_size__isnull=False, finished_at__isnull=True).exists()


def test_one_poisonous_call_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 calls, four kills: 299 succeed."""
    begun = time.monotonic()
    check(300, 4, 40, tmp_path, monkeypatch)
    print(f"{time.monotonic() - begun:.1f} s")


@pytest.mark.long
def test_one_poisonous_call_of_ten_thousand_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 calls, 20 kills: 9,999 succeed."""
    check(10_000, 20, 300, tmp_path, monkeypatch)
