"""What the guide says of a pause is true at its return: real workers that pick tasks up meanwhile. Takes minutes.

A queue, a gate and each of many task names are paused while a producer enqueues without end. `python runtests.py -s -m
long tests/lifecycle/test_races_pauses.py` prints the counts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from django_asyncq.broker import Broker
from django_asyncq.control import pause, pauses, resume
from django_asyncq.exceptions import EnqueueRefused
from django_asyncq.models import TaskRecord
from django_asyncq.observe.inspector import Inspector
from django_asyncq.observe.still_running import held_of

from .. import acl, paused_tasks, tasks
from ..workers import history, wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.timeout(3600)]

Q = "default"
# A busy machine needs half a minute to start workers.
PATIENCE_SECONDS = 120.0
# How long the history is looked at after a return: bodies that begin in spite of it do so within milliseconds.
LOOK_SECONDS = 0.1


def trials() -> int:
    """300, and 100 where writers wait for each other."""
    return 100 if connection.vendor == "sqlite" else 300


@contextmanager
def producer(enqueue: Callable[[], Any]) -> Iterator[None]:
    """Enqueue every few milliseconds in a thread until the block ends."""
    over = threading.Event()

    def produce() -> None:
        while not over.is_set():
            with suppress(EnqueueRefused, OperationalError):
                enqueue()
            time.sleep(random.uniform(0, 0.01))
        connections.close_all()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_SECONDS)


class Bodies:
    """What the bodies have written. Lines are read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after(self, moment: float) -> list[dict[str, Any]]:
        """Return what bodies wrote after a moment, once they have had time to."""
        time.sleep(LOOK_SECONDS)
        found = [each for each in history(self.path) if each["at"] > moment]
        self.path.write_text("")
        return found


@pytest.mark.parametrize("kind", ["queue", "gate"])
def test_nothing_begins_but_what_was_taken_and_nothing_after_the_wait(kind: str, tmp_path: Path) -> None:
    """A plain pause: what begins after it had been taken. After the wait: no body begins, runs or ends."""
    name = Q if kind == "queue" else "g"
    part: Any = Inspector().queues if kind == "queue" else Inspector().gates
    path = tmp_path / "history"
    bodies, taken_late, untaken, after_wait = Bodies(path), 0, 0, 0
    with workers(tmp_path, "--concurrency", "3", ASYNCQ_TEST_HISTORY=str(path)):
        tasks.nap.enqueue(0.0)
        wait_until(lambda: history(path), "first body", PATIENCE_SECONDS)
        for _ in range(trials()):
            seconds = random.choice([0.0, 0.0, 0.005, 0.03])
            make = tasks.nap.enqueue if kind == "queue" else lambda seconds: tasks.gated.enqueue(name, seconds)
            with producer(lambda make=make, seconds=seconds: make(seconds)):  # type: ignore[misc]
                time.sleep(random.uniform(0.0, 0.08))
                assert pause(kind, name)
                held = held_of(kind, name, Q)
                looked_at = time.monotonic()
                part.pause(name, wait=PATIENCE_SECONDS)
                quiet_at = time.monotonic()
                found = bodies.after(looked_at)
            begun = {each["id"] for each in found if each["event"] == "begin"}
            taken_late += len(begun)
            untaken += len(begun - held)
            after_wait += sum(each["at"] > quiet_at for each in found)
            resume(kind, name)
    print(
        f"\n{kind}, {connection.vendor}: {trials()} pauses; began after the return: {taken_late} bodies that had been "
        f"taken before, {untaken} others; wrote after the wait: {after_wait}"
    )
    assert (untaken, after_wait) == (0, 0)


def test_no_call_of_a_paused_task_begins_after_the_wait(tmp_path: Path) -> None:
    """Many names at once, because each wait takes six seconds. Messages to workers about pauses may be late."""
    path = tmp_path / "history"
    bodies, after_wait, rounds = Bodies(path), 0, trials() // paused_tasks.COUNT
    with workers(tmp_path, "--concurrency", "3", ASYNCQ_TEST_HISTORY=str(path)):
        for _ in range(rounds):
            with producer(lambda: random.choice(paused_tasks.HELD).enqueue(0.002)):
                time.sleep(1)
                quiet_at: dict[int, float] = {}

                def hold(number: int, quiet_at: dict[int, float] = quiet_at) -> None:
                    time.sleep(random.uniform(0.0, 1.0))
                    Inspector().tasks.pause(paused_tasks.HELD[number].module_path, wait=PATIENCE_SECONDS)
                    quiet_at[number] = time.monotonic()
                    connections.close_all()

                with ThreadPoolExecutor(paused_tasks.COUNT) as pool:
                    for done in [pool.submit(hold, number) for number in range(paused_tasks.COUNT)]:
                        done.result()
                found = bodies.after(min(quiet_at.values()))
            after_wait += sum(each["at"] > quiet_at[each["of"]] for each in found)
            TaskRecord.objects.queued().filter(attempt=0).delete()
            for each in paused_tasks.HELD:
                resume("task", each.module_path)
    print(f"\ntask, {connection.vendor}: {rounds * paused_tasks.COUNT} pauses; wrote after the wait: {after_wait}")
    assert after_wait == 0


def test_no_pause_is_lost_to_a_tool_that_had_resumed_the_queue(tmp_path: Path) -> None:
    """The leader looks each five seconds, so it has seen some of the resumes and not others."""
    redis = acl.unrestricted(Broker().client)
    lost, count = 0, 100
    names = [f"q{number}" for number in range(count)]
    with workers(tmp_path, "--processes", "1"):
        tasks.add.enqueue(1)
        wait_until(lambda: TaskRecord.objects.succeeded().exists(), "first task", PATIENCE_SECONDS)
        for name in names:
            pause("queue", name)
        time.sleep(6)
        for name in names:
            redis.delete(Broker().keys(name).paused)
            time.sleep(random.uniform(0.0, 0.1))
            assert pause("queue", name)
        time.sleep(7)
        known = {row.name for row in pauses("queue")}
        lost = sum(name not in known or not redis.exists(Broker().keys(name).paused) for name in names)
    print(f"\ntool, {connection.vendor}: {count} pauses after a tool's resume; lost: {lost}")
    assert lost == 0


def test_no_body_begins_in_a_worker_after_the_wait_for_its_drain(tmp_path: Path) -> None:
    """A host whose workers pick tasks up all the time."""
    path = tmp_path / "history"
    bodies, after_wait, count = Bodies(path), 0, trials() // 10
    workers_of = Inspector().workers
    with workers(tmp_path, "--concurrency", "3", "--processes", "2", ASYNCQ_TEST_HISTORY=str(path)):
        for _ in range(count):
            with producer(lambda: tasks.nap.enqueue(0.002)):
                wait_until(lambda: history(path), "body", PATIENCE_SECONDS)
                name = wait_until(workers_of.all, "worker")[0].host
                workers_of.drain(name, wait=PATIENCE_SECONDS)
                found = bodies.after(time.monotonic())
            after_wait += len(found)
            workers_of.resume(name)
            wait_until(lambda: not any(each.is_draining for each in workers_of.all()), "resumed workers")
    print(f"\ndrain, {connection.vendor}: {count} drains; wrote after the wait: {after_wait}")
    assert after_wait == 0
