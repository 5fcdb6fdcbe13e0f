"""`asyncq tasks`: list, show, enqueue, run, retry, cancel, delete, pause and resume tasks."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ...compat import InvalidTask
from ...definitions.close_names import did_you_mean_path
from ...exceptions import TaskNotRegistered
from ...inspector import Inspector, Outcome, TaskDetails
from ...inspector.known_names import check_queue_of_any, check_task
from ...masking import masker_of_call
from ...registry import load_task_modules, registered_names
from ..reading import duration, header, json_of, moment, whole_number
from ..wording import counted
from .printing import Printer, add_verb, add_yes, verbs_of
from .selection import Selection, add_filters, add_selection, filter_of, one_id
from .switching import add_switch, switch

COLUMNS = ("id", "name", "state", "error", "queue", "priority", "attempts", "enqueued", "note")
FINAL = ("succeeded", "failed")
FAILED = ("failed", "retrying")
UNFINISHED = ("queued", "running", "retrying")


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    listing = add_verb(verbs, "list", "list tasks, the newest first")
    add_filters(listing)
    listing.add_argument("--limit", type=whole_number(1, 1000), default=50, metavar="N", help="how many (default: 50)")
    listing.add_argument("--before", metavar="ID", help="only older ones than this task, for the next page")
    failures = add_verb(verbs, "failures", "count the failed tasks by name and error")
    add_filters(failures)
    failures.add_argument("--limit", type=whole_number(1, 1000), default=20, metavar="N", help="how many (default: 20)")
    show = add_verb(verbs, "show", "show all that is known of a task")
    show.add_argument("id", metavar="ID", help="its id, or the beginning of it")
    show.add_argument("--unmasked", action="store_true", help="show secrets in arguments and errors too")
    _add_enqueue(add_verb(verbs, "enqueue", "enqueue a task", backend=False))
    run_parser = add_verb(verbs, "run", "let delayed, retrying or failed tasks run now")
    run_parser.add_argument("ids", nargs="+", metavar="ID", help="an id, or the beginning of one")
    for name, text in (
        ("retry", "queue failed and retrying tasks again"),
        ("cancel", "cancel tasks that wait, and ask those that run to stop"),
        ("delete", "delete finished tasks; it cannot be undone"),
    ):
        verb = add_verb(verbs, name, text)
        add_selection(verb)
        add_yes(verb, name)
        if name == "cancel":
            verb.add_argument("--reason", default="", metavar="TEXT", help="a text for the error of the tasks")
    add_switch(verbs, "task", does="let no call of a task begin")


def _add_enqueue(parser: ArgumentParser) -> None:
    add_argument = parser.add_argument
    add_argument("name", metavar="NAME", help="the path of the task, such as shop.tasks.send")
    add_argument(
        "--args", dest="positional", type=json_of(list), default=[], metavar="JSON", help="positional arguments, a list"
    )
    add_argument(
        "--kwargs", dest="named", type=json_of(dict), default={}, metavar="JSON", help="keyword arguments, an object"
    )
    add_argument("--queue", metavar="NAME", help="another queue than the task's own")
    add_argument("--backend", metavar="ALIAS", help="another alias in TASKS than the task's own")
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--in", dest="delay", type=duration, metavar="TIME", help="run after 90s, 5m, 2h or 1d")
    times.add_argument("--at", type=moment, metavar="TIME", help="run after a time in ISO 8601")
    add_argument("--priority", type=int, metavar="N", help="-100 to 100; higher first")
    add_argument("--header", action="append", type=header, default=[], metavar="KEY=VALUE", help="may be repeated")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says."""
    # Of enqueue, the option names another alias for the call.
    inspector = Inspector(None if options["verb"] == "enqueue" else options.get("backend"))
    VERBS[options["verb"]](printer, inspector, options)


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    before = one_id(inspector, options["before"]) if options["before"] else None
    page = inspector.tasks.page(filter_of(options), before=before, most=options["limit"])
    if not page.tasks and options["queue"]:
        # Only now: rows may have a queue that the settings do not name any more.
        check_queue_of_any(options["queue"], options["backend"])
    if printer.as_json:
        printer.document(page)
        return
    if not page.tasks:
        printer.line("no tasks")
        return
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
        f"at gate {task.gate}": task.gate,
        f"retried at {task.retry_at:%Y-%m-%d %H:%M:%S}" if task.retry_at else "": task.retry_at,
    }
    return ", ".join(text for text, applies in notes.items() if applies)


