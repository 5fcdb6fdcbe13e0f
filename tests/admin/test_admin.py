"""The admin pages of tasks and gates: pages, filters, search, retry, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from html import unescape
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import django
import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin.exceptions import AlreadyRegistered
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections
from django.db.models import JSONField
from django.test import Client
from django.urls import path
from django.utils import timezone

from django_asyncq import gates, task
from django_asyncq.admin import CLASSES, GateAdmin, TaskRecordAdmin, base
from django_asyncq.admin.addresses import TABLE, LateAdmin, code_of
from django_asyncq.broker.clients import Client as RedisClient
from django_asyncq.exceptions import GateUnavailable
from django_asyncq.models import FailureReason, Gate, TaskLogLine, TaskRecord, TaskState
from django_asyncq.storage.routing import writing_database
from django_asyncq.testing import EmbeddedRedis

from .. import tasks  # noqa: F401 - registers them
from ..admin_cases import error, make, said

pytestmark = pytest.mark.django_db

LIST = "/admin/django_asyncq/taskrecord/"
EVIL = "</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(2)>"
PERMISSIONS = {
    "anonymous": None,
    "staff": [],
    "view": ["view_taskrecord"],
    "retry": ["retry_task"],
    "view_and_retry": ["view_taskrecord", "retry_task"],
    "change": ["view_taskrecord", "change_taskrecord"],
    "superuser": None,
}


@task
def login(user: str, password: str) -> None:
    """Stand in for a task with a secret parameter."""


def page_of(record: TaskRecord) -> str:
    """The URL of a task's page."""
    return f"{LIST}{record.pk}/change/"


def retry_of(record: TaskRecord) -> str:
    """The URL that the Retry button posts to."""
    return f"{LIST}{record.pk}/retry/"


def state_of(record: TaskRecord) -> int:
    """The current state of the row."""
    return TaskRecord.objects.get(pk=record.pk).state


def listed(response: Any) -> set[UUID]:
    """The ids of the rows that a list shows."""
    return {record.pk for record in response.context["cl"].result_list}


def run_action(client: Client, *records: TaskRecord, query: str = "", **data: str) -> Any:
    """Post the retry action of the list, as its confirmation page does."""
    post = {"action": "retry_selected", "_selected_action": [str(record.pk) for record in records], **data}
    return client.post(LIST + query, post)


@pytest.fixture
def client_of() -> Callable[..., Client]:
    """Clients logged in with the permissions of that name."""

    def build(who: str, **options: Any) -> Client:
        client = Client(**options)
        codenames = PERMISSIONS[who]
        if who != "anonymous":
            user = User.objects.create_user(who, is_staff=True, is_superuser=who == "superuser")
            user.user_permissions.set(Permission.objects.filter(codename__in=codenames or []))
            client.force_login(user)
        return client

    return build


@pytest.fixture
def operator(client_of: Callable[..., Client]) -> Client:
    """A client that may view and retry, and nothing else."""
    return client_of("view_and_retry")


# --- permissions


@pytest.mark.parametrize(
    ("who", "list_code", "page_code", "get_code", "post_code", "retried"),
    [
        ("anonymous", 302, 302, 302, 302, False),
        ("staff", 403, 403, 405, 403, False),
        ("view", 200, 200, 405, 403, False),
        ("retry", 403, 403, 405, 403, False),
        ("change", 200, 200, 405, 403, False),
        ("view_and_retry", 200, 200, 405, 302, True),
        ("superuser", 200, 200, 405, 302, True),
    ],
)
def test_permissions_of_page_and_button(
    client_of: Any, who: str, list_code: int, page_code: int, get_code: int, post_code: int, retried: bool
) -> None:
    """Retry needs view and `retry_task`; GET never changes anything; a forged POST without them gets 403."""
    record, client = make(), client_of(who)
    assert client.get(LIST).status_code == list_code
    page = client.get(page_of(record))
    assert page.status_code == page_code
    assert (b"formaction" in page.content) is retried
    assert client.get(retry_of(record)).status_code == get_code
    assert state_of(record) == TaskState.FAILED
    assert client.post(retry_of(record)).status_code == post_code
    assert (state_of(record) == TaskState.QUEUED) is retried
    assert LogEntry.objects.count() == int(retried)


@pytest.mark.parametrize(
    ("who", "retried"),
    [
        ("anonymous", False),
        ("staff", False),
        ("view", False),
        ("retry", False),
        ("change", False),
        ("view_and_retry", True),
        ("superuser", True),
    ],
)
def test_permissions_of_the_action(client_of: Any, who: str, retried: bool) -> None:
    """The action is offered to and works for permitted users only."""
    record, client = make(), client_of(who)
    page = client.get(LIST)
    if page.status_code == 200:
        assert (b'value="retry_selected"' in page.content) is retried
    run_action(client, record, confirmed="yes")
    assert (state_of(record) == TaskState.QUEUED) is retried


@pytest.mark.skipif(django.VERSION < (6, 1), reason="actions on the page of one object came with Django 6.1")
@pytest.mark.parametrize(("who", "retried"), [("view", False), ("view_and_retry", True)])
def test_action_works_from_the_page_of_one_task(client_of: Any, who: str, retried: bool) -> None:
    """Django's action on the object's page requires the same permission; only our button is shown."""
    record, client = make(), client_of(who)
    assert b"CHANGE_FORM-action" not in client.get(page_of(record)).content
    data = {"CHANGE_FORM-action": "retry_selected", "action": "retry_selected", "_selected_action": str(record.pk)}
    client.post(page_of(record), data)
    assert (state_of(record) == TaskState.QUEUED) is retried


