"""A worker leaves a task that its code does not have to the workers whose code has it."""

from __future__ import annotations

import shlex
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, servers
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.reading import read
from django_asyncq.broker.unknown_tasks import UnknownTasks, make_known, reading_unknown
from django_asyncq.core.policies import AlertSettings
from django_asyncq.fleet import unknown_tasks
from django_asyncq.models import AlertKind, TaskRecord, TaskState
from django_asyncq.observe.fleet import read_fleet
from django_asyncq.observe.inspector import Inspector
from django_asyncq.observe.problems import Looker
from django_asyncq.observe.why import Keeper, why_not_running

from .. import tasks
from ..workers import history, run_workers, wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_keys")]

QUEUE = "default"
OLD, OTHER_OLD, NEW = "a" * 16, "b" * 16, "c" * 16


def worker_of(code: str) -> Broker:
    """The broker of a worker with this code."""
    broker = Broker()
    broker.code = code
    return broker


def claim(code: str, count: int = 10) -> list[lifecycle.Run]:
    """Claim tasks as a worker with this code."""
    return lifecycle.claim(worker_of(code), QUEUE, f"w:{code}", count, "default").runs


def leave(code: str, runs: list[lifecycle.Run]) -> None:
    """Leave tasks to workers with other code."""
    lifecycle.leave_to_others(worker_of(code), f"w:{code}", runs, 15)


def ids(runs: list[lifecycle.Run]) -> list[str]:
    """The ids of runs, in their order."""
    return [str(run.record.id) for run in runs]


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_what_is_left_to_others_keeps_its_place_and_keeps_nobody_waiting(priority: int) -> None:
    """The same code passes over it and takes what is behind; other code gets all in their order."""
    first = [tasks.add.using(priority=priority).enqueue(number) for number in range(3)]
    leave(OLD, claim(OLD))
    behind = tasks.add.using(priority=priority).enqueue(3)
    assert ids(claim(OLD)) == [behind.id]
    dequeued = worker_of(OLD).dequeue(QUEUE, "w", 10, 30)
    assert (dequeued.leases, dequeued.paused, dequeued.is_drained) == ([], True, False)
    runs = claim(NEW)
    assert ids(runs) == [each.id for each in first]
    assert {run.record.attempt for run in runs} == {0}


def test_two_codes_that_do_not_know_a_task_do_not_pass_it_to_and_fro() -> None:
    """Each takes it once, until the time is over."""
    result = tasks.add.enqueue(1)
    for code in (OLD, OTHER_OLD):
        leave(code, claim(code))
    assert [claim(OLD), claim(OTHER_OLD)] == [[], []]
    key = QueueKeys(QUEUE).task(result.id)
    Broker().client.hset(key, "left_until", f"{int(time.time()) - 1} {OLD} {OTHER_OLD}")
    (run,) = claim(OLD)
    leave(OLD, [run])
    assert ids(claim(OTHER_OLD)) == [result.id]


def test_a_task_that_is_left_to_others_wakes_no_worker_again_and_again() -> None:
    """One that does not know it takes its token, and passes none on."""
    tasks.add.enqueue(1)
    leave(OLD, claim(OLD))
    broker, keys = worker_of(OLD), QueueKeys(QUEUE)
    broker.client.delete(keys.wake)
    assert claim(OLD) == []
    assert (broker.client.llen(keys.pending), broker.client.llen(keys.wake)) == (1, 0)


def test_patience_begins_anew_when_nobody_knows_a_task_any_more() -> None:
    """The time in which somebody knew it does not count."""
    tasks.add.enqueue(1)
    runs = claim(OLD)
    lifecycle.postpone(Broker(), f"w:{OLD}", runs, 0, is_unknown=True)
    key = QueueKeys(QUEUE).task(str(runs[0].record.id))
    Broker().client.hset(key, "parked_at", int(time.time()) - 599)
    Broker().forward(QUEUE, "scheduled")
    leave(OLD, claim(OLD))
    again = claim(NEW)
    assert lifecycle.postpone(Broker(), f"w:{NEW}", again, 15, is_unknown=True) == {again[0].record.id: 0}


