"""What a person can do to tasks in the admin: one, those that are ticked, and everything that matches."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.admin import bulk, history
from django_asyncq.control import start_bulk
from django_asyncq.models import BulkAction, BulkState, FailureReason, TaskRecord, TaskState
from django_asyncq.storage import routing

from .. import tasks
from ..admin_cases import LIST, client_with, make, said

pytestmark = pytest.mark.django_db(transaction=True)

BULK = "/admin/django_asyncq/bulkaction/"
RIGHTS = {"retry": "retry_task", "run": "retry_task", "cancel": "cancel_task"}


def page_of(record: TaskRecord) -> str:
    return f"{LIST}{record.pk}/change/"


def state_of(record: TaskRecord) -> int:
    return TaskRecord.objects.get(pk=record.pk).state


def marked(client: Client, action: str, *records: TaskRecord, **values: Any) -> Any:
    """Run an action of the list on ticked tasks."""
    ids = [str(record.pk) for record in records]
    return client.post(LIST, {"action": f"{action}_selected", "_selected_action": ids, **values})


# --- 16: cancel


def test_cancel_asks_first_and_the_page_says_who_and_why() -> None:
    """The task then never runs."""
    task = tasks.stamp.enqueue()
    record = TaskRecord.objects.get(pk=task.id)
    client = client_with("view_taskrecord", "cancel_task")
    question = client.post(f"{LIST}{record.pk}/cancel/")
    assert question.status_code == 200 and "Cancel 1 task?" in question.content.decode()
    assert state_of(record) == TaskState.QUEUED
    client.post(f"{LIST}{record.pk}/cancel/", {"confirmed": "yes", "reason": "wrong customer"})
    record.refresh_from_db()
    assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.CANCELLED)
    page = client.get(page_of(record)).content.decode()
    assert "ann: wrong customer" in page and "1 task was cancelled." in page
    assert LogEntry.objects.get().change_message == "Cancelled: wrong customer"


def test_cancel_of_a_running_task_asks_it_to_stop() -> None:
    """And says so."""
    record = make(TaskState.RUNNING, last_attempted_at=timezone.now(), worker_ids=["w"])
    client = client_with("view_taskrecord", "cancel_task")
    response = client.post(f"{LIST}{record.pk}/cancel/", {"confirmed": "yes"})
    assert said(response) == [("success", "1 task may be running, and was asked to stop.")]
    record.refresh_from_db()
    assert record.state == TaskState.RUNNING and record.cancelled_by == "ann"


def test_cancel_of_a_finished_task_changes_nothing() -> None:
    """A message says so, and nothing is in the history."""
    record = make(TaskState.SUCCEEDED)
    client = client_with("view_taskrecord", "cancel_task")
    response = client.post(f"{LIST}{record.pk}/cancel/", {"confirmed": "yes"})
    assert said(response) == [("warning", "1 task had finished already.")]
    assert not LogEntry.objects.exists()


# --- run now


def assert_due_since_now(record: TaskRecord) -> None:
    """It waits since a moment ago, whenever it was enqueued."""
    assert record.run_after is not None and abs((record.run_after - timezone.now()).total_seconds()) < 5


def test_a_delayed_task_runs_now() -> None:
    """One press is enough; the second says that nothing was changed."""
    task = tasks.stamp.using(run_after=timezone.now() + timedelta(hours=5)).enqueue()
    client = client_with("view_taskrecord", "retry_task")
    assert "Run now" in client.get(f"{LIST}{task.id}/change/").content.decode()
    client.post(f"{LIST}{task.id}/run/")
    assert_due_since_now(TaskRecord.objects.get(pk=task.id))
    response = client.post(f"{LIST}{task.id}/run/")
    assert [level for level, _text in said(response)] == ["success", "warning"]
    assert LogEntry.objects.get().change_message == "Run now."


# --- the buttons


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        (TaskState.QUEUED, {}, ["Cancel task"]),
        (TaskState.QUEUED, {"run_after": "later"}, ["Run now", "Cancel task"]),
        (TaskState.RUNNING, {}, ["Cancel task"]),
        (TaskState.SUCCEEDED, {}, []),
        (TaskState.FAILED, {}, ["Retry"]),
        (TaskState.FAILED, {"retry_at": "later"}, ["Retry", "Cancel task"]),
        (TaskState.FAILED, {"name": "gone.task"}, []),
    ],
)
def test_a_page_has_the_buttons_that_suit_the_state(
    state: TaskState, more: dict[str, Any], expected: list[str]
) -> None:
    """And none for a viewer."""
    later = timezone.now() + timedelta(hours=1)
    record = make(state, **{name: later if value == "later" else value for name, value in more.items()})
    client = client_with("view_taskrecord", "retry_task", "cancel_task")
    assert [button.text for button in client.get(page_of(record)).context["buttons"]] == expected
    assert client_with("view_taskrecord", name="viewer").get(page_of(record)).context["buttons"] == []


def test_the_title_names_the_task() -> None:
    """In the tab of the browser and at the head of the page."""
    record = make(name="shop.tasks.send_receipt")
    text = client_with("view_taskrecord").get(page_of(record)).content.decode()
    assert f"<title>send_receipt {record.short_id} |" in text and f"<h1>send_receipt {record.short_id}</h1>" in text


# --- 11, 31: ticked tasks


def test_ticked_tasks_are_cancelled_after_a_question() -> None:
    """It lists them, with those that will not be changed; each has an entry in its history."""
    waiting = [make(TaskState.QUEUED) for _ in range(3)]
    lifecycle.dispatch(waiting)
    over = make(TaskState.SUCCEEDED)
    client = client_with("view_taskrecord", "cancel_task")
    text = marked(client, "cancel", *waiting, over).content.decode()
    assert "Cancel 3 tasks?" in text and "1 selected task will not be changed." in text
    assert all(str(record) in text for record in waiting)
    response = marked(client, "cancel", *waiting, over, confirmed="yes", reason="no")
    assert [text for _level, text in said(response)] == ["3 tasks were cancelled.", "1 task had finished already."]
    assert {state_of(record) for record in waiting} == {TaskState.FAILED}
    assert LogEntry.objects.count() == 3


def test_ticked_tasks_run_now() -> None:
    """Delayed ones are due, failed ones queued again."""
    later = timezone.now() + timedelta(hours=1)
    delayed, failed, running = make(TaskState.QUEUED, run_after=later), make(), make(TaskState.RUNNING)
    client = client_with("view_taskrecord", "retry_task")
    assert "Run 2 tasks now?" in marked(client, "run", delayed, failed, running).content.decode()
    response = marked(client, "run", delayed, failed, running, confirmed="yes")
    assert [level for level, _text in said(response)] == ["success", "success", "warning"]
    assert state_of(failed) == TaskState.QUEUED
    assert_due_since_now(TaskRecord.objects.get(pk=delayed.pk))


def test_a_history_of_many_tasks_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit."""
    monkeypatch.setattr(history, "MOST_ENTRIES", 2)
    records = [make(TaskState.QUEUED) for _ in range(3)]
    marked(client_with("view_taskrecord", "cancel_task"), "cancel", *records, confirmed="yes")
    assert LogEntry.objects.get().object_repr == "3 tasks"


