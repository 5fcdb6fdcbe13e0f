"""The pages *Queues* and *Workers*, the banner, and what pauses and drains."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.http import HttpRequest
from django.utils import timezone

from django_asyncq import control
from django_asyncq.admin import fleet as fleet_module
from django_asyncq.admin.queues import rate_of
from django_asyncq.broker import Broker, servers
from django_asyncq.broker.foreign import rejected_document
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.servers import ShownWorker
from django_asyncq.models import Pause, PauseKind, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector, MinuteInfo
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..admin_cases import LIST, client_with, make, said
from ..broker.test_servers import SHOWN
from ..workers import Workers, kill_all, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES, WORKERS = f"{LIST}queues/", f"{LIST}workers/"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Workers]:
    """A fleet of one process that waits."""
    with workers(tmp_path, "--processes", "1") as running:
        wait_until(lambda: Inspector().workers.all(), "the heartbeat")
        yield running


def queue_row(name: str) -> Any:
    """What the page shows of a queue."""
    found = client_with("view_taskrecord", name=f"viewer{LogEntry.objects.count()}{os.urandom(3).hex()}").get(QUEUES)
    return next(each for each in found.context["queues"] if each.info.queue == name)


# --- 22: queues


def test_the_numbers_of_a_queue_equal_database_and_redis() -> None:
    """Waiting, delayed and retrying tasks, and the age of the oldest."""
    for _ in range(3):
        tasks.stamp.using(queue_name="q22").enqueue()
    tasks.stamp.using(queue_name="q22", run_after=timedelta(hours=1)).enqueue()
    make(TaskState.RUNNING, queue_name="q22", last_attempted_at=timezone.now(), worker_ids=["x"])
    row = queue_row("q22")
    assert (row.info.queued, row.info.running, row.info.scheduled, row.info.pending) == (4, 1, 1, 3)
    assert 0 <= row.info.oldest_waiting_seconds < 60
    assert row.servers == 0 and not row.failed


def test_a_queue_counts_what_was_run_in_the_last_minutes(fleet: Workers) -> None:
    """By the counters of Redis."""
    for _ in range(5):
        tasks.add.using(queue_name="default").enqueue(1, 2)
    tasks.fail_until.enqueue(9, fatal=True)
    wait_until(lambda: TaskRecord.objects.filter(finished_at=None).count() == 0, "the tasks")
    wait_until(lambda: Inspector().queues.minutes("default", minutes=2)[0].processed, "the counters")
    wait_until(lambda: queue_row("default").servers == 1, "the next heartbeat, which names the new queue")
    assert queue_row("default").failed >= 1


def test_the_page_says_when_redis_is_unreachable(own_redis: EmbeddedRedis) -> None:
    """And what is paused is still shown, because the database knows it."""
    control.pause(PauseKind.TASK, "tests.tasks.add", by="bob", note="broken")
    client = client_with("view_taskrecord")
    own_redis.kill()
    page = client.get(QUEUES).content.decode()
    workers_page = client.get(WORKERS).content.decode()
    assert "cannot be shown while Redis is unreachable" in page and "cannot be shown" in workers_page
    assert "tests.tasks.add" in page and "broken" in page


@pytest.mark.parametrize(
    ("counts", "rate"), [([1, 2, 3], 2.0), ([None, 4], 4.0), ([None, None], None), ([], None), ([0, 0], 0.0)]
)
def test_the_rate_is_the_mean_of_the_minutes_that_are_known(counts: list[int | None], rate: float | None) -> None:
    """Redis may have lost some."""
    minutes = [MinuteInfo(timezone.now(), count, count) for count in counts]
    assert rate_of(minutes) == rate


def test_rejected_messages_are_shown_with_the_reason_and_forgotten_after_a_question() -> None:
    """With secrets masked; to forget them needs the permission to delete."""
    tasks.stamp.using(queue_name="mail").enqueue()
    broker = Broker()
    for number in range(103):
        data = f'{{"password": "hunter22", "number": {number}}}'.encode()
        document = rejected_document("inbox", f"id-{number}", data, f"it has no task <b>{number}</b>", time.time())
        broker.client.lpush(QueueKeys("mail").rejected, document)
    client = client_with("view_taskrecord")
    page = client.get(QUEUES).content.decode()
    address = f"{LIST}rejected/?backend=default&amp;queue=mail"
    assert "103 messages rejected" in page and address in page
    shown = client.get(address.replace("&amp;", "&")).content.decode()
    assert "it has no task &lt;b&gt;102&lt;/b&gt;" in shown and "hunter22" not in shown and "inbox" in shown
    assert "The latest 100 are shown." in shown and "Forget them" not in shown
    values = {"backend": "default", "queue": "mail", "confirmed": "yes"}
    assert client.post(f"{LIST}forget/", values).status_code == 403
    boss = client_with("view_taskrecord", "delete_taskrecord", name="bob")
    asked = boss.post(f"{LIST}forget/", {**values, "confirmed": ""}).content.decode()
    assert "Forget the rejected messages of queue mail?" in asked and Inspector().queues.get("mail").rejected == 103
    assert said(boss.post(f"{LIST}forget/", values)) == [("success", "103 messages were forgotten.")]
    assert Inspector().queues.get("mail").rejected == 0
    assert LogEntry.objects.get().change_message == "Forgot 103 rejected messages."
    assert "Nothing was rejected." in boss.get(address.replace("&amp;", "&")).content.decode()


@pytest.mark.parametrize("query", ["", "?queue=a b", "?queue=x&backend=nothing", "?queue=%00", "?queue={}&backend="])
def test_a_queue_that_cannot_be_has_no_rejected_messages(query: str) -> None:
    """The page says so, or why it cannot look; it never fails."""
    client = client_with("view_taskrecord", "delete_taskrecord")
    assert client.get(f"{LIST}rejected/{query}").status_code == 200
    values = {**parse_qs(query.removeprefix("?")), "confirmed": "yes"}
    assert client.post(f"{LIST}forget/", values).status_code == 302


# --- 23: pause


def test_a_queue_is_paused_after_a_question_and_resumed_at_once() -> None:
    """The row says who and why; the history has both acts."""
    tasks.stamp.using(queue_name="q23").enqueue()
    client = client_with("view_taskrecord", "pause_queue")
    values = {"kind": "queue", "backend": "default", "name": "q23"}
    question = client.post(f"{LIST}pause/", values)
    assert question.status_code == 200 and "Pause queue q23?" in question.content.decode()
    assert not Pause.objects.exists()
    done = client.post(f"{LIST}pause/", {**values, "confirmed": "yes", "reason": "deploy"}, follow=True)
    pause = Pause.objects.get()
    assert (pause.name, pause.paused_by, pause.note) == ("q23", "ann", "deploy")
    assert Inspector().queues.get("q23").is_paused
    page = done.content.decode()
    assert "Paused by" in page and "deploy" in page and "Resume queue q23" in page
    again = client.post(f"{LIST}pause/", {**values, "confirmed": "yes"})
    assert said(again)[0][0] == "warning" and Pause.objects.count() == 1
    assert said(client.post(f"{LIST}resume/", values))[-1] == ("success", "Resumed: queue q23.")
    assert not Pause.objects.exists() and not Inspector().queues.get("q23").is_paused
    assert list(LogEntry.objects.order_by("id").values_list("object_repr", "change_message")) == [
        ("queue q23", "Paused: deploy"),
        ("queue q23", "Resumed."),
    ]


def test_a_task_and_a_gate_are_paused_and_resumed_too() -> None:
    """From the same page."""
    client = client_with("view_taskrecord", "pause_queue")
    for kind, name in (("task", "tests.tasks.add"), ("gate", "g23")):
        client.post(f"{LIST}pause/", {"kind": kind, "name": name, "confirmed": "yes"})
    page = client.get(QUEUES).content.decode()
    assert "Resume tests.tasks.add" in page and "Resume g23" in page
    for kind, name in (("task", "tests.tasks.add"), ("gate", "g23")):
        client.post(f"{LIST}resume/", {"kind": kind, "name": name})
    assert not Pause.objects.exists()


@pytest.mark.parametrize("kind", ["queue", "task", "gate", "", "<b>"])
def test_what_cannot_be_paused_is_refused_with_the_reason(kind: str) -> None:
    """Nothing is written."""
    client = client_with("view_taskrecord", "pause_queue")
    response = client.post(f"{LIST}pause/", {"kind": kind, "name": "a b\x00{}", "confirmed": "yes"})
    assert response.status_code == 302 and said(response)[0][0] == "error"
    assert not Pause.objects.exists()


# --- 6 and 26: who is alive, and what is stuck


def test_a_killed_worker_is_shown_as_lost_with_what_it_ran(tmp_path: Path) -> None:
    """Its heartbeat expires; its task is marked and found by the filter of the fleet."""
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_HISTORY=str(tmp_path / "history")) as fleet:
        wait_until(lambda: Inspector().workers.all(), "the heartbeat")
        task = tasks.nap.enqueue(120)
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.RUNNING).exists(), "the run")
        shown = client_with("view_taskrecord", name="one").get(WORKERS)
        (worker,) = shown.context["workers"]
        wait_until(lambda: Inspector().workers.all()[0].running, "what it runs")
        assert worker.info.version and not shown.context["lost"]
        assert abs(time.time() - worker.info.beat_at.timestamp()) < 30 and "<time" in worker.beat
        kill_all([fleet.process.pid, *fleet.children()])
    wait_until(lambda: not Inspector().workers.all(), "the end of the heartbeat")
    wait_until(lambda: fleet_module.fleet_of(HttpRequest()).stuck(), "the mark", 30)
    response = client_with("view_taskrecord", name="two").get(WORKERS)
    (lost,) = response.context["lost"]
    assert [each.url for each in lost.tasks] == [f"{LIST}{task.id}/change/"]
    page = response.content.decode()
    assert "Lost workers" in page and "No worker has reported for" in page
    assert fleet_module.fleet_of(HttpRequest()).stuck() == {TaskRecord.objects.get().id: "worker"}


def test_a_task_older_than_its_timeout_is_stuck() -> None:
    """Whatever is known of its worker."""
    old = timezone.now() - timedelta(minutes=5)
    late = make(TaskState.RUNNING, timeout_seconds=60, last_attempted_at=old, started_at=old, worker_ids=["w"])
    make(TaskState.RUNNING, timeout_seconds=600, last_attempted_at=timezone.now(), worker_ids=["w"])
    assert fleet_module.fleet_of(HttpRequest()).stuck() == {late.id: "timeout"}


def test_versions_of_the_project_stand_side_by_side() -> None:
    """What each has run, and which tasks it does not have; nothing while there is one that says nothing."""

    def show(number: int, **details: Any) -> ShownWorker:
        id = servers.server_id_of(f"h:1:{number}:x")
        info = replace(SHOWN.info, pid=number, server_id=id)
        return SHOWN._replace(info=info, details=replace(SHOWN.details, worker_id=f"h:1:{number}:x", **details))

    client = client_with("view_taskrecord")
    servers.show("default", [show(1)], 60)
    assert client.get(WORKERS).context["codes"] == []
    old = {"app_version": "1.4", "tasks": ("a.b",)}
    new = {"app_version": "1.5", "tasks": ("a.b", "a.c"), "finished": 1200}
    servers.show(
        "default",
        [
            show(1, **new, is_leader=True),
            show(2, **new),
            show(
                3,
                **old,
            ),
        ],
        60,
    )
    response = client.get(WORKERS)
    found = {each.version: (each.processes, each.finished, each.lacking) for each in response.context["codes"]}
    assert found == {"1.5": (2, "2,400", []), "1.4": (1, "0", ["a.c"])}
    assert "Versions of the project" in response.content.decode()


# --- 27: drain


def test_a_worker_is_drained_after_a_question(fleet: Workers) -> None:
    """It takes no more, the page says "quiet", and it takes tasks again when it is let."""
    (worker,) = Inspector().workers.all()
    client = client_with("view_taskrecord", "drain_worker")
    assert "Stop " in client.post(f"{LIST}drain/", {"name": worker.id}).content.decode()
    assert not Inspector().workers.all()[0].is_draining
    response = client.post(f"{LIST}drain/", {"name": worker.id, "confirmed": "yes"})
    assert said(response) == [("success", "1 worker takes no more tasks after its next beat.")]
    wait_until(lambda: Inspector().workers.all()[0].is_draining, "the drain")
    page = client.get(WORKERS).content.decode()
    assert "quiet" in page and "All workers were asked to take no more tasks." in page
    tasks.add.enqueue(1, 2)
    assert said(client.post(f"{LIST}undrain/", {"name": worker.id}))[0][0] == "success"
    wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).exists(), "the task")
    assert [entry.object_repr for entry in LogEntry.objects.all()] == [f"worker {worker.id}"] * 2


def test_a_worker_that_is_not_there_is_not_drained() -> None:
    """A message says so."""
    client = client_with("view_taskrecord", "drain_worker")
    response = client.post(f"{LIST}drain/", {"name": "nobody", "confirmed": "yes"})
    assert said(response) == [("warning", "No living worker is called nobody.")]
    assert said(client.post(f"{LIST}undrain/", {"name": "nobody"}))[0][0] == "warning"


# --- the banner


def test_the_banner_names_a_queue_that_nobody_serves(tmp_path: Path) -> None:
    """Only while tasks wait in it."""
    with workers(tmp_path, "--processes", "1", "--queues", "other"):
        wait_until(lambda: Inspector().workers.all(), "the heartbeat")
        client = client_with("view_taskrecord")
        assert "asyncq-banner" not in client.get(LIST).content.decode()
        tasks.stamp.using(queue_name="lonely").enqueue()
        assert "No worker serves the queue lonely" in client.get(LIST).content.decode()
        assert "No worker serves it" in client.get(QUEUES).content.decode()


def test_the_banner_names_paused_queues(tmp_path: Path) -> None:
    """On every page, so that nobody looks for another reason."""
    with workers(tmp_path, "--processes", "1"):
        wait_until(lambda: Inspector().workers.all(), "the heartbeat")
        for name in ("a", "b", "c", "d"):
            control.pause(PauseKind.QUEUE, name)
        assert "Paused queues: a, b, c, …." in client_with("view_taskrecord").get(LIST).content.decode()


def test_a_backlog_of_tasks_that_wait_for_others_hides_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many rows are looked at, at both ends."""
    monkeypatch.setattr("django_asyncq.observe.fleet.MOST_WAITING", 2)
    make(TaskState.QUEUED, queue_name="lonely")
    for _ in range(5):
        make(TaskState.QUEUED, queue_name="busy", after_id=uuid4())
    make(TaskState.QUEUED, queue_name="newest")
    fleet = fleet_module.Fleet(timezone.now())
    assert fleet.unserved() == ["lonely", "newest"]


