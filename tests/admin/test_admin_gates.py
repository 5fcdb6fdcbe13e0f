"""The page of a gate: who holds its slots, who waits, what is released, repaired and paused; and its list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.http import HttpRequest
from django.test import Client
from django.utils import timezone

from django_asyncq import control, gates
from django_asyncq.admin import fleet as fleet_module
from django_asyncq.broker import Broker
from django_asyncq.exceptions import QueueFull
from django_asyncq.models import FailureReason, Gate, Pause, PauseKind, TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..admin_cases import client_with, make, said

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/django_asyncq/gate/"
RIGHTS = ("view_gate", "release_slot", "change_gate", "view_taskrecord", "pause_queue")


@pytest.fixture
def gate() -> Gate:
    """A gate of two slots."""
    return Gate.objects.create(name="narrow", limit=2)


@pytest.fixture
def operator() -> Client:
    """A person with each of the rights."""
    return client_with(*RIGHTS)


def page_of(gate: Gate) -> str:
    return f"{LIST}{gate.pk}/change/"


def enqueue() -> TaskRecord:
    """A task that holds a slot."""
    return TaskRecord.objects.get(pk=tasks.gated.using(gate="narrow").enqueue("narrow").id)


def run_at_a_dead_worker(record: TaskRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says RUNNING, and no process has the id of its worker."""
    old = timezone.now() - timedelta(minutes=5)
    TaskRecord.objects.filter(pk=record.pk).update(
        state=TaskState.RUNNING, worker_ids=["dead:1:2:3"], last_attempted_at=old, started_at=old
    )


def test_holders_and_waiters_are_links_in_their_order(gate: Gate, operator: Client) -> None:
    """A full gate says so."""
    first, second = enqueue(), enqueue()
    waiting = make(reason=FailureReason.GATE_FULL, gate="narrow", retry_at=timezone.now(), name="tests.tasks.gated")
    gates.audit_waiters("narrow")
    response = operator.get(page_of(gate))
    page = response.context["gate_page"]
    assert {slot.row.pk for slot in page.slots} == {first.pk, second.pk} and not any(slot.why for slot in page.slots)
    assert [waiter.text for waiter in page.waiters] == [str(waiting)]
    text = response.content.decode()
    assert f"/taskrecord/{first.pk}/change/" in text and "2 of 2, full" in text
    assert 'role="meter"' in text and 'aria-valuenow="2"' in text and "The slots agree with the tasks." in text
    assert "Release slot" not in text