# --- 32: permissions


@pytest.mark.parametrize("action", ["retry", "run", "cancel"])
def test_each_action_needs_its_permission(action: str) -> None:
    """A forged POST gets 403, of a button and of the list; a GET 405; a visitor is sent to the login."""
    record = make(TaskState.QUEUED, run_after=timezone.now() + timedelta(hours=1))
    address = f"{LIST}{record.pk}/{action}/"
    viewer = client_with("view_taskrecord", name="viewer")
    assert viewer.post(address, {"confirmed": "yes"}).status_code == 403
    assert marked(viewer, action, record, confirmed="yes").status_code == 403
    blind = client_with(RIGHTS[action], name="blind")
    assert blind.post(address, {"confirmed": "yes"}).status_code == 403
    assert marked(blind, action, record, confirmed="yes").status_code == 403
    allowed = client_with("view_taskrecord", RIGHTS[action], name="allowed")
    assert allowed.get(address).status_code == 405
    assert client_with(name="strict", is_superuser=True, enforce_csrf_checks=True).post(address).status_code == 403
    assert Client().post(address).status_code == 302
    assert not LogEntry.objects.exists()
    record.refresh_from_db()
    assert record.run_after is not None and record.cancel_requested_at is None


def test_a_task_that_is_not_there_is_said_to_be_missing() -> None:
    """Of any kind of id."""
    client = client_with("view_taskrecord", "cancel_task")
    for id in ("00000000-0000-0000-0000-000000000000", "x"):
        response = client.post(f"{LIST}{id}/cancel/", {"confirmed": "yes"})
        assert said(response)[-1] == ("warning", "This task no longer exists.")