def test_the_banner_says_that_no_worker_runs() -> None:
    """On each page of the app, with where to look and since when it is known; to nobody who may not see tasks."""
    banner = client_with("view_taskrecord", "view_gate").get(LIST).content.decode().partition("asyncq-banner")[2]
    assert "No worker is running" in banner and f'<a href="{WORKERS}">Workers</a>' in banner
    known_at = re.search(r'Known at <time [^>]*datetime="([^"]*)"[^>]*>([\d:]{8})</time>', banner)
    assert known_at and known_at[1][11:19] == known_at[2]
    assert "No worker" not in client_with("view_gate", name="gates").get("/admin/django_asyncq/gate/").content.decode()


# --- 32: permissions


@pytest.mark.parametrize(
    ("view", "permission", "values"),
    [
        ("pause", "pause_queue", {"kind": "queue", "backend": "default", "name": "q"}),
        ("resume", "pause_queue", {"kind": "queue", "backend": "default", "name": "q"}),
        ("drain", "drain_worker", {"name": "host"}),
        ("undrain", "drain_worker", {"name": "host"}),
    ],
)
def test_each_button_needs_its_permission_and_a_post(view: str, permission: str, values: dict[str, str]) -> None:
    """A forged POST gets 403, a GET 405, one without the token 403."""
    address = f"{LIST}{view}/"
    post = {**values, "confirmed": "yes"}
    assert client_with("view_taskrecord", name="viewer").post(address, post).status_code == 403
    assert client_with(permission, name="blind").post(address, post).status_code == 403
    allowed = client_with("view_taskrecord", permission, name="allowed")
    assert allowed.get(address).status_code == 405
    strict = client_with("view_taskrecord", permission, name="strict", enforce_csrf_checks=True)
    assert strict.post(address, post).status_code == 403
    assert not Pause.objects.exists() and not LogEntry.objects.exists()
    assert allowed.post(address, post).status_code == 302


