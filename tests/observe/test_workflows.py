"""Workflows as the inspector lists them, shows them, and as the command line operates them."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import chain, group, lifecycle, previous
from django_asyncq.core.names import uuid7
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import FailureReason, TaskEdge, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector, TaskFilter, WorkflowFilter
from django_asyncq.storage import workflows as storage

from .. import tasks as plain_tasks
from .. import workflow_tasks as tasks
from ..workflow_cases import make_large, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]


def workflow_of(result: Any) -> UUID:
    found = TaskRecord.objects.get(id=result.id).workflow_id
    assert found is not None
    return found


def sum_of(*numbers: int) -> UUID:
    """Enqueue tasks that load numbers, one that adds them, and one that doubles the sum; return the workflow's id."""
    sums = tasks.total.using(after={"rows": previous}).step()
    doubled = tasks.double.using(after={"value": previous}).step()
    return workflow_of(chain(group([tasks.load.step(number) for number in numbers]), sums, doubled).enqueue())


def listed(**wanted: Any) -> list[UUID]:
    return [each.id for each in Inspector().workflows.page(WorkflowFilter(**wanted)).workflows]


# --- the list


def test_workflows_are_listed_the_newest_first_with_their_counts() -> None:
    """A task that waits for none, and none for it, is in no list."""
    plain_tasks.add.enqueue(1, 2)
    good = sum_of(1, 2)
    work()
    bad = sum_of(1, -1)
    work()
    waiting = sum_of(5)
    first, second, third = Inspector().workflows.page().workflows
    assert [first.id, second.id, third.id] == [waiting, bad, good]
    assert (first.state, first.total, first.finished, first.counts["queued"]) == ("running", 3, 0, 3)
    assert (second.state, second.finished, second.counts["failed"]) == ("failed", 4, 3)
    assert (third.state, third.progress, third.counts["succeeded"]) == ("succeeded", 1.0, 4)
    assert third.name == "tests.workflow_tasks.load" and third.began_at <= third.finished_at and not first.finished_at


def test_filters_choose_workflows() -> None:
    """Each alone, and together."""
    good = sum_of(1)
    work()
    bad = sum_of(-1)
    work()
    other = workflow_of(chain(tasks.note.step(), tasks.discards.step()).enqueue())
    assert listed(state="running") == [other]
    assert listed(state="failed") == [bad]
    assert listed(state="finished") == [bad, good]
    assert listed(name="load") == [bad, good] == listed(name="tests.workflow_tasks.load")
    assert listed(name="l_ad") == [] == listed(name="workflow_tasks.load")
    assert listed(name="load", state="failed") == [bad]
    now = timezone.now()
    assert listed(since=now - timedelta(hours=1)) == [other, bad, good] == listed(until=now + timedelta(hours=1))
    assert listed(since=now + timedelta(hours=1)) == [] == listed(until=now - timedelta(hours=1))
    with pytest.raises(InvalidOption, match="running, failed, finished"):
        WorkflowFilter(state="done")


