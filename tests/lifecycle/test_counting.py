"""How runs ended and how long they took, as workers count it for monitors."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.run_counts import BOUNDS, HOURS_KEPT, OTHER, RunCounting, RunCounts, Times, read_runs
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle.counting import _Counter
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import discard_tasks, tasks
from ..workers import run_workers

pytestmark = pytest.mark.django_db(transaction=True)


def totals(queue: str = "default") -> dict[str, RunCounts]:
    """Return all that was counted in a queue."""
    return read_runs("worker", [("default", queue)])["default", queue]


def counted(queue: str = "default") -> dict[str, dict[str, int]]:
    """Return how many runs of each task ended how, without zeros."""
    found = totals(queue)
    return {name: {how: count for how, count in each.outcomes.items() if count} for name, each in found.items()}


def one(**outcomes: int) -> RunCounts:
    """Counts of a task."""
    counts = RunCounts()
    counts.outcomes.update(outcomes)
    return counts


def test_every_outcome_is_counted_once() -> None:
    """By real workers, which have ended; those of a task that never ran by whoever closed it."""
    for _ in range(3):
        tasks.add.enqueue(1)
    tasks.fail_until.enqueue(3)
    tasks.fail_until.enqueue(9)
    tasks.overruns.using(max_attempts=1).enqueue(True)
    discard_tasks.plain.enqueue("discard")
    lifecycle.cancel([UUID(tasks.tally.enqueue("a").id)])
    late = tasks.tidy.using(expires=timedelta(hours=1)).enqueue()
    TaskRecord.objects.filter(id=late.id).update(expires_at=timezone.now())
    Reconciler(Broker()).sweep()
    run_workers()
    # A process that is killed loses what it has counted in its last second.
    tasks.dies.using(max_attempts=1).enqueue(after_seconds=0)
    run_workers()
    found = counted()
    assert found["tests.tasks.add"] == {"succeeded": 3}
    assert found["tests.tasks.fail_until"] == {"succeeded": 1, "retried": 4, "failed": 1}
    assert found["tests.tasks.overruns"] == {"timeout": 1}
    assert found["tests.tasks.dies"] == {"crashed": 1}
    assert found["tests.discard_tasks.plain"] == {"discarded": 1}
    assert found["tests.tasks.tally"] == {"cancelled": 1}
    assert found["tests.tasks.tidy"] == {"expired": 1}
    assert read_runs("worker", [("default", "default")], hours=1) == {("default", "default"): totals()}


def test_times_are_those_of_the_rows() -> None:
    """How long a run took, and since when it had been due."""
    result = tasks.nap.enqueue(0.3)
    TaskRecord.objects.filter(id=result.id).update(enqueued_at=timezone.now() - timedelta(seconds=20))
    run_workers()
    counts = totals()["tests.tasks.nap"]
    row = TaskRecord.objects.get()
    assert row.finished_at is not None and row.started_at is not None
    assert counts.took.seconds == pytest.approx((row.finished_at - row.started_at).total_seconds(), abs=0.01)
    assert counts.waited.seconds == pytest.approx((row.started_at - row.enqueued_at).total_seconds(), abs=0.01)
    assert sum(counts.took.buckets) == sum(counts.waited.buckets) == 1
    low, high = counts.waited.quantile(0.01), counts.waited.quantile(1)
    assert low is not None and high is not None and low < counts.waited.seconds <= high


def test_a_hash_has_a_bounded_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are one, and no count is lost."""
    monkeypatch.setattr("django_asyncq.broker.run_counts.MOST_NAMES", 3)
    RunCounting().add("q", {f"task {number}": one(failed=number) for number in range(1, 6)})
    RunCounting().add("q", {"task 2": one(failed=1), "task 5": one(succeeded=1)})
    expected = {"task 1": {"failed": 1}, "task 2": {"failed": 3}, "task 3": {"failed": 3}}
    assert counted("q") == expected | {OTHER: {"failed": 9, "succeeded": 1}}


def test_an_hour_is_forgotten_and_the_totals_are_not(redis_client: Any) -> None:
    """After eight days."""
    RunCounting().add("q", {"a": one(failed=1)})
    keys = QueueKeys("q")
    (hour,) = [key.decode() for key in redis_client.scan_iter(f"{keys.runs()}:*")]
    assert 0 <= HOURS_KEPT * 3600 - redis_client.ttl(hour) < 60
    assert redis_client.ttl(keys.runs()) == -1


