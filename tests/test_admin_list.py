"""The task list: tabs, pages, filters, search and marks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.test import Client
from django.utils import timezone

from django_asyncq import pausing
from django_asyncq.admin import tabs
from django_asyncq.models import FailureReason, PauseKind, TaskRecord, TaskState
from django_asyncq.storage import bounded_reads
from django_asyncq.storage.routing import rows_of, writing_database

from . import tasks  # noqa: F401 - registers them
from .admin_cases import LIST, client_with, error, make

pytestmark = pytest.mark.django_db


@pytest.fixture
def viewer() -> Client:
    """A person who may only look."""
    return client_with("view_taskrecord")


def listed(response: Any) -> list[UUID]:
    """The ids that a page of the list shows, in its order."""
    assert response.status_code == 200, response.status_code
    return [row.pk for row in response.context["cl"].result_list]


def pages(client: Client, address: str, way: str = "older") -> list[list[UUID]]:
    """Follow the links from page to page."""
    found = []
    while address:
        response = client.get(address)
        found.append(listed(response))
        query = getattr(response.context["cl"], way)
        address = f"{LIST}{query}" if query else ""
    return found


# --- 35: pages


@pytest.mark.parametrize("query", ["", "?state=failed", "?o=5", "?q=add"])
def test_pages_show_each_task_once_both_ways(viewer: Client, query: str) -> None:
    """By the ids at the ends of each page, which keep the filters; a full last page leads to no empty one."""
    rows = [make() for _ in range(100)]
    expected = [row.pk for row in (rows if query == "?o=5" else reversed(rows))]
    there = pages(viewer, LIST + query)
    assert [len(page) for page in there] == [50, 50]
    assert [id for page in there for id in page] == expected
    response = viewer.get(f"{LIST}{viewer.get(LIST + query).context['cl'].older}")
    assert not response.context["cl"].older
    back = viewer.get(f"{LIST}{response.context['cl'].newer}")
    assert listed(back) == expected[:50] and not back.context["cl"].newer
    assert "state=failed" in response.context["cl"].newer or "state" not in query


def test_tasks_that_arrive_meanwhile_move_nothing(viewer: Client) -> None:
    """The second page begins where the first one ended."""
    rows = [make() for _ in range(60)]
    first = viewer.get(LIST)
    for _ in range(5):
        make()
    second = viewer.get(f"{LIST}{first.context['cl'].older}")
    assert listed(first) + listed(second) == [row.pk for row in reversed(rows)]


@pytest.mark.parametrize("cursor", ["", "x", "'", "\x00", "9" * 500, "1", "-1"])
def test_a_page_whose_end_is_no_id_is_the_first(viewer: Client, cursor: str) -> None:
    """Nobody is sent to an error page."""
    row = make()
    assert listed(viewer.get(LIST, {"before": cursor})) == [row.pk]
    assert listed(viewer.get(LIST, {"after": cursor, "p": "7"})) == [row.pk]


def test_links_of_filters_and_of_the_search_lead_to_the_first_page(viewer: Client) -> None:
    """They carry no end of a page."""
    rows = [make() for _ in range(60)]
    response = viewer.get(LIST, {"before": str(rows[30].pk), "state": "failed"})
    page = response.content.decode()
    assert page.count("after=") == 1 and "before=" not in page, "only the link to the previous page"
    assert 'name="before"' not in page and 'name="state"' in page


# --- 9: numbers


def test_the_tabs_count_each_state(viewer: Client) -> None:
    """Whatever else the list is filtered by."""
    for state, count in (
        (TaskState.QUEUED, 3),
        (TaskState.RUNNING, 2),
        (TaskState.SUCCEEDED, 4),
        (TaskState.FAILED, 5),
    ):
        for _ in range(count):
            make(state)
    make(retry_at=timezone.now())
    response = viewer.get(LIST, {"name": "tests.tasks.nothing"})
    found = {tab.text: tab.number for tab in response.context["tabs"]}
    assert found == {"All": "", "Queued": "3", "Running": "2", "Retrying": "1", "Failed": "5", "Succeeded": "4"}


def test_a_number_above_the_limit_says_that_it_is_not_exact(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting stops there."""
    monkeypatch.setattr(bounded_reads, "MOST_COUNTED", 3)
    monkeypatch.setattr(tabs, "MOST_COUNTED", 3)
    for _ in range(5):
        make(TaskState.QUEUED)
    assert bounded_reads.counts_by_state()["queued"] == 4
    assert "over 3" in viewer.get(LIST).content.decode()


# --- 6: stuck


def test_stuck_tasks_are_marked_and_filtered(viewer: Client) -> None:
    """Older than its timeout; a younger one is not."""
    old = timezone.now() - timedelta(hours=1)
    stuck = make(TaskState.RUNNING, timeout_seconds=60, last_attempted_at=old)
    make(TaskState.RUNNING, timeout_seconds=7200, last_attempted_at=timezone.now())
    response = viewer.get(LIST, {"state": "stuck"})
    assert listed(response) == [stuck.pk]
    assert "Stuck: longer than its timeout" in response.content.decode()
    assert {tab.text: tab.number for tab in viewer.get(LIST).context["tabs"]}["Stuck"] == "1"


# --- 7: filters


