"""`manage.py asyncq`: what it shows, repairs and deletes, and its errors when a store is unreachable."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from django.db import OperationalError
from django.utils import timezone

from django_asyncq import gates
from django_asyncq.broker import Broker
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, alive_key
from django_asyncq.management.commanding import printing, stats
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.observe import counts
from django_asyncq.storage import database_clock
from django_asyncq.testing import EmbeddedRedis

from .. import tasks

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def finished(state: TaskState, days: int) -> TaskRecord:
    """A task that finished `days` ago."""
    reason = FailureReason.EXCEPTION if state == TaskState.FAILED else FailureReason.NONE
    then = timezone.now() - timedelta(days=days)
    return TaskRecord.objects.create(
        name="tests.tasks.add", state=state, reason=reason, finished_at=then, queue_name="old"
    )


@pytest.fixture
def forgotten(own_redis: EmbeddedRedis, own_keys: None) -> list[TaskRecord]:
    """Two pending rows, one with a priority, one delayed, one RETRYING, one at a gate. Redis knows none of them."""
    Gate.objects.create(name="g", limit=3)
    then = {"name": "tests.tasks.add", "enqueued_at": timezone.now() - HOUR}
    later = timezone.now() + HOUR
    rows = [
        TaskRecord(**then),
        TaskRecord(**then, queue_name="other"),
        TaskRecord(**then, priority=5),
        TaskRecord(**then, run_after=later),
        TaskRecord(**then, state=TaskState.FAILED, reason=FailureReason.EXCEPTION, retry_at=later),
        TaskRecord(**then, gate="g"),
    ]
    made = TaskRecord.objects.bulk_create(rows)
    Broker().client.flushall()
    return made


def test_rebuild_pushes_every_waiting_task(forgotten: list[TaskRecord]) -> None:
    """Into pending, scheduled and retry, with its gate slot. A second rebuild has nothing to do."""
    text = run("rebuild")
    assert [line.split() for line in text.splitlines()[:7]] == [
        ["queue", "pending", "scheduled", "retry"],
        ["default", "3", "1", "1"],
        ["other", "1", "0", "0"],
        [],
        ["gate", "slots", "added", "slots", "removed"],
        ["g", "1", "0"],
        [],
    ]
    assert "6 rows checked" in text
    assert "6 tasks pushed to Redis" in text
    assert Inspection().sizes("default") == {"pending": 3, "active": 0, "scheduled": 1, "retry": 1, "archived": 0}
    assert len(gates.slots("g")) == 1
    assert Broker().alive_since() is not None
    assert "; 0 tasks pushed to Redis" in run("rebuild", "--yes")


def test_a_dry_rebuild_prints_the_same_and_changes_nothing(forgotten: list[TaskRecord]) -> None:
    """Redis stays empty, and no row changes."""
    dry = json.loads(run("rebuild", "--dry-run", "--json"))
    assert Broker().client.keys("*") == []
    assert "6 tasks would be pushed to Redis" in run("rebuild", "--dry-run")
    assert Broker().client.exists(alive_key()) == 0
    assert json.loads(run("rebuild", "--json")) == {**dry, "dry_run": False}
    assert dry == {
        "dry_run": True,
        "rows": 6,
        "queues": [
            {"alias": "default", "queue": "default", "pending": 3, "scheduled": 1, "retry": 1},
            {"alias": "default", "queue": "other", "pending": 1, "scheduled": 0, "retry": 0},
        ],
        "gates": {"g": {"added": 1, "removed": 0}},
    }


def test_progress_is_one_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log it is a line now and then."""

    class Stream(io.StringIO):
        terminal = True

        def isatty(self) -> bool:
            return self.terminal

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: clock.now))
    terminal, log = Stream(), Stream()
    log.terminal = False
    for stream in (terminal, log):
        progress = printing.Progress(OutputWrapper(stream), 2000)
        progress.add(1000)
        clock.now += printing.SECONDS_PER_LINE
        progress.add(500)
        progress.close()
    assert terminal.getvalue() == "\r1,000 of 2,000 rows\r1,500 of 2,000 rows\n"
    assert log.getvalue() == "1,500 of 2,000 rows\n"


def test_prune_deletes_tasks_that_finished_long_ago() -> None:
    """In one state or in both. A dry run only counts. Unfinished tasks stay."""
    for state in (TaskState.SUCCEEDED, TaskState.FAILED):
        for days in (1, 10):
            finished(state, days)
    tasks.add.enqueue(1)
    assert "2 tasks that finished more than 5 days ago (1 succeeded, 1 failed) would be deleted" in run(
        "prune", "--older-than", "5", "--dry-run"
    )
    assert TaskRecord.objects.count() == 5
    assert "1 of 1 task that finished" in run("prune", "--older-than", "5", "--state", "failed", "--yes")
    assert not TaskRecord.objects.filter(state=TaskState.FAILED, finished_at__lt=timezone.now() - 5 * 24 * HOUR)
    answer = json.loads(run("prune", "--older-than", "5", "--yes", "--json"))
    assert answer == {"dry_run": False, "found": {"succeeded": 1, "failed": 0}, "deleted": 1}
    assert TaskRecord.objects.count() == 3


def test_prune_says_what_stays_for_two_leases() -> None:
    """Also with --older-than 0; tasks that it would not delete for their age or state are not counted."""
    row = finished(TaskState.SUCCEEDED, 0)
    finished(TaskState.FAILED, 0)
    said = "stayed that finished within the last two leases (4 s)."
    assert f"0 of 0 tasks that finished more than 0 days ago (0 succeeded, 0 failed) deleted. 2 tasks {said}" in run(
        "prune", "--older-than", "0", "--yes"
    )
    assert f"1 task {said}" in run("prune", "--older-than", "0", "--state", "failed", "--dry-run")
    assert "leases" not in run("prune", "--older-than", "1", "--yes")
    TaskRecord.objects.filter(id=row.id).update(finished_at=database_clock.now() - timedelta(seconds=5))
    assert f"1 of 1 task that finished more than 0 days ago (1 succeeded, 0 failed) deleted. 1 task {said}" in run(
        "prune", "--older-than", "0", "--yes"
    )