def test_retry_needs_the_csrf_token(client_of: Any) -> None:
    """Button, action and confirmation refuse a POST without the token, and their forms contain it."""
    record, client = make(), client_of("view_and_retry", enforce_csrf_checks=True)
    assert client.post(retry_of(record)).status_code == 403
    assert run_action(client, record, confirmed="yes").status_code == 403
    assert state_of(record) == TaskState.FAILED
    page = client.get(page_of(record)).content.decode()
    form = page.partition('id="taskrecord_form"')[2].partition("</form>")[0]
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token and f'formaction="{retry_of(record)}" formmethod="post"' in form
    confirmation = client.post(
        LIST, {"action": "retry_selected", "_selected_action": str(record.pk), "csrfmiddlewaretoken": token[1]}
    )
    assert "csrfmiddlewaretoken" in confirmation.content.decode()
    assert client.post(retry_of(record), {"csrfmiddlewaretoken": token[1]}).status_code == 302
    assert state_of(record) == TaskState.QUEUED


@pytest.mark.parametrize("who", ["view", "change", "view_and_retry", "superuser"])
def test_nobody_adds_or_edits(client_of: Any, who: str) -> None:
    """Not even a superuser edits a task by hand, because the row says what happened."""
    record, client = make(), client_of(who)
    assert client.get(LIST + "add/").status_code == 403
    assert client.post(LIST + "add/", {"name": "x"}).status_code == 403
    assert client.post(page_of(record), {"name": "os.system", "_save": "Save"}).status_code == 403
    page = client.get(page_of(record)).content
    assert b'name="_save"' not in page and b'name="name"' not in page
    assert TaskRecord.objects.get().name == "tests.tasks.add"


def test_deletes_only_with_permission_and_never_a_running_task(client_of: Any, operator: Client) -> None:
    """A running task cannot be deleted from its page or from the list, and a message says so."""
    running, done = make(TaskState.RUNNING), make(TaskState.SUCCEEDED)
    assert operator.post(f"{LIST}{done.pk}/delete/", {"post": "yes"}).status_code == 403
    admin = client_of("superuser")
    assert admin.post(f"{LIST}{running.pk}/delete/", {"post": "yes"}).status_code == 403
    assert b"deletelink" not in admin.get(page_of(running)).content
    data = {"action": "delete_selected", "_selected_action": [str(running.pk), str(done.pk)]}
    question = admin.post(LIST, data)
    assert question.status_code == 200 and str(running.pk) not in question.content.decode()
    answer = admin.post(LIST, {**data, "post": "yes"})
    assert said(answer) == [
        ("warning", "1 running task cannot be deleted."),
        ("success", "Successfully deleted 1 task."),
    ]
    assert list(TaskRecord.objects.values_list("pk", flat=True)) == [running.pk]


@pytest.mark.django_db(transaction=True)
def test_deletion_releases_the_gate_slot_and_returns_to_the_list(client_of: Any) -> None:
    """A deleted task no longer holds a slot."""
    Gate.objects.create(name="small", limit=1)
    record = make(TaskState.QUEUED, gate="small")
    gates.acquire([record])
    response = client_of("superuser").post(f"{LIST}{record.pk}/delete/", {"post": "yes"})
    assert (response.status_code, response["Location"]) == (302, LIST)
    assert gates.slots("small") == []


def test_masked_columns_cannot_be_probed_by_url(client_of: Any) -> None:
    """A lookup into arguments would reveal a secret letter by letter, so it is refused."""
    make(kwargs={"password": "hunter2"})
    client = client_of("superuser")
    for lookup in ("kwargs__password__startswith", "args__0", "return_value", "errors__icontains", "progress"):
        assert client.get(LIST, {lookup: "h"}).status_code == 400


# --- retry


def test_button_retries_names_the_task_and_logs(operator: Client) -> None:
    """The task is queued again, a message says so, and the history says who did it."""
    record = make(max_attempts=1, crash_count=2)
    response = operator.post(retry_of(record))
    assert (response.status_code, response["Location"]) == (302, page_of(record))
    assert said(response) == [("success", f"Queued again: {record}.")]
    fresh = TaskRecord.objects.get()
    assert (fresh.state, fresh.finished_at, fresh.crash_count) == (TaskState.QUEUED, None, 0)
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message, entry.user.username) == (
        str(record.pk),
        "Retried.",
        "view_and_retry",
    )
    history = operator.get(f"{LIST}{record.pk}/history/").content.decode()
    assert "Retried." in history and "view_and_retry" in history


def test_second_click_changes_nothing_and_says_so(operator: Client) -> None:
    """The second of two clicks finds the task queued."""
    record = make()
    operator.post(retry_of(record))
    response = operator.post(retry_of(record))
    assert said(response)[-1] == ("warning", f"Not changed, because the state is Queued: {record}.")
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING, TaskState.SUCCEEDED])
def test_task_that_has_not_failed_is_refused(operator: Client, state: TaskState) -> None:
    """The page has no button, and a POST shows a warning and changes nothing."""
    record = make(state)
    before = TaskRecord.objects.values().get()
    assert b"formaction" not in operator.get(page_of(record)).content
    response = operator.post(retry_of(record))
    assert said(response) == [("warning", f"Not changed, because the state is {state.label}: {record}.")]
    assert TaskRecord.objects.values().get() == before


def test_task_between_attempts_can_be_retried_now(operator: Client) -> None:
    """A person can retry before `retry_at`."""
    record = make(retry_at=timezone.now() + timedelta(hours=1))
    operator.post(retry_of(record))
    assert TaskRecord.objects.values_list("state", "retry_at").get() == (TaskState.QUEUED, None)


