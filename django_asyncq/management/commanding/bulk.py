"""`asyncq bulk`: retry, cancel or delete every task that matches; list, show and stop such actions."""

from __future__ import annotations

import time
from typing import Any

from ...control import find_bulk, preview_bulk, start_bulk, stop_bulk
from ...core.options import MOST_PER_SECOND
from ...models import BulkAction, BulkKind, BulkState
from ...observe.inspector import Inspector
from ...storage.matching import REASONS, STATES, STATES_OF
from ...storage.routing import rows_of
from ..reading import counted, whole_number
from .printing import Printer, Verb, arg, flag, option, usage_error, yes

REFRESH_SECONDS = 1.0
MOST_LISTED = 50
BY = "manage.py asyncq"
COLUMNS = ("id", "kind", "state", "total", "done", "refused", "left", "created_by", "created_at")
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
    "batch": ("batch_id", "that ran in the batch with this id"),
    "workflow": ("workflow_id", "of the workflow with this id"),
    "id": ("ids", "with this id"),
    "enqueued-since": ("enqueued_since", "enqueued at this time or later, such as 2026-01-31T12:00:00+00:00"),
    "enqueued-until": ("enqueued_until", "enqueued before this time"),
    "finished-since": ("finished_since", "finished at this time or later"),
    "finished-until": ("finished_until", "finished before this time"),
}


def _start(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    kind = options["kind"]
    matching = {key: options[key] for key, _ in FILTERS.values() if options.get(key)}
    if not matching:
        example = STATES_OF[kind][0]
        raise usage_error(f"Say which tasks: give at least one filter, such as --state {example}; --help lists them.")
    found = preview_bulk(kind, matching)
    if options["dry_run"]:
        examples = [str(row.id) for row in found.examples]
        printer.document({"dry_run": True, "kind": kind, **found._asdict(), "examples": examples})
        head = ["id", "task", "queue", "enqueued at", "last error"]
        rows = [[row.id, row.name, row.queue_name, row.enqueued_at, row.last_exception] for row in found.examples]
        printer.table(head, rows)
        printer.line(f"{counted(found.total, 'task')} match; {kind} would change them.")
        return
    printer.ask(f"{kind.capitalize()} {counted(found.total, 'task')}?", "start it, or --dry-run to count", "started")
    _print(printer, start_bulk(kind, matching, by=BY, rows_per_second=options["rate"]))


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    actions = list(rows_of(BulkAction).order_by("-id")[:MOST_LISTED])
    printer.document([_as_dict(action) for action in actions])
    printer.rows(actions, COLUMNS, none="no actions")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    """Print an action; with --watch its progress until it is over, first."""
    action = find_bulk(options["id"])
    if options["watch"]:
        progress = printer.progress(action.total)
        progress.add(action.done + action.refused)
        while action.state == BulkState.RUNNING:
            time.sleep(REFRESH_SECONDS)
            action = find_bulk(options["id"])
            progress.add(action.done + action.refused - progress.done)
        progress.close()
    _print(printer, action)


def _stop(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    _print(printer, stop_bulk(options["id"]))


def _print(printer: Printer, action: BulkAction) -> None:
    printer.document(_as_dict(action))
    for name, value in _as_dict(action).items():
        if value not in (None, "", [], {}):
            text = "; ".join(f"{key} = {each}" for key, each in value.items()) if isinstance(value, dict) else value
            printer.line(f"{name.replace('_', ' ')}: {text}")


def _as_dict(action: BulkAction) -> dict[str, Any]:
    """Return what people want to know of an action."""
    return {
        **{name: getattr(action, name) for name in (*COLUMNS, "matching", "rows_per_second", "finished_at")},
        "full_gates": sorted(action.full_gates),
        "errors": action.error.splitlines(),
    }


# A time is one value; of the others, several are an "or".
CHOICES = [
    option(
        f"--{name}",
        name.upper(),
        f"only tasks {text}",
        dest=key,
        action="store" if key.endswith(("_since", "_until")) else "append",
    )
    for name, (key, text) in FILTERS.items()
]
KIND = arg("kind", choices=BulkKind.values, help="what to do with each task")
RATE_HELP = f"tasks a second, at most {MOST_PER_SECOND:,} (default: setting)"
RATE = arg("--rate", type=whole_number(1), metavar="N", help=RATE_HELP)
COUNT = flag("--dry-run", "only count; start nothing")
START = [KIND, *CHOICES, RATE, COUNT, yes("start")]
UNTIL_OVER = flag("--watch", "show its progress until it is over")
ID = arg("id", help="of the action, as `bulk list` shows it")
VERBS = (
    Verb(_start, "start", "start an action on every task that matches", START, has_backend=False),
    Verb(_show, "show", "show one action", [UNTIL_OVER, ID], has_backend=False),
    Verb(_stop, "stop", "stop one action for good", [ID], has_backend=False),
    Verb(_list, "list", f"show the latest {MOST_LISTED} actions", has_backend=False),
)