def test_the_slot_of_a_dead_worker_is_released_after_a_question(
    gate: Gate, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly that one: its task fails as cancelled, and another is admitted."""
    lost, other = enqueue(), enqueue()
    run_at_a_dead_worker(lost, monkeypatch)
    with pytest.raises(QueueFull):
        enqueue()
    text = operator.get(page_of(gate)).content.decode()
    assert "Its worker is not alive." in text and text.count("Release slot") == 1
    address = f"{LIST}{gate.pk}/release/"
    question = operator.post(address, {"slot": str(lost.pk)})
    assert "Release a slot of gate narrow?" in question.content.decode() and gates.slots_taken("narrow") in (1, 2)
    assert said(operator.post(address, {"slot": str(lost.pk), "confirmed": "yes"}))[-1] == (
        "success",
        "The slot is free.",
    )
    lost.refresh_from_db()
    assert (lost.state, lost.reason) == (TaskState.FAILED, FailureReason.CANCELLED) and "ann" in lost.cancelled_by
    assert {slot.id for slot in gates.slots("narrow")} == {str(other.pk)}
    enqueue()
    assert "Released the slot of" in LogEntry.objects.get().change_message
    again = operator.post(address, {"slot": str(lost.pk), "confirmed": "yes"})
    assert said(again)[-1][0] == "warning"


def test_a_slot_without_a_task_is_marked_and_released(gate: Gate, operator: Client) -> None:
    """Of another program, or of a task that was deleted."""
    record = enqueue()
    keys = gates.keys("narrow")
    Broker().client.zadd(keys.members, {"go-task-1": 99_999_999_999})
    page = operator.get(page_of(gate)).context["gate_page"]
    assert [slot.why != "" for slot in page.slots] == [False, True]
    operator.post(f"{LIST}{gate.pk}/release/", {"slot": "go-task-1", "confirmed": "yes"})
    assert [slot.id for slot in gates.slots("narrow")] == [str(record.pk)]


def test_the_slot_of_a_healthy_task_is_not_released(gate: Gate, operator: Client) -> None:
    """A forged request changes nothing."""
    record = enqueue()
    for slot in (str(record.pk), "nothing", "", "\x00"):
        response = operator.post(f"{LIST}{gate.pk}/release/", {"slot": slot, "confirmed": "yes"})
        assert said(response)[-1] == ("warning", "This slot is released by its task, so nothing was changed.")
    record.refresh_from_db()
    assert record.state == TaskState.QUEUED and len(gates.slots("narrow")) == 1


def test_drift_is_shown_and_repaired(gate: Gate, operator: Client) -> None:
    """A slot that Redis has lost comes back."""
    record = enqueue()
    gates.release_ids("narrow", [str(record.pk)])
    assert "1 task has no slot." in operator.get(page_of(gate)).content.decode()
    assert said(operator.post(f"{LIST}{gate.pk}/repair/")) == [("success", "1 slot was added, 0 were removed.")]
    assert [slot.id for slot in gates.slots("narrow")] == [str(record.pk)]


def test_the_gate_is_paused_and_resumed_on_its_page(gate: Gate, operator: Client) -> None:
    """And its list says so."""
    values = {"kind": "gate", "name": "narrow", "next": page_of(gate)}
    response = operator.post("/admin/django_asyncq/taskrecord/pause/", {**values, "confirmed": "yes"})
    assert response.url == page_of(gate) and Pause.objects.get().kind == PauseKind.GATE
    assert "Paused by" in operator.get(page_of(gate)).content.decode()
    assert '<span class="asyncq-mark">Paused</span>' in operator.get(LIST).content.decode()
    operator.post("/admin/django_asyncq/taskrecord/resume/", values)
    assert not Pause.objects.exists()


def test_a_next_page_of_another_site_is_not_followed(gate: Gate, operator: Client) -> None:
    """It could look like ours."""
    values = {"kind": "gate", "name": "narrow", "next": "https://evil.example/x", "confirmed": "yes"}
    assert operator.post("/admin/django_asyncq/taskrecord/pause/", values).url.startswith("/admin/")


def test_the_limit_is_edited_in_the_list(gate: Gate, operator: Client) -> None:
    """It takes effect at once, and is in the history."""
    form = {
        "form-TOTAL_FORMS": "1",
        "form-INITIAL_FORMS": "1",
        "form-0-id": str(gate.pk),
        "form-0-limit": "1",
        "_save": "Save",
    }
    operator.post(LIST, form)
    assert Gate.objects.get().limit == 1 and LogEntry.objects.count() == 1
    enqueue()
    with pytest.raises(QueueFull):
        enqueue()


def test_the_page_is_there_while_redis_is_unreachable(gate: Gate, operator: Client, own_redis: EmbeddedRedis) -> None:
    """With its form."""
    own_redis.kill()
    text = operator.get(page_of(gate)).content.decode()
    assert "The slots cannot be shown while Redis is unreachable." in text and 'name="limit"' in text
    assert "Redis is unreachable" in said(operator.post(f"{LIST}{gate.pk}/repair/"))[-1][1]


@pytest.mark.parametrize(("view", "right"), [("release", "release_slot"), ("repair", "change_gate")])
def test_each_button_needs_its_permission_and_a_post(gate: Gate, view: str, right: str) -> None:
    """A forged POST gets 403, a GET 405."""
    address, values = f"{LIST}{gate.pk}/{view}/", {"slot": "x", "confirmed": "yes"}
    viewer = client_with("view_gate", name="viewer")
    assert viewer.post(address, values).status_code == 403
    assert client_with(right, name="blind").post(address, values).status_code == 403
    assert client_with("view_gate", right, name="allowed").get(address).status_code == 405
    text = viewer.get(page_of(gate)).content.decode()
    assert "Repair now" not in text and "Release slot" not in text and "/taskrecord/pause/" not in text
    assert not LogEntry.objects.exists()


def test_a_gate_that_is_not_there_is_said_to_be_missing(operator: Client) -> None:
    """Not an error page."""
    response: Any = operator.post(f"{LIST}999/repair/")
    assert said(response)[-1] == ("warning", "This gate no longer exists.")
    assert fleet_module.fleet_of(HttpRequest()).gate_pause("nothing") is None
    assert control.pauses() == []
