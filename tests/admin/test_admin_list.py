"""The task list: tabs, pages, filters, search and marks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.test import Client
from django.utils import timezone

from django_asyncq import control
from django_asyncq.admin import filters, navigation
from django_asyncq.models import FailureReason, PauseKind, TaskRecord, TaskState
from django_asyncq.storage import routing
from django_asyncq.storage.routing import rows_of, writing_database

from .. import tasks  # noqa: F401 - registers them
from ..admin_cases import LIST, client_with, error, make

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
    """Beside another filter a link leads to fewer, so it has no number."""
    for state, count in (
        (TaskState.QUEUED, 3),
        (TaskState.RUNNING, 2),
        (TaskState.SUCCEEDED, 4),
        (TaskState.FAILED, 5),
    ):
        for _ in range(count):
            make(state)
    make(retry_at=timezone.now())
    found = {tab.text: tab.number for tab in viewer.get(LIST, {"state": "failed"}).context["tabs"]}
    assert {tab.number for tab in viewer.get(LIST, {"name": "tests.tasks.add"}).context["tabs"]} == {""}
    assert {tab.number for tab in viewer.get(LIST, {"q": "add"}).context["tabs"]} == {""}
    assert found == {"All": "", "Queued": "3", "Running": "2", "Retrying": "1", "Failed": "5", "Succeeded": "4"}


def test_a_number_above_the_limit_says_that_it_is_not_exact(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting stops there."""
    monkeypatch.setattr(routing, "MOST_COUNTED", 3)
    monkeypatch.setattr(navigation, "MOST_COUNTED", 3)
    for _ in range(5):
        make(TaskState.QUEUED)
    assert routing.counts_by_state()["queued"] == 4
    assert "over 3" in viewer.get(LIST).content.decode()


@pytest.mark.parametrize(("failed", "retrying"), [(0, 0), (2, 3), (5, 1), (1, 5), (5, 5), (4, 0)])
def test_failed_tasks_are_counted_apart_from_those_that_are_retried(
    monkeypatch: pytest.MonkeyPatch, failed: int, retrying: int
) -> None:
    """However many there are of either; each number up to the limit and one more."""
    monkeypatch.setattr(routing, "MOST_COUNTED", 3)
    for _ in range(failed):
        make()
    for _ in range(retrying):
        make(retry_at=timezone.now())
    counts = routing.counts_by_state()
    assert (counts["failed"], counts["retrying"]) == (min(failed, 4), min(retrying, 4))


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


@pytest.mark.parametrize("wire_id", ["order-7", "Bestellung Nr. 7/ü", "0193", "a" * 32, "🦄" * 300, "100%_'\"…x"])
def test_search_finds_what_another_program_calls_a_task(viewer: Client, wire_id: str) -> None:
    """Exactly, each task that had this name; also one that looks like an id, or has more characters than a name."""
    make(wire_id=f"{wire_id}7")
    make()
    found = [make(wire_id=wire_id).pk, make(wire_id=wire_id, name="email:deliver").pk]
    assert listed(viewer.get(LIST, {"q": f" {wire_id} "})) == found[::-1]


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
    assert routing.names() == ["a.a", "b.b", "c.c"]


@pytest.mark.parametrize("order", ["", "5", "-5"])
def test_what_no_index_knows_is_looked_for_page_by_page(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Each page says how far it has looked; the links lead on until all is found, and back."""
    monkeypatch.setattr(filters, "ROWS_LOOKED_THROUGH", 3)
    rows = [make(queue_name="rare" if number in (0, 1, 7) else "default") for number in range(10)]
    expected = [rows[number].pk for number in ((0, 1, 7) if order == "5" else (7, 1, 0))]
    found, query, pages = [], f"?queue=rare&o={order}", []
    while query:
        changelist = viewer.get(f"{LIST}{query}").context["cl"]
        assert bool(changelist.looked_until) is bool(changelist.older)
        found += [row.pk for row in changelist.result_list]
        pages.append(changelist)
        query = changelist.older
    assert found == expected and len(pages) == 4
    back = viewer.get(f"{LIST}{next(each.newer for each in reversed(pages) if each.newer)}").context["cl"]
    assert back.newer or back.result_list


@pytest.mark.parametrize(
    "query", ["", "state=failed", "name=tests.tasks.add&queue=rare", "gate=g", "error=tests.tasks.Glitch"]
)
def test_what_an_index_knows_is_looked_for_at_once(viewer: Client, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """The page has all there is."""
    monkeypatch.setattr(filters, "ROWS_LOOKED_THROUGH", 3)
    for number in range(10):
        make(queue_name="default" if number else "rare", gate="g")
    changelist = viewer.get(f"{LIST}?{query}").context["cl"]
    assert changelist.looked_until is None and len(changelist.result_list) == (1 if "rare" in query else 10)


def test_an_old_task_is_found_by_the_end_of_its_id(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a later page; a beginning of an id is found along the key."""
    monkeypatch.setattr(filters, "ROWS_LOOKED_THROUGH", 3)
    old = make()
    for _ in range(5):
        make()
    first = viewer.get(LIST, {"q": str(old.pk)[-8:]}).context["cl"]
    assert first.result_list == [] and first.looked_until
    assert [row.pk for row in viewer.get(f"{LIST}{first.older}").context["cl"].result_list] == [old.pk]
    assert str(old.pk) in viewer.get(LIST, {"q": str(old.pk)[:8]}).content.decode()


def test_a_list_of_one_state_is_read_along_its_index() -> None:
    """The state stands in the order too, which only that index has; the primary key would be walked otherwise."""
    from django_asyncq.admin.filters import in_order

    class Request:
        GET = {"state": "failed"}

    rows = in_order(rows_of(TaskRecord).failed().filter(state__gte=3, state__lte=3), Request())  # type: ignore[arg-type]
    assert rows.query.order_by == ("-state", "-id")
    if connections[writing_database(TaskRecord)].vendor == "sqlite":
        assert "asyncq_state_id" in rows[:50].explain()


# --- 1, 3, 23: what a row shows


def test_a_row_says_what_a_task_waits_for(viewer: Client) -> None:
    """Its time, its gate, its next attempt, or that its queue is paused."""
    make(TaskState.QUEUED, run_after=timezone.now() + timedelta(hours=2))
    make(TaskState.QUEUED, queue_name="mail")
    make(reason=FailureReason.GATE_FULL, gate="narrow", retry_at=timezone.now(), last_exception="")
    make(retry_at=timezone.now() + timedelta(minutes=5), attempt=2, max_attempts=4)
    control.pause(PauseKind.QUEUE, "mail")
    text = viewer.get(LIST).content.decode()
    assert ">in 1 h<" in text and "waits for a slot of gate <bdi>narrow</bdi>" in text
    assert "(attempt 2 of 4)" in text and '<span class="asyncq-mark">Its queue is paused</span>' in text


def test_the_list_is_called_by_its_name(viewer: Client) -> None:
    """Not "Select task to view"."""
    text = viewer.get(LIST).content.decode()
    assert "<title>Tasks | " in text and "Select task" not in text
