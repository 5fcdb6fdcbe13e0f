"""The list of workflows, and the page of one: how far it is, what holds it up, its graph; and the buttons that retry
what failed in it, or cancel the rest.

Each is a bounded number of statements, however many tasks there are: see `observe.of_workflows`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from ..models import TaskRecord, TaskState
from ..observe.inspector import (
    Inspector,
    TaskInfo,
    WorkflowDetails,
    WorkflowFilter,
    WorkflowGraph,
    WorkflowInfo,
    WorkflowTask,
)
from ..storage import database_clock
from ..storage.routing import rows_of
from ..storage.workflows import edges_at
from . import base, task_actions
from .base import Asking, Question, Text, has_right, url_about, url_of, uuid_of
from .details import Table
from .failures import SPANS
from .filters import as_listed, with_why
from .fleet import fleet_of
from .matching import Matching
from .navigation import as_count
from .workflow_graph import STATES, Box, draw

WORKFLOWS_PER_PAGE = 50
TASKS_PER_PAGE = 50
# Of the tasks before another one, in a cell.
MOST_NAMED = 3
CHOICES: dict[str, Text] = {
    "": pgettext_lazy("workflows", "All"),
    "running": gettext_lazy("Running"),
    "failed": gettext_lazy("With failures"),
    "finished": gettext_lazy("Finished"),
}
DEFAULT_SPAN = "all"
# In the order of a life. The list has room for those that somebody may have to look at.
COUNTED = ("queued", "running", "retrying", "failed", "succeeded")
LISTED = ("running", "failed")
# Of those that hold a workflow up.
MOST_HOLDING_UP = 5


# --- the list


def workflows(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """Show a page of workflows, the newest first."""
    given = request.GET
    chosen = {
        "state": given.get("state", "") if given.get("state") in CHOICES else "",
        "span": given.get("span", "") if given.get("span") in SPANS else DEFAULT_SPAN,
        # PostgreSQL takes no text with a NUL.
        "q": given.get("q", "").replace("\x00", "").strip()[:200],
    }
    now, span = database_clock.now(), SPANS[chosen["span"]][0]
    since = None if span is None else base.aware(now) - span
    matching = WorkflowFilter(state=chosen["state"], name=chosen["q"], since=since)
    page = Inspector().workflows.page(matching, before=uuid_of(given.get("before")), most=WORKFLOWS_PER_PAGE)

    def link(**changes: str) -> str:
        return f"?{urlencode({name: value for name, value in {**chosen, **changes}.items() if value})}"

    return {
        "workflows": [
            SimpleNamespace(
                info=each,
                name=each.name.rpartition(".")[2] or _("deleted"),
                short_id=_short(each.id),
                url=url_about(model_admin, "workflow", id=str(each.id)),
                state=state_badge(each),
                bar=_bar(each),
                began=base.time_element(each.began_at, now),
                finished=base.time_element(each.finished_at, now),
                counts=[(STATES[state], as_count(each.counts[state])) for state in LISTED],
            )
            for each in page.workflows
        ],
        "heads": [STATES[state] for state in LISTED],
        "states": [(link(state=name), label, name == chosen["state"]) for name, label in CHOICES.items()],
        "spans": [(link(span=name), label, name == chosen["span"]) for name, (_span, label) in SPANS.items()],
        "chosen": chosen,
        "is_narrowed": bool(chosen["state"] or chosen["q"]) or chosen["span"] != DEFAULT_SPAN,
        "next_url": link(before=str(page.next)) if page.next else "",
    }


def state_badge(info: WorkflowInfo) -> SafeString:
    """Return the state of a workflow as a badge; one that goes on beside failures says both."""
    badge = base.state_badge(TaskState[info.state.upper()])
    if info.state == "running" and info.counts["failed"]:
        return format_html("{} {}", badge, base.state_badge(TaskState.FAILED))
    return badge


def _bar(info: WorkflowInfo) -> SafeString:
    text = _("%(done)s of %(total)s") % {"done": as_count(info.finished), "total": as_count(info.total)}
    return format_html(
        '<progress class="asyncq-progress" value="{}" max="{}" aria-label="{}"></progress> <bdi>{}</bdi>',
        str(info.finished),
        str(info.total),
        _("Finished"),
        text,
    )


def _short(id: UUID) -> str:
    return f"…{str(id)[-8:]}"


# --- one of them


def workflow(model_admin: Any, request: HttpRequest) -> dict[str, Any] | str:
    """Show how far a workflow is, what holds it up, its graph, and its tasks."""
    id = uuid_of(request.GET.get("id"))
    found = None if id is None else Inspector().workflows.get(id)
    if id is None or found is None:
        messages.warning(request, _("This workflow does not exist, or its tasks were deleted."))
        return url_of(model_admin, "workflows")
    graph = Inspector().workflows.graph(id)
    fleet = fleet_of(request)
    page = _Page(model_admin, request, found, graph)
    return {
        "title": _("Workflow %(name)s") % {"name": f"{found.name.rpartition('.')[2]} {_short(id)}".strip()},
        "workflow": found,
        "state": state_badge(found),
        "bar": _bar(found),
        "counts": page.counts(),
        "began": base.time_element(found.began_at, fleet.now),
        "finished": base.time_element(found.finished_at, fleet.now),
        "drawing": draw(graph, page.url_of_box),
        "failed": page.tasks_table("failed-first", _("Have failed"), found.failed),
        "open": page.tasks_table("open", _("All else waits for these tasks"), found.open),
        "failed_url": page.list_url(state=["failed"]) if len(found.failed) > MOST_HOLDING_UP else "",
        "open_url": page.list_url(state=["queued"]) if len(found.open) > MOST_HOLDING_UP else "",
        "by_name": page.by_name(),
        "nodes": page.nodes(),
        "list_url": page.list_url(),
        "may_retry": has_right(request, "retry_task") and bool(found.counts["failed"]),
        "may_cancel": has_right(request, "cancel_task") and found.finished < found.total,
    }


class _Page:
    """Builds the parts of the page of a workflow."""

    def __init__(
        self, model_admin: Any, request: HttpRequest, found: WorkflowDetails, graph: WorkflowGraph | None
    ) -> None:
        self.model_admin = model_admin
        self.request = request
        self.found = found
        self.graph = graph
        self.fleet = fleet_of(request)

    def list_url(self, **keys: Any) -> str:
        """Return the address of the list of its tasks. keys: of `storage.matching`, that narrow them."""
        matching = Matching({"workflow_id": str(self.found.id), **keys})
        return f"{url_of(self.model_admin, 'changelist')}{matching.query}"

    def counts(self) -> list[tuple[str, Text, str]]:
        """Return for each state that a task is in the address of those tasks, its name, and how many there are."""
        counts = self.found.counts
        return [
            (self.list_url(state=[state]), STATES[state], as_count(counts[state])) for state in COUNTED if counts[state]
        ]

    def url_of_box(self, box: Box) -> str:
        """Return where a box of the drawing leads: to its task, or to the list of its tasks."""
        return _task_url(self.model_admin, box.id) if box.id else self.list_url(name=box.name)

    def tasks_table(self, id: str, title: Text, tasks: Sequence[TaskInfo]) -> Table:
        """Return the first of some tasks with why they do not run, or with what they have failed."""
        rows = self._rows([each.id for each in tasks[:MOST_HOLDING_UP]]).values()
        return Table(id, title, (_("Task"), _("State")), [row[:2] for row in rows], "")

    def by_name(self) -> Table:
        """Return the counts of the tasks of each name."""
        heads = (_("Task"), _("Total"), *(STATES[state] for state in COUNTED))
        return Table("by-name", _("By task"), heads, [self._of_name(each) for each in self.found.tasks], "", True)

    def _of_name(self, each: WorkflowTask) -> list[SafeString | str]:
        name = format_html('<bdi class="asyncq-code" dir="ltr">{}</bdi>', each.name)
        cells: list[SafeString | str] = [_link(self.list_url(name=each.name), name), as_count(each.total)]
        for state in COUNTED:
            url = self.list_url(name=each.name, state=[state])
            cells.append(_link(url, as_count(each.counts[state])) if each.counts[state] else "–")
        return cells

    def nodes(self) -> SimpleNamespace:
        """Return a page of its tasks in their order, each with those that it waits for. Lists the same as the graph."""
        behind = uuid_of(self.request.GET.get("behind"))
        ids = rows_of(TaskRecord).filter(workflow_id=self.found.id).order_by("id")
        ids = ids if behind is None else ids.filter(id__gt=behind)
        found = list(ids.values_list("id", flat=True)[: TASKS_PER_PAGE + 1])
        shown = found[:TASKS_PER_PAGE]
        parents = self._parents(shown)
        rows = [[*row, parents.get(id, "–")] for id, row in self._rows(shown).items()]
        heads = (_("Task"), _("State"), _("Ran"), _("After"))
        more = url_about(self.model_admin, "workflow", id=str(self.found.id), behind=str(shown[-1])) if shown else ""
        return SimpleNamespace(
            table=Table("nodes", _("All tasks"), heads, rows, _("There is none.")),
            next_url=f"{more}#asyncq-nodes" if len(found) > TASKS_PER_PAGE else "",
            first_url=url_about(self.model_admin, "workflow", id=str(self.found.id)) if behind else "",
        )

    def _rows(self, ids: Sequence[UUID]) -> dict[UUID, list[SafeString | str]]:
        """Return of each task a link, its state, and when it ran, by the ids in their order."""
        admin, found = self.model_admin, dict[UUID, list[SafeString | str]]()
        known = as_listed(rows_of(TaskRecord).filter(pk__in=ids).order_by("id"))
        for row in with_why(list(known), self.fleet):
            link = _link(_task_url(admin, row.pk), admin.task(row))
            found[row.pk] = [link, admin.state_and_error(row), admin.run(row) or "–"]
        return found

    def _parents(self, ids: Sequence[UUID]) -> dict[UUID, SafeString]:
        """Return for each task links to the first of those that stand before it; of a graph that is known."""
        if self.graph is None:
            return {}
        names, wanted = {node.id: node.name for node in self.graph.nodes}, set(ids)
        found: dict[UUID, dict[UUID, str]] = defaultdict(dict)
        for edge in self.graph.edges:
            if edge.child in wanted:
                found[edge.child].setdefault(edge.parent, names[edge.parent])
        return {id: task_links(self.model_admin, parents.items()) for id, parents in found.items()}


def _link(url: str, text: SafeString | str) -> SafeString:
    return format_html('<a href="{}">{}</a>', url, text)


def _task_url(model_admin: ModelAdmin[Any], id: UUID) -> str:
    return url_of(model_admin, "change", quote(id))


def task_links(model_admin: ModelAdmin[Any], tasks: Iterable[tuple[UUID, str]]) -> SafeString:
    """Return links to the first of some tasks, by ids and names, and how many others there are."""
    all_tasks = list(tasks)
    links = format_html_join(
        ", ",
        '<a href="{}"><bdi>{} {}</bdi></a>',
        ((_task_url(model_admin, id), name.rpartition(".")[2], _short(id)) for id, name in all_tasks[:MOST_NAMED]),
    )
    more = len(all_tasks) - MOST_NAMED
    return format_html(_("{} and {} more"), links, as_count(more)) if more > 0 else links


# --- what a task waits for, and what waits for it, on its own page

MOST_NEIGHBOURS = 20


def neighbours(model_admin: ModelAdmin[Any], record: TaskRecord) -> SimpleNamespace | None:
    """Return what the page of a task says of its workflow; None for a task that is in none. Costs three statements.

    before, after: the first of the tasks that it waits for, and of those that wait for it. more_…: whether there are
    others.
    """
    if record.workflow_id is None:
        return None
    # Several edges may lead to one task, each with its own argument.
    before = _others(edges_at([record.pk], "child_id", MOST_NEIGHBOURS + 1), 0)
    after = _others(edges_at([record.pk], "parent_id", MOST_NEIGHBOURS + 1), 1)
    known = rows_of(TaskRecord).filter(pk__in=[*before, *after])
    rows = {row.pk: row for row in known.only("id", "name", "state", "retry_at")}

    def shown(ids: dict[UUID, list[str]]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=str(rows[id]) if id in rows else _short(id),
                url=_task_url(model_admin, id) if id in rows else "",
                state=base.state_badge(rows[id].state) if id in rows else _("deleted"),
                argument=", ".join(names),
            )
            for id, names in list(ids.items())[:MOST_NEIGHBOURS]
        ]

    return SimpleNamespace(
        id=_short(record.workflow_id),
        url=url_about(model_admin, "workflow", id=str(record.workflow_id)),
        before=shown(before),
        after=shown(after),
        more_before=len(before) > MOST_NEIGHBOURS,
        more_after=len(after) > MOST_NEIGHBOURS,
    )


def _others(edges: Iterable[tuple[UUID, UUID, str]], end: int) -> dict[UUID, list[str]]:
    """Return the tasks at one end of edges, each with the arguments that get a value. end: 0 for parents."""
    found: dict[UUID, list[str]] = defaultdict(list)
    for parent, child, name in edges:
        found[child if end else parent] += [name] if name else []
    return found


# --- retry what failed, cancel the rest


def _wanted(model_admin: ModelAdmin[Any], request: HttpRequest) -> tuple[WorkflowDetails | None, str]:
    """Return the workflow that a button names, and where its page is."""
    id = uuid_of(request.POST.get("id"))
    found = None if id is None else Inspector().workflows.get(id)
    if found is None:
        messages.warning(request, _("This workflow does not exist, or its tasks were deleted."))
        return None, url_of(model_admin, "workflows")
    return found, url_about(model_admin, "workflow", id=str(found.id))


def retry_failed(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Queue the failed tasks of a workflow again."""
    found, back = _wanted(model_admin, request)
    if found is None:
        return back
    if not found.counts["failed"]:
        messages.warning(request, _("No task of this workflow has failed, so nothing was retried."))
        return back
    count = found.counts["failed"]
    title = ngettext("Retry %(count)d failed task?", "Retry %(count)d failed tasks?", count) % {"count": count}
    yield Question(
        title=title,
        lines=[
            _("They are queued again. A task whose gate (admission limit) is full stays failed."),
            _("What had failed because a task before it failed waits again, and runs when that has succeeded."),
        ],
        examples=_names(found.failed),
        button=title.rstrip("?؟"),
        back=back,
    )
    retried = sum(
        len(task_actions.retry_and_say(model_admin, request, ids).retried)
        for ids in Inspector().workflows.pages_to_retry(found.id)
    )
    now = Inspector().workflows.get(found.id)
    # Those that failed again meanwhile are counted as if they had not come back.
    if now is not None and (again := count - now.counts["failed"] - retried) > 0:
        text = ngettext("%(count)d task waits again.", "%(count)d tasks wait again.", again)
        messages.success(request, text % {"count": again})
    return back


def cancel_open(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Cancel the tasks of a workflow that have not finished."""
    found, back = _wanted(model_admin, request)
    if found is None:
        return back
    count = found.total - found.finished
    if not count:
        messages.warning(request, _("All tasks of this workflow have finished, so none was cancelled."))
        return back
    title = ngettext("Cancel %(count)d task?", "Cancel %(count)d tasks?", count) % {"count": count}
    yield Question(
        title=title,
        lines=[
            _("A task that waits fails as cancelled. A task that a worker has is asked to stop."),
            _("What has succeeded stays as it is. A retry brings back what was cancelled."),
        ],
        examples=_names(found.open),
        button=title.rstrip("?؟"),
        asks_reason=True,
        is_destructive=True,
        back=back,
    )
    task_actions.cancel_and_say(model_admin, request, Inspector().workflows.ids_to_cancel(found.id))
    return back


def _names(tasks: Sequence[TaskInfo]) -> list[str]:
    return [f"{each.name.rpartition('.')[2]} {_short(each.id)} – {STATES[each.state]}" for each in tasks]
