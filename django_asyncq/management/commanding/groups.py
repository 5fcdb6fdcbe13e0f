"""`asyncq groups`: the groups that wait to be aggregated."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ...inspector import Inspector
from .printing import Printer, add_verb, verbs_of


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    add_verb(verbs_of(parser), "list", "list the groups with the number of messages in each")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Print the groups."""
    found = Inspector(options["backend"]).queues.groups()
    if printer.as_json:
        printer.document({"groups": found})
    else:
        printer.rows(found, ("backend", "queue", "group", "size"), none="no groups")
