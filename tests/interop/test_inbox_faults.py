"""The reader of an inbox is killed again and again: every good document runs, every bad one is kept."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq.broker import Broker, foreign
from django_asyncq.broker.keys import keys_of
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import crash_at
from django_asyncq.testing.crashes import CRASH_VARIABLE

from .. import inbox_tasks
from ..inbox_tasks import QUEUE
from ..workers import ROOT, environment, history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

NAME = inbox_tasks.letter.module_path
POINTS = ("inbox.taken", "inbox.committed", "enqueue.committed", "enqueue.row_inserted")
MALFORMED = (
    b'{"task": ',
    b"\xff\xfe",
    b"[]",
    b'{"task": "shop.tasks.none"}',
    b'{"task": "%s", "n": 1}' % NAME.encode(),
)
PER_PAGE = 20


class Documents:
    """What a program pushes: a twentieth is malformed, a third has an id, and some of those come twice."""

    def __init__(self, count: int, chance: random.Random) -> None:
        self.pushed: list[bytes] = []
        self.bad: list[bytes] = []
        self.with_id: set[int] = set()
        self.good: set[int] = set()
        for number in range(count):
            if number % 20 == 7:
                self.bad.append(MALFORMED[number // 20 % len(MALFORMED)])
                self.pushed.append(self.bad[-1])
                continue
            document: dict[str, Any] = {"task": NAME, "args": [number]}
            self.good.add(number)
            if number % 3 == 0:
                self.with_id.add(number)
                document["id"] = f"letter-{number}"
            self.pushed += [json.dumps(document).encode()] * (2 if number % 6 == 0 else 1)
        chance.shuffle(self.pushed)

    def push(self) -> None:
        """Push all of them."""
        Broker().client.lpush(keys_of(QUEUE).inbox, *self.pushed)


class Values(Documents):
    """What a program pushes to a list of its own: each value once, a twentieth of them malformed."""

    def __init__(self, count: int) -> None:
        self.bad = [b"{%d" % number for number in range(0, count, 20)]
        self.with_id = self.good = {number for number in range(count) if number % 20}
        self.pushed = self.bad + [json.dumps({"number": number}).encode() for number in self.good]

    def push(self) -> None:
        """Push all of them."""
        Broker().client.lpush(inbox_tasks.charge.inbox, *self.pushed)


def is_empty() -> bool:
    """Whether no document is left to read or to settle."""
    places, name = keys_of(QUEUE), inbox_tasks.charge.inbox
    return not Broker().client.exists(places.inbox, places.inbox_taken, name, f"{places.inbox_taken}:{name}")


def kill_one(chance: random.Random, number: int, number_of_rows: int) -> None:
    """Start a reader, and kill it: at a point between the two stores, or at any moment."""
    variables = {}
    if number % 2 == 0:
        armed = crash_at(POINTS[number // 2 % len(POINTS)], nth=chance.randint(1, 2))
        variables = {CRASH_VARIABLE: armed[CRASH_VARIABLE]}
    command = [sys.executable, "-m", "tests.inbox_reader", str(PER_PAGE)]
    with subprocess.Popen(command, env=environment(**variables), cwd=ROOT, stderr=subprocess.PIPE) as reader:
        try:
            if not variables:
                wait_until(
                    lambda: TaskRecord.objects.count() > number_of_rows or reader.poll() is not None, "some rows"
                )
                reader.send_signal(signal.SIGKILL)
            code = reader.wait(40)
        finally:
            reader.kill()
        assert code == -signal.SIGKILL, reader.stderr and reader.stderr.read()


def check_kills(
    count: int, kills: int, folder: Path, monkeypatch: pytest.MonkeyPatch, documents: Documents | None = None
) -> None:
    """Push documents, kill readers while they read them, let one finish, run all tasks, and compare."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path := folder / "history.jsonl"))
    chance = random.Random(count)
    documents = documents or Documents(count, chance)
    documents.push()
    step = len(documents.good) // (kills + 2)
    for number in range(kills):
        kill_one(chance, number, TaskRecord.objects.count() + chance.randint(0, step))
        assert not is_empty(), "the readers were done before the last kill"
    command = [sys.executable, "-m", "tests.inbox_reader", str(PER_PAGE)]
    with subprocess.Popen(command, env=environment(), cwd=ROOT) as reader:
        try:
            wait_until(is_empty, "an empty inbox", seconds=600)
        finally:
            reader.kill()
    # Older than the grace in which a row is left to the process that enqueued it.
    TaskRecord.objects.queued().update(enqueued_at=timezone.now() - timedelta(seconds=10))
    with workers(folder, "--concurrency", "16") as fleet:
        wait_until(lambda: not TaskRecord.objects.filter(finished_at=None).exists(), "all tasks to finish", seconds=600)
        assert fleet.stop() == 0
    ran = Counter(line["number"] for line in history(path))
    assert set(ran) == documents.good
    assert {number: ran[number] for number in documents.with_id} == dict.fromkeys(documents.with_id, 1)
    assert set(ran.values()) == {1}, "no reader was killed together with the memory of Redis, so nothing ran twice"
    assert set(TaskRecord.objects.values_list("state", flat=True)) == {TaskState.SUCCEEDED}
    kept = Counter(found.data for found in foreign.read_rejected(Broker(), QUEUE))
    assert kept == Counter(documents.bad)


def test_a_killed_reader_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 documents, 15 of them malformed, 4 kills."""
    check_kills(300, 4, tmp_path, monkeypatch)


def test_a_killed_reader_of_a_list_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for 300 values of a plain list, between the move and the row, and after the row."""
    check_kills(300, 4, tmp_path, monkeypatch, Values(300))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_reader_that_is_killed_twenty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 documents, 500 of them malformed, 20 kills."""
    check_kills(10_000, 20, tmp_path, monkeypatch)
