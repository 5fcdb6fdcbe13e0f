"""Each action of the admin × each permission × {visitor, staff, exactly that permission, all others, superuser}.

One table names what every action needs. A user with all permissions of the app but one of those is refused with 403,
whatever else they may do, and nothing is changed; one with exactly those is not refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import get_resolver

from django_asyncq.bulk_actions import pause_bulk, start_bulk
from django_asyncq.models import BulkAction, Gate, PauseKind, Schedule, TaskRecord, TaskState

from .admin_cases import LIST, client_with, make
from .test_admin_crawl import ACTING, MODELS, fill, stored

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_asyncq/"
NAMED = {"kind": PauseKind.QUEUE.value, "backend": "default", "name": "mail"}


class Action(NamedTuple):
    """What a person does. address: with {name} for an object. rights: of the app, all of them. posted: by the form."""

    address: str
    rights: set[str]
    posted: dict[str, Any] = {}


TASK, GATE, SCHEDULE, BULK = "{taskrecord}", "{gate}", "{schedule}", "{bulkaction}"
ACTIONS = {
    "retry": Action(f"{LIST}{TASK}/retry/", {"view_taskrecord", "retry_task"}),
    "run": Action(f"{LIST}{TASK}/run/", {"view_taskrecord", "retry_task"}),
    "cancel": Action(f"{LIST}{TASK}/cancel/", {"view_taskrecord", "cancel_task"}),
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
    "retry-group": Action(f"{LIST}retry-group/", {"view_taskrecord", "retry_task"}, {"name": "x", "error": "x"}),
    "pause": Action(f"{LIST}pause/", {"view_taskrecord", "pause_queue"}, NAMED),
    "resume": Action(f"{LIST}resume/", {"view_taskrecord", "pause_queue"}, NAMED),
    "forget": Action(f"{LIST}forget/", {"view_taskrecord", "delete_taskrecord"}, {"queue": "mail"}),
    "drain": Action(f"{LIST}drain/", {"view_taskrecord", "drain_worker"}, {"name": "host"}),
    "undrain": Action(f"{LIST}undrain/", {"view_taskrecord", "drain_worker"}, {"name": "host"}),
    "bulkaction_pause": Action(f"{APP}bulkaction/{BULK}/pause/", {"view_bulkaction", "retry_task"}),
    "bulkaction_resume": Action(f"{APP}bulkaction/{BULK}/resume/", {"view_bulkaction", "retry_task"}),
    "bulkaction_stop": Action(f"{APP}bulkaction/{BULK}/stop/", {"view_bulkaction", "retry_task"}),
    "gate_release": Action(f"{APP}gate/{GATE}/release/", {"view_gate", "release_slot"}, {"slot": "x"}),
    "gate_repair": Action(f"{APP}gate/{GATE}/repair/", {"view_gate", "change_gate"}),
    "gate_add": Action(f"{APP}gate/add/", {"add_gate"}, {"name": "new", "limit": "3", "expected_seconds": "1"}),
    "gate_delete": Action(f"{APP}gate/{GATE}/delete/", {"delete_gate"}, {"post": "yes"}),
    "schedule_run": Action(f"{APP}schedule/{SCHEDULE}/run/", {"view_schedule", "run_schedule"}),
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
    make(TaskState.QUEUED)
    make(name="tests.tasks.add", args=[1])
    pause_bulk(start_bulk("retry", {"state": "failed"}, by="ann"))
    task = TaskRecord.objects.filter(name="tests.tasks.add", state=TaskState.FAILED).latest("id")
    found: dict[str, Any] = {
        "taskrecord": task.pk,
        "gate": Gate.objects.first(),
        "schedule": Schedule.objects.first(),
        "bulkaction": BulkAction.objects.latest("id"),
    }
    return {name: str(getattr(each, "pk", each)) for name, each in found.items()}


def every_right() -> set[str]:
    return set(Permission.objects.filter(content_type__app_label="django_asyncq").values_list("codename", flat=True))


def act(client: Client, action: Action, ids: dict[str, str]) -> Any:
    """Do it, as somebody who has confirmed it with a reason."""
    posted = {"confirmed": "yes", "reason": "why", "_selected_action": ids["taskrecord"], **action.posted}
    return client.post(action.address.format(**ids), posted)


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
