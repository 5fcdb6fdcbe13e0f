"""The admin pages of schedules and start-up runs: what they show, what the form refuses, what the buttons do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections
from django.template.loader import render_to_string
from django.test import Client
from django.urls import path
from django.utils import timezone, translation

from django_asyncq import cron, gates
from django_asyncq.admin import ScheduleAdmin, StartupRunAdmin, TaskRecordAdmin, code, schedule_page
from django_asyncq.admin.schedules import run_once
from django_asyncq.core.timing import DstKind, DstNote, preview
from django_asyncq.exceptions import GateUnavailable
from django_asyncq.models import (
    FailureReason,
    Gate,
    LockTerm,
    Occurrence,
    OccurrenceOutcome,
    Schedule,
    StartupRun,
    TaskRecord,
    TaskState,
)

from .. import tasks

pytestmark = pytest.mark.django_db

LIST = "/admin/django_asyncq/schedule/"
RUNS = "/admin/django_asyncq/startuprun/"
EVIL = "</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(2)>"
CANARY = "hunter2canary"
STATEMENT = "tests.tasks.statement"
PERMISSIONS = {
    "staff": [],
    "view": ["view_schedule"],
    "run": ["run_schedule"],
    "view_and_run": ["view_schedule", "run_schedule", "view_taskrecord"],
    "change": ["view_schedule", "change_schedule"],
    "add": ["add_schedule"],
    "delete": ["view_schedule", "delete_schedule"],
    "superuser": [],
}


def make(name: str = "report", *, plan: bool = True, **values: Any) -> Schedule:
    """Create a schedule that fires, with these values."""
    row = Schedule(**{"name": name, "task": "tests.tasks.tidy", "cron": "*/5 * * * *", "zone": "UTC", **values})
    if plan:
        row.plan_next(timezone.now())
    row.save()
    return row


def task_row(state: TaskState = TaskState.SUCCEEDED, **values: Any) -> TaskRecord:
    """Create a task, as an occurrence may refer to it."""
    final = state in (TaskState.SUCCEEDED, TaskState.FAILED)
    reason = FailureReason.EXCEPTION if state == TaskState.FAILED else FailureReason.NONE
    return TaskRecord.objects.create(
        name=STATEMENT, state=state, reason=reason, finished_at=timezone.now() if final else None, **values
    )


def page_of(row: Schedule) -> str:
    """The URL of a schedule's page."""
    return f"{LIST}{row.pk}/change/"


def filled(**values: Any) -> dict[str, Any]:
    """The data of the form as a person fills it in; None omits a field."""
    fields = {
        "name": "weekly",
        "task": STATEMENT,
        "args": '["north"]',
        "kwargs": '{"to": "ops@example.org"}',
        "cron": "30 2 * * 1",
        "interval_seconds": "",
        "zone": "Europe/Berlin",
        "starts_at_0": "",
        "starts_at_1": "",
        "ends_at_0": "",
        "ends_at_1": "",
        "enabled": "on",
        "overlap": "skip",
        "missed": "once",
        "missed_cap": "10",
        "jitter_seconds": "0",
        **values,
    }
    return {name: value for name, value in fields.items() if value is not None}


def edited(row: Schedule, **values: Any) -> dict[str, Any]:
    """The data that the page of a schedule would post, with these values changed."""
    import json

    same = {
        "name": row.name,
        "task": row.task,
        "args": json.dumps(row.args),
        "kwargs": json.dumps(row.kwargs),
        "cron": row.cron,
        "interval_seconds": "" if row.interval_seconds is None else str(row.interval_seconds),
        "zone": row.zone,
        "enabled": "on" if row.enabled else None,
        "overlap": row.overlap,
        "missed": row.missed,
        "missed_cap": str(row.missed_cap),
        "jitter_seconds": str(row.jitter_seconds),
    }
    return filled(**{**same, **values})


def errors_of(response: Any) -> dict[str, list[str]]:
    """The errors of the form by field."""
    return {name: list(texts) for name, texts in response.context["adminform"].form.errors.items()}


def said(response: Any) -> list[tuple[str, str]]:
    """The level and plain text of each message."""
    return [
        (message.level_tag, unescape(re.sub(r"<[^>]*>", "", str(message))))
        for message in get_messages(response.wsgi_request)
    ]


def text_of(response: Any) -> str:
    """The text of a page without its tags."""
    content = response.content.decode()
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", content)).split())


def form_of_new(client: Client) -> str:
    """The page of the form for a new schedule, without the marks of what is read from left to right."""
    return re.sub(r"</?bdi[^>]*>", "", unescape(client.get(LIST + "add/").content.decode()))


def token_of(client: Client, row: Schedule) -> str:
    """The value of the hidden field `seen` of the "Run now" form."""
    found = re.search(r'name="seen" value="(\d+)"', client.get(page_of(row)).content.decode())
    assert found is not None
    return found[1]


@pytest.fixture
def client_of() -> Callable[..., Client]:
    """Clients logged in with the permissions of that name."""

    def build(who: str, **options: Any) -> Client:
        client = Client(**options)
        if who != "anonymous":
            user = User.objects.create_user(who, is_staff=True, is_superuser=who == "superuser")
            user.user_permissions.set(Permission.objects.filter(codename__in=PERMISSIONS[who]))
            client.force_login(user)
        return client

    return build


@pytest.fixture
def boss(client_of: Callable[..., Client]) -> Client:
    """A client that may do everything."""
    return client_of("superuser")


# --- who may do what


@pytest.mark.parametrize(
    ("who", "list_code", "page_code", "add_code", "edit_code", "delete_code"),
    [
        ("anonymous", 302, 302, 302, 302, 302),
        ("staff", 403, 403, 403, 403, 403),
        ("view", 200, 200, 403, 403, 403),
        ("run", 403, 403, 403, 403, 403),
        ("view_and_run", 200, 200, 403, 403, 403),
        ("change", 200, 200, 403, 302, 403),
        ("add", 403, 403, 302, 403, 403),
        ("delete", 200, 200, 403, 403, 302),
        ("superuser", 200, 200, 302, 302, 302),
    ],
)
def test_permissions(
    client_of: Any, who: str, list_code: int, page_code: int, add_code: int, edit_code: int, delete_code: int
) -> None:
    """Each operation needs its own permission; a forged POST without it gets 403 and changes nothing."""
    row, client = make(), client_of(who)
    assert client.get(LIST).status_code == list_code
    page = client.get(page_of(row))
    assert page.status_code == page_code
    assert (b'name="_save"' in page.content) is (edit_code == 302 and page_code == 200)
    assert client.post(LIST + "add/", filled()).status_code == add_code
    assert Schedule.objects.filter(name="weekly").exists() is (add_code == 302 and who != "anonymous")
    assert client.post(page_of(row), edited(row, name="renamed")).status_code == edit_code
    assert Schedule.objects.filter(name="renamed").exists() is (edit_code == 302 and who != "anonymous")
    assert client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"}).status_code == delete_code
    assert Schedule.objects.filter(pk=row.pk).exists() is (delete_code == 403 or who == "anonymous")


