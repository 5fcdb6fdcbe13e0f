"""`asyncq rates`: list and show rates. They are changed in the admin, or by a row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management import CommandError

from ...core.names import did_you_mean
from ...core.registry import load_task_modules
from ...observe.inspector import Inspector
from .printing import Printer, Verb, arg

COLUMNS = ("rate", "interval_seconds", "burst", "has_row", "waiting", "refused")


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    load_task_modules()
    found = inspector.rates.all()
    printer.document({"rates": found})
    printer.rows(found, COLUMNS, none="no rate has a row, a declaration or a waiting task")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    load_task_modules()
    rate = inspector.rates.get(options["name"])
    if rate is None:
        known = [each.rate for each in inspector.rates.all()]
        raise CommandError(
            f"no rate is called {options['name']!r}. {did_you_mean(options['name'], known)}`asyncq rates list` shows "
            f"those with a row, a declaration or a waiting task"
        )
    printer.document(rate)
    printer.fields(asdict(rate))


NAME = arg("name", metavar="NAME", help="the rate")
VERBS = (
    Verb(_list, "list", "list the rates with their numbers and how many tasks wait", has_backend=False),
    Verb(_show, "show", "show a rate, and when a start is free", [NAME], has_backend=False),
)
