"""`asyncq schedules`: list, run, enable and disable schedules."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.core.management.base import CommandError

from ...core.compat import InvalidTask
from ...exceptions import BrokerUnavailable
from ...observe.inspector import Inspector
from ...scheduling.scheduler import resume_all
from ...storage import identity
from ..reading import whole_number
from .printing import Printer, Verb, arg

HEAD = ("name", "task", "timing", "zone", "enabled", "next occurrence at", "latest", "note")


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found, paused_at = inspector.schedules.all(), identity.schedules_paused_at()
    foreign = None
    # The rows are shown all the same.
    with suppress(BrokerUnavailable):
        foreign = inspector.schedules.foreign()
    printer.document({"schedules": found, "foreign": foreign, "paused_at": paused_at})
    # A disabled one keeps the time at which it would have fired next.
    rows = [
        [
            each.name, each.task, each.timing, each.zone, each.enabled,
            each.next_occurrence_at if each.enabled else None, each.latest, "",
        ]
        for each in found
        if not each.is_retired
    ]  # fmt: skip
    rows += [
        [
            each.id or None, each.task or None, each.timing or None, None, None, each.next_occurrence_at, each.latest,
            "of another program" if each.is_readable else "of another program, cannot be read",
        ]
        for each in foreign or ()
    ]  # fmt: skip
    printer.table(HEAD, rows)
    printer.lines(
        "" if rows else "no schedules",
        "Redis is unreachable, so schedules of other programs are not shown." if foreign is None else "",
    )
    if paused_at is not None:
        printer.line("All schedules are paused. To resume them: manage.py asyncq schedules resume --all")


def _history(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    occurrences = inspector.schedules.history(options["name"], most=options["limit"])
    printer.document({"schedule": options["name"], "occurrences": occurrences})
    printer.rows(occurrences, ("occurs_at", "outcome", "by_person", "task"), none="no occurrences")


def _run_now(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    try:
        id = inspector.schedules.run(options["name"])
    except InvalidTask as error:
        raise CommandError(f"Not run: {error}") from error
    printer.document({"schedule": options["name"], "task": id})
    printer.line(f"Enqueued: {id}.")


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name, verb, schedules = options["name"], options["verb"], inspector.schedules
    changed = schedules.enable(name) if verb == "enable" else schedules.disable(name)
    printer.document({"schedule": name, "enabled": verb == "enable", "changed": changed})
    printer.line(f"{name}: {'' if changed else 'already '}{verb}d.")


def _resume(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    changed = resume_all()
    printer.document({"changed": changed})
    printer.line("All schedules are running." if changed else "All schedules are running already.")


NAME = arg("name", metavar="NAME", help="the schedule")
LIMIT = arg("--limit", type=whole_number(1), default=20, metavar="N", help="how many (default: 20)")
ALL = arg("--all", action="store_true", required=True, help="of every schedule; there is no other pause")
VERBS = (
    Verb(_list, "list", "list the schedules, also those of other programs", has_backend=False),
    Verb(_history, "history", "show the latest occurrences of a schedule", [NAME, LIMIT], has_backend=False),
    Verb(_run_now, "run", "queue the task of a schedule now", [NAME], has_backend=False),
    Verb(_switch, "enable", "let a schedule fire again", [NAME], has_backend=False),
    Verb(_switch, "disable", "let a schedule fire no more", [NAME], has_backend=False),
    Verb(_resume, "resume", "end the pause of all schedules, as a copied database has it", [ALL], has_backend=False),
)
