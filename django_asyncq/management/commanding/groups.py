"""`asyncq groups`: the groups that wait to be aggregated."""

from __future__ import annotations

from typing import Any

from ...observe.inspector import Inspector
from .printing import Printer, Verb


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.queues.groups()
    printer.document({"groups": found})
    printer.rows(found, ("backend", "queue", "group", "size"), none="no groups")


VERBS = (Verb(_list, "list", "list the groups with the number of messages in each"),)