def put_aside(*numbers: int, name: str = "tests.tasks.add", version: int = 1) -> list[str]:
    """Have a worker put tasks aside whose code it does not have; return their ids."""
    made = [tasks.add.enqueue(number).id for number in numbers]
    TaskRecord.objects.filter(pk__in=made).update(name=name, version=version)
    while runs := claim(OLD, 200):
        lifecycle.postpone(Broker(), f"w:{OLD}", runs, 3600, is_unknown=True)
    return made


def waiting() -> dict[tuple[str, int], int]:
    """How many wait for code that has them, by name and version."""
    return {(each.name, each.version): each.total for each in read("worker", reading_unknown("default", [QUEUE]))}


def test_what_waits_for_code_is_counted_and_due_at_once_when_it_is_there() -> None:
    """By name and version; only those of the code that is there; a second call finds nothing."""
    put_aside(1, 2, name="shop.tasks.send")
    newer = put_aside(3, name="shop.tasks.send", version=12)
    put_aside(4, 5, 6, name="shop.tasks")
    assert waiting() == {("shop.tasks.send", 1): 2, ("shop.tasks.send", 12): 1, ("shop.tasks", 1): 3}
    assert TaskRecord.objects.filter(state=TaskState.QUEUED, attempt=0).count() == 6
    assert Broker().forward(QUEUE, "scheduled").moved == 0
    (found,) = [each for each in read("worker", reading_unknown("default", [QUEUE])) if each.version == 12]
    assert (make_known(Broker(), found), make_known(Broker(), found)) == (1, 0)
    Broker().forward(QUEUE, "scheduled")
    assert ids(claim(NEW)) == newer
    assert waiting() == {("shop.tasks.send", 1): 2, ("shop.tasks", 1): 3}


def test_more_than_one_call_brings_back_are_all_brought_back() -> None:
    """Tasks of names that begin with the same letters stay."""
    put_aside(*range(1100), name="shop.tasks.send")
    put_aside(1, name="shop.tasks.send_all")
    assert make_known(Broker(), UnknownTasks(QUEUE, "shop.tasks.send", 1, 0, 0)) == 1100
    assert waiting() == {("shop.tasks.send_all", 1): 1}


def test_what_has_ended_since_is_not_counted() -> None:
    """Cancelled, removed, or moved by another program; odd members are forgotten."""
    first, second, _third = put_aside(1, 2, 3)
    lifecycle.cancel([TaskRecord.objects.get(pk=first).pk], by="somebody")
    Broker().remove(QUEUE, [second])
    keys, client = QueueKeys(QUEUE), Broker().client
    client.zadd(keys.unknown, {b"no line break": 0, b"\xff\nodd": 0, b"tests.tasks.add\n": 0})
    assert waiting() == {("tests.tasks.add", 1): 1}
    assert client.zcard(keys.unknown) == 1