@pytest.mark.parametrize(
    ("who", "get_code", "run_code", "switch_code"),
    [
        ("anonymous", 302, 302, 302),
        ("staff", 405, 403, 403),
        ("view", 405, 403, 403),
        ("run", 405, 403, 403),
        ("view_and_run", 405, 302, 403),
        ("change", 405, 403, 302),
        ("add", 405, 403, 403),
        ("superuser", 405, 302, 302),
    ],
)
def test_permissions_of_the_buttons(client_of: Any, who: str, get_code: int, run_code: int, switch_code: int) -> None:
    """A button is shown to permitted users only; GET changes nothing; a forged POST gets 403."""
    row, client = make(), client_of(who)
    page, listing = client.get(page_of(row)).content, client.get(LIST).content
    may_run, may_switch = run_code == 302 != get_code, switch_code == 302 != get_code
    assert (b'form="asyncq-run"' in page) is (b'id="asyncq-run"' in page) is may_run
    assert (b'form="asyncq-switch"' in page) is (b'id="asyncq-switch"' in page) is may_switch
    assert (b'role="switch"' in listing) is (b'value="enable_selected"' in listing) is may_switch
    for view in ("run", "switch"):
        assert client.get(f"{LIST}{row.pk}/{view}/").status_code == get_code
    assert client.post(f"{LIST}{row.pk}/run/", {"seen": "0"}).status_code == run_code
    assert client.post(f"{LIST}{row.pk}/switch/", {"enabled": "0"}).status_code == switch_code
    row.refresh_from_db()
    assert TaskRecord.objects.count() == Occurrence.objects.count() == int(may_run)
    assert row.enabled is not may_switch
    assert LogEntry.objects.count() == may_run + may_switch


def test_buttons_need_the_csrf_token(client_of: Any) -> None:
    """Each of the two forms contains the token."""
    row, client = make(), client_of("superuser", enforce_csrf_checks=True)
    for view in ("run", "switch"):
        assert client.post(f"{LIST}{row.pk}/{view}/", {"seen": "0", "enabled": "0"}).status_code == 403
    page = client.get(page_of(row)).content.decode()
    assert Occurrence.objects.count() == 0
    for view in ("run", "switch"):
        form = page.partition(f'<form id="asyncq-{view}" method="post" action="{LIST}{row.pk}/{view}/">')[2]
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form.partition("</form>")[0])
        assert token is not None
        data = {"seen": "0", "enabled": "0", "csrfmiddlewaretoken": token[1]}
        assert client.post(f"{LIST}{row.pk}/{view}/", data).status_code == 302


def test_viewer_sees_masked_values_and_no_buttons(client_of: Any) -> None:
    """The page has no field and no button except Close; secrets are masked."""
    row = make(task=STATEMENT, args=["north"], kwargs={"to": "x", "password": CANARY})
    page = client_of("view").get(page_of(row)).content.decode()
    main = page.partition('id="content-main"')[2]
    assert not re.search(r'<(?:select|textarea|button|input(?! type="hidden" name="csrf))', main)
    assert CANARY not in page and "••••••" in page and "ops" not in page


# --- the form


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"task": "tests.tasks.add"}, "task", "declared with @task(schedulable=True)"),
        ({"task": "os.system"}, "task", "the code has no task of this name"),
        ({"task": ""}, "task", "required"),
        ({"args": "[1,"}, "args", "This is not valid JSON: line 1, column 4"),
        ({"args": "\n{'a': 1}"}, "args", "This is not valid JSON: line 2, column 2"),
        ({"args": '{"a": 1}'}, "args", 'Enter a list, such as [1, "two"]'),
        ({"args": '"text"'}, "args", "Enter a list"),
        ({"args": "[" * 100_000}, "args", "nested too deeply"),
        ({"args": f"[{'1' * 5000}]"}, "args", "nested too deeply or contains a number that is too long"),
        ({"args": "[NaN]"}, "args", "args[0] is nan, which JSON does not have"),
        ({"args": '["\\u0000"]'}, "args", "NUL"),
        ({"kwargs": "{"}, "kwargs", "This is not valid JSON"),
        ({"kwargs": "[1]"}, "kwargs", 'Enter an object, such as {"days": 7}'),
        ({"kwargs": '{"to": 1e999}'}, "kwargs", "inf"),
        ({"kwargs": f'{{"to": "{"x" * 300_000}"}}', "args": ""}, "kwargs", "MAX_ARGUMENTS_BYTES"),
        ({"args": ""}, "kwargs", "missing a required"),
        ({"kwargs": ""}, "kwargs", "missing a required"),
        ({"kwargs": '{"to": "x", "days": 1}', "args": '["north", 2]'}, "kwargs", "multiple values"),
        ({"task": "tests.tasks.tidy", "args": "[1, 2]", "kwargs": ""}, "args", "too many positional arguments"),
        ({"task": "tests.tasks.tidy", "args": "", "kwargs": '{"day": 1}'}, "kwargs", "'day'"),
        ({"cron": "61 * * * *"}, "cron", "minute '61' is wrong"),
        ({"cron": "every day"}, "cron", "fields instead of five"),
        ({"cron": "0 0 30 2 *"}, "cron", "never fires"),
        ({"cron": "*/90 * * * *"}, "cron", "the step 90 is longer than the field, which has 60 values"),
        ({"kwargs": '{"to": "x", "deep": [{"a": 1, "b": 2, "a": 3}]}'}, "kwargs", "The key “a” occurs twice"),
        ({"cron": ""}, "cron", "Enter a cron expression here or an interval below."),
        ({"interval_seconds": "60"}, "interval_seconds", "not both"),
        ({"cron": "", "interval_seconds": "0"}, "interval_seconds", "greater than or equal to 1"),
        ({"cron": "", "interval_seconds": "-5"}, "interval_seconds", "greater than or equal to 1"),
        ({"cron": "", "interval_seconds": "1e400"}, "interval_seconds", "whole number"),
        ({"cron": "", "interval_seconds": str(2**40)}, "interval_seconds", "less than or equal to"),
        ({"zone": "Mars/Olympus"}, "zone", "not one of the available choices"),
        ({"zone": "localtime"}, "zone", "not one of the available choices"),
        ({"starts_at_0": "2026-10-02", "starts_at_1": "10:00", "ends_at_0": "2026-10-02", "ends_at_1": "10:00"},
         "ends_at", "The end must be after the start."),
        ({"starts_at_0": "tomorrow", "starts_at_1": "10:00"}, "starts_at", "valid date"),
        ({"missed_cap": "0"}, "missed_cap", "greater than or equal to 1"),
        ({"missed_cap": "5"}, "missed_cap", "queued one by one: “Queue one task for each, up to the maximum”"),
        ({"missed_cap": "1001"}, "missed_cap", "less than or equal to 1000"),
        ({"cron": "*/5 * * * *", "jitter_seconds": "300"}, "jitter_seconds", "which is 5 min"),
        ({"cron": "", "interval_seconds": "30", "jitter_seconds": "30"}, "jitter_seconds", "which is 30 s"),
        ({"overlap": "maybe"}, "overlap", "not one of the available choices"),
        ({"name": ""}, "name", "required"),
        ({"name": "taken"}, "name", "already exists"),
        ({"name": "x" * 201}, "name", "at most 200"),
    ],
)  # fmt: skip
def test_error_is_shown_at_its_field(boss: Client, values: dict[str, str], field: str, text: str) -> None:
    """An invalid value gives one error, at its field, and nothing is saved."""
    make("taken")
    response = boss.post(LIST + "add/", filled(**values))
    assert response.status_code == 200
    assert list(errors_of(response)) == [field]
    assert any(text in each for each in errors_of(response)[field]), errors_of(response)
    shown = response.content.decode().partition(f'id="id_{field}_error"')[2].partition("</ul>")[0]
    assert text in unescape(shown)
    assert Schedule.objects.count() == 1


