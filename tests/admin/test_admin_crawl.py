"""Every address of the admin: a GET changes nothing, each role sees what it may, and hostile text stays text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.core import serializers
from django.test import Client
from django.urls import get_resolver, reverse
from django.utils import timezone

from django_asyncq import control
from django_asyncq.admin.base import FIELDS, visible_text
from django_asyncq.broker import Broker
from django_asyncq.control import start_bulk
from django_asyncq.models import (
    BulkAction,
    FailureReason,
    Gate,
    Pause,
    PauseKind,
    Rate,
    Schedule,
    StartupRun,
    TaskEdge,
    TaskLogLine,
    TaskRecord,
    TaskState,
)
from django_asyncq.storage.routing import rows_of

from .. import tasks
from ..admin_cases import client_with, error, make

pytestmark = pytest.mark.django_db(transaction=True)

MODELS = [TaskRecord, Gate, Rate, Pause, Schedule, StartupRun, BulkAction]
# What answers a POST only; nobody is sent there by a link.
ACTING = re.compile(
    r"_(retry|run|cancel|pause|resume|stop|drain|undrain|release|repair|switch|secrets|forget)$|schedule_run$|_run$"
)
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m",
    "abc\u202egpj.exe",
    "' onmouseover='alert(2)",
    "{{ 8254137|add:8254137 }}",
    "x" * 1_000_000,
]


@pytest.fixture
def site() -> None:
    """A site with one thing of each kind."""
    fill("plain")


def fill(text: str) -> None:
    """Make one thing of each kind, with a text wherever one can be."""
    now, short = timezone.now(), text[:100]
    Gate.objects.create(name="narrow", limit=2)
    Rate.objects.create(name=short, starts=1)
    values = {"errors": [error(text, traceback=text, worker=short)], "kwargs": {"a": text}, "args": [text]}
    failed = make(name=short[:90] or "x", last_exception=short, gate=short, group=short, cancelled_by=short, **values)
    make(TaskState.SUCCEEDED, return_value=text, progress={"done": 1, "message": short, "data": {"k": short}})
    make(TaskState.RUNNING, worker_ids=[short], last_attempted_at=now - timedelta(hours=1), timeout_seconds=5)
    make(TaskState.QUEUED, queue_name="mail", wire_id=short)
    TaskLogLine.objects.create(
        task_id=failed.pk, fence=1, attempt=1, number=1, logged_at=now, level=20, logger=short, text=text[:2000]
    )
    tasks.gated.using(gate="narrow").enqueue("narrow")
    parent = make(name=short[:90] or "x", workflow_id=failed.pk, **values)
    make(TaskState.QUEUED, workflow_id=failed.pk, waits_for=1)
    child = make(workflow_id=failed.pk, reason=FailureReason.PARENT_FAILED)
    TaskEdge.objects.create(parent_id=parent.pk, child_id=child.pk, name=short)
    control.pause(PauseKind.QUEUE, "mail", by=short, note=text[:500])
    rows_of(Schedule).create(
        name=short, task="tests.tasks.tidy", cron="0 4 * * *", zone="UTC", kwargs={"days": text[:999]}
    )
    StartupRun.objects.create(name=short, holder=short, term=1, begun_at=now, finished_at=now, error=text)
    action = start_bulk("retry", {"state": "failed"}, by="ann")
    BulkAction.objects.filter(pk=action.pk).update(created_by=short, error=text[:5000])


def addresses() -> Iterator[tuple[str, str]]:
    """The name and the address of each view of our models, with an object where one is needed."""
    names = sorted(
        name
        for name in get_resolver().namespace_dict["admin"][1].reverse_dict
        if isinstance(name, str) and name.startswith("django_asyncq_")
    )
    ids = {model._meta.model_name: str(model._default_manager.order_by("pk")[0].pk) for model in MODELS}
    for name in names:
        arguments = [] if not _needs_object(name) else [ids[name.split("_")[2]]]
        yield name, reverse(f"admin:{name}", args=arguments)
    yield "index", reverse("admin:app_list", args=["django_asyncq"])


def _needs_object(name: str) -> bool:
    possibilities = get_resolver().namespace_dict["admin"][1].reverse_dict.getlist(name)
    return any(params for possibility in possibilities for _pattern, params in possibility[0])


def stored() -> tuple[str, dict[bytes, bytes | None]]:
    """All that both stores hold."""
    rows = [row for model in [*MODELS, TaskLogLine, LogEntry] for row in model._default_manager.order_by("pk")]
    client = Broker().client
    return serializers.serialize("json", rows), {key: client.dump(key) for key in client.scan_iter("*")}


def test_a_get_of_every_address_changes_nothing(site: None) -> None:
    """For a superuser; what acts answers 405."""
    client = client_with(is_superuser=True)
    found = dict(addresses())
    assert len(found) >= 50
    before = stored()
    answers = {name: client.get(address).status_code for name, address in found.items()}
    assert stored() == before
    acting = {name for name in found if ACTING.search(name)}
    assert {name for name, status in answers.items() if status == 405} == acting
    assert not {name: status for name, status in answers.items() if status not in (200, 302, 405, 403)}


def test_every_address_asks_for_a_login_and_for_rights(site: None) -> None:
    """A visitor is sent to the login; a member of staff without rights gets 403, by GET and by POST."""
    nobody, staff = Client(), client_with()
    for name, address in addresses():
        for answer in (nobody.get(address), nobody.post(address, {"confirmed": "yes"})):
            assert answer.status_code == 302 and "/login/" in answer.url, name
        for method in (staff.get, staff.post):
            answer = method(address, {"confirmed": "yes"})
            # Where the object is not shown, Django sends to its index; an acting address answers a GET with 405 first.
            is_refused = answer.status_code in (403, 404, 405)
            assert is_refused or (answer.status_code == 302 and answer.url in ("/admin/", "/login/")), (name, answer)


@pytest.mark.parametrize("text", HOSTILE, ids=["html", "ansi", "bidi", "attribute", "template", "1 MB"])
def test_hostile_text_stays_text_on_every_page(text: str) -> None:
    """In names, arguments, errors, tracebacks, queues, workers and notes; no page is larger than 2 MB.

    The page of secret values shows them whole.
    """
    fill(text)
    client = client_with(is_superuser=True)
    for name, address in addresses():
        is_whole = name.endswith("_secrets")
        answer = client.post(address) if is_whole else client.get(address)
        if answer.status_code != 200:
            continue
        page = answer.content.decode()
        assert "<img src=x" not in page and "onmouseover='alert" not in page and "16508274" not in page, name
        assert len(page) < 2_000_000 or is_whole, (name, len(page))
        without_fields = FIELDS.sub("", page)
        assert "\x1b" not in without_fields and "\u202e" not in without_fields, name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\x1b[31m", "⟨U+001B⟩[31m"),
        ("a\tb\nc", "a\tb\nc"),
        ("👩\u200d🔧", "👩\u200d🔧"),
        ("\ufeff", "⟨U+FEFF⟩"),
        ("עברית", "עברית"),
    ],
)
def test_hidden_characters_are_shown_by_their_number(text: str, shown: str) -> None:
    """Those that form letters and lines are left."""
    assert visible_text(text) == shown
