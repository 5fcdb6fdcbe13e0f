"""What a live page asks again for: only its parts that may have changed, read with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_asyncq.control import start_bulk, stop_bulk
from django_asyncq.models import Gate, TaskState
from django_asyncq.storage import database_clock

from .. import tasks
from ..admin_cases import LIST, client_with, make

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_asyncq/"
LIVE: dict[str, Any] = {"HTTP_ASYNCQ_LIVE": "1"}
PARTS = {
    "overview": ["asyncq-banner", "asyncq-overview", "asyncq-panels", "asyncq-chart"],
    "list": ["asyncq-tabs"],
    "task": ["asyncq-task", "asyncq-state-part", "asyncq-attempts-part", "asyncq-times-part"],
    "queues": ["asyncq-all-queues", "asyncq-queues"],
    "workers": ["asyncq-fleet", "asyncq-lost-part"],
    "failures": ["asyncq-all-failures", "asyncq-failures"],
    "gate": ["asyncq-gate"],
    "bulk": ["asyncq-bulk-state"],
}


@pytest.fixture
def pages() -> dict[str, str]:
    """The addresses of the pages that are live."""
    long_ago = database_clock.now().replace(year=2020)
    tasks.gated.using(gate="narrow").enqueue("narrow")
    running = make(TaskState.RUNNING, queue_name="q1", worker_ids=["host:1:7:x"], last_attempted_at=long_ago)
    gate = Gate.objects.create(name="narrow", limit=2)
    make()
    action = start_bulk("retry", {"state": "failed"}, by="ann")
    found = {name: f"{LIST}{name}/" for name in ("queues", "workers", "failures")}
    found |= {"overview": APP, "list": f"{LIST}?queue=q1", "task": f"{LIST}{running.pk}/change/"}
    return found | {"gate": f"{APP}gate/{gate.pk}/change/", "bulk": f"{APP}bulkaction/{action.pk}/change/"}


@pytest.fixture
def boss() -> Client:
    """Somebody who sees everything."""
    return client_with(is_superuser=True)


@pytest.mark.parametrize("name", PARTS)
def test_a_page_answers_with_its_live_parts(pages: dict[str, str], boss: Client, name: str) -> None:
    """Without the frame, and with no more queries; the page has the same parts, a bar, and the script."""
    boss.get(pages[name])
    with CaptureQueriesContext(connection) as of_page:
        page = boss.get(pages[name]).content.decode()
    with CaptureQueriesContext(connection) as of_parts:
        parts = boss.get(pages[name], **LIVE).content.decode()
    for id in PARTS[name]:
        if id != "asyncq-lost-part" or id in page:
            assert f'id="{id}"' in page and f'id="{id}"' in parts
    assert 'class="asyncq-live' in page and "live.js" in page
    assert not any(each in parts for each in ("<html", "asyncq-navigation", "<script"))
    assert len(parts) < len(page) and len(of_parts) <= len(of_page)


def test_the_numbers_above_the_list_need_no_row_of_it(pages: dict[str, str], boss: Client) -> None:
    """And lead to the same lists, with the filters of this one."""
    with CaptureQueriesContext(connection) as of_page:
        page = boss.get(f"{pages['list']}&before={make().pk}").content.decode()
    with CaptureQueriesContext(connection) as of_parts:
        parts = boss.get(pages["list"], **LIVE).content.decode()
    assert len(of_parts) < len(of_page) - 3
    assert 'href="?queue=q1&amp;state=running"' in page and 'href="?queue=q1&amp;state=running"' in parts


def test_live_parts_need_the_permissions_of_the_page(pages: dict[str, str]) -> None:
    """Whatever the header."""
    for client in (client_with(name="nobody"), Client()):
        for name, page in pages.items():
            answer = client.get(page, **LIVE)
            assert answer.status_code in (302, 403, 404) or "asyncq-" not in answer.content.decode(), name


def test_what_is_over_is_not_live(boss: Client) -> None:
    """A task that is final, and an action that has stopped; a page that is open notices."""
    record = make()
    action = start_bulk("retry", {"state": "failed"}, by="ann")
    address = f"{APP}bulkaction/{action.pk}/change/"
    assert "data-asyncq-finished" not in boss.get(address, **LIVE).content.decode()
    stop_bulk(action)
    for page in (f"{LIST}{record.pk}/change/", address):
        assert 'class="asyncq-live' not in boss.get(page).content.decode()
        assert "data-asyncq-finished" in boss.get(page, **LIVE).content.decode()