def test_all_errors_are_shown_at_once(boss: Client) -> None:
    """An invalid date or time zone does not hide an invalid expression."""
    wrong = {"cron": "61 * * * *", "zone": "Mars", "ends_at_0": "x", "ends_at_1": "y", "args": "[", "missed_cap": "0"}
    response = boss.post(LIST + "add/", filled(**wrong))
    assert set(errors_of(response)) == {"cron", "zone", "ends_at", "args", "missed_cap"}


def test_invalid_input_is_kept_in_the_form(boss: Client) -> None:
    """Invalid JSON is shown again as it was typed, even when it is nested deeply."""
    for typed in ('{"to": ', "[" * 100_000):
        response = boss.post(LIST + "add/", filled(kwargs=typed))
        assert f">\n{typed}</textarea>" in unescape(response.content.decode())


def test_valid_schedule_is_saved_and_its_page_shows_ten_occurrences(boss: Client) -> None:
    """The next occurrence is planned, and the page shows when the schedule will fire."""
    response = boss.post(LIST + "add/", filled(starts_at_0="2030-01-01", starts_at_1="00:00"))
    row = Schedule.objects.get()
    assert response["Location"] == page_of(row)
    assert (row.args, row.kwargs, row.is_declared) == (["north"], {"to": "ops@example.org"}, False)
    # A Monday, 02:30 in Berlin.
    assert row.next_occurrence_at == datetime(2030, 1, 7, 1, 30, tzinfo=UTC)
    page = text_of(boss.get(page_of(row)))
    assert "Mon 2030-01-07 02:30 CET (UTC+01:00)" in page
    assert page.count(" 02:30 CE") == 10
    assert "At 02:30 on Monday" in page
    assert LogEntry.objects.get().is_addition()


def test_schedule_without_arguments_at_an_interval_is_saved(boss: Client) -> None:
    """Empty texts mean no arguments; an interval counts from the creation of the schedule."""
    boss.post(LIST + "add/", filled(task="tests.tasks.tidy", args="", kwargs=" ", cron="", interval_seconds="90"))
    row = Schedule.objects.get()
    assert (row.args, row.kwargs, row.cron, row.interval_seconds) == ([], {}, "", 90)
    assert row.next_occurrence_at == row.created_at.replace(microsecond=0) + timedelta(seconds=90)
    page = text_of(boss.get(page_of(row)))
    assert "Every 1 minute 30 seconds" in page and "every 90 s" in page


def test_choices_are_the_schedulable_tasks_with_their_parameters(boss: Client) -> None:
    """No other task is a choice; a default value that may be a secret is masked."""
    page = form_of_new(boss)
    select = page.partition('<select name="task"')[2].partition("</select>")[0]
    assert "tests.tasks.statement (region, /, days=7, *pages, to, password=••••••, **more)</option>" in select
    assert "tests.tasks.add" not in select
    assert "The tasks that the code declares with @task(schedulable=True)." in page


