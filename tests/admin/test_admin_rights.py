"""Each action of the admin × each permission × {visitor, staff, exactly that permission, all others, superuser}.

One table names what every action needs. A user with all permissions of the app but one of those is refused with 403,
whatever else they may do, and nothing is changed; one with exactly those is not refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.urls import get_resolver

from django_asyncq.control import start_bulk
from django_asyncq.models import BulkAction, Gate, PauseKind, Rate, Schedule, TaskRecord, TaskState

from ..admin_cases import LIST, client_with, make
from .test_admin_crawl import ACTING, MODELS, fill, stored

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_asyncq/"
NAMED = {"kind": PauseKind.QUEUE.value, "backend": "default", "name": "mail"}


class Action(NamedTuple):
    """What a person does. address: with {name} for an object. rights: of the app, all of them. posted: by the form."""

    address: str
    rights: set[str]
    posted: dict[str, Any] = {}


TASK, GATE, RATE, SCHEDULE, BULK = "{taskrecord}", "{gate}", "{rate}", "{schedule}", "{bulkaction}"
ACTIONS = {
    "retry": Action(f"{LIST}{TASK}/retry/", {"view_taskrecord", "retry_task"}),
    "run": Action(f"{LIST}{TASK}/run/", {"view_taskrecord", "retry_task"}),
    "cancel": Action(f"{LIST}{TASK}/cancel/", {"view_taskrecord", "cancel_task"}),
    "reschedule": Action(f"{LIST}{{queued}}/reschedule/", {"view_taskrecord", "retry_task"}, {"priority": "3"}),
    "secrets": Action(f"{LIST}{TASK}/secrets/", {"view_taskrecord", "view_payload"}),
    "again": Action(
        f"{LIST}{TASK}/again/", {"view_taskrecord", "retry_task", "view_payload"}, {"args": "[1]", "kwargs": ""}
    ),
    "enqueue": Action(f"{LIST}enqueue/", {"view_taskrecord", "enqueue_task"}, {"name": "tests.tasks.tidy"}),
    "retry_selected": Action(LIST, {"view_taskrecord", "retry_task"}, {"action": "retry_selected"}),
    "run_selected": Action(LIST, {"view_taskrecord", "retry_task"}, {"action": "run_selected"}),
    "cancel_selected": Action(LIST, {"view_taskrecord", "cancel_task"}, {"action": "cancel_selected"}),
    "delete_selected": Action(LIST, {"view_taskrecord", "delete_taskrecord"}, {"action": "delete_selected"}),
    "delete": Action(f"{LIST}{TASK}/delete/", {"delete_taskrecord"}, {"post": "yes"}),
    "bulk_retry": Action(f"{LIST}bulk/?kind=retry&state=failed", {"view_taskrecord", "retry_task"}),
    "bulk_cancel": Action(f"{LIST}bulk/?kind=cancel&state=queued", {"view_taskrecord", "cancel_task"}),
    "bulk_delete": Action(f"{LIST}bulk/?kind=delete&state=failed", {"view_taskrecord", "delete_taskrecord"}),
    "workflow_retry": Action(f"{LIST}workflow_retry/", {"view_taskrecord", "retry_task"}, {"id": "{workflow}"}),
    "workflow_cancel": Action(f"{LIST}workflow_cancel/", {"view_taskrecord", "cancel_task"}, {"id": "{workflow}"}),
    "pause": Action(f"{LIST}pause/", {"view_taskrecord", "pause_queue"}, NAMED),
    "resume": Action(f"{LIST}resume/", {"view_taskrecord", "pause_queue"}, NAMED),
    "forget": Action(f"{LIST}forget/", {"view_taskrecord", "delete_taskrecord"}, {"queue": "mail"}),
    "drain": Action(f"{LIST}drain/", {"view_taskrecord", "drain_worker"}, {"name": "host"}),
    "undrain": Action(f"{LIST}undrain/", {"view_taskrecord", "drain_worker"}, {"name": "host"}),
    "bulkaction_stop": Action(f"{APP}bulkaction/{BULK}/stop/", {"view_bulkaction", "retry_task"}),
    "gate_release": Action(f"{APP}gate/{GATE}/release/", {"view_gate", "release_slot"}, {"slot": "x"}),
    "gate_repair": Action(f"{APP}gate/{GATE}/repair/", {"view_gate", "change_gate"}),
    "gate_add": Action(f"{APP}gate/add/", {"add_gate"}, {"name": "new", "limit": "3", "expected_seconds": "1"}),
    "gate_delete": Action(f"{APP}gate/{GATE}/delete/", {"delete_gate"}, {"post": "yes"}),
    "rate_add": Action(f"{APP}rate/add/", {"add_rate"}, {"name": "new", "starts": "3", "seconds": "1", "burst": "1"}),
    "rate_delete": Action(f"{APP}rate/{RATE}/delete/", {"delete_rate"}, {"post": "yes"}),
    "schedule_run": Action(f"{APP}schedule/{SCHEDULE}/run/", {"view_schedule", "run_schedule"}),
    "schedule_resume": Action(f"{APP}schedule/resume/", {"change_schedule"}),
    "schedule_switch": Action(f"{APP}schedule/{SCHEDULE}/switch/", {"change_schedule"}, {"enabled": "0"}),
    "schedule_delete": Action(f"{APP}schedule/{SCHEDULE}/delete/", {"delete_schedule"}, {"post": "yes"}),
    "pause_add": Action(f"{APP}pause/add/", {"pause_queue"}, {**NAMED, "name": "other"}),
}
# Django lets somebody who may change a row view it too.
IMPLIED = {"view_taskrecord": {"change_taskrecord"}, "view_gate": {"change_gate"}, "view_schedule": {"change_schedule"}}


@pytest.fixture
def ids() -> dict[str, str]:
    """The key of one thing of each kind, which the actions are about."""
    fill("plain")
    queued = make(TaskState.QUEUED)
    make(name="tests.tasks.add", args=[1])
    start_bulk("retry", {"state": "failed"}, by="ann")
    task = TaskRecord.objects.filter(name="tests.tasks.add", state=TaskState.FAILED).latest("id")
    found: dict[str, Any] = {
        "taskrecord": task.pk,
        "queued": queued.pk,
        "gate": Gate.objects.first(),
        "rate": Rate.objects.first(),
        "schedule": Schedule.objects.first(),
        "bulkaction": BulkAction.objects.latest("id"),
        "workflow": TaskRecord.objects.exclude(workflow_id=None)[0].workflow_id,
    }
    return {name: str(getattr(each, "pk", each)) for name, each in found.items()}


def every_right() -> set[str]:
    return set(Permission.objects.filter(content_type__app_label="django_asyncq").values_list("codename", flat=True))


def posted_by(action: Action, ids: dict[str, str]) -> dict[str, str]:
    """What is posted by somebody who has confirmed it with a reason."""
    posted = {"confirmed": "yes", "reason": "why", "_selected_action": ids["taskrecord"], **action.posted}
    return {key: value.format(**ids) for key, value in posted.items()}


def act(client: Client, action: Action, ids: dict[str, str]) -> Any:
    """Do it."""
    return client.post(action.address.format(**ids), posted_by(action, ids))


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_needs_all_of_its_rights_and_no_others(name: str, ids: dict[str, str]) -> None:
    """A refusal is 403 and changes nothing; a visitor is sent to the login."""
    action, everything = ACTIONS[name], every_right()
    assert action.rights <= everything
    before = stored()
    answer = act(Client(), action, ids)
    assert answer.status_code == 302 and "/login/" in answer.url
    refused = {"staff": set()}
    for right in action.rights:
        refused[f"all but {right}"] = everything - {right} - IMPLIED.get(right, set())
        refused[f"only {right}"] = {right} if len(action.rights) > 1 else set()
    for who, rights in refused.items():
        answer = act(client_with(*rights, name=who.replace(" ", "-")), action, ids)
        # Where the object itself is not shown, Django sends to the index of the admin.
        assert answer.status_code == 403 or answer.headers.get("Location") == "/admin/", (who, answer)
    assert stored() == before
    answer = act(client_with(*action.rights, name="exact"), action, ids)
    # After a change Django sends somebody who may not view the list to the index too.
    assert answer.status_code in (200, 302), answer
    assert answer.headers.get("Location") != "/admin/" or stored() != before, answer
    answer = act(client_with(name="superuser", is_superuser=True), action, ids)
    assert answer.status_code in (200, 302, 404)


def test_the_table_has_every_acting_address() -> None:
    """One that is added without a line above fails here."""
    found = {name for name in get_resolver().namespace_dict["admin"][1].reverse_dict if isinstance(name, str)}
    acting = {name for name in found if name.startswith("django_asyncq_") and ACTING.search(name)}
    models = "|".join(model._meta.model_name or "" for model in MODELS)
    known = {name.replace("_selected", "") for name in ACTIONS}
    unknown = {
        name
        for name in acting
        if name.removeprefix("django_asyncq_").removeprefix("taskrecord_") not in known
        and name.removeprefix("django_asyncq_") not in known
    }
    assert models and unknown == set()


# --- journeys: what is offered to somebody can be done to its end, and ends on a page that may be seen

PAGE = re.compile(r'<a\b[^>]*\bhref="(/admin/django_asyncq/[^"#]*|\?[^"#]*)"')
FORM = re.compile(r'<form\b[^>]*method="post"[^>]*>.*?</form>', re.DOTALL)
FIELD = re.compile(r'<input\b[^>]*type="hidden"[^>]*>')
MOST_PAGES = 60


def journey(client: Client) -> Iterator[tuple[str, Any]]:
    """Follow each link and press each button that is offered, from the first page on; yield each, and its answer."""
    waiting, seen = [APP], {APP}
    while waiting and len(seen) < MOST_PAGES:
        page = waiting.pop(0)
        answer = client.get(page, follow=True)
        yield page, answer
        html = answer.content.decode()
        for found in map(unescape, PAGE.findall(html)):
            address = page.partition("?")[0] + found if found.startswith("?") else found
            # One list filtered by each of many values says no more than one of them.
            kind = re.sub(r"=[^&]*", "", address)
            if kind not in seen:
                seen.add(kind)
                waiting.append(address)
        for form in FORM.findall(html):
            action = re.search(r'action="([^"]*)"', form)
            address = unescape(action[1]) if action else page
            if "/logout/" in address or f"{page}|{address}" in seen:
                continue
            seen.add(f"{page}|{address}")
            fields = [re.search(r'name="([^"]*)"[^>]*value="([^"]*)"', field) for field in FIELD.findall(form)]
            posted = {unescape(field[1]): unescape(field[2]) for field in fields if field}
            for values in (posted, {**posted, "confirmed": "yes", "reason": "why"}):
                yield f"{address} with {values}", client.post(address, values, follow=True)


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_what_is_offered_can_be_done_to_its_end(name: str, ids: dict[str, str]) -> None:
    """For somebody who may see the pages, and do this one thing."""
    views = {
        right
        for right in every_right()
        if right.startswith("view_") and right not in ("view_payload", "view_bulkaction")
    }
    client = client_with(*(views | ACTIONS[name].rights))
    done = list(journey(client))
    assert len(done) > 15
    assert [what for what, answer in done if answer.status_code != 200] == []


# Django's own, whose pages it may leave for the index.
OF_DJANGO = {"delete", "gate_add", "gate_delete", "rate_add", "rate_delete", "schedule_delete", "pause_add"}


@pytest.mark.parametrize("name", sorted(set(ACTIONS) - OF_DJANGO))
def test_an_action_ends_on_a_page_that_may_be_seen_with_its_message(name: str, ids: dict[str, str]) -> None:
    """With exactly its rights."""
    client = client_with(*ACTIONS[name].rights)
    action = ACTIONS[name]
    posted = {"confirmed": "yes", "reason": "why", "_selected_action": ids["taskrecord"], **action.posted}
    answer = client.post(action.address.format(**ids), posted, follow=True)
    assert answer.status_code == 200 and answer.request["PATH_INFO"] != "/admin/", answer.request["PATH_INFO"]
    assert 'class="messagelist"' in answer.content.decode() or name in ("secrets", "delete_selected", "enqueue"), name


# --- a database that refuses to write

READ_ONLY = {
    "sqlite": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
    "postgresql": ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
    "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION TRANSACTION READ WRITE"),
}


# No such worker or slot is there, and the run was not asked for by its page.
NOTHING_TO_WRITE = {"drain", "undrain", "gate_release", "schedule_run"}


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_a_read_only_database_gets_a_sentence_at_each_button(name: str, ids: dict[str, str]) -> None:
    """Not a server error. What needs no database is done, and its page shows it."""
    client = client_with(is_superuser=True)
    action = ACTIONS[name]
    posted = posted_by(action, ids)
    if name == "delete_selected":
        posted["post"] = "yes"
    before, (begin, end) = stored()[0], READ_ONLY[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(begin)
    try:
        answer = client.post(action.address.format(**ids), posted, follow=True)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(end)
    assert answer.status_code == 200
    assert stored()[0] == before
    said = [str(each) for each in answer.context["messages"]]
    assert said and any("The database refuses this now" in each for each in said) is (name not in NOTHING_TO_WRITE)
