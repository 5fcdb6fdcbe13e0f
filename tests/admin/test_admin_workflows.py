"""The list of workflows, the page of one, its buttons, and what the page of a task says of its workflow."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_asyncq import chain, group, lifecycle, previous
from django_asyncq.admin.workflow_graph import MOST_BOXES, draw
from django_asyncq.core.names import uuid7
from django_asyncq.models import FailureReason, TaskEdge, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector, WorkflowEdge, WorkflowGraph, WorkflowNode

from .. import workflow_tasks as tasks
from ..admin_cases import LIST, client_with, said
from ..workflow_cases import make_large, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

HOSTILE = "</title><script>alert(1)</script>'\"{{ 8254137|add:8254137 }}"


@pytest.fixture
def viewer() -> Client:
    """A person who may only look."""
    return client_with("view_taskrecord")


@pytest.fixture
def operator() -> Client:
    """A person who may retry and cancel."""
    return client_with("view_taskrecord", "retry_task", "cancel_task", name="bob")


def sum_of(*numbers: int) -> UUID:
    """Enqueue tasks that load numbers, and one that adds them; return the workflow's id."""
    sums = tasks.total.using(after={"rows": previous}).step()
    result: Any = chain(group([tasks.load.step(number) for number in numbers]), sums).enqueue()
    found = TaskRecord.objects.get(id=result.id).workflow_id
    assert found is not None
    return found


def page_of(id: Any) -> str:
    return f"{LIST}workflow/?id={id}"


def words(page: str) -> str:
    return " ".join(unescape(re.sub("<[^>]+>", " ", page)).split())