def test_form_without_schedulable_tasks_explains_how_to_declare_one(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is shown at the field."""
    monkeypatch.setattr(code.registry, "schedulable_names", list)
    page = form_of_new(boss)
    assert "No task can be scheduled here yet. Declare one with @task(schedulable=True) in a tasks.py" in page


def test_examples_are_read_from_left_to_right(boss: Client) -> None:
    """In Arabic too: the brackets of JSON and the fields of a cron expression keep their order."""
    page = unescape(boss.get(LIST + "add/", headers={"accept-language": "ar"}).content.decode())
    for example in ("@task(schedulable=True)", '[1, "two"]', '{"days": 7}', "30 2 * * 1-5", "0 0 13 * 5"):
        assert f'<bdi dir="ltr">{example}</bdi>' in page, example


def test_two_fields_for_days_are_explained_on_the_page_of_the_schedule(boss: Client) -> None:
    """In the description and in a line of its own; a schedule for which both must match has no such line."""
    either, both = make("either", cron="0 0 13 * 5"), make("both", cron="0 0 */2 * 5")
    one_is_enough = "each day that matches the day of month or the day of week; one is enough"
    page = unescape(boss.get(page_of(either)).content.decode())
    assert "At 00:00 on the 13th day of month or on Friday" in page
    assert one_is_enough in page
    assert one_is_enough not in unescape(boss.get(page_of(both)).content.decode())
    listed = unescape(boss.get(LIST).content.decode())
    assert "At 00:00 on the 13th day of month or on Friday" in listed


def test_each_policy_is_explained(boss: Client) -> None:
    """Each field has a help text."""
    page = form_of_new(boss)
    for text in schedule_page.HELP.values():
        assert str(text) in page


def test_time_zones_start_with_that_of_the_project_and_utc(settings: Any) -> None:
    """The others follow in order, without the names that are not zones of a place."""
    settings.TIME_ZONE = "Asia/Kathmandu"
    names = [name for name, _label in schedule_page.zone_choices()]
    assert names[:2] == ["Asia/Kathmandu", "UTC"] and names[2:] == sorted(names[2:])
    assert len(names) == len(set(names)) > 400
    assert not set(names) & {"localtime", "Factory", "posixrules"}


def test_name_of_a_declared_schedule_is_refused(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is refused even before a worker has created the row."""
    monkeypatch.setattr("django_asyncq.core.schedules.every_task", lambda: [tasks.tidy])
    object.__setattr__(tasks.tidy, "schedule", cron("0 4 * * *", name="nightly tidy"))
    try:
        response = boss.post(LIST + "add/", filled(name="nightly tidy"))
        assert errors_of(response) == {"name": ["The code declares a schedule of this name; choose another."]}
        older = make("nightly tidy")
        # One that was here first can still be edited, and says what is wrong.
        assert boss.post(page_of(older), edited(older, missed="all", missed_cap="5")).status_code == 302
        assert "The code declares a schedule with this name" in text_of(boss.get(page_of(older)))
    finally:
        object.__setattr__(tasks.tidy, "schedule", None)


def test_task_that_is_no_longer_schedulable_must_be_replaced(boss: Client) -> None:
    """The form does not offer the name of a task that it would refuse."""
    row = make(task="tests.tasks.add", args=[1])
    page = boss.get(page_of(row)).content.decode()
    assert 'value="tests.tasks.add"' not in page
    assert "Does not fire: its task is no longer declared with schedulable=True" in unescape(page)
    assert list(errors_of(boss.post(page_of(row), edited(row)))) == ["task"]


@pytest.mark.parametrize(
    ("values", "planned"),
    [
        ({"cron": "0 4 * * *"}, True),
        ({"zone": "Asia/Kathmandu"}, True),
        ({"ends_at_0": "2035-01-01", "ends_at_1": "00:00"}, True),
        ({"enabled": None}, True),
        ({"kwargs": '{"days": 3}'}, False),
        ({"missed": "all", "name": "other"}, False),
        ({}, False),
    ],
)
def test_next_occurrence_is_planned_again_when_the_timing_changes(
    boss: Client, values: dict[str, Any], planned: bool
) -> None:
    """Other changes keep the next occurrence that the scheduler wrote in the meantime."""
    row = make()
    overdue = timezone.now() - timedelta(hours=1)
    Schedule.objects.update(next_occurrence_at=overdue)
    assert boss.post(page_of(row), edited(row, **values)).status_code == 302
    row.refresh_from_db()
    assert (row.next_occurrence_at != overdue) is planned
    assert row.next_occurrence_at is not None
    if planned:
        assert row.next_occurrence_at > timezone.now() - timedelta(minutes=1)


def test_saving_writes_only_the_changed_fields(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An occurrence that the scheduler fires while the form is saved is not undone."""
    row = make()
    later = timezone.now() + timedelta(hours=2)
    plain = ScheduleAdmin.save_model

    def save_model(self: Any, request: Any, obj: Schedule, form: Any, change: bool) -> None:
        Schedule.objects.update(next_occurrence_at=later)
        plain(self, request, obj, form, change)

    monkeypatch.setattr(ScheduleAdmin, "save_model", save_model)
    boss.post(page_of(row), edited(row, name="renamed"))
    assert Schedule.objects.values_list("name", "next_occurrence_at").get() == ("renamed", later)


def test_schedule_without_occurrences_left_is_saved_with_a_warning(boss: Client) -> None:
    """A message warns, and the page says that it does not fire."""
    response = boss.post(LIST + "add/", filled(ends_at_0="2020-01-01", ends_at_1="00:00"))
    assert said(response)[-1:] == [("success", "The schedule “weekly” was added successfully.")]
    assert said(response)[0] == ("warning", "weekly has no more occurrences, so it will not fire.")
    row = Schedule.objects.get()
    assert row.next_occurrence_at is None
    page = text_of(boss.get(page_of(row)))
    assert "Does not fire: it has no more occurrences" in page and "None." in page


# --- declared in code


@pytest.fixture
def declared() -> Schedule:
    """A schedule that is declared in code."""
    return make("nightly", is_declared=True, task=STATEMENT, args=["n"], kwargs={"to": "x", "password": CANARY})


def test_declared_schedule_is_read_only_except_for_its_switch(boss: Client, declared: Schedule) -> None:
    """The page says that the code declares it, and masks secrets; posted fields are ignored. The switch is a button."""
    page = boss.get(page_of(declared)).content.decode()
    form = page.partition('id="schedule_form"')[2].partition("</form>")[0]
    fields = set(re.findall(r'<(?:input|select|textarea)[^>]* name="(\w+)"', form))
    # The switch is of a form of its own; `enabled` is the name of its button in the one that shows the page.
    assert fields <= {"csrfmiddlewaretoken", "action", "_selected_action"} and "_save" not in page
    assert "This schedule is declared in code." in page
    assert CANARY not in page and "••••••" in page
    Schedule.objects.update(next_occurrence_at=timezone.now() - timedelta(hours=1), enabled=False)
    assert boss.post(page_of(declared), filled(enabled="on")).status_code == 302
    assert not Schedule.objects.get().enabled
    boss.post(f"{LIST}{declared.pk}/switch/", {"enabled": "1"})
    fresh = Schedule.objects.get()
    assert (fresh.name, fresh.task, fresh.cron, fresh.enabled) == ("nightly", STATEMENT, "*/5 * * * *", True)
    assert fresh.next_occurrence_at is not None and fresh.next_occurrence_at > timezone.now()


def test_declared_schedule_is_deleted_only_after_removal_from_the_code(boss: Client, declared: Schedule) -> None:
    """The code would create it again. A message says so, on its page and in the list."""
    own = make("own")
    removed = make("removed", is_declared=True, retired_at=timezone.now(), task="shop.tasks.removed")
    reason = "Not deleted, because the code declares it and would create it again: nightly. Disable it instead"
    assert b"deletelink" not in boss.get(page_of(declared)).content
    assert b"deletelink" in boss.get(page_of(removed)).content
    for answer in (
        boss.get(f"{LIST}{declared.pk}/delete/"),
        boss.post(f"{LIST}{declared.pk}/delete/", {"post": "yes"}),
    ):
        assert answer["Location"] == page_of(declared)
        assert said(answer)[-1][0] == "error" and said(answer)[-1][1].startswith(reason)
    data = {"action": "delete_selected", "_selected_action": [str(row.pk) for row in (declared, own, removed)]}
    question = boss.post(LIST, data)
    assert page_of(declared) not in question.content.decode() and page_of(removed) in question.content.decode()
    answer = boss.post(LIST, {**data, "post": "yes"})
    assert [level for level, _text in said(answer)][-2:] == ["error", "success"]
    assert list(Schedule.objects.values_list("name", flat=True)) == ["nightly"]
    assert (
        said(boss.post(LIST, {"action": "delete_selected", "_selected_action": [str(declared.pk)]}))[-1][0] == "error"
    )


def test_deletion_asks_first_and_counts_the_occurrences(client_of: Any, django_assert_max_num_queries: Any) -> None:
    """The occurrences are deleted too, but not listed; a user without change permission returns to the list."""
    row, client = make(EVIL), client_of("delete")
    now = timezone.now()
    Occurrence.objects.bulk_create(
        Occurrence(schedule=row, occurs_at=now - timedelta(minutes=count)) for count in range(3000)
    )
    with django_assert_max_num_queries(12):
        question = client.get(f"{LIST}{row.pk}/delete/")
    assert (
        "3000 occurrences" in text_of(question)
        and len(question.content) < 20_000
        and b"<img src=x" not in question.content
    )
    answer = client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"})
    assert answer["Location"] == LIST
    assert Occurrence.objects.count() == Schedule.objects.count() == 0


# --- run now


def test_run_now_queues_the_task_names_it_and_logs(client_of: Any) -> None:
    """The task is queued at once, even when the schedule is off; the occurrence is marked as run by a person."""
    row, client = make(enabled=False, jitter_seconds=60), client_of("view_and_run")
    answer = client.post(f"{LIST}{row.pk}/run/", {"seen": token_of(client, row)})
    record, occurrence = TaskRecord.objects.get(), Occurrence.objects.get()
    assert answer["Location"] == page_of(row)
    assert said(answer) == [("success", f"Queued: {record}.")]
    assert f'href="/admin/django_asyncq/taskrecord/{record.pk}/change/"' in str(
        next(iter(get_messages(answer.wsgi_request)))
    )
    assert (occurrence.task_id, occurrence.by_person, occurrence.outcome, record.run_after) == (
        record.pk,
        True,
        OccurrenceOutcome.QUEUED,
        None,
    )
    entry = LogEntry.objects.get()
    assert (entry.change_message, entry.object_id) == (f"Run now: task {record.pk}.", str(row.pk))
    assert "manual" in text_of(client.get(page_of(row)))


def test_second_click_queues_nothing(client_of: Any) -> None:
    """The same page posted twice queues one task; a page opened later can run the schedule again."""
    row, client = make(), client_of("view_and_run")
    token = token_of(client, row)
    client.post(f"{LIST}{row.pk}/run/", {"seen": token})
    answer = client.post(f"{LIST}{row.pk}/run/", {"seen": token})
    first = TaskRecord.objects.get()
    level, text = said(answer)[-1]
    assert level == "warning"
    assert text.startswith(f"Somebody has run it since this page was opened: {first}, ")
    assert text.endswith("No other task was queued.")
    client.post(f"{LIST}{row.pk}/run/", {"seen": token_of(client, row)})
    assert TaskRecord.objects.count() == LogEntry.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_two_clicks_at_the_same_time_queue_one_task() -> None:
    """The row is locked between the check and the write."""
    row, found, barrier = make(), [], threading.Barrier(2)

    def click() -> None:
        try:
            barrier.wait(5)
            found.append(run_once(row.pk, 0).is_new)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=click) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [False, True]
    assert TaskRecord.objects.count() == 1


@pytest.mark.parametrize("seen", [None, "", "x", "1" * 5000, "0; DROP TABLE"])
def test_run_without_the_hidden_field_is_refused(boss: Client, seen: str | None) -> None:
    """Without the field a second click cannot be recognised."""
    row = make()
    answer = boss.post(f"{LIST}{row.pk}/run/", {} if seen is None else {"seen": seen})
    assert said(answer) == [("error", "This request did not come from the page of the schedule. Nothing was queued.")]
    assert Occurrence.objects.count() == 0


def test_full_gate_refuses_the_run_and_nothing_is_written(boss: Client) -> None:
    """The message gives the reason, and no occurrence is written."""
    row = make(task="tests.tasks.gated_tally")
    name = tasks.gated_tally.gate
    Gate.objects.create(name=name, limit=1)
    gates.acquire([task_row(TaskState.QUEUED, gate=name)])
    answer = boss.post(f"{LIST}{row.pk}/run/", {"seen": "0"})
    ((level, text),) = said(answer)
    assert level == "error" and f"gate '{name}' is full" in text and text.endswith("Nothing was queued.")
    assert (Occurrence.objects.count(), TaskRecord.objects.count(), LogEntry.objects.count()) == (0, 1, 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"task": "shop.tasks.removed"}, "no task named 'shop.tasks.removed' is registered"),
        ({"task": "tests.tasks.add", "args": [1]}, "may not be scheduled by people"),
        ({"kwargs": {"day": 1}}, "cannot be called with these arguments"),
    ],
)
def test_schedule_that_cannot_run_gives_the_reason(boss: Client, values: dict[str, Any], reason: str) -> None:
    """The task was removed or changed, or its arguments no longer fit."""
    row = make(**values)
    ((level, text),) = said(boss.post(f"{LIST}{row.pk}/run/", {"seen": "0"}))
    assert level == "error" and reason in text
    assert Occurrence.objects.count() == 0


def test_run_without_redis_gives_the_reason(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Redis is unreachable, nothing is written."""

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise GateUnavailable("reports")

    monkeypatch.setattr("django_asyncq.gates.receivers.acquire", unreachable)
    row = make(task="tests.tasks.gated_tally")
    ((level, text),) = said(boss.post(f"{LIST}{row.pk}/run/", {"seen": "0"}))
    assert level == "error" and "cannot be asked" in text
    assert (Occurrence.objects.count(), TaskRecord.objects.count()) == (0, 0)


def test_declared_schedule_can_be_run_and_a_missing_one_shows_a_warning(boss: Client, declared: Schedule) -> None:
    """The task of a declared schedule need not be schedulable; the URL of a missing row redirects to the list."""
    own = make("sums", is_declared=True, task="tests.tasks.add", args=[1])
    assert said(boss.post(f"{LIST}{own.pk}/run/", {"seen": "0"}))[0][0] == "success"
    for view in ("run", "switch"):
        for pk in (uuid4(), "rubbish"):
            answer = boss.post(f"{LIST}{pk}/{view}/", {"seen": "0", "enabled": "1"})
            assert answer["Location"] == LIST
            assert said(answer)[-1] == ("warning", "This schedule no longer exists.")


# --- on and off


def test_switch_shows_a_message_logs_and_misses_nothing(boss: Client) -> None:
    """After off and on the next occurrence is in the future; a second click changes nothing."""
    row = make()
    off, on = {"enabled": "0"}, {"enabled": "1"}
    assert said(boss.post(f"{LIST}{row.pk}/switch/", off)) == [("success", "Disabled: report.")]
    assert said(boss.post(f"{LIST}{row.pk}/switch/", off))[-1] == ("info", "Already disabled: report.")
    assert "None while the schedule is off." in text_of(boss.get(page_of(row)))
    Schedule.objects.update(next_occurrence_at=timezone.now() - timedelta(days=1))
    answer = boss.post(f"{LIST}{row.pk}/switch/", on)
    assert (answer["Location"], said(answer)[-1]) == (page_of(row), ("success", "Enabled: report."))
    row.refresh_from_db()
    assert row.enabled and row.next_occurrence_at is not None and row.next_occurrence_at > timezone.now()
    assert list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True)) == ["Disabled.", "Enabled."]


