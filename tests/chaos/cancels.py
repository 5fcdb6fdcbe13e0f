"""`cancels` of `tests.chaos.producer`: cancel what it has enqueued, in every phase of a task's life."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.db import transaction

from django_asyncq import GateUnavailable, QueueFull
from django_asyncq.models import TaskRecord, TaskState
from tests.tasks import note

from . import tasks

GATE = "cancelled"
BODIES = (tasks.stops, tasks.stops_async, tasks.stops_isolated)
# Long enough that a body is cancelled in its middle.
BODY_MS = 6000.0
# How long a phase waits for its moment; a kill or a FLUSHALL may come in between.
PATIENCE_SECONDS = 15.0
OPEN_SECONDS = 1.0
AT_ONCE = 4


def cancels(each: str, seed: str) -> None:
    """Cancel at least `each` tasks in each phase, in random order; note what the cancel answered, after its commit."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    while left := [phase for phase in PHASES if done[phase] < int(each)]:
        phase = chance.choice(left)
        done[phase] += PHASES[phase](chance)


def _enqueue(task: Any, **options: Any) -> Any:
    """Enqueue a task at the gate; ask a full or unreachable gate again."""
    while True:
        try:
            result = task.using(gate=GATE, **options).enqueue(BODY_MS)
            break
        except (QueueFull, GateUnavailable):
            time.sleep(0.02)
    note("committed", ids=[str(result.id)])
    return result


def _cancel(result: Any, phase: str) -> str:
    word: str = result.cancel(reason="chaos")
    note("cancelled", id=str(result.id), word=word, phase=phase)
    return word


def _queued(chance: random.Random) -> int:
    """One that waits for its time, or for a worker."""
    options = {"run_after": timedelta(hours=1)} if chance.random() < 0.5 else {}
    return _cancel(_enqueue(chance.choice(BODIES), **options), "queued") == "cancelled"


def _taken(chance: random.Random) -> int:
    """One whose body has begun, while its row says QUEUED still."""
    with new_lines() as read:
        result = _enqueue(chance.choice(BODIES))
        begun = f'"begin", "id": "{result.id}"'
        if not _within(lambda: any(begun in line for line in read())):
            return _give_up(result)
        return _cancel(result, "taken, row QUEUED") == "asked"


def _running(chance: random.Random) -> int:
    result = _enqueue(chance.choice(BODIES))
    if not _within(lambda: _row(result).filter(state=TaskState.RUNNING).exists()):
        return _give_up(result)
    time.sleep(chance.uniform(0, 0.3))
    return _cancel(result, "running") == "asked"


def _retrying(chance: random.Random) -> int:
    result = _enqueue(tasks.fails_for_long)
    if not _within(lambda: _row(result).filter(retry_at__isnull=False).exists()):
        return _give_up(result)
    return _cancel(result, "retrying") == "cancelled"


def _open(chance: random.Random) -> int:
    """Some in one transaction that stays open; workers go on meanwhile, as far as the database lets them."""
    results = [_enqueue(chance.choice(BODIES)) for _ in range(AT_ONCE)]
    time.sleep(chance.uniform(0, 0.3))
    with transaction.atomic():
        words = [result.cancel(reason="chaos") for result in results]
        time.sleep(OPEN_SECONDS)
    for result, word in zip(results, words, strict=True):
        note("cancelled", id=str(result.id), word=word, phase="canceller's transaction open")
    return sum(word in ("cancelled", "asked") for word in words)


PHASES: dict[str, Callable[[random.Random], int]] = {
    "queued": _queued,
    "taken, row QUEUED": _taken,
    "running": _running,
    "retrying": _retrying,
    "canceller's transaction open": _open,
}


def _give_up(result: Any) -> int:
    """Its moment did not come; it must not run for long."""
    _cancel(result, "none")
    return 0


def _row(result: Any) -> Any:
    return TaskRecord.objects.filter(id=result.id)


def _within(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


@contextmanager
def new_lines() -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the lines written into the history since its last call."""
    with open(os.environ["ASYNCQ_TEST_HISTORY"]) as file:  # noqa: PTH123
        file.seek(0, os.SEEK_END)
        rest = ""

        def read() -> list[str]:
            nonlocal rest
            *lines, rest = (rest + file.read()).split("\n")
            return [line for line in lines if line and json.loads(line)]

        yield read
