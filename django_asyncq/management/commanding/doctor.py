"""`asyncq doctor`: what each use of another task queue in a project becomes here. It asks no store."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from ...doctor.printing import VOCABULARIES, as_document, lines_of, report_on
from .printing import Printer, Verb, arg, usage_error

PATH = arg("path", metavar="PATH", type=Path, help="the folder of the project, or one file")


def _doctor(queue: str, printer: Printer, inspector: object, options: dict[str, Any]) -> None:
    """Print the report of a project, which is only read. Raises: CommandError for a path that is not there."""
    path = options["path"]
    if not path.exists():
        raise usage_error(f"There is no {path}.")
    report = report_on(queue, path, sys.stderr)
    printer.document(as_document(report))
    for line in lines_of(report):
        printer.line(line)


VERBS = [
    Verb(
        partial(_doctor, queue), queue, f"what each use of {queue} in a project becomes here", [PATH], has_backend=False
    )
    for queue in VOCABULARIES
]
