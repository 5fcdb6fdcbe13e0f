"""`asyncq check-deploy`: each mistake is found before the deploy, and nothing that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_asyncq import task
from django_asyncq.broker import servers
from django_asyncq.core import registry
from django_asyncq.core.names import uuid7
from django_asyncq.models import Gate, Schedule, TaskRecord, TaskState
from django_asyncq.observe.deploying import check_deploy

from .. import tasks
from ..admin_cases import make
from ..workers import wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_keys")]
ADD, HERE = tasks.add.module_path, "tests.observe.test_deploying"


def takes_two(first: int, second: int, *, third: int = 0) -> None:
    """A task."""


def pairs(args: list[Any], kwargs: dict[str, Any], from_version: int) -> tuple[list[Any], dict[str, Any]]:
    """Split a text."""
    return args[0].split(","), kwargs


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test declares is gone after it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_former", dict(registry._former))
    yield


def row(*args: Any, name: str = f"{HERE}.takes_two", **columns: Any) -> TaskRecord:
    return TaskRecord.objects.create(name=name, args=list(args), **{"queue_name": "default", **columns})


def schedule(**columns: Any) -> None:
    made = Schedule(**{"name": "nightly", "interval_seconds": 3600, **columns})
    made.plan_next(timezone.now())
    made.save()


def told(*arguments: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    out = StringIO()
    try:
        call_command("asyncq", "check-deploy", "--json", *arguments, stdout=out)
    except CommandError as error:
        assert "not safe to deploy" in str(error)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


PLANTED: dict[str, Any] = {
    "name": lambda: row(1, name="shop.tasks.renamed"),
    "version": lambda: row(1, 2, version=9),
    "arguments: one too few": lambda: row(1),
    "arguments: a name that is gone": lambda: row(1, 2, kwargs={"fourth": 4}),
    "upgrade: it fails": lambda: row(7, version=1),
    "upgrade: what it returns cannot be passed": lambda: row("1,2,3", version=1),
    "queue": lambda: row(1, 2, queue_name="gone"),
    "backend": lambda: row(1, 2, backend="gone"),
    "gate": lambda: row(1, 2, gate="nobody"),
    "schedule: no such task": lambda: schedule(task="shop.tasks.renamed"),
    "schedule: its arguments": lambda: schedule(task=f"{HERE}.takes_two", args=[1]),
    "schedule: not schedulable": lambda: schedule(task=ADD, args=[1]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_each_mistake_is_found_and_named(planted: str, settings: Any) -> None:
    """With how many tasks it is about, and one of them; the exit code is 1."""
    settings.TASKS = {**settings.TASKS, "default": {**settings.TASKS["default"], "QUEUES": ["default", "shared"]}}
    is_upgrade = planted.startswith("upgrade")
    more: dict[str, Any] = {"version": 2, "upgrade": pairs} if is_upgrade else {}
    task(takes_two, schedulable=True, **more)
    row(1, 2, version=2 if is_upgrade else 1)
    made = PLANTED[planted]()
    (found,) = told()["mistakes"]
    assert found["kind"] == planted.partition(":")[0]
    if made is not None:
        assert (found["subject"], found["total"], found["example"]) == (made.name, 1, str(made.id))
    else:
        assert (found["subject"], found["total"]) == ("nightly", 0)
    with pytest.raises(CommandError, match="not safe to deploy: 1 mistake"):
        call_command("asyncq", "check-deploy", stdout=StringIO())


def test_what_is_no_mistake_is_not_found() -> None:
    """Every kind of live row that this code can run, finished rows of any kind, and disabled schedules."""
    task(takes_two, aliases="shop.tasks.send", version=2, upgrade=pairs, schedulable=True)
    Gate.objects.create(name="known", limit=3)
    row("1,2", name="shop.tasks.send")
    row(1, 2, version=2, kwargs={"third": 3}, gate="known")
    row(1, 2, version=2, gate="of the task", queue_limit=3)
    row("a word of Go", wire_id="go-1", wire_message=b"x")
    row("x", name="go:remote", is_remote=True)
    make(TaskState.FAILED, name="shop.tasks.removed")
    make(TaskState.SUCCEEDED, name="shop.tasks.removed")
    schedule(task="shop.tasks.send", args=["1,2"])
    schedule(name="off", task="shop.tasks.removed", enabled=False)
    found = told()
    assert (found["mistakes"], found["is_safe"]) == ([], True)
    assert (found["tasks"], found["schedules"]) == (4, 1)
    out = StringIO()
    call_command("asyncq", "check-deploy", stdout=out)
    assert out.getvalue() == "safe to deploy: this code can run 4 live tasks of 2 names and 1 schedule\n"


def test_tasks_of_one_form_are_one_group_and_both_ends_are_tried() -> None:
    """A thousand rows are two calls, the oldest and the newest; each other form is tried by itself."""
    task(takes_two, version=2, upgrade=pairs)
    ids = sorted(uuid7() for _ in range(1000))
    TaskRecord.objects.bulk_create(
        [TaskRecord(id=id, name=f"{HERE}.takes_two", args=["1,2"], queue_name="default") for id in ids]
    )
    assert check_deploy().mistakes == []
    TaskRecord.objects.filter(pk=ids[-1]).update(args=["1"])
    (found,) = check_deploy().mistakes
    assert (found.kind, found.total, UUID(found.example)) == ("upgrade", 1000, ids[0])


def test_odd_arguments_are_a_mistake_and_no_error() -> None:
    """Such a task fails when it runs."""
    task(takes_two)
    TaskRecord.objects.filter(pk=row().pk).update(args={"a": 1}, kwargs=[1])
    (found,) = check_deploy().mistakes
    assert found.kind == "arguments"


def test_running_workers_of_older_code_are_found(tmp_path: Any) -> None:
    """By their version of the project; tasks of queues that they do not take are none of theirs."""
    assert told("--against-running")["workers"] == 0
    tasks.add.enqueue(1)
    with workers(tmp_path, ASYNCQ_TEST_OLD_CODE="1"):
        wait_until(lambda: [each for each in servers.workers() if each.queues], "the heartbeat of the worker")
        found = told("--against-running")
    of_old = {each["subject"]: each["text"] for each in found["mistakes"] if each["kind"] == "running"}
    assert "1 of 1 running workers of queue 'default'" in of_old["tests.tasks.new_task"]
    assert ADD not in of_old
