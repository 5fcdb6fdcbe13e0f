"""`asyncq bulk`: retry, cancel or delete every task that matches; show, pause and stop such actions."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...bulk_actions import MOST_PER_SECOND, action_of, pause_bulk, preview, resume_bulk, start_bulk, stop_bulk
from ...models import BulkAction, BulkKind, BulkState
from ...storage.matching import REASONS, STATES, STATES_OF, checked
from ...storage.routing import rows_of
from ..reading import whole_number
from ..wording import counted
from .printing import Printer, add_json, add_yes, usage_error

REFRESH_SECONDS = 1.0
MOST_LISTED = 50
BY = "manage.py asyncq"
VERBS = {"pause": pause_bulk, "resume": resume_bulk, "stop": stop_bulk}
OVER = (BulkState.STOPPED, BulkState.FINISHED)
# Option → key of the filter, and its help.
FILTERS = {
    "state": ("state", f"in this state: {', '.join(STATES)} (default: all that the action takes)"),
    "reason": ("reason", f"failed for this reason: {', '.join(REASONS)}"),
    "task": ("name", "of this name, such as shop.tasks.charge"),
    "queue": ("queue_name", "of this queue"),
    "backend": ("backend", "of this alias in TASKS"),
    "gate": ("gate", "of this gate"),
    "error": ("last_exception", "whose last error is of this class, such as builtins.ValueError"),
    "group": ("group", "of this group"),
    "id": ("ids", "with this id"),
    "enqueued-since": ("enqueued_since", "enqueued at this time or later, such as 2026-01-31T12:00:00+00:00"),
    "enqueued-until": ("enqueued_until", "enqueued before this time"),
    "finished-since": ("finished_since", "finished at this time or later"),
    "finished-until": ("finished_until", "finished before this time"),
}


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    start = verbs.add_parser("start", help="start an action on every task that matches")
    start.add_argument("kind", choices=BulkKind.values, help="what to do with each task")
    for option, (key, text) in FILTERS.items():
        # A time is one value; of the others, several are an "or".
        action: Any = "store" if key.endswith(("_since", "_until")) else "append"
        start.add_argument(f"--{option}", dest=key, action=action, metavar=option.upper(), help=f"only tasks {text}")
    start.add_argument(
        "--rate",
        type=whole_number(1),
        metavar="N",
        help=f"tasks a second, at most {MOST_PER_SECOND:,} (default: setting)",
    )
    start.add_argument("--dry-run", action="store_true", help="only count; start nothing")
    add_yes(start, "start")
    show = verbs.add_parser("show", help="show one action")
    show.add_argument("--watch", action="store_true", help="show its progress until it is over")
    for verb, text in (
        ("pause", "begin no further page"),
        ("resume", "continue a paused one"),
        ("stop", "stop it for good"),
    ):
        verbs.add_parser(verb, help=text)
    verbs.add_parser("list", help=f"show the latest {MOST_LISTED} actions")
    for name, each in verbs.choices.items():
        if name not in ("start", "list"):
            each.add_argument("id", help="of the action, as `bulk list` shows it")
        add_json(each)


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says, and print the action."""
    verb = options["verb"]
    if verb == "start":
        _start(printer, options)
    elif verb == "list":
        _list(printer)
    elif verb == "show":
        _show(printer, _watched(printer, options["id"]) if options["watch"] else action_of(options["id"]))
    else:
        _show(printer, VERBS[verb](options["id"]))


def _start(printer: Printer, options: dict[str, Any]) -> None:
    kind = options["kind"]
    matching = {key: options[key] for key, _ in FILTERS.values() if options.get(key)}
    if not matching:
        example = STATES_OF[kind][0]
        raise usage_error(f"Say which tasks: give at least one filter, such as --state {example}; --help lists them.")
    found = preview(kind, matching)
    if options["dry_run"]:
        _print_preview(printer, kind, checked(kind, matching), found)
        return
    if not options["yes"]:
        question = f"{kind.capitalize()} {counted(found.total, 'task')}? [y/N] "
        printer.ask(question, "start it, or --dry-run to count", "started")
    _show(printer, start_bulk(kind, matching, by=BY, rows_per_second=options["rate"]))


def _print_preview(printer: Printer, kind: str, matching: dict[str, Any], found: Any) -> None:
    if printer.as_json:
        examples = [str(row.id) for row in found.examples]
        document = {"dry_run": True, "kind": kind, "matching": matching, "total": found.total, "examples": examples}
        printer.document(document)
        return
    if found.examples:
        head = ["id", "task", "queue", "enqueued at", "last error"]
        rows = [[row.id, row.name, row.queue_name, row.enqueued_at, row.last_exception] for row in found.examples]
        printer.table(head, rows)
    printer.line(f"{counted(found.total, 'task')} match; {kind} would change them.")


def _list(printer: Printer) -> None:
    actions = list(rows_of(BulkAction).order_by("-id")[:MOST_LISTED])
    if printer.as_json:
        printer.document([_as_dict(action) for action in actions])
    elif actions:
        head = ["id", "kind", "state", "total", "done", "refused", "left", "by", "created at"]
        printer.table(
            head,
            [
                [
                    each.id,
                    each.kind,
                    each.state,
                    each.total,
                    each.done,
                    each.refused,
                    each.left,
                    each.created_by,
                    each.created_at,
                ]
                for each in actions
            ],
        )
    else:
        printer.line("no actions")


def _show(printer: Printer, action: BulkAction) -> None:
    if printer.as_json:
        printer.document(_as_dict(action))
        return
    for name, value in _as_dict(action).items():
        if value not in (None, "", [], {}):
            text = "; ".join(f"{key} = {each}" for key, each in value.items()) if isinstance(value, dict) else value
            printer.line(f"{name.replace('_', ' ')}: {text}")


def _watched(printer: Printer, id: str) -> BulkAction:
    """Print the progress of an action until it is over, or paused; return it."""
    action = action_of(id)
    progress = printer.progress(action.total)
    while True:
        progress.add(action.done + action.refused - progress.done)
        if action.state in OVER:
            break
        time.sleep(REFRESH_SECONDS)
        action = action_of(id)
        if action.state == BulkState.PAUSED:
            progress.close()
            raise CommandError(f"The action {action.pk} is paused: continue it with `bulk resume`.")
    progress.close()
    return action


def _as_dict(action: BulkAction) -> dict[str, Any]:
    """Return what people want to know of an action."""
    names = ("id", "kind", "state", "matching", "rows_per_second", "total", "done", "refused", "left", "created_by")
    values = {name: getattr(action, name) for name in (*names, "created_at", "finished_at")}
    return {
        **values,
        "id": str(action.id),
        "full_gates": sorted(action.waiting_at),
        "errors": action.error.splitlines(),
    }