def test_switch_in_the_list_returns_to_the_filtered_list(boss: Client) -> None:
    """The URL of the button contains the filter."""
    row = make("nightly")
    page = unescape(boss.get(LIST + "?q=night&enabled__exact=1").content.decode())
    found = re.search(r'role="switch" aria-checked="true" aria-label="nightly" formaction="([^"]+)"', page)
    assert found is not None
    answer = boss.post(found[1], {"enabled": "0"})
    assert answer["Location"] == LIST + "?q=night&enabled__exact=1"
    assert f'href="{page_of(row)}?_changelist_filters=q%3Dnight%26enabled__exact%3D1"' in page


def test_actions_switch_many_schedules_and_report_those_that_cannot_fire(boss: Client) -> None:
    """Broken schedules stay off, with the reason; those without occurrences left give a warning."""
    rows = [make(f"n{count}", enabled=False) for count in range(7)]
    past = make("past", enabled=False, ends_at=timezone.now() - timedelta(days=1))
    broken = make("broken", enabled=False, plan=False, cron="61 * * * *")
    keys = [str(row.pk) for row in (*rows, past, broken)]
    answer = boss.post(LIST, {"action": "enable_selected", "_selected_action": keys})
    (success, warning, error) = said(answer)
    assert success == ("success", "8 schedules enabled: n0, n1, n2, n3, n4, ….")
    assert warning == ("warning", "past has no more occurrences, so it will not fire.")
    assert error[0] == "error" and error[1].startswith("Not enabled: broken: cron expression '61 * * * *'")
    assert set(Schedule.objects.filter(enabled=False)) == {broken}
    assert LogEntry.objects.count() == 8
    boss.post(LIST, {"action": "disable_selected", "_selected_action": keys})
    assert not Schedule.objects.filter(enabled=True).exists()