def test_pages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read in three statements; one with a filter looks at a bounded number of workflows, and says so."""
    ids = [sum_of(number) for number in range(5)][::-1]
    workflows = Inspector().workflows
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = workflows.page(most=2)
    assert len(queries) == 3
    assert ([each.id for each in page.workflows], page.next) == (ids[:2], ids[1])
    page = workflows.page(most=3, before=page.next)
    assert ([each.id for each in page.workflows], page.next) == (ids[2:], None)
    monkeypatch.setattr(storage, "MOST_LOOKED_AT", 2)
    page = workflows.page(WorkflowFilter(state="failed"))
    assert (page.workflows, page.next) == ([], ids[1])
    page = workflows.page(WorkflowFilter(state="running"), before=ids[1], most=1)
    assert ([each.id for each in page.workflows], page.next) == ([ids[2]], ids[2])
    page = workflows.page(WorkflowFilter(state="running"), before=ids[3])
    assert ([each.id for each in page.workflows], page.next) == (ids[4:], None)
    with pytest.raises(InvalidOption, match="1 to 1,000"):
        workflows.page(most=0)


def test_an_inspector_of_an_alias_shows_its_own(settings: Any) -> None:
    """No tasks of another alias are in any answer."""
    settings.TASKS = {**settings.TASKS, "second": {**settings.TASKS["default"], "QUEUES": ["other"]}}
    id = sum_of(1)
    mine, other = Inspector("default").workflows, Inspector("second").workflows
    assert [each.id for each in mine.page().workflows] == [id] and mine.get(id)
    assert other.page().workflows == [] and other.get(id) is None and other.of_task(id) is None


def test_a_workflow_without_its_first_row_is_listed() -> None:
    """Somebody may have deleted it."""
    id = sum_of(1, 2)
    work()
    assert lifecycle.delete([id])
    (found,) = Inspector().workflows.page().workflows
    assert (found.id, found.name, found.total) == (id, "", 3)
    details, graph = Inspector().workflows.get(id), Inspector().workflows.graph(id)
    assert details and details.name == "" and graph
    assert [each.depth for each in graph.nodes] == [0, 1, 2] and len(graph.edges) == 2


# --- one


def test_a_workflow_says_what_holds_it_up() -> None:
    """What has failed itself, and what all else waits for."""
    id = sum_of(1, -1)
    alone = tasks.note.using(after=[], run_after=timedelta(hours=1)).enqueue()
    first = TaskRecord.objects.filter(workflow_id=id).earliest("id")
    details = Inspector().workflows.get(id)
    assert details and [each.name for each in details.open] == ["tests.workflow_tasks.load"] * 2 and not details.failed
    assert details.open[0].id == first.id and details.open[0].workflow == id
    work()
    with CaptureQueriesContext(connection) as queries:
        details = Inspector().workflows.get(id)
    assert len(queries) == 4
    assert details and [(each.name, each.reason) for each in details.failed] == [
        ("tests.workflow_tasks.load", "exception")
    ]
    assert not details.open
    by_name = {each.name.rpartition(".")[2]: (each.total, each.counts["failed"]) for each in details.tasks}
    assert by_name == {"load": (2, 1), "total": (1, 1), "double": (1, 1)}
    assert Inspector().workflows.of_task(first.id) == id and Inspector().workflows.of_task(UUID(alone.id)) is None
    assert Inspector().workflows.get(uuid7()) is None


def test_the_graph_has_each_task_once_with_its_depth() -> None:
    """Also where a value is one of a list, and where a way is longer than another."""
    a = tasks.load.enqueue(1)
    b = tasks.double.using(after={"value": a}).enqueue()
    c = tasks.total.using(after={"rows": [a, a, b]}, after_failure="run").enqueue()
    graph = Inspector().workflows.graph(workflow_of(a))
    assert graph and [(each.id, each.depth, each.waits_for) for each in graph.nodes] == [
        (UUID(a.id), 0, 0), (UUID(b.id), 1, 1), (UUID(c.id), 2, 2),
    ]  # fmt: skip
    found = {(each.parent, each.child, each.name, each.runs_anyway) for each in graph.edges}
    assert len(found) == len(graph.edges) == 3
    assert (UUID(a.id), UUID(c.id), "rows", True) in found and (UUID(a.id), UUID(b.id), "value", False) in found


def test_the_tasks_of_a_workflow_are_listed_by_pages() -> None:
    """As all other tasks."""
    id = sum_of(1, 2, 3)
    sum_of(4)
    out = StringIO()
    call_command("asyncq", "tasks", "list", "--workflow", str(id), "--state", "queued", stdout=out)
    assert out.getvalue().count("waits for 3 tasks") == 1 and out.getvalue().count("workflow_tasks.load") == 3
    with pytest.raises(CommandError, match="give a whole id"):
        call_command("asyncq", "tasks", "list", "--workflow", "x", stdout=out)
    page = Inspector().tasks.page(TaskFilter(workflow=id), most=3)
    rest = Inspector().tasks.page(TaskFilter(workflow=id), most=3, before=page.next)
    assert [each.waits_for for each in (*page.tasks, *rest.tasks)] == [1, 3, 0, 0, 0] and rest.next is None


@pytest.mark.slow
def test_ten_thousand_tasks_are_read_in_few_statements() -> None:
    """However many there are."""
    id = make_large(10_000)
    workflows = Inspector().workflows
    with CaptureQueriesContext(connection) as queries:
        (info,) = workflows.page(WorkflowFilter(state="running", name="total")).workflows
        details, graph = workflows.get(id), workflows.graph(id)
    assert len(queries) == 3 + 4 + 2
    assert info.total == 10_001 and details and details.total == 10_001 and len(details.open) == 20
    assert graph and len(graph.nodes) == 10_001 and len(graph.edges) == 10_000 and graph.nodes[-1].depth == 1


def test_a_graph_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its tasks, or by its edges."""
    id = sum_of(1, 2, 3)
    monkeypatch.setattr("django_asyncq.observe.of_workflows.MOST_EDGES", 3)
    assert Inspector().workflows.graph(id) is None
    monkeypatch.setattr("django_asyncq.observe.of_workflows.MOST_NODES", 4)
    with CaptureQueriesContext(connection) as queries:
        assert Inspector().workflows.graph(id) is None
    assert len(queries) == 1
    with pytest.raises(CommandError, match=f"asyncq tasks list --workflow {id}"):
        run("show", id, "--graph")


