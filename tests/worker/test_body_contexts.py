"""No body, and no receiver, sees a context variable that another run has set."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from django_asyncq.models import TaskRecord, TaskState

from .. import context_tasks as tasks
from ..workers import history, run_workers

KINDS = [tasks.looks_in_the_loop, tasks.looks, tasks.looks_in_what_it_returns]
ROUNDS = 30


@pytest.mark.django_db(transaction=True)
def test_no_run_sees_a_variable_that_another_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of every kind are taken over by one run after the other: after a success, a timeout and a cancel too."""
    path = tmp_path / "history.jsonl"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    # One kind after the other: a task that waits for its slot is started by the one that leaves it.
    for each in KINDS:
        each.enqueue_many([()] * ROUNDS)
    for _ in range(3):
        for each in (tasks.looks_for_too_long, tasks.looks_until_asked):
            each.enqueue()
            tasks.looks_in_the_loop.enqueue_many([()] * 5)
    tasks.looks_in_a_batch.enqueue_many([(each,) for each in range(ROUNDS)])
    tasks.looks_isolated.enqueue_many([(), ()])
    tasks.cancels.enqueue(tasks.looks_until_cancelled.enqueue().id)
    run_workers("--processes", "1", "--concurrency", "3", ASYNCQ_TEST_CONTEXTS="1")
    lines = [line for line in history(path) if line["event"] == "seen"]
    assert [line for line in lines if line["seen"] not in ("", line["own"])] == []
    looks = Counter(line["where"] for line in lines)
    assert (looks["def"], looks["async def"], looks["sync_to_async"]) == (ROUNDS, 2 * ROUNDS + 30, 2 * ROUNDS + 30)
    assert (looks["isolated"], looks["timeout"], looks["soft timeout"], looks["cancelled"]) == (2, 3, 3, 1)
    assert looks["batch"] >= ROUNDS / 3
    assert {"run_started", "run_ended", "task_finished", "task_failed", "task_state_changed"} <= set(looks)
    # What a run has set itself, it sees: in the thread of `sync_to_async`, and in the receiver of its end.
    own = {line["where"] for line in lines if line["seen"] == line["own"]}
    assert own == {"sync_to_async", "run_ended"}
    failed = TaskRecord.objects.filter(state=TaskState.FAILED)
    assert failed.count() == 7