# --- 12: everything that matches


def test_everything_that_matches_becomes_an_action_in_the_background() -> None:
    """The question has the filter in words, the number, examples and the pace; a second click starts nothing."""
    rows = [make(queue_name="mail") for _ in range(3)]
    make()
    client = client_with("view_taskrecord", "retry_task", "view_bulkaction")
    listed = client.get(LIST, {"queue": "mail", "state": "failed"}).content.decode()
    (address,) = [unescape(each) for each in re.findall(r'href="([^"]*/bulk/[^"]*)"', listed)]
    text = client.get(address).content.decode()
    assert "Retry 3 failed tasks?" in text and "queue: mail" in text and "state: Failed (final)" in text
    assert str(rows[-1]) in text and 'value="200"' in text and not BulkAction.objects.exists()
    response = client.post(address, {"confirmed": "yes", "pace": "50"}, follow=True)
    action = BulkAction.objects.get()
    assert (action.kind, action.total, action.rows_per_second, action.created_by) == ("retry", 3, 50, "ann")
    assert response.redirect_chain[-1][0] == f"{BULK}{action.pk}/change/"
    assert "Retry of many tasks" in response.content.decode()
    client.post(address, {"confirmed": "yes", "pace": "50"})
    assert BulkAction.objects.count() == 1
    assert LogEntry.objects.first().object_id == str(action.pk)