def test_odd_values_are_no_counts(redis_client: Any) -> None:
    """What another program has written there is skipped; a key of another type is set aside by the next count."""
    key = QueueKeys("q").runs()
    odd = {"failed a": "x", "failed b": "-1", "t99 c": "1", "tx d": "1", "nothing e": "1", "failed": "1", " ": "1"}
    redis_client.hset(key, mapping=odd | {b"failed \xff": "2"})
    assert [name for name, counts in totals("q").items() if any(counts.outcomes.values())] == ["\udcff"]
    redis_client.delete(key)
    redis_client.set(key, "a text")
    assert counted("q") == {}
    redis_client.set(key, "a text")
    RunCounting().add("q", {"a": one(failed=1)})
    assert counted("q") == {"a": {"failed": 1}}


def test_counts_wait_for_redis(own_redis: EmbeddedRedis, caplog: Any) -> None:
    """They are kept while it is unreachable, and nobody is told: no count decides anything."""
    record = TaskRecord.objects.create(
        name="tests.tasks.add", state=TaskState.SUCCEEDED, finished_at=timezone.now(), last_attempted_at=timezone.now()
    )
    counter = _Counter()
    own_redis.stop()
    counter.count([record], TaskState.RUNNING, TaskState.SUCCEEDED)
    counter.count([record], TaskState.RUNNING, TaskState.SUCCEEDED)
    own_redis.start()
    counter.write()
    counter.write()
    assert counted() == {"tests.tasks.add": {"succeeded": 2}}
    assert not [line for line in caplog.records if line.name == "django_asyncq.lifecycle"]


def test_a_process_that_keeps_counts_writes_them_later() -> None:
    """A worker process does: at most once a second, and the rest when it ends."""
    failed = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": timezone.now()}
    record = TaskRecord.objects.create(name="tests.tasks.add", **failed)
    counter = _Counter()
    counter.begin_keeping()
    counter.count([record], TaskState.QUEUED, TaskState.FAILED)
    assert counted() == {}
    counter.write_when_due()
    assert counted() == {"tests.tasks.add": {"failed": 1}}
    began = time.monotonic()
    counter.count([record], TaskState.QUEUED, TaskState.FAILED)
    counter.write_when_due()
    assert counted() == {"tests.tasks.add": {"failed": 1}} or time.monotonic() - began > 0.9
    counter.end_keeping()
    assert counted() == {"tests.tasks.add": {"failed": 2}}


def test_counts_of_many_queues_are_read_together(redis_client: Any) -> None:
    """Each has its own, also one without any; all are read by one pipeline."""
    for number in range(70):
        RunCounting().add(f"q{number}", {"a": one(failed=number)} if number else {})
    names = [("default", f"q{number}") for number in range(70)]
    before = redis_client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    for hours in (None, 24):
        found = read_runs("worker", names, hours=hours)
        assert [sum(each.failed for each in found[name].values()) for name in names] == list(range(70))
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 2 * 70 + 1


def test_an_error_of_a_count_is_logged_once_and_reaches_nobody(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The reporter, which writes outcomes, must not end for want of a count."""
    failed = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": timezone.now()}
    record = TaskRecord.objects.create(name="tests.tasks.add", **failed)
    counter = _Counter()
    with monkeypatch.context() as patched:
        patched.setattr(RunCounts, "fields", lambda counts: 1 / 0)
        for _ in range(3):
            counter.count([record], TaskState.QUEUED, TaskState.FAILED)
    (line,) = [line for line in caplog.records if line.levelname == "ERROR"]
    assert "runs cannot be counted" in line.getMessage()
    counter.count([record], TaskState.QUEUED, TaskState.FAILED)
    assert counted() == {"tests.tasks.add": {"failed": 1}}


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([], 0.5, None),
        ([10], 0.5, BOUNDS[0] / 2),
        ([5, 5], 0.5, BOUNDS[0]),
        ([0, 10], 0.95, BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * 0.95),
        ([0] * len(BOUNDS) + [1], 0.5, BOUNDS[-1]),
    ],
)
def test_quantile(buckets: list[int], share: float, expected: float | None) -> None:
    """Linear within a bucket."""
    times = Times()
    times.buckets[: len(buckets)] = buckets
    assert times.quantile(share) == (expected if expected is None else pytest.approx(expected))