def html(client: Client, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200, answer
    return str(answer.content.decode())


# --- the list


def test_the_list_shows_each_workflow_with_how_far_it_is(viewer: Client) -> None:
    """By filters that its links keep."""
    assert "there is no workflow" in words(html(viewer, f"{LIST}workflows/"))
    done = sum_of(1, 2)
    work()
    failed = sum_of(1, -1)
    work()
    waiting = sum_of(5)
    page = html(viewer, f"{LIST}workflows/")
    assert [UUID(id) for id in re.findall(r"workflow/\?id=([0-9a-f-]{36})", page)] == [waiting, failed, done]
    assert 'value="3" max="3"' in page and 'value="0" max="2"' in page and f"…{str(waiting)[-8:]}" in page
    page = html(viewer, f"{LIST}workflows/?state=failed&q=load")
    assert re.findall(r"workflow/\?id=([0-9a-f-]{36})", page) == [str(failed)]
    assert "?state=failed&amp;span=1h&amp;q=load" in page
    assert "No workflow is like this" in words(html(viewer, f"{LIST}workflows/?q=nothing&state=never&span=never"))
    assert "No workflow is like this" in words(html(viewer, f"{LIST}workflows/?q=%00nothing%25"))
    page = html(viewer, f"{LIST}workflows/?before={failed}")
    assert re.findall(r"workflow/\?id=([0-9a-f-]{36})", page) == [str(done)]


def test_the_list_has_pages(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link leads to those before; a live look is of the same page."""
    ids = [sum_of(1) for _ in range(3)]
    monkeypatch.setattr("django_asyncq.admin.workflows.WORKFLOWS_PER_PAGE", 2)
    page = html(viewer, f"{LIST}workflows/?span=24h")
    assert f"?span=24h&amp;before={ids[1]}" in page
    live = viewer.get(f"{LIST}workflows/?span=24h&before={ids[1]}", headers={"Asyncq-Live": "1"}).content.decode()
    assert re.findall(r"workflow/\?id=([0-9a-f-]{36})", live) == [str(ids[0])] and "<html" not in live


# --- one


def test_the_page_says_what_holds_a_workflow_up(viewer: Client) -> None:
    """And leads to each task, and to the list of them all."""
    id = sum_of(1, -1)
    first = TaskRecord.objects.earliest("id")
    text = words(html(viewer, page_of(id)))
    assert "All else waits for these tasks" in text and "Have failed" not in text and "waits for 2 tasks" in text
    work()
    page = html(viewer, page_of(id))
    text = words(page)
    assert "Have failed" in text and "no such number" in text and "All else waits" not in text
    assert "3 of 3" in text and "data-asyncq-finished" in page
    assert f'href="{LIST}?workflow={id}&amp;state=failed"' in page
    assert f'href="{LIST}{first.pk}/change/"' in page
    # Each of the three in the graph.
    assert page.count('class="asyncq-box ') == 3 and page.count('class="asyncq-edge') == 2
    assert page.count("asyncq-box-waits") == 1 and page.count("asyncq-edge-failed") == 1
    assert len(set(re.findall(r"/([0-9a-f-]{36})/change/", html(viewer, f"{LIST}?workflow={id}&state=failed")))) == 2
    # Buttons are for those who may press them.
    assert "workflow_retry" not in page and "workflow_cancel" not in page


def test_a_page_of_no_workflow_leads_to_the_list(viewer: Client) -> None:
    """With a sentence."""
    for id in ("", "x", uuid7()):
        answer = viewer.get(page_of(id))
        assert answer.status_code == 302 and answer.url == f"{LIST}workflows/"
        assert said(answer)[-1:] == [("warning", "This workflow does not exist, or its tasks were deleted.")]


def test_hostile_texts_stay_texts(viewer: Client) -> None:
    """In names of tasks and of arguments, in the graph and in the list."""
    id = sum_of(1, 2)
    TaskRecord.objects.filter(workflow_id=id).update(name=f"a.{HOSTILE}", last_exception=HOSTILE)
    TaskEdge.objects.update(name=HOSTILE)
    row = TaskRecord.objects.filter(workflow_id=id).latest("id")
    for address in (page_of(id), f"{LIST}workflows/", f"{LIST}workflows/?q={HOSTILE}", f"{LIST}{row.pk}/change/"):
        page = html(viewer, address)
        assert "<script>alert" not in page and "16508274" not in page and "&lt;script&gt;alert" in page


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 100, 10_000])
def test_a_page_is_bounded_however_many_tasks_there_are(viewer: Client, count: int) -> None:
    """In statements and in bytes; the rest of the tasks is on pages of their own."""
    id = make_large(count)
    viewer.get(page_of(id))
    with CaptureQueriesContext(connection) as queries:
        page = html(viewer, page_of(id))
    own = [each["sql"] for each in queries if "asyncq_" in each["sql"]]
    assert len(own) <= 14, own
    assert len(page) < 200_000
    assert page.count('class="asyncq-box ') == (count + 1 if count < MOST_BOXES else 2)
    if count > 50:
        more = unescape(re.findall(r'href="([^"]*behind=[^"#]*)', page)[0])
        rows = TaskRecord.objects.filter(workflow_id=id).order_by("id").values_list("id", flat=True)
        second = html(viewer, more)
        table = second[second.index('id="asyncq-nodes"') :]
        assert re.findall(r"/([0-9a-f-]{36})/change/", table)[0] == str(rows[50])
        last = html(viewer, f"{page_of(id)}&behind={rows[count - 1]}")
        # Of its thousand parents it names three.
        assert f"and {count - 3:,} more" in words(last).replace(" ", " ")


# --- the drawing


def graph_of(names: list[str], pairs: list[tuple[int, int]], depths: list[int], state: str = "queued") -> WorkflowGraph:
    ids = [uuid7() for _ in names]
    nodes = [
        WorkflowNode(id, name, state, "", int(depth > 0), depth)
        for id, name, depth in zip(ids, names, depths, strict=True)
    ]
    return WorkflowGraph(nodes, [WorkflowEdge(ids[a], ids[b], "", False) for a, b in pairs])


def url(_box: Any) -> str:
    return "x"


def test_tasks_are_drawn_one_by_one_in_layers() -> None:
    """Each box is right of those that it waits for, and none stands on another."""
    drawing = draw(graph_of(["a.a", "a.b", "a.c", "a.d"], [(0, 2), (1, 2), (2, 3), (0, 3)], [0, 0, 1, 2]), url)
    assert drawing and not drawing.is_grouped and len(drawing.lines) == 4
    a, b, c, d = drawing.boxes
    assert a.x == b.x < c.x < d.x < drawing.width and abs(a.y - b.y) > 46 and drawing.height > b.y
    assert [each.label for each in drawing.boxes] == ["a", "b", "c", "d"]
    assert [each.text for each in (a, c)] == ["Queued", "waits for 1 task"]


def test_many_tasks_are_drawn_by_name_and_depth() -> None:
    """And very many by name alone; more names than that are not drawn."""
    count = MOST_BOXES
    wide = draw(graph_of(["a.load"] * count + ["a.sum"], [(n, count) for n in range(count)], [0] * count + [1]), url)
    assert wide and wide.is_grouped and [each.total for each in wide.boxes] == [count, 1] and len(wide.lines) == 1
    assert wide.boxes[0].label == f"load × {count}" and wide.boxes[0].bar == 0 and wide.boxes[0].text == f"0 of {count}"
    pairs = [(n, n + 1) for n in range(count)]
    long = draw(graph_of(["a.step"] * (count + 1), pairs, list(range(count + 1))), url)
    assert long and [each.total for each in long.boxes] == [count + 1] and long.lines == []
    assert draw(graph_of([f"a.step{n}" for n in range(count + 1)], pairs, list(range(count + 1))), url) is None
    assert draw(None, url) is None


# --- the buttons


def press(client: Client, name: str, id: Any, **more: str) -> Any:
    return client.post(f"{LIST}{name}/", {"id": str(id), **more})


def test_what_failed_is_retried_after_a_question(operator: Client) -> None:
    """What had failed for another task waits again."""
    id = sum_of(1, -1)
    work()
    assert "Retry what failed" in html(operator, page_of(id)) and "Cancel the rest" not in html(operator, page_of(id))
    question = press(operator, "workflow_retry", id)
    assert "Retry 2 failed tasks?" in words(question.content.decode())
    assert TaskRecord.objects.filter(state=TaskState.FAILED).count() == 2
    answer = press(operator, "workflow_retry", id, confirmed="yes")
    assert answer.url == page_of(id)
    texts = [text for level, text in said(answer) if level == "success"]
    assert len(texts) == 2 and texts[0].startswith("Queued again: load") and texts[1] == "1 task waits again."
    assert TaskRecord.objects.filter(state=TaskState.QUEUED).count() == 2
    assert LogEntry.objects.filter(change_message="Retried.").count() == 1
    answer = press(operator, "workflow_retry", id, confirmed="yes")
    assert said(answer)[-1:] == [("warning", "No task of this workflow has failed, so nothing was retried.")]


def test_the_rest_is_cancelled_after_a_question(operator: Client) -> None:
    """With a reason; each task is cancelled itself."""
    id = sum_of(1, 2)
    assert "Cancel 3 tasks?" in words(press(operator, "workflow_cancel", id).content.decode())
    answer = press(operator, "workflow_cancel", id, confirmed="yes", reason="enough")
    assert said(answer) == [("success", "3 tasks were cancelled.")] and answer.url == page_of(id)
    rows = TaskRecord.objects.filter(workflow_id=id)
    assert {row.reason for row in rows} == {FailureReason.CANCELLED} and {row.cancelled_by for row in rows} == {
        "bob: enough"
    }
    assert LogEntry.objects.filter(change_message="Cancelled: enough").count() == 3
    answer = press(operator, "workflow_cancel", id, confirmed="yes")
    assert said(answer)[-1:] == [("warning", "All tasks of this workflow have finished, so none was cancelled.")]
    assert press(operator, "workflow_cancel", uuid7()).url == f"{LIST}workflows/"


# --- the page of a task, and actions on many


def test_the_page_of_a_task_says_what_it_waits_for(viewer: Client) -> None:
    """And what waits for it, with the argument that gets its value."""
    id = sum_of(1, 2)
    first, last = TaskRecord.objects.earliest("id"), TaskRecord.objects.latest("id")
    page = html(viewer, f"{LIST}{last.pk}/change/")
    assert f'href="{page_of(id)}"' in page and f'href="{LIST}{first.pk}/change/"' in page
    text = words(page)
    assert "Runs after" in text and "These wait for it" not in text and f"load {first.short_id} rows" in text
    text = words(html(viewer, f"{LIST}{first.pk}/change/"))
    assert "These wait for it" in text and f"total {last.short_id} rows" in text
    work()
    assert lifecycle.delete([first.pk])
    assert f"deleted …{str(first.pk)[-8:]}" in words(html(viewer, f"{LIST}{last.pk}/change/"))
    alone = tasks.note.enqueue("x")
    assert "Runs after" not in words(html(viewer, f"{LIST}{alone.id}/change/"))


def test_the_page_of_a_task_names_few_of_very_many(viewer: Client) -> None:
    """In a bounded number of statements."""
    id = make_large(1_000)
    last = TaskRecord.objects.filter(workflow_id=id).latest("id")
    text = words(html(viewer, f"{LIST}{last.pk}/change/"))
    assert text.count("Queued load") == 20 and "and others" in text


def test_actions_on_many_take_a_workflow(operator: Client) -> None:
    """By the address of the list."""
    id = sum_of(1, -1)
    sum_of(-2)
    work()
    page = words(
        html(operator, f"{LIST}bulk/?kind=retry&workflow={id}&state=failed&finished_until=2100-01-01T00:00:00Z")
    )
    assert f"workflow: {id}" in page and "Retry 2" in page
    assert Inspector().workflows.get(id)
