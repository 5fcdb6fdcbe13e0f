"""`asyncq tasks`: list, show, enqueue, run, retry, cancel, delete, pause and resume tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ...core.compat import InvalidTask
from ...core.masking import masker_of_call
from ...core.names import did_you_mean_path
from ...core.registry import load_task_modules, registered_names
from ...exceptions import TaskNotRegistered
from ...models import TaskRecord
from ...observe.fleet import read_fleet
from ...observe.inspector import EntryDetails, Inspector, Outcome, TaskDetails
from ...observe.known_names import check_queue_of_any, check_task
from ...observe.why import why_not_running
from ...storage.routing import rows_of
from ..reading import counted, duration, header, json_of, moment, whole_number
from .printing import Printer, Verb, arg, either, flag, masked_entry, option, usage_error, yes
from .selection import AN_ID, SELECTION, Selection, add_filters, filter_of, one_row, tasks_called
from .switching import switch, switch_verbs

# Of the tasks that still run, in a message.
MOST_NAMED = 20
COLUMNS = ("id", "name", "state", "error", "queue", "priority", "attempts", "enqueued", "note")
FINAL = ("succeeded", "failed")
FAILED = ("failed", "retrying")
UNFINISHED = ("queued", "running", "retrying")


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    before = one_row(inspector, options["before"]) if options["before"] else None
    page = inspector.tasks.page(filter_of(options), before=before, most=options["limit"])
    if not page.tasks and options["queue"]:
        # Only now: rows may have a queue that the settings do not name any more.
        check_queue_of_any(options["queue"], options["backend"])
    printer.document(page)
    if not page.tasks:
        printer.line("no tasks")
    rows = [
        [
            str(task.id), task.name, task.state, task.error.rpartition(".")[2] or task.reason, task.queue,
            task.priority, f"{task.attempt}/{task.max_attempts}", task.enqueued_at, _note(task),
        ]
        for task in page.tasks
    ]  # fmt: skip
    printer.table(COLUMNS, rows)
    if page.next:
        printer.line(f"There are more: --before {page.next}")


def _note(task: Any) -> str:
    notes = {
        "runs alone next": task.is_suspect,
        "of another program": task.is_remote or task.wire_id is not None,
        f"waits for {counted(task.waits_for, 'task')}": task.waits_for and task.state == "queued",
        f"at gate {', '.join((task.gate, *task.other_gates))}": task.gate,
        f"retried at {task.retry_at:%Y-%m-%d %H:%M:%S}" if task.retry_at else "": task.retry_at,
    }
    return ", ".join(text for text, applies in notes.items() if applies)


def _failures(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    groups = inspector.tasks.failures(filter_of(options, states=("failed",)), most=options["limit"])
    printer.document({"failures": groups})
    printer.rows(groups, ("count", "name", "error", "latest"), none="no failed tasks")


def _unknown(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.tasks.unknown()
    printer.document({"unknown": found})
    columns = ("total", "name", "version", "backend", "queue", "since")
    printer.rows(found, columns, none="no task waits for code that has it")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    ids, entries = tasks_called(inspector, [options["id"]])
    if entries:
        _show_entry(printer, entries[0] if options["unmasked"] else masked_entry(entries[0]))
        return
    task = inspector.tasks.get(ids[0])
    if task is None:
        raise CommandError(f"No task has the id {ids[0]}, and no queue in Redis an entry with it.")
    shown = asdict(task) if options["unmasked"] else _masked(task)
    shown["why_not_running"], shown["limited_by"] = _why(ids[0])
    printer.document(shown)
    for name in ("args", "kwargs", "headers", "return_value", "progress", "checkpoint", "worker_ids"):
        if shown[name] not in (None, [], {}):
            shown[name] = json.dumps(shown[name], ensure_ascii=False)
    errors = shown.pop("errors")
    printer.fields(shown)
    for error in errors:
        printer.line(f"\nattempt {error.get('attempt', '?')}: {error.get('exception')}: {error.get('message')}")
        printer.line(str(error.get("traceback") or "").rstrip())


def _why(id: UUID) -> tuple[str, str]:
    """Return why a task does not run, and what limits it; "" for one that runs, and for a finished one."""
    load_task_modules()
    row, fleet = rows_of(TaskRecord).filter(pk=id).first(), read_fleet()[0]
    why = row and why_not_running(row, fleet, with_place=True)
    return (why.text(fleet.now), why.limited_by) if why else ("", "")


def _show_entry(printer: Printer, entry: EntryDetails) -> None:
    printer.document(entry)
    payload = entry.payload.decode("utf-8", "backslashreplace")
    headers = json.dumps(entry.headers, ensure_ascii=False) if entry.headers else ""
    printer.fields({**asdict(entry), "payload": payload, "headers": headers})
    printer.line("It has no row: it is of another program, and no worker of this project has taken it.")


def _masked(task: TaskDetails) -> dict[str, Any]:
    """Return the task with its secrets masked, as the admin shows them."""
    load_task_modules()
    shown = asdict(task)
    masker = masker_of_call(task.name, shown["args"], shown["kwargs"], task.backend)
    shown["args"] = masker.positional(shown["args"])
    shown["kwargs"] = masker.keyword(shown["kwargs"])
    shown["return_value"] = masker.result(shown["return_value"])
    for name in ("headers", "progress", "checkpoint"):
        shown[name] = masker.data(shown[name])
    shown["errors"] = [
        {name: masker.text(value) if isinstance(value, str) else value for name, value in error.items()}
        for error in shown["errors"]
    ]
    return shown


def _enqueue(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if options["backend"] is not None:
        # It says which there are.
        Inspector(options["backend"])
    try:
        task = inspector.tasks.task(options["name"])
        run_after = options["at"] if options["delay"] is None else timedelta(seconds=options["delay"])
        given = task.using(
            queue_name=options["queue"],
            backend=options["backend"],
            run_after=run_after,
            priority=options["priority"],
            headers=dict(options["header"]) or None,
        )
        result = given.enqueue(*options["positional"], **options["named"])
    except TaskNotRegistered as error:
        raise _no_task(options["name"], error) from error
    except (InvalidTask, TypeError) as error:
        raise CommandError(str(error)) from error
    printer.document({"id": result.id, "task": options["name"], "queue": given.queue_name})
    printer.line(f"Enqueued: {result.id} in queue {given.queue_name}.")


def _no_task(name: str, error: TaskNotRegistered) -> CommandError:
    """Return what to say of a name that no task has, with those that are close."""
    meant = did_you_mean_path(name, registered_names())
    if "." in name:
        return CommandError(f"{error}. {meant}".strip())
    return CommandError(f"No task is called {name!r}. {meant}Give the whole path, such as shop.tasks.{name}.")


def _run(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    ids, entries = tasks_called(inspector, options["ids"])
    of_entries = map(inspector.entries.run, entries)
    report(printer, len(ids) + len(entries), [inspector.tasks.run(ids)], "queued to run now", of_entries)


def _retry(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=FAILED)
    if selection.count > 1:
        printer.ask(f"Retry {counted(selection.count, 'task')}?", "retry", "retried")
    outcomes, of_entries = (
        _each(printer, selection, inspector.tasks.retry),
        map(inspector.entries.retry, selection.entries),
    )
    report(printer, selection.count, outcomes, "queued again", of_entries)


def _cancel(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=UNFINISHED)
    if selection.entries and options["wait"] is not None:
        raise usage_error(f"--wait is of tasks with a row: {selection.entries[0].id!r} has none.")
    if selection.count > 1:
        printer.ask(f"Cancel {counted(selection.count, 'task')}?", "cancel", "cancelled")
    ids = [id for page in selection.pages() for id in page]
    done = inspector.tasks.cancel(ids, by="asyncq", reason=options["reason"], wait=options["wait"])
    of_entries = Counter(map(inspector.entries.cancel, selection.entries))
    totals = Counter(asdict(done)) + Counter(asked=of_entries.pop("", 0))
    missing = selection.count - totals.total() - of_entries.total()
    counts = {name: totals[name] for name in ("cancelled", "asked", "over")}
    printer.document({"chosen": selection.count, **counts, "missing": max(missing, 0), "refused": of_entries})
    printer.line(
        f"{counted(totals['cancelled'], 'task')} cancelled, {totals['asked']:,} with a worker and asked to stop, "
        f"{totals['over']:,} had finished."
    )
    _print_refused(printer, of_entries)
    if selection.count and not totals["cancelled"] + totals["asked"]:
        why = "" if of_entries else ": all had finished, or have no row"
        raise CommandError(f"No task was cancelled{why}.")
    if options["wait"] is not None and totals["asked"]:
        raise CommandError(still_running(inspector, ids, totals["asked"]))


def still_running(inspector: Inspector, ids: list[UUID], count: int) -> str:
    """Say which tasks run on after the time to wait: the first of them."""
    rows = filter(None, (inspector.tasks.get(id) for id in ids[:MOST_NAMED]))
    names = [f"{row.id} {row.name}" for row in rows if row.finished_at is None and row.cancel_requested_at is not None]
    listed = f": {', '.join(names)}" if names else ""
    return f"{counted(count, 'task')} still running or with a worker{listed}. They were asked to stop."


def _delete(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=FINAL)
    if selection.count:
        printer.ask(f"Delete {counted(selection.count, 'task')}? This cannot be undone.", "delete", "deleted")
    outcomes, of_entries = (
        _each(printer, selection, inspector.tasks.delete),
        map(inspector.entries.delete, selection.entries),
    )
    report(printer, selection.count, outcomes, "deleted", of_entries)


def _each(printer: Printer, selection: Selection, change: Callable[[list[UUID]], Outcome]) -> list[Outcome]:
    progress = printer.progress(selection.count)
    outcomes = []
    for ids in selection.pages():
        outcomes.append(change(ids))
        progress.add(len(ids))
    progress.close()
    return outcomes


def report(printer: Printer, chosen: int, outcomes: list[Outcome], word: str, of_entries: Iterable[str] = ()) -> None:
    """Print how many tasks were changed, and why others were not. Raises: CommandError when none was.

    of_entries: of each task without a row why it was refused, "" for one that was changed.
    """
    refused = Counter(reason for outcome in outcomes for reason in outcome.refused.values()) + Counter(of_entries)
    done = sum(len(outcome.done) for outcome in outcomes) + refused.pop("", 0)
    printer.document({"chosen": chosen, "done": done, "refused": dict(refused.most_common())})
    printer.line(f"{done:,} of {counted(chosen, 'task')} {word}.")
    _print_refused(printer, refused)
    if chosen and not done:
        raise CommandError(f"No task was {word}.")


def _print_refused(printer: Printer, refused: Counter[str]) -> None:
    printer.lines(*(f"  {count:,}: {reason}" for reason, count in refused.most_common()))


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    check_task(options["name"])
    switch(printer, inspector.tasks, "task", options)


LIMIT = option("--limit", "N", "how many (default: 50)", whole_number(1, 1000), 50)
BEFORE = option("--before", "ID", "only older ones than this task, for the next page")
GROUPS = option("--limit", "N", "how many (default: 20)", whole_number(1, 1000), 20)
ID = arg("id", metavar="ID", help=AN_ID)
IDS = arg("ids", nargs="+", metavar="ID", help=AN_ID)
UNMASKED = flag("--unmasked", "show secrets in arguments and errors too")
ENQUEUE = (
    arg("name", metavar="NAME", help="the path of the task, such as shop.tasks.send"),
    option("--args", "JSON", "positional arguments, a list", json_of(list), [], dest="positional"),
    option("--kwargs", "JSON", "keyword arguments, an object", json_of(dict), {}, dest="named"),
    option("--queue", "NAME", "another queue than the task's own"),
    option("--backend", "ALIAS", "another alias in TASKS than the task's own"),
    either(
        option("--in", "TIME", "run after 90s, 5m, 2h or 1d", duration, dest="delay"),
        option("--at", "TIME", "run after a time in ISO 8601", moment),
    ),
    option("--priority", "N", "-100 to 100; higher first", int),
    option("--header", "KEY=VALUE", "may be repeated", header, [], action="append"),
)
REASON = option("--reason", "TEXT", "a text for the error of the tasks", default="")
WAIT_HELP = "wait for 90s, 5m, 2h or 1d at most until none of the tasks runs; exit with 1 if some still do"
CANCEL = (*SELECTION, yes("cancel"), REASON, option("--wait", "TIME", WAIT_HELP, duration))
VERBS = (
    Verb(_list, "list", "list tasks, the newest first", [add_filters, LIMIT, BEFORE]),
    Verb(_failures, "failures", "count the failed tasks by name and error", [add_filters, GROUPS]),
    Verb(_unknown, "unknown", "count the tasks that wait for a worker whose code has them"),
    Verb(_show, "show", "show all that is known of a task", [ID, UNMASKED]),
    Verb(_enqueue, "enqueue", "enqueue a task", ENQUEUE, has_backend=False),
    Verb(_run, "run", "let delayed, retrying or failed tasks run now", [IDS]),
    Verb(_retry, "retry", "queue failed and retrying tasks again", [*SELECTION, yes("retry")]),
    Verb(_cancel, "cancel", "cancel tasks that wait, and ask those that a worker has to stop", CANCEL),
    Verb(_delete, "delete", "delete finished tasks; it cannot be undone", [*SELECTION, yes("delete")]),
    *switch_verbs("task", _switch, "let no call of a task begin"),
)