def test_each_filter_lists_exactly_its_tasks(viewer: Client) -> None:
    """State, reason, error, queue, task, worker, gate and time; each keeps the others."""
    now = timezone.now()
    wanted = make(
        TaskState.RUNNING,
        queue_name="mail",
        gate="g",
        worker_ids=["old", "w1"],
        last_attempted_at=now,
        name="gone.task",
    )
    make(TaskState.RUNNING, worker_ids=["w1", "w2"], last_attempted_at=now)
    failed = make(last_exception="builtins.KeyError", reason=FailureReason.TIMEOUT)
    make(enqueued_at=now - timedelta(days=2), name="tests.tasks.nap")
    for query in ("queue=mail", "gate=g", "worker=w1", "name=gone.task", "queue=mail&gate=g&worker=w1&within=1h"):
        assert listed(viewer.get(f"{LIST}?{query}")) == [wanted.pk], query
    for query in ("error=builtins.KeyError", "reason=timeout", "state=failed&within=24h"):
        assert listed(viewer.get(f"{LIST}?{query}")) == [failed.pk], query
    page = viewer.get(f"{LIST}?queue=mail&within=1h").content.decode()
    assert "queue=mail&amp;state=queued&amp;within=1h" in page
    assert "gone.task" in viewer.get(LIST).content.decode(), "a task that the code has no more is a choice too"


@pytest.mark.parametrize("name", ["state", "reason", "error", "queue", "name", "worker", "gate", "within"])
@pytest.mark.parametrize("value", ["x", "\x00", "'\"", "<b>", "\u202e", "9" * 2000])
def test_a_filter_with_rubbish_is_no_error_page(viewer: Client, name: str, value: str) -> None:
    """It lists nothing, or the list without it."""
    make()
    assert viewer.get(LIST, {name: value}, follow=True).status_code == 200


# --- 8: search


def test_search_finds_ids_names_and_errors(viewer: Client) -> None:
    """The whole id, its beginning, the end that the list shows, names with a text in them, and recent errors."""
    first = make(name="shop.tasks.send_receipt", errors=[error("the printer burns")])
    other = make(name="shop.tasks.refund", last_exception="shop.errors.CardDeclined")
    whole, end = str(first.pk), str(first.pk)[-8:]
    for term in (whole, whole.upper(), whole.replace("-", ""), whole[:20], end, f"…{end}", f"send_receipt …{end}"):
        assert listed(viewer.get(LIST, {"q": term})) == [first.pk], term
    assert listed(viewer.get(LIST, {"q": "RECEIPT"})) == [first.pk]
    assert listed(viewer.get(LIST, {"q": "printer"})) == [first.pk]
    assert listed(viewer.get(LIST, {"q": "CardDeclined"})) == [other.pk]
    assert listed(viewer.get(LIST, {"q": "shop"})) == [other.pk, first.pk]


@pytest.mark.parametrize(
    "term", ["zz", "%", "_", "'; DROP", "0" * 32, "f" * 31, "‮", "…", "x" * 100_000, "ffffffff", "🦄", "a" * 33]
)
def test_search_for_something_else_finds_nothing(viewer: Client, term: str) -> None:
    """Without an error page."""
    make()
    assert listed(viewer.get(LIST, {"q": term})) == []


def test_names_are_read_by_a_loose_scan() -> None:
    """Each once, in order, no more than the limit."""
    for name in ("b.b", "a.a", "b.b", "c.c"):
        make(name=name)
    assert bounded_reads.names() == ["a.a", "b.b", "c.c"]
    assert bounded_reads.ids_ending_with("00000000") == []


def test_a_list_of_one_state_is_read_along_its_index() -> None:
    """The state stands in the order too, which only that index has; the primary key would be walked otherwise."""
    from django_asyncq.admin.queries import in_order

    class Request:
        GET = {"state": "failed"}

    rows = in_order(rows_of(TaskRecord).failed().filter(state__gte=3, state__lte=3), Request())  # type: ignore[arg-type]
    assert rows.query.order_by == ("-state", "-id")
    if connections[writing_database(TaskRecord)].vendor == "sqlite":
        assert "asyncq_state_id" in rows[:50].explain()


# --- 1, 3, 23: what a row shows


def test_a_row_says_what_a_task_waits_for(viewer: Client) -> None:
    """Its time, its gate, or its next attempt; and that its queue is paused."""
    make(TaskState.QUEUED, run_after=timezone.now() + timedelta(hours=2), queue_name="mail")
    make(reason=FailureReason.GATE_FULL, gate="narrow", retry_at=timezone.now(), last_exception="")
    make(retry_at=timezone.now() + timedelta(minutes=5), attempt=2, max_attempts=4)
    pausing.pause(PauseKind.QUEUE, "mail")
    text = viewer.get(LIST).content.decode()
    assert ">in 1 h<" in text and "waits for a slot of gate <bdi>narrow</bdi>" in text
    assert "(attempt 2 of 4)" in text and '<span class="asyncq-mark">Paused</span>' in text


def test_the_list_is_called_by_its_name(viewer: Client) -> None:
    """Not "Select task to view"."""
    text = viewer.get(LIST).content.decode()
    assert "<title>Tasks | " in text and "Select task" not in text
