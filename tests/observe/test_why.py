"""Why a task does not run: one answer on its page, in the list, and on the command line."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_asyncq import control, rates
from django_asyncq.broker import Broker
from django_asyncq.core.names import uuid7
from django_asyncq.core.rates import rate_of
from django_asyncq.core.registry import registered_names
from django_asyncq.gates import members
from django_asyncq.models import FailureReason, Gate, PauseKind, TaskRecord, TaskState
from django_asyncq.observe.fleet import Fleet
from django_asyncq.observe.inspector import Inspector, WorkerInfo
from django_asyncq.observe.why import Keeper, why_not_running
from django_asyncq.rates import Waiter
from django_asyncq.worker.rates import waiter_of

from .. import tasks
from ..admin.test_admin_round_trips import sent
from ..admin_cases import LIST, client_with, make
from ..rate_tasks import hourly

__all__ = ["sent"]
pytestmark = pytest.mark.django_db(transaction=True)

NOW = timezone.now()
QUEUED, RUNNING, FAILED = TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED
LATER = NOW + timedelta(days=4, hours=12)
WAITS = {"retry_at": NOW, "reason": FailureReason.GATE_FULL, "gate": "narrow"}
# What keeps it: the values of its row, what is paused, and what each surface says.
CASES: dict[Keeper, tuple[dict[str, Any], tuple[str, str] | None, str, str]] = {
    Keeper.DELAYED: ({"state": QUEUED, "run_after": LATER}, None, "due in 4 d", "it is delayed: due in 38"),
    Keeper.FOLLOWS: ({"state": QUEUED, "after_id": uuid7()}, None, "waits for …", "it waits for the task "),
    Keeper.PARENTS: (
        {"state": QUEUED, "waits_for": 3},
        None,
        "waits for 3 tasks",
        "it waits for tasks that must finish",
    ),
    Keeper.BATCHED: ({"state": QUEUED, "batch_id": uuid7()}, None, "runs in the batch …", "it runs with others"),
    Keeper.REMOTE: ({"state": QUEUED, "is_remote": True}, None, "run by another program", "another program runs it"),
    Keeper.UNKNOWN: (
        {"state": QUEUED, "name": "shop.tasks.gone"},
        None,
        "No running worker has its code",
        "no running worker has the code of shop.tasks.gone",
    ),
    Keeper.QUEUE_PAUSED: (
        {"state": QUEUED},
        (PauseKind.QUEUE, "default"),
        "Its queue is paused",
        "the queue default is paused, by ann",
    ),
    Keeper.TASK_PAUSED: (
        {"state": QUEUED},
        (PauseKind.TASK, "tests.tasks.add"),
        "Paused",
        "the task tests.tasks.add is paused, by ann",
    ),
    Keeper.GATE_PAUSED: (WAITS, (PauseKind.GATE, "narrow"), "Its gate is paused", "the gate narrow is paused, by ann"),
    Keeper.UNSERVED: (
        {"state": QUEUED, "queue_name": "mail"},
        None,
        "No worker takes its queue",
        "no worker takes the queue mail",
    ),
    Keeper.GATE_FULL: (WAITS, None, "waits for a slot of gate narrow", "it waits for a slot of the gate narrow"),
    Keeper.RATE: (
        {"state": QUEUED, "name": "tests.rate_tasks.hourly"},
        None,
        "waits for the rate hourly, looked at in",
        "it waits for the rate hourly: looked at in about 3",
    ),
    Keeper.RETRY: ({"retry_at": LATER}, None, "retry in 4 d (attempt 1 of 1)", "it is retried in 38"),
    Keeper.DUE: ({"state": QUEUED}, None, "waits for a free worker", "it waits for a free worker"),
    Keeper.TIMEOUT: (
        {"state": RUNNING, "timeout_seconds": 1, "last_attempted_at": NOW - timedelta(hours=1)},
        None,
        "Stuck: longer than its timeout",
        "it is stuck: it has run longer than its timeout",
    ),
    Keeper.WORKER_LOST: (
        {"state": RUNNING, "worker_ids": ["gone"], "last_attempted_at": NOW - timedelta(hours=1)},
        None,
        "Stuck: its worker is not alive",
        "it is stuck: its worker is not alive",
    ),
}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One living worker, of the queue `default`."""
    values = dict.fromkeys(WorkerInfo.__dataclass_fields__)
    known = {"tasks": registered_names(), "versions": {}}
    worker = WorkerInfo(**{**values, "backend": "default", "id": "w", "queues": {"default": 1}, "running": (), **known})  # type: ignore[arg-type]

    def read(*readers: Any, **options: Any) -> tuple[Fleet, list[None]]:
        return Fleet(timezone.now(), workers=[worker], pauses=control.pauses()), [None] * len(readers)

    for place in ("django_asyncq.admin.fleet", "django_asyncq.management.commanding.tasks"):
        monkeypatch.setattr(f"{place}.read_fleet", read)


