"""An operator's day on the command line alone, against real workers: find, stop, repair, let go on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command

from django_asyncq.models import Gate, Schedule, TaskRecord
from django_asyncq.testing import EmbeddedRedis

from ..workers import ROOT, environment, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

FAILING = "tests.tasks.fail_until"


def asyncq(*arguments: str) -> Any:
    """Run the command with --json and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", *arguments, "--json", stdout=out, stderr=io.StringIO())
    return json.loads(out.getvalue())


def code_of(*arguments: str) -> int:
    """Run the command in a process of its own, as a shell does, and return its exit code."""
    command = [sys.executable, "-m", "django", "asyncq", *arguments]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, timeout=40, check=False)
    return done.returncode


def enqueue(name: str, *arguments: Any, **options: str) -> str:
    """Enqueue a task by the command; return its id."""
    more = [word for option, value in options.items() for word in (f"--{option}", value)]
    id: str = asyncq("tasks", "enqueue", name, "--args", json.dumps(arguments), *more)["id"]
    return id


def states() -> dict[str, str]:
    """Return the state of each task by its id."""
    return {each["id"]: each["state"] for each in asyncq("tasks", "list", "--limit", "200")["tasks"]}


def wait_for(*ids: str, state: str = "succeeded") -> None:
    """Wait until tasks are in a state."""
    wait_until(lambda: {states().get(id) for id in ids} == {state}, f"{state} task of {len(ids)}")


def test_an_operators_day(own_redis: EmbeddedRedis, own_keys: None, tmp_path: Path) -> None:
    """Twenty steps; no task is lost, and each step shows what it did."""
    Gate.objects.create(name="own", limit=5)
    Schedule.objects.create(name="nightly", task="tests.tasks.tally", args=["eu"], cron="0 3 1 1 *")
    # Nobody runs yet: a monitor sees it by the exit code.
    assert code_of("health", "--max-silence", "1m") == 1
    assert asyncq("queues", "pause", "later", "--note", "tomorrow")["changed"]
    later = [enqueue("tests.tasks.add", number, queue="later") for number in range(5)]
    with workers(tmp_path, "--processes", "1", "--concurrency", "4"):
        ids = [enqueue("tests.tasks.add", number) for number in range(3)]
        failing = [enqueue(FAILING, 99, True) for _ in range(4)]
        wait_for(*ids)
        wait_for(*failing, state="failed")
        find_and_stop(failing)
        retry_and_cancel(failing)
        let_go_on()
        drain()
        lose_redis(own_redis, later)
        # The supervisor is known again with its next beat.
        wait_until(lambda: code_of("health", "--max-silence", "1m", "--max-age", "5m") == 0, "healthy fleet")
        assert not asyncq("health")["problems"]
    assert code_of("tasks", "retry") == 2
    count = TaskRecord.objects.count()
    assert asyncq("tasks", "delete", "--all", "--yes")["done"] == count


def find_and_stop(failing: list[str]) -> None:
    """Find the group that fails, look at one of it, pause the queue and lower a gate."""
    (group,) = asyncq("tasks", "failures", "--since", "1h")["failures"]
    assert (group["name"], group["count"]) == (FAILING, 4)
    shown = asyncq("tasks", "show", group["latest"])
    assert (shown["id"], shown["errors"][0]["attempt"]) == (failing[-1], 1)
    assert asyncq("queues", "pause", "default", "--note", "fail_until fails")["changed"]
    assert asyncq("gates", "set", "own", "--limit", "1")["limit"] == 1
    assert asyncq("gates", "show", "own")["occupancy"] == 0
    (queue,) = [each for each in asyncq("queues", "list")["queues"] if each["queue"] == "default"]
    assert (queue["is_paused"], queue["paused_by"]) == (True, "manage.py asyncq")


def retry_and_cancel(failing: list[str]) -> None:
    """Retry one, then the others by an action of the leader; cancel one, purge another queue."""
    assert asyncq("tasks", "retry", failing[0])["done"] == 1
    action = asyncq("bulk", "start", "retry", "--task", FAILING, "--yes")
    over = wait_until(lambda: (found := asyncq("bulk", "show", action["id"]))["state"] == "finished" and found, "end")
    assert over["done"] == 3
    assert {states()[id] for id in failing} == {"queued"}
    assert asyncq("tasks", "cancel", failing[0])["cancelled"] == 1
    assert asyncq("tasks", "cancel", "--task", FAILING, "--reason", "broken", "--yes")["cancelled"] == 3
    assert asyncq("queues", "pause", "other")["changed"]
    for number in range(3):
        enqueue("tests.tasks.add", number, queue="other")
    assert asyncq("queues", "purge", "other", "--yes")["deleted"] == 3
    assert asyncq("queues", "resume", "other")["changed"]


def let_go_on() -> None:
    """Resume the queue; run a delayed task and a schedule now; switch the schedule off and on."""
    waiting, delayed = enqueue("tests.tasks.add", 1), enqueue("tests.tasks.add", 2, **{"in": "1h"})
    assert asyncq("queues", "show", "default")["scheduled"] == 1
    assert asyncq("queues", "resume", "default")["changed"]
    assert asyncq("tasks", "run", delayed)["done"] == 1
    scheduled = asyncq("schedules", "run", "nightly")["task"]
    wait_for(waiting, delayed, scheduled)
    assert asyncq("schedules", "history", "nightly")["occurrences"][0]["task"] == scheduled
    assert asyncq("schedules", "disable", "nightly")["changed"]
    assert asyncq("schedules", "enable", "nightly")["changed"]
    assert asyncq("queues", "history", "default", "--days", "1")["days"][0]["processed"] > 0


def drain() -> None:
    """Drain the only worker, so that a task waits; resume it."""
    (worker,) = wait_until(lambda: asyncq("workers", "list")["workers"], "worker")
    assert (worker["slots"], worker["is_ours"]) == (4, True)
    assert asyncq("workers", "drain", worker["id"], "--yes")["workers"] == [worker["id"]]
    wait_until(lambda: asyncq("workers", "list")["workers"][0]["is_draining"], "draining worker")
    waiting = enqueue("tests.tasks.add", 1)
    assert asyncq("queues", "show", "default")["pending"] == 1
    assert asyncq("workers", "resume", worker["id"])["changed"]
    wait_for(waiting)


def lose_redis(server: EmbeddedRedis, ids: list[str]) -> None:
    """Redis loses its memory while tasks wait; a rebuild brings them back, and they run."""
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.close()
    asyncq("rebuild")
    assert asyncq("queues", "show", "later")["pending"] == 5
    wait_until(lambda: asyncq("queues", "show", "later")["is_paused"], "paused queue")
    asyncq("queues", "resume", "later")
    wait_for(*ids)