def test_a_deletion_of_very_many_asks_to_type_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question has the exact number. What is enqueued or fails after it is not among them."""
    monkeypatch.setattr(bulk, "MOST_WITHOUT_TYPING", 2)
    monkeypatch.setattr(routing, "MOST_COUNTED", 2)
    for _ in range(3):
        make()
    client = client_with("view_taskrecord", "delete_taskrecord", "view_bulkaction")
    response = client.get(f"{LIST}bulk/?kind=delete&state=failed", follow=True)
    address, text = response.redirect_chain[0][0], response.content.decode()
    assert "Delete 3 tasks?" in text and 'name="typed"' in text
    make()
    values = {"confirmed": "yes", "reason": "old tests", "shown": "3"}
    for typed in ("", "2", "x"):
        text = client.post(address, {**values, "typed": typed}).content.decode()
        assert "This is not the number of tasks." in text and "Delete 3 tasks?" in text
    assert not BulkAction.objects.exists()
    client.post(address, {**values, "typed": " 3 "})
    assert BulkAction.objects.get().total == 3


def test_what_destroys_needs_a_reason() -> None:
    """Without one the question is asked again, beside the field."""
    make()
    client = client_with("view_taskrecord", "delete_taskrecord", "view_bulkaction")
    address = f"{LIST}bulk/?kind=delete&state=failed"
    text = client.post(address, {"confirmed": "yes", "reason": "  "}).content.decode()
    assert "Give a reason" in text and 'aria-invalid="true"' in text and not BulkAction.objects.exists()
    client.post(address, {"confirmed": "yes", "reason": "old tests"})
    assert BulkAction.objects.get().kind == "delete"
    assert "old tests" in LogEntry.objects.get().change_message


@pytest.mark.parametrize(
    ("query", "kinds"),
    [
        ("", []),
        ("state=failed", ["Retry…", "Delete…"]),
        ("state=queued", ["Cancel…"]),
        ("state=succeeded", ["Delete…"]),
        ("queue=mail", ["Retry…", "Cancel…", "Delete…"]),
        ("reason=timeout&within=1h", ["Retry…", "Cancel…", "Delete…"]),
    ],
)
def test_the_list_offers_what_suits_its_filter(query: str, kinds: list[str]) -> None:
    """Nothing without a filter."""
    client = client_with("view_taskrecord", "retry_task", "cancel_task", "delete_taskrecord")
    text = client.get(f"{LIST}?{query}").content.decode()
    assert re.findall(r'href="[^"]*/bulk/[^"]*">([^<]*)<', text) == kinds


@pytest.mark.parametrize("query", ["q=x", "state=stuck", "worker=w", "kwargs__password=1"])
def test_a_filter_that_no_action_knows_offers_nothing(query: str) -> None:
    """It says so, and a forged address starts nothing."""
    make()
    client = client_with("view_taskrecord", "retry_task")
    if "kwargs" not in query:
        assert "To change everything that matches" in client.get(f"{LIST}?{query}").content.decode()
    response = client.post(f"{LIST}bulk/?kind=retry&{query}", {"confirmed": "yes"})
    assert response.status_code == 302 and not BulkAction.objects.exists()


@pytest.mark.parametrize(
    "kind", ["", "x", "retry&state=queued", "retry&state=x", "retry&name=" + "x" * 300, "retry&queue=%00"]
)
def test_a_forged_bulk_address_is_refused(kind: str) -> None:
    """With a message, and nothing is started."""
    make()
    client = client_with("view_taskrecord", "retry_task")
    response = client.post(f"{LIST}bulk/?kind={kind}", {"confirmed": "yes"})
    assert response.status_code == 302 and said(response)[0][0] == "warning" and not BulkAction.objects.exists()


@pytest.mark.parametrize(
    ("kind", "right"), [("retry", "retry_task"), ("cancel", "cancel_task"), ("delete", "delete_taskrecord")]
)
def test_each_kind_of_bulk_needs_its_permission(kind: str, right: str) -> None:
    """To ask, and to start."""
    make(TaskState.QUEUED, queue_name="mail")
    make(queue_name="mail")
    address = f"{LIST}bulk/?kind={kind}&queue=mail"
    viewer = client_with("view_taskrecord", name="viewer")
    assert viewer.get(address).status_code == viewer.post(address, {"confirmed": "yes"}).status_code == 403
    response = client_with("view_taskrecord", right, name="allowed").get(address, follow=True)
    assert response.status_code == 200 and "_until=" in response.redirect_chain[0][0]
    assert not BulkAction.objects.exists()


@pytest.mark.parametrize("pace", ["0", "-1", "x", "99999", "1e3"])
def test_a_pace_that_is_none_is_refused(pace: str) -> None:
    """Nothing is started."""
    make()
    client = client_with("view_taskrecord", "retry_task")
    response = client.post(f"{LIST}bulk/?kind=retry&state=failed", {"confirmed": "yes", "pace": pace})
    assert said(response)[0][0] == "warning" and not BulkAction.objects.exists()
    assert "rows_per_second takes a whole number" in said(response)[0][1]


# --- the page of an action


def test_an_action_is_stopped_on_its_page() -> None:
    """Stop asks first; it is in the history."""
    make()
    action = start_bulk("retry", {"state": "failed"}, by="bob")
    client = client_with("view_bulkaction", "retry_task")
    page = f"{BULK}{action.pk}/change/"
    shown = client.get(page)
    assert f'formaction="{BULK}{action.pk}/stop/"' in shown.content.decode()
    assert "0 of 1 done" in shown.content.decode() and "bob" in shown.content.decode()
    assert "Stop this action?" in client.post(f"{BULK}{action.pk}/stop/").content.decode()
    assert BulkAction.objects.get().state == BulkState.RUNNING
    client.post(f"{BULK}{action.pk}/stop/", {"confirmed": "yes"})
    assert BulkAction.objects.get().state == BulkState.STOPPED
    assert "/stop/" not in client.get(page).content.decode()
    assert said(client.post(f"{BULK}{action.pk}/stop/", {"confirmed": "yes"}))[-1][0] == "warning"
    assert [each.change_message for each in LogEntry.objects.all()] == ["Stopped."]


def test_a_viewer_stops_no_action() -> None:
    """Nor does somebody with the right of another kind."""
    make()
    action = start_bulk("retry", {"state": "failed"})
    address = f"{BULK}{action.pk}/stop/"
    for rights in (["view_bulkaction"], ["view_bulkaction", "cancel_task"], ["retry_task"]):
        client = client_with(*rights, name="-".join(rights))
        assert client.post(address, {"confirmed": "yes"}).status_code == 403
    assert client_with("view_bulkaction", "retry_task").get(address).status_code == 405
    assert BulkAction.objects.get().state == BulkState.RUNNING and not LogEntry.objects.exists()
