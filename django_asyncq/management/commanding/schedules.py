"""`asyncq schedules`: list, run, enable and disable schedules."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from django.core.management.base import CommandError

from ...compat import InvalidTask
from ...inspector import Inspector
from ..reading import whole_number
from .printing import Printer, add_verb, verbs_of

COLUMNS = ("name", "task", "timing", "zone", "enabled", "next_occurrence_at", "latest")


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    add_verb(verbs, "list", "list the schedules", backend=False)
    for name, text in (
        ("history", "show the latest occurrences of a schedule"),
        ("run", "queue the task of a schedule now"),
        ("enable", "let a schedule fire again"),
        ("disable", "let a schedule fire no more"),
    ):
        verb = add_verb(verbs, name, text, backend=False)
        verb.add_argument("name", metavar="NAME", help="the schedule")
        if name == "history":
            verb.add_argument("--limit", type=whole_number(1), default=20, metavar="N", help="how many (default: 20)")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says."""
    schedules, verb = Inspector().schedules, options["verb"]
    if verb == "list":
        found = schedules.all()
        if printer.as_json:
            printer.document({"schedules": found})
        else:
            # A disabled one keeps the time at which it would have fired next.
            shown = [each if each.enabled else replace(each, next_occurrence_at=None) for each in found]
            printer.rows([each for each in shown if not each.is_retired], COLUMNS, none="no schedules")
        return
    name = options["name"]
    if verb == "history":
        occurrences = schedules.history(name, most=options["limit"])
        if printer.as_json:
            printer.document({"schedule": name, "occurrences": occurrences})
        else:
            printer.rows(occurrences, ("occurs_at", "outcome", "by_person", "task"), none="no occurrences")
        return
    if verb == "run":
        try:
            id = schedules.run(name)
        except InvalidTask as error:
            raise CommandError(f"Not run: {error}") from error
        _print(printer, {"schedule": name, "task": id}, f"Enqueued: {id}.")
        return
    changed = schedules.enable(name) if verb == "enable" else schedules.disable(name)
    word = "" if changed else "already "
    _print(printer, {"schedule": name, "enabled": verb == "enable", "changed": changed}, f"{name}: {word}{verb}d.")


def _print(printer: Printer, document: dict[str, Any], line: str) -> None:
    if printer.as_json:
        printer.document(document)
    else:
        printer.line(line)