# --- the list


def row_text(response: Any, row: Schedule) -> str:
    """The text of one row of the list, without its tags."""
    rows = [each for each in response.content.decode().split("<tr>") if page_of(row) in each]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", rows[0])).split())


def test_list_describes_each_schedule(boss: Client) -> None:
    """A row shows name, task, origin, switch, timing, time zone, next occurrences and last run."""
    nightly = make("nightly", cron="30 2 * * *", zone="Europe/Berlin", is_declared=True)
    often = make("often", cron="", interval_seconds=90)
    record = task_row()
    for minutes, values in ((9, {}), (2, {"task": record})):
        Occurrence.objects.create(schedule=often, occurs_at=timezone.now() - timedelta(minutes=minutes), **values)
    response = boss.get(LIST)
    assert "nightly tidy · code On At 02:30 every day 30 2 * * * Europe/Berlin in " in row_text(response, nightly)
    text = row_text(response, often)
    assert "often tidy · admin On Every 1 minute 30 seconds every 90 s in " in text
    assert f"2 min ago {record} Succeeded" in text
    assert f'href="/admin/django_asyncq/taskrecord/{record.pk}/change/"' in response.content.decode()
    assert re.search(
        r'<time class="asyncq-time" dir="auto" datetime="[^"]+\+00:00" title="[^"]+ UTC">in ', response.content.decode()
    )


@pytest.mark.parametrize(
    ("values", "mark"),
    [
        ({"retired_at": datetime(2026, 1, 1, tzinfo=UTC), "is_declared": True}, "Removed from code"),
        ({"task": "shop.tasks.removed"}, "Does not fire: the code has no task shop.tasks.removed"),
        ({"task": "tests.tasks.add", "args": [1]}, "Does not fire: its task is no longer declared with "),
        ({"kwargs": {"day": 1}}, "Does not fire: its task can no longer be called with these "),
        ({"args": {"no": "list"}, "kwargs": [1]}, "Does not fire: its task can no longer be called with these "),
        ({"cron": "61 * * * *", "plan": False}, "Does not fire: cron expression '61 * * * *': minute '61' is wrong;"),
        ({"zone": "Mars/Olympus", "plan": False}, "Does not fire: time zone 'Mars/Olympus' is not known here"),
        ({"ends_at": datetime(2020, 1, 1, tzinfo=UTC)}, "Does not fire: it has no more occurrences"),
        ({"plan": False}, "Does not fire: its next occurrence is not planned; save the schedule again"),
        ({"plan": False, "next_occurrence_at": datetime(2026, 1, 1, tzinfo=UTC)}, "Overdue: is a worker running?"),
        ({"plan": False, "enabled": False}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_marks_say_why_a_schedule_does_not_fire(boss: Client, values: dict[str, Any], mark: str) -> None:
    """The reason is shown on the page, and in the list with the whole text as title.

    The page says in a sentence that a schedule was removed, and not in a mark too.
    """
    row = make(**values)
    listing, page = boss.get(LIST), boss.get(page_of(row))
    for response, is_marked in ((listing, bool(mark)), (page, mark not in ("", "Removed from code"))):
        assert response.status_code == 200
        assert ("asyncq-mark" in response.content.decode()) is is_marked
    assert mark in text_of(page)
    assert f'title="{mark}' in unescape(listing.content.decode())


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"outcome": OccurrenceOutcome.SKIPPED}, "Skipped an earlier task had not finished"),
        (
            {"outcome": OccurrenceOutcome.MISSED, "note": "this occurrence and those before it"},
            "Missed this occurrence and those",
        ),
        ({"outcome": OccurrenceOutcome.REFUSED, "note": "gate 'x' is full"}, "Refused gate 'x' is full"),
        ({"task_id": uuid4()}, "Fired task pruned"),
    ],
)
def test_last_run_shows_the_outcome_of_the_occurrence(boss: Client, values: dict[str, Any], shown: str) -> None:
    """It does so too for an occurrence without a task, and for one whose task was pruned."""
    row = make()
    Occurrence.objects.create(schedule=row, occurs_at=timezone.now() - timedelta(seconds=90), **values)
    assert f"1 min ago {shown}" in row_text(boss.get(LIST), row)


def test_list_of_a_hundred_takes_a_fixed_number_of_queries(boss: Client, django_assert_max_num_queries: Any) -> None:
    """A hundred schedules take no more queries than one."""

    def add(count: int) -> None:
        for _ in range(count):
            row = make(f"n{uuid4()}")
            for minutes in range(3):
                occurs_at = timezone.now() - timedelta(minutes=minutes)
                Occurrence.objects.create(schedule=row, occurs_at=occurs_at, task=task_row())

    add(1)
    boss.get(LIST)
    with django_assert_max_num_queries(10) as few:
        boss.get(LIST)
    add(99)
    with django_assert_max_num_queries(len(few)):
        response = boss.get(LIST)
    assert response.content.decode().count('role="switch"') == 100


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", {"a", "b", "c"}),
        ("?enabled__exact=0", {"b"}),
        ("?is_declared__exact=1", {"c"}),
        ("?q=tally", {"b"}),
        ("?q=zzz", set()),
    ],
)
def test_filters_and_search(boss: Client, query: str, names: set[str]) -> None:
    """The list is filtered by switch and origin, and searched by name and task."""
    make("a"), make("b", enabled=False, task="tests.tasks.tally", args=["x"]), make("c", is_declared=True)
    assert {row.name for row in boss.get(LIST + query).context["cl"].result_list} == names


def test_masked_columns_cannot_be_probed_by_url(boss: Client) -> None:
    """A lookup into arguments would reveal a secret letter by letter."""
    make(kwargs={"password": CANARY})
    for column in set(ScheduleAdmin.masked_columns):
        for lookup in (column, f"{column}__password__startswith"):
            assert boss.get(LIST, {lookup: "h"}).status_code == 400


# --- the page