def _failures(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    groups = inspector.tasks.failures(filter_of(options, states=("failed",)), most=options["limit"])
    if printer.as_json:
        printer.document({"failures": groups})
        return
    printer.rows(groups, ("count", "name", "error", "latest"), none="no failed tasks")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    id = one_id(inspector, options["id"])
    task = inspector.tasks.get(id)
    if task is None:
        raise CommandError(f"No task has the id {id}.")
    shown = asdict(task) if options["unmasked"] else _masked(task)
    if printer.as_json:
        printer.document(shown)
        return
    for name in ("args", "kwargs", "headers", "return_value", "progress", "worker_ids"):
        if shown[name] not in (None, [], {}):
            shown[name] = json.dumps(shown[name], ensure_ascii=False)
    errors = shown.pop("errors")
    printer.fields(shown)
    for error in errors:
        printer.line(f"\nattempt {error.get('attempt', '?')}: {error.get('exception')}: {error.get('message')}")
        printer.line(str(error.get("traceback") or "").rstrip())


def _masked(task: TaskDetails) -> dict[str, Any]:
    """Return the task with its secrets masked, as the admin shows them."""
    load_task_modules()
    shown = asdict(task)
    masker = masker_of_call(task.name, shown["args"], shown["kwargs"], task.backend)
    shown["args"] = masker.positional(shown["args"])
    shown["kwargs"] = masker.keyword(shown["kwargs"])
    shown["return_value"] = masker.result(shown["return_value"])
    for name in ("headers", "progress"):
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
    if printer.as_json:
        printer.document({"id": result.id, "task": options["name"], "queue": given.queue_name})
    else:
        printer.line(f"Enqueued: {result.id} in queue {given.queue_name}.")


def _no_task(name: str, error: TaskNotRegistered) -> CommandError:
    """Return what to say of a name that no task has, with those that are close."""
    meant = did_you_mean_path(name, registered_names())
    if "." in name:
        return CommandError(f"{error}. {meant}".strip())
    return CommandError(f"No task is called {name!r}. {meant}Give the whole path, such as shop.tasks.{name}.")


def _run(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    ids = [one_id(inspector, text) for text in options["ids"]]
    _report(printer, len(ids), [inspector.tasks.run(ids)], "queued to run now")


def _retry(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=FAILED)
    if selection.count > 1:
        _ask(printer, options, f"Retry {counted(selection.count, 'task')}?", "retry", "retried")
    _report(printer, selection.count, _each(printer, selection, inspector.tasks.retry), "queued again")


def _cancel(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=UNFINISHED)
    if selection.count > 1:
        _ask(printer, options, f"Cancel {counted(selection.count, 'task')}?", "cancel", "cancelled")
    totals: Counter[str] = Counter()
    for ids in selection.pages():
        totals.update(asdict(inspector.tasks.cancel(ids, by="asyncq", reason=options["reason"])))
    missing = selection.count - totals.total()
    if printer.as_json:
        counts = {name: totals[name] for name in ("cancelled", "asked", "over")}
        printer.document({"chosen": selection.count, **counts, "missing": max(missing, 0)})
    else:
        printer.line(
            f"{counted(totals['cancelled'], 'task')} cancelled, {totals['asked']:,} running and asked to stop, "
            f"{totals['over']:,} had finished."
        )
    if selection.count and not totals["cancelled"] + totals["asked"]:
        raise CommandError("No task was cancelled: all had finished, or have no row.")


def _delete(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    selection = Selection(inspector, options, states=FINAL)
    if selection.count:
        question = f"Delete {counted(selection.count, 'task')}? This cannot be undone."
        _ask(printer, options, question, "delete", "deleted")
    _report(printer, selection.count, _each(printer, selection, inspector.tasks.delete), "deleted")


def _ask(printer: Printer, options: dict[str, Any], question: str, to_do: str, done: str) -> None:
    if not options["yes"]:
        printer.ask(f"{question} [y/N] ", to_do, done)


def _each(printer: Printer, selection: Selection, change: Callable[[list[UUID]], Outcome]) -> list[Outcome]:
    progress = printer.progress(selection.count)
    outcomes = []
    for ids in selection.pages():
        outcomes.append(change(ids))
        progress.add(len(ids))
    progress.close()
    return outcomes


def _report(printer: Printer, chosen: int, outcomes: list[Outcome], word: str) -> None:
    """Print how many tasks were changed, and why others were not. Raises: CommandError when none was."""
    done = sum(len(outcome.done) for outcome in outcomes)
    refused = Counter(reason for outcome in outcomes for reason in outcome.refused.values())
    if printer.as_json:
        printer.document({"chosen": chosen, "done": done, "refused": dict(refused.most_common())})
    else:
        printer.line(f"{done:,} of {counted(chosen, 'task')} {word}.")
        for reason, count in refused.most_common():
            printer.line(f"  {count:,}: {reason}")
    if chosen and not done:
        raise CommandError(f"No task was {word}.")


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    check_task(options["name"])
    switch(printer, inspector.tasks, "task", options)


VERBS: dict[str, Callable[[Printer, Inspector, dict[str, Any]], None]] = {
    "list": _list,
    "failures": _failures,
    "show": _show,
    "enqueue": _enqueue,
    "run": _run,
    "retry": _retry,
    "cancel": _cancel,
    "delete": _delete,
    "pause": _switch,
    "resume": _switch,
}