def test_prune_asks_a_person_and_needs_yes_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer other than yes deletes nothing."""
    finished(TaskState.SUCCEEDED, 10)
    with pytest.raises(CommandError, match="--yes"):
        run("prune", "--older-than", "5")
    asked: list[str] = []

    def answer(text: str) -> Any:
        return lambda question: asked.append(question) or text

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer(""))
    with pytest.raises(CommandError, match="Nothing was deleted"):
        run("prune", "--older-than", "5")
    assert TaskRecord.objects.count() == 1
    monkeypatch.setattr("builtins.input", answer("y"))
    run("prune", "--older-than", "5")
    assert TaskRecord.objects.count() == 0
    assert (
        asked
        == ["Delete 1 task that finished more than 5 days ago (1 succeeded, 0 failed)? This cannot be undone. [y/N] "]
        * 2
    )


def test_stats_of_queues_and_gates() -> None:
    """Rows by state beside entries in Redis, how long the oldest task has been due, gates with occupancy and limit."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=5).enqueue(1)
    tasks.add.using(run_after=HOUR).enqueue(1)
    tasks.gated.enqueue("own")
    TaskRecord.objects.create(
        name="a", gate="own", state=TaskState.FAILED, reason=FailureReason.GATE_FULL, retry_at=timezone.now()
    )
    Gate.objects.create(name="empty", limit=2)
    finished(TaskState.SUCCEEDED, 1)
    finished(TaskState.FAILED, 1)
    TaskRecord.objects.filter(priority=5).update(enqueued_at=timezone.now() - HOUR)
    found = json.loads(run("stats", "--json"))
    (default, old) = found["queues"]
    assert default.pop("oldest_waiting_seconds") == pytest.approx(3600, abs=60)
    assert default == {
        "alias": "default", "queue": "default", "waiting": 3, "queued": 4, "running": 0, "succeeded": 0, "failed": 0,
        "retrying": 1, "pending": 3, "active": 0, "scheduled": 1, "retry": 0, "archived": 0,
    }  # fmt: skip
    assert (old["queue"], old["succeeded"], old["failed"], old["oldest_waiting_seconds"]) == ("old", 1, 1, None)
    assert found["gates"] == [
        {"gate": "empty", "limit": 2, "occupancy": 0, "live": 0, "waiting": 0},
        {"gate": "own", "limit": 5, "occupancy": 1, "live": 1, "waiting": 1},
    ]
    lines = [line.split() for line in run("stats").splitlines()]
    assert lines[0][:3] == ["queue", "waiting", "queued"]
    assert lines[1][:3] == ["default", "3", "4"]
    assert lines[-3] == ["own", "5", "1", "1", "1"]
    assert " ".join(lines[-1]) == "The clocks of the database and of Redis differ by 0.0 s."
    assert found["clock_difference_seconds"] == pytest.approx(0, abs=0.5)


def test_stats_of_nothing() -> None:
    """An empty system has no queues and no gates."""
    assert run("stats").split("\n")[:2] == ["no queues", "no gates"]


@pytest.mark.parametrize("arguments", [["rebuild"], ["rebuild", "--dry-run"], ["stats"], ["prune"]])
def test_an_outage_of_redis_is_an_error(own_redis: EmbeddedRedis, own_keys: None, arguments: list[str]) -> None:
    """It says what is unreachable, and deletes nothing."""
    finished(TaskState.FAILED, 10)
    own_redis.stop()
    with pytest.raises(CommandError, match=rf"^Redis at 127\.0\.0\.1:{own_redis.port}/\d+ is unreachable \("):
        run(*arguments, *(["--older-than", "1", "--yes"] if arguments == ["prune"] else []))
    assert TaskRecord.objects.count() == 1


@pytest.mark.parametrize("line", ["queues list", "queues show default", "gates list", "rebuild --dry-run", "stats"])
def test_a_reading_command_speaks_of_no_changes(own_redis: EmbeddedRedis, own_keys: None, line: str) -> None:
    """It has made none; what changes something says that it may be repeated."""
    own_redis.stop()
    with pytest.raises(CommandError) as caught:
        run(*line.split())
    assert "is unreachable" in str(caught.value) and "hanges" not in str(caught.value)
    with pytest.raises(CommandError, match="Changes made so far stay; run the command again"):
        run("rebuild")


def test_an_outage_of_the_database_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is unreachable."""

    def fail() -> None:
        raise OperationalError("no connection")

    monkeypatch.setattr(stats, "gate_stats", fail)
    with pytest.raises(
        CommandError, match=r"^The database is unreachable \(\w+ 'default': .+\): no connection\. Start it"
    ):
        run("stats")


def test_a_sub_command_is_required() -> None:
    """Values of options are checked too."""
    with pytest.raises(CommandError, match="required"):
        run()
    with pytest.raises(CommandError, match="whole number"):
        run("prune", "--older-than", "-1")


def test_stats_change_nothing_in_redis(redis_client: Any, key_prefix: str) -> None:
    """Every key is the same before and after."""
    tasks.gated.enqueue("g")
    before = {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")}
    counts.queue_stats()
    counts.gate_stats()
    assert {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")} == before
    assert Broker().client.llen(QueueKeys("default").pending) == 1
