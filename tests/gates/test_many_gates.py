"""A thousand gates at which calls wait, four worker processes, kills, an emptied Redis, limits changed meanwhile.

ASYNCQ_TEST_GATES (default 1,000) says how many gates. What ran at the same time is counted from the tasks' own records.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from django_asyncq import gates
from django_asyncq.models import Gate, TaskRecord
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..workers import history, wait_until, workers
from .test_gate import most_at_once
from .test_waiters import runs, strike

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.timeout(3600)]

GATES = int(os.environ.get("ASYNCQ_TEST_GATES", "1000"))
CALLS = 6
ROUNDS = 10
# The limits of a gate go from the first to the second and back.
LOW, HIGH = 1, 2


def test_the_limits_of_many_gates_hold_and_all_end(
    own_redis: EmbeddedRedis, own_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call runs to its end, and at no gate more at once than its highest limit."""
    path = tmp_path / "history"
    path.touch()
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    task = tasks.gated.using(queue_limit=LOW, on_full="wait", expected_seconds=1)
    for number in range(GATES):
        task.enqueue_many([(f"many-{number}", 0.02)] * CALLS)
    gate_of = {str(id): gate for id, gate in TaskRecord.objects.values_list("id", "gate")}
    assert TaskRecord.objects.waiting_at_gate().count() == GATES * (CALLS - LOW)
    begun_at = time.monotonic()
    with workers(tmp_path, "--processes", "4") as running:
        for number in range(ROUNDS):
            wanted = len(gate_of) * (number + 1) // (ROUNDS + 2)
            wait_until(lambda wanted=wanted: len(history(path)) >= 2 * wanted, "runs", 600)  # type: ignore[misc]
            strike(running, "everything")
            # Raised in one round, lowered in the next.
            for each in range(number - number % 2, GATES, ROUNDS):
                if number % 2:
                    Gate.objects.filter(name=f"many-{each}").delete()
                else:
                    Gate.objects.get_or_create(name=f"many-{each}", defaults={"limit": HIGH, "expected_seconds": 1})
        wait_until(lambda: TaskRecord.objects.succeeded().count() == len(gate_of), "the end of all", 1200)
        seconds = time.monotonic() - begun_at
        wait_until(lambda: not gates.waiting_gates(), "empty lines", 120)
    most = most_at_each(path, gate_of)
    repeated = len(history(path)) / 2 - len(gate_of)
    print(f"\n{GATES} gates, {len(gate_of)} calls in {seconds:.0f} s; at once at a gate: {max(most.values())}; ")
    print(f"runs cut by kills or repeated: about {repeated:.0f}")
    assert len(most) == GATES
    assert max(most.values()) <= HIGH
    never_raised = [gate for gate in most if not is_raised(int(gate.rpartition("-")[2]))]
    assert all(most[gate] <= LOW for gate in never_raised)


def is_raised(number: int) -> bool:
    """Whether the limit of a gate was raised in some round."""
    return number % ROUNDS % 2 == 0


def most_at_each(path: Path, gate_of: dict[str, str]) -> dict[str, int]:
    """Return how many calls of each gate ran at once. A kill leaves begins without their ends, which do not count."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    open_begins: dict[tuple[str, int], dict[str, Any]] = {}
    for line in runs(path):
        run = line["id"], line["pid"]
        if line["event"] == "in":
            open_begins[run] = line
        elif (begin := open_begins.pop(run, None)) is not None:
            lines[gate_of[line["id"]]] += [begin, line]
    return {gate: most_at_once(sorted(found, key=lambda line: line["at"])) for gate, found in lines.items()}
