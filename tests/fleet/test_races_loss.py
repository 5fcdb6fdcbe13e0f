"""From the kill of a worker process to the moment at which what it ran has begun again."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import pytest

from django_asyncq.models import TaskRecord, TaskState

from .. import tasks
from ..workers import history, wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

SLOTS, KILLS = 8, 10


@pytest.mark.timeout(0)
@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_killed_process_ran_begins_again_within_a_second(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten kills of a process with eight slots of tasks of 60 s: p50 is 1 s and p95 3 s at most, on a quiet machine."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    waited: list[float] = []
    for _ in range(KILLS):
        waited += seconds_until_again(tmp_path, path, processes)
        assert not TaskRecord.objects.exclude(state=TaskState.RUNNING).exists()
        assert not TaskRecord.objects.exclude(crash_count=0).exists()
    percent = quantiles(waited, n=100)
    text = f"{len(waited)} tasks: p50 {percent[49]:.2f} s, p95 {percent[94]:.2f} s, most {max(waited):.2f} s"
    print(f"{processes} processes, load {os.getloadavg()[0]:.0f}: {text}")
    assert (percent[49] <= 1, percent[94] <= 3) == (True, True), text


def seconds_until_again(folder: Path, path: Path, processes: int) -> list[float]:
    """Kill a process with tasks; return after how many seconds each of them has begun again."""
    path.unlink(missing_ok=True)
    TaskRecord.objects.all().delete()
    with workers(folder, "--processes", str(processes), "--concurrency", str(SLOTS)) as fleet:
        for _ in range(SLOTS):
            tasks.nap.enqueue(60)
        wait_until(lambda: len(history(path)) == SLOTS, "eight tasks that run", 120)
        begun = history(path)
        victim = Counter(line["pid"] for line in begun).most_common(1)[0][0]
        lost = {line["id"] for line in begun if line["pid"] == victim}
        wait_until(lambda: not TaskRecord.objects.exclude(state=TaskState.RUNNING).exists(), "rows that say so", 120)
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(history(path)) == SLOTS + len(lost), "the lost tasks again", 300)
        again = history(path)[SLOTS:]
        assert {line["id"] for line in again} == lost
        wait_until(lambda: not TaskRecord.objects.exclude(state=TaskState.RUNNING).exists(), "rows that say so", 120)
        for pid in (fleet.process.pid, *fleet.children()):
            os.kill(pid, signal.SIGKILL)
    return [line["at"] - killed_at for line in again]
