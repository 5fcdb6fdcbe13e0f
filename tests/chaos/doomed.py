"""Producers that die at a failpoint, in forks, and the mixed load that goes on beside them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.db import connections, transaction

from django_asyncq import GateUnavailable, QueueFull, gates
from django_asyncq.broker import clients
from django_asyncq.models import TaskRecord
from django_asyncq.testing import failpoints
from django_asyncq.testing.crashes import KillAt
from tests.tasks import note

from . import tasks

TRIES = 40


def _note_committed(*ids: object) -> None:
    note("committed", ids=[str(id) for id in ids])


def two_queues(name: str, chance: random.Random, **options: Any) -> None:
    """Two tasks of one gate in two queues, in one transaction."""
    with transaction.atomic():
        gated = [tasks.gated.using(queue_name=queue, **options) for queue in ("one", "two")]
        ids = [task.enqueue(name, chance.uniform(0, 20)).id for task in gated]
    _note_committed(*ids)


def for_later(name: str, chance: random.Random) -> None:
    """The same, to be run in a moment: their slots are confirmed apart."""
    two_queues(name, chance, run_after=timedelta(seconds=0.2))


def one_after_the_other(name: str, chance: random.Random) -> None:
    """Three tasks, with and without a gate, of which a thread pushes all but the first."""
    for task in (tasks.gated, tasks.work, tasks.gated):
        _note_committed(task.enqueue(name, 0).id if task is tasks.gated else task.enqueue(0).id)


def many(name: str, chance: random.Random) -> None:
    """More tasks than one call of a script takes."""
    _note_committed(*(result.id for result in tasks.work.enqueue_many([(0,)] * 250)))


def lose_the_slot(name: str, chance: random.Random) -> None:
    """A task whose slot goes to a stranger before the commit."""
    with transaction.atomic():
        result = tasks.gated.using(queue_limit=1).enqueue(name)
        gates.release([TaskRecord.objects.get(id=result.id)])
        gates.acquire([TaskRecord(gate=name, queue_limit=1)])
    _note_committed(result.id)


def delete(name: str, chance: random.Random) -> None:
    """A queued task that a person deletes."""
    result = tasks.gated.enqueue(name, 0)
    note("deleted", ids=[str(result.id)])
    TaskRecord.objects.filter(id=result.id).first().delete()  # type: ignore[union-attr]


Scene = Callable[[str, random.Random], None]
SCENES: dict[str, Scene] = {
    "build.gate_built": two_queues,
    "enqueue.slot_acquired": two_queues,
    "enqueue.row_inserted": two_queues,
    "enqueue.committed": two_queues,
    "dispatch.slots_confirmed": for_later,
    "dispatch.queue_pushed": two_queues,
    "push_batch.collected": one_after_the_other,
    "enqueue.pushed": two_queues,
    "broker.batch_sent": many,
    "park.row_written": lose_the_slot,
    "delete.committed": delete,
}
# More of these in one child would leave more than the fleets get done.
ONCE = {"broker.batch_sent", "park.row_written"}


def doomed(times: str, pause_ms: str, seed: str) -> None:
    """Fork a child for each point and turn, which dies there; write down that it did."""
    chance = random.Random(seed)
    turns = [point for point in SCENES for _ in range(int(times))]
    chance.shuffle(turns)
    connections.close_all()
    for number, point in enumerate(turns):
        nth = 1 if point in ONCE else chance.randint(1, 4)
        child = os.fork()
        if child == 0:
            _die_at(point, nth, f"{os.getpid()}-{number}", chance)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            note("fault", kind=point, pids=[child])
        time.sleep(float(pause_ms) / 1000)


def _die_at(point: str, nth: int, name: str, chance: random.Random) -> None:
    clients.reset_clients()
    failpoints.arm(KillAt(point, nth))
    try:
        for turn in range(TRIES):
            # A gate that is new each time is built each time.
            SCENES[point](f"doomed-{name}-{turn}", chance)
    finally:
        os._exit(3)


def mixed(seconds: str, pause_ms: str, seed: str) -> None:
    """Some of everything: short and long tasks, async ones, tasks of a gate, retries, in several queues."""
    chance = random.Random(seed)
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        # Whom a gate refuses now, the next turn may admit.
        with suppress(QueueFull, GateUnavailable):
            _something(chance)
        time.sleep(chance.uniform(0, 2 * float(pause_ms)) / 1000)


def _something(chance: random.Random) -> None:
    kind = chance.random()
    if kind < 0.1:
        _note_committed(tasks.flaky.enqueue(chance.randint(2, 3)).id)
    elif kind < 0.3:
        two_queues(f"mixed-{chance.randrange(4)}", chance)
    elif kind < 0.5:
        _note_committed(tasks.work_async.enqueue(chance.uniform(0, 300)).id)
    elif kind < 0.7:
        _note_committed(tasks.work.enqueue(chance.uniform(60, 400)).id)
    elif kind < 0.8:
        _note_committed(tasks.work_at_once.enqueue(chance.uniform(0, 20)).id)
    else:
        _note_committed(*(tasks.work.using(queue_name="three").enqueue(chance.uniform(0, 20)).id for _ in range(2)))