def test_a_viewer_sees_no_button() -> None:
    """Neither on the queues' page nor on the workers'."""
    tasks.stamp.using(queue_name="q32").enqueue()
    client = client_with("view_taskrecord")
    for address in (QUEUES, WORKERS):
        page = client.get(address).content.decode().partition("<main")[2]
        assert page and 'type="submit"' not in page and "<form" not in page
    assert client_with(name="none").get(QUEUES).status_code == 403


# --- 9: names


@pytest.mark.parametrize("name", ["a/b", "..", "email:low", "two words", "ü", "a{b}", "x" * 64, "'", "<b>"])
def test_a_row_with_an_odd_queue_name_breaks_no_page(name: str) -> None:
    """Nor a command. It was written by another program, or by the project itself."""
    make(TaskState.QUEUED, queue_name=name)
    row = make(queue_name=name)
    client = client_with(is_superuser=True)
    for address in ("", f"{LIST}queues/", LIST, f"{LIST}?queue={quote(name)}", f"{LIST}workers/", f"{LIST}failures/"):
        answer = client.get(address or "/admin/django_asyncq/")
        assert answer.status_code == 200, address
    assert str(row.pk) in client.get(f"{LIST}?queue={quote(name)}").content.decode()
    assert client.get(f"{LIST}queue/?queue={quote(name)}", follow=True).status_code == 200
    for command in (["queues", "list"], ["stats"], ["health"], ["tasks", "list"], ["queues", "scale"]):
        with suppress(CommandError, SystemExit):
            call_command("asyncq", *command, stdout=StringIO(), stderr=StringIO())
