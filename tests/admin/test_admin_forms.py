"""The forms that enqueue: a failed task with new arguments, and a call that a person makes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_asyncq.models import Gate, TaskRecord, TaskState

from .. import tasks, unique_tasks
from ..admin_cases import LIST, client_with, make, said

pytestmark = pytest.mark.django_db(transaction=True)

ENQUEUE = f"{LIST}enqueue/"
RIGHTS = ("view_taskrecord", "retry_task", "view_payload")


@pytest.fixture
def operator() -> Client:
    """A person who may do both."""
    return client_with(*RIGHTS, "enqueue_task")


def again_of(record: TaskRecord) -> str:
    return f"{LIST}{record.pk}/again/"


def new() -> TaskRecord:
    """The only queued task."""
    return TaskRecord.objects.get(state=TaskState.QUEUED)


# --- 15: retry with new arguments


def test_a_failed_task_is_enqueued_with_new_arguments(operator: Client) -> None:
    """A new task, linked to the old one, which stays as it is; both are in the history."""
    old = make(args=[1], kwargs={"b": 2}, queue_name="mail", priority=3)
    assert "Retry with new arguments" in operator.get(f"{LIST}{old.pk}/change/").content.decode()
    form = operator.get(again_of(old)).content.decode()
    assert "[1]" in form and "&quot;b&quot;: 2" in form
    response = operator.post(again_of(old), {"args": "[5]", "kwargs": '{"b": 6}'})
    record = new()
    assert response.url == f"{LIST}{record.pk}/change/"
    assert (record.args, record.kwargs, record.queue_name, record.priority) == ([5], {"b": 6}, "mail", 3)
    assert record.retried_from == old.pk and TaskRecord.objects.get(pk=old.pk).state == TaskState.FAILED
    assert str(old.pk) in operator.get(response.url).content.decode()
    assert LogEntry.objects.count() == 2


def test_a_task_that_succeeded_is_run_again_with_its_arguments(operator: Client) -> None:
    """The form has them; the copy is linked, and the history says that nothing was changed."""
    old = make(TaskState.SUCCEEDED, args=[1], kwargs={"b": 2})
    page = operator.get(f"{LIST}{old.pk}/change/").content.decode()
    assert "Run again" in page and "Retry with new arguments" not in page
    assert "Run add" in operator.get(again_of(old)).content.decode()
    operator.post(again_of(old), {"args": "[1]", "kwargs": '{"b": 2}'})
    record = new()
    assert (record.args, record.kwargs, record.retried_from) == ([1], {"b": 2}, old.pk)
    assert sorted(entry.change_message for entry in LogEntry.objects.all()) == [
        f"Enqueued again as {record.pk}.",
        f"Enqueued again, after {old.pk}.",
    ]


def test_an_existing_task_with_the_key_is_not_called_new(operator: Client) -> None:
    """It keeps its arguments and its history; the message says that it was there."""
    standing = unique_tasks.shared.enqueue(2)
    old = make(name="tests.unique_tasks.shared", args=[1])
    response = operator.post(again_of(old), {"args": "[2]", "kwargs": ""})
    record = TaskRecord.objects.get(pk=standing.id)
    assert response.url == f"{LIST}{record.pk}/change/" and record.retried_from is None
    assert said(response) == [("warning", f"No new task: {record} has the same key, and stays as it is.")]
    assert TaskRecord.objects.count() == 2 and not LogEntry.objects.exists()


def test_a_waiting_task_that_got_the_arguments_says_so(operator: Client) -> None:
    """No new task is claimed; the history of the one that was changed has who did it."""
    standing = unique_tasks.newest.enqueue(1, "old")
    old = make(name="tests.unique_tasks.newest", args=[1, "lost"])
    response = operator.post(again_of(old), {"args": '[1, "new"]', "kwargs": ""})
    record = TaskRecord.objects.get(pk=standing.id)
    assert record.args == [1, "new"] and record.retried_from is None
    assert said(response) == [("success", f"No new task: {record} was waiting, and got these arguments.")]
    assert LogEntry.objects.get().object_id == str(record.pk)


@pytest.mark.parametrize(
    ("args", "kwargs", "shown"),
    [
        ("[1", "{}", "line 1"),
        ("{}", "{}", "Enter a list"),
        ("[]", "[]", "Enter an object"),
        ("[1]", '{"x": 1}', "x"),
        ("[]", "{}", "a"),
        ("[1]", '{"b": 1, "b": 2}', "occurs twice"),
        ("[1]", "9" * 5000, "too long"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_the_form(operator: Client, args: str, kwargs: str, shown: str) -> None:
    """Nothing is written, and what was typed stays."""
    old = make(args=[1])
    text = operator.post(again_of(old), {"args": args, "kwargs": kwargs}).content.decode()
    assert "Nothing was enqueued." in text and shown in text and 'class="errorlist' in text
    assert TaskRecord.objects.count() == 1 and not LogEntry.objects.exists()


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING])
def test_only_a_task_that_has_ended_is_enqueued_anew(operator: Client, state: TaskState) -> None:
    """A message says so; also for a task that the code has no more."""
    for record in (make(state), make(name="gone.task")):
        assert said(operator.post(again_of(record), {"args": "[1]", "kwargs": ""}))[-1][0] == "warning"
        assert "Retry with new arguments" not in operator.get(f"{LIST}{record.pk}/change/").content.decode()
    assert TaskRecord.objects.count() == 2


def test_masked_values_are_shown_to_those_only_who_may_see_them() -> None:
    """A mask is never what is enqueued: without the permission there is no form."""
    old = make(name="tests.admin.test_admin.login", kwargs={"user": "ann", "password": "hunter22"})
    for rights in (
        ("view_taskrecord", "retry_task"),
        ("view_taskrecord", "view_payload"),
        ("retry_task", "view_payload"),
    ):
        client = client_with(*rights, name="-".join(rights))
        assert client.get(again_of(old)).status_code == client.post(again_of(old), {}).status_code == 403


# --- a call that a person makes


def test_a_person_enqueues_a_task_that_allows_it(operator: Client) -> None:
    """With a queue, a priority and a delay of its own."""
    assert "Enqueue a task" in operator.get(LIST).content.decode()
    form = operator.get(ENQUEUE).content.decode()
    assert "null" not in form.partition("<form")[2]
    assert "tests.tasks.tidy(days=30)" in form and "tests.tasks.add" not in form
    values = {"name": "tests.tasks.tidy", "args": "", "kwargs": '{"days": 3}', "queue_name": "mail", "priority": "5"}
    response = operator.post(ENQUEUE, {**values, "delay_seconds": "60"})
    record = new()
    assert response.url == f"{LIST}{record.pk}/change/"
    assert (record.name, record.kwargs, record.queue_name, record.priority) == (
        "tests.tasks.tidy",
        {"days": 3},
        "mail",
        5,
    )
    assert record.run_after is not None and LogEntry.objects.get().change_message == "Enqueued."


@pytest.mark.parametrize(
    "values",
    [
        {"name": "tests.tasks.add"},
        {"name": "os.system"},
        {"name": ""},
        {"kwargs": '{"nothing": 1}'},
        {"queue_name": "a b{}"},
        {"queue_name": "\x00"},
        {"priority": "101"},
        {"delay_seconds": "-1"},
        {"delay_seconds": "x"},
    ],
)
def test_what_cannot_be_enqueued_is_refused_at_the_form(operator: Client, values: dict[str, str]) -> None:
    """Nothing is written."""
    response = operator.post(ENQUEUE, {"name": "tests.tasks.tidy", "args": "", "kwargs": "", **values})
    assert response.status_code == 200 and "Nothing was enqueued." in response.content.decode()
    assert not TaskRecord.objects.exists() and not LogEntry.objects.exists()


def test_a_full_gate_is_said_at_the_form(operator: Client) -> None:
    """The refusal names the gate."""
    Gate.objects.create(name="tally", limit=1)
    values: dict[str, Any] = {"name": "tests.tasks.gated_tally", "args": "", "kwargs": json.dumps({})}
    gate = tasks.gated_tally.gate
    Gate.objects.filter(name="tally").update(name=gate if isinstance(gate, str) else "tally")
    first = operator.post(ENQUEUE, values)
    assert first.status_code == 302, first.content.decode()[-3000:]
    second = operator.post(ENQUEUE, values)
    assert second.status_code == 200 and "full" in second.content.decode()
    assert TaskRecord.objects.count() == 1


def test_each_form_needs_its_permission() -> None:
    """By GET and by POST."""
    viewer = client_with("view_taskrecord", name="viewer")
    assert viewer.get(ENQUEUE).status_code == viewer.post(ENQUEUE, {"name": "tests.tasks.tidy"}).status_code == 403
    assert "Enqueue a task" not in viewer.get(LIST).content.decode()
    strict = client_with(*RIGHTS, "enqueue_task", name="strict", enforce_csrf_checks=True)
    assert strict.post(ENQUEUE, {"name": "tests.tasks.tidy"}).status_code == 403
    assert not TaskRecord.objects.exists()