def test_page_shows_the_latest_occurrences_and_their_tasks(client_of: Any, django_assert_max_num_queries: Any) -> None:
    """Twenty are shown, newest first, with their tasks in one query; a user who may not view tasks gets no link."""
    row, now = make(), timezone.now()
    records = [task_row(), task_row(TaskState.FAILED), task_row(TaskState.RUNNING)]
    pruned = uuid4()
    values: list[dict[str, Any]] = [{"task": record} for record in records]
    values += [{"task_id": pruned}, {"outcome": OccurrenceOutcome.REFUSED, "note": "password=hunter2 is wrong"}]
    values += [{"by_person": True} for _ in range(20)]
    for minutes, each in enumerate(values, 1):
        Occurrence.objects.create(schedule=row, occurs_at=now - timedelta(minutes=minutes), **each)
    client = client_of("view_and_run")
    client.get(page_of(row))
    with django_assert_max_num_queries(12):
        page = client.get(page_of(row))
    text = text_of(page).partition("Latest occurrences")[2]
    assert f"1 min ago Fired {records[0]} Succeeded 2 min ago Fired {records[1]} Failed" in text
    assert f"3 min ago Fired {records[2]} Running 4 min ago Fired …{str(pruned)[-8:]} pruned" in text
    assert "5 min ago Refused password=•••••• is wrong –" in text
    assert text.count("manual") == 15
    assert page.content.decode().count("/taskrecord/0") == 3
    assert "/taskrecord/0" not in client_of("view").get(page_of(row)).content.decode()


def lines(row: Schedule, now: datetime, count: int = 4) -> list[tuple[str, str, str]]:
    """The next occurrences as the page would show them at `now`."""
    shown = [schedule_page.occurrence_row(each, now) for each in preview(row.timing, now, count, zone=row.zone)]
    return [(f"{each.day} {each.clock}", each.zone, each.note) for each in shown]


def test_gap_and_repeated_hour_in_berlin() -> None:
    """A schedule at a fixed time fires after the gap, and once in the repeated hour."""
    row = make(cron="30 2 * * *", zone="Europe/Berlin")
    assert lines(row, datetime(2026, 3, 28, 0, 0, tzinfo=UTC), 3) == [
        ("Sat 2026-03-28 02:30", "CET (UTC+01:00)", ""),
        ("Sun 2026-03-29 03:00", "CEST (UTC+02:00)", "02:30 does not exist on this day; runs at 03:00"),
        ("Mon 2026-03-30 02:30", "CEST (UTC+02:00)", ""),
    ]
    assert lines(row, datetime(2026, 10, 24, 12, 0, tzinfo=UTC), 2) == [
        ("Sun 2026-10-25 02:30", "CEST (UTC+02:00)", "02:30 occurs twice on this day; runs only the first time"),
        ("Mon 2026-10-26 02:30", "CET (UTC+01:00)", ""),
    ]


def test_gap_and_repeated_hour_in_new_york() -> None:
    """An hourly schedule skips the gap, and fires in both passes of the repeated hour."""
    row = make(cron="*/30 * * * *", zone="America/New_York")
    assert lines(row, datetime(2026, 3, 8, 6, 31, tzinfo=UTC), 2) == [
        ("Sun 2026-03-08 03:00", "EDT (UTC-04:00)", "02:00, 02:30 do not exist, so there were no occurrences then"),
        ("Sun 2026-03-08 03:30", "EDT (UTC-04:00)", ""),
    ]
    assert lines(row, datetime(2026, 11, 1, 5, 1, tzinfo=UTC), 4) == [
        ("Sun 2026-11-01 01:30", "EDT (UTC-04:00)", "01:30 occurs twice on this day; this is the first"),
        ("Sun 2026-11-01 01:00", "EST (UTC-05:00)", "01:00 occurs twice on this day; this is the second"),
        ("Sun 2026-11-01 01:30", "EST (UTC-05:00)", "01:30 occurs twice on this day; this is the second"),
        ("Sun 2026-11-01 02:00", "EST (UTC-05:00)", ""),
    ]


@pytest.mark.parametrize(
    ("zone", "now", "shown"),
    [
        ("Europe/Berlin", datetime(2026, 3, 28, 12, 0, tzinfo=UTC), "02:30 does not exist on this day; runs at 03:00"),
        ("America/New_York", datetime(2026, 10, 31, 12, 0, tzinfo=UTC), ""),
        ("Europe/Berlin", datetime(2026, 10, 24, 12, 0, tzinfo=UTC), "02:30 occurs twice on this day"),
    ],
)
def test_page_marks_the_occurrence_of_the_clock_change(rf: Any, zone: str, now: datetime, shown: str) -> None:
    """No other occurrence is marked; 02:30 is not in the repeated hour of New York."""
    row = make(cron="30 2 * * *", zone=zone)
    request = rf.get("/")
    request.user = User(is_superuser=True, is_active=True, is_staff=True)
    page = schedule_page.SchedulePage(
        row, now, schedule_page.TaskLinks(admin.site, request), may_run=False, may_switch=False
    )
    html = render_to_string("admin/django_asyncq/schedule/overview.html", {"page": page})
    assert html.count("asyncq-mark") == bool(shown) and shown in html
    assert html.count("<time datetime=") == 10 and f"Time in {zone}" in html


def test_many_times_in_a_gap_are_shown_as_a_range_and_other_days_with_their_date() -> None:
    """Sixty minutes are not listed one by one; a skipped day is shown with its date."""
    row = make(cron="* * * * *", zone="America/New_York")
    assert lines(row, datetime(2026, 3, 8, 6, 59, tzinfo=UTC), 1)[0][2] == (
        "02:00 to 02:59 do not exist, so there were no occurrences then"
    )
    local = datetime(2011, 12, 31, 0, 0)
    note = DstNote(DstKind.GAP, (datetime(2011, 12, 30, 2, 30),))
    assert schedule_page.note_words(note, local).startswith("2011-12-30 02:30 does not exist")


@pytest.mark.parametrize(
    ("zone", "shown"), [("UTC", "UTC"), ("Asia/Kathmandu", "UTC+05:45"), ("Asia/Tokyo", "JST (UTC+09:00)")]
)
def test_offset_is_shown_with_the_name_of_the_zone_if_it_has_one(zone: str, shown: str) -> None:
    """Many zones have no abbreviation."""
    row = make(cron="", interval_seconds=90, zone=zone, starts_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert lines(row, datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC), 1)[0][1] == shown
    assert re.search(r":\d\d:30$", lines(row, datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC), 1)[0][0])


def test_weekdays_follow_the_language() -> None:
    """Other texts fall back to English."""
    row = make(cron="30 2 * * *")
    with translation.override("de"):
        assert lines(row, datetime(2026, 3, 28, 0, 0, tzinfo=UTC), 1)[0][0].startswith("Sa 2026")