def test_full_gate_refuses_and_is_named(operator: Client) -> None:
    """As many tasks are queued as the gate admits; the others stay failed, and the message names the gate and limit."""
    Gate.objects.create(name="small", limit=2)
    records = [make(gate="small") for _ in range(3)]
    response = run_action(operator, *records, confirmed="yes")
    states = [state_of(record) for record in records]
    assert sorted(states) == [TaskState.QUEUED, TaskState.QUEUED, TaskState.FAILED]
    left = records[states.index(TaskState.FAILED)]
    (success, refused) = said(response)
    assert success[0] == "success" and success[1].startswith("2 tasks queued again: ")
    assert refused == (
        "warning",
        f"Gate small is full (limit 2), so this failed task was not queued: {left}.",
    )
    assert len(gates.slots("small")) == 2
    assert LogEntry.objects.count() == 2


def test_full_gate_without_a_row_shows_the_limit_set_by_the_task(operator: Client) -> None:
    """`queue_limit` is the limit when the gate has no row."""
    make(TaskState.QUEUED, gate="own", queue_limit=1)
    record = make(gate="own", queue_limit=1)
    response = operator.post(retry_of(record))
    expected = f"Gate own is full (limit 1), so this failed task was not queued: {record}."
    assert said(response) == [("warning", expected)]