# --- retry and cancel


def test_a_retry_brings_back_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed for another task waits again; what has succeeded stays."""
    id = sum_of(1, -1)
    work()
    TaskRecord.objects.filter(workflow_id=id, args=[-1]).update(args=[3])
    outcome = Inspector().workflows.retry(id)
    assert len(outcome.done) == 1 and outcome.refused == {}
    assert TaskRecord.objects.filter(workflow_id=id, state=TaskState.QUEUED).count() == 3
    work()
    assert TaskRecord.objects.get(workflow_id=id, name__endswith=".double").return_value == 8


def test_a_retry_brings_back_what_waited_for_a_deleted_task() -> None:
    """No other task brings it back."""
    parent = tasks.load.enqueue(-1)
    child = tasks.note.using(after=[parent]).enqueue("x")
    id = workflow_of(child)
    work()
    assert lifecycle.delete([UUID(parent.id)])
    assert Inspector().workflows.retry(id).done == [UUID(child.id)]


def test_a_cancel_is_of_each_task_that_has_not_finished() -> None:
    """None of them fails for another one, however many pages there are."""
    steps = [tasks.load.step(number) for number in range(300)]
    id = workflow_of(group(steps, then=tasks.note.step()).enqueue())
    TaskRecord.objects.filter(id=id).update(state=TaskState.SUCCEEDED, finished_at=timezone.now())
    counts = Inspector().workflows.cancel(id, by="ann", reason="enough")
    assert (counts.cancelled, counts.asked, counts.over) == (300, 0, 0)
    rows = TaskRecord.objects.filter(workflow_id=id, state=TaskState.FAILED)
    assert set(rows.values_list("reason", flat=True)) == {FailureReason.CANCELLED} and rows.count() == 300
    assert Inspector().workflows.cancel(id).cancelled == 0


# --- the command line


def run(*words: Any) -> str:
    out = StringIO()
    call_command("asyncq", "workflows", *map(str, words), stdout=out, stderr=StringIO())
    return out.getvalue()


def test_the_commands_list_and_show() -> None:
    """For people, and as JSON."""
    assert "no workflows" in run("list")
    assert "Did you mean" in run("list", "--task", "tests.workflow_tasks.lode")
    id = sum_of(1, -1)
    work()
    newer = sum_of(3)
    out = run("list", "--limit", "1")
    assert str(newer) in out and str(id) not in out and f"--before {newer}" in out
    assert str(id) in run("list", "--before", newer, "--since", "1h", "--state", "failed")
    document = json.loads(run("list", "--json"))
    assert [each["id"] for each in document["workflows"]] == [str(newer), str(id)] and document["next"] is None
    out = run("show", id)
    assert "4 of 4, 100 %" in out and "3 failed" in out and "ValueError" in out and "All else" not in out
    out = run("show", str(TaskRecord.objects.filter(workflow_id=newer).latest("id").id), "--graph")
    assert "All else waits for" in out and f"load …{str(newer)[-8:]}" in out
    document = json.loads(run("show", id, "--json", "--graph"))
    assert document["progress"] == 1 and len(document["nodes"]) == 4 and len(document["edges"]) == 3
    assert document["failed"][0]["error"] == "builtins.ValueError"


def test_the_commands_retry_and_cancel() -> None:
    """After a question, as long as there is something to do."""
    id = sum_of(1, -1)
    work()
    with pytest.raises(CommandError, match="give --yes to retry"):
        run("retry", id)
    assert "1 of 3 tasks queued again" in run("retry", id, "--yes")
    with pytest.raises(CommandError, match="give --yes to cancel"):
        run("cancel", id)
    assert "3 tasks cancelled" in run("cancel", id, "--yes", "--reason", "enough")
    with pytest.raises(CommandError, match="all had finished"):
        run("cancel", id, "--yes")
    assert json.loads(run("retry", id, "--yes", "--json")) == {"chosen": 3, "done": 3, "refused": {}}


def test_the_commands_refuse_what_is_no_workflow() -> None:
    """With what to do."""
    plain = plain_tasks.add.enqueue(1, 2)
    with pytest.raises(CommandError, match="is in no workflow"):
        run("show", plain.id)
    with pytest.raises(CommandError, match="No task is called"):
        run("show", "01")
    with pytest.raises(CommandError, match="is in no workflow"):
        run("cancel", uuid7(), "--yes")
    assert TaskEdge.objects.count() == 0