def test_everything_is_escaped(boss: Client) -> None:
    """Markup in any field is shown as text: in list, page, form, confirmations and messages."""
    row = make(EVIL, args=[], kwargs={"days": EVIL})
    odd = make(f"odd {EVIL}", plan=False, task=f"m.{EVIL}", cron=EVIL[:60], zone=EVIL[:64], kwargs={EVIL: EVIL})
    removed = make(f"removed {EVIL}", is_declared=True, retired_at=timezone.now(), kwargs={EVIL: EVIL})
    for each in (row, odd, removed):
        Occurrence.objects.create(schedule=each, occurs_at=timezone.now(), outcome=OccurrenceOutcome.REFUSED, note=EVIL)
    run = StartupRun.objects.create(name=EVIL, holder=EVIL, term=1, begun_at=timezone.now(), error=f"{EVIL}\n{EVIL}")
    keys = [str(each.pk) for each in (row, odd, removed)]
    pages = [boss.get(LIST), boss.get(LIST, {"q": EVIL}), *(boss.get(page_of(each)) for each in (row, odd, removed))]
    pages += [boss.post(LIST, {"action": action, "_selected_action": keys}, follow=True)
              for action in ("disable_selected", "enable_selected", "delete_selected")]  # fmt: skip
    pages += [boss.post(f"{LIST}{each.pk}/run/", {"seen": "0"}, follow=True) for each in (row, odd, removed)]
    pages += [boss.post(page_of(row), edited(row, **{name: EVIL})) for name in filled() if name != "enabled"]
    pages += [boss.get(f"{LIST}{row.pk}/history/"), boss.get(RUNS), boss.get(f"{RUNS}{run.pk}/change/")]
    for page in pages:
        assert page.status_code in (200, 302)
        text = page.content.decode()
        assert "<img" not in text.replace('<img src="/static/admin/', "") and "<svg/" not in text


def test_secrets_are_masked_outside_the_form(client_of: Any) -> None:
    """Only a user who may change the schedule sees them, and only in the form."""
    row = make(task=STATEMENT, args=["north"], kwargs={"to": "x", "password": CANARY, "more": {"api_key": CANARY}})
    Occurrence.objects.create(
        schedule=row, occurs_at=timezone.now(), outcome=OccurrenceOutcome.REFUSED, note=f"token={CANARY}"
    )
    viewer, changer = client_of("view"), client_of("change")
    for client in (viewer, changer):
        assert CANARY not in client.get(LIST).content.decode()
        assert CANARY not in client.get(f"{LIST}{row.pk}/history/").content.decode()
    assert CANARY not in viewer.get(page_of(row)).content.decode()
    page = changer.get(page_of(row)).content.decode()
    assert page.count(CANARY) == 2
    assert CANARY not in re.sub(r"<textarea[^>]*>[^<]*</textarea>", "", page)


def test_positional_secrets_are_masked_by_the_name_of_their_parameter(client_of: Any) -> None:
    """They are masked as on the page of a task."""
    row = make(task="tests.admin.test_admin.login", args=["ann", CANARY], is_declared=True)
    from . import test_admin  # noqa: F401 - registers the task

    page = client_of("superuser").get(page_of(row)).content.decode()
    assert CANARY not in page and "••••••" in page


def test_pages_obey_a_strict_content_security_policy(boss: Client) -> None:
    """The markup contains no inline script, style or handler, and everything is loaded from the site itself."""
    row, run = make(task=STATEMENT, args=["n"], kwargs={"to": "x"}), StartupRun.objects.create(
        name="warm", holder="host 1", term=1, begun_at=timezone.now(), error="no"
    )  # fmt: skip
    pages = [boss.get(LIST), boss.get(page_of(row)), boss.get(LIST + "add/"), boss.post(LIST + "add/", {})]
    pages += [boss.get(RUNS), boss.get(f"{RUNS}{run.pk}/change/")]
    for page in pages:
        text = page.content.decode()
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)(?![^>]*application/json)", text)
        assert not re.search(r"\sstyle=|\son\w+=", text)
        assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text)
        assert "django_asyncq/admin.css" in text


# --- start-up runs


def test_startup_runs_are_shown_and_never_edited(boss: Client) -> None:
    """Errors are masked, long ones shortened; nobody adds, edits or deletes a run."""
    begun = timezone.now() - timedelta(hours=2)
    long = f"Traceback\nfirst line\n{'x' * 100_000}\npassword={CANARY}"
    rows = [
        StartupRun.objects.create(
            name=name, holder="web-1 42", term=7, begun_at=begun, finished_at=finished, error=error
        )
        for name, finished, error in (
            ("fine", begun + timedelta(seconds=12), ""),
            ("bad", begun + timedelta(seconds=3), long),
            ("lost", None, ""),
        )
    ]
    listing = boss.get(RUNS)
    text = text_of(listing)
    assert "fine 2 h ago 12 s Succeeded web-1 42" in text
    assert "bad 2 h ago 3.0 s Failed password=•••••• web-1 42" in text
    assert "lost 2 h ago – Not finished web-1 42" in text
    page = boss.get(f"{RUNS}{rows[1].pk}/change/").content.decode()
    assert "first line" in page and "Show all" in page and len(page) < 60_000
    whole = boss.get(f"{RUNS}{rows[1].pk}/change/?full").content.decode()
    assert "x" * 100_000 in whole
    assert "It is still running, or its process died." in boss.get(f"{RUNS}{rows[2].pk}/change/").content.decode()
    for each in (listing.content.decode(), page, whole):
        assert CANARY not in each
    assert boss.get(RUNS + "add/").status_code == 403
    assert boss.post(f"{RUNS}{rows[0].pk}/change/", {"name": "x"}).status_code == 403
    assert boss.post(f"{RUNS}{rows[0].pk}/delete/", {"post": "yes"}).status_code == 403
    assert b'name="_save"' not in boss.get(f"{RUNS}{rows[0].pk}/change/").content


def test_startup_runs_need_their_permission(client_of: Any) -> None:
    """The permission to view schedules is not enough."""
    assert client_of("view").get(RUNS).status_code == 403


# --- the site


@pytest.mark.parametrize("has_tasks", [False, True])
def test_works_on_a_custom_admin_site(client_of: Any, settings: Any, has_tasks: bool) -> None:
    """URLs are those of the site; a site without tasks has no links to them."""
    site = AdminSite("office")
    site.register(Schedule, ScheduleAdmin)
    if has_tasks:
        site.register(TaskRecord, TaskRecordAdmin)
    settings.ROOT_URLCONF = ModuleType("schedule_office_urls")
    settings.ROOT_URLCONF.urlpatterns = [path("office/", site.urls), path("admin/", admin.site.urls)]
    row, client = make(), client_of("superuser")
    Occurrence.objects.create(schedule=row, occurs_at=timezone.now(), task=task_row())
    office = f"/office{LIST.removeprefix('/admin')}"
    pages = [client.get(office), client.get(f"{office}{row.pk}/change/")]
    answer = client.post(f"{office}{row.pk}/run/", {"seen": "0"})
    assert answer["Location"] == f"{office}{row.pk}/change/"
    assert client.post(f"{office}add/", filled())["Location"].startswith(office)
    for page in pages:
        assert page.status_code == 200 and '"/admin/' not in page.content.decode()
        assert ("/office/django_asyncq/taskrecord/0" in page.content.decode()) is has_tasks


def test_admin_passes_the_system_checks_and_locks_are_not_shown() -> None:
    """Django finds no error in the classes, and leadership terms have no admin page."""
    assert ScheduleAdmin(Schedule, admin.site).check() == []
    assert StartupRunAdmin(StartupRun, admin.site).check() == []
    assert not admin.site.is_registered(LockTerm) and not admin.site.is_registered(Occurrence)
