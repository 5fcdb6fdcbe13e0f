"""Real worker processes keep a rate together, through kills, an emptied Redis and edits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq import rates
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import rate_key, rate_looks_key
from django_asyncq.broker.reading import read
from django_asyncq.models import Rate, TaskState
from django_asyncq.testing import EmbeddedRedis, crash_at
from django_asyncq.testing.crashes import CRASH_MARK_VARIABLE, CRASH_VARIABLE

from ..rate_tasks import fast, fast_async, hourly, hourly_async, hourly_batch, hourly_isolated, rows, slow
from ..workers import history, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

PER_SECOND, BURST = 50, 5
# Between the moment at which a slot takes a start from Redis and that at which its body notes it, on a busy machine.
LATE_SECONDS = 1.0


def most_above(moments: list[float], per_second: float, burst: int, late: float = LATE_SECONDS) -> float:
    """Return by how many starts the worst window has more than it may; 0 or less is right."""
    moments = sorted(moments)
    return max(
        (later - place + 1) - (moments[later] - moment + late) * per_second - burst
        for place, moment in enumerate(moments)
        for later in range(place, len(moments))
    )


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """Where the tasks note when they began."""
    return tmp_path / "history"


def started(noted: Path) -> list[float]:
    """When bodies began."""
    return [line["at"] for line in history(noted)]


def left() -> int:
    """How many rows are not over."""
    return rows().exclude(state=TaskState.SUCCEEDED).count()


def test_two_processes_keep_the_rate_though_one_is_killed(tmp_path: Path, noted: Path) -> None:
    """300 tasks, every third a coroutine: no window has too many starts."""
    for number in range(300):
        (fast_async if number % 3 == 0 else fast).enqueue(number)
    options = ("--processes", "2", "--concurrency", "4")
    with workers(tmp_path, *options, ASYNCQ_TEST_HISTORY=str(noted)) as running:
        wait_until(lambda: len(started(noted)) > 100, "a third")
        os.kill(running.children()[0], signal.SIGKILL)
        wait_until(lambda: not left(), "end")
    moments = started(noted)
    assert {line["number"] for line in history(noted)} == set(range(300))
    assert len({line["pid"] for line in history(noted)}) >= 2
    assert most_above(moments, PER_SECOND, BURST) <= 0
    assert (len(moments) - BURST) / PER_SECOND - LATE_SECONDS <= max(moments) - min(moments)
    assert not rows().filter(attempt__gt=1).exists()


def test_an_emptied_redis_allows_one_burst_more(
    tmp_path: Path, noted: Path, own_redis: EmbeddedRedis, redis_client: redis.Redis
) -> None:
    """The tasks come back from their rows, and the starts before are forgotten."""
    for number in range(150):
        fast.enqueue(number)
    with workers(tmp_path, "--processes", "2", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(noted)):
        wait_until(lambda: len(started(noted)) > 40, "a part")
        client = redis.Redis.from_url(own_redis.url)
        client.flushall()
        client.close()
        wait_until(lambda: not left(), "end")
    assert {line["number"] for line in history(noted)} == set(range(150))
    assert most_above(started(noted), PER_SECOND, 2 * BURST) <= 0


def test_an_edit_holds_at_once_for_what_waits(tmp_path: Path, noted: Path) -> None:
    """At 5 a second what is left would take more than half a minute; at 100 a second it takes 2 seconds."""
    for number in range(200):
        slow.enqueue(number)
    with workers(tmp_path, "--processes", "1", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(noted)):
        wait_until(lambda: len(started(noted)) > 5, "some")
        before = len(started(noted))
        Rate.objects.create(name="slow", starts=100, seconds=1, burst=10)
        edited_at = time.monotonic()
        wait_until(lambda: not left(), "end")
        took = time.monotonic() - edited_at
    assert before < 100
    assert took < 30
    assert most_above([at for at in started(noted) if at > edited_at], 100, 10) <= 0


def test_a_start_that_died_with_its_process_is_used_up(tmp_path: Path, noted: Path) -> None:
    """Of the burst of two one run begins; no task is lost, and none has used an attempt."""
    for _ in range(3):
        hourly.enqueue()
    mark = tmp_path / "mark"
    with workers(tmp_path, "--processes", "1", "--concurrency", "1", **dying(noted, mark=mark)):
        wait_until(mark.exists, "a death")
        wait_until(lambda: started(noted) and waiting() == 2, "the other start")
        assert len(started(noted)) == 1
        assert rows().filter(state=TaskState.QUEUED, attempt=0).count() == 2
        Rate.objects.create(name="hourly", starts=20, seconds=1, burst=1)
        wait_until(lambda: not left(), "end")
    assert len(started(noted)) == 3
    assert not rows().filter(attempt__gt=1).exists()


def test_processes_that_die_with_the_starts_they_took_keep_the_rate(tmp_path: Path, noted: Path) -> None:
    """Each dies at its thirtieth start. Every task runs, and no window has too many starts."""
    for number in range(150):
        (fast_async if number % 3 == 0 else fast).enqueue(number)
    options = ("--processes", "2", "--concurrency", "4")
    with workers(tmp_path, *options, **dying(noted, nth=30)) as running:
        wait_until(lambda: not left(), "end")
        assert running.output().count("failpoint start.taken") >= 2
    # What ran beside the start in another slot of the process runs again.
    assert {line["number"] for line in history(noted)} == set(range(150))
    assert most_above(started(noted), PER_SECOND, BURST) <= 0
    assert not rows().filter(attempt__gt=1).exists()


def dying(noted: Path, **options: Any) -> dict[str, str]:
    """What the environment of workers needs that die after they have taken a start. options: of `crash_at`."""
    armed = crash_at("start.taken", **options)
    names = {CRASH_VARIABLE, CRASH_MARK_VARIABLE} & armed.keys()
    return {**{name: armed[name] for name in names}, "ASYNCQ_TEST_HISTORY": str(noted)}


def waiting() -> int:
    """How many tasks wait for the rate."""
    return read("producer", rates.reading_states(["hourly"]))["hourly"].waiting


KINDS: dict[str, Any] = {"def": hourly, "async": hourly_async, "isolated": hourly_isolated, "batch": hourly_batch}


def test_each_kind_of_task_takes_one_start(tmp_path: Path, noted: Path) -> None:
    """One of `def`, `async def`, isolated and a batch of three: the next one of any kind waits, without an attempt."""
    with workers(tmp_path, "--processes", "1", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(noted)):
        for number, (kind, task) in enumerate(KINDS.items()):
            # A new burst for each kind.
            Broker().client.delete(rate_key("hourly"), rate_looks_key("hourly"))
            Rate.objects.update_or_create(name="hourly", defaults={"starts": 1, "seconds": 3600, "burst": 1})
            calls = [task.enqueue() for _ in range(3 if kind == "batch" else 1)]
            wait_until(lambda expected=number + 1: len(history(noted)) == expected, f"start of {kind}")
            hourly.enqueue()
            wait_until(waiting, "one that waits")
            found = history(noted)[number]
            assert (found["kind"], found.get("calls")) == (kind, 3 if kind == "batch" else None)
            wait_until(lambda ids=[each.id for each in calls]: not rows().filter(id__in=ids, finished_at=None), "end")
            assert rows().get(state=TaskState.QUEUED).attempt == 0
            rows().get(state=TaskState.QUEUED).delete()
        assert len(history(noted)) == len(KINDS)


def test_a_retry_takes_a_start_anew(tmp_path: Path, noted: Path) -> None:
    """The second attempt is the second of the burst; the next task waits."""
    result = hourly.enqueue(fails=True)
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_HISTORY=str(noted)):
        wait_until(lambda: rows().filter(id=result.id, finished_at__isnull=False, retry_at=None), "end")
        assert len(started(noted)) == 2
        hourly.enqueue()
        wait_until(waiting, "one that waits")
        assert len(started(noted)) == 2