def test_the_leader_brings_back_what_a_living_worker_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it does not know; without workers nothing."""
    put_aside(1, 2)
    put_aside(3, name="shop.gone")
    unknown_tasks.look()
    assert waiting() == {("tests.tasks.add", 1): 2, ("shop.gone", 1): 1}
    monkeypatch.setattr(
        servers.WorkerInfo, "knows", lambda self, alias, queue, name, version: name == "tests.tasks.add"
    )
    monkeypatch.setattr(servers, "workers", lambda alias, role: [tuple.__new__(servers.WorkerInfo)])
    unknown_tasks.look()
    assert waiting() == {("shop.gone", 1): 1}


def test_an_alert_says_so_after_the_patience(settings: Any) -> None:
    """And names the queue, the task and how many."""
    put_aside(1, 2, name="shop.gone", version=3)
    looker = Looker(AlertSettings())
    assert AlertKind.UNKNOWN_TASKS not in {kind for kind, *_ in looker.look().problems}
    settings.ASYNCQ = {**settings.ASYNCQ, "UNREGISTERED_PATIENCE_SECONDS": 0}
    (problem,) = [each for each in looker.look().problems.values() if each.kind == AlertKind.UNKNOWN_TASKS]
    assert problem.text.startswith("queue default: 2 tasks wait, because no worker has the code of shop.gone 3; ")
    assert problem.command == "manage.py asyncq tasks list --task shop.gone --state queued"
    assert run_as_said(problem.command).count("shop.gone") == 2


def run_as_said(command: str) -> str:
    """Run a command that an alert or the guide names; return what it prints."""
    out = StringIO()
    call_command(*shlex.split(command)[1:], stdout=out)
    return out.getvalue()


def test_what_waits_for_code_is_given_up_as_the_guide_says() -> None:
    """By the name that no code has."""
    put_aside(1, 2, name="shop.tasks.remind")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "deploying-changes.md").read_text()
    command = "manage.py asyncq tasks cancel --task shop.tasks.remind --yes"
    assert f"`{command}`" in guide
    run_as_said(command)
    assert TaskRecord.objects.filter(state=TaskState.FAILED).count() == 2
    assert waiting() == {}


@pytest.mark.parametrize("written", ["1" * 18, "-5", "rubbish", ""])
def test_an_odd_time_in_redis_is_not_known_and_no_error(written: str) -> None:
    """What comes from there may be anything."""
    (id,) = put_aside(1, name="shop.gone")
    Broker().client.hset(QueueKeys(QUEUE).task(id), "parked_at", written)
    (found,) = Inspector().tasks.unknown()
    assert (found.name, found.total, found.since) == ("shop.gone", 1, None)
    assert "shop.gone" in run_as_said("manage.py asyncq tasks unknown")


def test_tasks_wait_without_an_end_and_begin_at_once_when_their_code_comes(tmp_path: Path, monkeypatch: Any) -> None:
    """A worker that does not know them has said so; the page of a task says it too."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    monkeypatch.setenv("ASYNCQ_TEST_PATIENCE", "0")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with workers(tmp_path / "old", ASYNCQ_TEST_OLD_CODE="1") as old:
        results = [tasks.new_task.enqueue() for _ in range(50)]
        wait_until(lambda: waiting() == {("tests.tasks.new_task", 1): 50}, "fifty that are put aside")
        wait_until(lambda: len(servers.workers()) == 1, "the heartbeat of the old worker")
        record = TaskRecord.objects.get(pk=results[0].id)
        why = why_not_running(record, read_fleet()[0])
        assert why is not None
        assert (why.keeper, why.subject) == (Keeper.UNKNOWN, "tests.tasks.new_task")
        assert "of task tests.tasks.new_task wait for a worker whose code has it" in old.output()
        with workers(tmp_path / "new") as new:
            wait_until(lambda: len(history(path)) == 50, "fifty tasks that begin", 20)
            assert {line["pid"] for line in history(path)} == set(new.children())
            wait_until(lambda: TaskRecord.objects.succeeded().count() == 50, "all tasks")
            assert "of task tests.tasks.new_task are due" in new.output()
        assert waiting() == {}


def test_a_burst_does_not_wait_for_what_its_code_does_not_have() -> None:
    """Nor for a newer version of the arguments; it runs the rest."""
    for name, version in (("shop.gone", 1), (tasks.add.module_path, 2)):
        lifecycle.dispatch([TaskRecord.objects.create(name=name, version=version, args=[1])])
    known = tasks.add.enqueue(2)
    run_workers()
    assert TaskRecord.objects.get(pk=known.id).state == TaskState.SUCCEEDED
    assert waiting() == {("shop.gone", 1): 1, (tasks.add.module_path, 2): 1}


def test_tasks_that_only_new_code_has_begin_there_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """Though the old worker is idle and first in line; it postpones none and does not spin."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with workers(tmp_path / "old", ASYNCQ_TEST_OLD_CODE="1") as old:
        wait_until(lambda: len(servers.workers()) == 1, "the old worker")
        with workers(tmp_path / "new") as new:
            wait_until(lambda: len(servers.workers()) == 2, "the heartbeat of the new worker")
            wait_until(lambda: "Ready." in new.output(), "the new worker")
            began = time.monotonic()
            results = [tasks.new_task.enqueue() for _ in range(50)]
            # A task that is postponed waits for 15 s.
            wait_until(lambda: len(history(path)) == 50, "fifty tasks that begin", 14)
            print(f"after {max(line['at'] for line in history(path)) - began:.2f} s")
            assert {line["pid"] for line in history(path)} == set(new.children())
            known = tasks.nap.enqueue(0)
            wait_until(lambda: TaskRecord.objects.succeeded().count() == 51, "all tasks")
        assert "postponed" not in old.output()
        assert old.output().count("tasks left to workers") <= 50
    assert known.id not in {result.id for result in results}
    assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()
