"""Tasks that wait for each other, while producers, workers and people change them at the same time.

Producers put children behind tasks that are just finishing, workers record many ends together, people cancel, retry and
delete. Afterwards all tasks must finish: one that was not counted would wait for ever.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.backend import Node
from django_asyncq.broker import Broker
from django_asyncq.core import compat
from django_asyncq.core.after import After, Parent
from django_asyncq.core.names import uuid7
from django_asyncq.exceptions import InvalidOption
from django_asyncq.fleet import reconciler, repairs
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import TaskEdge, TaskRecord, TaskState

from .. import workflow_tasks as tasks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time"),
]

SECONDS = 6.0
MOST_ROWS = 1500


@pytest.fixture(autouse=True)
def quiet(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leases do not expire, young rows are repaired, and what is cancelled is not logged."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1200, "PUSH_BATCH_SECONDS": 0}
    for module in (reconciler, repairs):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Crowd:
    """Threads that do the same again and again until the time is over. errors: what nobody expects."""

    def __init__(self) -> None:
        self.until = time.monotonic() + SECONDS
        self.errors: list[BaseException] = []
        self.deadlocks = 0

    def start(self, act: Callable[[random.Random], object], seed: int) -> threading.Thread:
        thread = threading.Thread(target=self._repeat, args=(act, random.Random(seed)))
        thread.start()
        return thread

    def _repeat(self, act: Callable[[random.Random], object], chance: random.Random) -> None:
        try:
            while time.monotonic() < self.until:
                try:
                    act(chance)
                except OperationalError:
                    # A deadlock: the database has chosen this one, which does it again.
                    self.deadlocks += 1
                except InvalidOption as error:
                    # A parent was deleted at this moment.
                    if "which has no row here" not in str(error):
                        raise
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.errors.append(error)
        finally:
            connection.close()


def produce(chance: random.Random) -> None:
    """A few tasks behind each other, and behind some of the newest."""
    if TaskRecord.objects.count() > MOST_ROWS:
        time.sleep(0.05)
        return
    there = [Parent(id, "default") for id in TaskRecord.objects.order_by("-id").values_list("id", flat=True)[:12]]
    nodes: list[Node] = []
    for number in range(chance.randint(1, 5)):
        known = there + [Parent(node.id, "default") for node in nodes]
        parents = tuple(chance.sample(known, min(len(known), chance.randint(0, 3))))
        task: Any = tasks.total.using(after_failure=chance.choice(["fail", "run"]) if parents else "fail")
        after = (After("", parents, is_list=False),) if parents else ()
        nodes.append(Node(uuid7(), task, (), {"rows": [number]}, after))
    backend: Any = compat.task_backends["default"]
    backend.enqueue_steps(nodes)


def work(chance: random.Random) -> None:
    """Claim some, and record their ends together, as often as the database asks for it."""
    worker_id = f"w{chance.random()}"
    runs = lifecycle.claim(Broker(), "default", worker_id, chance.randint(1, 20), "default").runs
    for run in runs:
        lifecycle.begin(run, worker_id, timezone.now())
        if chance.random() < 0.1:
            lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=None)
        else:
            lifecycle.succeed(run, 1, timezone.now())
    if not runs:
        return
    left = runs
    while left:
        try:
            lost, locked = lifecycle.record_unlocked(left)
        except OperationalError:
            continue
        done = [run for run in left if run not in locked]
        lifecycle.acknowledge(Broker(), worker_id, done, lost)
        lifecycle.settle_lost(Broker(), lost)
        left = [run for run in left if run in locked]


def interfere(chance: random.Random) -> None:
    """Cancel, retry or delete one of the newest."""
    ids = list(TaskRecord.objects.order_by("-id").values_list("id", flat=True)[:30])
    if not ids:
        return
    act = chance.randint(0, 9)
    if act < 3:
        lifecycle.cancel(chance.sample(ids, min(len(ids), 3)))
    elif act < 9:
        failed = list(TaskRecord.objects.failed().order_by("-id").values_list("id", flat=True)[:30])
        lifecycle.retry(chance.sample(failed, min(len(failed), 5)), by_person=True)
    else:
        TaskRecord.objects.filter(id=chance.choice(ids)).delete()
    time.sleep(0.02)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_waits_for_ever_after_a_crowd(seed: int) -> None:
    """However the ends, the new children and the people meet."""
    crowd = Crowd()
    acts = [produce, produce, work, work, work, interfere]
    for thread in [crowd.start(act, 100 * seed + number) for number, act in enumerate(acts)]:
        thread.join(120)
    assert not crowd.errors
    check()
    broker = Broker("worker")
    broker.mark_alive()
    repair = Reconciler(broker)
    for _ in range(200):
        lifecycle.close_cancelled()
        repair.quick_repairs()
        repair.sweep()
        chance = random.Random(seed)
        work(chance)
        if not TaskRecord.objects.filter(finished_at=None).exists():
            break
    left = list(TaskRecord.objects.filter(finished_at=None).values_list("id", "state", "waits_for"))
    assert not left, f"never finished: {left}"
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() > 50


def check() -> None:
    """Each task that waits does so for as many as have not finished."""
    found = {record.id: record for record in TaskRecord.objects.all()}
    edges: dict[Any, set[Any]] = {}
    for parent, child in TaskEdge.objects.values_list("parent_id", "child_id"):
        edges.setdefault(child, set()).add(parent)
    wrong = [
        (id, record.waits_for, still_open)
        for id, record in found.items()
        if record.waits_for_tasks
        and record.waits_for
        != (still_open := sum(not found[each].is_final for each in edges.get(id, ()) if each in found))
    ]
    assert not wrong, wrong
