"""`asyncq workflows`: list, show, retry and cancel workflows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ...core.names import did_you_mean_path
from ...core.registry import load_task_modules, registered_names
from ...models import TaskRecord
from ...observe.fleet import read_fleet
from ...observe.inspector import Inspector, TaskInfo, WorkflowDetails, WorkflowFilter, WorkflowGraph
from ...observe.why import whys_not_running
from ...storage import database_clock
from ...storage.routing import rows_of
from ...storage.workflows import STATES
from ..reading import counted, duration, moment_or_ago, whole_number
from .printing import Printer, Verb, arg, flag, option, yes
from .selection import one_row
from .tasks import report, still_running

COLUMNS = ("id", "name", "state", "finished", "tasks", "running", "failed", "began", "ended")
# Of the parents of a task, in a table.
MOST_NAMED = 3
BY = "asyncq"


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    since, now = options["since"], database_clock.now()
    matching = WorkflowFilter(
        state=options["state"] or "",
        name=options["task"] or "",
        since=now - since if isinstance(since, timedelta) else since,
    )
    before = _called(inspector, options["before"]) if options["before"] else None
    page = inspector.workflows.page(matching, before=before, most=options["limit"])
    printer.document(page)
    if not page.workflows and not page.next:
        printer.line(f"no workflows{_meant(options['task'])}")
    rows = [
        [
            str(each.id), each.name or "-", each.state, each.finished, each.total, each.counts["running"],
            each.counts["failed"], each.began_at, each.finished_at,
        ]
        for each in page.workflows
    ]  # fmt: skip
    printer.table(COLUMNS, rows)
    if page.next:
        printer.line(f"There are more: --before {page.next}")


def _meant(name: str | None) -> str:
    """Return the names that are close to one that no task has, behind a full stop; "" for none."""
    if not name:
        return ""
    load_task_modules()
    known = registered_names()
    if any(each == name or each.endswith(f".{name}") for each in known):
        return ""
    meant = did_you_mean_path(name, known)
    return f": no task is called {name!r}. {meant}".rstrip()


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = _details(inspector, options["id"])
    graph = inspector.workflows.graph(found.id) if options["graph"] else None
    if options["graph"] and graph is None:
        raise CommandError(
            f"This workflow is too large to show its graph: `asyncq tasks list --workflow {found.id}` shows its tasks."
        )
    texts = _why([*found.failed, *found.open])
    more = {} if graph is None else asdict(graph)
    printer.document({**asdict(found), "progress": found.progress, "why_not_running": texts, **more})
    share = f"{found.finished:,} of {found.total:,}, {100 * found.finished // found.total} %"
    counts = ", ".join(f"{count:,} {state}" for state, count in found.counts.items() if count)
    fields = {"id": str(found.id), "name": found.name, "backend": found.backend, "state": found.state}
    times = {"began_at": found.began_at, "finished_at": found.finished_at}
    printer.fields({**fields, "finished": share, "tasks": counts, **times})
    printer.line("")
    head = ["task", "total", *found.counts]
    printer.table(head, [[each.name, each.total, *each.counts.values()] for each in found.tasks])
    if graph is not None:
        _print_graph(printer, graph)
    _print_tasks(printer, "Have failed", found.failed, texts)
    _print_tasks(printer, "All else waits for", found.open, texts)


def _print_tasks(printer: Printer, title: str, tasks: Sequence[TaskInfo], texts: dict[UUID, str]) -> None:
    if tasks:
        printer.line(f"{title}:")
        rows = [
            [str(each.id), each.name, each.state, texts.get(each.id) or each.error or each.reason] for each in tasks
        ]
        printer.table(["id", "task", "state", "note"], rows)


def _print_graph(printer: Printer, graph: WorkflowGraph) -> None:
    names = {each.id: f"{each.name.rpartition('.')[2]} …{str(each.id)[-8:]}" for each in graph.nodes}
    parents: dict[UUID, dict[UUID, None]] = defaultdict(dict)
    for edge in graph.edges:
        parents[edge.child][edge.parent] = None
    rows = []
    for each in sorted(graph.nodes, key=lambda node: (node.depth, node.id)):
        of_node = [names[id] for id in parents[each.id]]
        more = f" and {len(of_node) - MOST_NAMED:,} more" if len(of_node) > MOST_NAMED else ""
        rows.append([each.depth, str(each.id), each.name, each.state, ", ".join(of_node[:MOST_NAMED]) + more])
    printer.table(["depth", "id", "task", "state", "after"], rows)


def _why(tasks: Sequence[TaskInfo]) -> dict[UUID, str]:
    """Return why each of these tasks does not run; none for one that does, and for one that has finished."""
    load_task_modules()
    fleet = read_fleet()[0]
    rows = list(rows_of(TaskRecord).filter(id__in=[each.id for each in tasks]))
    return {id: why.text(fleet.now) for id, why in whys_not_running(rows, fleet).items() if why is not None}


def _retry(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = _details(inspector, options["id"])
    failed = found.counts["failed"]
    if failed > 1:
        printer.ask(f"Retry {counted(failed, 'task')} of the workflow {found.id}?", "retry", "retried")
    report(printer, failed, [inspector.workflows.retry(found.id)] if failed else [], "queued again")


def _cancel(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = _details(inspector, options["id"])
    count = found.total - found.finished
    if count:
        printer.ask(f"Cancel {counted(count, 'task')} of the workflow {found.id}?", "cancel", "cancelled")
    done = inspector.workflows.cancel(found.id, by=BY, reason=options["reason"], wait=options["wait"])
    printer.document({"workflow": found.id, "chosen": count, **asdict(done)})
    printer.line(
        f"{counted(done.cancelled, 'task')} cancelled, {done.asked:,} with a worker and asked to stop, "
        f"{done.over:,} had finished."
    )
    if not done.cancelled + done.asked:
        raise CommandError("No task was cancelled: all had finished.")
    if options["wait"] is not None and done.asked:
        rows = rows_of(TaskRecord).filter(workflow_id=found.id, finished_at=None).order_by("id")
        raise CommandError(still_running(inspector, list(rows.values_list("id", flat=True)), done.asked))


def _details(inspector: Inspector, text: str) -> WorkflowDetails:
    """Return the workflow that a text names. Raises: CommandError."""
    found = inspector.workflows.get(_called(inspector, text))
    if found is None:
        raise CommandError(f"No workflow has the id {text!r}. `asyncq workflows list` shows them.")
    return found


def _called(inspector: Inspector, text: str) -> UUID:
    """Return the id of a workflow that a text names: its own, that of a task of it, or the beginning of one.

    Raises: CommandError for a text that names none.
    """
    try:
        whole = UUID(text)
    except ValueError:
        whole = None
    if whole is not None and rows_of(TaskRecord).filter(workflow_id=whole).exists():
        return whole
    row = one_row(inspector, text)
    found = inspector.workflows.of_task(row)
    if found is None:
        raise CommandError(
            f"The task {row} is in no workflow: it waits for no other one, and none waits for it. "
            f"`asyncq workflows list` shows those there are."
        )
    return found


ID = arg("id", metavar="ID", help="the id of the workflow or of a task of it, or the beginning of one")
LIST = (
    option("--state", "STATE", "running, failed (a task of it has) or finished", choices=list(STATES)),
    option("--task", "NAME", "that has a task of this name: its whole path, or the function's name"),
    option("--since", "TIME", "that began since a time, or since 30m, 2h, 1d ago", moment_or_ago),
    option("--limit", "N", "how many (default: 50)", whole_number(1, 1000), 50),
    option("--before", "ID", "only older ones than this workflow, for the next page"),
)
GRAPH = flag("--graph", "show each task, and what it waits for, too")
REASON = option("--reason", "TEXT", "a text for the error of the tasks", default="")
WAIT_HELP = "wait for 90s, 5m, 2h or 1d at most until none of the tasks runs; exit with 1 if some still do"
CANCEL = (ID, yes("cancel"), REASON, option("--wait", "TIME", WAIT_HELP, duration))
VERBS = (
    Verb(_list, "list", "list workflows, the newest first", LIST),
    Verb(_show, "show", "show a workflow, how far it is, and what holds it up", [ID, GRAPH]),
    Verb(_retry, "retry", "queue its failed tasks again, with what had failed for them", [ID, yes("retry")]),
    Verb(_cancel, "cancel", "cancel those of its tasks that have not finished", CANCEL),
)
