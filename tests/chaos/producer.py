"""Producers of the chaos suite: `python -m tests.chaos.producer KIND …`, each in a process of its own.

A producer writes into the history what it has committed, after the commit.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import django

django.setup()

from django.db import Error as DatabaseError  # noqa: E402
from django.db import connections, transaction  # noqa: E402

from django_asyncq import GateUnavailable, QueueFull, gates  # noqa: E402
from django_asyncq.lifecycle import enqueueing  # noqa: E402
from django_asyncq.models import TaskRecord, TaskState  # noqa: E402
from tests.tasks import note  # noqa: E402

from . import cancels, doomed, tasks  # noqa: E402


def load(count: str, longest_ms: str, pause_ms: str, seed: str, gate_name: str = "", delay: str = "0") -> None:
    """Enqueue tasks one by one; ask a full or unreachable gate again until it admits the task.

    At a gate every third task fails once, so that its retry competes with the new tasks.
    """
    chance = random.Random(seed)
    for number in range(int(count)):
        ms = chance.uniform(0, float(longest_ms))
        while True:
            try:
                if gate_name:
                    result = (tasks.gated if number % 3 else tasks.gated_flaky).enqueue(gate_name, ms)
                elif float(delay):
                    result = tasks.work.using(run_after=timedelta(seconds=float(delay))).enqueue(ms)
                else:
                    result = tasks.work.enqueue(ms)
                break
            except (QueueFull, GateUnavailable):
                time.sleep(0.02)
        note("committed", ids=[result.id])
        if float(pause_ms):
            time.sleep(chance.uniform(0, 2 * float(pause_ms)) / 1000)


def rated(seconds: str, pause_ms: str, seed: str) -> None:
    """Enqueue tasks of one rate one by one, half of them async. All at once keep any rate: they wait in a line."""
    chance = random.Random(seed)
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        note("committed", ids=[chance.choice((tasks.rated, tasks.rated_async)).enqueue(chance.uniform(0, 20)).id])
        time.sleep(chance.uniform(0, 2 * float(pause_ms)) / 1000)


def bulk(count: str, longest_ms: str, seed: str) -> None:
    """Enqueue tasks in transactions of 50, half of them async."""
    chance = random.Random(seed)
    for _ in range(0, int(count), 100):
        for kind in (tasks.work, tasks.work_async):
            results = kind.enqueue_many([(chance.uniform(0, float(longest_ms)),) for _ in range(50)])
            note("committed", ids=[result.id for result in results])


def crash(count: str, seed: str) -> None:
    """In forks: enqueue one to three tasks in a transaction and die between its COMMIT and the push."""
    chance = random.Random(seed)
    connections.close_all()
    for _ in range(int(count)):
        size, gated = chance.randint(1, 3), chance.random() < 0.3
        child = os.fork()
        if child == 0:
            _enqueue_and_die(size, gated)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise SystemExit(f"a child ended with status {status} instead of being killed")
        note("crash")


def _enqueue_and_die(size: int, gated: bool) -> None:
    from django_asyncq.broker import clients

    ids: list[str] = []

    def die(*args: Any, **kwargs: Any) -> int:
        note("committed", ids=ids)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    clients.reset_clients()
    enqueueing.dispatch = die
    with transaction.atomic():
        for number in range(size):
            result = tasks.gated.using(queue_limit=10_000).enqueue("crashed") if gated else tasks.work.enqueue(number)
            ids.append(str(result.id))
    os._exit(3)  # not reached


class Rollback(Exception):
    """Rolls a transaction back."""


def rollback(count: str, seed: str) -> None:
    """Enqueue in nested savepoints of which about half are rolled back, at gates and without."""
    chance = random.Random(seed)
    for _ in range(int(count)):
        note("committed", ids=_attempt(chance, depth=0))


def _attempt(chance: random.Random, depth: int) -> list[str]:
    kept: list[str] = []
    try:
        with transaction.atomic():
            for _ in range(chance.randint(1, 2)):
                kept.append(_enqueue_somewhere(chance))
            if depth < 3 and chance.random() < 0.7:
                kept += _attempt(chance, depth + 1)
            kept.append(_enqueue_somewhere(chance))
            if chance.random() < 0.5:
                raise Rollback
    except Rollback:
        return []
    return kept


def _enqueue_somewhere(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return str(tasks.work.enqueue(0).id)
    return str(tasks.gated.using(queue_limit=100_000).enqueue("rolled").id)


def requests(count: str, pause_ms: str) -> None:
    """Enqueue as requests do, and note how long each took and whether it was accepted."""
    for _ in range(int(count)):
        began = time.monotonic()
        try:
            with transaction.atomic():
                result = tasks.work.enqueue(0)
            note("committed", ids=[str(result.id)])
            is_accepted = True
        except (DatabaseError, RuntimeError):
            is_accepted = False
        note("request", seconds=time.monotonic() - began, accepted=is_accepted)
        time.sleep(float(pause_ms) / 1000)


def hammer(seconds: str, gate_count: str, limit: str, long_share: str, long_seconds: str, seed: str) -> None:
    """Acquire and release slots as fast as possible, and hold some of them for long."""
    chance = random.Random(seed)
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        name = f"g{chance.randrange(int(gate_count))}"
        is_long = chance.random() < float(long_share)
        record = TaskRecord(gate=name, queue_limit=int(limit), expected_seconds=1)
        asked = time.monotonic()
        try:
            gates.admit(record.gates, [record], mode="all", seconds=int(float(long_seconds)) + 3 if is_long else 2)
        except (QueueFull, GateUnavailable):
            time.sleep(chance.uniform(0, 0.002))
            continue
        note("in", gate=name, id=str(record.id), asked=asked)
        time.sleep(chance.uniform(0.8, 1.0) * float(long_seconds) if is_long else chance.uniform(0, 0.005))
        note("out", gate=name, id=str(record.id))
        gates.release([record])


def occupy(seconds: str, gate_count: str, limit: str, longest_ms: str, seed: str) -> None:
    """Enqueue tasks for later and delete them after a while: slots acquired and released through the API."""
    chance = random.Random(seed)
    deadline = time.monotonic() + float(seconds)
    later = timedelta(hours=1)
    while time.monotonic() < deadline:
        name = f"g{chance.randrange(int(gate_count))}"
        asked = time.monotonic()
        try:
            result = tasks.gated.using(queue_limit=int(limit), run_after=later).enqueue(name)
        except (QueueFull, GateUnavailable):
            time.sleep(chance.uniform(0, 0.01))
            continue
        # A task that was admitted without a limit, and met one before its row was committed, is parked, not in.
        row = TaskRecord.objects.get(id=result.id)
        if row.state == TaskState.QUEUED:
            note("in", gate=name, id=str(row.id), asked=asked)
            time.sleep(chance.uniform(0, float(longest_ms)) / 1000)
            note("out", gate=name, id=str(row.id))
        row.delete()


def storm(count: str) -> None:
    """Enqueue tasks that all fail at their first attempt."""
    for _ in range(0, int(count), 200):
        note("committed", ids=[result.id for result in tasks.storms.enqueue_many([()] * 200)])


def newest(keys: str, seed: str, first_key: str) -> None:
    """Call each key twelve times from three threads, around the start and the end of its task, then once more."""

    def calls(key: int, first: int) -> None:
        chance = random.Random(f"{seed} {key} {first}")
        try:
            for number in range(first, tasks.NEWEST, 3):
                with transaction.atomic():
                    result = tasks.newest.enqueue(key, number, chance.uniform(0, 60))
                    if chance.random() < 0.2:
                        time.sleep(chance.uniform(0, 0.2))
                note("committed", ids=[result.id])
                time.sleep(chance.uniform(0, 0.1))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(3) as pool:
        for key in range(int(first_key), int(first_key) + int(keys)):
            list(pool.map(partial(calls, key), range(3)))
            # All other calls of the key have returned.
            note("committed", ids=[tasks.newest.enqueue(key, tasks.NEWEST, 20).id])


def sparse(seconds: str, limit: str) -> None:
    """At one gate: hold slots for long and one shortly, pause for longer than the short slot, then fill the gate."""
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        holders = [_enter("sparse", int(limit), hold=30) for _ in range(int(limit) - 1)]
        _leave("sparse", [_enter("sparse", int(limit), hold=2)])
        time.sleep(3)
        holders += [_enter("sparse", int(limit), hold=30) for _ in range(int(limit))]
        _leave("sparse", holders)


def _enter(name: str, limit: int, *, hold: int) -> TaskRecord | None:
    record = TaskRecord(gate=name, queue_limit=limit, expected_seconds=1)
    try:
        gates.admit(record.gates, [record], mode="all", seconds=hold)
    except (QueueFull, GateUnavailable):
        return None
    note("in", gate=name, id=str(record.id))
    return record


def _leave(name: str, records: list[TaskRecord | None]) -> None:
    for record in filter(None, records):
        note("out", gate=name, id=str(record.id))
        gates.release([record])


KINDS = {
    "sparse": sparse,
    "newest": newest,
    "load": load,
    "bulk": bulk,
    "rated": rated,
    "crash": crash,
    "rollback": rollback,
    "requests": requests,
    "hammer": hammer,
    "storm": storm,
    "occupy": occupy,
    "cancels": cancels.cancels,
    "doomed": doomed.doomed,
    "mixed": doomed.mixed,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