def test_each_cause_has_a_case() -> None:
    """One that is added fails here."""
    assert CASES.keys() == set(Keeper)


@pytest.mark.parametrize("keeper", list(Keeper))
def test_each_surface_gives_the_same_answer(keeper: Keeper, fleet: None) -> None:
    """In the list one that is due has no note."""
    values, paused, shown, said = CASES[keeper]
    Gate.objects.create(name="narrow", limit=1)
    row = make(**{"state": FAILED, **values})
    if keeper is Keeper.RATE:
        # The third of the burst of two waits for an hour.
        rates.build("hourly")
        others = [Waiter("default", "default", name) for name in "ab"]
        rates.ask(Broker(), "hourly", rate_of(hourly), [*others, waiter_of(row)], "start")
    if paused:
        control.pause(*paused, by="ann")
    client = client_with("view_taskrecord")
    for address in (f"{LIST}{row.pk}/change/", LIST):
        text = " ".join(_without_tags(client.get(address).content.decode()).split())
        assert (shown in text) is (address != LIST or keeper is not Keeper.DUE), (address, text)
    out = StringIO()
    call_command("asyncq", "tasks", "show", str(row.pk), "--json", stdout=out)
    assert json.loads(out.getvalue())["why_not_running"].startswith(said)


def test_the_place_in_line_is_said(fleet: None) -> None:
    """In the order of the gate, not of the rows."""
    Gate.objects.create(name="narrow", limit=1)
    # A new call that waits, and retries.
    queued = make(TaskState.QUEUED, reason=FailureReason.GATE_FULL, gate="narrow")
    rows = [queued, *(make(**WAITS) for _ in range(3))]
    members.wait("narrow", rows)
    ids = [row.pk for row in rows]
    assert Inspector().tasks.places_in_line(ids) == {id: number for number, id in enumerate(ids, start=1)}
    client = client_with("view_taskrecord")
    for number, row in enumerate(rows, start=1):
        text = _without_tags(client.get(f"{LIST}{row.pk}/change/").content.decode())
        assert f"waits for a slot of gate narrow, place {number} in line" in " ".join(text.split())


def test_the_places_of_many_cost_as_much_as_that_of_one(django_assert_num_queries: Any, sent: list[Any]) -> None:
    """Only those that wait in a line have one; an unknown id, a plain task and a finished one have none."""
    Gate.objects.create(name="narrow", limit=1)
    rows = [make(**WAITS) for _ in range(30)]
    members.wait("narrow", rows)
    others = [make(TaskState.QUEUED), make(TaskState.SUCCEEDED), make(), make(**{**WAITS, "retry_at": None})]
    ids = [*(row.pk for row in (*rows, *others)), uuid7()]
    Inspector().tasks.places_in_line(ids)
    sent.clear()
    with django_assert_num_queries(1):
        places = Inspector().tasks.places_in_line(ids)
    assert places == {row.pk: number for number, row in enumerate(rows, start=1)}
    assert len(sent) == 1


@pytest.mark.parametrize("state", [TaskState.SUCCEEDED, TaskState.FAILED, TaskState.RUNNING])
def test_what_runs_or_has_finished_has_no_cause(state: TaskState) -> None:
    """Whatever is paused."""
    row = make(state, last_attempted_at=timezone.now())
    control.pause(PauseKind.QUEUE, "default")
    assert why_not_running(row, Fleet(timezone.now(), pauses=control.pauses())) is None


def test_nothing_is_said_of_workers_while_redis_is_unreachable() -> None:
    """The rows and the pauses are known."""
    row = make(TaskState.QUEUED)
    why = why_not_running(row, Fleet(timezone.now(), error="connection refused"))
    assert why is not None and why.keeper is Keeper.DUE


def test_a_task_that_was_enqueued_says_what_it_waits_for() -> None:
    """No worker runs in this test."""
    Broker().register_queue("default")
    result = tasks.add.enqueue(1, 2)
    row = TaskRecord.objects.get(pk=result.id)
    why = why_not_running(row, Fleet(timezone.now()))
    assert why is not None and why.keeper is Keeper.UNSERVED


def _without_tags(html: str) -> str:
    return re.sub("<[^>]+>", "", html)