def test_retry_without_redis_changes_nothing(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Redis is unreachable, an error says so and all tasks stay failed."""

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise GateUnavailable("small")

    monkeypatch.setattr("django_asyncq.gates.receivers.acquire", unreachable)
    records = [make(gate="small"), make()]
    response = run_action(operator, *records, confirmed="yes")
    assert said(response) == [
        ("error", "Gate small cannot be checked: Redis is unreachable or refuses to write. Nothing was changed.")
    ]
    assert [state_of(record) for record in records] == [TaskState.FAILED] * 2


def test_gate_without_a_limit_is_an_error_not_a_crash(operator: Client) -> None:
    """The message gives the reason."""
    record = make(gate="nobody-knows")
    response = operator.post(retry_of(record))
    ((level, text),) = said(response)
    assert level == "error" and "nobody-knows" in text and text.endswith("Nothing was changed.")
    assert state_of(record) == TaskState.FAILED


@pytest.mark.parametrize("where", ["page", "list"])
def test_receiver_that_refuses_a_retry_is_an_error_not_a_crash(operator: Client, where: str) -> None:
    """With whatever error; the message gives the reason."""
    from django_asyncq.signals import task_state_changing

    def refuse(**kwargs: Any) -> None:
        raise ValueError("not on a Sunday.")

    record = make()
    task_state_changing.connect(refuse)
    try:
        response = operator.post(retry_of(record)) if where == "page" else run_action(operator, record, confirmed="yes")
    finally:
        task_state_changing.disconnect(refuse)
    assert said(response) == [("error", "The retry was refused: not on a Sunday. Nothing was changed.")]
    assert state_of(record) == TaskState.FAILED


def test_queued_task_that_no_worker_can_run_says_what_to_do(operator: Client) -> None:
    """The file is there, and nothing imports it. A task that the code has, and one that is over, say nothing."""
    page = operator.get(page_of(make(name="tests.tasks.send", state=TaskState.QUEUED))).content.decode()
    assert "no worker with this code can run it" in page
    assert "tests.tasks is imported here and declares no task send" in page
    for record in (make(state=TaskState.QUEUED), make(name="tests.tasks.send", state=TaskState.SUCCEEDED)):
        assert "Why: " not in operator.get(page_of(record)).content.decode()


def test_task_removed_from_code_stays_failed_and_the_message_names_it(operator: Client) -> None:
    """The other selected tasks are retried."""
    removed, fine = make(name="shop.tasks.removed"), make()
    page = operator.get(page_of(removed)).content.decode()
    assert "formaction" not in page and "so it cannot be retried" in page
    assert "shop.tasks is not imported here, and no app in INSTALLED_APPS has it; add its app" in page
    response = run_action(operator, removed, fine, confirmed="yes")
    assert said(response) == [
        ("success", f"Queued again: {fine}."),
        ("error", f"The code has no task shop.tasks.removed, so it was not retried: {removed}. Is the code deployed?"),
    ]
    assert [state_of(removed), state_of(fine)] == [TaskState.FAILED, TaskState.QUEUED]


def test_retry_of_a_task_that_does_not_exist_shows_a_warning(operator: Client) -> None:
    """The task was deleted in the meantime, or never existed."""
    response = operator.post(f"{LIST}{uuid4()}/retry/")
    assert (response.status_code, response["Location"]) == (302, LIST)
    assert operator.post(f"{LIST}rubbish/retry/").status_code == 302
    assert [level for level, _text in said(response)] == ["warning"]


def test_action_asks_first_and_cancel_changes_nothing(operator: Client) -> None:
    """The confirmation lists and counts the failed tasks; Cancel is a link to the list."""
    records = [make(name=f"tests.tasks.{name}") for name in ("add", "nap", "gated")]
    queued = make(TaskState.QUEUED)
    response = run_action(operator, *records, queued, query="?within=1h", index="0")
    text = response.content.decode()
    assert response.status_code == 200
    assert response.context["title"] == "Retry 3 failed tasks?"
    assert all(str(record) in text for record in records) and "Retry 3 failed tasks" in text
    assert "1 selected task will not be changed." in text
    assert f'href="{LIST}?within=1h">Cancel' in text
    operator.get(LIST + "?within=1h")
    assert {state_of(record) for record in records} == {TaskState.FAILED}
    assert LogEntry.objects.count() == 0


def test_confirmed_action_retries_and_returns_to_the_filtered_list(operator: Client) -> None:
    """Three selected tasks are queued, with one history entry each."""
    records = [make() for _ in range(3)]
    response = run_action(operator, *records, query="?state=failed", confirmed="yes")
    assert response["Location"] == LIST + "?state=failed"
    assert {state_of(record) for record in records} == {TaskState.QUEUED}
    assert LogEntry.objects.count() == 3
    again = run_action(operator, *records, query="?state=failed", confirmed="yes")
    ((_old, _), (level, text)) = said(again)
    assert level == "warning" and text.startswith("Not changed, because the state is Queued")


def test_action_on_tasks_that_have_not_failed_warns_at_once(operator: Client) -> None:
    """There is nothing to confirm."""
    response = run_action(operator, make(TaskState.RUNNING), index="0")
    assert said(response) == [("warning", "None of the selected tasks has failed, so nothing was retried.")]


@pytest.fixture
def many(operator: Client) -> list[TaskRecord]:
    """20,000 failed tasks, of which every fourth is at a gate of 1 that is full."""
    Gate.objects.create(name="narrow", limit=1)
    make(TaskState.QUEUED, name="tests.tasks.gated", gate="narrow")
    gates = ("", "narrow", "", "")
    values = {"state": TaskState.FAILED, "finished_at": timezone.now(), "reason": FailureReason.EXCEPTION}
    records = [TaskRecord(name="tests.tasks.add", gate=gates[number % 4], **values) for number in range(20_000)]
    TaskRecord.objects.bulk_create(records, batch_size=500)
    return records


LOST: dict[str, Any] = {
    "reason": FailureReason.WORKER_LOST,
    "last_exception": "django_asyncq.exceptions.WorkerLost",
}


@pytest.fixture
def one_of_each() -> dict[str, TaskRecord]:
    """A task in each state."""
    now = timezone.now()
    return {
        "queued": make(TaskState.QUEUED, queue_name="mail"),
        "deferred": make(TaskState.QUEUED, run_after=now + timedelta(minutes=10, seconds=1)),
        "running": make(TaskState.RUNNING, name="tests.tasks.nap", attempt=1, last_attempted_at=now),
        "succeeded": make(TaskState.SUCCEEDED, attempt=1, return_value=3, enqueued_at=now - timedelta(days=3)),
        "retrying": make(retry_at=now + timedelta(minutes=3, seconds=1), attempt=2, max_attempts=4, gate="small"),
        "failed": make(attempt=1, crash_count=2, name="tests.tasks.gated", **LOST),
    }


def row_of(text: str, record: TaskRecord) -> str:
    """The text of one row of the list, without its tags."""
    rows = [row for row in text.split("<tr>") if page_of(record) in row]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", rows[0].partition("</tr>")[0])).split())


def test_list_shows_each_state_in_words(operator: Client, one_of_each: dict[str, TaskRecord]) -> None:
    """A row shows name, id, state, due time, attempts, gate and the first line of the error."""
    text = operator.get(LIST).content.decode()
    assert "Queued , due in 10 min" in row_of(text, one_of_each["deferred"])
    assert "Running" in row_of(text, one_of_each["running"])
    assert "Failed , retry in 3 min (attempt 2 of 4)" in row_of(text, one_of_each["retrying"])
    assert " small " in row_of(text, one_of_each["retrying"])
    failed = row_of(text, one_of_each["failed"])
    assert failed.startswith(f"gated {one_of_each['failed'].short_id} Failed WorkerLost: no luck default")
    assert failed.endswith("default - 1 of 1 2 crashes now now")
    assert 'title="1 of 1, 2 worker crashes"' in text
    for state in ("queued", "running", "succeeded", "failed"):
        assert f'class="asyncq-state asyncq-state-{state}"' in text
    moment = one_of_each["failed"].enqueued_at
    assert f'datetime="{moment.isoformat()}" title="{moment:%Y-%m-%d %H:%M:%S} UTC"' in text
    assert "3 d ago" in row_of(text, one_of_each["succeeded"])


def test_error_in_the_list_is_one_truncated_line_with_the_whole_text_as_title(operator: Client) -> None:
    """The line has at most 120 characters."""
    record = make(errors=[error("old"), error("x" * 200 + "\nsecond line")])
    text = operator.get(LIST).content.decode()
    assert "Glitch: " + "x" * 111 + "…" in row_of(text, record)
    assert f'title="Glitch: {"x" * 200}\nsecond line"' in text


def test_a_task_that_has_not_failed_in_a_run_shows_its_reason(operator: Client) -> None:
    """The error of an earlier attempt is not why it waits now."""
    record = make(reason=FailureReason.GATE_FULL, retry_at=timezone.now() + timedelta(seconds=5))
    shown = row_of(operator.get(LIST).content.decode(), record)
    assert "waits for a slot of gate" in shown and "Glitch" not in shown
    assert "Reason: Its gate was full" in operator.get(page_of(record)).content.decode()


def test_page_shows_the_reason_of_a_failed_task_only(operator: Client) -> None:
    """Other states have none."""
    assert (
        "Reason: It took longer than its timeout"
        in operator.get(page_of(make(reason=FailureReason.TIMEOUT))).content.decode()
    )
    assert "Reason:" not in operator.get(page_of(make(TaskState.SUCCEEDED, errors=[error()]))).content.decode()


def test_the_last_errors_to_choose_from_are_those_of_failed_tasks(operator: Client) -> None:
    """A succeeded task may have one from an earlier attempt; it is neither a choice nor found by it."""
    make(TaskState.SUCCEEDED, last_exception="old.Error")
    failed = make(last_exception="new.Error")
    text = operator.get(LIST).content.decode()
    assert "error=new.Error" in text
    assert "error=old.Error" not in text
    assert listed(operator.get(f"{LIST}?error=new.Error")) == {failed.pk}
    assert listed(operator.get(f"{LIST}?error=old.Error")) == set()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=queued", {"queued", "deferred"}),
        ("state=running", {"running"}),
        ("state=succeeded", {"succeeded"}),
        ("state=retrying", {"retrying"}),
        ("state=failed", {"failed"}),
        ("reason=exception", {"retrying"}),
        ("reason=worker_lost", {"failed"}),
        ("reason=cancelled", set()),
        ("error=tests.tasks.Glitch", {"retrying"}),
        ("error=django_asyncq.exceptions.WorkerLost", {"failed"}),
        ("error=tests.tasks.Glitch&state=failed", set()),
        ("error=tests.tasks", set()),
        ("error=%00", set()),
        ("queue=mail", {"queued"}),
        ("queue=nobody", set()),
        ("queue=%00", set()),
        ("name=tests.tasks.nap", {"running"}),
        ("gate=small", {"retrying"}),
        ("within=24h", {"queued", "deferred", "running", "retrying", "failed"}),
        ("within=7d", {"queued", "deferred", "running", "succeeded", "retrying", "failed"}),
        ("state=queued&queue=mail&within=15m", {"queued"}),
        ("q=nap", {"running"}),
        ("q=TASKS.GATED", {"failed"}),
        ("q=zzz", set()),
        ("q=not-an-id-%F0%9F%98%80", set()),
        ("q=%25", set()),
        ("q=12345678-1234-1234-1234-123456789abc", set()),
        ("q=1234567812341234123412345678", set()),
        ("q=-", set()),
    ],
)
def test_filters_and_search(
    operator: Client, one_of_each: dict[str, TaskRecord], query: str, expected: set[str]
) -> None:
    """Each narrows the list; a query without matches gives an empty list and no error page."""
    response = operator.get(f"{LIST}?{query}")
    assert response.status_code == 200
    assert listed(response) == {one_of_each[name].pk for name in expected}


@pytest.mark.parametrize("query", ["state=rubbish", "within=1y", "nonsense=1", "p=99999", "state__exact=x"])
def test_invalid_url_parameters_are_no_error_page(operator: Client, query: str) -> None:
    """Django redirects an invalid filter to the list."""
    make()
    response = operator.get(f"{LIST}?{query}", follow=True)
    assert response.status_code == 200
    assert operator.get(f"{LIST}?q=%00").status_code == 200


def test_search_finds_by_id_and_its_beginning(operator: Client) -> None:
    """The id may have dashes or not, in any case; its beginning may have any length."""
    low, high = UUID("01a2b3c4-0000-7000-8000-000000000000"), UUID("01a2b3c4-ffff-7fff-bfff-ffffffffffff")
    other = UUID("01a2b3c5-0000-7000-8000-000000000000")
    for pk in (low, high, other):
        make(pk=pk)

    def found(term: str) -> set[UUID]:
        return listed(operator.get(LIST, {"q": term}))

    assert found(str(low)) == found(low.hex.upper()) == found(f" {low} ") == {low}
    assert found("01a2b3c4") == found("01A2B3C4-") == {low, high}
    assert found("01a2b3c4-f") == {high}
    assert found("01a2") == {low, high, other}
    assert found("add") == {low, high, other}
    assert found("fff") == set()


def test_list_reads_a_bounded_number_of_rows_and_no_large_column(
    operator: Client, django_assert_max_num_queries: Any
) -> None:
    """Fifty rows take no more queries than one; no traceback, argument or result is fetched; every read is bounded."""
    Gate.objects.create(name="small", limit=1)
    database = connections[writing_database(TaskRecord)]
    with django_assert_max_num_queries(15, connection=database) as few:
        make()
        operator.get(LIST)
    for _ in range(60):
        make(gate="small", kwargs={"canary": 1})
    with django_assert_max_num_queries(11, connection=database) as many:
        response = operator.get(LIST)
    assert len(many) <= len(few)
    statements = [query["sql"] for query in many.captured_queries if "taskrecord" in query["sql"].lower()]
    # The rows, the numbers of each state, and the latest errors and the names for the filters.
    assert len(statements) == 4
    # A name costs one look into the index, and there are 500 at most.
    assert all("LIMIT" in statement or "WITH RECURSIVE" in statement for statement in statements)
    assert not any("DISTINCT" in statement for statement in statements)
    deferred = response.context["cl"].result_list[0].get_deferred_fields()
    assert deferred >= {"args", "kwargs", "return_value", "progress", "errors"}


# --- the page of a task


def test_page_shows_its_sections_in_order(operator: Client) -> None:
    """State, button, error, attempts, arguments, times, details."""
    started = timezone.now() - timedelta(seconds=90)
    record = make(
        args=[1],
        kwargs={"b": 2},
        attempt=2,
        max_attempts=2,
        errors=[error("first", worker="host-a"), error("second", attempt=2, started_at=started.isoformat())],
        started_at=started,
        worker_ids=["host-a", "host-1"],
        timeout_seconds=120,
        gate="small",
    )
    text = operator.get(page_of(record)).content.decode()
    marks = [
        ">State<",
        ">Retry<",
        ">Error<",
        "Glitch: second",
        ">Attempts<",
        "Traceback of attempt 2",
        "Traceback of attempt 1",
        ">Arguments<",
        "&quot;b&quot;: 2",
        ">Times<",
        "First started",
        ">Details<",
        f'<bdi dir="ltr">{record.pk}',
        "tests.tasks.add",
        "2 min",
    ]
    positions = [text.index(mark, text.index('<div class="asyncq-task"')) for mark in marks]
    assert positions == sorted(positions)
    assert text.count('<details class="asyncq-details" open>') == 1
    assert re.search(r'"cell" data-asyncq-label="Duration"><bdi>1 min<', text)


def test_page_of_a_running_and_of_a_succeeded_task(operator: Client) -> None:
    """The attempt without an error entry is shown too, with its worker; the return value is shown as JSON."""
    now = timezone.now()
    running = make(TaskState.RUNNING, attempt=2, worker_ids=["host-9"], last_attempted_at=now, errors=[error()])
    text = operator.get(page_of(running)).content.decode()
    assert "host-9" in text and text.count('class="asyncq-state asyncq-state-running"') == 2
    assert "asyncq-error" not in text
    done = make(TaskState.SUCCEEDED, attempt=1, return_value={"sum": 3})
    text = operator.get(page_of(done)).content.decode()
    assert "&quot;sum&quot;: 3" in text


def test_page_says_that_a_suspect_runs_alone_next(operator: Client) -> None:
    """A task that has not died with others says nothing of it."""
    suspect, other = (make(TaskState.QUEUED, suspicion=suspicion, errors=[error()]) for suspicion in (2, 1))
    assert "Runs alone next" in operator.get(page_of(suspect)).content.decode()
    assert "Runs alone next" not in operator.get(page_of(other)).content.decode()


def test_long_texts_are_shortened_and_shown_whole_on_request(operator: Client) -> None:
    """A traceback of one megabyte is shortened, and a link shows the whole."""
    record = make(errors=[error(traceback="first line\n" + "x" * 1_000_000 + "\nlast line")])
    short = operator.get(page_of(record)).content.decode()
    assert len(short) < 100_000
    assert "first line" in short and "last line" in short and '<a href="?full">Show all</a>' in short
    assert "x" * 1_000_000 in operator.get(page_of(record) + "?full").content.decode()


def test_only_the_latest_attempts_are_shown(operator: Client) -> None:
    """The page shows the latest fifty attempts, and a link shows all."""
    record = make(errors=[error(attempt=number) for number in range(1, 61)], attempt=60, max_attempts=60)
    text = operator.get(page_of(record)).content.decode()
    assert "10 earlier attempts are not shown." in text
    assert "Traceback of attempt 60<" in text and "Traceback of attempt 10<" not in text
    assert "Traceback of attempt 1<" in operator.get(page_of(record) + "?full").content.decode()


@pytest.mark.parametrize(
    "errors",
    [
        {},
        "text",
        [1, None, "x"],
        [{}],
        [{"exception": None, "message": {"a": 1}, "attempt": "x", "started_at": 5}],
        [{"started_at": "not a time", "failed_at": "2026-01-01T00:00:00"}],
    ],
)
def test_unexpected_column_values_do_not_break_the_pages(operator: Client, errors: Any) -> None:
    """A row that was written by another program can still be viewed."""
    record = make(errors=errors, args={"not": "a list"}, kwargs=[1], worker_ids={"a": 1}, progress="half")
    assert operator.get(LIST).status_code == 200
    assert operator.get(page_of(record)).status_code == 200


def test_lone_surrogates_are_replaced() -> None:
    """SQLite stores a lone surrogate, which cannot be encoded as UTF-8."""
    assert base.excerpt("a\ud800b") == ("a?b", 0)


def test_everything_is_escaped(operator: Client) -> None:
    """Markup in any field is shown as text: in the list, on the page, in the confirmation, in messages."""
    record = make(
        name=f"m.{EVIL}"[:200],
        args=[EVIL],
        kwargs={EVIL: EVIL},
        progress=EVIL,
        queue_name=EVIL[:64],
        gate=EVIL,
        backend=EVIL[:64],
        group=EVIL,
        worker_ids=[EVIL],
        errors=[error(EVIL, exception=f"m.{EVIL}", traceback=EVIL, worker=EVIL, attempt=EVIL)],
    )
    done = make(TaskState.SUCCEEDED, return_value={EVIL: EVIL}, worker_ids=[EVIL])
    Gate.objects.create(name=EVIL, limit=1)
    pages = [
        operator.get(LIST),
        operator.get(LIST, {"q": EVIL, "queue": EVIL, "gate": EVIL, "name": EVIL}),
        operator.get(page_of(record)),
        operator.get(page_of(done)),
        run_action(operator, record, index="0"),
        operator.post(retry_of(record), follow=True),
        operator.get(f"{LIST}{record.pk}/history/"),
    ]
    for page in pages:
        assert page.status_code == 200
        text = page.content.decode()
        assert "<img" not in text.replace('<img src="/static/admin/', "") and "<svg/" not in text


def test_secrets_are_masked_everywhere(operator: Client) -> None:
    """Secrets in arguments, nested values, results, progress, messages and tracebacks are masked on every page."""
    canary = "hunter2canary"
    values = {"password": canary, "nested": [{"api_key": canary}], "user": "ann"}
    record = make(
        name="tests.admin.test_admin.login",
        args=["ann", canary],
        kwargs=values,
        progress=values,
        errors=[error(f"login failed: password={canary}", traceback=f'{{"token": "{canary}"}}')],
    )
    done = make(TaskState.SUCCEEDED, return_value=values, kwargs=values)
    pages = [operator.get(LIST), operator.get(page_of(record)), operator.get(page_of(done))]
    pages += [operator.get(page_of(record) + "?full"), run_action(operator, record, index="0")]
    for page in pages:
        assert page.status_code == 200
        assert canary not in page.content.decode()
    text = unescape(pages[1].content.decode())
    assert '"password": "••••••"' in text and '[\n  "ann",\n  "••••••"\n]' in text


def test_pages_obey_a_strict_content_security_policy(operator: Client, one_of_each: dict[str, TaskRecord]) -> None:
    """The markup contains no inline script, style or handler, and everything is loaded from the site itself."""
    Gate.objects.create(name="small", limit=1)
    pages = [operator.get(page_of(record)) for record in one_of_each.values()]
    pages += [operator.get(LIST), run_action(operator, one_of_each["failed"], index="0")]
    for page in pages:
        text = page.content.decode()
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)(?![^>]*application/json)", text)
        assert not re.search(r"\sstyle=|\son\w+=", text)
        assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text)
        assert "django_asyncq/admin.css" in text


# --- gates


def test_gates_show_their_occupancy(client_of: Any) -> None:
    """Occupancy is shown in words and as a meter, also for a full gate and for one without a limit."""
    for name, limit, holders in (("small", 2, 1), ("full", 1, 1), ("open", 0, 0)):
        Gate.objects.create(name=name, limit=limit)
        gates.acquire([make(TaskState.QUEUED, gate=name) for _ in range(holders)])
    text = client_of("superuser").get("/admin/django_asyncq/gate/").content.decode()
    assert 'aria-valuenow="1" aria-valuemax="2" aria-valuetext="1 of 2"' in text
    assert "1 of 1, full" in text and "0, no limit" in text
    assert text.count('role="meter"') == 2


def test_gates_show_how_many_tasks_wait(client_of: Any) -> None:
    """In the list and on the page of one; tasks that are retried for other reasons do not count."""
    gate = Gate.objects.create(name="busy", limit=1)
    Gate.objects.create(name="idle", limit=1)
    soon = timezone.now() + timedelta(seconds=5)
    for reason in (FailureReason.GATE_FULL, FailureReason.GATE_FULL, FailureReason.EXCEPTION):
        make(gate="busy", reason=reason, retry_at=soon)
    client = client_of("superuser")
    text = client.get("/admin/django_asyncq/gate/").content.decode()
    assert re.findall(r'<td data-asyncq-label="Waiting" class="field-waiting">(\d+)</td>', text) == ["2", "0"]
    page = client.get(f"/admin/django_asyncq/gate/{gate.pk}/change/").content.decode()
    assert re.search(r'field-waiting.*?<div class="readonly">2</div>', page, re.DOTALL)


def test_gates_without_redis_say_why(client_of: Any, own_redis: EmbeddedRedis) -> None:
    """In each row, and the reason may be a missing right."""
    for name in ("a", "b", "c"):
        Gate.objects.create(name=name, limit=1)
    own_redis.kill()
    text = client_of("superuser").get("/admin/django_asyncq/gate/").content.decode()
    assert len(re.findall(r"unknown: <span[^>]*>Redis at [^<]* is unreachable", text)) == 3


@pytest.mark.django_db(transaction=True)
def test_changed_limit_is_effective_at_once_and_the_name_stays(client_of: Any) -> None:
    """The next task is checked against the new limit; the name is read-only, because tasks refer to it."""
    row = Gate.objects.create(name="small", limit=1)
    gates.acquire([make(TaskState.QUEUED, gate="small")])
    assert gates.acquire([make(TaskState.QUEUED, gate="small")], partial=True) != set()
    client = client_of("superuser")
    page = f"/admin/django_asyncq/gate/{row.pk}/change/"
    assert "1 of 1, full" in client.get(page).content.decode()
    assert client.post(page, {"name": "other", "limit": "5", "expected_seconds": "60"}).status_code == 302
    assert Gate.objects.values_list("name", "limit").get() == ("small", 5)
    assert gates.acquire([make(TaskState.QUEUED, gate="small")], partial=True) == set()


def test_gate_form_refuses_names_that_break_keys(client_of: Any) -> None:
    """The error is shown at the field."""
    client = client_of("superuser")
    response = client.post("/admin/django_asyncq/gate/add/", {"name": "a {b}", "limit": "1", "expected_seconds": "1"})
    assert response.status_code == 200 and not Gate.objects.exists()
    assert "gate name" in response.content.decode()


# --- the site


def test_works_on_a_custom_admin_site(client_of: Any, settings: Any) -> None:
    """URLs are those of the site that shows the page, not of the default site."""
    site = AdminSite("office")
    site.register(TaskRecord, TaskRecordAdmin)
    settings.ROOT_URLCONF = ModuleType("office_urls")
    settings.ROOT_URLCONF.urlpatterns = [path("office/", site.urls), path("admin/", admin.site.urls)]
    record, client = make(), client_of("view_and_retry")
    office = f"/office{LIST.removeprefix('/admin')}"
    page = client.get(f"{office}{record.pk}/change/").content.decode()
    assert f'formaction="{office}{record.pk}/retry/"' in page
    data = {"action": "retry_selected", "_selected_action": str(record.pk)}
    question = client.post(office, {**data, "index": "0"}).content.decode()
    assert f'action="{office}"' in question and '"/admin/' not in question
    answer = client.post(f"{office}{record.pk}/retry/")
    assert answer["Location"] == f"{office}{record.pk}/change/"
    assert f'href="{office}{record.pk}/change/"' in str(next(iter(get_messages(answer.wsgi_request))))


def test_admin_passes_the_system_checks() -> None:
    """Django finds no error in the two classes."""
    assert TaskRecordAdmin(TaskRecord, admin.site).check() == []
    assert GateAdmin(Gate, admin.site).check() == []


@pytest.mark.parametrize("model", CLASSES)
def test_an_admin_that_is_not_yet_made_has_the_addresses_of_the_one_that_it_makes(model: Any) -> None:
    """And each address of ours leads to a view; asked for anything else it is the ModelAdmin."""
    late = LateAdmin(CLASSES[model], model, admin.site)
    routes = [(str(each.pattern), each.name) for each in late.urls]
    assert type(late).__name__ == "LateAdmin" and late.__class__ is ModelAdmin  # not made by that
    made = CLASSES[model](model, admin.site)
    assert routes == [(str(each.pattern), each.name) for each in made.get_urls()]
    assert all(callable(code_of(entry.code)) for entry in TABLE.get(model._meta.model_name, ()))
    assert late.list_display == made.list_display
    assert late.__class__ is type(made) and isinstance(late, type(made)) and str(late) == str(made)


def test_a_late_admin_can_be_replaced_by_a_class_of_the_project() -> None:
    """Unregistered and registered again, as Django's own would be; another registration is refused."""
    site = AdminSite("office")
    site.register(Gate, partial(LateAdmin, CLASSES[Gate]))  # type: ignore[arg-type]
    with pytest.raises(AlreadyRegistered, match=r"GateAdmin"):
        site.register(Gate)
    site.unregister(Gate)
    site.register(Gate, type("OwnAdmin", (GateAdmin,), {"list_per_page": 7}))
    assert site.get_model_admin(Gate).list_per_page == 7


def test_every_json_column_with_values_is_masked() -> None:
    """Every JSON column of a task refuses lookups, except the ids of workers."""
    json_columns = {field.name for field in TaskRecord._meta.fields if isinstance(field, JSONField)}
    assert json_columns - {"worker_ids"} == set(TaskRecordAdmin.masked_columns)


def test_tasks_can_be_viewed_without_redis(
    operator: Client, one_of_each: dict[str, TaskRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """List and pages read the database; without Redis only the choice of queues is shorter."""
    from django_asyncq.broker import Broker
    from django_asyncq.exceptions import BrokerUnavailable

    def unreachable(self: Broker) -> RedisClient:
        raise BrokerUnavailable("unreachable")

    monkeypatch.setattr(Broker, "client", property(unreachable))
    assert operator.get(LIST).status_code == 200
    assert all(operator.get(page_of(record)).status_code == 200 for record in one_of_each.values())


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        (TaskState.RUNNING, FailureReason.NONE, "The task may still succeed."),
        (TaskState.QUEUED, FailureReason.NONE, "The task may still succeed."),
        (TaskState.SUCCEEDED, FailureReason.NONE, "The task succeeded all the same."),
        (TaskState.FAILED, FailureReason.EXCEPTION, "The task failed for another reason."),
        (TaskState.FAILED, FailureReason.CANCELLED, ""),
    ],
)
def test_page_says_that_a_cancel_was_asked_for(
    operator: Client, state: TaskState, reason: FailureReason, said: str
) -> None:
    """It names the person and the reason, when it was, and what became of it; secrets are masked."""
    at = timezone.now() - timedelta(minutes=3)
    finished = None if state in (TaskState.RUNNING, TaskState.QUEUED) else at
    values = {"cancel_requested_at": at, "cancelled_by": "anna: <b>, password=hunter2", "finished_at": finished}
    text = operator.get(page_of(make(state, reason=reason, **values))).content.decode()
    start = "Cancelled" if reason == FailureReason.CANCELLED else "A cancel was asked for"
    line = re.search(rf'<p class="asyncq-line" dir="auto">{start} (<time[^>]*>)3 min ago</time> (.*?)</p>', text)
    assert line is not None
    assert line[2].removeprefix("(<bdi>anna: &lt;b&gt;, password=••••••</bdi>).").strip() == said
    other = operator.get(page_of(make(state, reason=reason, finished_at=finished))).content.decode()
    assert "A cancel was asked for" not in other and "Cancelled" not in other


def test_page_shows_the_limits_of_time_and_what_makes_a_task_unique(operator: Client) -> None:
    """Limits are not rounded: two that differ look different."""
    now = timezone.now()
    record = make(
        TaskState.QUEUED,
        expires_at=now + timedelta(minutes=5, seconds=30),
        deadline=now + timedelta(hours=2, seconds=30),
        timeout_seconds=90,
        soft_timeout_seconds=60,
        unique_key="a" * 64,
        unique_slot="a" * 64,
    )
    text = re.sub(r"<[^>]*>", "|", operator.get(page_of(record)).content.decode())
    text = re.sub(r"\|+", "|", text)
    for fact in (
        "|Must begin before|in 5 min|",
        "|Deadline|in 2 h|",
        "|Timeout|90 s|",
        "|Soft timeout|1 min|",
        "|Unique|until it has finished; it holds its key|",
    ):
        assert fact in text
    after = make(TaskState.QUEUED, unique_key="b" * 64, unique_until_start=True, after_id=record.pk)
    text = re.sub(r"\|+", "|", re.sub(r"<[^>]*>", "|", operator.get(page_of(after)).content.decode()))
    assert "|Unique|until it begins; it does not hold its key|" in text
    assert f"|Runs after the task|{record.pk}|" in text


def test_a_task_closed_while_it_waited_made_no_attempt(operator: Client) -> None:
    """A cancel and an expiry add an error to the row; the list of attempts shows only runs."""
    closed = {"exception": "django_asyncq.exceptions.TaskCancelled", "message": "wrong codec", "traceback": ""}
    waited = make(attempt=0, errors=[closed | {"attempt": 0}], reason=FailureReason.CANCELLED)
    text = operator.get(page_of(waited)).content.decode()
    assert "TaskCancelled: wrong codec" in text and ">Attempts<" not in text
    errors = [error("busy"), closed | {"attempt": 1}]
    retrying = make(attempt=1, max_attempts=3, errors=errors, reason=FailureReason.CANCELLED)
    text = operator.get(page_of(retrying)).content.decode()
    assert text.count('data-asyncq-label="Attempt"') == 1 and "Traceback of attempt 1" in text
    stopped = make(attempt=1, errors=[closed | {"attempt": 1}], reason=FailureReason.CANCELLED)
    assert operator.get(page_of(stopped)).content.decode().count('data-asyncq-label="Attempt"') == 1


def test_page_reads_the_latest_log_lines_only(operator: Client) -> None:
    """A task may have thousands of lines; a link shows all of them."""
    record, at = make(), timezone.now()
    lines = [
        TaskLogLine(task_id=record.pk, fence=1 + n // 200, number=n % 200, attempt=1, logged_at=at, level=30)
        for n in range(260)
    ]
    for number, line in enumerate(lines):
        line.logger, line.text = "shop", f"line {number}."
    TaskLogLine.objects.bulk_create(lines)
    text = operator.get(page_of(record)).content.decode()
    assert "60 earlier lines are not shown." in text
    assert "line 59." not in text and text.index("line 60.") < text.index("line 200.") < text.index("line 259.")
    whole = operator.get(page_of(record) + "?full").content.decode()
    assert "line 0." in whole and "not shown" not in whole
